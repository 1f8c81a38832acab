"""What `--network_args key=value ...` may say, for each `--network_module`.

The tables below are sections of the config engine, so a wrong name, a wrong value and a number out of range are found
and worded like those of any other option, all at once and without loading torch.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from library.config.schema import ConfigError, Layer, opt, read_section, section_options

# Blocks of the SDXL U-Net as the file format counts them: 0 time and label embedding, 1-9 input, 10-12 middle,
# 13-21 output, 22 out.
DOWN, MID, UP = 9, 3, 9
NUM_BLOCKS = 1 + DOWN + MID + UP + 1
PRESETS = ("full", "full-lin", "attn-mlp", "attn-only", "unet-only", "unet-transformer-only", "unet-convblock-only",
           "ia3")  # fmt: skip
STRONG = 100  # alpha / rank that nobody means
LARGEST = 2**16  # rank; no layer of these models has so many rows and columns
SHAPES = ("cosine", "sine", "linear", "reverse_linear", "zeros")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What every kind of LoRA can be told."""

    rank_dropout: float | None = opt(None, "share of ranks left out, drawn for each image", min=0.0, max=0.99)
    module_dropout: float | None = opt(None, "chance that a whole adapter is left out", min=0.0, max=0.99)
    loraplus_lr_ratio: float | None = opt(None, "LoRA+: learning rate of lora_up relative to lora_down", min=0.0)
    loraplus_unet_lr_ratio: float | None = opt(None, "LoRA+ for the denoiser only", min=0.0)
    loraplus_text_encoder_lr_ratio: float | None = opt(None, "LoRA+ for the text encoders only", min=0.0)
    conv_dim: int | None = opt(
        None, "rank of adapters on 3x3 convolutions; not set: none there", min=0, ceiling=LARGEST
    )
    conv_alpha: float | None = opt(None, "alpha of adapters on 3x3 convolutions", min=0.0)

    def notes(self, _run: Any = None) -> Iterator[str]:
        """What has no effect, and why."""
        if self.conv_alpha is not None and not self.conv_dim:
            yield "network_args conv_alpha has no effect without conv_dim"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraArgs(Shared):
    """`networks.lora`: SDXL."""

    block_dims: tuple[int, ...] = opt(
        (), f"rank of each of the {NUM_BLOCKS} blocks; 0 leaves a block out", min=0, ceiling=LARGEST
    )
    block_alphas: tuple[float, ...] = opt((), f"alpha of each of the {NUM_BLOCKS} blocks", min=0.0)
    conv_block_dims: tuple[int, ...] = opt((), "rank of each block's 3x3 convolutions", min=0, ceiling=LARGEST)
    conv_block_alphas: tuple[float, ...] = opt((), "alpha of each block's 3x3 convolutions", min=0.0)
    down_lr_weight: str = opt("", f"factors of the learning rate of the {DOWN} input blocks, or {', '.join(SHAPES)}")
    mid_lr_weight: str = opt("", f"factors of the learning rate of the {MID} middle blocks")
    up_lr_weight: str = opt("", f"factors of the learning rate of the {UP} output blocks, or a shape's name")
    block_lr_zero_threshold: float = opt(0.0, "factors up to this count as 0", min=0.0)

    def check(self, _run: Any = None) -> Iterator[str]:
        """The lists that must have one value per block."""
        for name in ("block_dims", "block_alphas", "conv_block_dims", "conv_block_alphas"):
            if (given := len(getattr(self, name))) not in (0, NUM_BLOCKS):
                yield f"in network_args: {name} needs {NUM_BLOCKS} values separated by commas, got {given}"
        for name, length in (("down_lr_weight", DOWN), ("mid_lr_weight", MID), ("up_lr_weight", UP)):
            try:
                _weights(getattr(self, name), length)
            except ConfigError as e:
                yield f"in network_args: {name} {e}"
        if self.conv_block_alphas and not (self.conv_block_dims or self.conv_dim):
            yield "in network_args: conv_block_alphas needs conv_block_dims or conv_dim"

    @property
    def block_weights(self) -> tuple[float, ...]:
        """The factor of each block's learning rate, or () when none was given."""
        if not (self.down_lr_weight or self.mid_lr_weight or self.up_lr_weight):
            return ()
        lists = zip((self.down_lr_weight, self.mid_lr_weight, self.up_lr_weight), (DOWN, MID, UP), strict=True)
        factors = [f for text, length in lists for f in _weights(text, length)]
        return (1.0, *(f if f > self.block_lr_zero_threshold else 0.0 for f in factors), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxArgs(Shared):
    """`networks.lora_flux`: FLUX.1."""

    train_blocks: Literal["all", "single", "double"] = opt("all", "which blocks carry adapters")
    train_double_block_indices: str = opt("all", 'double blocks that carry adapters: "all", "none" or "0-3,5"')
    train_single_block_indices: str = opt("all", 'single blocks that carry adapters: "all", "none" or "0-3,5"')
    img_attn_dim: int | None = opt(None, "rank on the image stream's attention", min=0, ceiling=LARGEST)
    txt_attn_dim: int | None = opt(None, "rank on the text stream's attention", min=0, ceiling=LARGEST)
    img_mlp_dim: int | None = opt(None, "rank on the image stream's MLP", min=0, ceiling=LARGEST)
    txt_mlp_dim: int | None = opt(None, "rank on the text stream's MLP", min=0, ceiling=LARGEST)
    img_mod_dim: int | None = opt(None, "rank on the image stream's modulation", min=0, ceiling=LARGEST)
    txt_mod_dim: int | None = opt(None, "rank on the text stream's modulation", min=0, ceiling=LARGEST)
    single_dim: int | None = opt(None, "rank on linear1 and linear2 of the single blocks", min=0, ceiling=LARGEST)
    single_mod_dim: int | None = opt(None, "rank on the modulation of the single blocks", min=0, ceiling=LARGEST)
    in_dims: str = opt("", "ranks of img_in, time_in, vector_in, guidance_in and txt_in: [4,0,0,0,4]")
    network_reg_dims: str = opt("", "regex=rank,...: the first pattern found in an adapter's name sets its rank")
    network_reg_lrs: str = opt("", "regex=learning rate,...: the same for learning rates")
    split_qkv: bool = opt(False, "separate adapters for query, key, value (and MLP) inside the fused matrices")
    train_t5xxl: bool = opt(False, "adapters on T5 as well")
    verbose: bool = opt(False, "log every adapter")
    ggpo_sigma: float | None = opt(None, "strength of GGPO's weight-scaled noise", min=0.0)
    ggpo_beta: float | None = opt(None, "strength of GGPO's gradient-scaled noise", min=0.0)

    def check(self, _run: Any = None) -> Iterator[str]:
        """The texts that are small languages of their own."""
        for name in ("train_double_block_indices", "train_single_block_indices", "in_dims"):
            try:
                (ranks if name == "in_dims" else indices)(getattr(self, name))
            except ConfigError as e:
                yield f"in network_args: {name} {e}"
        for name, kind in (("network_reg_dims", int), ("network_reg_lrs", float)):
            try:
                patterns(getattr(self, name), kind)
            except ConfigError as e:
                yield f"in network_args: {name} {e}"

    def notes(self, _run: Any = None) -> Iterator[str]:
        """What has no effect, and why."""
        for name in ("conv_dim", "conv_alpha"):
            if getattr(self, name) is not None:
                yield f"network_args {name} has no effect: FLUX has no convolutions in its blocks"
        given = {"ggpo_sigma": self.ggpo_sigma, "ggpo_beta": self.ggpo_beta}
        alone = [name for name, value in given.items() if value is not None]
        if len(alone) == 1:
            yield f"network_args {alone[0]} has no effect: GGPO needs both ggpo_sigma and ggpo_beta"


@dataclass(frozen=True, kw_only=True, slots=True)
class LycorisArgs:
    """`lycoris.kohya`: what the lycoris-lora package understands; it reads the values itself."""

    algo: Literal["lora", "locon", "loha", "lokr", "diag-oft", "boft", "dylora", "glora", "ia3", "full", "tlora"] = opt(
        "lora", "which kind of adapter"
    )
    preset: str = opt("full", "which modules: full, attn-mlp, attn-only, ... or a TOML file")
    conv_dim: int | None = opt(None, "rank on convolutions", min=0)
    conv_alpha: float | None = opt(None, "alpha on convolutions", min=0.0)
    dropout: float | None = opt(None, "dropout; network_dropout says the same", min=0.0, max=0.99)
    rank_dropout: float | None = opt(None, "share of ranks left out", min=0.0, max=0.99)
    module_dropout: float | None = opt(None, "chance that a whole adapter is left out", min=0.0, max=0.99)
    rank_dropout_scale: str = opt("", "keep the expected size under rank_dropout")
    use_tucker: str = opt("", "Tucker decomposition for convolutions")
    use_cp: str = opt("", "old name of use_tucker")
    use_conv_cp: str = opt("", "old name of use_tucker")
    disable_conv_cp: str = opt("", "old name for no use_tucker")
    use_scalar: str = opt("", "a learned factor for each adapter")
    block_size: int | None = opt(None, "DyLoRA's block", min=1)
    train_norm: str = opt("", "learn the norms as well")
    train_on_input: str = opt("", "iA3: scale inputs instead of outputs")
    constraint: float | None = opt(None, "OFT's constraint")
    constrain: float | None = opt(None, "old name of constraint")
    rescaled: str = opt("", "OFT with a learned scale")
    dora_wd: str = opt("", "DoRA: learn magnitude and direction apart")
    wd_on_output: str = opt("", "DoRA over outputs")
    full_matrix: str = opt("", "LoKr without a low-rank part")
    bypass_mode: str = opt("", "add outputs instead of weights")
    rs_lora: str = opt("", "divide alpha by the square root of the rank")
    unbalanced_factorization: str = opt("", "LoKr's other factorization")
    decompose_both: str = opt("", "LoKr: low rank on both factors")
    factor: int | None = opt(None, "LoKr's factor; -1 is the largest", min=-1)
    train_t5xxl: str = opt("", "adapters on T5 as well")
    loraplus_lr_ratio: float | None = opt(None, "LoRA+: learning rate of lora_up relative to lora_down", min=0.0)
    loraplus_unet_lr_ratio: float | None = opt(None, "LoRA+ for the denoiser only", min=0.0)
    loraplus_text_encoder_lr_ratio: float | None = opt(None, "LoRA+ for the text encoders only", min=0.0)

    def check(self, _run: Any = None) -> Iterator[str]:
        """The layers are chosen by a name that the package knows, or by a file."""
        if self.preset not in PRESETS and not Path(self.preset).expanduser().is_file():
            yield f"in network_args: preset {self.preset!r} is no file, and none of {', '.join(PRESETS)}"


@dataclass(frozen=True)
class Kind:
    """One line of the table of network modules."""

    args: type
    family: str  # "" fits any


KINDS = {
    "networks.lora": Kind(LoraArgs, "sdxl"),
    "networks.lora_fa": Kind(LoraArgs, "sdxl"),
    "networks.lora_flux": Kind(FluxArgs, "flux"),
    "lycoris.kohya": Kind(LycorisArgs, ""),
}
INSTEAD = {
    "networks.dylora": "lycoris.kohya with network_args algo=dylora",
    "networks.oft": "lycoris.kohya with network_args algo=diag-oft",
    "networks.oft_flux": "lycoris.kohya with network_args algo=diag-oft",
    "networks.loha": "lycoris.kohya with network_args algo=loha",
    "networks.lokr": "lycoris.kohya with network_args algo=lokr",
}
HINTS = {"dropout": "; write --network_dropout instead"}


def problems(config: Any) -> Iterator[str]:
    """What is wrong with network_module and network_args, a sentence each; no torch."""
    module = config.network.module
    if module not in KINDS:
        if module.startswith("networks."):
            yield f"network_module {module} is not offered; write {INSTEAD.get(module, ', '.join(KINDS))}"
        return
    kind = KINDS[module]
    if kind.family and kind.family != config.family:
        own = next(name for name, other in KINDS.items() if other.family == config.family)
        yield f"network_module {module} is for {kind.family.upper()}; for {config.title} write {own} or leave it empty"
        return
    args, wrong = _read(kind.args, config.network.network_args)
    yield from wrong
    both = getattr(args, "ggpo_sigma", None) is not None and getattr(args, "ggpo_beta", None) is not None
    if both and config.precision.mixed_precision == "fp16":
        yield "in network_args: ggpo_sigma and ggpo_beta need mixed_precision = bf16, as fp16 scales the gradients"
    if isinstance(args, LycorisArgs):
        yield from _drawn_in_python(args, config)


def _drawn_in_python(args: LycorisArgs, config: Any) -> Iterator[str]:
    """What the package decides by chance while a layer computes: a graph has no room for it, and computing the layer
    again for its gradient would decide anew where Python draws."""
    if config.compile.compile and args.module_dropout:
        yield "in network_args: module_dropout of LyCORIS cannot be compiled: leave it out, or switch compile off"
    if args.algo.lower() == "dylora" and (config.compile.compile or config.memory.checkpointing):
        what = "compile" if config.compile.compile else "gradient_checkpointing or blocks_to_swap"
        yield f"in network_args: algo=dylora takes other ranks at every pass, so it cannot be used with {what}"


def notes(config: Any) -> Iterator[str]:
    """What has no effect in this run, a sentence each."""
    args = read(config)
    if hasattr(args, "notes"):
        yield from args.notes()
    network = config.network
    if network.network_alpha > STRONG * (network.network_dim or 4):
        yield (
            f"network_alpha {network.network_alpha:g} is far above network_dim ({network.network_dim or 4}): the "
            "adapter's strength is alpha / rank, and so much may end in NaN"
        )
    if len(set(config.optim.text_encoder_lr)) > 1 and not isinstance(args, FluxArgs):
        yield f"text_encoder_lr: {config.network.module} has one rate for all text encoders, the first one given"


def read(config: Any) -> Any:
    """The arguments as the module's own dataclass. Raises ConfigError with all that is wrong."""
    if wrong := list(problems(config)):
        raise ConfigError("\n".join(wrong))
    kind = KINDS.get(config.network.module)
    return _read(kind.args, config.network.network_args)[0] if kind else texts(config)


def texts(config: Any) -> dict[str, str]:
    """The arguments as they were written, for modules that read them themselves."""
    return dict(pair.split("=", 1) for pair in config.network.network_args if "=" in pair)


def _read(cls: type, pairs: Any) -> tuple[Any, list[str]]:
    wrong = [f"network_args: {pair!r} must be written key=value" for pair in pairs if "=" not in pair]
    given = {key.strip(): value.strip() for key, _, value in (p.partition("=") for p in pairs if "=" in p)}
    given = {key: value for key, value in given.items() if not (value in ("", "None") and key in section_options(cls))}
    for name in [n for n in HINTS if n in given and n not in section_options(cls)]:
        wrong.append(f"in network_args: {name} is not a known key{HINTS[name]}")
        given.pop(name)
    made = cls(**read_section(cls, Layer(given, "network_args"), wrong))
    return made, [*wrong, *(made.check() if hasattr(made, "check") else ())]


# ---- the small languages


def _weights(text: str, length: int) -> list[float]:
    """Factors from "1,0.5,..." or "cosine+.25"; all 1 from nothing; an empty place between commas is 0."""
    if not text:
        return [1.0] * length
    name, _, base = text.partition("+")
    try:
        if name in SHAPES:
            return [_shape(name, i / (length - 1)) + float(base or 0) for i in range(length)]
        factors = [float(part) if part.strip() else 0.0 for part in text.split(",")]
    except ValueError:
        factors = []
    if len(factors) != length or any(not math.isfinite(f) or f < 0 for f in factors):
        raise ConfigError(f"needs {length} numbers separated by commas, or one of {', '.join(SHAPES)}, got {text!r}")
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
    """The set {0, 1, 2, 3, 5} from "0-3,5"; None, which means no limit, from "all"; the empty set from "none"."""
    text = text.strip()
    if text in ("all", ""):
        return None
    if text == "none":
        return frozenset()
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f'must be "all", "none" or like "0-3,5", got {text!r}')
        found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


def ranks(text: str) -> tuple[int, ...]:
    """Five ranks from "[4,0,0,0,4]"; () from nothing."""
    if not text.strip():
        return ()
    parts = text.strip().strip("[]").split(",")
    if len(parts) != 5 or not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"needs five whole numbers like [4,0,0,0,4], got {text!r}")
    return tuple(int(part) for part in parts)


def patterns(text: str, kind: type) -> tuple[tuple[str, Any], ...]:
    """Pairs from "regex=value,regex=value"; a comma inside a pattern is part of it."""
    found: list[tuple[str, Any]] = []
    # A pair ends at "=number" before a comma or the end, so that patterns may hold commas and equal signs.
    rest, pair = text.strip(), re.compile(r"(.+?)=\s*([0-9.eE+-]+)\s*(?:,|$)")
    while rest:
        match = pair.match(rest)
        try:
            if not match:
                raise ValueError(rest)
            found.append((re.compile(match[1].strip()).pattern, kind(match[2])))
        except (ValueError, re.error):
            raise ConfigError(f"must be written regex={'rank' if kind is int else 'rate'},..., got {text!r}") from None
        rest = rest[match.end() :].lstrip()
    return tuple(found)
