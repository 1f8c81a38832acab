"""Bundle the page's modules into one script, so that a browser sends one request."""

import re
from pathlib import Path, PurePosixPath

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
