"""The adapter of a form as fields: its type, its arguments, and the trained layers. Their values live in network_module
and network_args only; adapter.js updates these."""

from collections.abc import Mapping, Sequence
from typing import Any

from kohya_gui.form.form import as_sentence
from library import families
from library.config.building import Layer, read_section
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, MessageLike, Problem
from library.config.sections import AdapterRun
from library.config.values import Option
from library.families import adapter_kinds, network_args
from library.families.adapter_kinds import AdapterKind
from library.families.network_args import LycorisArgs
from library.families.shared.network_args import PLACE, LayerPreset

UNSET = ("", "all", "full", "None")  # values of layer arguments that mean the same as no value
OTHER = "This adapter has no fields here: its arguments are the text in network_args."


def adapter_section() -> str:
    """Return the start of the adapter's section, which adapter.js fills."""
    return (
        '<div class="adapter wide"><div class="field"><label for="adapter-kind">Type of adapter</label>'
        '<select id="adapter-kind" class="kinds"></select><small></small></div>'
        '<p class="size" role="status"></p><div class="arguments"></div>'
        '<details class="rare"><summary>More settings of this adapter</summary><div class="arguments"></div></details>'
        '<div class="layers"><h4>Layers that learn</h4><div class="choices"></div><p class="chosen"></p>'
        '<div class="blocks"></div></div></div>'
    )


def adapter_state(config: AdapterRun, counts: Sequence[int] | None) -> JsonObject:
    """Return the fields' values for a config; `counts` are the blocks of its model by group, None for the published
    model."""
    kinds = adapter_kinds.kinds(config.family)
    kind = adapter_kinds.kind_of(config, kinds)
    shown: JsonObject = {
        "kinds": [_kind_for_page(adapter_kind) for adapter_kind in kinds],
        "kind": kind.id if kind else "",
        "about": kind.about if kind else OTHER,
        "fields": [],
        "presets": [],
        "groups": [],
    }
    if kind is None:
        return shown
    arguments = network_args.network_args_as_text(config)
    args, problems = network_args.read_leniently(config, kind.args)
    messages = {problem.option: problem.about.capitalized() for problem in reversed(problems) if problem.place == PLACE}
    return {
        **shown,
        "fields": [_argument_field(option, arguments, messages) for option in kind.options],
        "presets": [_preset(kind, preset, arguments) for preset in kind.presets],
        "groups": _block_rows(config, kind, args, counts),
    }


def adapter_problems(config: AdapterRun) -> list[Problem]:
    """Return the problems of network_module and network_args, each worded for display below its field."""
    problems = network_args.find_network_args_problems(config)
    return [
        problem
        if problem.option in ("network_module", "network_args")
        else Problem("network_args", ": {problem}", problem=problem.replaced(place=""))
        for problem in problems
    ]


def _kind_for_page(kind: AdapterKind) -> JsonObject:
    """Return what adapter.js needs to know about a type of adapter."""
    joint = issubclass(kind.args, LycorisArgs)
    return {
        "id": kind.id,
        "title": kind.title,
        "module": kind.module,
        "fixed": dict(kind.fixed),
        "start": dict(kind.start),
        "names": [*kind.names, *sorted(kind.layer_names)],
        "blocks": ["train_block_indices"] if joint else list(kind.args.block_arguments),
        "language": "joint" if joint else kind.args.block_language,
    }


def _argument_field(option: Option, arguments: Mapping[str, str], messages: Mapping[str, MessageLike]) -> JsonObject:
    """Return an argument as a field; a switch that is not set shows its default."""
    value = arguments.get(option.name, "")
    if option.type is bool and not messages.get(option.name):
        value = str(option.read(value) if value else option.default).lower()
    return {
        "name": option.name,
        "label": option.label,
        "help": as_sentence(option.help),
        "type": "switch" if option.type is bool else "text",
        "value": value,
        "default": str(option.default).lower() if option.type is bool else "",
        "rare": option.advanced,
        "wrong": messages.get(option.name, ""),
    }


def _block_names(kind: AdapterKind) -> set[str]:
    """Return the arguments that select the trained blocks."""
    return {
        name
        for name in (*kind.layer_names, *_kind_for_page(kind)["blocks"])
        if "block" in name or name.endswith("weight")
    }


def _preset(kind: AdapterKind, preset: LayerPreset, arguments: Mapping[str, str]) -> JsonObject:
    """Return a choice of layers. It does not change the chosen blocks unless it is about them, or about everything."""
    named, blocks = {name for layer_preset in kind.presets for name in layer_preset.arguments}, _block_names(kind)
    about_blocks = not preset.arguments or bool(blocks & preset.arguments.keys())
    names = named | blocks if about_blocks else named - blocks
    current = {name: text for name, text in arguments.items() if name in names and text not in UNSET}
    return {
        "title": preset.title,
        "about": preset.about,
        "arguments": dict(preset.arguments),
        "names": sorted(names),
        "pressed": current == preset.arguments,
    }


def _block_rows(config: AdapterRun, kind: AdapterKind, args: Any, counts: Sequence[int] | None) -> list[JsonObject]:
    """Return the picture of the model: rows of blocks, each with the factor of its learning rate, 0 for blocks that are
    not trained.

    Blocks that another argument excludes are locked: clicking cannot change them.
    """
    groups = families.facts_of(config.family).blocks
    counts_by_group = list(counts or (group.count for group in groups))
    texts = {
        name: text for name, text in network_args.network_args_as_text(config).items() if name in _block_names(kind)
    }
    try:
        factors = args.chosen_blocks(counts_by_group)
        own_factors = kind.args(**read_section(kind.args, Layer(texts, "network_args"), [])).chosen_blocks(
            counts_by_group
        )
    except ConfigError:  # its field shows the problem
        factors = own_factors = [[1.0] * count for count in counts_by_group]
    return [
        {
            "title": group.title,
            "factors": shown,
            "locked": [a > 0 == b for a, b in zip(own_factors, shown, strict=True)],
        }
        for group, shown, own_factors in zip(groups, factors, own_factors, strict=True)
    ]
