"""Run a script of sd-scripts on a small SD 1.5: `python sd_scripts_small.py FOLDER SCRIPT LOSSES OPTION...`.

sd-scripts hard-codes the sizes of the networks. This launcher sets the sizes from the header of the file in FOLDER
before the training starts, does not change the training itself, and writes the loss of each step to LOSSES as JSON
lines. Run it as a file in sd-scripts' environment, whose package is called `library`, too.
"""

import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import sys
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]
CLIP_HEAD = 64  # channels per head of a CLIP text encoder
UNET = "model.diffusion_model."
VAE = "first_stage_model."
CLIP_SD15 = "cond_stage_model.transformer."
PAIRED = "BESIDE_PAIRED"  # set if both trainers draw the same random numbers
ALIKE = "BESIDE_ALIKE"  # set if the rival is patched to match this project's intended differences


# ---- sizes of a file


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a .safetensors file by name."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(about["shape"]) for name, about in header.items() if name != "__metadata__"}


def count(shapes: Shapes, pattern: str) -> int:
    matches = (re.match(pattern, name) for name in shapes)
    return max((int(match[1]) + 1 for match in matches if match), default=0)


def autoencoder_sizes(shapes: Shapes, prefix: str = "") -> dict[str, Any]:
    """Return the sizes of an autoencoder by the names of sd-scripts' AutoEncoderParams."""
    first = shapes[f"{prefix}encoder.conv_in.weight"][0]
    levels = count(shapes, rf"{re.escape(prefix)}encoder\.down\.(\d+)\.")
    widths = [shapes[f"{prefix}encoder.down.{level}.block.0.conv1.weight"][0] for level in range(levels)]
    return {
        "ch": first,
        "ch_mult": [width // first for width in widths],
        "z_channels": shapes[f"{prefix}decoder.conv_in.weight"][1],
    }


def clip_sizes(shapes: Shapes, prefix: str = "") -> dict[str, Any]:
    """Return the sizes of a CLIP text encoder in transformers' format by the names of CLIPTextConfig."""
    words, width = shapes[f"{prefix}text_model.embeddings.token_embedding.weight"]
    layer = f"{prefix}text_model.encoder.layers."
    return {
        "vocab_size": words,
        "hidden_size": width,
        "intermediate_size": shapes[f"{layer}0.mlp.fc1.weight"][0],
        "num_hidden_layers": count(shapes, rf"{re.escape(layer)}(\d+)\."),
        "num_attention_heads": max(1, width // CLIP_HEAD),
        "projection_dim": width,
    }


def sd15_widths(shapes: Shapes) -> tuple[int, ...]:
    """Return the widths of the four levels of SD 1.5's U-Net."""
    blocks = (1, 4, 7, 10)
    return tuple(shapes[f"{UNET}input_blocks.{block}.0.out_layers.3.weight"][0] for block in blocks)


# ---- setting them in sd-scripts


def sd_scripts_module(name: str) -> Any:
    return importlib.import_module(f"library.{name}")


def set_sd15_sizes(files: Mapping[str, Any]) -> None:
    """Set the sizes of SD 1.5's file in sd-scripts' modules."""
    model_util, original_unet = sd_scripts_module("model_util"), sd_scripts_module("original_unet")

    shapes = shapes_of(Path(files["pretrained_model_name_or_path"]))
    vae, widths = autoencoder_sizes(shapes, VAE), sd15_widths(shapes)
    text = clip_sizes(shapes, CLIP_SD15)
    model_util.VAE_PARAMS_CH, model_util.VAE_PARAMS_CH_MULT = vae["ch"], vae["ch_mult"]
    model_util.UNET_PARAMS_CONTEXT_DIM = text["hidden_size"]
    usual_config = model_util.CLIPTextConfig
    model_util.CLIPTextConfig = lambda **usual: usual_config(**{**usual, **text})
    original_unet.BLOCK_OUT_CHANNELS, original_unet.TIMESTEP_INPUT_DIM = widths, widths[0]
    original_unet.TIME_EMBED_DIM = 4 * widths[0]


# ---- other changes before its start


def stub_missing() -> None:
    """Install stubs for torchvision and OpenCV if they are missing: the images have the right size already."""
    if importlib.util.find_spec("torchvision") is None:
        sys.modules["torchvision"] = module_stub("torchvision", transforms=_transforms())
        sys.modules["torchvision.transforms"] = sys.modules["torchvision"].transforms
    if importlib.util.find_spec("cv2") is None:
        names = ("NEAREST", "LINEAR", "CUBIC", "AREA", "LANCZOS4", "LINEAR_EXACT", "NEAREST_EXACT")
        sys.modules["cv2"] = module_stub("cv2", **{f"INTER_{name}": number for number, name in enumerate(names)})


def module_stub(name: str, **holds: Any) -> Any:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)  # by which packages detect it
    module.__dict__.update(holds)
    return module


def _transforms() -> Any:
    import numpy as np
    import torch

    return module_stub(
        "torchvision.transforms",
        ToTensor=lambda: lambda image: torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1) / 255.0,
        Normalize=lambda mean, std: lambda pixels: (pixels - mean[0]) / std[0],
        Compose=lambda steps: lambda value: [value := step(value) for step in steps][-1],
    )


def log_losses(recorder: Any, path: Path) -> None:
    """Write the loss of each step as it is recorded; the progress bar shows only the mean of an epoch."""
    add, steps = recorder.add, iter(range(1, sys.maxsize))

    def logged(self: Any, *, epoch: int, step: int, loss: float) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": next(steps), "loss": loss}) + "\n")
        add(self, epoch=epoch, step=step, loss=loss)

    recorder.add = logged


def main(arguments: list[str]) -> None:
    """Run the script's training."""
    folder, script, losses, *options = arguments
    sys.path.insert(0, folder)
    stub_missing()
    config = tomllib.loads(Path(options[options.index("--config_file") + 1]).read_text(encoding="utf-8"))
    train_util = sd_scripts_module("train_util")
    module = importlib.import_module(script)
    set_sd15_sizes(config)
    train = module.NetworkTrainer().train if script == "train_network" else module.train
    log_losses(train_util.LossRecorder, Path(losses))
    if PAIRED in os.environ:
        import paired_draws

        paired_draws.install()
    sys.argv = [script, *options]  # reading the TOML parses it again
    parser = module.setup_parser()
    args = parser.parse_args()
    train_util.verify_command_line_training_args(args)
    train(train_util.read_config_from_file(args, parser))


if __name__ == "__main__":
    main(sys.argv[1:])
