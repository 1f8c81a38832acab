"""Importing large packages in a fraction of their time. No torch."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator

# Adapters, layers of few bits, kernels of attention: nothing here uses them through these two.
UNUSED = ("peft", "bitsandbytes", "torchao", "gguf", "xformers", "flash_attn", "flash_attn_3", "sageattention")
# Where a package keeps what it knows of others, and by which name: a value, or a function that answers.
KNOWN = {
    "diffusers": ("diffusers.utils.import_utils", "_{}_available", False),
    "transformers": ("transformers.utils", "is_{}_available", lambda *_: False),
}


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Inside, cyclic garbage is not looked for: what is imported stays, and PyTorch alone makes millions of objects."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# Why: docs/decisions/2026-11-22-diffusers-without-optional-packages.md
@contextlib.contextmanager
def without_optional(module: str) -> Iterator[None]:
    """Inside, modules of this one's package are imported as if those packages in `UNUSED` were absent that nobody has
    loaded yet. Only diffusers and transformers load them; afterwards both answer again that they are there."""
    package = module.split(".")[0]
    if package not in KNOWN:
        yield
        return
    place, name, absent = KNOWN[package]
    known = vars(importlib.import_module(place))
    names = [name.format(unused) for unused in UNUSED if unused not in sys.modules]
    before = {name: known[name] for name in names if name in known}
    known.update(dict.fromkeys(before, absent))
    try:
        yield
    finally:
        known.update(before)
