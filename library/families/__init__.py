"""Model families, one folder each.

`RUNS` has a line for every kind of training: the page makes a tab of it, the docs a chapter, the tests a case. Nothing
here loads torch before `of` is called.
"""

import importlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from library.config.schema import ConfigError, options
from library.config.sections import Run
from library.config.values import meant

if TYPE_CHECKING:
    from library.families.base import Family

RUNS = {
    "sdxl_train_network": "library.families.sdxl.options:SdxlLora",
    "sdxl_train": "library.families.sdxl.options:SdxlTrain",
    "flux_train_network": "library.families.flux.options:FluxLora",
    "flux_train": "library.families.flux.options:FluxTrain",
}

FAMILIES = {
    "sdxl": "library.families.sdxl.family:Sdxl",
    "flux": "library.families.flux.family:Flux",
}


def config_class(script: str) -> type[Any]:
    """The config class of a script, by its file name with or without .py. Raises ConfigError for an unknown one."""
    name = script.removesuffix(".py")
    if name not in RUNS:
        raise ConfigError(f"{script} is not a kind of training{meant(name, RUNS)}; there are {', '.join(RUNS)}")
    return _load(RUNS[name])


def _script_with(option: str) -> str:
    """The first script that has an option, or ""."""
    return next((script for script, where in RUNS.items() if option in options(_load(where))), "")


def of(config: Any) -> "Family":
    """The family of a run's config, holding that config. Loads torch."""
    return _load(FAMILIES[config.family])(config)


Run.elsewhere = staticmethod(_script_with)  # a config knows of no other


def _load(where: str) -> Any:
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)


def random_module(family: str) -> Any:
    """The module that makes a family's networks with random weights: TINY, FULL, random, input_shapes, adopt, write."""
    return importlib.import_module(f"library.families.{family}.random")


def recognised(path: Path) -> tuple[str, str]:
    """What a .safetensors file or a diffusers folder is: the family that it is a base model of ("" for none), and words
    that fit into a sentence. Only a header is read. Raises ConfigError when that is not possible."""
    from library.families.shared import weights

    if path.is_dir():
        try:
            pipeline = json.loads((path / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is not a diffusers model") from None
        family = {"StableDiffusionXLPipeline": "sdxl", "FluxPipeline": "flux"}.get(str(pipeline), "")
        return family, f"a diffusers model ({pipeline})"
    words = weights.describe(weights.header(path))
    return {"an SDXL checkpoint": "sdxl", "a FLUX.1 transformer": "flux"}.get(words, ""), words
