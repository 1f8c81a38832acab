"""What the demo says of Qwen-Image, and whether its LoRA fits the model in diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.shared import diffusers_layers, tensor_names, weights
from library.families.shared.diffusers_layers import Sizes

Line = tuple[str, Any, str]  # an option, its value, and what a real training would use instead


def demo_tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """What a TOML of the demo says of this model; `models` are the files that write_random_model made. {references}
    stands for the folder of the reference images."""
    edit = "edit" in models["qwen_image"].name
    real = f"real: qwen_image_{'edit_2511_' if edit else ''}bf16.safetensors"
    shown = ("control_directory", "{references}", "real: other images of the same names; here grey ones")
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["qwen_image"]), real),
            *([("model_version", "edit-2511", "")] if edit else []),
            ("text_encoder", str(models["text_encoder"]), "real: qwen_2.5_vl_7b.safetensors"),
            ("vae", str(models["vae"]), "real: qwen_image_vae.safetensors"),
        ],
        "noise": [("timestep_sampling", "qwen_shift", "")],
        **({"data": [shown]} if edit else {}),
    }


def convert_for_diffusers(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, Sizes]:
    """A LoRA file's adapters by diffusers' names, and the sizes of the layers of diffusers' model."""
    path = config.model.pretrained_model_name_or_path or ""
    shapes = weights.header(path)
    known = {plain: shapes[name] for plain, name in tensor_names.without_prefix(shapes).items()}
    head = known["transformer_blocks.0.attn.norm_q.weight"][0]
    return diffusers_layers.convert_with_mixin(
        tensors,
        "QwenImageTransformer2DModel",
        "QwenImageLoraLoaderMixin",
        in_channels=known["img_in.weight"][1],
        out_channels=known["proj_out.weight"][0] // 4,
        num_layers=len({name.split(".")[1] for name in known if name.startswith("transformer_blocks.")}),
        attention_head_dim=head,
        num_attention_heads=known["img_in.weight"][0] // head,
        joint_attention_dim=known["txt_in.weight"][1],
    )
