"""The networks of SDXL and FLUX.1 with random weights, full-size or tiny: speed does not ask what was learned."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from library.bench import machine
from library.config.schema import ConfigError

GIB = 2**30
DRAWN = 2**22  # random numbers that are drawn for a matrix; larger ones repeat them


@dataclass(frozen=True)
class Sizes:
    """What is chosen of one family in one size: the denoiser, text encoders and VAE, each made without memory."""

    denoiser: Callable[[], nn.Module]
    encoders: dict[str, Callable[[], nn.Module]]
    vae: Callable[[], nn.Module]
    resolutions: tuple[int, ...]


def sizes(family: str, size: str) -> Sizes:
    """`family` is sdxl or flux, `size` full or tiny."""
    full = size == "full"
    resolutions = (512, 1024, 2048) if full else (64, 128)
    wide, tiny_clip = (128, 256, 512, 512) if full else (32, 32, 32, 32), not full
    if family == "flux":
        return Sizes(
            lambda: flux(full),
            {"clip_l": lambda: clip_l(tiny_clip), "t5xxl": lambda: t5(tiny_clip)},
            lambda: vae(wide, 16, 0.3611, around=False),
            resolutions,
        )
    encoders = {"clip_l": lambda: clip_l(tiny_clip), "clip_g": lambda: clip_g(tiny_clip)}
    return Sizes(lambda: unet(full), encoders, lambda: vae(wide, 4, 0.13025, around=True), resolutions)


def flux(full: bool) -> nn.Module:
    """FLUX.1 dev's transformer, or one of two and four blocks."""
    from library.families.flux.model import Flux
    from library.families.flux.model import Sizes as Shape

    shape = Shape(64, 64, 768, 4096, 3072, 128, 12288, 19, 38, True)
    small = Shape(64, 64, 64, 64, 64, 32, 256, 2, 4, True)
    return empty(lambda: Flux(shape if full else small))


def unet(full: bool) -> nn.Module:
    """SDXL's U-Net, or one of the same three levels and small widths."""
    from diffusers import UNet2DConditionModel

    from library.families.sdxl import model

    channels, depth, pooled = ((320, 640, 1280), (1, 2, 10), 1280) if full else ((32, 64, 64), (1, 1, 2), 128)
    made = empty(
        lambda: UNet2DConditionModel(
            block_out_channels=channels,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=depth,
            attention_head_dim=tuple(max(1, c // 64) for c in channels),
            cross_attention_dim=2048 if full else 192,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=model.SIZE_CHANNELS,
            projection_class_embeddings_input_dim=pooled + 6 * model.SIZE_CHANNELS,
        )
    )
    return model.empty_unet({name: tuple(p.shape) for name, p in made.state_dict().items()})


def clip_l(tiny: bool) -> nn.Module:
    """The first text encoder of both families."""
    from transformers import CLIPTextConfig, CLIPTextModel

    shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    small = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 1}
    given = small if tiny else {**shape, "projection_dim": 768}
    return empty(lambda: CLIPTextModel(CLIPTextConfig(**given)))


def clip_g(tiny: bool) -> nn.Module:
    """SDXL's second text encoder."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    shape = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
    small = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
    given = {**(small if tiny else shape), "hidden_act": "gelu", "projection_dim": 128 if tiny else 1280}
    return empty(lambda: CLIPTextModelWithProjection(CLIPTextConfig(**given)))


def t5(tiny: bool) -> nn.Module:
    """FLUX.1's T5-XXL encoder."""
    from transformers import T5Config, T5EncoderModel

    shape = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    small = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    given = small if tiny else shape
    made = empty(lambda: T5EncoderModel(T5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **given)))
    made.encoder.embed_tokens = made.shared
    return made


def vae(channels: tuple[int, ...], latent: int, scale: float, around: bool) -> nn.Module:
    """The image autoencoder; SDXL's has convolutions `around` its latents."""
    from diffusers import AutoencoderKL

    return empty(
        lambda: AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=channels,
            layers_per_block=2,
            latent_channels=latent,
            scaling_factor=scale,
            use_quant_conv=around,
            use_post_quant_conv=around,
        )
    )


def empty(make: Callable[[], nn.Module]) -> nn.Module:
    """A network without memory for its weights; buffers are real."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        return make()


def place(model: nn.Module, device: torch.device, dtype: torch.dtype, config: Any) -> torch.device:
    """Where weights are made: on the device, or on the host if they only fit once they are swapped or in 8 bits.

    Raises ConfigError where there is no room for them.
    """
    in_8_bits = config.precision.fp8_denoiser or getattr(config.precision, "int8_base", False)
    shrinks = in_8_bits or config.memory.blocks_to_swap
    if device.type == "cuda" and shrinks and bytes_of(model, dtype) > 0.9 * machine.free_bytes(device):
        device = torch.device("cpu")
    check_room(model, device, dtype)
    return device


def check_room(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError where the weights do not fit: a machine that runs out of memory may take others down."""
    needed, free = bytes_of(model, dtype), machine.free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"{type(model).__name__} needs {needed / GIB:.0f} GB and {free / GIB:.0f} GB are free on {device.type}: "
            "measure --size tiny here, or a TOML with fp8_base or blocks_to_swap"
        )


def bytes_of(model: nn.Module, dtype: torch.dtype) -> int:
    """What the weights take in a type."""
    return sum(p.numel() for p in model.parameters()) * dtype.itemsize


@torch.no_grad()
def filled(model: nn.Module, device: torch.device, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """Random weights on the device, of a size that passes a signal on."""
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if id(p) not in made:
                made[id(p)] = nn.Parameter(_random(name, p, device, dtype, generator))
            setattr(module, name, made[id(p)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return model.eval()


def _random(name: str, like: Tensor, device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    tensor = torch.empty(like.shape, device=device, dtype=dtype)
    if like.ndim < 2:
        return tensor.fill_(1.0 if name in ("weight", "scale") else 0.0)
    flat = tensor.view(-1)
    few = flat[:DRAWN]  # a processor would draw numbers for minutes
    few.normal_(0.0, 0.7 / like[0].numel() ** 0.5, generator=generator)
    for start in range(DRAWN, flat.numel(), DRAWN):
        rest = flat[start : start + DRAWN]
        rest.copy_(few[: rest.numel()])
    return tensor
