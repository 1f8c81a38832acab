"""Draw the same random numbers in two trainers: the n-th draw of a shape is equal in both, wherever it happens.

    python paired_draws.py SCRIPT OPTION...     # run a script with them

Imports nothing from this project, so that another trainer's process can use it.
"""

import hashlib
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch


def install() -> None:
    """Let torch.randn, torch.randn_like and torch.randint draw on the host, seeded by the number of such calls."""
    calls: Counter[str] = Counter()

    def source(kind: str, shape: tuple[int, ...]) -> torch.Generator:
        key = f"{kind} {tuple(side for side in shape if side != 1)}"  # only one has a dimension for frames
        calls[key] += 1
        digest = hashlib.sha256(f"{key} {calls[key]}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:6], "little"))

    randn, randint = torch.randn, torch.randint

    def normal(*size: Any, device: Any = None, dtype: Any = None, **_: Any) -> torch.Tensor:
        shape = shape_of(size)
        return randn(shape, generator=source("normal", shape)).to(device=device, dtype=dtype)

    def normal_like(other: torch.Tensor, *, device: Any = None, dtype: Any = None, **_: Any) -> torch.Tensor:
        return normal(tuple(other.shape), device=device or other.device, dtype=dtype or other.dtype)

    def integers(low: int, high: int, size: Any, *, device: Any = None, **_: Any) -> torch.Tensor:
        shape = tuple(size)
        return randint(low, high, shape, generator=source("integers", shape)).to(device)

    torch.randn, torch.randn_like, torch.randint = normal, normal_like, integers  # type: ignore[assignment]


def shape_of(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else tuple(size)


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
