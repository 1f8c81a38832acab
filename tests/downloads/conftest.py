"""The hub on loopback, and models with the shapes of real ones that take no room on the disk."""

import json

import pytest
from huggingface_hub import constants

from tests import hub as stand_in

WIDTHS = {"BF16": 2}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    made, end = stand_in.serve()
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", made.address)
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield made
    end()


def header(shapes):
    """The beginning of a .safetensors file with tensors of these shapes, and how many bytes of them follow."""
    table, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        table[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def sparse(path, shapes):
    """A file with these shapes and no content."""
    start, rest = header(shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.write(start)
        out.truncate(len(start) + rest)
    return path


def small(seed=0, size=20_000):
    """A small sound file, as bytes."""
    start, rest = header({"weight": (size // 2,)})
    return start + bytes((i * 7 + seed) % 256 for i in range(rest))
