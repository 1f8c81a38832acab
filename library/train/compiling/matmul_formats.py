"""`auto_compute`: whether frozen matrices multiply in 16 bits, fp8 or int8, by timing this model's sizes on this GPU.

Rounding an input costs what its kernels read and write: inside a compiled block one reads the rows for their largest
values, and one reads them again and writes 8 bits. Here PyTorch's own kernels move the same bytes, which compile
nothing. The products themselves are computed by the kernels that the training uses.
"""

import contextlib
import copy
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import nn

from library import families
from library.compiler import cache, torch_private
from library.config import building
from library.config.json_types import JsonObject
from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.data.loading import Batches, Kind
from library.distributed.world import World
from library.families.base import Family
from library.files import write_atomic
from library.measuring import timing
from library.measuring.shapes import FakeTensorContext
from library.memory.compile_targets import blocks_by_class
from library.memory.quantization import fp8_matmul, fp8_storage, int8_matmul, multiplies_in_8_bits
from library.objectives.base import NoisedBatch
from library.train.compiling import autotune_cache
from library.train.journal import Journal
from library.train.saving import state_files
from library.train.step.loss import LossFunction

VERSION = 1
SECONDS = 3.0  # of timing; the largest sizes come first, and what is left over then is little work
GAIN = 0.95  # of the time in 16 bits: for less than a twentieth nobody rounds more
PLAN = timing.TimingPlan(steps=5, warmup=1, seconds=0.05)
WIDE = "16 bits"  # the type that is computed in without 8-bit products: mixed_precision
OFF: JsonObject = {"auto_compute": False}
# What a format changes in the options. The base is kept in the format that it is multiplied in.
FORMATS: Mapping[str, JsonObject] = {
    "fp8": {**OFF, "int8_base": False, "fp8_base_unet": True, "fp8_compute": True},
    "int8": {**OFF, "int8_base": True, "fp8_base": False, "fp8_base_unet": False, "int8_compute": True},
}


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a product: [tokens, inputs] times the transposed [outputs, inputs]."""

    tokens: int
    inputs: int
    outputs: int

    @property
    def work(self) -> int:
        """Multiplications of a pass."""
        return self.tokens * self.inputs * self.outputs


Sizes = Counter[Size]  # how many matrices of a model have each size


# Why: docs/decisions/2026-11-22-products-are-timed.md
def best_config(batches: Batches, compute_loss: LossFunction, world: World, journal: Journal) -> RunConfig:
    """The config to train with: as given, or with `auto_compute` that of the fastest products on this GPU.

    A resumed training keeps its format. Of several processes one measures for all.
    """
    config = compute_loss.config
    if not (config.adapters and config.precision.auto_compute):
        return config
    chosen = _resumed(config)
    if chosen:
        journal.say(f"Matrix products: {chosen}, as in the training that is resumed.")
    else:
        found = [_decide(batches, compute_loss, world.device, journal) if world.main else None]
        if world.ranks > 1:
            torch.distributed.broadcast_object_list(found)
        chosen = found[0] or WIDE
    compute_loss.family.config = building.replace(config, **FORMATS.get(chosen, OFF))
    return compute_loss.family.config


def _resumed(config: RunConfig) -> str:
    """The format of the training that is resumed, "" if there is none."""
    if not config.steps.resume:
        return ""
    known = state_files.read_progress(Path(config.steps.resume)).get("settings", {})
    return "int8" if known.get("int8_compute") else "fp8" if known.get("fp8_compute") else WIDE


def _decide(batches: Batches, compute_loss: LossFunction, device: torch.device, journal: Journal) -> str:
    """The format to multiply in, measured or read from stored results; logs it with the times."""
    config, began = compute_loss.config, time.perf_counter()
    formats = possible(config, device)
    if not formats:
        why = "this machine cannot multiply in 8 bits"
        if fp8_matmul.supports_fp8(device) or int8_matmul.supports_int8(device):
            why = "another option excludes products in 8 bits"
        if not config.compile.compile:
            why = "without compile, rounding to 8 bits takes longer than 8 bits save"
        journal.say(f"Matrix products are computed in {WIDE}: {why}.")
        return WIDE
    ((kind, _),) = batches.kinds().most_common(1)
    sizes = matrix_sizes(config, compute_loss.family, compute_loss.components.denoiser, kind)
    passes = 2 if config.memory.checkpointing else 1  # forward, for each backward
    dtype, kept, rotate = fp8_storage.compute_type(config), stored(config), config.precision.int8_rotation
    name = fingerprint(device, sizes, formats, f"{dtype} {kept} {passes} {rotate}")
    found = read(name)
    remembered = bool(found)
    if not found:
        formats = ["int8 rotated" if one == "int8" and rotate else one for one in formats]
        found = time_formats(sizes, formats, device, dtype, kept, passes)
        found = {one.removesuffix(" rotated"): seconds for one, seconds in found.items()}
        write(name, found)
    chosen = fastest(found)
    how = "remembered" if remembered else f"{len(sizes)} sizes timed in {time.perf_counter() - began:.1f} s"
    journal.note(products={"chosen": chosen, "seconds": found})
    journal.say(sentence(found, chosen, how))
    return chosen


def possible(config: RunConfig, device: torch.device) -> list[str]:
    """The 8-bit formats that this device multiplies fast and that no other option excludes."""
    works = {"fp8": fp8_matmul.supports_fp8(device), "int8": int8_matmul.supports_int8(device)}
    found = []
    for name, changes in FORMATS.items():
        with contextlib.suppress(ConfigError):
            building.replace(config, **changes)
            found += [name] * (works[name] and config.compile.compile)
    return found


def stored(config: RunConfig) -> str:
    """The format that the base is kept in where 16 bits win: "" where that is 16 bits as well."""
    return "int8" if config.precision.int8_base else "fp8" if config.precision.fp8_denoiser else ""


def matrix_sizes(config: RunConfig, family: Family, denoiser: nn.Module, kind: Kind) -> Sizes:
    """The sizes of frozen matrices in the blocks, for a batch of this kind, from a copy of the model without memory."""
    number, height, width, *sides = kind
    family, world = copy.deepcopy(family), FakeTensorContext()  # a family keeps tensors between calls
    dtype, sizes = fp8_storage.compute_type(config), Sizes()
    model = world.copy(denoiser, torch.device("cpu"), dtype)

    def note(layer: nn.Linear, given: tuple[torch.Tensor, ...]) -> None:
        if given[0].dim() > 2 and multiplies_in_8_bits(layer):
            sizes[Size(given[0].numel() // layer.in_features, layer.in_features, layer.out_features)] += 1

    for block in (block for group in blocks_by_class(model, family.block_classes) for block in group):
        for layer in fp8_storage.frozen_layers(block):
            layer.register_forward_pre_hook(note)
    reads = families.random_module(family.name).input_shapes(family, denoiser)
    autocast = torch.autocast("cpu", dtype) if dtype != torch.float32 else contextlib.nullcontext()
    with torch.no_grad(), world.inside(), autocast:
        latents, ones = torch.randn(number, reads.latent_channels, height, width), torch.ones(number)
        text = reads.texts(number, latents.device)
        noised, controls = NoisedBatch(latents, ones, latents, ones, ones, ones), reads.controls(latents, tuple(sides))
        family.predict(model, noised, text, torch.ones(number, 6), controls)
    return sizes


def time_formats(  # noqa: PLR0913 - what is timed, where, and how the training would do it
    sizes: Sizes, formats: Iterable[str], device: torch.device, dtype: torch.dtype, kept: str, passes: int
) -> dict[str, float]:
    """Seconds of the products of a step by format, the gradient of the input included. A format that fails is left
    out."""
    found, began = dict.fromkeys([WIDE, *formats], 0.0), time.perf_counter()
    for size, number in sorted(sizes.items(), key=lambda one: -one[0].work * one[1]):
        if time.perf_counter() - began > SECONDS:
            break
        for name in list(found):
            try:
                forward, backward = calls(size, name, device, dtype, kept)
                each = passes * timing.measure(forward, device, PLAN).p50 + timing.measure(backward, device, PLAN).p50
            except (RuntimeError, ValueError) as error:
                if name == WIDE or isinstance(error, torch.OutOfMemoryError):
                    return {}
                del found[name]
                continue
            found[name] += number * each / 1000
    return found


def calls(
    size: Size, name: str, device: torch.device, dtype: torch.dtype, kept: str = ""
) -> tuple[Callable[[], object], Callable[[], object]]:
    """What the forward and the backward pass of a product do in a format, as a compiled block has it."""
    x = torch.randn(size.tokens, size.inputs, device=device, dtype=dtype)
    g = torch.randn(size.tokens, size.outputs, device=device, dtype=dtype)
    weight = torch.randn(size.outputs, size.inputs, device=device, dtype=dtype)
    if name == WIDE:
        if not kept:
            return lambda: x @ weight.t(), lambda: g @ weight
        few = weight.to(fp8_matmul.FP8 if kept == "fp8" else torch.int8)
        return lambda: x @ few.to(dtype).t(), lambda: g @ few.to(dtype)
    by_row, ones = torch.ones(size.tokens, 1, device=device), torch.ones(1, size.inputs, device=device)
    columns = torch.ones(size.outputs, device=device)
    if name.startswith("int8"):
        few = weight.to(torch.int8)
        rotation = int8_matmul.hadamard().to(device, dtype) if name.endswith("rotated") else None

        def rounded(rows: torch.Tensor) -> torch.Tensor:
            rows.amax(-1)
            return rows.to(few.dtype)

        def turn(rows: torch.Tensor) -> torch.Tensor:
            return rows if rotation is None or size.inputs % int8_matmul.BLOCK else int8_matmul.rotated(rows, rotation)

        return (
            lambda: int8_matmul.int8_product(rounded(turn(x)), few, by_row, columns, dtype),
            lambda: turn(int8_matmul.int8_product(rounded(g), few.t().contiguous(), by_row, None, dtype)),
        )
    few = weight.to(fp8_matmul.FP8)
    turned = few.t().contiguous().t()

    def fp8_backward() -> torch.Tensor:
        few.clone()  # a compiled block turns the matrix as fast as it copies it
        g.amax(-1)
        return torch_private.scaled_mm(g.to(few.dtype), turned, by_row, ones)

    def fp8_forward() -> torch.Tensor:
        x.amax(-1)
        return torch_private.scaled_mm(x.to(few.dtype), few.t(), by_row, columns[None])

    return fp8_forward, fp8_backward


def fastest(found: Mapping[str, float]) -> str:
    """The format with the least time, if that is much less than in 16 bits."""
    best = min(found, key=lambda name: found[name], default=WIDE)
    return best if found and found[best] < GAIN * found[WIDE] else WIDE


def sentence(found: Mapping[str, float], chosen: str, how: str) -> str:
    """Times by format and the choice, as one line of the log."""
    if not found:
        return f"Matrix products are computed in {WIDE}: there was too little memory to time others."
    shares = ", ".join(f"{name} {found[name] / found[WIDE]:.2f}" for name in found if name != WIDE)
    failed = "" if shares else "all 8-bit formats failed"
    return f"Matrix products, as a share of the time in {WIDE}: {shares or failed}; {chosen} is used ({how})."


# ---- stored results, for the next start


def fingerprint(device: torch.device, sizes: Sizes, formats: Iterable[str], how: str) -> str:
    """The name of what was measured: machine, PyTorch, sizes, formats."""
    rows = sorted([*astuple(size), number] for size, number in sizes.items())
    facts = [VERSION, cache.key(device), rows, list(formats), how]
    return f"products-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]}.json"


def read(name: str) -> dict[str, float]:
    """Stored seconds by format; empty if there are none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        known = json.loads((autotune_cache.folder() / name).read_text(encoding="utf-8"))
        if known[WIDE] > 0:
            return {str(key): float(value) for key, value in known.items()}
    return {}


def write(name: str, found: Mapping[str, float]) -> None:
    """Store the times. If the folder cannot be written, the next start measures again."""
    if found:
        with contextlib.suppress(OSError):
            write_atomic(autotune_cache.folder() / name, json.dumps(found))
