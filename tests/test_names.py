"""One name stands for one thing, so that a trace, a log line or a search leads to one place."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests import source

# Why: a name that more modules share is found everywhere and says nothing.
MODULES_PER_FUNCTION = 5
MODULES_PER_CONSTANT = 3
# At most this share of all module-level functions has a name that another module defines, too, those by design aside.
SHARED_FUNCTIONS = 0.07

SHARED_BY_DESIGN = {
    "main": "what `python -m` and the entry points call",
    # Each of IMPORTERS (library/importers/files.py) is a module that is called by these two names.
    "read_config": "importers are modules; `importers.files` calls `reader.read_config`",
    "recognises": "importers are modules; `importers.files` calls `reader.recognises`",
    # `families.random_module(name)` returns a family's random.py, whose functions are called by these names.
    "make_networks": "a family's random.py",
    "write_random_model": "a family's random.py",
    "adopt_denoiser": "a family's random.py",
    "input_shapes": "a family's random.py",
    # `library.demo` loads a family's demo.py by the name in its facts.
    "demo_tables": "a family's demo.py",
    "convert_for_diffusers": "a family's demo.py",
}
CONSTANTS_BY_DESIGN = {
    "TRAINER": "importers are modules; messages name the program by `reader.TRAINER`",
    "APPLIES_EXIF": "importers are modules; `importers.files` asks `reader.APPLIES_EXIF`",
    "FACTS": "`families.facts_of` reads it from each family's facts.py",
    "LORA_NAMES": "`adapter_files.names` reads it from each family's keys.py",
    "FULL": "the published sizes in each family's random.py",
    "TINY": "the sizes for tests and demos in each family's random.py",
    "INEFFECTIVE": "flags without a meaning for the family, in each options.py",
    "PROJECT_ROOT": "the folder of the project, which each module knows from its own place",
    "MODEL_OPTION": "the name of one option, everywhere the same",
    "BYTES_PER_GIB": "a unit, everywhere the same",
    "EXIT_DONE": "the exit code of a command, everywhere the same",
    "EXIT_MISUSED": "the exit code of a command, everywhere the same",
}
# Names that fit any limit or list.
VAGUE_CONSTANTS = {"PATIENCE", "MOST", "KEPT", "LARGEST", "LONGEST", "SHOWN", "TOLD", "ARRIVAL", "FEWEST", "FOLLOWED"}


def _paths() -> list[Path]:
    return [*source.files(), *sorted((source.ROOT / "benchmarks").rglob("*.py"))]


@cache
def functions() -> dict[str, list[str]]:
    """The modules that define a function, by its name."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in _paths():
        for node in source.tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                modules[node.name].append(source.module(path))
    return modules


@cache
def constants() -> dict[str, list[str]]:
    """The modules that define a constant, by its name."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in _paths():
        for name in _constants_of(path):
            modules[name].append(source.module(path))
    return modules


def _constants_of(path: Path) -> Iterator[str]:
    for node in source.tree(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            yield from (name for name in names if name.isupper() and len(name) > 1)


def test_no_function_name_is_in_many_modules():
    many = {
        name: modules
        for name, modules in functions().items()
        if len(modules) > MODULES_PER_FUNCTION and name not in SHARED_BY_DESIGN
    }
    assert not many, f"say in the name what it reads, finds or builds: {many}"


def test_few_functions_share_a_name():
    together = sum(map(len, functions().values()))
    shared = {
        name: modules for name, modules in functions().items() if len(modules) > 1 and name not in SHARED_BY_DESIGN
    }
    share = sum(map(len, shared.values())) / together
    assert share <= SHARED_FUNCTIONS, f"{share:.1%} of {together} functions share a name: {shared}"


def test_a_constant_says_what_it_limits():
    vague = {name: modules for name, modules in constants().items() if name in VAGUE_CONSTANTS}
    assert not vague, f"name them like MAX_WAITING or LOCK_TIMEOUT: {vague}"


def test_no_constant_name_is_in_many_modules():
    many = {
        name: modules
        for name, modules in constants().items()
        if len(modules) > MODULES_PER_CONSTANT and name not in CONSTANTS_BY_DESIGN
    }
    assert not many, f"say in the name what it limits or lists: {many}"


def test_no_exception_is_left_over():
    unused = {name for name in SHARED_BY_DESIGN if len(functions().get(name, ())) <= MODULES_PER_FUNCTION}
    unused |= {name for name in CONSTANTS_BY_DESIGN if len(constants().get(name, ())) <= MODULES_PER_CONSTANT}
    assert not unused
