"""What the demo says of FLUX.1, and whether its LoRA fits the model in diffusers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.json_types import JsonObject
from library.config.run_config import RunConfig
from library.families.facts import SmallModel
from library.families.flux import keys
from library.families.shared import weights
from library.families.shared.diffusers_layers import ADAPTER, Sizes, layers

REAL = 3072  # FLUX.1's width, which diffusers' converter has written into it for the fused layer of single blocks
Line = tuple[str, Any, str]  # an option, its value, and what a real training would use instead


def tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """What a TOML of the demo says of this model; `models` are the files that random.write made. {references}
    stands for the folder of the reference images."""
    files: list[Line] = [
        ("t5xxl", str(models["t5xxl"]), ""),
        ("ae", str(models["ae"]), ""),
        ("t5xxl_max_token_length", 64, "real: 512"),
    ]
    shift: list[Line] = [("timestep_sampling", "shift", ""), ("discrete_flow_shift", 3.1582, "")]
    base = ("pretrained_model_name_or_path", str(models["flux"]))
    data: list[Line] = []
    if "clip_l" in models:
        clip_l = ("clip_l", str(models["clip_l"]), "")
        guidance = ("guidance_scale", 1.0, "what FLUX.1-dev is trained with")
        model: list[Line] = [(*base, "real: flux1-dev.safetensors"), clip_l, *files, guidance]
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


def small_tables(models: Mapping[str, Path]) -> dict[str, list[Line]]:
    """As `tables`, of the small trained model."""
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
SMALL = SmallModel(
    files={
        "flux": "flux1-dev.safetensors",
        "clip_l": "clip_l.safetensors",
        "t5xxl": "t5xxl.safetensors",
        "ae": "ae.safetensors",
    },
    tables=small_tables,
    prompt="--w 128 --h 128 --s 20 --l 4 --g 1",
    rank=16,
    alpha=8.0,
    rates={"lora": 3e-3, "finetune": 2e-4},
    steps=500,
)


def converted(tensors: JsonObject, config: RunConfig) -> tuple[JsonObject, Sizes]:
    """A LoRA file's adapters by diffusers' names, and the sizes of the layers of diffusers' model."""
    import torch
    from diffusers import ChromaTransformer2DModel, FluxTransformer2DModel, loaders

    known = _shapes(config)
    width, head = known["img_in.weight"][0], known["double_blocks.0.img_attn.norm.query_norm.scale"][0]
    with torch.device("meta"):
        sizes: dict[str, Any] = {
            "in_channels": known["img_in.weight"][1],
            "num_layers": 1 + max(int(k.split(".")[1]) for k in known if k.startswith("double_blocks.")),
            "num_single_layers": 1 + max(int(k.split(".")[1]) for k in known if k.startswith("single_blocks.")),
            "attention_head_dim": head,
            "num_attention_heads": width // head,
            "joint_attention_dim": known["txt_in.weight"][1],
        }
        if f"{keys.APPROXIMATOR}in_proj.weight" in known:
            model: Any = ChromaTransformer2DModel(**sizes, approximator_hidden_dim=8, approximator_layers=1)
        else:
            pooled, guided = known["vector_in.in_layer.weight"][1], "guidance_in.in_layer.weight" in known
            model = FluxTransformer2DModel(**sizes, pooled_projection_dim=pooled, guidance_embeds=guided)
    found: Any = loaders.FluxLoraLoaderMixin.lora_state_dict(_as_wide_as_the_real_one(tensors, width))
    prefix = "transformer."
    found = {name.removeprefix(prefix): tensor for name, tensor in found.items() if name.startswith(prefix)}
    return {name: _as_narrow_again(name, tensor, width) for name, tensor in found.items()}, layers(model)


def _as_wide_as_the_real_one(tensors: JsonObject, width: int) -> JsonObject:
    """Fused outputs of single blocks (q, k, v, mlp) padded with zeros to FLUX.1's own sizes, as diffusers cuts them."""
    out = dict(tensors)
    for name, tensor in tensors.items():
        if "_single_blocks_" in name and name.endswith("_linear1.lora_up.weight"):
            padded = tensor.new_zeros(REAL * 7, tensor.shape[1])
            for part, start in zip(tensor.split([width, width, width, 4 * width]), (0, 1, 2, 3), strict=True):
                padded[start * REAL : start * REAL + part.shape[0]] = part
            out[name] = padded
    return out


def _as_narrow_again(name: str, tensor: Any, width: int) -> Any:
    if name.startswith("single_transformer_blocks.") and name.endswith(ADAPTER[1]):
        full = {"to_q": REAL, "to_k": REAL, "to_v": REAL, "proj_mlp": 4 * REAL}.get(name.split(".")[-3])
        if full and tensor.shape[0] == full:
            return tensor[: full // REAL * width]
    return tensor


def _shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape in the FLUX file, without the prefix that some tools put before the names."""
    known = weights.header(config.model.pretrained_model_name_or_path or "")
    return {name.removeprefix("model.diffusion_model."): shape for name, shape in known.items()}
