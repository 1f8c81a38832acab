"""What the documents call things is what the code calls them: options with their values, flags, files, presets."""

import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figure
from library.config.dataset import DatasetConfig, SubsetConfig
from library.config.problems import ConfigError
from library.config.schema import options_of, section_options
from library.config.values import Option
from library.families import RUNS, config_class
from tests import source
from tests.test_docs import DOCS, GUIDES, PAGES, blocks, name_of

CODE = re.compile(r"`([^`\n]+)`")
NO_LISTS = ("options.md", "presets.md")  # the program writes these
# Names of other programs, and words that stand for something.
OTHERS = {
    *("--fp8_scaled", "--full_path", "--learning_r", "--num_gpus"),
    *("control_path_0", "load_textual_inversion", "msgid_plural", "repeats_words"),
}
OF_OTHERS = {"timestep_sampling": ["logsnr"]}  # values that the importer translates


def known_options() -> dict[str, list[Option]]:
    """Each option and each key of a dataset file by name, as every family declares it."""
    tables = [
        *(options_of(config_class(script)) for script in RUNS),
        *(section_options(keys) for keys in (DatasetConfig, SubsetConfig)),
    ]
    options: dict[str, list[Option]] = {}
    for name, option in (item for table in tables for item in table.items()):
        options.setdefault(name, []).append(option)
    return options


def spans(page: Path) -> list[str]:
    """What stands in `code` in running text and tables."""
    return CODE.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))


def read_toml_value(text: str) -> Any:
    """A value as a TOML writes it, or a bare word, as sentences do."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def accepts(option: Option, value: Any) -> bool:
    try:
        option.read(value)
    except ConfigError:
        return False
    return True


def assignments(page: Path) -> Iterator[tuple[str, Any]]:
    """Every `name = value` of a page, in sentences and in TOML blocks, without letters that stand for a number."""
    for span in spans(page):
        if (match := re.fullmatch(r"([a-z][a-z0-9_]+) ?= ?(.+)", span)) and match[2] != "N":
            yield match[1], read_toml_value(match[2])
    for block in blocks(page, "toml"):
        tables: list[dict[str, Any]] = [tomllib.loads(block)]
        while tables:
            for name, value in tables.pop().items():
                inner = value if isinstance(value, list) else [value]
                if inner and all(isinstance(table, dict) for table in inner):
                    tables += inner
                else:
                    yield name, value


@pytest.mark.parametrize("page", [page for page in GUIDES if page.name not in NO_LISTS], ids=name_of)
def test_options_take_the_values_that_the_documents_give_them(page):
    options = known_options()
    refused = [
        (name, value)
        for name, value in assignments(page)
        if name in options
        and value not in OF_OTHERS.get(name, ())
        and not any(accepts(option, value) for option in options[name])
    ]
    assert not refused


def test_names_in_the_guides_are_names_in_the_code():
    """Options, keys and flags; a renamed one that a sentence still mentions fails here."""
    kinds = (".py", ".toml", ".js", ".sh", ".bat")
    folders = ("library", "kohya_gui", "sd-scripts", "presets", "benchmarks")
    files = [path for folder in folders for path in (source.ROOT / folder).rglob("*") if path.suffix in kinds]
    files += [source.ROOT / "setup.sh", source.ROOT / "setup.bat"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files if "vendor" not in path.parts)
    words = {*re.findall(r"\w+", text), *re.findall(r"--[\w-]+", text)}
    unknown = set()
    for page in (page for page in GUIDES if page.name not in NO_LISTS):
        for span in spans(page):
            names = [span] if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", span) else re.findall(r"(?<!\S)--[\w-]+", span)
            unknown |= {(name_of(page), name) for name in names if name not in words and name[2:] not in words}
    assert {(page, name) for page, name in unknown if name not in OTHERS} == set()


def test_files_that_the_documents_name_exist():
    """Paths of this repository, also those below library/ and kohya_gui/, where most of the code is."""
    gone = set()
    for page in PAGES:
        if page.parent.name == "decisions":
            continue
        for name in (span for span in spans(page) if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|js|toml|md|sh)", span)):
            places = [source.ROOT, source.ROOT / "library", source.ROOT / "kohya_gui", page.parent]
            if name.startswith("finetune/"):  # of sd-scripts
                places.append(source.ROOT / "sd-scripts")
            if not any((place / name).exists() for place in places):
                gone.add((name_of(page), name))
    assert not gone


def test_architecture_describes_every_package():
    text = (DOCS / "dev" / "architecture.md").read_text(encoding="utf-8")
    described = {
        name for names in re.findall(r"^- \*\*([\w, ]+)\*\*", text, re.MULTILINE) for name in names.split(", ")
    }
    packages = {path.parent.name for path in (source.ROOT / "library").glob("*/__init__.py")}
    assert packages == described - {"kohya_gui"}


@dataclasses.dataclass
class Smallest:
    """The least GPU memory that has a preset, by model."""

    lora: dict[str, int]
    finetune: dict[str, int]


def smallest_in_presets() -> Smallest:
    found = Smallest({}, {})
    for path in (source.ROOT / "presets").glob("*/*gb.toml"):
        title = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ").partition(" on ")[0]
        model, _, kind = title.rpartition(" ")
        if kind in ("LoRA", "fine-tune"):
            table = found.lora if kind == "LoRA" else found.finetune
            size = int(path.stem.rpartition("-")[2].removesuffix("gb"))
            table[model] = min(size, table.get(model, size))
    return found


def test_the_first_line_of_a_preset_has_its_newest_figures():
    """The page shows this line; the tables of the documents are made from the same measurements."""
    newest: dict[str, str] = {}
    for measurement in figure.load_measurements():
        gpu = measurement["machine"]["gpu"].split()[1]
        for row in (row for row in measurement["rows"] if row.get("preset")):
            newest.setdefault(row["preset"], f"{row['s_it']:.2f} s per step and {row['gpu_gib']:.1f} GiB on an {gpu}.")
    lines = {
        f"{path.parent.name}/{path.stem}": path.read_text(encoding="utf-8").splitlines()[0]
        for path in (source.ROOT / "presets").glob("*/*.toml")
        if path.parent.name != "recipes"
    }
    assert {name: (line, newest[name]) for name, line in lines.items() if newest.get(name, "") not in line} == {}


def test_the_table_by_memory_is_that_of_the_presets():
    text = (DOCS / "choose-a-model.md").read_text(encoding="utf-8")
    section = text.partition("## What fits your GPU\n")[2].partition("\n## ")[0]
    shown = Smallest({}, {})
    for size, lora, finetune in re.findall(r"^\| (\d+) GB \| ?(.*?) ?\| ?(.*?) ?\|$", section, re.MULTILINE):
        shown.lora |= {model: int(size) for model in lora.split(", ") if model}
        shown.finetune |= {model: int(size) for model in finetune.split(", ") if model}
    assert shown == smallest_in_presets()
