"""Load SDXL checkpoints into networks with the sizes of their tensors."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError, Message, either
from library.families import recognition
from library.families.base import WeightPlacement
from library.families.sdxl import keys
from library.families.sdxl.facts import FACTS, SDXL_CHECKPOINT, UNET_ALONE
from library.families.shared import autoencoder, clip, empty_weights, transfer, weights
from library.families.shared.attention import attend
from library.families.shared.transformer import projections
from library.families.shared.weights import Source
from library.imports import without_optional

SCALE = 0.13025  # factor from VAE samples to latents
SIZE_CHANNELS = 256  # each of the six numbers of the size conditioning becomes a sinusoid of this length
FOLDERS = {"denoiser": "unet", "vae": "vae", "clip_l": "text_encoder", "clip_g": "text_encoder_2"}
# Parts by the names that error messages use.
BLAME = {"denoiser": "U-Net", "vae": "VAE", "clip_l": "first text encoder (CLIP-L)", "clip_g": "second text encoder"}


@dataclass
class OpenCheckpoint:
    """An open checkpoint: readers for the tensors of each part, and leftover data for export."""

    path: Path
    unet: dict[str, Source]  # diffusers name -> tensor
    shapes: dict[str, tuple[int, ...]]  # of the U-Net's tensors
    parts: dict[str, Callable[[], dict[str, Tensor]]]  # the other parts -> their tensors by diffusers name
    unassigned: dict[str, Tensor] = field(default_factory=dict)


def wanted_files(names: Iterable[str], half: bool) -> list[str]:
    """Return the files of a repository to download: each part's weights once (fp16 if `half`), configs, tokenizers."""
    names = list(names)
    out = [name for name in names if name.startswith(("tokenizer/", "tokenizer_2/", "scheduler/"))]
    for folder in FOLDERS.values():
        weight_files = [name for name in names if name.startswith(f"{folder}/") and name.endswith(".safetensors")]
        weight_files = [name for name in weight_files if "openvino" not in name and "non_ema" not in name]
        fp16_files = [name for name in weight_files if ".fp16" in name]
        out += (
            fp16_files
            if half and fp16_files
            else [name for name in weight_files if name not in fp16_files] or fp16_files
        )
        out += [name for name in names if name.startswith(f"{folder}/") and name.endswith(".json")]
    return [*out, *(["model_index.json"] if "model_index.json" in names else [])]


def open_checkpoint(path: Path, half: bool, mmap: bool, vae: str | None = None) -> OpenCheckpoint:
    """Open a single file or a diffusers folder. Raises ConfigError if a part is missing or foreign; the VAE may be
    missing if `vae` is another one.
    """
    return _folder(path, half, mmap) if path.is_dir() else _open_single_file(path, mmap, vae)


def _open_single_file(path: Path, mmap: bool, vae: str | None) -> OpenCheckpoint:
    file = weights.open_weights(path, mmap)
    parts, unassigned = keys.split_parts(file)
    shapes = file.shapes()
    if problem := incomplete_checkpoint(path, shapes, vae):
        raise ConfigError(problem)

    def read(part: str) -> dict[str, Tensor]:
        return keys.sdxl_part_to_diffusers(part, {short: file[name] for short, name in parts[part].items()})

    named = keys.sdxl_part_to_diffusers("denoiser", parts["denoiser"])
    return OpenCheckpoint(
        path,
        {name: file.source(stored) for name, stored in named.items()},
        {name: shapes[stored] for name, stored in named.items()},
        {part: functools.partial(read, part) for part, names in parts.items() if names and part != "denoiser"},
        {plain: file[name] for plain, name in unassigned.items()},
    )


def _folder(path: Path, half: bool, mmap: bool) -> OpenCheckpoint:
    def read(part: str) -> weights.Weights:
        return weights.Weights(weights.files(path / FOLDERS[part], "fp16" if half else None), mmap)

    def tensors(part: str) -> dict[str, Tensor]:
        return canonical_tensors(part, dict(read(part)))

    unet = read("denoiser")
    parts = [part for part in FOLDERS if part != "denoiser" and (path / FOLDERS[part]).is_dir()]
    readers = {part: functools.partial(tensors, part) for part in parts}
    return OpenCheckpoint(path, {name: unet.source(name) for name in unet}, unet.shapes(), readers)


def canonical_tensors(part: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a diffusers folder under our names, whichever version of diffusers or transformers wrote it."""
    if part == "vae":
        return autoencoder.vae_to_diffusers(tensors)
    return {
        clip.canonical_clip_path(name): tensor for name, tensor in tensors.items() if not name.endswith("position_ids")
    }


def read_vae(path: Path, half: bool, mmap: bool) -> dict[str, Tensor]:
    """Read the VAE of --vae: a file in either layout, with or without a prefix, a VAE's folder, or a whole model's."""
    folder = path / "vae" if (path / "vae").is_dir() else path
    file = weights.Weights(weights.files(folder, "fp16" if half else None), mmap)
    if not any(name.endswith(autoencoder.VAE_MARKER) for name in file):
        raise recognition.wrong_kind_error(path, "a VAE")
    return autoencoder.vae_to_diffusers(file)


def incomplete_checkpoint(path: Path, shapes: Mapping[str, tuple[int, ...]], vae: str | None = None) -> Message | None:
    """Return why a single file is not the expected SDXL checkpoint, with the fix; None if it is."""
    parts, _ = keys.split_parts(shapes)
    family, description = recognition.family_and_description(shapes)
    if description == "a LoRA file":
        return Message(
            "{path} is a LoRA file, not a model: give it as --network_weights, and an SDXL checkpoint here", path=path
        )
    if family and family is not FACTS:
        return Message(
            "{path} is {found}: train it with {scripts}, or choose an SDXL checkpoint",
            path=path,
            found=description,
            scripts=either(family.scripts),
        )
    if description == UNET_ALONE:
        return Message(
            "{path} has no text encoders: give a complete SDXL checkpoint, or the diffusers folder it came from",
            path=path,
        )
    if description != SDXL_CHECKPOINT:
        return Message(
            "{path} is {found}, not an SDXL checkpoint: choose an SDXL one (about 6.9 GB in half precision)",
            path=path,
            found=description,
        )
    for part, names in parts.items():
        if not names and not (part == "vae" and vae):
            fix = "give a VAE with --vae" if part == "vae" else "choose a complete SDXL checkpoint"
            return Message("{path} holds no {blame}: {advice}", path=path, blame=BLAME[part], advice=fix)
    return misfit(path, {short: shapes[name] for short, name in parts["denoiser"].items()})


def misfit(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> Message | None:
    """Return why a U-Net with SDXL's names is no plain SDXL: inpainting inputs, or a distilled tree."""
    named = keys.sdxl_part_to_diffusers("denoiser", shapes)
    channels = named.get("conv_in.weight", (0, 4))[1]
    if channels != 4:
        return Message(
            "{path} takes {channels} channels (inpainting), which is not trained here: choose a base model",
            path=path,
            channels=channels,
        )
    block_depths = list(depths(named))
    levels = len(keys.Layout.of(named).attention)
    for level in range(levels):
        depths_of_level = {
            n for block, n in block_depths if block in (f"down_blocks.{level}", f"up_blocks.{levels - 1 - level}")
        }
        if len(depths_of_level) > 1:
            return Message(
                "{path} has a distilled U-Net (SSD-1B or the like), which is not trained here: choose a full SDXL",
                path=path,
            )
    return None


def depths(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Return (block, number of transformer layers) of every attention in a U-Net with diffusers names."""
    layers_by_attention: dict[str, set[str]] = {}
    for name in names:
        path, separator, below = name.partition(".transformer_blocks.")
        if separator:
            layers_by_attention.setdefault(path, set()).add(below.split(".")[0])
    for path, layers in layers_by_attention.items():
        yield path.rsplit(".attentions.", 1)[0], 1 + max(map(int, layers))


def unet_config(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the arguments of UNet2DConditionModel for a U-Net with these shapes by diffusers name."""
    layout = keys.Layout.of(shapes)
    levels = range(len(layout.attention))
    channels = [shapes[f"down_blocks.{i}.resnets.0.conv1.weight"][0] for i in levels]
    depth = dict(depths(shapes))
    cross = next(shape[1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight"))
    linear = len(next(shape for name, shape in shapes.items() if name.endswith(".proj_in.weight"))) == 2
    return {
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": tuple(channels),
        "layers_per_block": layout.layers,
        "down_block_types": tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in layout.attention),
        "up_block_types": tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(layout.attention)),
        "transformer_layers_per_block": tuple(depth.get(f"down_blocks.{i}", 1) for i in levels),
        "attention_head_dim": tuple(max(1, c // clip.HEAD_CHANNELS) for c in channels),  # the number of heads
        "cross_attention_dim": cross,
        "use_linear_projection": linear,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": SIZE_CHANNELS,
        "projection_class_embeddings_input_dim": shapes["add_embedding.linear_1.weight"][1],
        "sample_size": 128,
    }


def empty_unet(shapes: Mapping[str, tuple[int, ...]]) -> nn.Module:
    """Return a U-Net of these shapes on the meta device."""
    # A single attention processor lets all blocks share compiled graphs.
    unet_class, residual = _classes()
    with empty_weights.empty_weights():
        unet = unet_class(**unet_config(shapes))
    unet.set_attn_processor(SharedInputAttention())
    for module in unet.modules():
        if isinstance(module, residual):  # 1 in some blocks and 1.0 in others would need two graphs
            module.output_scale_factor = float(module.output_scale_factor)
    return unet


class SharedInputAttention:
    """The attention processor of the U-Net: layers with the same input (queries, keys, values) compute at once."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,  # SDXL has none
    ) -> Tensor:
        """[B, S, C] and the text [B, L, text channels], or None for self-attention -> [B, S, C]."""
        if encoder_hidden_states is None:
            projected = projections(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        else:
            projected = attn.to_q(hidden_states), *projections(encoder_hidden_states, attn.to_k, attn.to_v)
        q, k, v = (tensor.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for tensor in projected)
        attended = attend(q, k, v).transpose(1, 2).flatten(2)
        return attn.to_out[0](attended)


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Return diffusers' U-Net without its per-pass handling of peft adapters, which would import peft, and its residual
    blocks.
    """
    with without_optional("diffusers"):
        from diffusers.models import resnet
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    class Unet(UNet2DConditionModel):
        forward = inspect.unwrap(UNet2DConditionModel.forward)

    Unet.__name__ = Unet.__qualname__ = UNet2DConditionModel.__name__  # saved folders name this class
    return Unet, resnet.ResnetBlock2D


def open_unet(
    stored: OpenCheckpoint, dtype: torch.dtype, keep_fp8: bool = False
) -> tuple[nn.Module, Callable[[WeightPlacement | None], object]]:
    """Return the U-Net of a checkpoint without its weights, and its reader for `dtype`.

    With `keep_fp8` 8-bit matrices of its blocks stay 8-bit.
    """
    with _blamed(stored, "denoiser"):
        unet = empty_unet(stored.shapes)
        transfer.expect(unet, stored.shapes)
    in_blocks = (lambda name: ".transformer_blocks." in name or ".resnets." in name) if keep_fp8 else None
    return unet, functools.partial(transfer.fill_weights, unet, stored.unet, transfer.widened(dtype, in_blocks))


def build_network(stored: OpenCheckpoint, part: str, dtype: torch.dtype) -> nn.Module:
    """Build another network of a checkpoint ("vae", "clip_l", "clip_g") on the CPU."""
    with _blamed(stored, part):
        tensors = stored.parts[part]() if part in stored.parts else {}
        return NETWORK_BUILDERS[part]({name: weights.cast_floating(tensor, dtype) for name, tensor in tensors.items()})


@contextlib.contextmanager
def _blamed(stored: OpenCheckpoint, part: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, KeyError, StopIteration, ZeroDivisionError) as e:
        raise ConfigError(
            "{path}: its {blame} is not that of an SDXL model ({short})",
            path=stored.path,
            blame=BLAME[part],
            short=_short(e),
        ) from e


NETWORK_BUILDERS = {
    "denoiser": lambda t: weights.assign(empty_unet({name: tuple(x.shape) for name, x in t.items()}), t),
    "vae": lambda t: autoencoder.build_autoencoder(t, SCALE),
    "clip_l": lambda t: clip.encoder(t, "quick_gelu"),
    "clip_g": lambda t: clip.encoder(t, "gelu", projected=True),
}


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[1] if len(lines) > 1 else lines[0] if lines else type(error).__name__)[:160]
