"""Packages that are installed, as if they were not: some machines have no wheel of one, or one that does not load."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from library.recipes import preset_files


def hide(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """These modules are found nowhere; whatever was loaded of them before is as if it were not."""
    find = importlib.util.find_spec

    def found(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in modules else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", found)


def spoil(monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, error: str) -> None:
    """Put a package of this name before the real one, which raises `error` (an expression) as it is imported."""
    import sys

    place = folder / "spoilt" / module
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"raise {error}\n", encoding="utf-8")
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(place.parent))


def eight_bit(folder: Path, family: str = "sdxl") -> preset_files.Preset:
    """A preset that trains with AdamW8bit, of a package that can be hidden."""
    path = folder / family / "lora-12gb.toml"
    path.parent.mkdir(parents=True)
    text = (preset_files.PRESETS_FOLDER / family / path.name).read_text(encoding="utf-8")
    path.write_text(text.replace('"AdamW"', '"AdamW8bit"'), encoding="utf-8")
    return preset_files.Preset(path, text.partition("\n")[0].removeprefix("# "))
