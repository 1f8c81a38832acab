"""A misspelt word of a LoRA file is named, and words that only happen to be alike are not."""

import json

import pytest
import torch
from safetensors.torch import save_file

from library.sampling import trigger_words
from library.sampling.prompts import Prompt

TAGS = {"2_zorb toy": {"zorb toy": 4, "red": 2, "night": 1}}


def file_with(path, **metadata):
    save_file({"a": torch.zeros(1)}, path, metadata=metadata or None)
    return path


@pytest.fixture
def tagged(tmp_path):
    return file_with(tmp_path / "zorb.safetensors", ss_tag_frequency=json.dumps(TAGS))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a zrob toy on a beach", ["zrob"]),
        ("a Zorbb, at night", []),  # holds the word, as a plural does
        ("a zorb toy", []),
        ("one zorb", []),
        ("a cat", []),
        ("zrob, zrob", ["zrob"]),
        ("a zor toy", []),  # too short to tell
        ("", []),
    ],
)
def test_a_word_that_is_nearly_that_of_the_file_is_named_once(tagged, text, written):
    said = [str(note) for note in trigger_words.misspelt([tagged, tagged], [Prompt(text)])]
    assert len(said) == len(written)
    assert all(
        f'"{word}" is none of' in note and 'did you mean "zorb"?' in note
        for word, note in zip(written, said, strict=True)
    )


@pytest.mark.parametrize(
    ("text", "written"),
    [("zorb emoji on a blue ground", []), ("a zrob on a blue ground", ["zrob"]), ("a blue backgruond", ["backgruond"])],
)
def test_a_rare_word_of_the_captions_is_no_misspelling_of_a_frequent_one(tmp_path, text, written):
    tags = {"2_zorb": {"zorb, background": 3, "zorb emoji on a white ground": 1}, "1_reg": {"a background": 2}}
    file = file_with(tmp_path / "a.safetensors", ss_tag_frequency=json.dumps(tags))
    said = [str(note) for note in trigger_words.misspelt([file], [Prompt(text)])]
    assert [word for word in written if any(f'"{word}"' in note for note in said)] == written
    assert bool(said) == bool(written)


def test_a_trigger_phrase_counts_before_the_captions(tmp_path):
    metadata = {"modelspec.trigger_phrase": "Blorf style", "ss_tag_frequency": json.dumps(TAGS)}
    assert trigger_words.words_of(file_with(tmp_path / "a.safetensors", **metadata)) == ["blorf", "style"]
    chinese = file_with(tmp_path / "c.safetensors", **{"modelspec.trigger_phrase": "蓝色娃娃"})
    assert not [*trigger_words.misspelt([chinese], [Prompt("一只蓝色娃娃在海边")])]


def test_tags_that_count_and_captions_that_are_sentences_name_nothing(tmp_path):
    tags = {"2_girls": {"1girl": 8, "a photo of a woman standing": 8}}
    file = file_with(tmp_path / "a.safetensors", ss_tag_frequency=json.dumps(tags))
    assert not [*trigger_words.misspelt([file], [Prompt("a girl stands beside two women")])]


def test_a_file_of_thousands_of_words_gives_a_few(tmp_path):
    """Comparing all of them with every prompt took minutes."""
    many = [f"word{number:05}" for number in range(5000)]
    phrase = file_with(tmp_path / "a.safetensors", **{"modelspec.trigger_phrase": " ".join(many)})
    tags = json.dumps({word: {word: 3} for word in many})
    for file in (phrase, file_with(tmp_path / "b.safetensors", ss_tag_frequency=tags)):
        assert trigger_words.words_of(file) == many[: trigger_words.MAX_WORDS]


@pytest.mark.parametrize(
    "tags", ["", "{", "[1]", "{}", '{"a": 3}', '{"a": {"zorb": "4"}}', '{"a": {"zorb": 1, "gnarl": 1}}', "[" * 9999]
)
def test_a_file_that_names_no_word_is_no_problem(tmp_path, tags):
    assert trigger_words.words_of(file_with(tmp_path / "a.safetensors", ss_tag_frequency=tags)) == []
    assert trigger_words.words_of(file_with(tmp_path / "b.safetensors")) == []
    (tmp_path / "c.safetensors").write_text("no header")
    assert trigger_words.words_of(tmp_path / "c.safetensors") == trigger_words.words_of(tmp_path / "d.pt") == []
