"""`auto_compute`: choose 16 bits, fp8 or int8 for frozen matrices by timing this model's sizes on this GPU.

Rounding an input costs memory traffic: inside a compiled block one kernel reads the rows for their largest values, and
one reads them again and writes 8 bits. Here PyTorch's own kernels move the same bytes without compiling. The products
run on the training's own kernels.
"""

import contextlib
import copy
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
from library.measuring import stored_results, timing
from library.measuring.shapes import FakeTensorContext
from library.memory.compile_targets import blocks_by_class
from library.memory.quantization import fp8_matmul, fp8_storage, int8_matmul, multiplies_in_8_bits
from library.objectives.base import NoisedBatch
from library.train.journal import Journal
from library.train.saving import state_files
from library.train.step.loss import LossFunction

VERSION = 1
SECONDS = 3.0  # time limit; the largest sizes are timed first, so the rest matters little
GAIN = 0.95  # use 8 bits only below this share of the 16-bit time; a smaller gain is not worth the rounding
PLAN = timing.TimingPlan(steps=5, warmup=1, seconds=0.05)
IN_16_BITS = "16 bits"  # the type of mixed_precision, without 8-bit products
OFF: JsonObject = {"auto_compute": False}
# The options of each format. The base is stored in the format of its products.
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
        return self.tokens * self.inputs * self.outputs


Sizes = Counter[Size]  # how many matrices of a model have each size


# Which format is fastest depends on the GPU and on the sizes; timing whole compiled steps would take minutes.
# Why: docs/decisions/2026-11-22-products-are-timed.md
def find_best_format(batches: Batches, compute_loss: LossFunction, world: World, journal: Journal) -> RunConfig:
    """Return the config to train with: the user's, or with `auto_compute` the one with the fastest products here.

    A resumed training keeps its format. One process measures for all.
    """
    config = compute_loss.config
    if not (config.adapters and config.precision.auto_compute):
        return config
    chosen = _resumed(config)
    if chosen:
        journal.say(f"Matrix products: {chosen}, as in the training that is resumed.")
    else:
        choice = [_decide(batches, compute_loss, world.device, journal) if world.main else None]
        if world.ranks > 1:
            torch.distributed.broadcast_object_list(choice)
        chosen = choice[0] or IN_16_BITS
    compute_loss.family.config = building.replace_options(config, **FORMATS.get(chosen, OFF))
    return compute_loss.family.config


def _resumed(config: RunConfig) -> str:
    """Return the format of the resumed training, "" if there is none."""
    if not config.steps.resume:
        return ""
    settings = state_files.read_progress(Path(config.steps.resume)).get("settings", {})
    return "int8" if settings.get("int8_compute") else "fp8" if settings.get("fp8_compute") else IN_16_BITS


def _decide(batches: Batches, compute_loss: LossFunction, device: torch.device, journal: Journal) -> str:
    """Return the fastest format, measured or read from stored results, and log it with the times."""
    config, began = compute_loss.config, time.perf_counter()
    formats = possible(config, device)
    if not formats:
        why = "this machine cannot multiply in 8 bits"
        if fp8_matmul.supports_fp8(device) or int8_matmul.supports_int8(device):
            why = "another option excludes products in 8 bits"
        if not config.compile.compile:
            why = "without compile, rounding to 8 bits takes longer than 8 bits save"
        journal.say(f"Matrix products are computed in {IN_16_BITS}: {why}.")
        return IN_16_BITS
    ((kind, _),) = batches.kinds().most_common(1)
    sizes = matrix_sizes(config, compute_loss.family, compute_loss.components.denoiser, kind)
    passes = 2 if config.memory.recomputes_all(config) else 1  # forward, for each backward
    dtype, kept, rotate = fp8_storage.compute_type(config), stored(config), config.precision.int8_rotation
    name = fingerprint_products(device, sizes, formats, f"{dtype} {kept} {passes} {rotate}")
    seconds_by_format = read_format_times(name)
    remembered = bool(seconds_by_format)
    if not seconds_by_format:
        formats = ["int8 rotated" if label == "int8" and rotate else label for label in formats]
        seconds_by_format = time_formats(sizes, formats, device, dtype, kept, passes)
        seconds_by_format = {label.removesuffix(" rotated"): seconds for label, seconds in seconds_by_format.items()}
        if seconds_by_format:
            stored_results.store_result(name, seconds_by_format)
    chosen = fastest_format(seconds_by_format)
    how = "remembered" if remembered else f"{len(sizes)} sizes timed in {time.perf_counter() - began:.1f} s"
    journal.note(products={"chosen": chosen, "seconds": seconds_by_format})
    journal.say(choice_sentence(seconds_by_format, chosen, how))
    return chosen


def possible(config: RunConfig, device: torch.device) -> list[str]:
    """Return the 8-bit formats that this device multiplies fast and that no other option excludes."""
    works = {"fp8": fp8_matmul.supports_fp8(device), "int8": int8_matmul.supports_int8(device)}
    formats = []
    for name, changes in FORMATS.items():
        with contextlib.suppress(ConfigError):
            building.replace_options(config, **changes)
            formats += [name] * (works[name] and config.compile.compile)
    return formats


def stored(config: RunConfig) -> str:
    """Return the storage format of the base for 16-bit products: "" for 16 bits, else "int8" or "fp8"."""
    return "int8" if config.precision.int8_base else "fp8" if config.precision.fp8_denoiser else ""


def matrix_sizes(config: RunConfig, family: Family, denoiser: nn.Module, kind: Kind) -> Sizes:
    """Count the sizes of frozen matrices in the blocks for a batch of this kind, on a copy without memory."""
    number, height, width, *sides = kind
    family, world = copy.deepcopy(family), FakeTensorContext()  # a family keeps tensors between calls
    dtype, sizes = fp8_storage.compute_type(config), Sizes()
    model = world.copy(denoiser, torch.device("cpu"), dtype)

    def note(layer: nn.Linear, tensors: tuple[torch.Tensor, ...]) -> None:
        if tensors[0].dim() > 2 and multiplies_in_8_bits(layer):
            sizes[Size(tensors[0].numel() // layer.in_features, layer.in_features, layer.out_features)] += 1

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
    """Return the seconds of a step's products by format, the input's gradient included. Formats that fail
    are left out.
    """
    seconds, began = dict.fromkeys([IN_16_BITS, *formats], 0.0), time.perf_counter()
    for size, number in sorted(sizes.items(), key=lambda item: -item[0].work * item[1]):
        if time.perf_counter() - began > SECONDS:
            break
        for name in list(seconds):
            try:
                forward, backward = calls(size, name, device, dtype, kept)
                each = (
                    passes * timing.measure_call(forward, device, PLAN).p50
                    + timing.measure_call(backward, device, PLAN).p50
                )
            except (RuntimeError, ValueError) as error:
                if name == IN_16_BITS or isinstance(error, torch.OutOfMemoryError):
                    return {}
                del seconds[name]
                continue
            seconds[name] += number * each / 1000
    return seconds


def calls(
    size: Size, name: str, device: torch.device, dtype: torch.dtype, kept: str = ""
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that do the work of a product in a format, forward and backward, as in a compiled block."""
    x = torch.randn(size.tokens, size.inputs, device=device, dtype=dtype)
    g = torch.randn(size.tokens, size.outputs, device=device, dtype=dtype)
    weight = torch.randn(size.outputs, size.inputs, device=device, dtype=dtype)
    if name == IN_16_BITS:
        if not kept:
            return lambda: x @ weight.t(), lambda: g @ weight
        few = weight.to(fp8_matmul.FP8_DTYPE if kept == "fp8" else torch.int8)
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
            return (
                rows
                if rotation is None or size.inputs % int8_matmul.ROTATION_BLOCK
                else int8_matmul.rotate_blocks(rows, rotation)
            )

        return (
            lambda: int8_matmul.int8_product(rounded(turn(x)), few, by_row, columns, dtype),
            lambda: turn(int8_matmul.int8_product(rounded(g), few.t().contiguous(), by_row, None, dtype)),
        )
    few = weight.to(fp8_matmul.FP8_DTYPE)
    turned = few.t().contiguous().t()

    def fp8_backward() -> torch.Tensor:
        few.clone()  # a compiled block turns the matrix as fast as it copies it
        g.amax(-1)
        return torch_private.scaled_mm(g.to(few.dtype), turned, by_row, ones)

    def fp8_forward() -> torch.Tensor:
        x.amax(-1)
        return torch_private.scaled_mm(x.to(few.dtype), few.t(), by_row, columns[None])

    return fp8_forward, fp8_backward


def fastest_format(seconds: Mapping[str, float]) -> str:
    """Return the fastest format; 16 bits unless another is clearly faster."""
    best = min(seconds, key=lambda name: seconds[name], default=IN_16_BITS)
    return best if seconds and seconds[best] < GAIN * seconds[IN_16_BITS] else IN_16_BITS


def choice_sentence(seconds: Mapping[str, float], chosen: str, how: str) -> str:
    """Return times by format and the choice as one log line."""
    if not seconds:
        return f"Matrix products are computed in {IN_16_BITS}: there was too little memory to time others."
    shares = ", ".join(f"{name} {seconds[name] / seconds[IN_16_BITS]:.2f}" for name in seconds if name != IN_16_BITS)
    failed = "" if shares else "all 8-bit formats failed"
    return f"Matrix products, as a share of the time in {IN_16_BITS}: {shares or failed}; {chosen} is used ({how})."


# ---- stored results, for the next start


def fingerprint_products(device: torch.device, sizes: Sizes, formats: Iterable[str], how: str) -> str:
    """Return a file name that identifies a measurement: machine, PyTorch, sizes, formats."""
    rows = sorted([*astuple(size), number] for size, number in sizes.items())
    return f"products-{stored_results.digest([VERSION, cache.cache_key(device), rows, list(formats), how])}"


def read_format_times(name: str) -> dict[str, float]:
    """Return stored seconds by format; empty if there are none."""
    content = stored_results.read_result(name)
    with contextlib.suppress(ValueError, TypeError):
        times = {str(key): float(value) for key, value in content.items()}
        return times if times.get(IN_16_BITS, 0) > 0 else {}
    return {}
