"""The two matrices of a plain LoRA module; joining and splitting fused layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from library.adapter_files import storage
from library.config.problems import ConfigError

MLP = 4  # width of fused layers' MLP relative to the stream


@dataclass(frozen=True)
class AdapterFactors:
    """One module's weight change: alpha / rank * up @ down. Tensors are as in the file."""

    down: Tensor  # [rank, in] or [rank, in, k, k]
    up: Tensor  # [out, rank] or [out, rank, 1, 1]
    alpha: Tensor | None = None  # None: alpha = rank

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def strength(self) -> float:
        return 1.0 if self.alpha is None else float(self.alpha) / self.rank

    @property
    def is_large_conv(self) -> bool:
        return self.down.ndim == 4 and self.down.shape[2:] != (1, 1)  # 1x1 kernels count as linear layers

    def factors(self) -> tuple[Tensor, Tensor]:
        # Up [out, rank] contains the strength; down is [rank, in * k * k].
        return self.up.float().flatten(1) * self.strength, self.down.float().flatten(1)

    def product(self) -> Tensor:
        """Return the change of the weight, float32 [out, in * k * k]."""
        up, down = self.factors()
        return up @ down

    def like(self, up: Tensor, down: Tensor, alpha: float | None = None) -> "AdapterFactors":
        """Return an adapter of the same layer type from matrices [out, r] and [r, in * k * k]."""
        rank = down.shape[0]
        up = up.reshape(up.shape[0], rank, *(1 for _ in self.up.shape[2:]))
        value = torch.tensor(float(rank) if alpha is None else alpha)
        return AdapterFactors(down.reshape(rank, *self.down.shape[1:]).contiguous(), up.contiguous(), value)

    def to(self, dtype: torch.dtype | None) -> "AdapterFactors":
        """Return it in another dtype, including alpha if that can hold it; None changes nothing."""
        if dtype is None:
            return self
        down, up = (storage.cast_checked("the LoRA", t, dtype) for t in (self.down, self.up))
        return AdapterFactors(down, up, None if self.alpha is None else storage.exact(self.alpha, dtype))


def swap_halves(adapter: AdapterFactors) -> AdapterFactors:
    return AdapterFactors(adapter.down, torch.cat(adapter.up.chunk(2)[::-1]), adapter.alpha)


def fuse_factors(parts: list[AdapterFactors | None]) -> AdapterFactors:
    """Join adapters of query, key, value (and MLP) into one of the fused layer, with the same product.

    A `down` shared by all is kept; otherwise `down` is stacked and `up` block-diagonal, and the rank is the sum.
    """
    present = [part for part in parts if part is not None]
    first, width = present[0], present[0].down.shape[1]
    # A missing part: query, key and value are as wide as the stream.
    rows = [width * (MLP if i == 3 else 1) if p is None else p.up.shape[0] for i, p in enumerate(parts)]
    same = all(torch.equal(p.down, first.down) and p.strength == first.strength for p in present)
    if same and len(present) == len(parts):
        return AdapterFactors(first.down, torch.cat([p.up for p in present]), first.alpha)
    # The fused layer has one strength, so differing ones are folded into the matrices.
    differ = len({p.strength for p in present}) > 1
    ups = [p.factors()[0] if differ else p.up for p in present]
    up = torch.zeros(
        sum(rows), sum(p.rank for p in present), dtype=max((u.dtype for u in ups), key=lambda dtype: dtype.itemsize)
    )
    column, row, remaining_ups = 0, 0, iter(ups)
    for part, size in zip(parts, rows, strict=True):
        if part is not None:
            up[row : row + size, column : column + part.rank] = next(remaining_ups)
            column += part.rank
        row += size
    alpha = None if differ or first.alpha is None else torch.tensor(first.strength * up.shape[1])
    return AdapterFactors(torch.cat([p.down for p in present]), up, alpha)


def taken_apart(adapter: AdapterFactors, count: int) -> list[AdapterFactors | None]:
    """Split a fused layer's adapter into slices, with the strength of the whole; None for a missing slice.

    A block-diagonal `up` gives each slice its own ranks; otherwise all share `down`.
    """
    if count == 1:
        return [adapter]
    width = adapter.down.shape[1]
    sizes = [width, width, width, adapter.up.shape[0] - 3 * width][:count]
    if sum(sizes) != adapter.up.shape[0] or min(sizes) <= 0:
        raise ConfigError(
            "a fused layer of {rows} rows and {width} columns is none that is known",
            rows=adapter.up.shape[0],
            width=width,
        )
    blocks = adapter.up.split(sizes)
    ranks = _ranks([block.ne(0).any(0) for block in blocks])
    if ranks is None:
        return [AdapterFactors(adapter.down, block, adapter.alpha) for block in blocks]
    out, at = list[AdapterFactors | None](), 0
    for block, rank in zip(blocks, ranks, strict=True):
        up, down = block[:, at : at + rank].contiguous(), adapter.down[at : at + rank]
        alpha = None if adapter.alpha is None else torch.tensor(adapter.strength * rank)
        out.append(AdapterFactors(down, up, alpha) if rank else None)
        at += rank
    return out


def _ranks(used: list[Tensor]) -> list[int] | None:
    """Return the number of columns used only by each row block; None if blocks share columns."""
    table = torch.stack(used)  # [blocks, rank]
    count, rank = table.shape
    # Equal ranks first: a column of zeros, which no block uses, fits them as well.
    if rank % count == 0:
        equal = torch.block_diag(*(torch.ones(1, rank // count) for _ in range(count))).bool()
        if not (table & ~equal).any():
            return [rank // count] * count
    owners = table.int().argmax(0)
    if bool((table.sum(0) != 1).any()) or bool((owners.diff() < 0).any()):
        return None
    return [int((owners == i).sum()) for i in range(count)]
