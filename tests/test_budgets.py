"""How long files and functions may be. A reader's patience is a budget like any other."""

import ast

from tests import source

FILE_LINES = 400
FUNCTION_LINES = 60
LATE_IMPORTS = 80  # inside functions, where loading torch or another package of seconds late is the reason

# Longer functions, each with the reason why cutting it would make it worse.
EXCEPTIONS: dict[str, str] = {}


def test_files_are_short():
    files = [*source.files(), *(source.ROOT / "kohya_gui").rglob("*.js")]
    lengths = {str(p.relative_to(source.ROOT)): len(p.read_text(encoding="utf-8").splitlines()) for p in files}
    long = {name: lines for name, lines in lengths.items() if lines > FILE_LINES}
    assert not long, f"over {FILE_LINES} lines, each is probably two things: {long}"


def test_functions_are_short():
    long = {}
    for path in source.files():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                name = f"{source.module(path)}.{node.name}"
                if lines > FUNCTION_LINES and name not in EXCEPTIONS:
                    long[name] = lines
    assert not long, f"over {FUNCTION_LINES} lines: {long}"


def test_imports_inside_functions_are_few():
    late = [f"{source.module(p)}:{line}" for p in source.files()
            for line in sorted({found.line for found in source.imports(p) if found.when == "call"})]  # fmt: skip
    assert len(late) <= LATE_IMPORTS, "import with the module, or mend the circle:\n" + "\n".join(late)
