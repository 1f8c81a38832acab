"""What tests of all families expect of each, by family: `tests/families/expected/<family>.toml`, with these keys.

- `blocks`: the number of blocks in each group of the published model
- `parts`: the options that name the files beside the denoiser's
- `tiny`: sizes of a tiny model with as few blocks as possible, fields of the random module's TINY
- `lora_loader`: diffusers' loader of its LoRA files, without "LoraLoaderMixin"; "" if diffusers has none
- `timesteps`: timestep_sampling and discrete_flow_shift of the usual recipe; only of flow matching
- `presets`: GB of a GPU -> the preset for a LoRA that fits it
- `comfy.prefixes`, `comfy.endings`: of names that ComfyUI and diffusers both read
- `comfy.layers`: one of every kind of layer that is adapted, by kohya's name, with its outputs and inputs
"""

import functools
import tomllib
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "expected"


@functools.cache
def expected(family: str, key: str) -> Any:
    """What tests expect of a family under one of the keys; lists are tuples."""
    path = FOLDER / f"{family}.toml"
    name = f"tests/families/expected/{path.name}"
    assert path.is_file(), f"write {name}, with the keys that tests/families/expectations.py describes"
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    assert key in values, f"{name} has no {key}, which tests/families/expectations.py describes"
    return _with_tuples(values[key])


def diffusers_loader(family: str) -> Any:
    """diffusers' class that loads LoRA files of a family; skips a test where there is none."""
    from diffusers.loaders import lora_pipeline

    if not (name := expected(family, "lora_loader")):
        pytest.skip("diffusers loads no LoRA files of this family")
    return getattr(lora_pipeline, f"{name}LoraLoaderMixin")


def _with_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _with_tuples(entry) for name, entry in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
