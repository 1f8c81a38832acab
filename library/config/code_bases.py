"""The base classes of a class according to source files; runs none of the code.

A class may also result from a call, a decorator or a compiled module, which cannot be known without running it.
"""

import ast
import builtins
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError

MAX_SOURCE_BYTES = 3_000_000  # maximum bytes of a source file
MAX_BASES_DEPTH = 30  # maximum depth of classes and modules to follow
# Modules that define the base classes expected by options, by class name.
EXPECTED = {
    "Optimizer": ("torch.optim", "torch.optim.optimizer"),
    "LRScheduler": ("torch.optim.lr_scheduler",),
}
Known = bool | None  # whether something derives from a class; None if only running it would show


def derives(module: str, name: str, base: str) -> Known:
    # The limit ends imports in a circle.
    return _derives(module, name, base, MAX_BASES_DEPTH)


def _derives(module: str, name: str, base: str, depth_left: int) -> Known:
    if module in EXPECTED[base] and name in (base, f"_{base}"):  # older PyTorch calls it _LRScheduler
        return True
    if module.partition(".")[0] in sys.stdlib_module_names:
        return False
    tree = module_source(module) if depth_left else None
    if tree is None:
        return None
    definitions = [*_definitions(tree, name)]
    if not definitions:
        return _star_import_derives(module, tree, name, base, depth_left)
    return _combine_answers(
        _statement_derives(statement, module, name, base, depth_left - 1) for statement in definitions
    )


def _combine_answers(answers: Iterator[Known]) -> Known:
    """Return whether any answer is yes; None if none is, and one is unknown."""
    results = {*answers}
    if True in results:
        return True
    return None if None in results else False


def _statement_derives(statement: ast.stmt, module: str, name: str, base: str, depth_left: int) -> Known:
    """Apply `_derives` to a statement that defines a name."""
    if isinstance(statement, ast.ClassDef):
        if statement.decorator_list or statement.keywords:
            return None
        return _combine_answers(
            _expression_derives(expression, module, base, depth_left) for expression in statement.bases
        )
    if isinstance(statement, ast.ImportFrom):
        origin = _source_module(statement, module)
        real = next(alias.name for alias in statement.names if (alias.asname or alias.name) == name)
        return _derives(origin, real, base, depth_left) if origin else None
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name | ast.Attribute):
        return _expression_derives(statement.value, module, base, depth_left)
    return None


def _expression_derives(expression: ast.expr, module: str, base: str, depth_left: int) -> Known:
    """Apply `_derives` to an expression for a class: a name, or an attribute of a module."""
    if isinstance(expression, ast.Subscript):  # Generic[T]
        return _expression_derives(expression.value, module, base, depth_left)
    if isinstance(expression, ast.Name):
        tree = module_source(module)
        is_own = tree is not None and any(True for _ in _definitions(tree, expression.id))
        is_plain = not is_own and hasattr(builtins, expression.id)
        return False if is_plain else _derives(module, expression.id, base, depth_left)
    words = ast.unparse(expression).split(".") if isinstance(expression, ast.Attribute) else []
    place = _imported_module(module, words[0]) if words and all(word.isidentifier() for word in words) else ""
    return _derives(".".join([place, *words[1:-1]]), words[-1], base, depth_left) if place else None


def _imported_module(module: str, name: str) -> str:
    """Return the module that a name in another module refers to; for `import a.b` the name is a."""
    tree = module_source(module)
    for statement in _definitions(tree, name) if tree else ():
        if isinstance(statement, ast.Import):
            alias = next(candidate for candidate in statement.names if _bound_name(candidate) == name)
            return alias.name if alias.asname else name
        if isinstance(statement, ast.ImportFrom):
            real = next(candidate.name for candidate in statement.names if (candidate.asname or candidate.name) == name)
            return f"{_source_module(statement, module)}.{real}"
    return ""


def _star_import_derives(module: str, tree: ast.Module, name: str, base: str, depth_left: int) -> Known:
    """Apply `_derives` to a name that a module gets from `from other import *`."""
    for statement in _flatten_statements(tree.body):
        if isinstance(statement, ast.ImportFrom) and any(alias.name == "*" for alias in statement.names):
            origin = _source_module(statement, module)
            answer = _derives(origin, name, base, depth_left - 1) if origin and depth_left else None
            if answer is not None:
                return answer
    return None


def _source_module(statement: ast.ImportFrom, module: str) -> str:
    """Return the module that a statement imports from."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    drop = statement.level - is_package(module)
    parents = parts[: len(parts) - drop] if drop < len(parts) else []
    return ".".join([*parents, *filter(None, [statement.module])]) if parents else ""


def _definitions(tree: ast.Module, name: str) -> Iterator[ast.stmt]:
    """Return the statements outside of functions and classes that bind a name."""
    for statement in _flatten_statements(tree.body):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = {statement.name}
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            is_whole = isinstance(statement, ast.Import)
            names = {_bound_name(alias) if is_whole else alias.asname or alias.name for alias in statement.names}
        else:
            name_nodes = (name_node for name_node in ast.walk(statement) if isinstance(name_node, ast.Name))
            names = {name_node.id for name_node in name_nodes if isinstance(name_node.ctx, ast.Store | ast.Del)}
        if name in names:
            yield statement


def _bound_name(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _flatten_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, including those in branches."""
    for statement in body:
        inner = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
        if isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            handlers = [handler.body for handler in getattr(statement, "handlers", [])]
            for part in (*inner, *handlers):
                yield from _flatten_statements(part)
        else:
            yield statement


def is_package(module: str) -> bool:
    spec = find_module(module)
    return spec is not None and spec.submodule_search_locations is not None


def module_source(module: str) -> ast.Module | None:
    """Return the parsed source of a module; None without readable source."""
    spec = find_module(module)
    if spec is None or not spec.origin or Path(spec.origin).suffix != ".py":
        return None
    try:
        changed = Path(spec.origin).stat().st_mtime_ns
    except OSError:
        return None
    return _parse_source(spec.origin, changed)


@lru_cache(maxsize=256)
def _parse_source(path: str, changed: int) -> ast.Module | None:
    """Parse a file; `changed` invalidates the cache."""
    try:
        return ast.parse(read_outside_text(path, MAX_SOURCE_BYTES))
    except (ConfigError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def find_module(module: str) -> importlib.machinery.ModuleSpec | None:
    """Locate a module, without importing its parent packages as `importlib.util.find_spec` would."""
    root, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(root)
        for at, _ in enumerate(inner, 1):
            if spec is None or spec.submodule_search_locations is None:
                return None
            name = ".".join([root, *inner[:at]])
            # Strings: transformers adds Path objects when it is imported, which PathFinder ignores.
            places = [str(place) for place in spec.submodule_search_locations]
            spec = importlib.machinery.PathFinder.find_spec(name, places)
    except (ImportError, ValueError, AttributeError, OSError):
        return None
    return spec
