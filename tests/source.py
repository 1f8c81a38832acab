"""The source files of the project, and what each imports: read as text, never run."""

import ast
import getpass
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRATCH = Path(tempfile.gettempdir()) / f"kohya-tests-{getpass.getuser()}"  # what tests keep from run to run
FOLDERS = ("library", "kohya_gui", "sd-scripts")
OURS = ("library", "kohya_gui")


@dataclass(frozen=True)
class Import:
    """One imported module, the line that does it, and when it happens."""

    name: str
    line: int
    when: str  # "load": with the module; "call": inside a function; "never": for the type checker only


def files() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def module(path: Path) -> str:
    """library/runs/__init__.py -> library.runs; sd-scripts/flux_train.py -> sd-scripts.flux_train."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once for all tests that look at it; nobody changes it."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree: collecting them takes longer than most tests' own look at them."""
    return tuple(ast.walk(tree(path)))


@cache
def imports(path: Path) -> list[Import]:
    """All imports of a file; in `from library.families import base` the module library.families.base, if it is one."""
    return list(_walk(tree(path), "load"))


def _walk(node: ast.AST, when: str) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from (Import(name, child.lineno, when) for name in _targets(child))
        elif isinstance(child, ast.expr):
            continue  # imports are statements, and most nodes are not
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.body:
                yield from _walk(ast.Module([part], []), "never")
            for part in child.orelse:
                yield from _walk(ast.Module([part], []), when)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _walk(child, "never" if when == "never" else "call")
        else:
            yield from _walk(child, when)


def _targets(node: ast.ImportFrom) -> Iterator[str]:
    """A `from x import y` means x.y where that is a module, else x. Relative imports are lint errors (TID)."""
    base = node.module or ""
    for alias in node.names:
        inner = ROOT.joinpath(*base.split("."), alias.name)
        is_module = inner.with_suffix(".py").exists() or (inner / "__init__.py").exists()
        yield f"{base}.{alias.name}" if is_module else base
