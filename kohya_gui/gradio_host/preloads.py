"""Gradio's scripts and styles that a page needs, so that a browser can request all of them at once.

Gradio's first script imports a second, this a third, and that one those of each component, with twenty small style
sheets; each starts when the previous one was parsed, so a browser mostly waited. The scripts themselves list their
imports, as their bundler wrote them.
"""

import hashlib
import re
from collections.abc import Iterable

from kohya_gui.gradio_host.assets import ASSETS_FOLDER

_FIRST = re.compile(r'src="\./assets/(index-[\w-]+\.js)"')
_LIST = re.compile(r"m\.f=\[([^\]]*)\]")
_PART = re.compile(r"(?:base|example|component):\(\)=>\w+\(\(\)=>import\(`\./([\w.-]+)`\)[^\[]*\[([\d,]*)\]")


# Why: docs/decisions/2026-11-23-scripts-are-one-file.md
def find_needed_files(kinds: Iterable[str]) -> list[str]:
    """Names of files in Gradio's assets folder, the most urgent first; none if they are not found."""
    try:
        first = _FIRST.findall((ASSETS_FOLDER.parent / "index.html").read_text(encoding="utf-8"))
        frame = _read_imports(first[0])
        blocks = _read_imports(frame[0])
        core = next(name for name in blocks if name.startswith("core-") and name.endswith(".js"))
        names = [*first, *frame, *blocks, *_component_files(core, kinds)]
    except (OSError, IndexError, StopIteration):
        return []
    return [name for name in dict.fromkeys(names) if (ASSETS_FOLDER / name).is_file() and not name.startswith("Login-")]


def head(names: Iterable[str]) -> tuple[str, str, dict[str, bytes]]:
    """Return the lines of a page's head that request these files: first scripts, and then style sheets, which come
    behind Gradio's own head; and the contents of additional addresses.

    The style sheets are merged. Gradio's scripts load none that the page links to: these links are disabled.
    """
    scripts = [name for name in names if name.endswith(".js")]
    styles = [name for name in names if name.endswith(".css") and _stands_alone(name)]
    lines = "".join(f'<link rel="modulepreload" href="./assets/{name}">' for name in scripts)
    if not styles:
        return lines, "", {}
    whole = b"\n".join((ASSETS_FOLDER / name).read_bytes() for name in styles)
    address = f"/scripts/{hashlib.sha256(whole).hexdigest()[:16]}/gradio.css"
    sheets = [f'<link rel="stylesheet" href=".{address}">']
    sheets += [f'<link rel="stylesheet" crossorigin disabled href="./assets/{name}">' for name in styles]
    return lines, "".join(sheets), {address: whole}


def _stands_alone(name: str) -> bool:
    return not name.startswith("index-") and not re.search(r"url\((?!\s*[\"']?(?:data:|#))|@import", _text(name))


def _text(name: str) -> str:
    return (ASSETS_FOLDER / name).read_text(encoding="utf-8")


def _read_imports(name: str) -> list[str]:
    listing = _LIST.search(_text(name))
    return [part.strip('"').removeprefix("./") for part in listing[1].split(",")] if listing else []


def _component_files(core: str, kinds: Iterable[str]) -> list[str]:
    """Return the files of components by their kind, such as "textbox"."""
    text, imports, names = _text(core), _read_imports(core), []
    for kind in kinds:
        start = re.search(rf"[,{{]{re.escape(kind)}:\{{", text)
        for name, numbers in _PART.findall(text[start.end() : text.index("}", start.end())]) if start else ():
            names += [name, *(imports[int(number)] for number in numbers.split(",") if number)]
    return names
