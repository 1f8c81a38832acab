"""Does a LoRA file fit the model in diffusers? Names and sizes of every adapter, through diffusers' own converters."""

from pathlib import Path
from typing import Any

from library import families
from library.families.shared import weights

ADAPTER = (".lora_A.weight", ".lora_B.weight")


def check(file: Path, config: Any) -> tuple[int, list[str]]:
    """How many layers of diffusers' model the file's adapters fit, and what fits nowhere (key or size, a line each).

    `config` is the config that the file was trained with: it tells which model. Takes seconds, most of them imports.
    """
    from safetensors.torch import load_file

    tensors = load_file(file)
    try:
        converted, sizes = {"flux": _flux, "sdxl": _sdxl}[config.family](tensors, config)
    except (ValueError, AssertionError, KeyError) as error:
        return 0, [f"diffusers cannot convert the file: {error}"]
    wrong = []
    for name, tensor in converted.items():
        layer, which = _split(name)
        if layer not in sizes:
            wrong.append(f"{name}: diffusers has no such layer")
        elif tensor.shape[which] != sizes[layer][which]:
            wrong.append(f"{name}: {tensor.shape[which]} features, the layer has {sizes[layer][which]}")
    return len({_split(name)[0] for name in converted}) if not wrong else 0, wrong


def _split(name: str) -> tuple[str, int]:
    """The layer's name, and the dimension in which an adapter must fit it: 1 (input) for A, 0 (output) for B."""
    for which, ending in ((1, ADAPTER[0]), (0, ADAPTER[1])):
        if name.endswith(ending):
            return name.removesuffix(ending), which
    return name, 0


def _layers(model: Any) -> dict[str, tuple[int, int]]:
    """Output and input features of everything in a model that can carry an adapter."""
    shapes = {
        name: tuple(m.weight.shape[:2]) for name, m in model.named_modules() if getattr(m, "weight", None) is not None
    }
    return {name: shape for name, shape in shapes.items() if len(shape) == 2}


def _flux(tensors: dict[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    import torch
    from diffusers import FluxTransformer2DModel
    from diffusers.loaders import FluxLoraLoaderMixin

    known = _shapes(config)
    width, head = known["img_in.weight"][0], known["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    with torch.device("meta"):
        model = FluxTransformer2DModel(
            in_channels=known["img_in.weight"][1],
            num_layers=1 + max(int(k.split(".")[1]) for k in known if k.startswith("double_blocks.")),
            num_single_layers=1 + max(int(k.split(".")[1]) for k in known if k.startswith("single_blocks.")),
            attention_head_dim=head,
            num_attention_heads=width // head,
            joint_attention_dim=known["txt_in.weight"][1],
            pooled_projection_dim=known["vector_in.in_layer.weight"][1],
            guidance_embeds="guidance_in.in_layer.weight" in known,
        )
    converted = FluxLoraLoaderMixin.lora_state_dict(_as_wide_as_the_real_one(tensors, width))
    prefix = "transformer."
    found = {name.removeprefix(prefix): tensor for name, tensor in converted.items() if name.startswith(prefix)}
    return {name: _as_narrow_again(name, tensor, width) for name, tensor in found.items()}, _layers(model)


REAL = 3072  # FLUX.1's width, which diffusers' converter has written into it for the fused layer of single blocks


def _as_wide_as_the_real_one(tensors: dict[str, Any], width: int) -> dict[str, Any]:
    """Fused outputs of single blocks (q, k, v, mlp) padded with zeros to FLUX.1's own sizes, as diffusers cuts them."""
    import torch

    out = dict(tensors)
    for name, tensor in tensors.items():
        if "_single_blocks_" in name and name.endswith("_linear1.lora_up.weight"):
            padded = tensor.new_zeros(REAL * 7, tensor.shape[1])
            for part, start in zip(torch.split(tensor, [width, width, width, 4 * width]), (0, 1, 2, 3), strict=True):
                padded[start * REAL : start * REAL + part.shape[0]] = part
            out[name] = padded
    return out


def _as_narrow_again(name: str, tensor: Any, width: int) -> Any:
    if name.startswith("single_transformer_blocks.") and name.endswith(ADAPTER[1]):
        full = {"to_q": REAL, "to_k": REAL, "to_v": REAL, "proj_mlp": 4 * REAL}.get(name.split(".")[-3])
        if full and tensor.shape[0] == full:
            return tensor[: full // REAL * width]
    return tensor


def _shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape in the FLUX file, without the prefix that some tools put before the names."""
    known = weights.header(config.model.pretrained_model_name_or_path)
    return {name.removeprefix("model.diffusion_model."): shape for name, shape in known.items()}


def _sdxl(tensors: dict[str, Any], config: Any) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    import torch
    from diffusers.loaders import StableDiffusionXLLoraLoaderMixin
    from diffusers.utils import convert_unet_state_dict_to_peft

    unet = families.of(config).load(torch.float32).denoiser
    converted, _ = StableDiffusionXLLoraLoaderMixin.lora_state_dict(dict(tensors), unet_config=unet.config)
    found = {name.removeprefix("unet."): tensor for name, tensor in converted.items() if name.startswith("unet.")}
    return convert_unet_state_dict_to_peft(found), _layers(unet)
