"""What `--network_args key=value ...` may say, for each `--network_module`.

The tables below are sections of the config engine, so a wrong name, a wrong value and a number out of range are found
and worded like those of any other option, all at once and without loading torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from library import families
from library.config.problems import ConfigError, Problem, Text
from library.config.run_config import RunConfig
from library.config.schema import Layer, opt, read_section, section_options
from library.config.sections import AdapterRun
from library.config.values import quoted
from library.families.shared.network_args import wrong_argument

PRESETS = ("full", "full-lin", "attn-mlp", "attn-only", "unet-only", "unet-transformer-only", "unet-convblock-only",
           "ia3")  # fmt: skip
STRONG = 100  # alpha / rank that nobody means


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

    def check(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """The layers are chosen by a name that the package knows, or by a file."""
        if self.preset not in PRESETS and not Path(self.preset).expanduser().is_file():
            yield wrong_argument("preset", "{preset} is no file, and none of {presets}",
                preset=quoted(self.preset), presets=", ".join(PRESETS))  # fmt: skip


LYCORIS = "lycoris.kohya"
# networks.<this>, with or without a family's name behind it, are algorithms of LyCORIS here.
ALGORITHMS = {"dylora": "dylora", "oft": "diag-oft", "loha": "loha", "lokr": "lokr"}
HINTS = {"dropout": "; write --network_dropout instead"}


def problems(config: AdapterRun) -> Iterator[Problem]:
    """What is wrong with network_module and network_args, a sentence each; no torch."""
    module = config.network.module
    cls = args_class(config)
    if cls is None:
        if others := [known for known in families.every() if module in known.adapter_modules]:
            own = next(iter(families.facts(config.family).adapter_modules))
            others = " and ".join(known.title for known in others)
            yield Problem("network_module", "{module} is for {others}; for {title} write {own} or leave it empty",
                module=module, others=others, title=config.title, own=own, fix={"network_module": None})  # fmt: skip
        elif module.startswith("networks."):
            algorithm = ALGORITHMS.get(module.removeprefix("networks.").split("_")[0])
            offered = ", ".join((*families.facts(config.family).adapter_modules, LYCORIS))
            instead = f"{LYCORIS} with network_args algo={algorithm}" if algorithm else offered
            yield Problem("network_module", "{module} is not offered; write {other}", module=module, other=instead,
                fix={"network_module": None})  # fmt: skip
        return
    args, wrong = _read(cls, config.network.network_args)
    yield from wrong
    both = getattr(args, "ggpo_sigma", None) is not None and getattr(args, "ggpo_beta", None) is not None
    if both and config.precision.mixed_precision == "fp16":
        yield wrong_argument("ggpo_sigma", "and ggpo_beta need mixed_precision = bf16, as fp16 scales the gradients")
    if isinstance(args, LycorisArgs):
        yield from _drawn_in_python(args, config)


def _drawn_in_python(args: LycorisArgs, config: AdapterRun) -> Iterator[Problem]:
    """What the package decides by chance while a layer computes: a graph has no room for it, and computing the layer
    again for its gradient would decide anew where Python draws."""
    if config.compile.compile and args.module_dropout:
        yield wrong_argument("module_dropout", "of LyCORIS cannot be compiled: leave it out, or switch compile off")
    if args.algo.lower() == "dylora" and (config.compile.compile or config.memory.checkpointing):
        what = "compile" if config.compile.compile else "gradient_checkpointing or blocks_to_swap"
        yield wrong_argument("", "algo=dylora takes other ranks at every pass, so it cannot be used with {what}",
            what=what)  # fmt: skip


def notes(config: AdapterRun) -> Iterator[Problem]:
    """What has no effect in this run, a sentence each."""
    args = read(config)
    if hasattr(args, "notes"):
        yield from args.notes()
    network = config.network
    if network.network_alpha > STRONG * (network.network_dim or 4):
        yield Problem("network_alpha",
            "{alpha} is far above network_dim ({rank}): the adapter's strength is alpha / rank, and so much may end "
            "in NaN", alpha=f"{network.network_alpha:g}", rank=network.network_dim or 4)  # fmt: skip
    if len(set(config.optim.text_encoder_lr)) > 1 and not getattr(args, "encoder_rates", ()):
        template = ": {module} has one rate for all text encoders, the first one given"
        yield Problem("text_encoder_lr", template, module=config.network.module)


def read(config: AdapterRun) -> Any:
    """The arguments as the module's own dataclass. Raises ConfigError with all that is wrong."""
    if wrong := list(problems(config)):
        raise ConfigError(*wrong)
    cls = args_class(config)
    return _read(cls, config.network.network_args)[0] if cls else texts(config)


def args_class(config: AdapterRun) -> type[Any] | None:
    """What a run's network_args may say; None for a module that is not the run's family's, or no module of ours."""
    own = families.facts(config.family).adapter_modules.get(config.network.module)
    if own:
        return families.load(own.args)
    return LycorisArgs if config.network.module == LYCORIS else None


def texts(config: AdapterRun) -> dict[str, str]:
    """The arguments as they were written, for modules that read them themselves."""
    return dict(pair.split("=", 1) for pair in config.network.network_args if "=" in pair)


def _read(cls: type, pairs: Any) -> tuple[Any, list[Problem]]:
    written = ": {pair} must be written key=value"
    wrong = [Problem("network_args", written, pair=quoted(pair)) for pair in pairs if "=" not in pair]
    given = {key.strip(): value.strip() for key, _, value in (p.partition("=") for p in pairs if "=" in p)}
    given = {key: value for key, value in given.items() if not (value in ("", "None") and key in section_options(cls))}
    for name in [n for n in HINTS if n in given and n not in section_options(cls)]:
        wrong.append(wrong_argument(name, "is not a known key{hint}", hint=Text(HINTS[name])))
        given.pop(name)
    made = cls(**read_section(cls, Layer(given, "network_args"), wrong))
    return made, [*wrong, *(made.check() if hasattr(made, "check") else ())]
