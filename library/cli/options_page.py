"""Generate docs/options.md from the options: `python -m library.cli.options_page`."""

from collections.abc import Iterable
from pathlib import Path

from library.config.schema import options_of
from library.config.values import Option
from library.families import RUNS, config_class

OPTIONS_PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
INTRO = """# Options

Written by `python -m library.cli.options_page` from the options themselves; do not edit. Each is a flag
(`--name value`, `--name` and `--no-name` for yes or no), a line of a TOML file (`name = value`, in any table) and a
field of the page. Flags win over the file, the file wins over the defaults.
"""


def page(configs: Iterable[type]) -> str:
    """Return the whole page: common options first, then a chapter per training with its own."""
    configs = list(configs)
    tables_of = [dict(options_of(config)) for config in configs]
    shared = [o for o in tables_of[0].values() if all(t.get(o.name) == o for t in tables_of)]
    names = {o.name for o in shared}
    parts = [INTRO, "## All trainings\n", option_tables(shared, depth=3)]
    for config, table in zip(configs, tables_of, strict=True):
        parts += [f"\n## {config.title} (`{config.script}.py`)\n", f"{config.__doc__} Besides the options above:\n"]
        parts.append(option_tables((o for o in table.values() if o.name not in names), depth=3))
    return "\n".join(parts)


def option_tables(options: Iterable[Option], depth: int = 2) -> str:
    """Return options as Markdown, a table per section."""
    lines, last_section = [], ""
    for o in options:
        if o.section != last_section:
            lines += [f"{'#' * depth} {o.section}", ""] if not lines else ["", f"{'#' * depth} {o.section}", ""]
            lines += ["| option | value | default | meaning |", "|---|---|---|---|"]
            last_section = o.section
        default = f"`{o.text(o.default)}`" if o.text(o.default) else ""
        lines.append(
            f"| `{o.name}` | {_escape_cell(_value_word(o))} | {_escape_cell(default)} | {_escape_cell(o.help)} |"
        )
    return "\n".join(lines) + "\n"


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
