"""What the documents say is so: their configs build, their links lead somewhere, their commands exist."""

import re
import tomllib

import pytest

from library.cli import main
from library.config.schema import build, flat, missing
from library.families import config_class
from tests import source

PAGES = [source.ROOT / "README.md", source.ROOT / "CONTRIBUTING.md", *sorted((source.ROOT / "docs").glob("*.md"))]


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
