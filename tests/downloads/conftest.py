"""The hub on loopback, and sparse model files that have the shapes of real ones but take no disk space."""

import json

import pytest
from huggingface_hub import constants

from tests import hub as stand_in


@pytest.fixture
def hub(monkeypatch, tmp_path):
    stand_in_hub, end = stand_in.serve()
    monkeypatch.setattr(constants, "ENDPOINT", stand_in_hub.address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", stand_in_hub.address)
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield stand_in_hub
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
    start, num_bytes = header(shapes)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out:
        out.write(start)
        out.truncate(len(start) + num_bytes)
    return path


def small(seed=0, size=20_000):
    """A small sound file, as bytes."""
    start, num_bytes = header({"weight": (size // 2,)})
    return start + bytes((i * 7 + seed) % 256 for i in range(num_bytes))
