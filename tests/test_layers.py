"""The one-way rule: who may import whom, and what must load without torch."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from tests import source

# Each line: a part of the project, and what of ours it may import. The longest name that fits a module is its rule.
# A part may always import itself.
BOTTOM = ("library.config", "library.files", "library.imports", "library.deferred")
PROTOCOL = (
    "library.families.base",
    "library.families.capabilities",
    "library.families.facts",
    "library.families.stored_weights",
)
REGISTRY = "library.families"  # itself, and not what is in it
LIGHT = tuple(
    f"library.families.{name}"
    for name in (
        *("recognition", "network_args", "adapter_kinds"),
        *("shared.network_args", "shared.unet_network_args"),
    )
)
FAMILIES = tuple(f"library.families.{p.parent.name}" for p in (source.ROOT / "library/families").glob("*/options.py"))
LAB = ("library.measuring.candidates", "library.bench.chart", "library.bench.report")  # its light parts
ENGINE = (
    *BOTTOM,
    "library.runs",
    "library.families",
    "library.objectives",
    "library.compiler",
    "library.memory",
    "library.methods",
    "library.data",
    "library.optim",
    "library.packages",
    "library.adapter_files",
    "library.distributed",
)
MAY_IMPORT = {
    "library.config": (),
    "library.files": ("library.config",),
    "library.imports": ("library.deferred",),
    "library.deferred": (),
    "library.packages": BOTTOM,
    "library.optim.names": (*BOTTOM, "library.packages"),
    "library.optim": (
        *(*BOTTOM, "library.packages", "library.methods"),
        *("library.compiler.torch_private", "library.compiler.flat_memory"),
    ),
    **{f"{family}.variants": ("library.config.run_config", "library.families.facts") for family in FAMILIES},
    **{
        f"{family}.options": ("library.config", "library.families.shared.network_args", f"{family}.variants")
        for family in FAMILIES
    },
    **{f"{family}.facts": ("library.families.facts", f"{family}.variants") for family in FAMILIES},
    **{
        f"{family}.network_args": (
            *(*BOTTOM, "library.families.shared.network_args", "library.families.shared.unet_network_args"),
            *("library.families.facts", f"{family}.facts"),
        )
        for family in FAMILIES
    },
    **{family: (*BOTTOM, "library.families", "library.objectives") for family in FAMILIES},
    "library.families": (*BOTTOM, "library.objectives.base", "library.compiler.block_inputs"),
    "library.families.shared": (*BOTTOM, *PROTOCOL, "library.families.recognition"),
    "library.families.shared.network_args": BOTTOM,
    "library.families.shared.sampler": (*PROTOCOL, "library.families.shared", "library.objectives"),
    "library.families.shared.transformer_family": (*PROTOCOL, "library.families.shared.sampler", "library.objectives"),
    "library.families.shared.unet_family": (*BOTTOM, *PROTOCOL, "library.families.shared", "library.objectives"),
    "library.families.shared.unet_sampler": (*BOTTOM, *PROTOCOL, "library.families.shared", "library.objectives"),
    "library.families.shared.unet_network_args": (*BOTTOM, "library.families.shared.network_args"),
    "library.families.shared.random_unets": (*(*BOTTOM, *PROTOCOL, REGISTRY, "library.families.shared"),),
    "library.families.network_args": (*BOTTOM, REGISTRY, "library.families.shared.network_args"),
    "library.families.adapter_kinds": (
        *(*BOTTOM, REGISTRY, "library.families.facts"),
        *("library.families.network_args", "library.families.shared.network_args"),
    ),
    "library.runs": BOTTOM,
    "library.runs.overview": (*BOTTOM, "library.runs", REGISTRY),
    "library.objectives": BOTTOM,
    "library.compiler": BOTTOM,
    "library.compiler.block_inputs": (),
    "library.compile_utils": ("library.compiler.blocks",),
    "library.memory": (*BOTTOM, *PROTOCOL, "library.compiler"),
    "library.memory.attention": (
        *(*BOTTOM, "library.packages"),
        *("library.compiler", "library.memory", "library.families.shared.attention"),
    ),
    "library.memory.padded_attention": ("library.compiler", "library.families.shared.attention"),
    "library.methods": (
        *(*BOTTOM, *PROTOCOL, "library.families.shared", "library.families.network_args"),
        *("library.packages", "library.adapter_files"),
        *("library.compiler.subclass", "library.compiler.torch_private", "library.compiler.flat_memory"),
    ),
    "library.data": (*BOTTOM, *PROTOCOL),
    "library.adapter_files": (*BOTTOM, "library.families"),
    "library.distributed": (
        *(*BOTTOM, *PROTOCOL, "library.runs", "library.methods", "library.memory"),
        "library.compiler",
    ),
    "library.trainings": (
        *(*BOTTOM, REGISTRY, "library.runs", "library.check.isolated", "library.data.caption_files"),
    ),
    "library.jobs": (*BOTTOM, "library.runs"),
    "library.demo": (*BOTTOM, "library.families", "library.jobs", "library.runs", "library.setup.installation"),
    "library.curation": (*BOTTOM, "library.data", "library.runs"),
    "library.tools": (*BOTTOM, "library.adapter_files", "library.families", "library.jobs", "library.runs"),
    "library.downloads": (*BOTTOM, REGISTRY, "library.jobs", "library.runs"),
    "library.captioning": (*BOTTOM, "library.curation", "library.data", "library.downloads", "library.jobs"),
    "library.masking": (
        *(*BOTTOM, "library.captioning", "library.curation", "library.data", "library.downloads", "library.jobs"),
    ),
    "library.sampling.prompts": BOTTOM,
    "library.sampling.prompt_rows": (*BOTTOM, "library.sampling.prompts"),
    "library.sampling.recorded_prompts": (*BOTTOM, "library.sampling.prompts"),
    "library.sampling": (*ENGINE, "library.jobs", "library.downloads.hub_files"),
    "library.comparing": (
        *(*ENGINE, "library.outputs", "library.train", "library.sampling", "library.jobs"),
        *("library.captioning.describer", "library.curation", "library.downloads"),
    ),
    "library.importers": (*BOTTOM, REGISTRY),
    "library.recipes": (*BOTTOM, REGISTRY, "library.data"),
    "library.outputs": (*BOTTOM, *PROTOCOL, "library.families.shared", "library.methods", "library.adapter_files"),
    "library.train": (*ENGINE, "library.outputs", "library.sampling", "library.measuring", "library.downloads"),
    "library.train.step": (*ENGINE, "library.train.stop_requests"),
    "library.train.saving": (
        *(*ENGINE, "library.outputs", "library.downloads", "library.train.step"),
        *(f"library.train.{name}" for name in ("choices", "errors", "journal", "training")),
    ),
    "library.train.compiling": (
        *(*ENGINE, "library.measuring", "library.train.step", "library.train.saving.state_files"),
        *("library.train.choices", "library.train.journal"),
    ),
    "library.train.evaluation": (
        *(*ENGINE, "library.sampling", "library.train.step"),
        *(f"library.train.{name}" for name in ("beside", "journal", "stop_requests", "training")),
    ),
    "library.check": (*ENGINE, "library.outputs", "library.sampling", "library.train", "library.measuring"),
    "library.measuring": (*BOTTOM, REGISTRY, "library.compiler"),
    "library.bench": ("library",),
    "library.setup": ("library.config.problems",),
    "library.doctor": (
        *BOTTOM,
        "library.setup",
        "library.jobs",
        "library.families",
        "library.packages",
        "library.runs",
        "library.compiler",
        "library.measuring",
        "library.optim",
    ),
    "library.cli": ("library", "kohya_gui.app"),  # the console command
    "library": (),
    "kohya_gui": (
        *BOTTOM,
        *LAB,
        "library.data.metadata",
        "library.optim.names",
        "library.packages",
        "library.jobs",
        "library.runs",
        "library.trainings",
        "library.families",
        "library.tools",
        "library.curation",
        "library.importers",
        "library.check.check_process",
        "library.check.isolated",
        "library.captioning",
        "library.masking",
        "library.downloads",
        "library.recipes",
        "library.sampling.plan",
        "library.sampling.prompts",
        "library.sampling.prompt_checks",
        "library.sampling.prompt_rows",
        "library.sampling.recorded_prompts",
        "library.sampling.trigger_words",
        "library.comparing.plan",
    ),
    "sd-scripts": ("library.cli.main", "library.cli.train_script", "library.cli.cache_data", "library.families"),
}

# Modules that take seconds to load. Never at all in the first group; only inside functions in the second.
HEAVY = ("torch", "torchvision", "transformers", "diffusers", "accelerate", "peft", "tensorboard", "cv2", "lycoris")
NEVER_HEAVY = (
    "library.config",
    "library.files",
    "library.imports",
    "library.deferred",
    "library.packages",
    "library.setup",
    "library.optim.names",
    "library.jobs",
    "library.runs",
    "library.trainings",
    "library.curation",
    "library.importers",
    "library.recipes",
    "library.check.check_process",
    "library.check.isolated",
    "kohya_gui",
    "library.downloads",
    "library.sampling.plan",
    "library.sampling.shell",
    "library.comparing.plan",
    "library.comparing.shell",
    "library.comparing.proposal",
    "library.sampling.prompts",
    "library.sampling.prompt_checks",
    "library.sampling.prompt_rows",
    "library.sampling.recorded_prompts",
    "library.sampling.trigger_words",
    "library.families.network_args",
    "library.families.adapter_kinds",
    *LAB,
)
TENSORBOARD = "kohya_gui.server.tensorboard"  # started by the page as a process of its own
LATE_HEAVY = ("library.families.base", "library.families", "library.demo", "library.doctor.report", "library.train")
ONLY_EXACT = ("library.families", "library.train")  # these two mean the package's own __init__, not what is in it


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def part_of(name: str) -> str:
    return max((part for part in MAY_IMPORT if within(name, part)), key=len)


def is_options(name: str) -> bool:
    return name.startswith("library.families.") and name.endswith(".options")


def forbidden(module: str, imported: str) -> str | None:
    """Why this module may not import that one, or None when it may."""
    part = part_of(module)
    if part in ("library.families", "library.families.shared") and any(within(imported, family) for family in FAMILIES):
        return f"{module} is shared by families and may not know one of them ({imported})"
    if within(imported, part):
        return None
    if imported == REGISTRY and (set(PROTOCOL) & set(MAY_IMPORT[part]) or is_options(module)):
        return None
    if not any(within(imported, allowed) for allowed in MAY_IMPORT[part]):
        return f"{module} may not import {imported}"
    if within(imported, "kohya_gui") and not any(within(module, part) for part in ("kohya_gui", "library.cli")):
        return f"{module} may not import the page ({imported})"
    if part in FAMILIES and any(within(imported, family) for family in FAMILIES):
        return f"{module} may not know another family ({imported})"
    if part == "kohya_gui" and within(imported, "library.families"):
        is_allowed = imported in (REGISTRY, *LIGHT, *PROTOCOL)
        return None if is_allowed else f"{module} may import the registry of families only, not {imported}"
    return None


def every_import() -> Iterator[tuple[str, source.Import]]:
    for path in source.files():
        for imported in source.imports(path):
            yield source.module(path), imported


def test_arrows_point_one_way():
    wrong = [
        f"{problem} (line {imported.line})"
        for module, imported in every_import()
        if imported.name.split(".")[0] in source.OURS and (problem := forbidden(module, imported.name))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_page_and_the_options_never_touch_torch():
    wrong = []
    for module, imported in every_import():
        if imported.when == "never" or imported.name.split(".")[0] not in HEAVY:
            continue
        late = any(module == part or (part not in ONLY_EXACT and within(module, part)) for part in LATE_HEAVY)
        if module != TENSORBOARD and (is_options(module) or any(within(module, part) for part in NEVER_HEAVY)):
            wrong.append(f"{module} imports {imported.name} (line {imported.line})")
        elif late and imported.when == "load":
            wrong.append(
                f"{module} imports {imported.name} with itself; do it inside the function (line {imported.line})"
            )
    assert not wrong, "\n".join(wrong)


def test_no_import_goes_round_in_circles():
    graph: dict[str, set[str]] = {}
    for module, entry in every_import():
        if entry.when == "load" and entry.name.split(".")[0] in source.OURS:
            graph.setdefault(module, set()).add(entry.name)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for imported in graph.get(module, ()):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@cache
def packages_of(module: str) -> frozenset[str]:
    """The packages of others that are loaded with a module of ours."""
    modules, loaded, waiting, packages = by_name(), set(), [module], set()
    while waiting:
        name = waiting.pop()
        while name not in modules and name:
            name = name.rpartition(".")[0]  # `from library.files import free_space`
        if not name or name in loaded:
            continue
        loaded.add(name)
        for imported in source.imports(modules[name]):
            if imported.when == "load" and imported.name.split(".")[0] in source.OURS:
                waiting.append(imported.name)
            elif imported.when == "load":
                packages |= brought_by(imported.name)
    return frozenset(packages - sys.stdlib_module_names)


@cache
def by_name() -> dict[str, Path]:
    return {source.module(path): path for path in source.files()}


def brought_by(name: str) -> set[str]:
    """A package with what comes with it; a part that the import of its package does not load is one of its own."""
    package, _, part = name.partition(".")
    if package in ("torch", "huggingface_hub") and part:
        return {package, name}
    return {package, *(["torch"] if name == "safetensors.torch" else [])}


def test_imports_inside_functions_load_a_package_that_their_module_does_not():
    """Else they are for nothing, or hide a circle."""
    wrong = []
    for module, imported in every_import():
        if imported.when != "call" or imported.name == "resource":  # which Windows does not have
            continue
        ours = imported.name.split(".")[0] in source.OURS
        if not (packages_of(imported.name) if ours else brought_by(imported.name)) - packages_of(module):
            wrong.append(
                f"{module} imports {imported.name} inside a function (line {imported.line}); do it with the module"
            )
    assert not wrong, "\n".join(wrong)


def run_without(blocked: tuple[str, ...], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python in which the blocked modules cannot be imported at all."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))\n"
    return subprocess.run(
        [sys.executable, "-c", block + code, *arguments], capture_output=True, text=True, cwd=source.ROOT, check=False
    )


def test_options_and_form_load_without_torch():
    code = """
import importlib
from pathlib import Path
for path in Path("library/families").glob("*/options.py"):
    importlib.import_module(".".join(path.with_suffix("").parts))
import kohya_gui.form.form, library.families, library.runs
"""
    done = run_without(HEAVY, code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", sorted(path.name for path in (source.ROOT / "sd-scripts").glob("*.py")))
def test_help_of_a_script_loads_nothing_heavy(script):
    code = "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    done = run_without((*HEAVY, "gradio"), code, f"sd-scripts/{script}", "--help")
    assert done.returncode == 0, done.stderr
    assert "--learning_rate" in done.stdout


def test_what_is_imported_is_declared():
    """Only what stands in pyproject.toml may be imported with a module; optional packages inside functions."""
    project = tomllib.loads((source.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split("[^A-Za-z0-9_-]", name)[0].lower().replace("_", "-") for name in project["dependencies"]}
    distributions = {**packages_distributions(), "triton": ["torch"]}  # PyTorch's builds for GPUs bring Triton along
    wrong = []
    for module, imported in every_import():
        top = imported.name.split(".")[0]
        if imported.when != "load" or top in sys.stdlib_module_names or top in source.OURS:
            continue
        if not declared & {name.lower().replace("_", "-") for name in distributions.get(top, [])}:
            wrong.append(f"{module} imports {top} (line {imported.line}), which pyproject.toml does not name")
    assert not wrong, "\n".join(wrong)


def test_the_rules_themselves_hold():
    """A rule that never fires is none: each kind of forbidden import is seen."""
    assert forbidden("library.config.schema", "library.files")
    assert forbidden("library.families.flux.family", "library.families.sdxl.keys")
    assert forbidden("library.families.flux.options", "library.families.base")
    assert forbidden("library.families.base", "library.objectives.flow")
    assert forbidden("library.objectives.flow", "library.families.base")
    assert forbidden("library.runs.record", "library.train")
    assert forbidden("library.train", "kohya_gui.form.form")
    assert forbidden("library.objectives.flow", "library.train.step.loss")
    assert forbidden("kohya_gui.form.form", "library.train")
    assert forbidden("kohya_gui.form.form", "library.families.flux.family")
    assert forbidden("kohya_gui.form.form", "library.families.flux.options")
    assert not forbidden("kohya_gui.form.form", "library.families")
    assert not forbidden("library.families.flux.family", "library.objectives.flow")
    assert not forbidden("library.families.flux.family", "library.families.base")
    assert not forbidden("library.families.flux.family", "library.families.flux.keys")
    assert not forbidden("library.distributed.world", "library.memory")
    assert forbidden("library.train.loop", "library.check.preflight")
    assert forbidden("library.outputs.hub", "library.train.errors")
    assert forbidden("library.sampling.generate", "library.train.training")
    assert forbidden("library.setup.installer", "library.files")
    assert forbidden("library.train.step.loss", "library.train.compiling.precompile")
