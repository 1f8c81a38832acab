"""Pretrain a small model with this trainer's own scripts: write the TOML and start the training."""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from library.config.formats import toml_value
from library.files import write_atomic

SAMPLE_SUBJECTS = (
    "red apple emoji on a white ground",
    "cat face emoji on a blue ground",
    "rocket on a green background",
    "pizza emoji on a white ground",
    "umbrella on a pink background",
    "a yellow background, frog",
    "guitar emoji on a gray ground",
    "snowman on a blue background",
    "bicycle emoji on a white ground",
    "octopus on a pink background",
    "cactus on a yellow background",
    "red heart emoji on a white ground",
    "elephant emoji on a green ground",
    "airplane on a blue background",
    "hot beverage on a white background",
    "flag of japan",
)
# FLUX.1's embedded guidance stays at its training value, 1; both models were trained with empty captions, which guide
# them.
GUIDANCE = {"flux": "--g 1 --l 4", "sdxl": "--l 4"}
ALL: dict[str, Any] = {
    "resolution": "128,128",
    "caption_extension": ".txt",
    "cache_latents": True,
    "vae_batch_size": 128,
    "cache_text_encoder_outputs": True,
    "max_data_loader_n_workers": 6,
    "persistent_data_loader_workers": True,
    "mixed_precision": "bf16",
    "optimizer_type": "AdamW",
    "lr_scheduler": "warmup_stable_decay",
    "lr_warmup_steps": 300,
    "seed": 1,
    "compile": True,
    "max_grad_norm": 1.0,
    "save_precision": "float",
    "save_model_as": "safetensors",
    "sample_sampler": "euler",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "flux": {
        "pretrained_model_name_or_path": "{folder}/flux1-dev.safetensors",
        "clip_l": "{folder}/clip_l.safetensors",
        "t5xxl": "{folder}/t5xxl.safetensors",
        "ae": "{folder}/ae.safetensors",
        "guidance_scale": 1.0,
        "t5xxl_max_token_length": 32,
        "timestep_sampling": "sigmoid",
        "model_prediction_type": "raw",
        "learning_rate": 8e-4,
        "text_encoder_batch_size": 256,
    },
    "sdxl": {"pretrained_model_name_or_path": "{folder}/sdxl.safetensors", "learning_rate": 6e-4},
}


def pretraining_options(family: str, folder: Path, pictures: Path, args: argparse.Namespace) -> dict[str, Any]:
    own = {
        name: value.format(folder=folder) if isinstance(value, str) else value
        for name, value in FAMILIES[family].items()
    }
    lines = (
        f"{prompt} --w 128 --h 128 --d {number} {GUIDANCE[family]}\n" for number, prompt in enumerate(SAMPLE_SUBJECTS)
    )
    write_atomic(folder / "prompts.txt", "".join(lines))
    of_this_run = {
        "train_data_dir": str(pictures),
        "train_batch_size": args.batch,
        "max_train_steps": args.steps,
        "lr_decay_steps": args.steps // 3,
        "output_dir": str(folder / "trained"),
        "output_name": family,
        "save_every_n_steps": max(1, args.steps // 4),
        "sample_prompts": str(folder / "prompts.txt"),
        "sample_every_n_steps": max(1, args.steps // 2),
    }
    more = dict(pair.split("=", 1) for pair in args.option)
    return ALL | own | of_this_run | more


def main() -> None:
    parser = argparse.ArgumentParser(description="Pretrain a small model.")
    parser.add_argument("family", choices=[*FAMILIES])
    parser.add_argument("folder", type=Path, help="folder of the untrained files")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="as on the command line")
    args = parser.parse_args()
    folder = args.folder.resolve()
    chosen = pretraining_options(args.family, folder, args.pictures.resolve(), args)
    text = "".join(f"{name} = {toml_value(value)}\n" for name, value in chosen.items())
    write_atomic(folder / "pretrain.toml", text)
    command = [sys.executable, "-m", "library.cli.main", "train", f"{args.family}_train"]
    sys.exit(subprocess.run([*command, "--config_file", str(folder / "pretrain.toml")], check=False).returncode)


if __name__ == "__main__":
    main()
