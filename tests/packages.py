"""Make installed packages look missing or broken, as on machines without a wheel, or with one that fails to load."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from library.recipes import preset_files


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Let `importlib.util.find_spec` find none of these modules."""
    find = importlib.util.find_spec

    def find_unless_hidden(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in modules else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_unless_hidden)


def spoil(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, error: str) -> None:
    """Shadow a package with one whose import raises `error`, a Python expression."""
    import sys

    place = folder / "spoilt" / module
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"raise {error}\n", encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(place.parent))


def eight_bit(folder: Path, family: str = "sdxl") -> preset_files.Preset:
    """A preset with AdamW8bit, whose package a test can hide."""
    path = folder / family / "lora-12gb.toml"
    path.parent.mkdir(parents=True)
    text = (preset_files.PRESETS_FOLDER / family / path.name).read_text(encoding="utf-8")
    path.write_text(text.replace('"AdamW"', '"AdamW8bit"'), encoding="utf-8")
    return preset_files.Preset(path, text.partition("\n")[0].removeprefix("# "))
