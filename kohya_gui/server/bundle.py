"""Bundle the page's modules into one script, so that a browser sends one request."""

import re
from pathlib import Path, PurePosixPath

_IMPORT = re.compile(r'^import (?:(\{[^}]*\}|\* as \w+) from )?"(\.[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const|class) (\w+))", re.MULTILINE)
_LEFT = re.compile(r"^(?:import|export)\b.*", re.MULTILINE)


# Why: docs/decisions/2026-11-23-scripts-are-one-file.md
def bundle(folder: Path, first: str) -> str:
    """Bundle `first` and all that it imports: each module as a function that returns its exports, in the order in which
    a browser would run them. Raises ValueError for circular imports and unsupported kinds of imports."""
    made: dict[str, str] = {}
    _add(folder, first, made, ())
    entries = ", ".join(f'"{name}": {_variable(name)}' for name in made)
    return "".join(made.values()) + f"export const modules = {{ {entries} }};\n"


def _add(folder: Path, name: str, made: dict[str, str], above: tuple[str, ...]) -> None:
    """Append a module after those that it imports."""
    if name in above:
        raise ValueError(f"{name} imports itself by way of {' and '.join(above[above.index(name) + 1 :])}")
    if name in made:
        return
    text = (folder / name).read_text(encoding="utf-8")
    named = {wanted: _resolved(name, wanted) for _, wanted in _IMPORT.findall(text)}
    for other in named.values():
        _add(folder, other, made, (*above, name))

    def bound(found: re.Match[str]) -> str:
        names, module = found[1], _variable(named[found[2]])
        if not names:
            return ""
        return f"const {names.removeprefix('* as ') if names[0] == '*' else names.replace(' as ', ': ')} = {module};"

    exported = [name for _, name in _EXPORT.findall(text)]
    text = _EXPORT.sub(r"\1", _IMPORT.sub(bound, text))
    if left := _LEFT.search(text):
        raise ValueError(f"{name}: {left[0]}")
    text = text.replace("import.meta.url", f'new URL("{name}", import.meta.url).href')
    made[name] = (
        f"// {name}\nconst {_variable(name)} = (() => {{\n{text}\nreturn {{ {', '.join(exported)} }};\n}})();\n"
    )


def _resolved(name: str, wanted: str) -> str:
    """Resolve a relative import of a module."""
    parts: list[str] = []
    for part in (PurePosixPath(name).parent / wanted).parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))
