"""The image autoencoder (AutoencoderKL) of SDXL and FLUX: tensor names in single files, and sizes from shapes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from library.config.json_types import JsonObject
from library.families import recognition
from library.families.shared import empty_weights, vae_memory, weights
from library.families.shared.part_files import complete
from library.families.shared.tensor_names import after_prefix, inverse, replace_prefix
from library.families.shared.weights import assign
from library.imports import without_optional

VAE_ATTENTION_NAMES = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
WHAT = "a VAE"
FLUX = (0.3611, 0.1159)  # scale and shift of FLUX.1: latents are (VAE sample - shift) * scale
VAE_MARKER = "decoder.conv_in.weight"
VAE_PREFIXES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "bn.")  # prefixes of its tensor names
INSIDE = {"encoder.quant_conv": "quant_conv", "decoder.post_quant_conv": "post_quant_conv"}  # FLUX.2's single files
OLD_ATTENTION = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}  # diffusers before 0.17


def module_paths(levels: int, layers: int) -> dict[str, str]:
    """diffusers module path -> single-file (LDM) module path, by number of levels and of residual blocks per level."""
    names = {"encoder.conv_norm_out": "encoder.norm_out", "decoder.conv_norm_out": "decoder.norm_out"}
    for i in range(levels):
        ours, theirs = f"encoder.down_blocks.{i}", f"encoder.down.{i}"
        names |= {f"{ours}.resnets.{j}": f"{theirs}.block.{j}" for j in range(layers)}
        names[f"{ours}.downsamplers.0.conv"] = f"{theirs}.downsample.conv"
        ours, theirs = f"decoder.up_blocks.{i}", f"decoder.up.{levels - 1 - i}"
        names |= {f"{ours}.resnets.{j}": f"{theirs}.block.{j}" for j in range(layers + 1)}
        names[f"{ours}.upsamplers.0.conv"] = f"{theirs}.upsample.conv"
    for side in ("encoder", "decoder"):
        names |= {f"{side}.mid_block.resnets.{j}": f"{side}.mid.block_{j + 1}" for j in range(2)}
        middle = {
            f"{side}.mid_block.attentions.0.{a}": f"{side}.mid.attn_1.{b}" for a, b in VAE_ATTENTION_NAMES.items()
        }
        names |= middle
    shortcuts = {f"{a}.conv_shortcut": f"{b}.nin_shortcut" for a, b in names.items() if ".resnets." in a}
    return names | shortcuts


def _counts(names: Iterable[str]) -> tuple[int, int]:
    """Return the numbers of levels and of blocks per level, from possibly incomplete names of either layout."""
    levels = layers = 0
    for name in names:
        match name.split("."):
            case ["encoder" | "decoder" as side, "down" | "up" | "down_blocks" | "up_blocks", level, inside, n, *_]:
                levels = max(levels, int(level) + 1)
                if inside in ("block", "resnets"):
                    layers = max(layers, int(n) + (side == "encoder"))  # the decoder has one more
    return levels, layers


def plain_vae_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a file in either layout, with any prefix -> {diffusers' key: key in the file}. Skips other keys."""
    unprefixed = after_prefix(names, (VAE_MARKER,))
    unprefixed = {name: key for name, key in unprefixed.items() if name.startswith(VAE_PREFIXES)}
    single = any(name.startswith(("encoder.down.", "decoder.up.")) for name in unprefixed)
    renames = (inverse(module_paths(*_counts(unprefixed))) if single else {}) | INSIDE
    file_names = {}
    for name, key in unprefixed.items():
        diffusers_name = replace_prefix(name, renames)
        parts = diffusers_name.rsplit(".", 2)
        if ".attentions." in diffusers_name and parts[1] in OLD_ATTENTION:
            diffusers_name = f"{parts[0]}.{OLD_ATTENTION[parts[1]]}.{parts[2]}"
        file_names[diffusers_name] = key
    return file_names


def vae_to_diffusers(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of either layout to diffusers names; 1x1 convolutions of attention become matrices."""
    out = {}
    for name, key in plain_vae_names(tensors).items():
        tensor = tensors[key]
        out[name] = tensor[:, :, 0, 0] if ".attentions." in name and tensor.ndim == 4 else tensor
    return out


def vae_to_single(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors by diffusers name to single-file (LDM) names, with attention's matrices as 1x1 convolutions."""
    names, out = module_paths(*_counts(tensors)), {}
    for name, tensor in tensors.items():
        as_conv = ".attentions." in name and tensor.ndim == 2
        out[replace_prefix(name, names)] = tensor[:, :, None, None] if as_conv else tensor
    return out


def build_autoencoder(tensors: Mapping[str, Tensor], scale: float, shift: float | None = None) -> nn.Module:
    """Build an AutoencoderKL from tensors by diffusers name, which are not copied; they determine its sizes."""
    with without_optional("diffusers"):
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    vae: Any = AutoencoderKL  # its annotations are narrower than what it accepts
    with empty_weights.empty_weights():
        model = vae(**autoencoder_settings(tensors), scaling_factor=scale, shift_factor=shift)
    return assign(model, tensors)


def autoencoder_settings(tensors: Mapping[str, Tensor]) -> JsonObject:
    """Return the arguments of diffusers' class for an autoencoder with these tensors by diffusers name."""
    levels, layers = _counts(tensors)
    return {
        "in_channels": tensors["encoder.conv_in.weight"].shape[1],
        "out_channels": tensors["decoder.conv_out.weight"].shape[0],
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": tuple(
            tensors[f"encoder.down_blocks.{i}.resnets.0.conv1.weight"].shape[0] for i in range(levels)
        ),
        "layers_per_block": layers,
        "latent_channels": tensors["decoder.conv_in.weight"].shape[1],
        "use_quant_conv": any(name.startswith("quant_conv.") for name in tensors),
        "use_post_quant_conv": any(name.startswith("post_quant_conv.") for name in tensors),
    }


def load_autoencoder(path: Path, dtype: Any, constants: tuple[float, float], mmap: bool = True) -> nn.Module:
    """Read an autoencoder, single file or diffusers, as an AutoencoderKL; `constants` are its scale and shift. Names
    may have a prefix, as in parts extracted from a checkpoint. Raises ConfigError.
    """
    file = weights.open_weights(path, mmap)
    if not any(name.endswith(VAE_MARKER) for name in file):
        raise recognition.wrong_kind_error(path, WHAT)
    with complete(path, WHAT):
        return build_autoencoder(
            {name: weights.cast_floating(tensor, dtype) for name, tensor in vae_to_diffusers(file).items()}, *constants
        )


def encode(vae: Any, pixels: Tensor) -> Any:
    """Pixels [B, 3, H, W] in [-1, 1] -> the posterior of an AutoencoderKL, in its dtype and on its device."""
    with without_optional("diffusers"):
        from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    first = next(vae.parameters())
    return DiagonalGaussianDistribution(vae_memory.encode(vae, pixels.to(first.device, first.dtype)))
