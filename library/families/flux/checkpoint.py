"""FLUX.1 checkpoints on disk: locate, validate and read each of the four parts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from library.config.problems import Message, Problem, either
from library.config.run_config import RunConfig
from library.families import recognition
from library.families.facts import Shapes
from library.families.flux import keys
from library.families.flux.facts import FACTS, LATER
from library.families.flux.model import Flux, Sizes
from library.families.flux.options import OTHER_FLUX_FILES
from library.families.flux.variants import FLUX_VARIANTS, IN_DIFFUSERS_LAYOUT, RADIANCE, FluxVariant
from library.families.shared import (
    autoencoder,
    clip,
    denoiser_file,
    expected_tensors,
    scaled_weights,
    t5,
    tensor_names,
    weights,
)
from library.families.shared.double_stream_file import DoubleStreamFile
from library.families.shared.known_files import UNKNOWN
from library.families.shared.part_files import (
    Entries,
    Part,
    PartFiles,
    complete,
    incomplete,
    incomplete_part,
    lora_in_place_of,
    other_kind,
)
from library.families.shared.raw_header import header_metadata

MODEL_OPTION = "pretrained_model_name_or_path"


def _part_descriptions(variant: FluxVariant) -> Iterator[tuple[str, Part]]:
    transformers = ("double_blocks.0.img_attn.qkv.weight", "single_transformer_blocks.0.proj_mlp.weight")
    yield "denoiser", Part(MODEL_OPTION, variant.transformer, ("transformer", *variant.files), transformers)
    if "clip_l" in variant.encoders:
        clip_l = ("text_encoder", "clip_l.safetensors")
        marks = (clip.CLIP_MARKER,)
        yield "clip_l", Part("clip_l", OTHER_FLUX_FILES["clip_l"], clip_l, marks, expected_tensors.clip)
    t5xxl = (variant.text_encoder, "t5xxl_fp16.safetensors", "t5xxl*.safetensors")
    yield "t5xxl", Part("t5xxl", OTHER_FLUX_FILES["t5xxl"], t5xxl, (t5.T5_MARKER,), expected_tensors.t5)
    ae = ("vae", "ae.safetensors")
    yield "ae", Part("ae", OTHER_FLUX_FILES["ae"], ae, (autoencoder.VAE_MARKER,), expected_tensors.autoencoder_tensors)


FLUX_DENOISER = DoubleStreamFile(
    lambda shapes: FACTS.recognise(shapes) or FACTS.base_model,
    keys.TREES.is_diffusers,
    keys.flux_sources,
    lambda shapes: Flux(Sizes.of(shapes)),
)
# Descriptions of the parts by their headers.
PART_WORDS = {"clip_l": "a CLIP text encoder", "t5xxl": "a T5 text encoder", "ae": "a VAE"}
PLAIN_NAMES = {
    "denoiser": tensor_names.without_prefix,
    "clip_l": clip.plain_clip_names,
    "t5xxl": t5.plain_t5_names,
    "ae": autoencoder.plain_vae_names,
}
# By model_type.
PART_FILES = {
    name: PartFiles(
        dict(_part_descriptions(variant)),
        FACTS,
        PART_WORDS | {"denoiser": (variant.description, f"{variant.description}{IN_DIFFUSERS_LAYOUT}")},
    )
    for name, variant in FLUX_VARIANTS.items()
}


def find_flux_problems(config: RunConfig, model_type: str) -> Iterator[Problem]:
    """Yield problems of the parts, from their headers, each with its option and the fix."""
    shapes: dict[str, Shapes] = {}
    files = PART_FILES[model_type]

    def look(part: str, path: Path, entries: Entries) -> Iterator[Problem]:
        definition = files.parts[part]
        if problem := unfit(path, entries, part, definition):
            yield Problem(definition.option, ": {problem}", problem=problem)
        elif part == "denoiser" and (other := other_variant_problem(path, entries, model_type)):
            yield other
        else:
            shapes[part] = flux_shapes(entries, part)
            if part == "denoiser":
                yield from config.compile.beyond(keys.count_flux_blocks(shapes[part]))
                yield from denoiser_file.find_denoiser_problems(path, MODEL_OPTION, FLUX_DENOISER.open)

    yield from files.problems(config, look)
    if "denoiser" in shapes:
        yield from files.mismatched(shapes, flux_widths(shapes["denoiser"], files.parts))


def other_variant_problem(path: Path, entries: Entries, model_type: str) -> Problem | None:
    """Return the problem of a transformer of another variant than model_type, None if it is of this one."""
    words = FACTS.recognise(flux_shapes(entries, "denoiser")).removesuffix(IN_DIFFUSERS_LAYOUT)
    if words == FLUX_VARIANTS[model_type].description:
        return None
    fitting = next(name for name, variant in FLUX_VARIANTS.items() if variant.description == words)
    return Problem(
        "model_type",
        ": {path} is {found}: use model_type = {fitting}",
        path=path,
        found=Message(words),
        fitting=fitting,
        also=MODEL_OPTION,
        fix={"model_type": fitting},
    )


def title_in_metadata(config: RunConfig) -> str:
    """Return the name of the transformer in its single file's metadata, "" if it has none. Raises ConfigError."""
    path = PART_FILES["flux"].present(config, "denoiser")
    if path is None or path.suffix != ".safetensors" or not weights.header_entries(path):
        return ""
    return str(header_metadata(path).get("modelspec.title", ""))


def flux_shapes(entries: Entries, part: str) -> dict[str, tuple[int, ...]]:
    return {plain: tuple(entries[name]["shape"]) for plain, name in PLAIN_NAMES[part](entries).items()}


def unfit(path: Path, entries: Entries, part: str, definition: Part) -> Message | None:
    """Return why a file cannot serve as a part, with the fix; None if it can."""
    shapes = flux_shapes(entries, part)
    family, description = recognition.family_and_description(weights.shapes_of(entries))
    if description == "a LoRA file":
        return lora_in_place_of(part, path, definition)
    ours = family is FACTS and all(description != later for *_, later in LATER)
    fits = ours if part == "denoiser" else description in (PART_WORDS[part], UNKNOWN)
    if fits and (problem := incomplete_part(path, definition, shapes, "" if description == UNKNOWN else description)):
        return problem
    if not fits or not any(name.endswith(definition.marker) for name in shapes):
        other = family if part == "denoiser" and family is not FACTS else None
        return other_kind(path, definition, description, other)
    if problem := scaled_weights.stored_oddly(path, entries, scaled=True):
        return problem
    return unusual(path, shapes) if part == "denoiser" else None


def unusual(path: Path, shapes: Shapes) -> Message | None:
    """Return why a transformer with FLUX.1's names is not supported: in pixel space, or an inpainting variant."""
    if FACTS.recognise(shapes).startswith(RADIANCE):
        return Message(
            "{path} is Chroma Radiance, which works on pixels and is not trained here: use Chroma1-HD or Chroma1-Base",
            path=path,
        )
    try:
        sizes = Sizes.of(FLUX_DENOISER.bfl_shapes(shapes))
    except KeyError as e:
        return incomplete(path, FACTS.recognise(shapes).removesuffix(IN_DIFFUSERS_LAYOUT), [e.args[0]])
    if sizes.in_channels not in (inputs := {variant.inputs * sizes.out_channels for variant in FLUX_VARIANTS.values()}):
        return Message(
            "{path} takes {takes} channels (Depth, Canny), which is not trained here: use one that takes {inputs}",
            path=path,
            takes=sizes.in_channels,
            inputs=either([str(count) for count in sorted(inputs)]),
        )
    return None


def flux_widths(denoiser: Shapes, parts: Mapping[str, Part]) -> dict[str, tuple[str, int]]:
    """Return a tensor of each part, and its number of columns for a denoiser of these shapes."""
    model = FLUX_DENOISER.bfl_shapes(denoiser)
    clip_l = (
        {"clip_l": (f"text_model.{clip.CLIP_MARKER}", model["vector_in.in_layer.weight"][1])}
        if "clip_l" in parts
        else {}
    )
    return clip_l | {
        "t5xxl": (t5.T5_MARKER, model["txt_in.weight"][1]),
        "ae": (autoencoder.VAE_MARKER, model["final_layer.linear.weight"][0] // 4),
    }


def load_clip_l(path: Path, dtype: Any, mmap: bool = True) -> Any:
    """Read CLIP-L: a single file (`text_model.*`, with any prefix), or a folder of any version of transformers."""
    file = weights.open_weights(path, mmap)
    if not any(name.endswith(clip.CLIP_MARKER) for name in file):
        raise recognition.wrong_kind_error(path, PART_WORDS["clip_l"])
    with complete(path, PART_WORDS["clip_l"]):
        return clip.build_encoder(
            {plain: weights.cast_floating(file[name], dtype) for plain, name in clip.plain_clip_names(file).items()}
        )
