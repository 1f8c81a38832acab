"""The arguments of `--network_args key=value ...`, for each `--network_module`.

The tables below are sections of the config engine, so that unknown names, invalid values and numbers out of range
are reported like those of any other option, all at once and without loading torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from library import families
from library.config.building import Layer, read_section
from library.config.json_types import JsonObject
from library.config.outside_files import load_toml
from library.config.pasted import pasted_path
from library.config.problems import ConfigError, Message, Problem, counted, raise_if_any, together
from library.config.schema import opt, section_options
from library.config.sections import AdapterRun
from library.config.values import quoted
from library.families.shared.network_args import PLACE, LayerPreset, NetworkArgs, index_factors, wrong_argument

LAYER_PRESETS = (
    "full",
    "full-lin",
    "attn-mlp",
    "attn-only",
    "unet-only",
    "unet-transformer-only",
    "unet-convblock-only",
)
UNMATCHED = "ia3"  # a preset of the package whose names match no layer, as they are compared with whole paths
DROPPING_OUT = ("lora", "locon", "loha", "lokr", "glora")  # algos with dropout, all in bypass mode only
WITH_DORA = ("lora", "locon", "loha", "lokr")
# Algos with rank_dropout, by bypass_mode.
DROPPING_RANKS = {
    False: ("lora", "locon", "loha", "lokr", "diag-oft", "full"),
    True: ("lora", "locon", "loha", "glora"),
}
BLOCK_LIST = "_block_indices"  # ending of the arguments that list blocks
LONGEST_VALUE = 20_000  # characters of an argument
MAX_STRENGTH = 100  # a higher alpha / rank is likely a mistake
MIN_STRENGTH = 0.005  # a lower one, too: docs/dev/quality.md, "What samples say"


@dataclass(frozen=True, kw_only=True, slots=True)
class LycorisArgs:
    """`lycoris.kohya`: the arguments of the lycoris-lora package, and the blocks that it adapts."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("All layers", "All layers that this type of adapter supports.", {}),
        LayerPreset(
            "Attention and MLP",
            "No convolutions, in both the image model and the text encoders.",
            {"preset": "attn-mlp"},
        ),
        LayerPreset(
            "Attention only", "The smallest file; style and subject without much detail.", {"preset": "attn-only"}
        ),
    )
    convolution_presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset(
            "Convolution blocks only",
            "Texture and lines, without attention, which learns the subject.",
            {"preset": "unet-convblock-only"},
        ),
    )

    algo: Literal["lora", "locon", "loha", "lokr", "diag-oft", "boft", "dylora", "glora", "ia3", "full", "tlora"] = opt(
        "lora", "which kind of adapter"
    )
    preset: str = opt(
        "full", "which modules: full, attn-mlp, attn-only, ... or a TOML file", kind="file", advanced=True
    )
    train_block_indices: str = opt(
        "all", 'blocks that carry adapters: "all", "none" or "0-3,5"; of several kinds of blocks "none/7,20"'
    )
    conv_dim: int | None = opt(
        None, "rank on convolutions; not set: the rank of all others", label="Convolution rank", min=0
    )
    conv_alpha: float | None = opt(
        None, "alpha on convolutions; not set: the alpha of all others", label="Convolution alpha", min=0.0
    )
    dropout: float | None = opt(None, "dropout; network_dropout says the same", min=0.0, max=0.99)
    rank_dropout: float | None = opt(None, "share of ranks left out", min=0.0, max=0.99, advanced=True)
    module_dropout: float | None = opt(
        None, "chance that a whole adapter is left out", min=0.0, max=0.99, advanced=True
    )
    rank_dropout_scale: bool = opt(False, "keep the expected size under rank_dropout", advanced=True)
    use_tucker: bool = opt(False, "Tucker decomposition for convolutions", label="Tucker decomposition")
    use_cp: bool = opt(False, "old name of use_tucker")
    use_conv_cp: bool = opt(False, "old name of use_tucker")
    disable_conv_cp: bool = opt(False, "old name for no use_tucker")
    use_scalar: bool = opt(False, "a learned factor for each adapter", label="Learned factor", advanced=True)
    block_size: int | None = opt(None, "ranks that DyLoRA trains together; the rank is a multiple of it", min=1)
    train_norm: bool = opt(False, "learn the norms as well", label="Train the norms", advanced=True)
    train_on_input: bool = opt(False, "iA3: scale inputs instead of outputs", label="Scale inputs")
    constraint: float | None = opt(None, "OFT: how far a layer may turn; not set: no limit")
    constrain: float | None = opt(None, "old name of constraint")
    rescaled: bool = opt(False, "OFT with a learned scale", label="Learned scale")
    dora_wd: bool = opt(False, "DoRA: learn magnitude and direction apart", label="DoRA")
    wd_on_output: bool = opt(True, "DoRA over outputs; off: over inputs", label="DoRA over outputs", advanced=True)
    full_matrix: bool = opt(False, "LoKr without a low-rank part: the rank then means nothing", label="Whole matrices")
    bypass_mode: bool = opt(
        False, "add outputs instead of weights; a base in 8 bits needs it", label="Bypass mode", advanced=True
    )
    rs_lora: bool = opt(False, "divide alpha by the square root of the rank", label="Rank-stabilized", advanced=True)
    unbalanced_factorization: bool = opt(
        False, "LoKr's other factorization", label="Unbalanced factorization", advanced=True
    )
    decompose_both: bool = opt(False, "LoKr: low rank on both factors", label="Low rank on both", advanced=True)
    factor: int | None = opt(None, "LoKr's factor: smaller is a larger file; -1 is the smallest file", min=-1)
    train_t5xxl: bool = opt(False, "adapters on T5 as well", label="T5 learns as well", advanced=True)
    loraplus_lr_ratio: float | None = opt(
        None, "LoRA+: learning rate of lora_up relative to lora_down", label="LoRA+ ratio", min=0.0, advanced=True
    )
    loraplus_unet_lr_ratio: float | None = opt(
        None, "LoRA+ for the denoiser only", label="LoRA+ ratio, image model", min=0.0, advanced=True
    )
    loraplus_text_encoder_lr_ratio: float | None = opt(
        None, "LoRA+ for the text encoders only", label="LoRA+ ratio, text encoders", min=0.0, advanced=True
    )

    def check(self, run: AdapterRun) -> Iterator[Problem]:
        """Check the preset, a name of the package or a file, and the numbers of blocks."""
        if self.preset == UNMATCHED:
            yield wrong_argument(
                "preset",
                "{preset} of the package finds no layer of any model: write {other} with {algo}",
                preset=quoted(self.preset),
                other="preset=attn-mlp",
                algo="algo=ia3",
            )
        elif self.preset == "unet-convblock-only" and not _has_convolutions(run.family):
            yield wrong_argument(
                "preset",
                "{preset} is for models with convolutions, and {title} has none: write {other}",
                preset=quoted(self.preset),
                title=run.title,
                other="preset=full",
            )
        elif self.preset not in LAYER_PRESETS and not pasted_path(self.preset).is_file():
            yield wrong_argument(
                "preset",
                "{preset} is neither a file nor one of {presets}",
                preset=quoted(self.preset),
                presets=", ".join(LAYER_PRESETS),
            )
        elif self.preset not in LAYER_PRESETS:
            try:
                load_toml(pasted_path(self.preset))
            except ConfigError as e:
                yield from (wrong_argument("preset", ": {why}", why=why) for why in e.problems)
        rank, block_size = run.network.network_dim or 4, self.block_size or 4
        if self.algo == "dylora" and rank % block_size:
            yield wrong_argument(
                "block_size",
                "({together}) must divide network_dim ({rank}): set one of them",
                together=block_size,
                rank=rank,
            )
        try:
            self.chosen_blocks([group.count for group in families.facts_of(run.family).blocks])
        except ConfigError as e:
            yield from (
                problem.replaced(option="train_block_indices", place=PLACE, topic="training") for problem in e.problems
            )

    def chosen_blocks(self, counts: Sequence[int]) -> list[list[float]]:
        """Return 1 for each block with adapters, else 0, by group; `counts`: blocks per group. Raises ConfigError."""
        texts = self.train_block_indices.split("/")
        if len(texts) == 1 and texts[0].strip() in ("", "all", "none"):
            texts *= len(counts)
        if len(texts) != len(counts):
            raise ConfigError(
                "needs a part for each kind of blocks ({count}), with / between, got {text}",
                count=len(counts),
                text=quoted(self.train_block_indices),
            )
        return [index_factors(text, count) for text, count in zip(texts, counts, strict=True)]


def _has_convolutions(family: str) -> bool:
    modules = families.facts_of(family).adapter_modules.values()
    return any(families.load_object(adapter_module.args).convolutions for adapter_module in modules)


LYCORIS = "lycoris.kohya"
# networks.<name>, with or without a family's name appended, is an algorithm of LyCORIS here.
ALGORITHMS = {"dylora": "dylora", "oft": "diag-oft", "loha": "loha", "lokr": "lokr"}
HINTS = {"dropout": "; write --network_dropout instead"}


def find_network_args_problems(config: AdapterRun) -> Iterator[Problem]:
    """Yield problems of network_module and network_args. Needs no torch."""
    module = config.network.module
    cls = args_class(config)
    if cls is None:
        if other_families := [family for family in families.all_families() if module in family.adapter_modules]:
            usual = next(iter(families.facts_of(config.family).adapter_modules))
            titles = together([family.title for family in other_families])
            yield Problem(
                "network_module",
                "{module} is for {others}; for {title} write {own} or leave it empty",
                module=module,
                others=titles,
                title=config.title,
                own=usual,
                fix={"network_module": None},
            )
        elif module.startswith("networks."):
            algorithm = ALGORITHMS.get(module.removeprefix("networks.").split("_")[0])
            offered = ", ".join((*families.facts_of(config.family).adapter_modules, LYCORIS))
            instead = f"{LYCORIS} with network_args algo={algorithm}" if algorithm else offered
            yield Problem(
                "network_module",
                "{module} is not offered; write {other}",
                module=module,
                other=instead,
                fix={"network_module": None},
            )
        return
    args, problems = read_leniently(config, cls)
    yield from problems
    has_ggpo = isinstance(args, NetworkArgs) and args.ggpo_strengths is not None
    if has_ggpo and config.precision.mixed_precision == "fp16":
        yield wrong_argument("ggpo_sigma", "and ggpo_beta need mixed_precision = bf16, as fp16 scales the gradients")
    if isinstance(args, LycorisArgs):
        yield from _random_in_python(args, config)
        yield from _failing_combinations(args, config)


def _random_in_python(args: LycorisArgs, config: AdapterRun) -> Iterator[Problem]:
    """Yield problems of options with which LyCORIS draws random numbers in Python during the forward pass: a compiled
    graph would fix the draw, and the recomputation of a checkpoint would draw again.
    """
    if config.compile.compile and args.module_dropout:
        yield wrong_argument("module_dropout", "of LyCORIS cannot be compiled: leave it out, or switch compile off")
    if args.algo.lower() == "dylora" and (config.compile.compile or config.memory.checkpointing):
        what = "compile" if config.compile.compile else "gradient_checkpointing or blocks_to_swap"
        yield wrong_argument(
            "", "algo=dylora takes other ranks at every pass, so it cannot be used with {what}", what=what
        )


def _failing_combinations(args: LycorisArgs, config: AdapterRun) -> Iterator[Problem]:
    """Yield problems of combinations that LyCORIS accepts, but with which it fails after the model is loaded."""
    algo = args.algo.lower()
    if args.bypass_mode and algo in ("dylora", "full"):
        yield wrong_argument("bypass_mode", "cannot be used with algo={algo}: leave it out", algo=algo)
    if args.bypass_mode and algo == "diag-oft" and _plain_dropout(args, config):
        yield wrong_argument("bypass_mode", "of algo=diag-oft cannot be used with dropout: leave one of them out")
    if args.bypass_mode and args.dora_wd and algo in WITH_DORA:
        yield wrong_argument("bypass_mode", "leaves out what dora_wd learns: leave one of them out")
    if algo == "tlora":
        yield wrong_argument(
            "",
            "algo=tlora needs the timestep in each layer, which no layer is given here: choose another, as algo=lora",
        )


def _plain_dropout(args: LycorisArgs, config: AdapterRun) -> float:
    return (config.network.network_dropout if args.dropout is None else args.dropout) or 0.0


def _unused_dropout(args: LycorisArgs, config: AdapterRun) -> Iterator[Problem]:
    if not _plain_dropout(args, config):
        return
    option, algo = "network_dropout" if args.dropout is None else "network_args dropout", args.algo.lower()
    if algo not in DROPPING_OUT:
        yield Problem(option, "has no effect with algo={algo}, which has no dropout: leave it out", algo=algo)
    elif not args.bypass_mode:
        yield Problem(
            option,
            "has no effect with algo={algo} unless network_args has {other}, too",
            algo=algo,
            other="bypass_mode=True",
        )


def _unused_rank_dropout(args: LycorisArgs) -> Iterator[Problem]:
    algo = args.algo.lower()
    if not args.rank_dropout or algo in DROPPING_RANKS[args.bypass_mode]:
        return
    if algo in DROPPING_RANKS[not args.bypass_mode]:
        other = "bypass_mode=False" if args.bypass_mode else "bypass_mode=True"
        yield Problem(
            "network_args rank_dropout",
            "has no effect with algo={algo} unless network_args has {other}, too",
            algo=algo,
            other=other,
        )
    else:
        yield Problem(
            "network_args rank_dropout",
            "has no effect with algo={algo}, which leaves no ranks out: leave it out",
            algo=algo,
        )


def network_args_notes(config: AdapterRun) -> Iterator[Problem]:
    """Yield arguments without effect in this run."""
    args = read_network_args(config)
    if isinstance(args, LycorisArgs):
        yield from _unused_dropout(args, config)
        yield from _unused_rank_dropout(args)
    elif isinstance(args, NetworkArgs):
        yield from args.notes()
    network = config.network
    for name in filter(partial(hasattr, args), empty_block_lists(config)):
        template = "{name} is empty, so none of these blocks learn, as in sd-scripts; write {all} for all of them"
        yield Problem("network_args", template, name=name, all=f"{name}=all")
    switches = {
        "loraplus_text_encoder_lr_ratio": "network_train_unet_only",
        "loraplus_unet_lr_ratio": "network_train_text_encoder_only",
    }
    for name, switch in switches.items():
        if getattr(args, name, None) is not None and getattr(network, switch):
            yield Problem("network_args", "{name} has no effect: {switch} is on", name=name, switch=switch)
    if network.network_alpha > MAX_STRENGTH * (network.network_dim or 4):
        yield Problem(
            "network_alpha",
            "{alpha} is far above network_dim ({rank}): the adapter's strength is alpha / rank, and so much may end "
            "in NaN",
            alpha=f"{network.network_alpha:g}",
            rank=network.network_dim or 4,
        )
    # LyCORIS has kinds that ignore alpha.
    if isinstance(args, NetworkArgs) and 0 < network.network_alpha < MIN_STRENGTH * (network.network_dim or 4):
        yield Problem(
            "network_alpha",
            "{alpha} is far below network_dim ({rank}): the adapter's strength is alpha / rank, which is "
            "too small here to learn anything",
            alpha=f"{network.network_alpha:g}",
            rank=network.network_dim or 4,
            fix={"network_alpha": float(network.network_dim or 4)},
        )
    if len(set(config.optim.text_encoder_lr)) > 1 and not (isinstance(args, NetworkArgs) and args.encoder_rates):
        template = ": {module} has one rate for all text encoders, the first one given"
        yield Problem("text_encoder_lr", template, module=config.network.module)


def read_network_args(config: AdapterRun) -> Any:
    """Return the arguments as the module's own dataclass. Raises ConfigError with all problems."""
    raise_if_any(find_network_args_problems(config))
    cls = args_class(config)
    return read_leniently(config, cls)[0] if cls else network_args_as_text(config)


def args_class(config: AdapterRun) -> type[Any] | None:
    """Return the class of a run's network_args; None for a module of another family or program."""
    adapter_module = families.facts_of(config.family).adapter_modules.get(config.network.module)
    if adapter_module:
        return families.load_object(adapter_module.args)
    return LycorisArgs if config.network.module == LYCORIS else None


def empty_block_lists(config: AdapterRun) -> list[str]:
    """Return the arguments that list blocks and are empty."""
    texts = network_args_as_text(config)
    return [name.strip() for name, text in texts.items() if name.strip().endswith(BLOCK_LIST) and not text.strip()]


def network_args_as_text(config: AdapterRun) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in config.network.network_args if "=" in pair)


def lycoris_settings(config: AdapterRun) -> JsonObject:
    """Return the arguments for the package as text, but switches as bool."""
    # To the package any text other than "false" is true.
    options, texts = section_options(LycorisArgs), network_args_as_text(config)
    settings = {
        name: options[name].read(text) if options.get(name, options["algo"]).type is bool else text
        for name, text in texts.items()
    }
    settings.pop("train_block_indices", None)  # our own argument, unknown to the package
    return settings


def read_leniently(config: AdapterRun, cls: type) -> tuple[Any, list[Problem]]:
    """Return the arguments of a run as a `cls`, and all problems; invalid arguments have their defaults."""
    pairs, written = config.network.network_args, ": {pair} must be written key=value"
    problems = [Problem("network_args", written, pair=quoted(pair)) for pair in pairs if "=" not in pair]
    texts = {key.strip(): value.strip() for key, _, value in (p.partition("=") for p in pairs if "=" in p)}
    # "None" means the default, and so does an empty value, but for blocks: it names none of them.
    texts = {key: value or ("none" if key.endswith(BLOCK_LIST) else "") for key, value in texts.items()}
    texts = {key: value for key, value in texts.items() if not (value in ("", "None") and key in section_options(cls))}
    for key in [key for key, value in texts.items() if len(value) > LONGEST_VALUE]:
        length = counted(len(texts.pop(key)), "character")
        problems.append(
            wrong_argument(key, "has {count}, and at most {most} are read", count=length, most=LONGEST_VALUE)
        )
    for name in [n for n in HINTS if n in texts and n not in section_options(cls)]:
        problems.append(wrong_argument(name, "is not a known key{hint}", hint=Message(HINTS[name])))
        texts.pop(name)
    arguments = cls(**read_section(cls, Layer(texts, "network_args"), problems))
    return arguments, [*problems, *(arguments.check(config) if hasattr(arguments, "check") else ())]
