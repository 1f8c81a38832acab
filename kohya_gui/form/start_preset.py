"""The start of a form: per tab and family the preset that suits this machine's GPU, and the reason."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kohya_gui.form import presets, recipes
from kohya_gui.form.form import defaults_title, shown_value
from library import families
from library.config.building import build_config, draft, replace_options
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, as_message
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.config.sections.compiling import LESS_IN_8_BITS
from library.config.stored_messages import how_made
from library.recipes import preset_files
from library.runs import gpu_slots, machine

DEFAULTS = "defaults"  # id of a start without changes
PRODUCTS = ("fp8_compute", "fp8_transposed_weights", "int8_compute", "auto_compute")
# Most processors take many times as long in bf16 and fp8.
EMULATED = ("mixed_precision", "full_bf16", "fp8_base", "no_half_vae")
FP8_CAPABILITY = (8, 9)  # the lowest compute capability with fp8 products: RTX 40
BF16_CAPABILITY = (8, 0)  # and with bf16: A100, RTX 30
ALONE = "nothing else on the GPU"  # in the sentence of presets that leave no memory to spare
SPARE_GB = 2  # GB beyond a preset's memory with which other programs fit beside it
NO_GPU = "No GPU found, so compiling, bf16 and fp8 are switched off."
SWITCHED_OFF = "Compiling, bf16 and fp8 are switched off."  # the same beside a sentence that says why
# Parts of a preset's sentence that need a GPU.
OF_A_GPU = ("compiled", "CUDA graphs", ALONE, "bf16", "weights stored twice")
SHARE = " of activations kept"  # another one, behind its percentage
KEEPS_ALL, RECOMPUTES = "no checkpointing", "checkpointing that keeps attention outputs"
RECOMPUTED: JsonMapping = {
    "gradient_checkpointing": True,
    "checkpoint_keep_attention": True,
    "compile_activation_budget": 1.0,
}


@dataclass(frozen=True)
class Gpu:
    """The GPU that a training would use: its name, its memory in GiB, and its compute capability."""

    name: str = ""
    memory: float = 0.0
    capability: tuple[int, int] | None = None


def training_gpu() -> Gpu | None:
    """Return the first GPU that trainings may use; its memory is unknown in some cases. None without a GPU."""
    first = gpu_slots.devices()[0]
    if first == gpu_slots.CPU:
        return None
    gpus = machine.GPUS.known()
    gpu = next((gpu for gpu in gpus if gpu.index == first), None)
    if gpu is None and not first.upper().startswith("MIG"):  # named by UUID or not at all, so it may be any of them
        gpu = min(gpus, key=lambda gpu: gpu.total, default=None)
    return Gpu(gpu.name, gpu.total, gpu.capability) if gpu else Gpu()


def suited(ready: Sequence[preset_files.Preset], gpu: Gpu | None) -> tuple[preset_files.Preset, MessageLike] | None:
    """Return the preset to start with among those of one kind and family, and the reason; None if there is none."""
    sized = sorted((preset for preset in ready if preset.gigabytes), key=lambda preset: preset.gigabytes)
    if not sized:
        why = "" if gpu else "No NVIDIA GPU found; this preset suits any GPU."
        return (ready[0], why) if ready else None
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


def reason_for(preset: preset_files.Preset, kind: str) -> MessageLike:
    """Return why a form starts with this preset; "" if this machine's forms start with another one."""
    start = suited(preset_files.of_kind(kind, [preset.family]), training_gpu())
    return start[1] if start and start[0].id == preset.id else ""


def apply_preset(preset: preset_files.Preset, config: type, now: JsonMapping, notes: list[MessageLike]) -> Any:
    """Return a preset on top of the defaults, as `presets.apply` makes it; without a GPU in float32 and without
    compiling, which takes a processor minutes before the first step, and without 8-bit products, which only GPUs have.
    A GPU without fp8 has others timed, and one without bf16 computes in fp16. `notes` list the differences from the
    preset's file."""
    config_of_preset, device = presets.apply(preset, config, now, notes), training_gpu()
    if device:
        return _as_the_gpu_can(config_of_preset, device.capability or FP8_CAPABILITY, notes)
    if not config_of_preset.compile.compile:
        return config_of_preset
    notes.append(NO_GPU)
    options = options_of(config)
    kept_values = {
        name: value
        for name, value in flatten_sections(changed(config_of_preset)).items()
        if not presets.is_of_compiling(options[name]) and name not in PRODUCTS + EMULATED
    }
    return build_config(config, kept_values, preset.path.name, notes=[])


def _as_the_gpu_can(config: Any, capability: tuple[int, int], notes: list[MessageLike]) -> Any:
    changes: JsonObject = {}
    if capability < FP8_CAPABILITY and config.precision.fp8_compute:
        changes = {"fp8_compute": False, "fp8_transposed_weights": False, "auto_compute": True}
        notes.append(
            "Unlike in the preset, auto_compute is on and fp8_compute off: this GPU has no products in fp8, and may "
            "have fast ones in int8."
        )
        share = max(config.compile.compile_activation_budget - LESS_IN_8_BITS, 0.0)
        if config.compile.keeps_by_budget:
            changes["compile_activation_budget"] = round(share, 2)
            notes.append(
                Message(
                    "{share} of activations are kept, fewer than in the preset: without fp8 products they take more "
                    "memory.",
                    share=f"{share:.0%}",
                )
            )
    if capability < BF16_CAPABILITY and config.precision.mixed_precision == "bf16":
        if halved := _in_fp16(config, changes):
            notes.append("Unlike in the preset, mixed_precision is fp16: this GPU emulates bf16, which is slow.")
            return halved
        notes.append("This GPU emulates bf16, which is slow, and this preset cannot do without bf16.")
    return replace_options(config, **changes) if changes else config


def _in_fp16(config: Any, changes: JsonObject) -> Any:
    """Return the config in fp16; None if the model or another option excludes that."""
    if families.facts_of(config.family).exceeds_fp16:
        return None
    try:
        return replace_options(config, **changes, mixed_precision="fp16", save_precision="fp16")
    except ConfigError:
        return None


def description_for(preset: preset_files.Preset, gpu: Gpu | None) -> preset_files.Description:
    """Return a preset's description without what does not apply to this GPU: one with more memory has room for other
    programs."""
    needs_all = gpu is not None and not machine.has_memory(gpu.memory, preset.gigabytes + SPARE_GB)
    return preset.description if needs_all else _without(preset.description, ALONE)


def _without(description: preset_files.Description, *left_out: str) -> preset_files.Description:
    settings = tuple(setting for setting in description.settings if setting not in left_out)
    return replace(description, settings=settings)


def _described(preset: preset_files.Preset, config: Any, has_references: bool) -> preset_files.Description:
    """Return a preset's description as far as it is true of a config that differs from it. Its figures are only true
    with compiling and without reference images."""
    description, options = description_for(preset, training_gpu()), config.compile
    settings = description.settings
    if options.keeps_by_budget:  # less than in the preset on a GPU without fp8
        kept = f"{options.compile_activation_budget:.0%}{SHARE}"
        settings = tuple(re.sub(rf"\d+%{SHARE}", kept, setting) for setting in settings)
    if has_references:
        settings = tuple(RECOMPUTES if SHARE in part or part == KEEPS_ALL else part for part in settings)
    if not options.compile:  # compiling only works on a GPU
        settings = tuple(part for part in settings if "fp8" not in part and SHARE not in part)
        return _without(preset_files.Description(settings), *OF_A_GPU)
    return preset_files.Description(settings, "" if has_references else description.figures)


@dataclass(frozen=True)
class Situation:
    """The facts that a recipe on top of a preset depends on: the model, the purpose, and the number of images."""

    model: JsonMapping = field(default_factory=dict)  # values of options that identify the model
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
    """Return a preset as the page's scripts expect it: its title, and its differences from the defaults as values of
    fields; with a name for the result and a `folder` for results, which presets leave open. On top of it comes the
    recipe for a purpose."""
    notes: list[MessageLike] = []
    preset_config, options = apply_preset(preset, config, {}, notes), options_of(config)
    model = draft(config, {**option_values(preset_config), **situation.model})
    preset_config, recipe = recipes.apply_recipe(
        preset_config, model, situation.purpose, situation.images, situation.at_once
    )
    with_references = with_room_for_references(preset_config, preset, recipe, notes)
    values = {
        name: shown_value(options[name], value) for name, value in flatten_sections(changed(with_references)).items()
    }
    values |= {"output_name": f"{preset.family}-{kind}"} | ({"output_dir": folder} if folder else {})
    has_references = with_references is not preset_config
    description = _described(preset, preset_config, has_references)
    if ALONE in description.settings:  # a note, as the sentence does not fit on a phone
        description = _without(description, ALONE)
        notes.append("It needs all of the GPU's memory: close other programs that use it, such as games and video.")
    notes = [SWITCHED_OFF if why and note is NO_GPU else note for note in notes]
    shown = {
        "id": preset.id,
        "title": preset.title,
        "text": description.whole(),
        "why": why,
        "notes": [*map(as_message, notes)],
        "values": values,
    }
    # A browser keeps the start with its texts, and shows it after a reload.
    return {**shown, **recipe, "texts": [*how_made(shown)]}


def with_room_for_references(
    config: Any, preset: preset_files.Preset, recipe: JsonMapping, notes: list[MessageLike]
) -> Any:
    """Return the same with activations recomputed if edits would not fit beside a preset's activations: a reference
    image takes as much memory as its image, and presets of models that also learn without one were measured so."""
    gpu = training_gpu()
    is_larger = bool(gpu and machine.has_memory(gpu.memory, 2 * preset.gigabytes))
    learns_without = recipe.get("purpose") == "edit" and not config.control_images.least
    if not learns_without or is_larger or config.memory.recomputes_all(config):
        return config
    try:
        changed_config = replace_options(config, **RECOMPUTED)
    except ConfigError:  # the user's settings exclude checkpointing
        return config
    notes.append("Unlike in the preset, activations are recomputed: reference images need the memory.")
    return changed_config


def starts(kind: str, configs: Mapping[str, type], folder: str = "") -> dict[str, JsonObject]:
    """Return the starts of a tab's form by family; a family without a preset starts with the defaults."""
    gpu, starts_by_family = training_gpu(), {}
    ready = preset_files.of_kind(kind, configs)  # once, as it reads all of their files
    for family, config in configs.items():
        chosen = suited([preset for preset in ready if preset.family == family], gpu)
        if chosen:
            starts_by_family[family] = preset_as_start(kind, chosen[0], config, folder, chosen[1])
    return starts_by_family


def value(kind: str, config: type, name: str) -> JsonObject:
    start_values = starts(kind, {config.family: config}).get(config.family, {}).get("values", {})
    return {name: start_values[name]} if name in start_values else {}


def results(roots: Sequence[Path]) -> str:
    # Beside the page's models, data sets and generated images.
    return str(roots[0] / "kohya" / "output")


def bare(family: str) -> JsonObject:
    text = "Every option has its default value; most need others."
    return {"id": DEFAULTS, "title": defaults_title(family), "text": text, "why": "", "values": {}}


def loaded_as_start(name: str) -> JsonObject:
    # Without values, all settings of the config are shown as changed from the defaults.
    return {"id": "", "title": name, "text": "", "why": "", "values": {}}
