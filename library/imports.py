"""Import large packages in a fraction of their time. Loads no torch."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

from library import deferred

# Adapters, quantised layers, attention kernels: nothing here uses them through these two packages.
UNUSED = ("peft", "bitsandbytes", "torchao", "gguf", "xformers", "flash_attn", "flash_attn_3", "sageattention")
# Packages of diffusers that load all of their modules, 130 networks, for one of them.
PACKAGES = ("diffusers.models.unets", "diffusers.models.transformers", "diffusers.models.autoencoders")
QUANTIZERS = {"DiffusersAutoQuantizer": "auto", "DiffusersQuantizer": "base"}
# Where a package stores the availability of others, and under which name: a value, or a function.
KNOWN = {
    "diffusers": ("diffusers.utils.import_utils", "_{}_available", False),
    "transformers": ("transformers.utils", "is_{}_available", lambda *_: False),
}


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Disable garbage collection within this context."""
    # Imported objects stay alive, and PyTorch alone creates millions, which each collection would scan.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# diffusers and transformers import peft and bitsandbytes if installed, which takes 2 s and is never used here.
# Why: docs/decisions/2026-11-22-diffusers-without-optional-packages.md
@contextlib.contextmanager
def without_optional(module: str) -> Iterator[None]:
    """Import modules of this module's package as if the packages in `UNUSED` were absent, unless already loaded. Only
    diffusers and transformers load them; afterwards both report them as available again. diffusers does not see
    transformers either, loaded or not, as most of it is loaded when its names are used.
    """
    package = module.split(".")[0]
    if package not in KNOWN:
        yield
        return
    place, name, absent = KNOWN[package]
    availability = vars(importlib.import_module(place))
    unwanted = [unused for unused in UNUSED if unused not in sys.modules]
    if package == "diffusers":
        _defer_networks()
        unwanted.append("transformers")  # for pipelines and their LoRA files, which the caller does not load
    names = [name.format(unused) for unused in unwanted]
    before = {name: availability[name] for name in names if name in availability}
    availability.update(dict.fromkeys(before, absent))
    try:
        yield
    finally:
        availability.update(before)


def _defer_networks() -> None:
    """Load only those networks of diffusers that are imported, and nothing that loads quantized ones."""
    importlib.import_module("diffusers.loaders")  # it decides at once which names it has, by what is installed
    for package in PACKAGES:
        deferred.defer_package(package, parts={})
    deferred.defer_package("diffusers.quantizers", parts=QUANTIZERS)
