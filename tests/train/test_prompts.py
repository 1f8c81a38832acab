"""Prompt files: lines with options, TOML, JSON, and what is wrong with them."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from library.config.schema import ConfigError
from library.train import prompts

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "sd_scripts_vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("line", "expected"), VECTORS["prompt_lines"])
def test_lines_read_as_upstream_reads_them(line, expected):
    read = asdict(prompts.parse_line(line))
    expected = {k: v for k, v in expected.items() if k != "controlnet_image"}  # another model's option
    assert {k: v for k, v in read.items() if v is not None} == expected


def write(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_comments_and_blank_lines_are_skipped(tmp_path):
    path = write(tmp_path, "p.txt", "\ufeff# first\n\na cat --w 128\n  # no\nb dog\n")
    assert [p.prompt for p in prompts.read(path)] == ["a cat", "b dog"]


def test_toml_shares_what_stands_in_prompt(tmp_path):
    path = write(
        tmp_path,
        "p.toml",
        '[prompt]\nwidth = 640\n[[prompt.subset]]\nprompt = "a"\n[[prompt.subset]]\nprompt = "b"\nseed = 3\n',
    )
    read = prompts.read(path)
    assert [(p.prompt, p.width, p.seed) for p in read] == [("a", 640, None), ("b", 640, 3)]


def test_json_takes_texts_and_objects(tmp_path):
    path = write(tmp_path, "p.json", json.dumps(["a cat --d 4", {"prompt": "b", "scale": 2}]))
    assert [(p.prompt, p.seed, p.scale) for p in prompts.read(path)] == [("a cat", 4, None), ("b", None, 2.0)]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "a --s 0\nb --w many\n", ["line 1", "sample_steps", "line 2", "width"]),
        ("p.txt", "\n# nothing\n", ["no prompt"]),
        ("p.json", "{", ["JSON"]),
        ("p.json", '[{"prompt": "a", "widht": 3}]', ["widht"]),
        ("p.toml", "[prompt]\nwidth=1\n[[prompt.subset]]\nwidth=2\nprompt='a'\n", ["width", "subset 1"]),
    ],
)
def test_every_mistake_is_named_at_once(tmp_path, name, text, words):
    with pytest.raises(ConfigError) as caught:
        prompts.read(write(tmp_path, name, text))
    for word in words:
        assert word in str(caught.value)
