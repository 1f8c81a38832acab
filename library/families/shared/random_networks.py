"""Networks with random weights for demos, tests and measurements: shared parts of the families' builders."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from library.families.shared import clip, empty_weights, qwen_vae_names
from library.files import write_atomic
from library.imports import without_optional

RANDOM_VALUES = 2**22  # random numbers drawn per matrix; larger ones repeat them, as drawing billions takes minutes
Tensors = dict[str, Tensor]
Layout = Callable[[Tensors], Tensors]
DemoLine = tuple[str, Any, str]  # an option, its value, and a remark: what a real training would use instead
DemoTables = dict[str, list[DemoLine]]
CLIP_WORDS, T5_WORDS = 49408, 32128  # vocabularies of the published tokenizers


@dataclass(frozen=True)
class RandomNetworks:
    """The networks of a family in one size, each on the meta device."""

    denoiser: Callable[[], nn.Module]
    encoders: Mapping[str, Callable[[], nn.Module]]
    vae: Callable[[], nn.Module]
    resolutions: tuple[int, ...]  # sides of images for measurements


@dataclass(frozen=True)
class InputShapes:
    """The inputs of a denoiser: channels of latents, and shapes of text encoder outputs by their key in the caches."""

    latent_channels: int
    text: Mapping[str, tuple[int, ...]]
    inpaints: bool = False  # inputs include a mask and the masked image
    references: int = 0  # the least number of reference images
    words: Mapping[str, int] = field(default_factory=dict)  # text outputs that are tokens, and how many words there are

    def texts(self, number: int, device: torch.device) -> dict[str, Tensor]:
        """Return random text outputs of `number` captions, by their name in the caches."""
        return {
            name: torch.randint(self.words[name], (number, *shape), device=device)
            if name in self.words
            else torch.randn(number, *shape, device=device)
            for name, shape in self.text.items()
        }

    def controls(self, latents: Tensor, sides: tuple[int, ...] = ()) -> list[Tensor]:
        """Return latents of control images beside latents [B, C, h, w]; `sides` are height and width of each reference
        image, by default those of the latents.
        """
        number, channels, height, width = latents.shape
        if self.inpaints:
            return [torch.randn_like(latents), latents.new_ones(number, 1, 8 * height, 8 * width)]
        sides = sides or (height, width) * self.references
        return [latents.new_ones(number, channels, *size) for size in zip(sides[::2], sides[1::2], strict=True)]


def build_on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with empty_weights.empty_weights():
        return make()


def clip_encoder(
    width: int, layers: int, words: int = CLIP_WORDS, activation: str = "quick_gelu", projected: bool = False
) -> nn.Module:
    """Build a CLIP text encoder, with a projection of its pooled output if `projected`."""
    from transformers.models.clip import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=words,
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=width // clip.HEAD_CHANNELS,
        max_position_embeddings=clip.LENGTH,
        hidden_act=activation,
        bos_token_id=words - 2,
        eos_token_id=words - 1,
    )
    return build_on_meta(lambda: (CLIPTextModelWithProjection if projected else CLIPTextModel)(config))


def random_autoencoder(widths: tuple[int, ...], channels: int, scale: float, quant_convs: bool) -> nn.Module:
    """Build an image autoencoder; SDXL's has convolutions around its latents (`quant_convs`), FLUX.1's has none."""
    with without_optional("diffusers"):
        from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    vae: Any = AutoencoderKL  # its annotations are narrower than what it accepts
    return build_on_meta(
        lambda: vae(
            down_block_types=("DownEncoderBlock2D",) * len(widths),
            up_block_types=("UpDecoderBlock2D",) * len(widths),
            block_out_channels=widths,
            layers_per_block=2,
            latent_channels=channels,
            scaling_factor=scale,
            use_quant_conv=quant_convs,
            use_post_quant_conv=quant_convs,
        )
    )


def random_weights(shapes: Iterable[tuple[str, tuple[int, ...]]], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return seeded weights for named shapes: matrices scaled by their inputs, norms at one, biases near zero."""
    # So a random network passes a signal of about unit size, and losses are finite and fall.
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, shape in shapes:
        if len(shape) < 2:
            mean = 1.0 if "norm" in name and name.endswith(("weight", "scale")) else 0.0
            tensor = mean + 0.02 * torch.randn(shape, generator=generator)
        else:
            inputs = 1.0 if "embed" in name and len(shape) == 2 and "token" in name else math.prod(shape[1:])
            values = torch.randn(min(math.prod(shape), RANDOM_VALUES), generator=generator) * (0.7 / math.sqrt(inputs))
            tensor = values.to(dtype).repeat(-(-math.prod(shape) // RANDOM_VALUES))[: math.prod(shape)].view(shape)
        out[name] = tensor.to(dtype)
    return out


def write_files(
    folder: Path, parts: Mapping[str, tuple[str, Mapping[str, Tensor], Layout]], seed: int, dtype: torch.dtype
) -> dict[str, Path]:
    """Write parts of a model with random weights as STEM.safetensors; return their paths. Each part is given by its
    stem, tensors with the names and shapes, and a function that converts them to the file's tensors.
    """
    places = {}
    for number, (part, (stem, named, layout)) in enumerate(parts.items()):
        shapes = [(name, tuple(tensor.shape)) for name, tensor in named.items()]
        file_tensors = layout(random_weights(shapes, seed * 10 + number, dtype))
        tensors = {name: tensor.contiguous() for name, tensor in file_tensors.items()}
        places[part] = write_atomic(
            folder / f"{stem}.safetensors", lambda file, tensors=tensors: save_file(tensors, file, {"format": "pt"})
        )
    return places


def prefixed(prefix: str) -> Layout:
    return lambda tensors: {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def enlarge_encoder_output(tensors: Tensors) -> Tensors:
    """Scale the output of a VAE's random encoder to about that of a trained one."""
    tensors["encoder.conv_out.weight"] *= 6
    return tensors


def qwen_vae_file(vae: Any) -> tuple[Tensors, Layout]:
    return vae.network.state_dict(), lambda tensors: qwen_vae_names.qwen_vae_to_single(enlarge_encoder_output(tensors))
