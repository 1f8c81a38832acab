"""Import large packages in a fraction of their time. Loads no torch."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

# Adapters, quantised layers, attention kernels: nothing here uses them through these two packages.
UNUSED = ("peft", "bitsandbytes", "torchao", "gguf", "xformers", "flash_attn", "flash_attn_3", "sageattention")
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
    diffusers and transformers load them; afterwards both report them as available again.
    """
    package = module.split(".")[0]
    if package not in KNOWN:
        yield
        return
    place, name, absent = KNOWN[package]
    availability = vars(importlib.import_module(place))
    names = [name.format(unused) for unused in UNUSED if unused not in sys.modules]
    before = {name: availability[name] for name in names if name in availability}
    availability.update(dict.fromkeys(before, absent))
    try:
        yield
    finally:
        availability.update(before)
