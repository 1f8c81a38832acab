"""Anima's networks with random weights: full-size, or tiny ones in the real file formats, for tests and demo."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.anima.adapter import AdapterShape
from library.families.anima.family import AnimaFamily
from library.families.anima.model import PADDING, Anima, AnimaShape
from library.families.shared import diffusers_layers, language_model, random_networks, random_tokenizers
from library.families.shared.diffusers_layers import LayerSizes
from library.families.shared.lora_names import matrices
from library.families.shared.random_networks import T5_WORDS, DemoTables, InputShapes, RandomNetworks, prefixed
from library.families.shared.random_sizes import FULL_QWEN_VAE, LanguageModelSizes, QwenVaeSizes
from library.families.shared.tensor_names import count_list_blocks

VOCABULARY = 151936  # size of Qwen3's published vocabulary, with spare rows


@dataclass(frozen=True)
class AnimaSizes(LanguageModelSizes, QwenVaeSizes):
    """Widths and depths. Widths of the transformer and of the adapter are multiples of their heads."""

    hidden: int = 64
    head: int = 32
    blocks: int = 3
    modulation: int = 16
    adapter: int = 32
    adapter_head: int = 16
    adapter_blocks: int = 2
    resolutions: tuple[int, ...] = (64, 128)


TINY = AnimaSizes()
TINY_OPTIONS: dict[str, int] = {"qwen3_max_token_length": 64, "t5_max_token_length": 64}
FULL = AnimaSizes(
    hidden=2048,
    head=128,
    blocks=28,
    modulation=256,
    adapter=1024,
    adapter_head=64,
    adapter_blocks=6,
    text=1024,
    text_layers=28,
    text_mlp=3072,
    text_heads=16,
    text_groups=8,
    resolutions=(512, 1024),
    **FULL_QWEN_VAE,
)


def anima_shape(sizes: AnimaSizes, words: int) -> AnimaShape:
    """Return the denoiser's sizes."""
    adapter = AdapterShape(
        words, sizes.text, sizes.adapter, sizes.adapter_head, 4 * sizes.adapter, sizes.adapter_blocks
    )
    return AnimaShape(
        channels=4 * sizes.channels,
        hidden=sizes.hidden,
        head=sizes.head,
        context=sizes.adapter,
        mlp=4 * sizes.hidden,
        modulation=sizes.modulation,
        blocks=sizes.blocks,
        adapter=adapter,
    )


def make_networks(sizes: AnimaSizes = TINY, words: int = VOCABULARY, target_words: int = T5_WORDS) -> RandomNetworks:
    """Return the networks of these sizes, for tokenizers with these numbers of tokens."""
    return RandomNetworks(
        lambda: random_networks.build_on_meta(lambda: Anima(anima_shape(sizes, target_words))),
        {"text_encoder": lambda: language_model.empty_qwen3(**sizes.text_settings(words))},
        sizes.empty_vae,
        sizes.resolutions,
    )


def input_shapes(family: AnimaFamily, denoiser: Anima) -> InputShapes:
    """Return this denoiser's inputs for one image."""
    lengths, sizes = family.text_lengths, denoiser.sizes
    text = {
        name: (length, sizes.adapter.source) if name == "prompt_embeds" else (length,)
        for name, length in lengths.items()
    }
    return InputShapes(sizes.channels // 4, text, words={"t5_input_ids": sizes.adapter.words})


def write_random_model(
    folder: Path, seed: int = 0, dtype: torch.dtype = torch.bfloat16, sizes: AnimaSizes = TINY
) -> dict[str, Path]:
    """Write the three files of a tiny model, in ComfyUI's layouts, and its tokenizers into a folder.

    Returns paths by part: anima, text_encoder, vae (all .safetensors), tokenizer and t5_tokenizer (folders).
    """
    places = {"tokenizer": folder / "tokenizer", "t5_tokenizer": folder / "t5_tokenizer"}
    words = random_tokenizers.qwen_tokenizer(places["tokenizer"])
    target = random_tokenizers.t5_tokenizer(places["t5_tokenizer"])
    networks = make_networks(sizes, *((VOCABULARY, T5_WORDS) if sizes == FULL else (words, target)))
    text = networks.encoders["text_encoder"]().state_dict()
    parts = {
        "anima": ("anima_tiny", networks.denoiser().state_dict(), prefixed("net.")),
        "text_encoder": ("qwen_3_06b_tiny", text, prefixed("model.")),
        "vae": ("qwen_image_vae", *random_networks.qwen_vae_file(networks.vae())),
    }
    return places | random_networks.write_files(folder, parts, seed, dtype)


def demo_tables(models: Mapping[str, Path]) -> DemoTables:
    """Return the tables of a demo TOML for this model; `models` are the files written by `write_random_model`."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["anima"]), "real: anima-base-v1.0.safetensors"),
            ("qwen3", str(models["text_encoder"]), "real: qwen_3_06b_base.safetensors"),
            ("vae", str(models["vae"]), "real: qwen_image_vae.safetensors"),
            ("qwen3_max_token_length", 64, "512, which is usual"),
            ("t5_max_token_length", 64, "512, which is usual"),
        ],
        "noise": [("timestep_sampling", "sigmoid", "")],
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, LayerSizes]:
    """Return a LoRA file's adapters by diffusers' names, and the layer sizes of diffusers' model.

    diffusers requires dotted model paths, which `kohya tools convert --to diffusers` writes.
    """
    shapes = diffusers_layers.stored_shapes(config)
    named = diffusers_layers.with_dotted_paths(tensors, matrices(shapes, ""))
    head, (hidden, inputs) = shapes["blocks.0.self_attn.q_norm.weight"][0], shapes["x_embedder.proj.1.weight"]
    return diffusers_layers.convert_with_mixin(
        named,
        "CosmosTransformer3DModel",
        "AnimaLoraLoaderMixin",
        in_channels=(inputs - PADDING) // 4,
        out_channels=(inputs - PADDING) // 4,
        num_attention_heads=hidden // head,
        attention_head_dim=head,
        num_layers=count_list_blocks(shapes, "blocks"),
        text_embed_dim=shapes["blocks.0.cross_attn.k_proj.weight"][1],
        adaln_lora_dim=shapes["blocks.0.adaln_modulation_self_attn.1.weight"][0],
        extra_pos_embed_type=None,
    )
