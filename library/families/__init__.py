"""Model families, one folder each; `FAMILIES` is their registry.

Static properties of a family, for other packages, are in its `facts.py`. Nothing here imports torch before
`family_for` is called.
"""

import functools
import importlib
from typing import TYPE_CHECKING, Any

from library.config.problems import ConfigError, Message, join_messages
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.config.values import did_you_mean
from library.families.facts import FamilyFacts

if TYPE_CHECKING:
    from library.families.base import Family

# Folders, in the order of the page.
FAMILIES = (
    "sdxl",
    "flux",
    "flux_2",
    "flux_3",
    "krea_2",
    "qwen_image",
    "qwen_image_21",
    "zimage",
    "anima",
    "sd15",
)
SHOWN_BY_DEMO = "flux"  # the default of `kohya demo`


@functools.cache
def facts_of(name: str) -> FamilyFacts:
    return importlib.import_module(f"library.families.{name}.facts").FACTS


def all_families() -> tuple[FamilyFacts, ...]:
    return tuple(map(facts_of, FAMILIES))


# One entry per kind of training, for tabs of the page, chapters of the docs, and cases of tests.
RUNS = {script: reference for family in all_families() for script, reference in family.scripts.items()}


def owner(name: str) -> str:
    return next(family.name for family in all_families() if name in (family.name, *family.demo_variants))


def titles() -> Message:
    return join_messages([family.title for family in all_families()])


def config_class(script: str) -> type[RunConfig]:
    """Return the config class of a script, by its file name with or without .py. Raises ConfigError if unknown."""
    name = script.removesuffix(".py")
    if name not in RUNS:
        raise ConfigError(
            "{script} is not a kind of training{hint}; there are {runs}",
            script=script,
            hint=did_you_mean(name, RUNS),
            runs=", ".join(RUNS),
        )
    return load_object(RUNS[name])


def lora_script(family: str) -> str:
    return next(script for script in facts_of(family).scripts if config_class(script).adapters)


def script_with(option: str, family: str = "") -> str:
    """Return a script that has an option, if possible one of a family; "" for none."""
    classes = {script: load_object(reference) for script, reference in RUNS.items()}
    with_option = [script for script, config in classes.items() if option in options_of(config)]
    return min(with_option, key=lambda script: classes[script].family != family, default="")


def family_for(config: RunConfig) -> "Family":
    return load_object(facts_of(config.family).family)(config)


def compiling_cost(config: RunConfig) -> tuple[int, float]:
    """Return the number of graphs that a config compiles, and about how many seconds that takes on a fast GPU."""
    family = facts_of(config.family)
    if config.compile.compile_scope == "model":  # as one graph, with the same amount of code
        return 1, family.compile_seconds
    graphs = config.compile.graphs_of(family.graphs)
    return graphs, family.compile_seconds * graphs / sum(family.graphs.values())


def load_object(reference: str) -> Any:
    module, name = reference.split(":")
    return getattr(importlib.import_module(module), name)


def random_module(family: str) -> Any:
    """Return a family's module of random networks, which has these names.

    - TINY, FULL: the sizes of a tiny model and of the published one
    - make_networks(sizes): their `RandomNetworks`, tiny by default
    - input_shapes(family, denoiser): the `InputShapes` of one image with a caption of usual length
    - write_random_model(folder, dtype=..., sizes=...): writes files, and returns their paths by part, or its only file
    - demo_tables(models): the tables of a demo TOML for these files
    - convert_for_diffusers(tensors, config): a LoRA file's adapters by diffusers' names, and the sizes of its layers

    Optional: VARIANTS (sizes by the names of `demo_variants`), model_sizes(config, full) for sizes that depend on
    options, adopt_denoiser(family, denoiser), and SMALL_MODEL (a `SmallModel`).
    """
    return importlib.import_module(f"library.families.{family}.random")


def adopt_denoiser(family: "Family", denoiser: Any) -> None:
    """Give a family the facts of a denoiser without a file that it otherwise reads from the header of the file."""
    if adopt := getattr(random_module(family.name), "adopt_denoiser", None):
        adopt(family, denoiser)


def sizes_of_model(family: str, config: Any, full: bool) -> Any:
    """Return the sizes of a family's random networks, tiny or `full`, for the model that a config names."""
    module = random_module(family)
    if choose := getattr(module, "model_sizes", None):
        return choose(config, full)
    return module.FULL if full else module.TINY
