"""The int8 product of `int8_matmul` as a Triton kernel.

cuBLASLt requires the right matrix column by column, which in the backward pass would cost a transposed copy of every
weight, and writes int32, which another kernel would have to scale.
"""

# Triton recognises compile-time arguments by an annotation that is no type.

from dataclasses import dataclass
from typing import Any

import torch
import triton  # only PyTorch's GPU builds include it
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """The work of one program of the kernel: rows x columns, summed `depth` at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int  # prefetched tiles: rows and columns x depth x stages bytes of shared memory


LARGE = Tiles(128, 256, 128, 8, 3)  # 144 KiB of shared memory: data center GPUs from A100 on
USUAL_TILES = Tiles(128, 128, 64, 8, 4)  # 64 KiB: RTX 30 to 50 have 99
FEW_ROWS_TILES = Tiles(64, 128, 64, 4, 4)  # few rows, such as a text's
OLD = Tiles(128, 128, 64, 8, 2)  # RTX 20


@triton.jit
def _product(  # noqa: PLR0913 - a kernel takes no objects
    left,
    weight,
    rows,
    columns,
    out,
    m,
    n,
    k,
    SCALED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    # Process eight rows of tiles before the next column, so that concurrent programs share rows and columns in cache.
    i, j = tl.swizzle2d(tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1), 8)
    row, column, depth = i * M + tl.arange(0, M), j * N + tl.arange(0, N), tl.arange(0, K)
    left += row.to(tl.int64)[:, None] * k + depth[None, :]
    weight += column.to(tl.int64)[None, :] * k + depth[:, None]
    sums = tl.zeros((M, N), dtype=tl.int32)
    for start in range(0, k, K):
        within = depth < k - start
        a = tl.load(left, mask=(row < m)[:, None] & within[None, :], other=0)
        b = tl.load(weight, mask=within[:, None] & (column < n)[None, :], other=0)
        sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        left += K
        weight += K
    scaled = sums.to(tl.float32) * tl.load(rows + row, mask=row < m, other=0.0)[:, None]
    if SCALED:
        scaled *= tl.load(columns + column, mask=column < n, other=0.0)[None, :]
    place = out + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(place, scaled.to(out.dtype.element_ty), mask=(row < m)[:, None] & (column < n)[None, :])


def multiply(
    left: Tensor, weight: Tensor, rows: Tensor, columns: Tensor | None, dtype: torch.dtype, tiles: Tiles | None = None
) -> Tensor:
    """Compute `int8_matmul.int8_product` on a GPU. Integer sums do not depend on the tiles."""
    left, weight = left.contiguous(), weight.contiguous()
    (m, k), n = left.shape, weight.shape[0]
    out = torch.empty((m, n), device=left.device, dtype=dtype)
    tiles = tiles or tiles_for(m, torch.cuda.get_device_capability(left.device))
    grid = (triton.cdiv(m, tiles.rows), triton.cdiv(n, tiles.columns))
    kernel: Any = _product
    with torch.cuda.device(left.device):
        kernel[grid](
            left,
            weight,
            rows,
            rows if columns is None else columns,  # any tensor: not read unless SCALED
            out,
            m,
            n,
            k,
            SCALED=columns is not None,
            M=tiles.rows,
            N=tiles.columns,
            K=tiles.depth,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
    return out


def tiles_for(m: int, capability: tuple[int, int]) -> Tiles:
    """Return tiles that fit into a GPU's shared memory, for a product with m rows."""
    if capability < (8, 0):
        return OLD
    if m <= FEW_ROWS_TILES.rows * 2:
        return FEW_ROWS_TILES
    return LARGE if capability in ((8, 0), (9, 0), (10, 0), (10, 3)) else USUAL_TILES
