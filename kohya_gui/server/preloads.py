"""What of Gradio's scripts and styles a page needs, so that a browser can ask for all of it at once.

Gradio's first script imports a second, this a third, and that one those of each component, with twenty small style
sheets; each begins when the one before has been read, so a browser mostly waited. Which file needs which stands in
them, as their bundler wrote it.
"""

import hashlib
import re
from collections.abc import Iterable

from kohya_gui.server.assets import ASSETS_FOLDER

_FIRST = re.compile(r'src="\./assets/(index-[\w-]+\.js)"')
_LIST = re.compile(r"m\.f=\[([^\]]*)\]")
_PART = re.compile(r"(?:base|example|component):\(\)=>\w+\(\(\)=>import\(`\./([\w.-]+)`\)[^\[]*\[([\d,]*)\]")


# Why: docs/decisions/2026-11-23-scripts-are-one-file.md
def needed(kinds: Iterable[str]) -> list[str]:
    """Names of files in Gradio's folder of assets, those wanted first in front; none where they are not found."""
    try:
        first = _FIRST.findall((ASSETS_FOLDER.parent / "index.html").read_text(encoding="utf-8"))
        frame = _module_numbers(first[0])
        blocks = _module_numbers(frame[0])
        core = next(name for name in blocks if name.startswith("core-") and name.endswith(".js"))
        found = [*first, *frame, *blocks, *_of_components(core, kinds)]
    except (OSError, IndexError, StopIteration):
        return []
    return [name for name in dict.fromkeys(found) if (ASSETS_FOLDER / name).is_file() and not name.startswith("Login-")]


def preload_head(names: Iterable[str]) -> tuple[str, str, dict[str, bytes]]:
    """The lines of a page's head that ask for these files, first scripts and then style sheets, whose place is behind
    those of Gradio's own head, and what answers at addresses that the lines have besides.

    The style sheets are one. Gradio's scripts load none that the page has a link to: these links are switched off.
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
    """Whether a style sheet names no file by where it lies, and is not in Gradio's own head."""
    return not name.startswith("index-") and not re.search(r"url\((?!\s*[\"']?(?:data:|#))|@import", _read_asset(name))


def _read_asset(name: str) -> str:
    return (ASSETS_FOLDER / name).read_text(encoding="utf-8")


def _module_numbers(name: str) -> list[str]:
    """What a script may import, by the numbers that it has for them."""
    match = _LIST.search(_read_asset(name))
    return [part.strip('"').removeprefix("./") for part in match[1].split(",")] if match else []


def _of_components(core: str, kinds: Iterable[str]) -> list[str]:
    """The files of components by their kind, such as "textbox"."""
    text, known, found = _read_asset(core), _module_numbers(core), []
    for kind in kinds:
        start = re.search(rf"[,{{]{re.escape(kind)}:\{{", text)
        for name, numbers in _PART.findall(text[start.end() : text.index("}", start.end())]) if start else ():
            found += [name, *(known[int(number)] for number in numbers.split(",") if number)]
    return found
