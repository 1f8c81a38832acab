"""What the documents say is so: their configs build, their links lead somewhere, their commands exist."""

import re
import tomllib

import pytest

from library.cli import main
from library.config.building import build, missing
from library.config.schema import flat
from library.families import config_class
from tests import source

PAGES = [source.ROOT / "README.md", source.ROOT / "CONTRIBUTING.md", *sorted((source.ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (source.ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    gone = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not gone


def test_the_config_in_the_readme_is_complete():
    (text,) = blocks("toml")
    config = build(config_class("flux_train_network"), flat(tomllib.loads(text)), "README.md")
    assert missing(config) == []


def test_the_commands_in_the_readme_exist():
    shown = "\n".join([*blocks("bash"), *blocks("bat")])
    known = (source.ROOT / "setup.sh").read_text(encoding="utf-8")
    assert set(re.findall(r"^kohya (\w+)", shown, re.MULTILINE)) <= set(main.COMMANDS)
    for command in re.findall(r"setup\.sh (\w+)", (source.ROOT / "README.md").read_text(encoding="utf-8")):
        assert re.search(rf"^\s+[\w |]*\b{command}\b[\w |-]*\)", known, re.MULTILINE), command


def test_the_readme_names_every_script():
    text = (source.ROOT / "README.md").read_text(encoding="utf-8")
    assert [one.stem for one in (source.ROOT / "sd-scripts").glob("*.py") if f"`{one.stem}`" not in text] == []


def test_each_decision_is_found_from_the_line_that_it_explains_and_leads_to_it():
    """Dated files, named in a comment beside the code, which they name in turn; and all in the list."""
    folder = source.ROOT / "docs" / "decisions"
    tracked = (
        "library/**/*.py",
        "kohya_gui/**/*.py",
        "benchmarks/*.py",
        "tests/**/*.py",
        "presets/*/*.toml",
        "*.toml",
        "setup.sh",
    )
    named: dict[str, set[str]] = {}
    for path in (path for pattern in tracked for path in source.ROOT.glob(pattern)):
        for name in re.findall(r"# Why: docs/decisions/(2\S+)", path.read_text(encoding="utf-8")):
            named.setdefault(name, set()).add(path.relative_to(source.ROOT).as_posix())
    decisions = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("2*.md")}
    assert decisions.keys() == named.keys()
    listed = (folder / "README.md").read_text(encoding="utf-8")
    for name, text in decisions.items():
        code = re.search(r"Date: 20\d\d-\d\d-\d\d\. Status: .*\. Code: `(.+)`\.\n", text)
        assert code and code[1] in named[name] and f"({name})" in listed, name
