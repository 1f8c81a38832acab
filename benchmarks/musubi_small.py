"""Run a LoRA script of musubi-tuner on a small model: `python musubi_small.py FOLDER SCRIPT LOSSES OPTION...`.

musubi-tuner hard-codes the sizes of Krea 2's transformer, and trains in bf16. This launcher sets the sizes of the file
in FOLDER and float32 before the training starts, does not change the training itself, and writes the loss of each step
to LOSSES as JSON lines. Run it as a file in musubi-tuner's environment, with this project after it on the path.
"""

import importlib
import importlib.util
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import paired_draws
from benchmarks.sd_scripts_small import ALIKE, PAIRED, count, log_losses, module_stub, shapes_of

Shapes = Mapping[str, tuple[int, ...]]


def krea_2_sizes(shapes: Shapes) -> dict[str, int]:
    """Return the sizes of Krea 2's transformer by the names of musubi-tuner's SingleMMDiTConfig."""
    hidden, reads = shapes["first.weight"]
    head = shapes["blocks.0.attn.qknorm.qnorm.scale"][0]
    fusion = "txtfusion.layerwise_blocks.0.attn."
    text, text_head = shapes[f"{fusion}wq.weight"][1], shapes[f"{fusion}qknorm.qnorm.scale"][0]
    return {
        "features": hidden,
        "tdim": shapes["tmlp.0.weight"][1],
        "txtdim": text,
        "heads": hidden // head,
        "kvheads": shapes["blocks.0.attn.wk.weight"][0] // head,
        "layers": count(shapes, r"blocks\.(\d+)\."),
        "channels": reads // 4,
        "txtheads": text // text_head,
        "txtkvheads": shapes[f"{fusion}wk.weight"][0] // text_head,
        "txtlayers": shapes["txtfusion.projector.weight"][1],
    }


def without_added_sigma(trainer: Any) -> None:
    """Pass the noise's own timestep to the transformer; musubi-tuner adds 1 of 1000 to it."""
    noised = trainer.get_noisy_model_input_and_timesteps

    def exact(*positional: Any, **named: Any) -> tuple[Any, Any]:
        latents, timesteps = noised(*positional, **named)
        return latents, timesteps - 1

    trainer.get_noisy_model_input_and_timesteps = exact


def stub_missing() -> None:
    """Install stubs for PyAV and torchvision if they are missing: only videos and sample grids need them."""
    for name, parts in (("av", ()), ("torchvision", ("transforms", "utils"))):
        if importlib.util.find_spec(name) is None:
            inner = {part: module_stub(f"{name}.{part}") for part in parts}
            sys.modules[name] = module_stub(name, **inner)
            sys.modules.update({f"{name}.{part}": module for part, module in inner.items()})


def main(arguments: list[str]) -> None:
    """Run the script's training."""
    folder, script, losses, *options = arguments
    sys.path.insert(0, str(Path(folder) / "src"))
    stub_missing()
    config = tomllib.loads(Path(options[options.index("--config_file") + 1]).read_text(encoding="utf-8"))
    module = importlib.import_module(f"musubi_tuner.{script}")
    utils = importlib.import_module("musubi_tuner.krea2.krea2_utils")
    for name, value in krea_2_sizes(shapes_of(Path(config["dit"]))).items():
        setattr(utils.single_mmdit_large_wide, name, value)
    log_losses(importlib.import_module("musubi_tuner.utils.train_utils").LossRecorder, Path(losses))
    trainer = module.Krea2NetworkTrainer()
    if PAIRED in os.environ:
        paired_draws.install()
    if ALIKE in os.environ:
        without_added_sigma(trainer)
    sys.argv = [script, *options]
    parser = module.krea2_setup_parser(module.setup_parser_common())
    args = module.read_config_from_file(parser.parse_args(), parser)
    args.dit_dtype = args.vae_dtype = "float32"
    trainer.train(args)


if __name__ == "__main__":
    main(sys.argv[1:])
