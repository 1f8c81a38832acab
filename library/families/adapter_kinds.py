"""The supported kinds of adapters: the network_module and network_args that select each, and its other arguments.
Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from library import families
from library.config.schema import section_options
from library.config.sections import AdapterRun
from library.config.values import Option
from library.families import network_args
from library.families.network_args import LYCORIS, LycorisArgs
from library.families.shared.network_args import LayerPreset, NetworkArgs

USUAL_CONVOLUTIONS = {"conv_dim": "4", "conv_alpha": "1"}
ALGO_ALIASES = {"": "locon", "lora": "locon"}  # of algo
# Arguments without a field: old names, options of the run, and those set by the choice of blocks and presets.
HIDDEN = (
    "algo",
    "preset",
    "dropout",
    "use_cp",
    "use_conv_cp",
    "disable_conv_cp",
    "constrain",
    "train_blocks",
    "train_block_indices",
    "verbose",
)
LAYER_ARGUMENTS = ("train_blocks", "train_block_indices", "preset")  # those that choose layers
EVERY = ("train_t5xxl", "bypass_mode")
CONV = ("conv_dim", "conv_alpha")
DROPOUTS = ("rank_dropout", "module_dropout")
LOW_RANK = (*CONV, "rs_lora", *DROPOUTS, "rank_dropout_scale", "use_scalar", "train_norm", *EVERY)
PLUS = ("loraplus_lr_ratio", "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio")
OF_CONVOLUTIONS = (*CONV, "use_tucker")


@dataclass(frozen=True, kw_only=True)
class AdapterKind:
    """One kind of adapter."""

    id: str
    title: str
    about: str  # when to choose it
    module: str  # network_module
    args: type[Any]  # the class of its network_args: NetworkArgs, or LycorisArgs
    names: tuple[str, ...]  # of its arguments, in the order of the fields
    fixed: Mapping[str, str] = field(default_factory=dict)  # arguments that define this kind
    start: Mapping[str, str] = field(default_factory=dict)  # initial arguments, by which it is also recognised
    presets: tuple[LayerPreset, ...] = ()

    @property
    def options(self) -> list[Option]:
        options_by_name = section_options(self.args)
        return [options_by_name[name] for name in self.names]

    @property
    def layer_names(self) -> set[str]:
        """Arguments that choose layers, which have no fields."""
        named = {name for preset in self.presets for name in preset.arguments}
        blocks = self.args.block_arguments if issubclass(self.args, NetworkArgs) else ()
        return {*named, *blocks, *(name for name in LAYER_ARGUMENTS if name in section_options(self.args))}

    def is_meant(self, module: str, arguments: Mapping[str, str]) -> bool:
        """Return whether a module and its arguments select this kind."""
        if module != self.module:
            return False
        algo = arguments.get("algo", "").casefold()
        normalized = {**arguments, "algo": ALGO_ALIASES.get(algo, algo)}
        fits = all(normalized.get(name, "").casefold() == value.casefold() for name, value in self.fixed.items())
        return fits and (not self.start or any(name in arguments for name in (*self.start, "conv_block_dims")))


def kinds(family: str) -> list[AdapterKind]:
    """Return the kinds of a family's adapters, those of its own modules first."""
    adapter_kinds, has_convolutions, presets = [], False, LycorisArgs.presets
    for module, adapter_module in families.facts_of(family).adapter_modules.items():
        args: type[NetworkArgs] = families.load_object(adapter_module.args)
        hidden = {*HIDDEN, *args.block_arguments, *(() if args.convolutions else OF_CONVOLUTIONS)}
        names = tuple(name for name in section_options(args) if name not in hidden)
        title, text = ("LoRA-FA", FROZEN) if adapter_module.frozen_down else ("LoRA", USUAL_CHOICE)
        plain = tuple(name for name in names if "conv" not in name)
        adapter_kind = AdapterKind(
            id=module, title=title, about=text, module=module, args=args, names=plain, presets=args.presets
        )
        adapter_kinds.append(adapter_kind)
        if args.convolutions and not adapter_module.frozen_down:
            has_convolutions = True
            presets = (*presets, *LycorisArgs.convolution_presets)
            adapter_kinds.append(
                AdapterKind(
                    id="c3lier",
                    title="LoRA-C3Lier",
                    about=C3LIER,
                    module=module,
                    args=args,
                    names=(*USUAL_CONVOLUTIONS, *(n for n in names if n not in USUAL_CONVOLUTIONS)),
                    start=USUAL_CONVOLUTIONS,
                    presets=args.presets,
                )
            )
    options = section_options(adapter_kinds[0].args)
    absent = {*(() if has_convolutions else OF_CONVOLUTIONS), *(() if "train_t5xxl" in options else ("train_t5xxl",))}
    for algo, (title, text, names) in LYCORIS_KINDS.items():
        fixed = {"algo": "locon", "dora_wd": "True"} if algo == "dora" else {"algo": algo}
        adapter_kinds.append(
            AdapterKind(
                id=algo,
                title=title,
                about=text,
                module=LYCORIS,
                args=LycorisArgs,
                fixed=fixed,
                names=tuple(n for n in names if n not in absent),
                presets=presets,
            )
        )
    return adapter_kinds


def kind_of(config: AdapterRun, adapter_kinds: Sequence[AdapterKind]) -> AdapterKind | None:
    """Return the kind that a run's module and arguments select; None if no kind matches. Of several matches, the one
    with the most fixed arguments.
    """
    arguments, module = network_args.network_args_as_text(config), config.network.module
    matches = [kind for kind in adapter_kinds if kind.is_meant(module, arguments)]
    return max(matches, key=lambda kind: (len(kind.fixed), len(kind.start)), default=None)


USUAL_CHOICE = "The usual choice: learns well, and every program reads its files."
C3LIER = "LoRA on the 3x3 convolutions as well: texture and style are learned better, the file is larger."
FROZEN = "LoRA of which only one half learns: less memory, and it learns less."
# algo -> title, when to choose it, its arguments. DoRA is LoCon with an argument.
LYCORIS_KINDS: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "locon": (
        "LyCORIS: LoCon",
        "LoRA of the LyCORIS package, with its choice of layers.",
        ("use_tucker", "dora_wd", "wd_on_output", *LOW_RANK, *PLUS),
    ),
    "dora": (
        "LyCORIS: DoRA",
        "Learns like a full fine-tune at low rank; each step takes longer and more memory.",
        ("use_tucker", "wd_on_output", *LOW_RANK, *PLUS),
    ),
    "loha": (
        "LyCORIS: LoHa",
        "Multiplies two LoRAs, so that low ranks reach far: 4 is usual.",
        ("use_tucker", "dora_wd", "wd_on_output", *LOW_RANK),
    ),
    "lokr": (
        "LyCORIS: LoKr",
        "The smallest files at a high quality; set a factor of 4 to 16 for more.",
        (
            "factor",
            "full_matrix",
            "decompose_both",
            "unbalanced_factorization",
            "use_tucker",
            "dora_wd",
            "wd_on_output",
            *LOW_RANK,
        ),
    ),
    "diag-oft": (
        "LyCORIS: OFT",
        "Turns layers instead of adding to them: keeps what the model knows.",
        ("constraint", "rescaled", *CONV, *DROPOUTS, "train_norm", *EVERY),
    ),
    "boft": (
        "LyCORIS: BOFT",
        "OFT in several turns: learns more, and takes more time and memory.",
        ("constraint", "rescaled", *CONV, *DROPOUTS, "train_norm", *EVERY),
    ),
    "dylora": (
        "LyCORIS: DyLoRA",
        "One training for all ranks: the file can be cut to a lower rank afterwards.",
        ("block_size", *CONV, *DROPOUTS, "train_norm", "train_t5xxl"),
    ),
    "glora": (
        "LyCORIS: GLoRA",
        "LoRA on what goes in and what comes out of a layer: twice the size.",
        ("rs_lora", *CONV, *DROPOUTS, "use_scalar", *EVERY),
    ),
    "ia3": (
        "LyCORIS: iA3",
        "One factor for each channel: tiny files, for style alone; needs a high learning rate.",
        ("train_on_input", *CONV, "train_norm", *EVERY),
    ),
    "full": (
        "LyCORIS: full weights",
        "Learns whole weights of the chosen layers: a file as large as these.",
        (*CONV, *DROPOUTS, "train_norm", "train_t5xxl"),
    ),
}
