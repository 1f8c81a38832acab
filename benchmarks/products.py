"""The matrix products of full-size models in bf16, fp8 and int8, forward and backward, with rounding: milliseconds.

    python benchmarks/products.py              # FLUX.1 with batch 1 and SDXL with batch 4, at 1024 x 1024
    python benchmarks/products.py --tiles      # also the int8 kernel with other tiles, and cuBLAS's int8 product
    python benchmarks/products.py --tiny       # tiny models, on a CPU too: shows that it runs

A row is a size of matrix: tokens, inputs, outputs, and how many a model has of it. This is what `auto_compute` times.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CASES = (("flux", 1), ("sdxl", 4))


def sizes_of(name: str, batch: int, size: str) -> Any:
    """The sizes of a family's matrices, of a model without memory."""
    from library import families
    from library.bench.subjects import FACTOR, FamilySubject
    from library.train.compiling import matmul_formats

    subject = FamilySubject(f"{name}_train_network", {"mixed_precision": "bf16", "train_batch_size": batch}, size)
    config, random = subject.config({}), families.random_module(name)
    family, denoiser = (
        families.family_for(config),
        random.random(random.FULL if size == "full" else random.TINY).denoiser(),
    )
    random.adopt(family, denoiser)
    side = (1024 if size == "full" else 128) // FACTOR
    return matmul_formats.matrix_sizes(config, family, denoiser.requires_grad_(False), (batch, side, side))


def int8_kernels(size: Any, device: Any) -> Iterator[tuple[str, Any]]:
    """Other ways to compute an int8 product, by name: forward, and backward where that is possible."""
    import torch

    from library.compiler import torch_private
    from library.memory.quantization import int8_triton

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, device=device, dtype=torch.int8)

    x, g, weight = whole(size.tokens, size.inputs), whole(size.tokens, size.outputs), whole(size.outputs, size.inputs)
    rows, columns = torch.ones(size.tokens, 1, device=device), torch.ones(size.outputs, device=device)
    yield "cuBLAS fwd", lambda: torch_private.int_mm(x, weight.t())
    yield "cuBLAS bwd", lambda: torch_private.int_mm(g, weight)
    for tiles in (
        int8_triton.LARGE,
        int8_triton.USUAL,
        int8_triton.SMALL,
        int8_triton.Tiles(128, 128, 128, 8, 3),
        int8_triton.Tiles(128, 256, 64, 8, 4),
        int8_triton.Tiles(128, 128, 128, 4, 4),
    ):
        shown = f"{tiles.rows}x{tiles.columns}x{tiles.depth} {tiles.warps}w {tiles.stages}s"
        for way, left, right, scales in (("fwd", x, weight, columns), ("bwd", g, weight.t().contiguous(), None)):
            given = (left, right, rows, scales, torch.bfloat16, tiles)
            yield f"{shown} {way}", lambda given=given: int8_triton.multiply(*given)


def table(name: str, batch: int, asked: argparse.Namespace) -> None:
    """All sizes of a model."""
    import torch

    from library.bench import machine
    from library.measuring import timing
    from library.memory.quantization import fp8_matmul, int8_matmul
    from library.train.compiling import matmul_formats

    device = machine.device("auto")
    works = {"fp8": fp8_matmul.supports_fp8(device), "int8": int8_matmul.supports_int8(device) or asked.tiny}
    formats = [matmul_formats.WIDE, *(one for one, yes in works.items() if yes)]
    totals = dict.fromkeys(formats, 0.0)
    print(f"{name}, batch {batch}: ms forward + backward, {machine.facts(device).get('gpu', device)}", flush=True)
    sizes = sizes_of(name, batch, "tiny" if asked.tiny else "full")
    for size, number in sorted(sizes.items(), key=lambda one: -one[0].work * one[1]):
        row = f"{size.tokens:6} {size.inputs:6} {size.outputs:6} x{number:3}"
        for one in formats:
            calls = matmul_formats.calls(size, one, device, torch.bfloat16)
            forward, backward = (timing.measure(call, device, matmul_formats.PLAN).p50 for call in calls)
            totals[one] += number * (forward + backward)
            row += f"  {one} {forward:.3f} + {backward:.3f}"
        print(row, flush=True)
        for way, call in int8_kernels(size, device) if asked.tiles and size.work * number > 2e11 else ():
            try:
                print(f"    {way}: {timing.measure(call, device, matmul_formats.PLAN).p50:.3f}", flush=True)
            except Exception as error:  # too much shared memory, no such kernel
                print(f"    {way}: {timing.failure(error)[:100]}", flush=True)
    print("  all: " + ", ".join(f"{one} {total:.1f}" for one, total in totals.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="other tiles of the int8 kernel too")
    parser.add_argument("--tiny", action="store_true", help="tiny models: to try the script, not to measure")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    for name, batch in CASES:
        table(name, batch, asked)


if __name__ == "__main__":
    main()
