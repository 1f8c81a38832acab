"""FLUX.1's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.facts import SmallModel
from library.families.flux import keys
from library.families.flux.family import POOLED, FluxFamily
from library.families.flux.model import Flux, Sizes
from library.families.flux.options import FluxLora, FluxTrain
from library.families.shared import autoencoder, clip, random_networks, random_tokenizers, weights
from library.families.shared.diffusers_layers import ADAPTER_ENDINGS, LayerSizes, layer_sizes
from library.families.shared.random_networks import (
    CLIP_WORDS,
    T5_WORDS,
    DemoLine,
    DemoTables,
    InputShapes,
    Layout,
    RandomNetworks,
    Tensors,
    prefixed,
)
from library.families.shared.tensor_names import count_list_blocks


@dataclass(frozen=True)
class FluxSizes:
    """Widths and depths. Widths of CLIP are multiples of 64 (heads), of the autoencoder of 32 (groups)."""

    hidden: int = 64
    head: int = 32
    double_blocks: int = 2
    single_blocks: int = 4
    clip_l: int = 64
    clip_layers: int = 2
    t5xxl: int = 64
    t5_layers: int = 2
    t5_heads: int = 4
    t5_head: int = 16
    t5_mlp: int = 128
    vae: tuple[int, ...] = (32, 32, 32, 32)
    channels: int = 16
    guidance: bool = True  # dev has it, schnell does not
    inputs: int = 1  # input channels as a multiple of the latents'
    name: str = ""  # file name, if sizes do not determine the variant
    approximator: tuple[int, int, int] | None = None  # Chroma's: input channels, width, layers
    resolutions: tuple[int, ...] = (64, 128)


TINY = FluxSizes()
TINY_OPTIONS = {"t5xxl_max_token_length": clip.LENGTH}  # few words, as a tiny model is measured for its parts
FULL = FluxSizes(
    hidden=3072,
    head=128,
    double_blocks=19,
    single_blocks=38,
    clip_l=768,
    clip_layers=12,
    t5xxl=4096,
    t5_layers=24,
    t5_heads=64,
    t5_head=64,
    t5_mlp=10240,
    vae=(128, 256, 512, 512),
    resolutions=(512, 1024, 2048),
)


def _variants(base: FluxSizes, approximator: tuple[int, int, int]) -> dict[str, FluxSizes]:
    return {
        "kontext": replace(base, name="kontext-dev"),
        "fill": replace(base, inputs=6, name="fill-dev"),
        "chroma": replace(base, guidance=False, approximator=approximator),
    }


VARIANTS = _variants(TINY, (64, 64, 2))
FULL_VARIANTS = _variants(FULL, (64, 5120, 5))


def model_sizes(config: FluxLora | FluxTrain, full: bool) -> FluxSizes:
    variants = FULL_VARIANTS if full else VARIANTS
    return variants.get(config.model.model_type, FULL if full else TINY)


def make_networks(sizes: FluxSizes = TINY, clip_words: int = CLIP_WORDS, t5_words: int = T5_WORDS) -> RandomNetworks:
    """Return the networks of these sizes, for tokenizers with these numbers of tokens."""
    shape = Sizes(
        in_channels=4 * sizes.channels * sizes.inputs,
        out_channels=4 * sizes.channels,
        vector_channels=0 if sizes.approximator else sizes.clip_l,
        text_channels=sizes.t5xxl,
        hidden=sizes.hidden,
        head=sizes.head,
        mlp=4 * sizes.hidden,
        double_blocks=sizes.double_blocks,
        single_blocks=sizes.single_blocks,
        guidance=sizes.guidance and not sizes.approximator,
        approximator=sizes.approximator,
    )
    encoders = {
        "clip_l": lambda: random_networks.clip_encoder(sizes.clip_l, sizes.clip_layers, clip_words),
        "t5xxl": lambda: _t5(sizes, t5_words),
    }
    if sizes.approximator:
        del encoders["clip_l"]
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: Flux(shape)),
        encoders,
        lambda: random_networks.random_autoencoder(sizes.vae, sizes.channels, 0.3611, quant_convs=False),
        sizes.resolutions,
    )


def _t5(sizes: FluxSizes, words: int) -> nn.Module:
    from transformers.models.t5 import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=words,
        d_model=sizes.t5xxl,
        d_kv=sizes.t5_head,
        d_ff=sizes.t5_mlp,
        num_layers=sizes.t5_layers,
        num_heads=sizes.t5_heads,
        feed_forward_proj="gated-gelu",
    )
    module: Any = random_networks.build_on_meta(lambda: T5EncoderModel(config))
    module.encoder.embed_tokens = module.shared
    return module


def adopt_denoiser(family: FluxFamily, denoiser: Flux) -> None:
    family.is_schnell = denoiser.sizes.is_schnell
    family.depth = (denoiser.sizes.double_blocks, denoiser.sizes.single_blocks)


def input_shapes(family: FluxFamily, denoiser: Flux) -> InputShapes:
    """Return this denoiser's inputs for one image."""
    length, sizes = min(family.text_length, family.config.model.text_tokens or family.text_length), denoiser.sizes
    text = {"l_pooled": (sizes.vector_channels or POOLED,), "t5_out": (length, sizes.text_channels)}
    text |= {"txt_ids": (length, 3), "t5_attn_mask": (length,)}
    control_images = family.variant.control_images
    return InputShapes(sizes.out_channels // 4, text, control_images.inpaints, control_images.least)


def write_random_model(
    folder: Path, seed: int = 0, guidance: bool = True, dtype: torch.dtype = torch.bfloat16, sizes: FluxSizes = TINY
) -> dict[str, Path]:
    """Write the four files of a tiny dev model (schnell without `guidance`) and its tokenizers into a folder.

    With FULL `sizes` the text encoders have larger vocabularies than these tokenizers. Chroma has no CLIP-L. Returns
    paths by part: flux, clip_l, t5xxl, ae (all .safetensors), and the tokenizers' folders.
    """
    stem = "tiny-chroma" if sizes.approximator else f"tiny-flux1-{sizes.name or ('dev' if guidance else 'schnell')}"
    makers = [random_tokenizers.clip_tokenizer, random_tokenizers.t5_tokenizer]
    if sizes.approximator:
        del makers[0]
    places = {name: folder / name for name in ("tokenizer", "tokenizer_2")[: len(makers)]}
    vocabulary_sizes = [make(place) for make, place in zip(makers, places.values(), strict=True)]
    full = sizes in (FULL, *FULL_VARIANTS.values())
    # Other programs expect the real vocabularies in a model of full size.
    words = (CLIP_WORDS, T5_WORDS) if full else (vocabulary_sizes[0], vocabulary_sizes[-1])
    networks = make_networks(replace(sizes, guidance=guidance), *words)
    files = {"clip_l": "clip_l", "t5xxl": "t5xxl_fp16"}
    parts: dict[str, tuple[str, Tensors, Layout]] = {"flux": (stem, networks.denoiser().state_dict(), prefixed(""))}
    for part, make in networks.encoders.items():
        named = clip.clip_tensors(make()) if part == "clip_l" else make().state_dict()
        named = {name: tensor for name, tensor in named.items() if name != "encoder.embed_tokens.weight"}
        parts[part] = (files[part], named, prefixed(""))
    parts["ae"] = (
        "ae",
        networks.vae().state_dict(),
        lambda tensors: autoencoder.vae_to_single(_with_unit_latents(tensors)),
    )
    return places | random_networks.write_files(folder, parts, seed, dtype)


def _with_unit_latents(tensors: Tensors) -> Tensors:
    """Make the random encoder's output like a trained one's: latents of about unit size with almost no variance."""
    half = tensors["encoder.conv_out.bias"].shape[0] // 2
    tensors["encoder.conv_out.weight"][:half] *= 6
    tensors["encoder.conv_out.weight"][half:] *= 0.1
    tensors["encoder.conv_out.bias"][half:] = -12.0
    return tensors


REAL_WIDTH = 3072  # of FLUX.1: diffusers' converter assumes it for the fused layer of single blocks


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`.

    {references} is replaced by the folder of reference images.
    """
    files: list[DemoLine] = [
        ("t5xxl", str(models["t5xxl"]), ""),
        ("ae", str(models["ae"]), ""),
        ("t5xxl_max_token_length", 64, "real: 512"),
    ]
    shift: list[DemoLine] = [("timestep_sampling", "shift", ""), ("discrete_flow_shift", 3.1582, "")]
    base = ("pretrained_model_name_or_path", str(models["flux"]))
    data: list[DemoLine] = []
    if "clip_l" in models:
        clip_l = ("clip_l", str(models["clip_l"]), "")
        guidance = ("guidance_scale", 1.0, "what FLUX.1-dev is trained with")
        model: list[DemoLine] = [(*base, "real: flux1-dev.safetensors"), clip_l, *files, guidance]
        if "kontext" in models["flux"].name:
            model = [(*base, "real: flux1-kontext-dev.safetensors"), ("model_type", "kontext", ""), *model[1:]]
            data = [("control_directory", "{references}", "real: other images of the same names; here grey ones")]
        elif "fill" in models["flux"].name:
            model = [(*base, "real: flux1-fill-dev.safetensors"), ("model_type", "fill", ""), *model[1:]]
            data = [("alpha_mask", True, "where images are transparent nothing is painted; these are not")]
    else:
        chroma = [("model_type", "chroma", ""), ("apply_t5_attn_mask", True, "Chroma does not see the padding")]
        model = [(*base, "real: Chroma1-HD.safetensors"), *files, *chroma, ("guidance_scale", 0.0, "it takes none")]
        shift = [("timestep_sampling", "sigmoid", "")]
    return {"model": model, "noise": [*shift, ("model_prediction_type", "raw", "")], "data": data}


def small_flux_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for the small trained model."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["flux"]), "real: flux1-dev.safetensors"),
            *((part, str(models[part]), "") for part in ("clip_l", "t5xxl", "ae")),
            ("t5xxl_max_token_length", 32, "real: 512"),
            ("guidance_scale", 1.0, "what FLUX.1-dev is trained with"),
        ],
        "noise": [("timestep_sampling", "sigmoid", "real: flux_shift"), ("model_prediction_type", "raw", "")],
    }


# It was trained without distilled guidance, so samples take classifier-free guidance (--l).
SMALL_MODEL = SmallModel(
    files={
        "flux": "flux1-dev.safetensors",
        "clip_l": "clip_l.safetensors",
        "t5xxl": "t5xxl.safetensors",
        "ae": "ae.safetensors",
    },
    tables=small_flux_tables,
    prompt="--w 128 --h 128 --s 20 --l 4 --g 1",
    rank=16,
    alpha=8.0,
    rates={"lora": 3e-3, "finetune": 2e-4},
    steps=400,
)


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model."""
    from diffusers import ChromaTransformer2DModel, FluxTransformer2DModel, loaders

    shapes = _shapes_in_file(config)
    width, head = shapes["img_in.weight"][0], shapes["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    with torch.device("meta"):
        sizes: dict[str, Any] = {
            "in_channels": shapes["img_in.weight"][1],
            "num_layers": count_list_blocks(shapes, "double_blocks"),
            "num_single_layers": count_list_blocks(shapes, "single_blocks"),
            "attention_head_dim": head,
            "num_attention_heads": width // head,
            "joint_attention_dim": shapes["txt_in.weight"][1],
        }
        if f"{keys.APPROXIMATOR}in_proj.weight" in shapes:
            model: Any = ChromaTransformer2DModel(**sizes, approximator_hidden_dim=8, approximator_layers=1)
        else:
            pooled, guided = shapes["vector_in.in_layer.weight"][1], "guidance_in.in_layer.weight" in shapes
            model = FluxTransformer2DModel(**sizes, pooled_projection_dim=pooled, guidance_embeds=guided)
    renamed: Any = loaders.FluxLoraLoaderMixin.lora_state_dict(_as_wide_as_the_real_one(tensors, width))
    prefix = "transformer."
    renamed = {name.removeprefix(prefix): tensor for name, tensor in renamed.items() if name.startswith(prefix)}
    return {name: _as_narrow_again(name, tensor, width) for name, tensor in renamed.items()}, layer_sizes(model)


def _as_wide_as_the_real_one(tensors: JsonObject, width: int) -> JsonObject:
    """Pad fused outputs of single blocks (q, k, v, mlp) with zeros to FLUX.1's own sizes, at which diffusers splits
    them.
    """
    out = dict(tensors)
    for name, tensor in tensors.items():
        if "_single_blocks_" in name and name.endswith("_linear1.lora_up.weight"):
            padded = tensor.new_zeros(REAL_WIDTH * 7, tensor.shape[1])
            for part, start in zip(tensor.split([width, width, width, 4 * width]), (0, 1, 2, 3), strict=True):
                padded[start * REAL_WIDTH : start * REAL_WIDTH + part.shape[0]] = part
            out[name] = padded
    return out


def _as_narrow_again(name: str, tensor: Any, width: int) -> Any:
    if name.startswith("single_transformer_blocks.") and name.endswith(ADAPTER_ENDINGS[1]):
        full = {"to_q": REAL_WIDTH, "to_k": REAL_WIDTH, "to_v": REAL_WIDTH, "proj_mlp": 4 * REAL_WIDTH}.get(
            name.split(".")[-3]
        )
        if full and tensor.shape[0] == full:
            return tensor[: full // REAL_WIDTH * width]
    return tensor


def _shapes_in_file(config: RunConfig) -> dict[str, tuple[int, ...]]:
    shapes = weights.header(config.model.pretrained_model_name_or_path or "")
    return {name.removeprefix("model.diffusion_model."): shape for name, shape in shapes.items()}
