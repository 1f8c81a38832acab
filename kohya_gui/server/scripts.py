"""The page's own script, which the head of the page's HTML names."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from kohya_gui.gradio_host.assets import App, Scope
from library.config.json_types import JsonObject

PAGE_FOLDER = Path(__file__).parents[1]

_IMPORT = re.compile(r'^import (?:(\{[^}]*\}|\* as \w+) from )?"(\.[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


# Why: docs/decisions/2026-11-23-scripts-are-one-file.md
def bundle_modules(folder: Path, first: str) -> str:
    """Bundle `first` and all that it imports: each module as a function that returns its exports, in the order in which
    a browser would run them. Raises ValueError for circular imports and unsupported kinds of imports."""
    modules: dict[str, str] = {}
    _append_module(folder, first, modules, ())
    entries = ", ".join(f'"{name}": {_variable(name)}' for name in modules)
    return "".join(modules.values()) + f"export const modules = {{ {entries} }};\n"


def _append_module(folder: Path, name: str, modules: dict[str, str], above: tuple[str, ...]) -> None:
    """Append a module after those that it imports."""
    if name in above:
        raise ValueError(f"{name} imports itself by way of {' and '.join(above[above.index(name) + 1 :])}")
    if name in modules:
        return
    text = (folder / name).read_text(encoding="utf-8")
    path_of_import = {imported: _resolved(name, imported) for _, imported in _IMPORT.findall(text)}
    for other in path_of_import.values():
        _append_module(folder, other, modules, (*above, name))

    def as_constant(match: re.Match[str]) -> str:
        names, module = match[1], _variable(path_of_import[match[2]])
        if not names:
            return ""
        return f"const {names.removeprefix('* as ') if names[0] == '*' else names.replace(' as ', ': ')} = {module};"

    exported = [name for _, name in _EXPORT.findall(text)]
    text = _EXPORT.sub(r"\1", _IMPORT.sub(as_constant, text))
    if leftover := _LEFT.search(text):
        raise ValueError(f"{name}: {leftover[0]}")
    text = text.replace("import.meta.url", f'new URL("{name}", import.meta.url).href')
    modules[name] = (
        f"// {name}\nconst {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
    )


def _resolved(name: str, imported: str) -> str:
    """Resolve a relative import of a module."""
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / imported).parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))


def _addressed() -> tuple[str, bytes]:
    script = bundle_modules(PAGE_FOLDER, "main.js").encode()
    return f"/scripts/{hashlib.sha256(script).hexdigest()[:16]}/main.js", script


ADDRESS, SCRIPT = _addressed()
SCRIPT_FILES = {ADDRESS: SCRIPT}

# Relative, so that it works below a proxy's path. The preload comes before everything that Gradio needs.
TAGS = f'<link rel="modulepreload" href=".{ADDRESS}"><script type="module" src=".{ADDRESS}"></script>'


# Why: docs/decisions/2026-11-22-scripts-are-modules.md
class ScriptTags:
    """Name the script in the page's HTML.

    Gradio's own `head` is only inserted long after its script has started. Modules run in the order of the HTML, and
    Gradio calls functions of main.js: so our tags come first.
    """

    def __init__(self, app: App, also: str = "", last: str = "", now: Callable[[], str] = str) -> None:
        # `also` follows the script in the head, and `last` ends the head: of two style sheets, the later one wins.
        # `now` returns additions for each response.
        self.app, self.tags, self.last, self.now = app, (TAGS + also).encode(), last.encode(), now

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Add the tags to an ASGI response."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != "/":
            await self.app(scope, receive, send)
            return
        start: JsonObject = {}
        body = b""

        async def put_in(message: Any) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                start = message
                return
            if message["type"] != "http.response.body":  # extra messages for Starlette's test client
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                whole = body.replace(b"<head>", b"<head>" + self.tags, 1)
                whole = whole.replace(b"</head>", self.last + self.now().encode() + b"</head>", 1)
                headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
                await send({**start, "headers": [*headers, (b"content-length", str(len(whole)).encode())]})
                await send({"type": "http.response.body", "body": whole})

        await self.app(scope, receive, put_in)
