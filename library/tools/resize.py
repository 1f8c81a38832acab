"""A LoRA with smaller ranks: each module's product cut to its largest singular values."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.config.problems import ConfigError, Report, Text
from library.tools import adapters, storage, writing
from library.tools.adapters import AdapterFactors, Lora
from library.tools.storage import silent

LEAST = 1e-6  # a module whose largest singular value is below this is nothing, and gets rank 1


def _ratio(s: Tensor, wanted: float) -> int:
    return int((s > s[0] / wanted).sum())


def _cumulative(s: Tensor, wanted: float) -> int:
    return int(torch.searchsorted(s.cumsum(0) / s.sum(), wanted)) + 1


def _frobenius(s: Tensor, wanted: float) -> int:
    return int(torch.searchsorted(s.square().cumsum(0) / s.square().sum(), wanted**2)) + 1


# Method -> how many of the singular values (falling) to keep. The names and meanings are kohya's.
METHODS: dict[str, Callable[[Tensor, float], int]] = {
    "fixed": lambda s, _: len(s),
    "sv_ratio": _ratio,  # those larger than the largest / parameter
    "sv_cumulative": _cumulative,  # until their sum is this share of all
    "sv_fro": _frobenius,  # until the Frobenius norm is this share of all
}


@dataclass(frozen=True)
class ResizeOptions:
    """How much is kept. Dynamic methods choose each module's rank, up to `rank`, by their parameter."""

    rank: int
    conv_rank: int | None = None  # of convolutions; the same as `rank` when not given
    method: str = "fixed"
    parameter: float | None = None  # "sv_ratio": above 1; "sv_cumulative", "sv_fro": a share between 0 and 1

    def __post_init__(self) -> None:
        method, parameter = self.method, self.parameter
        if method not in METHODS:
            raise ConfigError(
                "method is {method}: use one of {methods}", method=repr(method), methods=", ".join(METHODS)
            )
        for name, value in (("rank", self.rank), ("conv_rank", self.conv_rank)):
            if value is not None and value < 1:
                raise ConfigError("{name} is {value}: it must be at least 1", name=name, value=value)
        if method == "fixed":
            return
        if parameter is None:
            raise ConfigError("{method} needs its parameter: {example}, for example", method=method,
                example='10' if method == 'sv_ratio' else '0.9')  # fmt: skip
        if method == "sv_ratio" and not parameter > 1:
            raise ConfigError("parameter is {parameter}: sv_ratio keeps what is up to so many times smaller, above 1",
                parameter=f"{parameter:g}")  # fmt: skip
        if method != "sv_ratio" and not 0 < parameter <= 1:
            raise ConfigError("parameter is {parameter}: {method} takes the share to keep, above 0 and at most 1",
                parameter=f"{parameter:g}", method=method)  # fmt: skip

    def limit(self, adapter: AdapterFactors) -> int:
        """The rank that a module may have."""
        return (self.conv_rank or self.rank) if adapter.is_large_conv else self.rank


@dataclass
class Resized:
    """What came of it."""

    path: Path
    ranks: dict[str, tuple[int, int]]  # module -> rank before and after
    kept: float  # the smallest share of a module's Frobenius norm that was kept


def resize(
    lora: str | Path, out: str | Path, *, choices: ResizeOptions, dtype: str | None = None, report: Report = silent
) -> Resized:
    """Write a LoRA with smaller ranks.

    Strength (alpha / rank) and names stay; metadata stays too, and says what was done. Raises ConfigError for a file
    that is no plain LoRA.
    """
    out, kind = storage.fresh(out, lora), storage.dtype_of(dtype)
    whole, made, ranks, kept = adapters.read(lora), {}, {}, 1.0
    for i, (module, adapter) in enumerate(whole.adapters.items()):
        report(Text("resizing"), i, len(whole.adapters))
        smaller, share = cut(module.kohya, adapter, choices)
        made[module] = smaller.to(kind or adapter.up.dtype)
        ranks[module.kohya] = (adapter.rank, smaller.rank)
        kept = min(kept, share)
    result = writing.sized(Lora(whole.family, made, whole.metadata, whole.style))
    if choices.method != "fixed":
        result.metadata |= {"ss_network_dim": "Dynamic", "ss_network_alpha": "Dynamic"}
    comment = whole.metadata.get("ss_training_comment", "")
    result.metadata["ss_training_comment"] = f"{_said(choices, max(old for old, _ in ranks.values()))}; {comment}"
    writing.save(result, out, report=report)
    return Resized(out, ranks, kept)


def cut(module: str, adapter: AdapterFactors, choices: ResizeOptions) -> tuple[AdapterFactors, float]:
    """One module with fewer ranks, and the share of its norm that is kept. No rank is ever more than the old one."""
    u, s, v = writing.cut(module, adapter.up.float().flatten(1), adapter.down.float().flatten(1))
    if float(s[0]) <= LEAST:
        rank, share = 1, 1.0
    else:
        rank = max(1, min(METHODS[choices.method](s, choices.parameter or 0.0), choices.limit(adapter), len(s)))
        share = float(s[:rank].norm() / s.norm())
    return adapter.like(u[:, :rank] * s[:rank], v[:rank], adapter.strength * rank), share


def _said(choices: ResizeOptions, old: int) -> str:
    if choices.method != "fixed":
        return f"Dynamic resize with {choices.method}: {choices.parameter:g} from {old}"
    conv = f" (conv: {choices.conv_rank})" if choices.conv_rank not in (None, choices.rank) else ""
    return f"dimension is resized from {old} to {choices.rank}{conv}"
