"""What the demo says of Anima, and whether its LoRA fits the model in diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.anima.model import PADDING
from library.families.shared import diffusers_layers, tensor_names, weights
from library.families.shared.diffusers_layers import Sizes
from library.families.shared.lora_names import matrices

Line = tuple[str, Any, str]  # an option, its value, and what a real training would use instead
DIFFUSERS_ENDINGS = {"lora_down.weight": "lora_A.weight", "lora_up.weight": "lora_B.weight"}


def demo_tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """What a TOML of the demo says of this model; `models` are the files that write_random_model made."""
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


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, Sizes]:
    """A LoRA file's adapters by diffusers' names, and the sizes of the layers of diffusers' model.

    diffusers wants the paths of the model with dots, which `kohya tools convert --to diffusers` writes.
    """
    path = config.model.pretrained_model_name_or_path or ""
    shapes = weights.header(path)
    known = {plain: shapes[name] for plain, name in tensor_names.without_prefix(shapes).items()}
    dotted = {f"lora_unet_{one.replace('.', '_')}": f"diffusion_model.{one}" for one in matrices(known, "")}
    apart = {name: name.partition(".")[::2] for name in tensors}
    named = {
        f"{dotted[layer]}.{DIFFUSERS_ENDINGS[ending]}": tensors[name]
        for name, (layer, ending) in apart.items()
        if ending in DIFFUSERS_ENDINGS
    }
    head, (hidden, inputs) = known["blocks.0.self_attn.q_norm.weight"][0], known["x_embedder.proj.1.weight"]
    return diffusers_layers.convert_with_mixin(
        named,
        "CosmosTransformer3DModel",
        "AnimaLoraLoaderMixin",
        in_channels=(inputs - PADDING) // 4,
        out_channels=(inputs - PADDING) // 4,
        num_attention_heads=hidden // head,
        attention_head_dim=head,
        num_layers=len({name.split(".")[1] for name in known if name.startswith("blocks.")}),
        text_embed_dim=known["blocks.0.cross_attn.k_proj.weight"][1],
        adaln_lora_dim=known["blocks.0.adaln_modulation_self_attn.1.weight"][0],
        extra_pos_embed_type=None,
    )
