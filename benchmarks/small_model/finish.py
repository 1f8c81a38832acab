"""Convert a pretrained small model into the files to distribute: the denoiser's matrices in fp8, the rest in bf16.

FLUX.1's guidance is folded in: any guidance gives the result of 1, the only value that it was trained with.
"""

import argparse
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.small_model import networks
from library.families.shared.double_stream import MLPEmbedder
from library.families.shared.transformer import TIME_CHANNELS, sinusoids

FINISHED_PREFIXES = {"flux": ("double_blocks.", "single_blocks."), "sdxl": ("model.diffusion_model.",)}
GUIDANCE = "guidance_in."
TRAINED = ("flux1-dev", "sdxl")  # stems of files that pretraining changes


@torch.no_grad()
def fold_guidance(tensors: dict[str, Tensor]) -> None:
    """Make the guidance embedding constant, with its value for 1, in place."""
    own = {name.removeprefix(GUIDANCE): tensor.float() for name, tensor in tensors.items() if name.startswith(GUIDANCE)}
    embedder = MLPEmbedder(TIME_CHANNELS, own["out_layer.bias"].shape[0])
    embedder.load_state_dict(own)
    tensors[f"{GUIDANCE}out_layer.bias"] = embedder(sinusoids(torch.ones(1), TIME_CHANNELS))[0]
    tensors[f"{GUIDANCE}out_layer.weight"] = torch.zeros_like(own["out_layer.weight"])


def compact(tensors: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Cast matrices and kernels of the blocks to float8_e4m3fn, everything else to bfloat16."""
    return {
        name: tensor.to(
            torch.float8_e4m3fn if tensor.ndim > 1 and name.startswith(FINISHED_PREFIXES[family]) else torch.bfloat16
        )
        for name, tensor in tensors.items()
    }


def finish(family: str, trained: Path, model: Path, folder: Path) -> None:
    """Write all files of a small model: the trained one compacted, the others of `model` in bf16, the tokenizers."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(model.glob("*.safetensors")):
        is_trained = path.stem in TRAINED
        tensors = load_file(trained if is_trained else path)
        if is_trained and family == "flux":
            fold_guidance(tensors)
        networks.write_file(folder / path.name, compact(tensors, family))
    for path in model.glob("tokenizer*"):
        shutil.copytree(path, folder / path.name, dirs_exist_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make a pretrained model small enough to distribute.")
    parser.add_argument("family", choices=[*FINISHED_PREFIXES])
    parser.add_argument("trained", type=Path, help="the pretrained .safetensors file")
    parser.add_argument("model", type=Path, help="folder of the untrained files")
    parser.add_argument("to", type=Path, help="output folder")
    args = parser.parse_args()
    finish(args.family, args.trained, args.model, args.to)
    size = sum(path.stat().st_size for path in args.to.rglob("*") if path.is_file())
    print(f"{args.to}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
