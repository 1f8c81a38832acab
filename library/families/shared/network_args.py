"""The keys of `--network_args key=value ...` of every LoRA, and parsers for the formats of their values.

The classes are sections of the config engine, so that unknown names, invalid values and numbers out of range are
reported like those of any other option, all at once and without loading torch.
"""

import ast
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from library.config.problems import ConfigError, Problem
from library.config.reading import LARGEST_RANK
from library.config.regexes import refuse_endless
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.config.values import quoted

if TYPE_CHECKING:
    from torch import nn

SHAPES = ("cosine", "sine", "linear", "reverse_linear", "zeros")
CONVOLUTIONS = ("ResnetBlock2D", "Downsample2D", "Upsample2D")  # classes of convolutions, of models that have some
NO_ADAPTER = (0, 0.0)
PLACE = "in network_args: "  # prefix of problems


def wrong_argument(name: str, template: str, **facts: Any) -> Problem:
    return Problem(name, template, place=PLACE, topic="training", **facts)


@dataclass(frozen=True)
class NetworkLayer:
    """A layer that can have an adapter."""

    part: str  # "denoiser", or a text encoder's short name
    path: str  # in the module tree
    name: str  # of the adapter in files
    layer: "nn.Linear | nn.Conv2d"
    inside: str  # class name of the block it is in; "" for none

    @property
    def is_large_conv(self) -> bool:
        return getattr(self.layer, "kernel_size", (1, 1)) != (1, 1)

    @property
    def features(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of a linear layer."""
        layer: Any = self.layer
        return layer.in_features, layer.out_features


@dataclass(frozen=True, slots=True)
class LayerPreset:
    """A named choice of layers, as arguments; it excludes those of other presets."""

    title: str
    about: str
    arguments: Mapping[str, str]


def usual_layers(without_mlp: str) -> tuple[LayerPreset, LayerPreset]:
    """Return the choices of most families; `without_mlp` is the value of network_reg_dims that leaves out the MLP."""
    return (
        LayerPreset("Attention and MLP", "Attention and MLP of every block learn; the usual choice.", {}),
        LayerPreset("Attention only", "Attention of every block: a smaller file.", {"network_reg_dims": without_mlp}),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkArgs:
    """The arguments of every kind of LoRA, and how they select layers and set ranks."""

    matches_paths: ClassVar[bool] = False  # whether patterns of ranks and rates must fit the whole path of a layer
    ggpo: ClassVar[bool] = False  # whether it has GGPO, and logs the magnitude of the mean gradient
    encoder_rates: ClassVar[tuple[str, ...]] = ()  # text encoders with their own text_encoder_lr, after all others

    convolutions: ClassVar[bool] = False  # whether its model has convolutions that can have adapters
    presets: ClassVar[tuple[LayerPreset, ...]] = ()
    # What chooses blocks, by group of FamilyFacts.blocks: texts like "0-3,5", or factors of learning rates.
    block_arguments: ClassVar[tuple[str, ...]] = ()
    block_language: ClassVar[str] = "indices"

    rank_dropout: float | None = opt(None, "share of ranks left out, drawn for each image", min=0.0, max=0.99)
    module_dropout: float | None = opt(None, "chance that a whole adapter is left out", min=0.0, max=0.99)
    loraplus_lr_ratio: float | None = opt(
        None, "LoRA+: learning rate of lora_up relative to lora_down", label="LoRA+ ratio", min=0.0
    )
    loraplus_unet_lr_ratio: float | None = opt(
        None, "LoRA+ for the denoiser only", label="LoRA+ ratio, image model", min=0.0, advanced=True
    )
    loraplus_text_encoder_lr_ratio: float | None = opt(
        None, "LoRA+ for the text encoders only", label="LoRA+ ratio, text encoders", min=0.0, advanced=True
    )
    conv_dim: int | None = opt(
        None,
        "rank of adapters on 3x3 convolutions; not set: none there",
        label="Convolution rank",
        min=0,
        ceiling=LARGEST_RANK,
    )
    conv_alpha: float | None = opt(None, "alpha of adapters on 3x3 convolutions", label="Convolution alpha", min=0.0)

    def notes(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        if self.conv_alpha is not None and not self.conv_dim:
            yield Problem("network_args", "conv_alpha has no effect without conv_dim")

    def classes(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        return (*targets, *CONVOLUTIONS)

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        return (rank, alpha) if layer.inside else NO_ADAPTER

    def split_sizes(self, layer: NetworkLayer) -> tuple[int, ...]:
        """Return the output sizes of the parts of a fused matrix that get separate adapters; () for one adapter."""
        return ()

    def block_of(self, name: str) -> int:
        return 0

    def fits(self, pattern: str, name: str, path: str) -> bool:
        return bool(re.fullmatch(pattern, path) if self.matches_paths else re.search(pattern, name))

    @property
    def block_weights(self) -> tuple[float, ...]:
        return ()

    @property
    def rate_patterns(self) -> tuple[tuple[str, float], ...]:
        """Patterns of names with the learning rates of the matching layers; the first match applies."""
        return ()

    @property
    def ggpo_strengths(self) -> tuple[float, float] | None:
        return None

    @property
    def logs_adapters(self) -> bool:
        return False

    def adapts_encoder(self, part: str) -> bool:
        return True

    def chosen_blocks(self, counts: Sequence[int]) -> list[list[float]]:
        return [index_factors(getattr(self, name), n) for name, n in zip(self.block_arguments, counts, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class PatternArgs(NetworkArgs):
    """A LoRA whose layers can be chosen by patterns of their paths, as in musubi-tuner."""

    exclude_patterns: str = opt(
        "",
        "list of regexes, ['...', '...']: layers whose whole path fits one get no adapter",
        label="Excluded layers",
        advanced=True,
    )
    include_patterns: str = opt(
        "", "the same for layers that get one although a pattern excludes them", label="Included layers", advanced=True
    )
    network_reg_dims: str = opt(
        "",
        "regex=rank,...: the first pattern found in an adapter's name sets its rank",
        label="Ranks by name",
        advanced=True,
    )
    network_reg_lrs: str = opt(
        "", "regex=learning rate,...: the same for learning rates", label="Learning rates by name", advanced=True
    )

    def unreadable(self, **readers: Callable[[str], object]) -> Iterator[Problem]:
        """Yield problems of values with a special format: the patterns, and those that `readers` parse, by name. A
        reader raises ConfigError.
        """
        readers |= {
            "exclude_patterns": regexes,
            "include_patterns": regexes,
            "network_reg_dims": lambda text: patterns(text, int),
            "network_reg_lrs": lambda text: patterns(text, float),
        }
        for name, read in readers.items():
            try:
                read(getattr(self, name))
            except ConfigError as e:
                yield from (problem.replaced(option=name, place=PLACE, topic="training") for problem in e.problems)

    @property
    def rate_patterns(self) -> tuple[tuple[str, float], ...]:
        return patterns(self.network_reg_lrs, float)

    def is_included(self, path: str) -> bool:
        return any(re.fullmatch(regex, path) for regex in regexes(self.include_patterns))

    def is_excluded(self, path: str) -> bool:
        return any(re.fullmatch(regex, path) for regex in regexes(self.exclude_patterns)) and not self.is_included(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerArgs(PatternArgs):
    """`PatternArgs` of a model whose blocks have no convolutions."""

    block_lists: ClassVar[tuple[str, ...]]  # paths of the denoiser's lists of blocks, in the order of block_arguments
    verbose: bool = opt(False, "log every adapter", advanced=True)

    @property
    def logs_adapters(self) -> bool:
        return self.verbose

    def notes(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """Yield arguments without effect, and why."""
        for name in ("conv_dim", "conv_alpha"):
            if getattr(self, name) is not None:
                yield Problem("network_args", "{name} has no effect: its blocks have no convolutions", name=name)

    def classes(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        return targets

    def check(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        yield from self.unreadable(**dict.fromkeys(self.block_arguments, indices))

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        layer_rank = self.layer_rank(layer, rank)
        return (layer_rank, alpha) if layer_rank else NO_ADAPTER

    def layer_rank(self, layer: NetworkLayer, rank: int) -> int:
        """Return the rank of a layer: by patterns of names, then by `is_chosen`; 0 for no adapter."""
        if not layer.inside or self.is_excluded(layer.path):
            return 0
        named = self.named_rank(layer)
        if named is None:
            return rank if self.is_chosen(layer.path) else 0
        return named

    def named_rank(self, layer: NetworkLayer) -> int | None:
        """Return the rank by the first pattern that matches a layer, None if none does."""
        rank_patterns = patterns(self.network_reg_dims, int)
        return next((rank for pattern, rank in rank_patterns if self.fits(pattern, layer.name, layer.path)), None)

    def is_chosen(self, path: str) -> bool:
        """Return whether a layer of a block has an adapter unless a pattern decides."""
        return self.in_chosen_block(path)

    def in_chosen_block(self, path: str) -> bool:
        """Return whether `block_arguments` name the block of a path; true outside of the lists of blocks."""
        for blocks, argument in zip(self.block_lists, self.block_arguments, strict=True):
            if match := re.match(rf"{blocks}\.(\d+)\.", path):
                chosen = indices(getattr(self, argument))
                return chosen is None or int(match[1]) in chosen
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockArgs(TransformerArgs):
    """`TransformerArgs` of a model with blocks of one kind."""

    block_arguments: ClassVar[tuple[str, ...]] = ("train_block_indices",)
    train_block_indices: str = opt("all", 'blocks that carry adapters: "all", "none" or "0-3,5"')


# ---- parsers


@functools.cache
def regexes(text: str) -> tuple[str, ...]:
    """Parse a list of regexes such as "['.*attn.*', '.*mlp.*']", or one in quotes; () for an empty text.

    Raises ConfigError.
    """
    try:
        literal = ast.literal_eval(text.strip() or "[]")
        literal = [literal] if isinstance(literal, str) else literal
        if not isinstance(literal, list) or not all(isinstance(regex, str) for regex in literal):
            raise ValueError(text)
        checked = tuple(re.compile(regex).pattern for regex in literal)
    except (ValueError, SyntaxError, RecursionError, MemoryError, OverflowError, re.error):
        raise ConfigError("must be a list of regexes like ['.*attn.*'], got {text}", text=quoted(text)) from None
    for regex in checked:
        refuse_endless(regex)
    return checked


def block_factors(text: str, length: int) -> list[float]:
    """Parse factors from "1,0.5,..." or "cosine+.25"; all 1 for an empty text; 0 for nothing between two commas."""
    if not text:
        return [1.0] * length
    name, _, base = text.partition("+")
    try:
        if name in SHAPES and length > 1:
            return [_shape(name, i / (length - 1)) + float(base or 0) for i in range(length)]
        factors = [float(part) if part.strip() else 0.0 for part in text.split(",")]
    except ValueError:
        factors = []
    if len(factors) != length or any(not math.isfinite(f) or f < 0 for f in factors):
        if length == 1:
            raise ConfigError("must be one number, got {text}", text=quoted(text))
        raise ConfigError(
            "needs {length} numbers separated by commas, or one of {shapes}, got {text}",
            length=length,
            shapes=", ".join(SHAPES),
            text=quoted(text),
        )
    return factors


def _shape(name: str, x: float) -> float:
    shapes = {
        "cosine": math.sin(math.pi * (1 - x) / 2),
        "sine": math.sin(math.pi * x / 2),
        "linear": x,
        "reverse_linear": 1 - x,
        "zeros": 0.0,
    }
    return shapes[name]


def indices(text: str) -> frozenset[int] | None:
    """Parse {0, 1, 2, 3, 5} from "0-3,5"; None, which means no limit, from "all"; the empty set from "none" or "", as
    in sd-scripts.
    """
    text = text.strip()
    if text == "all":
        return None
    if text in ("none", ""):
        return frozenset()
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})\s*(?:-\s*(\d{1,3})\s*)?", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError('must be "all", "none" or like "0-3,5", got {text}', text=quoted(text))
        numbers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(numbers)


def index_factors(text: str, count: int) -> list[float]:
    """Return 1 for each of `count` blocks that a text like "0-3,5" names, 0 for the others."""
    chosen = indices(text)
    return [float(chosen is None or number in chosen) for number in range(count)]


def ranks(text: str) -> tuple[int, ...]:
    """Parse five ranks from "[4,0,0,0,4]"; () for an empty text."""
    if not text.strip():
        return ()
    parts = text.strip().strip("[]").split(",")
    if len(parts) != 5 or not all(part.strip().isdigit() for part in parts):
        raise ConfigError("needs five whole numbers like [4,0,0,0,4], got {text}", text=quoted(text))
    return tuple(int(part) for part in parts)


def patterns(text: str, kind: type) -> tuple[tuple[str, Any], ...]:
    """Parse pairs from "regex=value,regex=value"; a comma inside a pattern is part of it."""
    pattern_values: list[tuple[str, Any]] = []
    # A pair ends at "=number" before a comma or the end, so that patterns may hold commas and equal signs.
    remaining, pair = text.strip(), re.compile(r"(.+?)=\s*([0-9.eE+-]+)\s*(?:,|$)")
    while remaining:
        match = pair.match(remaining)
        try:
            if not match:
                raise ValueError(remaining)
            pattern_values.append((re.compile(match[1].strip()).pattern, kind(match[2])))
        except (ValueError, OverflowError, RecursionError, re.error):
            raise ConfigError(
                "must be written regex={value},..., got {text}",
                value="rank" if kind is int else "rate",
                text=quoted(text),
            ) from None
        remaining = remaining[match.end() :].lstrip()
    for pattern, _ in pattern_values:
        refuse_endless(pattern)
    return tuple(pattern_values)
