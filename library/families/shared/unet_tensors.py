"""The tensors of a complete Stable Diffusion, and which of them a checkpoint lacks, from headers alone."""

from collections.abc import Collection, Mapping
from pathlib import Path

from library.config.problems import Message
from library.families.facts import Shapes
from library.families.shared import autoencoder, clip, expected_shapes, expected_tensors, unet, weights
from library.families.shared.expected_tensors import BOTH, changes_width, expanded
from library.families.shared.part_files import incomplete
from library.families.shared.unet_checkpoint import UnetCheckpoints, located_vae, read_vae
from library.families.shared.unet_names import Layout

EMBEDDING_LAYERS = f"{{linear_1,linear_2}}.{BOTH}"
RESNET = "{norm1,conv1,time_emb_proj,norm2,conv2}"
TRANSFORMER_PATTERNS = (
    f"{{norm1,norm2,norm3,attn1.to_out.0,attn2.to_out.0,ff.net.0.proj,ff.net.2}}.{BOTH}",
    "{attn1,attn2}.{to_q,to_k,to_v}.weight",
)


def unet_tensors(shapes: Shapes, added: bool) -> list[str]:
    """Return the tensor names of a U-Net in diffusers' layout; `added`: with conditions besides text."""
    layout, depth = Layout.of(shapes), dict(unet.depths(shapes))
    levels = list(enumerate(layout.attention))
    resnets, attentions = ["mid_block.resnets.0", "mid_block.resnets.1"], {"mid_block.attentions.0": "mid_block"}
    for i, has_attention in levels:
        for block, count in (
            (f"down_blocks.{i}", layout.layers),
            (f"up_blocks.{len(levels) - 1 - i}", layout.layers + 1),
        ):
            resnets += [f"{block}.resnets.{j}" for j in range(count)]
            if has_attention:
                attentions |= {f"{block}.attentions.{j}": block for j in range(count)}
    transformer_layers = (
        f"{path}.transformer_blocks.{n}.{pattern}"
        for path, block in attentions.items()
        for n in range(depth.get(block, 1))
        for pattern in TRANSFORMER_PATTERNS
    )
    return expanded(
        f"time_embedding.{EMBEDDING_LAYERS}",
        *([f"add_embedding.{EMBEDDING_LAYERS}"] if added else []),
        f"{{conv_in,conv_norm_out,conv_out}}.{BOTH}",
        *(f"{path}.{RESNET}.{BOTH}" for path in resnets),
        *(f"{path}.conv_shortcut.{BOTH}" for path in resnets if changes_width(shapes, f"{path}.conv1.weight")),
        *(f"{path}.{{norm,proj_in,proj_out}}.{BOTH}" for path in attentions),
        *transformer_layers,
        *(f"down_blocks.{i}.downsamplers.0.conv.{BOTH}" for i, _ in levels[:-1]),
        *(f"up_blocks.{i}.upsamplers.0.conv.{BOTH}" for i, _ in levels[:-1]),
    )


def projected_clip(names: Collection[str]) -> list[str]:
    return [*expected_tensors.clip(names), "text_projection.weight"]


def tells_shapes(path: Path) -> bool:
    """Return whether a file's content is known without reading its data; torch's oldest format has to be read whole."""
    if path.suffix.lower() not in weights.PICKLED:
        return True
    with path.open("rb") as file:
        return file.read(1) != b"\x80"


def incomplete_model(checkpoints: UnetCheckpoints, path: Path, vae: str | None) -> Message | None:
    """Return a message about an incomplete model, or one that does not fit together, None for a usable one. A separate
    `vae` replaces the model's.
    """
    folders = checkpoints.folders
    pieces = [file for part in folders.values() if (path / part).is_dir() for file in weights.files(path / part)]
    if not all(map(tells_shapes, pieces or weights.files(path))):
        return None
    with weights.shapes_only():
        stored = checkpoints.open(path, half=False, mmap=True, vae=vae)
        shapes_by_part: dict[str, Shapes] = {
            part: _shapes_of(read()) for part, read in stored.parts.items() if part != "vae" or not vae
        }
    shapes_by_part["denoiser"] = stored.shapes
    missing, num_expected = [], 0
    for part, shapes in shapes_by_part.items():
        names = _expected_names(checkpoints, part, shapes)
        num_expected += len(names)
        missing += [f"{folders[part]}.{name}" for name in names if name not in shapes]
    if missing:
        return incomplete(path, checkpoints.whole, missing, num_expected)
    problems = (expected_shapes.misshapen(path, shapes) for shapes in shapes_by_part.values())
    return next((problem for problem in problems if problem), None) or _other_text(path, shapes_by_part)


def _other_text(path: Path, shapes_by_part: Mapping[str, Shapes]) -> Message | None:
    """Return that a U-Net was made for other text encoders than the model has; None if they fit."""
    widths = {
        part: shapes[f"text_model.{clip.CLIP_MARKER}"][1] for part, shapes in shapes_by_part.items() if "clip" in part
    }
    takes, stored = expected_shapes.text_width(shapes_by_part["denoiser"]), sum(widths.values())
    if (pooled := shapes_by_part["denoiser"].get(unet.ADDED)) and takes == stored:
        # The pooled text of the second text encoder comes beside six sizes.
        takes, stored = pooled[1] - 6 * unet.SIZE_CHANNELS, shapes_by_part["clip_g"]["text_projection.weight"][0]
    if takes == stored:
        return None
    template = (
        "{path} has a U-Net for texts of {takes} channels, and its text encoders give {given}: they are of "
        "different models; choose a complete one"
    )
    return Message(template, path=path, takes=takes, given=stored)


def _expected_names(checkpoints: UnetCheckpoints, part: str, shapes: Shapes) -> list[str]:
    if part == "denoiser":
        return unet_tensors(shapes, checkpoints.added)
    return expected_tensors.autoencoder_tensors(shapes) if part == "vae" else checkpoints.encoders[part].tensors(shapes)


def lacking_vae(path: Path) -> Message | None:
    """Return a message about an incomplete or misshapen VAE, None for a usable one."""
    if not all(map(tells_shapes, weights.files(located_vae(path)))):
        return None
    with weights.shapes_only():
        shapes = _shapes_of(read_vae(path, half=False, mmap=True))
    expected = expected_tensors.autoencoder_tensors(shapes)
    missing = [name for name in expected if name not in shapes]
    if missing:
        return incomplete(path, autoencoder.WHAT, missing, len(expected))
    return expected_shapes.misshapen(path, shapes)


def _shapes_of(tensors: Mapping) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
