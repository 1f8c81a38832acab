"""Generate docs/options.md from the options: `python -m library.cli.options_page`."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.config.values import Option
from library.families import RUNS, config_class, facts_of

Config = type[RunConfig]
OPTIONS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
INTRO = """# Options

Written by `python -m library.cli.options_page` from the options themselves; do not edit. Each is a flag
(`--name value`, `--name` and `--no-name` for yes or no), a line of a TOML file (`name = value`, in any table) and a
field of the page. Flags win over the file, the file wins over the defaults.

A training has the options of all chapters that apply to it: all trainings, its kind (LoRA or fine-tune), its model and
its script.
"""
TABLE_HEAD = "| option | value | default | meaning |\n|---|---|---|---|\n"


def page(configs: Iterable[Config]) -> str:
    """Return the whole page. Each option stands in the first chapter whose trainings all have it, with equal values."""
    configs = list(configs)
    tables = {config: options_of(config) for config in configs}
    shared = _common(tables.values())
    listed = {config: {option.name for option in shared} for config in configs}
    parts = [INTRO, "## All trainings\n", option_tables(shared)]
    for heading, members in _chapters(configs):
        options = [o for o in _common(tables[member] for member in members) if o.name not in listed[members[0]]]
        parts += [heading, option_table(options)] if options else [heading]
        for member in members:
            listed[member].update(option.name for option in options)
    return "\n".join(parts)


def _chapters(configs: list[Config]) -> Iterator[tuple[str, list[Config]]]:
    """Yield headings with their trainings: kinds of training, then models with the scripts of each."""
    yield "## LoRA and other adapters, all models\n", [config for config in configs if config.kind == "lora"]
    yield "## Fine-tunes and DreamBooth, all models\n", [config for config in configs if config.kind == "finetune"]
    flow = [config for config in configs if "discrete_flow_shift" in options_of(config)]
    others = dict.fromkeys(facts_of(config.family).title for config in configs if config not in flow)
    yield f"## Models trained by flow matching: all except {' and '.join(others)}\n", flow
    for family, members in groupby(configs, key=lambda config: config.family):
        scripts = list(members)
        yield f"## {facts_of(family).title}\n", scripts
        for config in scripts:
            yield f"### {config.title} (`{config.script}.py`)\n\n{config.__doc__}\n", [config]


def _common(tables: Iterable[Mapping[str, Option]]) -> list[Option]:
    first, *others = tables
    return [option for option in first.values() if all(other.get(option.name) == option for other in others)]


def option_tables(options: Iterable[Option]) -> str:
    """Return options as Markdown, a table per section."""
    sections: dict[str, list[Option]] = defaultdict(list)
    for option in options:
        sections[option.section].append(option)
    return "\n".join(f"### {section}\n\n{option_table(rows)}" for section, rows in sections.items())


def option_table(options: Iterable[Option]) -> str:
    """Return options as one Markdown table, without a heading."""
    lines = []
    for o in options:
        default = f"`{o.text(o.default)}`" if o.text(o.default) else ""
        lines.append(
            f"| `{o.name}` | {_escape_cell(_value_word(o))} | {_escape_cell(default)} | {_escape_cell(o.help)} |\n"
        )
    return TABLE_HEAD + "".join(lines)


def _value_word(option: Option) -> str:
    if option.choices:
        return ", ".join(map(str, option.choices)) + (", ..." if option.open else "")
    word = {bool: "yes or no", int: "whole number", float: "number", Path: "file"}.get(
        option.type, option.kind or "text"
    )
    return f"{word}, several" if option.many else word


def _escape_cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page."""
    OPTIONS_PAGE.parent.mkdir(exist_ok=True)
    OPTIONS_PAGE.write_text(page(map(config_class, RUNS)), encoding="utf-8", newline="\n")
    print(f"wrote {OPTIONS_PAGE}")


if __name__ == "__main__":
    main()
