"""Lists of images as the Hugging Face Hub has them: metadata.jsonl and metadata.csv, with file_name and text."""

import json
import os

import pytest

from library.config.problems import ConfigError
from library.data import metadata

ROWS = [{"file_name": "a/1.png", "text": "a cat, sitting"}, {"file_name": "2.png", "text": 'a "big" dog\nat home'}]


def as_csv(rows):
    lines = ["file_name,text"]
    for row in rows:
        lines.append(",".join('"' + row[key].replace('"', '""') + '"' for key in ("file_name", "text")))
    return "\n".join(lines)


@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_file_names_lie_beside_the_file_and_texts_are_captions(tmp_path, name):
    text = "\n".join(map(json.dumps, ROWS)) if name.endswith("jsonl") else as_csv(ROWS)
    (tmp_path / name).write_text(text, encoding="utf-8")
    first, second = metadata.read(tmp_path / name, None)
    assert (first.path, first.caption) == (str(tmp_path / "a/1.png"), "a cat, sitting")
    assert (second.path, second.caption) == (str(tmp_path / "2.png"), ROWS[1]["text"])
    assert metadata.read(tmp_path / name, "images")[1].path == os.path.join("images", "2.png")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.csv", "image,text\n1.png,a cat", "line 2: it must have image_path, or file_name and text"),
        ("m.csv", "file_name,text\n,a cat", "line 2"),
        ("m.csv", 'file_name,text\n"1.png,a cat', "is not valid CSV"),
        ("m.jsonl", '{"file_name": 3}', "line 1"),
        ("m.jsonl", "[1]", "line 1"),
    ],
)
def test_other_rows_are_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        metadata.read(tmp_path / name, None)
