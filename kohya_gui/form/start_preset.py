"""What a form opens with: per tab and family the preset that suits this machine's GPU, and why it is that one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_gui.form import compile_summary, presets, recipes
from kohya_gui.form.form import defaults_title, shown_value
from library import families
from library.config.building import build_config, draft, replace_options
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.recipes import preset_files
from library.runs import gpu_slots, machine

DEFAULTS = "defaults"  # the id of a start that sets nothing
PRODUCTS = ("fp8_compute", "int8_compute", "auto_compute")
# Most processors take many times as long in bf16 and fp8.
EMULATED = ("mixed_precision", "full_bf16", "fp8_base", "no_half_vae")
FP8_CAPABILITY = (8, 9)  # the capability from which a GPU multiplies in fp8: RTX 40
BF16 = (8, 0)  # and from which in bf16: A100, RTX 30
ALONE = "nothing else on the GPU"  # what a preset's sentence says where there is no memory to spare
SPARE = 2  # GB that a GPU has more than a preset is for, from which on other programs fit beside it
OF_A_GPU = ("compiled", "CUDA graphs", ALONE)  # what it says that needs a GPU


@dataclass(frozen=True)
class Gpu:
    """The GPU that a training would use: its name, its memory in GiB, and CUDA's number of what it can compute."""

    name: str = ""
    memory: float = 0.0
    capability: tuple[int, int] | None = None


def training_gpu() -> Gpu | None:
    """The first of the GPUs that trainings may use; without a memory where that is not known. None without a GPU."""
    first = gpu_slots.devices()[0]
    if first == gpu_slots.CPU:
        return None
    found = machine.GPUS.known()
    named = next((gpu for gpu in found if gpu.index == first), None)
    if named is None and not first.upper().startswith("MIG"):  # named by its id, or not at all: any of them
        named = min(found, key=lambda gpu: gpu.total, default=None)
    return Gpu(named.name, named.total, named.capability) if named else Gpu()


def suited(ready: Sequence[preset_files.Preset], gpu: Gpu | None) -> tuple[preset_files.Preset, MessageLike] | None:
    """Of the presets of one kind and family the one to start with, and why; None where there is none."""
    sized = sorted((preset for preset in ready if preset.gigabytes), key=lambda preset: preset.gigabytes)
    if not sized:
        return (ready[0], "") if ready else None
    least = sized[0]
    if gpu is None:
        return least, "No NVIDIA GPU was found: this is the preset for the least memory."
    if not gpu.memory:
        return least, "The memory of the GPU is not known: this is the preset for the least memory."
    title = f"{gpu.name}, {gpu.memory:.0f} GB"
    fitting = [preset for preset in sized if machine.has_memory(gpu.memory, preset.gigabytes)]
    if not fitting:
        return least, Message(
            "{title}: that is less than any preset is for; this is the smallest, and may run out of memory.",
            title=title,
        )
    return fitting[-1], Message("Chosen for this GPU: {title}.", title=title)


def apply_preset(preset: preset_files.Preset, config: type, now: JsonMapping, notes: list[MessageLike]) -> Any:
    """A preset on top of the defaults, as `presets.apply` makes it; where there is no GPU in float32 and without
    compiling, which takes a processor minutes before the first step, and without 8-bit products, which only GPUs have.
    Where the GPU has none in fp8, others are timed, and one that has no bf16 computes in fp16. `notes` say what is
    other than in the preset's file."""
    config_with_preset, gpu = presets.apply(preset, config, now, notes), training_gpu()
    if gpu:
        return _as_the_gpu_can(config_with_preset, gpu.capability or FP8_CAPABILITY, notes)
    if not config_with_preset.compile.compile:
        return config_with_preset
    notes.append("No GPU found, so compiling, bf16 and fp8 are switched off.")
    options = options_of(config)
    kept = {
        name: value
        for name, value in flatten_sections(changed(config_with_preset)).items()
        if not presets.is_of_compiling(options[name]) and name not in PRODUCTS + EMULATED
    }
    return build_config(config, kept, preset.path.name, notes=[])


def _as_the_gpu_can(made: Any, capability: tuple[int, int], notes: list[MessageLike]) -> Any:
    changes: JsonObject = {}
    if capability < FP8_CAPABILITY and made.precision.fp8_compute:
        changes = {"fp8_compute": False, "auto_compute": True}
        notes.append(
            "Unlike in the preset, auto_compute is on and fp8_compute off: this GPU has no products in fp8, and may "
            "have fast ones in int8."
        )
    if capability < BF16 and made.precision.mixed_precision == "bf16":
        if halved := _in_fp16(made, changes):
            notes.append("Unlike in the preset, mixed_precision is fp16: this GPU emulates bf16, which is slow.")
            return halved
        notes.append("This GPU emulates bf16, which is slow, and this preset cannot do without bf16.")
    return replace_options(made, **changes) if changes else made


def _in_fp16(made: Any, changes: JsonObject) -> Any:
    """The same in fp16; None where the model or another option excludes that."""
    if families.facts_of(made.family).exceeds_fp16:
        return None
    try:
        return replace_options(made, **changes, mixed_precision="fp16", save_precision="fp16")
    except ConfigError:
        return None


def preset_sentence(preset: preset_files.Preset, gpu: Gpu | None) -> str:
    """A preset's sentence, less what does not hold for this GPU: one with more memory has room for other programs."""
    text = compile_summary.compiling_sentence(preset)
    needs_all = gpu is not None and not machine.has_memory(gpu.memory, preset.gigabytes + SPARE)
    return text if needs_all else text.replace(f", {ALONE}", "")


@dataclass(frozen=True)
class Situation:
    """What of a form decides about the recipe on top of a preset: what it trains and is for, and how many images."""

    model: JsonMapping = field(default_factory=dict)  # values of options that say which model it is
    purpose: str = ""
    images: int = 0  # 0: not counted yet
    at_once: int = 1  # images in a step


def preset_as_start(
    kind: str,
    preset: preset_files.Preset,
    config: type,
    folder: str,
    why: MessageLike = "",
    situation: Situation = Situation(),
) -> JsonObject:
    """A preset as the page's scripts take it: what it is, and what it makes other than the defaults, as fields show
    it; with a name for the result and a `folder` for results, which presets leave open. On top of it comes the recipe
    for a purpose."""
    notes: list[MessageLike] = []
    made, known = apply_preset(preset, config, {}, notes), options_of(config)
    model = draft(config, {**option_values(made), **situation.model})
    made, recipe = recipes.apply_recipe(made, model, situation.purpose, situation.images, situation.at_once)
    given = {name: shown_value(known[name], value) for name, value in flatten_sections(changed(made)).items()}
    given |= {"output_name": f"{preset.family}-{kind}"} | ({"output_dir": folder} if folder else {})
    text = preset_sentence(preset, training_gpu())
    if not made.compile.compile:  # which the preset's figures rest on, and which only a GPU does
        sets = text.partition("; ")[0].removesuffix(".").split(", ")
        text = ", ".join(piece for piece in sets if piece not in OF_A_GPU and "fp8" not in piece)
    elif ALONE in text:  # a note, as a phone has no room for the sentence
        text = text.replace(f", {ALONE}", "")
        notes.append("It needs all of the GPU's memory: close other programs that use it, such as games and video.")
    said = [note if isinstance(note, Message) else Message(note) for note in notes]
    shown = {"id": preset.id, "title": preset.title, "text": text, "why": why, "notes": said, "values": given}
    return {**shown, **recipe}


def starts(kind: str, configs: Mapping[str, type], folder: str = "") -> dict[str, JsonObject]:
    """With what the form of a tab opens, by family; a family that has no preset begins with the defaults."""
    gpu, found = training_gpu(), {}
    for family, config in configs.items():
        chosen = suited(preset_files.of_kind(kind, [family]), gpu)
        if chosen:
            found[family] = preset_as_start(kind, chosen[0], config, folder, chosen[1])
    return found


def value(kind: str, config: type, name: str) -> JsonObject:
    """The value of an option in what the form begins with, by its name; nothing where that leaves it open."""
    begun = starts(kind, {config.family: config}).get(config.family, {}).get("values", {})
    return {name: begun[name]} if name in begun else {}


def results(roots: Sequence[Path]) -> str:
    """The folder for results that a form proposes: beside the models, data sets and generated images of the page."""
    return str(roots[0] / "kohya" / "output")


def bare(family: str) -> JsonObject:
    """The defaults as a start: named where a preset is named, and setting nothing."""
    text = "Every option is as it is where nothing is given; most of them have to be set."
    return {"id": DEFAULTS, "title": defaults_title(family), "text": text, "why": "", "values": {}}


def loaded_as_start(name: str) -> JsonObject:
    """A config that was loaded, as a start: whatever it sets is shown as changed from the defaults."""
    return {"id": "", "title": name, "text": "", "why": "", "values": {}}
