"""What a form opens with: per tab and family the preset that suits this machine's GPU, and the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_gui.form import compile_summary, presets, recipes
from kohya_gui.form.form import defaults_title, shown_value
from library import families
from library.config.building import build, draft, replace
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.config.schema import changed, flat, options, values
from library.recipes import preset_files
from library.runs import gpu_slots, machine

DEFAULTS = "defaults"  # the id of a start that sets nothing
PRODUCTS = ("fp8_compute", "int8_compute", "auto_compute")
# Most processors take many times as long in bf16 and fp8.
EMULATED = ("mixed_precision", "full_bf16", "fp8_base", "no_half_vae")
FP8 = (8, 9)  # the lowest compute capability with fp8 products: RTX 40
BF16 = (8, 0)  # and with bf16: A100, RTX 30
ALONE = "nothing else on the GPU"  # in the sentence of presets that leave no memory to spare
SPARE_GB = 2  # GB beyond a preset's memory with which other programs fit beside it
NO_GPU = "No GPU found, so compiling, bf16 and fp8 are switched off."
SWITCHED_OFF = "Compiling, bf16 and fp8 are switched off."  # the same beside a sentence that says why
OF_A_GPU = ("compiled", "CUDA graphs", ALONE)  # parts of a preset's sentence that need a GPU


@dataclass(frozen=True)
class Gpu:
    """The GPU that a training would use: its name, its memory in GiB, and its compute capability."""

    name: str = ""
    memory: float = 0.0
    capability: tuple[int, int] | None = None


def training_gpu() -> Gpu | None:
    """The first GPU that trainings may use; its memory is unknown in some cases. None without a GPU."""
    first = gpu_slots.devices()[0]
    if first == gpu_slots.CPU:
        return None
    found = machine.GPUS.known()
    named = next((gpu for gpu in found if gpu.index == first), None)
    if named is None and not first.upper().startswith("MIG"):  # named by its id, or not at all: it may be any of them
        named = min(found, key=lambda gpu: gpu.total, default=None)
    return Gpu(named.name, named.total, named.capability) if named else Gpu()


def suited(ready: Sequence[preset_files.Preset], gpu: Gpu | None) -> tuple[preset_files.Preset, MessageLike] | None:
    """The preset to start with among those of one kind and family, and the reason; None if there is none."""
    sized = sorted((preset for preset in ready if preset.gigabytes), key=lambda preset: preset.gigabytes)
    if not sized:
        return (ready[0], "") if ready else None
    least = sized[0]
    if gpu is None:
        return least, "No NVIDIA GPU found: this is the preset for the least memory."
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


def applied(preset: preset_files.Preset, config: type, now: JsonMapping, notes: list[MessageLike]) -> Any:
    """A preset on top of the defaults, as `presets.apply` makes it; without a GPU in float32 and without compiling,
    which takes a processor minutes before the first step, and without 8-bit products, which only GPUs have. A GPU
    without fp8 has others timed, and one without bf16 computes in fp16. `notes` list the differences from the preset's
    file."""
    made, gpu = presets.apply(preset, config, now, notes), training_gpu()
    if gpu:
        return _as_the_gpu_can(made, gpu.capability or FP8, notes)
    if not made.compile.compile:
        return made
    notes.append(NO_GPU)
    known = options(config)
    kept = {
        name: value
        for name, value in flat(changed(made)).items()
        if not presets.is_of_compiling(known[name]) and name not in PRODUCTS + EMULATED
    }
    return build(config, kept, preset.path.name, notes=[])


def _as_the_gpu_can(made: Any, capability: tuple[int, int], notes: list[MessageLike]) -> Any:
    changes: JsonObject = {}
    if capability < FP8 and made.precision.fp8_compute:
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
    return replace(made, **changes) if changes else made


def _in_fp16(made: Any, changes: JsonObject) -> Any:
    """The same in fp16; None if the model or another option excludes that."""
    if families.facts(made.family).exceeds_fp16:
        return None
    try:
        return replace(made, **changes, mixed_precision="fp16", save_precision="fp16")
    except ConfigError:
        return None


def about(preset: preset_files.Preset, gpu: Gpu | None) -> str:
    """A preset's sentence, without what does not hold for this GPU: one with more memory has room for other
    programs."""
    text = compile_summary.about(preset)
    needs_all = gpu is not None and not machine.has_memory(gpu.memory, preset.gigabytes + SPARE_GB)
    return text if needs_all else text.replace(f", {ALONE}", "")


@dataclass(frozen=True)
class Situation:
    """What a recipe on top of a preset depends on: the model, the purpose, and the number of images."""

    model: JsonMapping = field(default_factory=dict)  # values of options that identify the model
    purpose: str = ""
    images: int = 0  # 0: not counted yet
    at_once: int = 1  # images in a step


def start(
    kind: str,
    preset: preset_files.Preset,
    config: type,
    folder: str,
    why: MessageLike = "",
    situation: Situation = Situation(),
) -> JsonObject:
    """A preset as the page's scripts expect it: its title, and its differences from the defaults as values of fields;
    with a name for the result and a `folder` for results, which presets leave open. On top of it comes the recipe for a
    purpose."""
    notes: list[MessageLike] = []
    made, known = applied(preset, config, {}, notes), options(config)
    model = draft(config, {**values(made), **situation.model})
    made, recipe = recipes.applied(made, model, situation.purpose, situation.images, situation.at_once)
    given = {name: shown_value(known[name], value) for name, value in flat(changed(made)).items()}
    given |= {"output_name": f"{preset.family}-{kind}"} | ({"output_dir": folder} if folder else {})
    text = about(preset, training_gpu())
    if not made.compile.compile:  # the preset's figures assume compiling, which only works on a GPU
        sets = text.partition("; ")[0].removesuffix(".").split(", ")
        text = ", ".join(piece for piece in sets if piece not in OF_A_GPU and "fp8" not in piece)
    elif ALONE in text:  # a note, as the sentence does not fit on a phone
        text = text.replace(f", {ALONE}", "")
        notes.append("It needs all of the GPU's memory: close other programs that use it, such as games and video.")
    notes = [SWITCHED_OFF if why and note is NO_GPU else note for note in notes]
    said = [note if isinstance(note, Message) else Message(note) for note in notes]
    shown = {"id": preset.id, "title": preset.title, "text": text, "why": why, "notes": said, "values": given}
    return {**shown, **recipe}


def starts(kind: str, configs: Mapping[str, type], folder: str = "") -> dict[str, JsonObject]:
    """The starts of a tab's form by family; a family without a preset starts with the defaults."""
    gpu, found = training_gpu(), {}
    for family, config in configs.items():
        chosen = suited(preset_files.of_kind(kind, [family]), gpu)
        if chosen:
            found[family] = start(kind, chosen[0], config, folder, chosen[1])
    return found


def value(kind: str, config: type, name: str) -> JsonObject:
    """The initial value of an option by its name; nothing if the preset leaves it open."""
    begun = starts(kind, {config.family: config}).get(config.family, {}).get("values", {})
    return {name: begun[name]} if name in begun else {}


def results(roots: Sequence[Path]) -> str:
    """The folder for results that a form proposes: beside the page's models, data sets and generated images."""
    return str(roots[0] / "kohya" / "output")


def bare(family: str) -> JsonObject:
    """The defaults as a start: with a title like a preset, but setting nothing."""
    text = "Every option is as it is where nothing is given; most of them have to be set."
    return {"id": DEFAULTS, "title": defaults_title(family), "text": text, "why": "", "values": {}}


def loaded(name: str) -> JsonObject:
    """A loaded config as a start: everything it sets is shown as changed from the defaults."""
    return {"id": "", "title": name, "text": "", "why": "", "values": {}}
