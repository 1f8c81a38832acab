"""A ready TOML for each of the four scripts: the demo's own files, and the settings that people really train with."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from library.config.schema import toml_value
from library.files import write_atomic

# An option, its value, and a remark for the reader. What stands in comments is what a real training would use.
Line = tuple[str, Any, str]
Tables = dict[str, list[Line]]

TITLES = {
    "flux_train_network": "LoRA for FLUX.1",
    "flux_train": "Fine-tuning of FLUX.1",
    "sdxl_train_network": "LoRA for SDXL",
    "sdxl_train": "Fine-tuning of SDXL",
}
# All kinds of blocks of a U-Net take minutes to compile on a processor; these take seconds, and do most of the work.
BLOCKS: Line = ("compile_blocks", "transformer:all", "all kinds of blocks, without this line, compile longer")


def write(folder: Path, models: Mapping[str, Mapping[str, Path]], images: Path, output: Path) -> dict[str, Path]:
    """Write `<script>.toml` for every family in `models`; the files by script. A file that exists is kept as it is."""
    written = {}
    for script in TITLES:
        family = script.split("_")[0]
        if family in models:
            path = folder / f"{script}.toml"
            if not path.exists():
                write_atomic(path, text(script, models[family], images, output))
            written[script] = path
    return written


def text(script: str, models: Mapping[str, Path], images: Path, output: Path) -> str:
    """The TOML of one script."""
    family, is_lora = script.split("_")[0], script.endswith("_network")
    model = {"flux": _flux_model, "sdxl": _sdxl_model}[family](models)
    tables = model | _shared(images, output, f"{family}-{'lora' if is_lora else 'full'}")
    tables |= _lora(family) if is_lora else _full()
    if family == "sdxl":
        tables["compile"].append(BLOCKS)
    head = [
        f"# {TITLES[script]}, on the tiny model and the dozen images that the demo made.",
        "# For a real training, change the paths and the values whose comment says so. Start it with:",
        f"#   kohya train {script} --config_file {script}.toml",
    ]
    blocks = ["\n".join([f"[{table}]", *map(_line, lines)]) for table, lines in tables.items()]
    return "\n".join(head) + "\n\n" + "\n\n".join(blocks) + "\n"


def _line(line: Line) -> str:
    name, value, remark = line
    written = f"{name} = {toml_value(value)}"
    return f"{written}  # {remark}" if remark else written


def _flux_model(models: Mapping[str, Path]) -> Tables:
    return {
        "model": [
            ("pretrained_model_name_or_path", str(models["flux"]), "real: flux1-dev.safetensors"),
            ("clip_l", str(models["clip_l"]), ""),
            ("t5xxl", str(models["t5xxl"]), ""),
            ("ae", str(models["ae"]), ""),
            ("t5xxl_max_token_length", 64, "real: 512"),
            ("guidance_scale", 1.0, "what FLUX.1-dev is trained with"),
        ],
        "noise": [
            ("timestep_sampling", "shift", ""),
            ("discrete_flow_shift", 3.1582, ""),
            ("model_prediction_type", "raw", ""),
        ],
    }


def _sdxl_model(models: Mapping[str, Path]) -> Tables:
    return {"model": [("pretrained_model_name_or_path", str(models["sdxl"]), "real: sd_xl_base_1.0.safetensors")]}


def _shared(images: Path, output: Path, name: str) -> Tables:
    return {
        "data": [
            ("train_data_dir", str(images), "contains folders named <repeats>_<words>"),
            ("resolution", "192,192", 'real: "1024,1024"'),
            ("train_batch_size", 2, ""),
            ("enable_bucket", True, "images keep their aspect ratio"),
            ("min_bucket_reso", 64, "real: 256"),
            ("max_bucket_reso", 256, "real: 2048"),
            ("bucket_reso_steps", 64, ""),
        ],
        "captions": [("caption_extension", ".txt", "")],
        "cache": [
            ("cache_latents", True, "real: cache_latents_to_disk"),
            ("cache_text_encoder_outputs", True, ""),
        ],
        "steps": [("max_train_steps", 60, "real: 1000 or more"), ("seed", 42, "")],
        "precision": [("mixed_precision", "no", "real, on a GPU: bf16")],
        "compile": [("compile", True, "compiles the blocks of the denoiser before the first step")],
        "save": [
            ("output_dir", str(output), ""),
            ("output_name", name, ""),
            ("save_model_as", "safetensors", ""),
            ("save_precision", "fp16", ""),
        ],
        "log": [("logging_dir", str(output / "logs"), "for TensorBoard")],
    }


def _lora(family: str) -> Tables:
    return {
        "network": [
            ("network_module", "networks.lora_flux" if family == "flux" else "networks.lora", ""),
            ("network_dim", 8, "real: 16 or 32"),
            ("network_alpha", 8, ""),
            ("network_train_unet_only", True, "the text encoders are not trained"),
        ],
        "optim": [("optimizer_type", "AdamW", ""), ("learning_rate", 5e-3, "real: 1e-4")],
    }


def _full() -> Tables:
    return {"optim": [("optimizer_type", "AdamW", ""), ("learning_rate", 1e-3, "real: 1e-5")]}
