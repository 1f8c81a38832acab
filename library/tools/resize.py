"""Reduce the ranks of an adapter: each module's product keeps its largest singular values."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from library.adapter_files import adapters, storage, writing
from library.adapter_files.adapters import Lora
from library.adapter_files.changes import MAGNITUDE, LayerChange, rank_of
from library.adapter_files.factors import AdapterFactors
from library.adapter_files.joining import Part, adapter_of, nearest_lora, refuse_small_ranks, weight_shape, with_bias
from library.adapter_files.names import ALPHA, DOWN, UP, Module
from library.adapter_files.storage import silent
from library.config.problems import ConfigError, Message, Problem, Report, attempted, option_name, require_choice

MIN_SINGULAR_VALUE = 1e-6  # a module with a smaller largest singular value counts as zero and gets rank 1


def _ratio(s: Tensor, parameter: float) -> int:
    return int((s > s[0] / parameter).sum())


def _cumulative(s: Tensor, share: float) -> int:
    # One more than the index of the value that reaches the share.
    return int(torch.searchsorted(s.cumsum(0) / s.sum(), share)) + 1


def _frobenius(s: Tensor, share: float) -> int:
    return int(torch.searchsorted(s.square().cumsum(0) / s.square().sum(), share**2)) + 1


SPARE = 1  # additional rank kept by sd-scripts' tool beyond its dynamic methods' choice
# Method -> how many of the descending singular values it keeps, with kohya's names and meanings.
METHODS: dict[str, Callable[[Tensor, float], int]] = {
    "fixed": lambda s, _: len(s),
    "sv_ratio": _ratio,  # values above the largest / parameter
    "sv_cumulative": _cumulative,  # until their sum is this share of all
    "sv_fro": _frobenius,  # until the Frobenius norm is this share of all
}


@dataclass(frozen=True)
class ResizeOptions:
    """How much to keep. Dynamic methods choose each module's rank, up to `rank`, by their parameter."""

    rank: int
    conv_rank: int | None = None  # of convolutions; the same as `rank` when not given
    method: str = "fixed"
    parameter: float | None = None  # "sv_ratio": above 1; "sv_cumulative", "sv_fro": a share between 0 and 1

    def __post_init__(self) -> None:
        method, parameter = self.method, self.parameter
        require_choice(option_name("method"), method, METHODS)
        refuse_small_ranks(rank=self.rank, conv_rank=self.conv_rank)
        if method == "fixed":
            return
        if parameter is None:
            raise ConfigError(
                "{name} is missing: {method} needs it; {example}, for example",
                name=option_name("parameter"),
                method=method,
                example="10" if method == "sv_ratio" else "0.9",
            )
        if method == "sv_ratio" and not parameter > 1:
            raise ConfigError(
                "{name} is {parameter}: sv_ratio keeps what is up to so many times smaller, above 1",
                name=option_name("parameter"),
                parameter=f"{parameter:g}",
            )
        if method != "sv_ratio" and not 0 < parameter <= 1:
            raise ConfigError(
                "{name} is {parameter}: {method} takes the share to keep, above 0 and at most 1",
                name=option_name("parameter"),
                parameter=f"{parameter:g}",
                method=method,
            )

    def limit(self, adapter: AdapterFactors) -> int:
        return (self.conv_rank or self.rank) if adapter.is_large_conv else self.rank

    def rank_for(self, s: Tensor, adapter: AdapterFactors) -> int:
        """Return the rank of a module with these descending singular values."""
        if float(s[0]) <= MIN_SINGULAR_VALUE:
            return 1
        rank = METHODS[self.method](s, self.parameter or 0.0) + (SPARE if self.method != "fixed" else 0)
        return max(1, min(rank, self.limit(adapter), len(s)))


@dataclass
class Resized:
    """The result."""

    path: Path
    ranks: dict[str, tuple[int, int]]  # module -> rank before and after
    kept_share: float  # smallest kept share of a module's Frobenius norm


def resize_lora(
    lora: str | Path, out: str | Path, *, choices: ResizeOptions, dtype: str | None = None, report: Report = silent
) -> Resized:
    """Write a LoRA with smaller ranks.

    Strength (alpha / rank), names and metadata stay, with a note on the change. LoHa, LoKr, a Tucker core and full
    differences become the LoRA closest to their product; a DoRA keeps its magnitudes; norms and biases stay. Raises
    ConfigError for kinds that depend on the model, as they have no singular values of their own.
    """
    problems: list[Problem] = []
    place = attempted(problems, lambda: storage.fresh(out, lora))
    kind = attempted(problems, lambda: storage.storage_dtype(dtype))
    source = attempted(problems, lambda: adapters.read_lora(lora))
    if place is None or source is None or problems:
        raise ConfigError(*problems)
    plain, changes, ranks, kept_share = {}, {}, {}, 1.0
    parts: list[tuple[Module, Part]] = [*source.adapters.items(), *source.other_changes.items()]
    for i, (module, part) in enumerate(parts):
        report(Message("resizing"), i, len(parts))
        if isinstance(part, AdapterFactors):
            smaller, share = reduce_rank(module.kohya, part, choices)
            plain[module] = smaller.to(kind or part.up.dtype)
            ranks[module.kohya] = (part.rank, smaller.rank)
        elif not part.has_weight or part.kind.title == "norm":
            changes[module], share = part.to(kind), 1.0
        else:
            new, share, before = _cut_other(module, source.family, part, choices, lora)
            new = new.to(kind or source.dtype)
            ranks[module.kohya] = (before, new.rank if isinstance(new, AdapterFactors) else rank_of(new.parts) or 0)
            if isinstance(new, AdapterFactors):
                plain[module] = new
            else:
                changes[module] = new
        kept_share = min(kept_share, share)
    if not ranks:
        raise ConfigError("{path} holds norms and biases alone, which have no rank", path=lora)
    result = writing.sized(Lora(source.family, plain, source.metadata, source.style, changes))
    if source.other_changes and "ss_network_args" in result.metadata:
        result.metadata["ss_network_args"] = json.dumps({"algo": "lora"})
    comment = source.metadata.get("ss_training_comment", "")
    if any(after < before for before, after in ranks.values()):
        comment = f"{_resize_comment(choices, max(old for old, _ in ranks.values()))}; {comment}"
    result.metadata["ss_training_comment"] = comment
    writing.save_lora(result, place, report=report)
    return Resized(place, ranks, kept_share)


def _cut_other(
    module: Module, family: str, change: LayerChange, choices: ResizeOptions, path: str | Path
) -> tuple[Part, float, int]:
    """Return a module that is no plain LoRA with fewer ranks, the kept share of its norm, and its previous rank."""
    shape, magnitudes = weight_shape(module, family, change), change.parts.get(MAGNITUDE)
    if shape is None or (magnitudes is not None and change.kind.title != "LoRA"):
        raise ConfigError(
            "{path} is {kind}, whose change depends on the model, so it has no rank to cut: merge it "
            "into its model, then extract a LoRA of the rank",
            path=path,
            kind=change.title,
        )
    plain = LayerChange({name: part for name, part in change.parts.items() if name != MAGNITUDE}).ready()
    old_rank = rank_of(change.parts) or min(shape[0], torch.Size(shape[1:]).numel())
    if (exact := plain.exact_factors()) is not None:
        smaller, share = reduce_rank(module.kohya, adapter_of(*exact, shape), choices)
    else:
        delta = plain.delta(torch.zeros(*shape))
        smaller, share = _cut_whole(delta, choices)
    if magnitudes is not None:
        smaller_parts = {DOWN: smaller.down, UP: smaller.up, MAGNITUDE: magnitudes}
        return LayerChange({**smaller_parts, ALPHA: torch.tensor(float(smaller.rank))}), share, old_rank
    return with_bias(smaller, change.bias()), share, old_rank


def _cut_whole(change: Tensor, choices: ResizeOptions) -> tuple[AdapterFactors, float]:
    """Return a full weight change as a LoRA."""
    # A fixed rank avoids computing all singular values, which takes long.
    blank = adapter_of(torch.zeros(change.shape[0], 1), torch.zeros(1, change.flatten(1).shape[1]), change.shape)
    if choices.method == "fixed":
        factors = nearest_lora(change, choices.limit(blank))
    else:
        u, s, v = torch.linalg.svd(change.flatten(1), full_matrices=False)
        rank = choices.rank_for(s, blank)
        factors = adapter_of(u[:, :rank] * s[:rank], v[:rank], change.shape)
    norm = float(change.norm())
    lost = float((change.flatten(1) - factors.product()).norm())
    return factors, (max(0.0, 1 - (lost / norm) ** 2) ** 0.5 if norm else 1.0)


def reduce_rank(name: str, adapter: AdapterFactors, choices: ResizeOptions) -> tuple[AdapterFactors, float]:
    """Return one module with fewer ranks, and the kept share of its norm. Never increases a rank."""
    u, s, v = writing.decompose(name, adapter.up.float().flatten(1), adapter.down.float().flatten(1))
    rank = choices.rank_for(s, adapter)
    share = float(s[:rank].norm() / s.norm()) if float(s[0]) > MIN_SINGULAR_VALUE else 1.0
    return adapter.like(u[:, :rank] * s[:rank], v[:rank], adapter.strength * rank), share


def _resize_comment(choices: ResizeOptions, old: int) -> str:
    if choices.method != "fixed":
        return f"Dynamic resize with {choices.method}: {choices.parameter:g} from {old}"
    conv = f" (conv: {choices.conv_rank})" if choices.conv_rank not in (None, choices.rank) else ""
    return f"dimension is resized from {old} to {choices.rank}{conv}"
