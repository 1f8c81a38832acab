"""What the demo says of FLUX.2, and whether its LoRA fits the model in diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.flux_2.keys import TREES
from library.families.flux_2.model import Flux2Shape
from library.families.shared import diffusers_layers, tensor_names, weights
from library.families.shared.diffusers_layers import Sizes

Line = tuple[str, Any, str]  # an option, its value, and what a real training would use instead


def demo_tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """What a TOML of the demo says of this model; `models` are the files that write_random_model made."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["flux_2"]), "real: flux-2-klein-base-4b.safetensors"),
            ("text_encoder", str(models["text_encoder"]), "real: qwen_3_4b.safetensors"),
            ("vae", str(models["vae"]), "real: flux2-vae.safetensors"),
            ("model_version", "klein-base-4b", ""),
        ],
        "noise": [("timestep_sampling", "flux2_shift", "")],
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, Sizes]:
    """A LoRA file's adapters by diffusers' names, and the sizes of the layers of diffusers' model."""
    stored = weights.header(config.model.pretrained_model_name_or_path or "")
    known = {plain: stored[name] for plain, name in tensor_names.without_prefix(stored).items()}
    assert not TREES.is_diffusers(known)  # write_random_model makes the original's layout
    return diffusers_layers.convert_with_mixin(
        tensors, "Flux2Transformer2DModel", "Flux2LoraLoaderMixin", **diffusers_settings(Flux2Shape.of(known))
    )


def diffusers_settings(sizes: Flux2Shape) -> dict[str, Any]:
    """A model of these sizes as diffusers' class is told them."""
    return {
        "in_channels": sizes.in_channels,
        "num_layers": sizes.double_blocks,
        "num_single_layers": sizes.single_blocks,
        "attention_head_dim": sizes.head,
        "num_attention_heads": sizes.hidden // sizes.head,
        "joint_attention_dim": sizes.text_channels,
        "axes_dims_rope": sizes.axes,
        "mlp_ratio": sizes.mlp / sizes.hidden,
        "guidance_embeds": sizes.guidance,
    }
