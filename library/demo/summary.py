"""A summary of the demo's trainings, from their public records."""

import contextlib
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from PIL import Image

from library import families
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import counted
from library.config.run_config import RunConfig
from library.demo import configs
from library.families.shared.diffusers_layers import ADAPTER_ENDINGS
from library.files import write_atomic
from library.runs import layout, reader
from library.runs.sample_sheet import arrange_samples, draw_sheet

MEASURED_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "measured"


@dataclass(frozen=True)
class Outcome:
    """One finished training according to its record."""

    folder: Path
    losses: dict[int, float]  # by step
    speed: float | None  # steps per second after warm-up
    compiled: JsonMapping = field(default_factory=dict)  # seconds, num_graphs, recompiles; empty when eager
    fallback: str = ""  # why compiling failed, if it did
    file: Path | None = None
    device: str = ""  # as PyTorch calls it: cpu, cuda

    @property
    def first(self) -> float | None:
        return self._mean(slice(0, self._tenth))  # the mean of the first tenth of the steps

    @property
    def last(self) -> float | None:
        return self._mean(slice(-self._tenth, None))  # the mean of the last tenth of the steps

    @property
    def _tenth(self) -> int:
        return max(1, len(self.losses) // 10)

    def _mean(self, part: slice) -> float | None:
        values = [self.losses[step] for step in sorted(self.losses)][part]
        return sum(values) / len(values) if values else None


# Everything that the demo prints can be looked up in the record afterwards.
# Why: docs/decisions/2026-11-20-demo-reads-the-record.md
def read_outcome(folder: Path) -> Outcome:
    """Return the outcome of the run in `folder`."""
    facts, events = reader.run_at(folder).facts, reader.read_events(folder)
    steps = [e for e in events if e["kind"] == "step" and isinstance(e.get("loss"), int | float)]
    compiled = facts.get("compile") or {}
    file = Path(facts.get("output_dir", ""), f"{facts.get('output_name')}.safetensors")
    return Outcome(
        folder,
        {e["step"]: e["loss"] for e in steps},
        speed_of(steps),
        compiled if compiled.get("num_graphs") else {},
        compiled.get("fallback") or "",
        file if file.is_file() else None,
        (facts.get("hardware") or {}).get("device") or "",
    )


def speed_of(steps: list[JsonObject]) -> float | None:
    """Return steps per second in the second half of the steps: of a usual one, without samples in between."""
    half = [e for e in steps if e["step"] * 2 >= steps[-1]["step"]] if steps else []
    paces = [(now["t"] - before["t"]) / (now["step"] - before["step"]) for before, now in pairwise(half)]
    return 1 / median(paces) if paces and median(paces) > 0 else None


def largest_difference(outcome: Outcome, other: Outcome) -> float | None:
    """Return the largest relative difference of two losses of the same step; None if no step is shared."""
    shared = outcome.losses.keys() & other.losses.keys()
    return max(
        (abs(outcome.losses[s] - other.losses[s]) / max(abs(outcome.losses[s]), 1e-12) for s in shared), default=None
    )


def summary_text(model: str, outcomes: Mapping[str, Outcome], config: RunConfig, learns: bool = False) -> str:
    """Return the lines about the runs of a family or a relative: `outcomes` by "eager" and, if it was tried,
    "compiled". `learns`: the model is a trained one, not a random one."""
    eager, fast = outcomes["eager"], outcomes.get("compiled")
    steps = str(counted(len((fast or eager).losses), "step"))
    lines = [f"{configs.title_of_training(config.script, model)}, {steps}", *outcome_table(outcomes), ""]
    if not learns:
        lines.append("  This model has random weights, so its images would be noise: none is shown.")
    if fast and fast.compiled and (difference := largest_difference(eager, fast)) is not None:
        lines.append(f"  With and without compile the losses differ by at most {difference:.2g} of their size.")
        lines += [f"  {line}" for line in verdict(config.family, eager, fast)]
    if fast and fast.fallback:
        lines.append(f"  It was not compiled: {fast.fallback}")
    if file := (fast or eager).file:
        lines += [f"  {describe_diffusers_fit(file, config)}", f"  The LoRA: {file}"]
    return "\n".join([*lines, f"  Its record: {(fast or eager).folder}", ""])


def outcome_table(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Return the figures, a column per run; those about compiling only where it was tried."""
    about_compiling: dict[str, list[str]] = {
        "compile seconds": [compile_time(o) for o in outcomes.values()],
        "graphs": [format_number(o.compiled.get("num_graphs"), "d") for o in outcomes.values()],
        "recompiles": [format_number(o.compiled.get("recompiles"), "d") for o in outcomes.values()],
    }
    tried = "compiled" in outcomes
    titles = [kind if o.compiled or kind == "eager" else f"not {kind}" for kind, o in outcomes.items()]
    rows: dict[str, list[str]] = {
        **({"": titles} if tried else {}),
        "steps per second": [format_number(o.speed, ".2f") for o in outcomes.values()],
        **(about_compiling if tried else {}),
        "steps": [str(len(o.losses)) for o in outcomes.values()],
        "loss, first to last": [
            f"{format_number(o.first, '.4f')} to {format_number(o.last, '.4f')}" for o in outcomes.values()
        ],
    }
    return [f"  {name:<20}" + "".join(f"{cell:>20}" for cell in cells) for name, cells in rows.items()]


def verdict(family: str, eager: Outcome, fast: Outcome) -> list[str]:
    """Say whether compiling was worth its time in this demo; on a CPU also the gain on a GPU."""
    lines, spent = [], fast.compiled.get("seconds") or 0.0
    if eager.speed and fast.speed:
        saved = 1 / eager.speed - 1 / fast.speed
        if fast.speed >= 1.02 * eager.speed:
            lines.append(
                f"Compiled steps were {fast.speed / eager.speed:.2f} times as fast; "
                f"the {spent:.1f} s of compiling are recovered after {counted(math.ceil(spent / saved), 'step')!s}."
            )
        else:
            lines.append(
                f"Compiling did not pay here: {fast.speed:.2f} steps per second instead of {eager.speed:.2f}, "
                f"after {spent:.1f} s of compiling."
            )
    if fast.device == "cpu":
        lines.append("On a CPU compiling often does not pay: torch.compile is for GPUs, and this model is tiny.")
        lines.append(gain(family))
    return lines


def compile_time(outcome: Outcome) -> str:
    cached = " (from cache)" if outcome.compiled.get("cache_hits") else ""
    return format_number(outcome.compiled.get("seconds"), ".1f") + cached


def format_number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def describe_diffusers_fit(file: Path, config: RunConfig) -> str:
    """Say whether diffusers can use a LoRA file."""
    matched, wrong = check_lora_layers(file, config)
    if wrong:
        return "\n    ".join([f"In diffusers {len(wrong)} of its keys fit nowhere:", *wrong[:5]])
    return f"Loads into diffusers: {counted(matched, 'layer')!s}, no key left over."


# diffusers' own converters decide, as they are what users will load the file with.
# Why: docs/decisions/2026-11-20-lora-checked-with-diffusers.md
def check_lora_layers(file: Path, config: RunConfig) -> tuple[int, list[str]]:
    """Return how many layers of diffusers' model the file's adapters fit, and what fits nowhere (key or size, a line
    each).

    `config` is the file's training config, which determines the model. Takes seconds, mostly for imports.
    """
    from safetensors.torch import load_file

    tensors = load_file(file)
    # diffusers imports it, and it warns of kernels that nothing here uses.
    logging.getLogger("bitsandbytes.backends").setLevel(logging.ERROR)
    try:
        converted, sizes = families.random_module(config.family).convert_for_diffusers(tensors, config)
    except (ValueError, AssertionError, KeyError) as error:
        return 0, [f"diffusers cannot convert the file: {error}"]
    wrong = []
    for name, tensor in converted.items():
        layer, dimension = _layer_and_dimension(name)
        if layer not in sizes:
            wrong.append(f"{name}: diffusers has no such layer")
        elif tensor.shape[dimension] != sizes[layer][dimension]:
            wrong.append(f"{name}: {tensor.shape[dimension]} features, the layer has {sizes[layer][dimension]}")
    return len({_layer_and_dimension(name)[0] for name in converted}) if not wrong else 0, wrong


def _layer_and_dimension(name: str) -> tuple[str, int]:
    """Return the layer's name, and the dimension that an adapter must match: 1 (input) for A, 0 (output) for B."""
    for dimension, ending in ((1, ADAPTER_ENDINGS[0]), (0, ADAPTER_ENDINGS[1])):
        if name.endswith(ending):
            return name.removesuffix(ending), dimension
    return name, 0


def gain(family: str, folder: Path = MEASURED_FOLDER) -> str:
    """Describe the newest figures of a LoRA step with checkpointing, eager and compiled, with their file.

    Without any, refer to the documentation of figures.
    """
    title = families.facts_of(family).title
    for path in sorted(folder.glob("*.json"), reverse=True):
        measurements = json.loads(path.read_text(encoding="utf-8"))
        eager = min(_step_rows(measurements, family, compiled=False), default=None)
        fast = min(_step_rows(measurements, family, compiled=True), default=None)
        if eager and fast:
            note = measurements["machine"].get("note", "")
            return (
                f"On an {measurements['machine']['gpu']} a step of full-size {title} took {eager[1]:.3g} s eagerly "
                f"({eager[2]}) and {fast[1]:.3g} s compiled ({fast[2]}): docs/measured/{path.name}."
                + (f" {note}" if title in note else "")
            )
    return "docs/dev/performance.md says what compiling gives with full-size models on a GPU."


def _step_rows(measurements: JsonObject, family: str, compiled: bool) -> Iterator[tuple[int, float, str]]:
    """Return number of settings, seconds per step and settings of each row; the fewest settings show
    compiling alone.
    """
    for row in measurements["rows"]:
        settings = [word.strip() for word in row["how"].split(",")]
        is_ours = (row["trainer"], row["family"], row["method"], row["batch"]) == ("here", family, "lora", 1)
        if is_ours and "checkpointing" in settings and ("compile" in settings) == compiled:
            yield len(settings), row["s_it"], row["how"]


def write_picture(run: Path) -> list[str]:
    """Write the picture of the run in this folder beside its LoRA. Return lines that say where it is, or why there is
    none, and which samples failed."""
    facts, events = reader.run_at(run).facts, reader.read_events(run)
    samples = [event for event in events if event["kind"] == "sample"]
    failed = list(dict.fromkeys(str(event.get("text")) for event in events if event["kind"] == "sample_failed"))
    missing = [f"  Some samples could not be generated: {'; '.join(failed)}"] if failed else []
    sheet = arrange_samples(samples)
    if sheet is None:
        return ["There is no image of what was learned, as the training left no samples to compare.", *missing]

    def opened(place: int) -> Image.Image | None:
        path = Path(str(facts.get("folder") or "."), str(samples[place].get("file")))
        try:
            with Image.open(path) as image:
                return image.convert("RGB")
        except OSError:
            return None

    path = Path(str(facts["output_dir"]), f"{facts['output_name']}.png")
    shown = _training_images(facts, len(sheet.steps))
    write_atomic(path, draw_sheet(sheet, opened, training_images=shown).save)
    columns = "the base model, the LoRA halfway, and at the end" if len(sheet.steps) > 2 else "before and after"
    return [
        f"What it has learned, as an image: {path}",
        f"  Each row is a prompt; the columns are {columns}.",
        *(["  The last row shows what it learned from."] if shown else []),
        *missing,
    ]


def _training_images(facts: JsonMapping, count: int) -> list[Image.Image]:
    """Return some of the images that a run was trained on, far apart in their order; none if they are gone."""
    folder = layout.facts_section(facts, "data").get("train_data_dir")
    files = sorted(Path(str(folder)).rglob("*.png")) if folder else []
    images = []
    for file in files[:: max(1, len(files) // count)][:count]:
        with contextlib.suppress(OSError), Image.open(file) as image:
            images.append(image.convert("RGB"))
    return images
