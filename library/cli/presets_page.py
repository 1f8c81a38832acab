"""Generate the value tables in docs/presets.md from the presets: `python -m library.cli.presets_page`."""

import re
from collections.abc import Mapping
from pathlib import Path

from library.config.formats import read_toml, toml_value
from library.config.schema import flatten_sections
from library.families import all_families

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PRESETS_PAGE = PROJECT_ROOT / "docs" / "presets.md"
VALUES_BLOCK = re.compile(r"(<!-- values -->\n).*?(<!-- /values -->)", re.DOTALL)
PROFILES = "compile"  # folder of presets that only set compiling, for any model

Values = dict[str, str]
Columns = dict[str, Values]  # column title -> option -> value


def preset_tables() -> str:
    """Return a table of what all presets share, then one per model and kind of training, with a column per GPU size."""
    presets = {path: preset_values(path) for path in _sorted_presets()}
    first, *others = (values for path, values in presets.items() if path.parent.name != PROFILES)
    shared = {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
    groups: dict[str, Columns] = {"All presets except compile profiles": {"value": shared}}
    for path, values in presets.items():
        title, column = _heading(path)
        is_profile = path.parent.name == PROFILES
        rest = {name: value for name, value in values.items() if is_profile or name not in shared}
        groups.setdefault(title, {})[column] = rest
    return "\n".join(
        f"### {title}\n\n{preset_table(columns)}" for title, columns in _merge_equal_tables(groups).items()
    )


def preset_table(columns: Mapping[str, Values]) -> str:
    """Return a table with one row per option that any column sets."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    lines = [f"| option | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name in names:
        lines.append(f"| `{name}` | {' | '.join(column.get(name, '') for column in columns.values())} |")
    return "\n".join(lines) + "\n"


def preset_values(path: Path) -> Values:
    return {name: toml_value(value).replace("|", "\\|") for name, value in flatten_sections(read_toml(path)).items()}


def with_tables(text: str) -> str:
    return VALUES_BLOCK.sub(lambda match: f"{match[1]}\n{preset_tables()}\n{match[2]}", text)


def _sorted_presets() -> list[Path]:
    """Return presets by family, kind and memory; those for any model last."""
    folders = [*(facts.name for facts in all_families()), PROFILES]
    return sorted(
        (path for path in (PROJECT_ROOT / "presets").glob("*/*.toml") if path.parent.name in folders),
        key=lambda path: (
            folders.index(path.parent.name),
            not path.stem.startswith("lora"),
            _preset_kind(path),
            _preset_memory(path),
        ),
    )


def _preset_kind(path: Path) -> str:
    return re.sub(r"-\d+gb$", "", path.stem)


def _preset_memory(path: Path) -> int:
    match = re.search(r"-(\d+)gb$", path.stem)
    return int(match[1]) if match else 0


def _heading(path: Path) -> tuple[str, str]:
    """Return the title of a preset's table and its column's title, from its first line."""
    first_line = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
    if path.parent.name == PROFILES:
        return "Compile profiles, for any model", f"`{PROFILES}/{path.stem}`"
    title, _, size = first_line.partition(":")[0].partition(" on ")
    names = f"{_preset_kind(path)}-..." if size else path.stem
    return f"{title} (`{path.parent.name}/{names}`)", size or "any GPU"


def _merge_equal_tables(groups: Mapping[str, Columns]) -> dict[str, Columns]:
    """Merge tables of groups with equal values, such as DreamBooth's and fine-tunes' presets."""
    alike: list[tuple[list[str], Columns]] = []
    for title, columns in groups.items():
        equal_titles = next((titles for titles, known_columns in alike if known_columns == columns), None)
        if equal_titles is None:
            alike.append(([title], columns))
        else:
            equal_titles.append(title)
    return {" and ".join(titles): columns for titles, columns in alike}


def main() -> None:
    PRESETS_PAGE.write_text(with_tables(PRESETS_PAGE.read_text(encoding="utf-8")), encoding="utf-8", newline="\n")
    print(f"wrote the values in {PRESETS_PAGE}")


if __name__ == "__main__":
    main()
