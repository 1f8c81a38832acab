"""What the demo says of Z-Image, and whether its LoRA fits the model in diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.shared import diffusers_layers, tensor_names, weights
from library.families.shared.diffusers_layers import Sizes

Line = tuple[str, Any, str]  # an option, its value, and what a real training would use instead


def demo_tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """What a TOML of the demo says of this model; `models` are the files that write_random_model made."""
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["zimage"]), "real: z_image_bf16.safetensors"),
            ("text_encoder", str(models["text_encoder"]), "real: qwen_3_4b.safetensors"),
            ("vae", str(models["vae"]), "real: ae.safetensors"),
            ("model_version", "base", "turbo for Z-Image Turbo"),
        ],
        "noise": [("timestep_sampling", "shift", ""), ("discrete_flow_shift", 2.0, "")],
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, Sizes]:
    """A LoRA file's adapters by diffusers' names, and the sizes of the layers of diffusers' model."""
    path = config.model.pretrained_model_name_or_path or ""
    stored = weights.header(path)
    known = {plain: stored[name] for plain, name in tensor_names.without_prefix(stored).items()}
    (hidden, tokens), head = known["x_embedder.weight"], known["layers.0.attention.q_norm.weight"][0]
    refiners, blocks = (
        len({name.split(".")[1] for name in known if name.startswith(group)}) for group in ("noise_refiner.", "layers.")
    )
    return diffusers_layers.convert_with_mixin(
        tensors,
        "ZImageTransformer2DModel",
        "ZImageLoraLoaderMixin",
        dim=hidden,
        n_layers=blocks,
        n_refiner_layers=refiners,
        n_heads=hidden // head,
        n_kv_heads=hidden // head,
        in_channels=tokens // 4,
        cap_feat_dim=known["cap_embedder.1.weight"][1],
        axes_lens=[2, 2, 2],
        axes_dims=[head // 4, 3 * head // 8, 3 * head // 8],
    )
