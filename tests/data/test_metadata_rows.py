"""Lists of images as the Hugging Face Hub has them: metadata.jsonl and metadata.csv, with file_name and text."""

import json
import os

import pytest

from library import data
from library.config.problems import ConfigError
from library.data import metadata
from tests.data import make

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
    first, second = metadata.read_metadata_file(tmp_path / name, None)
    assert (first.path, first.caption) == (str(tmp_path / "a/1.png"), "a cat, sitting")
    assert (second.path, second.caption) == (str(tmp_path / "2.png"), ROWS[1]["text"])
    assert metadata.read_metadata_file(tmp_path / name, "images")[1].path == os.path.join("images", "2.png")


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("m.csv", "picture,text\n1.png,a cat", "its first line must name the columns"),
        ("m.csv", "file_name,text\n,a cat", "line 2"),
        ("m.csv", 'file_name,text\n"1.png,a cat', "is not valid CSV"),
        ("m.jsonl", '{"file_name": 3}', "line 1"),
        ("m.jsonl", "[1]", "line 1"),
        ("m.jsonl", '{"file_name": "1.png", "text": "a"}\n{"file_name": "2.png"', "m.jsonl, line 2, is not valid JSON"),
        ("m.jsonl", '{"file_name": "1.png", "tags": {"a": 1}}', "line 1: its tags must be text"),
        ("m.jsonl", '{"file_name": "1.png", "tags": ["a", null]}', "line 1: its tags must be text"),
        ("m.csv", "file_name,text,text\n1.png,a cat,a dog", "its first line names text twice"),
    ],
)
def test_other_rows_are_named(tmp_path, name, text, words):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        metadata.read_metadata_file(tmp_path / name, None)


def test_every_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"file_name": "1.png"\n\n{"file_name": "2.png", "text": "a"},\n')
    with pytest.raises(ConfigError) as e:
        metadata.read_metadata_file(tmp_path / "m.jsonl", None)
    assert ["line 1," in str(e.value.problems[0]), "line 3," in str(e.value.problems[1])] == [True, True]


def test_blanks_after_commas_are_not_part_of_names_and_captions(tmp_path):
    (tmp_path / "m.csv").write_text('file_name, text\n1.png, "a cat, sitting"\n')
    (row,) = metadata.read_metadata_file(tmp_path / "m.csv", None)
    assert row.caption == "a cat, sitting"


def test_an_image_that_is_listed_twice_is_named(tmp_path):
    image = make.picture(tmp_path / "1.png")
    rows = [{"file_name": "1.png", "text": words} for words in ("a cat", "a dog")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = make.config(tmp_path, in_json=str(tmp_path / "metadata.jsonl"))
    (said,) = (warning for warning in data.check_data(config, 32).warnings if "more than once" in str(warning))
    assert str(image) in str(said) and len(data.scan(config).items) == 2


def test_names_without_ending_are_those_of_images(tmp_path):
    """As merge_captions_to_metadata.py of sd-scripts writes them."""
    for name in ("a.png", "b.1.webp"):
        make.picture(tmp_path / "images" / name)
    about = {"a": {"caption": "a cat"}, "b.1": {"tags": "a dog"}}
    (tmp_path / "meta.json").write_text(json.dumps(about))
    config = make.config(tmp_path / "images", "fine_tune", in_json=str(tmp_path / "meta.json"))
    found = {os.path.basename(item.path): item.caption for item in data.scan(config).items}
    assert found == {"a.png": "a cat", "b.1.webp": "a dog"}
    (tmp_path / "meta.json").write_text(json.dumps(about | {"c": {"caption": "a bird"}}))
    assert any("not there" in str(problem) and "c" in str(problem) for problem in data.check_data(config, 32).problems)
