"""Settings in the folder of a model: anybody can have written them, so none of them stops or misleads a training."""

import ast
import json
import os
from pathlib import Path

import pytest

import library
from library.config.outside_files import TOKENIZER
from library.config.problems import ConfigError
from library.families import recognition
from library.families.flux_2 import checkpoint as flux_2
from library.families.qwen_image import checkpoint as qwen_image
from library.families.shared import tokenizers
from library.families.zimage import checkpoint as zimage

HOSTILE = {
    "deep": b"[" * 100_000,
    "deep tables": b'{"a":' * 60 + b"1" + b"}" * 60,
    "a long number": b'{"shift": ' + b"9" * 10_000 + b"}",
    "a list": b"[1]",
    "no text": b"\xff\xfe\x00\xd8",
    "a key twice": b'{"shift": 3.0, "shift": 3.0}',
    "large": b'{"model": {"type": "Unigram"}, "a": "' + b" " * TOKENIZER + b'"}',
}
READERS = [
    ("model_index.json", recognition.index_of, {}),
    ("model_index.json", flux_2.calls_itself_distilled, False),
    ("scheduler/scheduler_config.json", zimage.calls_itself_turbo, False),
    ("transformer/config.json", qwen_image.has_still_references, False),
    ("tokenizer.json", lambda folder: tokenizers.has_tokenizer(folder, "Unigram"), False),
    ("tokenizer.json", lambda folder: tokenizers.has_tokenizer(folder, "chat BPE"), False),
]


def write(file, content):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)


@pytest.mark.parametrize("kind", [*HOSTILE, "a pipe"])
@pytest.mark.parametrize(("name", "read", "usual"), READERS)
def test_settings_that_cannot_be_meant_say_nothing(name, read, usual, kind, tmp_path):
    folder = tmp_path / "a model"
    write(folder / "transformer" / "diffusion_pytorch_model.safetensors", b"")
    write(folder / "model_index.json", b'{"_class_name": "Pipeline"}')
    (folder / name).unlink(missing_ok=True)
    if kind != "a pipe":
        write(folder / name, HOSTILE[kind])
    elif hasattr(os, "mkfifo"):
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)  # nobody writes into it
    assert read(folder) == usual


def test_settings_that_are_in_order_are_read(tmp_path):
    write(tmp_path / "transformer" / "config.json", b'{"zero_cond_t": true}')
    write(tmp_path / "model_index.json", b'{"_class_name": "Pipeline", "is_distilled": true}')
    write(tmp_path / "scheduler" / "scheduler_config.json", json.dumps({"shift": zimage.TURBO_SHIFT}).encode())
    write(tmp_path / "tokenizer.json", b'{"model": {"type": "Unigram"}}')
    assert recognition.index_of(tmp_path)["_class_name"] == "Pipeline"
    assert flux_2.calls_itself_distilled(tmp_path) and zimage.calls_itself_turbo(tmp_path)
    assert qwen_image.has_still_references(tmp_path) and tokenizers.has_tokenizer(tmp_path, "Unigram")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"])
def test_a_file_of_a_tokenizer_that_is_no_such_file_is_named_before_it_is_opened(name, tmp_path):
    with (tmp_path / name).open("wb") as file:
        file.truncate(TOKENIZER + 1)
    with pytest.raises(ConfigError, match=rf"{name} has .* bytes, and at most .* are read"):
        tokenizers.load_tokenizer(tmp_path, tokenizers.CLIP_L)


def test_no_family_reads_json_without_limits():
    """They take the door for files from outside, library/config/outside_files.py."""
    places = []
    for path in (Path(library.__file__).parent / "families").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("json.load", "json.loads"):
                places.append(f"{path}:{node.lineno}")
    assert not places
