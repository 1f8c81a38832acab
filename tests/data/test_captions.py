"""Captions against sd-scripts' words, every option by itself, and what must hold for all of them."""

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from library.config.dataset import SubsetConfig, load_datasets
from library.data.captions import Moment, caption_lines, encoded_once, first_line, process, with_tags
from tests.data import make

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/sd_scripts_vectors.json").read_text(encoding="utf-8"))


START = Moment()


def made(caption, seed=1234, moment=START, **options):
    return process(caption, SubsetConfig(**options), Random(seed), moment)


@pytest.mark.parametrize(("caption", "options", "expected"), GOLDEN["captions_seed1234"])
def test_words_are_those_of_sd_scripts(caption, options, expected):
    assert made(caption, **options) == expected


@pytest.mark.parametrize(
    ("caption", "options", "expected"),
    [
        ("a cat", {"caption_prefix": "photo of", "caption_suffix": "by me"}, "photo of a cat by me"),
        ("a cat\nother", {}, "a cat"),
        ("a ;; b", {"secondary_separator": ";;"}, "a , b"),
        ("{{x}} and {y}", {"enable_wildcard": True}, "{x} and y"),
        ("a|b ||| c", {"keep_tokens_separator": "|||"}, "a|b, c"),
        ("a|b, c", {"keep_tokens_separator": "|||"}, "a|b, c"),
        ("a cat", {"caption_prefix": "zorb, "}, "zorb, a cat"),
        ("", {"caption_prefix": "zorb, "}, "zorb,"),
        ("[trigger] on a mat", {"trigger_phrase": "zorb"}, "zorb on a mat"),
        ("[trigger] on a mat", {"trigger_phrase": "zorb", "caption_prefix": "zorb, "}, "zorb on a mat"),
        ("a mat", {"trigger_phrase": "zorb", "caption_prefix": "zorb, "}, "zorb, a mat"),
        ("[trigger] on a mat", {"caption_prefix": "photo of"}, "photo of [trigger] on a mat"),
        ("a, , b", {"shuffle_caption": True, "keep_tokens": 3}, "a, , b"),
        ("a, ||| ||| , z", {"shuffle_caption": True, "keep_tokens_separator": "|||"}, "a, z"),
        ("a;b", {"shuffle_caption": True, "keep_tokens": 2, "caption_separator": ";"}, "a; b"),
        ("a b", {"shuffle_caption": True, "keep_tokens": 2, "caption_separator": " "}, "a b"),
        ("a, b, c", {"caption_tag_dropout_rate": 1.0, "keep_tokens": 1}, "a"),
        ("", {"shuffle_caption": True}, ""),
    ],
)
def test_one_option_at_a_time(caption, options, expected):
    assert made(caption, **options) == expected


@pytest.mark.parametrize(
    "varied", [{"shuffle_caption": True}, {"caption_tag_dropout_rate": 1e-9}, {"token_warmup_step": 1}]
)
def test_tags_keep_the_separator_that_they_are_written_with(varied):
    options = {"caption_separator": ".", "keep_tokens": 1, **varied}
    caption = made("zorb. toy, small. red", moment=Moment(step=5), **options)
    assert caption.startswith("zorb. ") and sorted(caption.split(". ")) == ["red", "toy, small", "zorb"]


def test_an_empty_separator_is_a_comma():
    config = make.config(caption_separator="", shuffle_caption=True, keep_tokens=9)
    assert process("a,b", load_datasets(config)[0].template, Random(1)) == "a, b"


def test_a_caption_that_is_encoded_once_holds_no_markup_and_is_always_the_same():
    options = SubsetConfig(
        keep_tokens_separator="|||", secondary_separator=";;;", enable_wildcard=True, caption_prefix="zorb, "
    )
    captions = {encoded_once("a {red|blue} cat ||| toy;;;small", options, f"{i}.png") for i in range(40)}
    assert captions == {"zorb, a red cat, toy,small", "zorb, a blue cat, toy,small"}
    assert len({encoded_once("a {red|blue} cat\na dog", options, "1.png") for _ in range(40)}) == 1


def test_wildcards_draw_a_line_and_alternatives():
    captions = {made("a {red|blue} cat\na dog", seed, enable_wildcard=True) for seed in range(40)}
    assert captions == {"a red cat", "a blue cat", "a dog"}


def test_fixed_parts_stay_where_they_are():
    options = {"shuffle_caption": True, "keep_tokens_separator": "|||", "caption_tag_dropout_rate": 0.3}
    for seed in range(30):
        tags = made("one, two ||| c, d, e, f ||| last", seed, **options).split(", ")
        assert tags[:2] == ["one", "two"] and tags[-1] == "last" and set(tags[2:-1]) <= set("cdef")


def test_dropout_by_rate_and_by_epoch():
    dropped = sum(made("a cat", seed, caption_dropout_rate=0.25) == "" for seed in range(2000))
    assert 400 < dropped < 600
    every_third = [made("a", moment=Moment(epoch=e), caption_dropout_every_n_epochs=3) for e in range(1, 8)]
    assert every_third == ["a", "a", "", "a", "a", "", "a"]


@pytest.mark.parametrize(("warmup", "total"), [(10, 0), (0.1, 100)])
def test_tags_are_added_step_by_step(warmup, total):
    counts = [
        len(made("a, b, c, d, e", moment=Moment(step, 1, total), token_warmup_step=warmup).split(", "))
        for step in (0, 5, 9, 10, 50)
    ]
    assert counts == [1, 3, 4, 5, 5]


tags = st.lists(st.text("abcdefgh ", min_size=1).map(str.strip).filter(bool), min_size=1, max_size=12)


@given(tags, st.integers(0, 5), st.integers())
def test_shuffling_loses_and_invents_nothing(words, keep, seed):
    caption = made(",".join(words), seed, shuffle_caption=True, keep_tokens=keep).split(", ")
    assert sorted(caption) == sorted(words) and caption[:keep] == words[:keep]


@given(tags, st.integers())
def test_the_same_seed_says_the_same(words, seed):
    options = {"shuffle_caption": True, "caption_tag_dropout_rate": 0.5, "caption_dropout_rate": 0.2}
    assert made(", ".join(words), seed, **options) == made(", ".join(words), seed, **options)


@given(st.text())
def test_untouched_captions_stay_as_they_are(text):
    assert made(text) == text.split("\n")[0]


def test_a_caption_is_the_first_line_that_is_not_blank():
    assert first_line("\n  a cat \nmore\n") == "a cat" and first_line("") == ""
    assert caption_lines(" a cat \n\n a dog\n") == "a cat\na dog"


@pytest.mark.parametrize(
    ("caption", "words", "wild", "expected"),
    [
        ("a cat", "x, y", False, "a cat,x, y"),
        ("", "x, y", False, "x, y"),
        ("a cat", "", False, "a cat"),
        ("one\n\ntwo", "x\ny", True, "one,x,y\ntwo,x,y"),
        ("", "x", True, "x"),
    ],
)
def test_captions_and_tags_of_metadata(caption, words, wild, expected):
    assert with_tags(caption, words, SubsetConfig(enable_wildcard=wild)) == expected


@pytest.mark.parametrize("wildcard", [True, False])
def test_whichever_line_is_trained_has_prefix_and_suffix(wildcard):
    options = SubsetConfig(enable_wildcard=wildcard, caption_prefix="zorb", caption_suffix="photo")
    trained = {process("a cat\na dog", options, Random(seed)) for seed in range(20)}
    trained |= {encoded_once("a cat\na dog", options, f"{number}.png") for number in range(20)}
    assert trained == {"zorb a cat photo", *(["zorb a dog photo"] * wildcard)}
