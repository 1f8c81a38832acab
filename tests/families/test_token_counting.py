"""Tokenizers that only count: the tokens of transformers' tokenizers, without transformers."""

import pytest

from library import families
from library.families.shared import token_counting, tokenizers
from library.files import write_atomic
from tests.training import LORAS, config_of

CAPTIONS = (
    "a red toy on a table",
    "",
    "Ünïcode, 日本語 and \U0001f600",
    "two\n lines,  (blanks:1.2) [and] marks",
    "<|endoftext|> <|im_start|>user</s> [INST]",
    "red " * 600,
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def stored(home):
    return [*(home / "cache" / "tokenizers").glob("*")]


def read_anew(family, monkeypatch):
    """The tokenizer that counts, which must not be loaded by transformers."""
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda *_: pytest.fail("loaded again"))
    return family.tokenizers_of_captions().to_count(family.caption_limit.encoder)


@pytest.mark.parametrize("script", LORAS)
def test_tokens_are_those_of_the_tokenizer_at_first_and_when_read_again(demo, script, home, monkeypatch):
    family = families.family_for(config_of(demo, script))
    places, encoder = family.tokenizers_of_captions(), family.caption_limit.encoder
    first, whole = places.to_count(encoder), places[encoder]
    assert len(stored(home)) == 1
    again = read_anew(family, monkeypatch)
    for caption in CAPTIONS:
        expected = whole(caption, add_special_tokens=False, truncation=False).input_ids
        assert first(caption).input_ids == again(caption).input_ids == expected
        assert family.caption_limit.count(again, caption) == family.caption_limit.count(whole, caption)


def test_none_is_loaded_to_see_whether_there_is_one(demo, monkeypatch):
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda *_: pytest.fail("loaded"))
    places = families.family_for(config_of(demo, "sdxl_train_network")).tokenizers_of_captions()
    assert "clip_l" in places and "t5xxl" not in places


@pytest.fixture
def loaded(demo, tmp_path, monkeypatch):
    """A copy of a tokenizer, a function that counts with it, and how often it was loaded."""
    family = families.family_for(config_of(demo, "sdxl_train_network"))
    original, _ = family.tokenizers_of_captions()._places["clip_l"]
    folder, times, real = tokenizers.copy_tokenizer(original, tmp_path / "own"), [], tokenizers.load_tokenizer
    monkeypatch.setattr(tokenizers, "load_tokenizer", lambda *given: times.append(given) or real(*given))

    def count():
        tokenizer = tokenizers.Tokenizers({"clip_l": (folder, tokenizers.CLIP_L)}).to_count("clip_l")
        return len(tokenizer("red", add_special_tokens=False, truncation=False).input_ids)

    return folder, count, times


def test_other_files_or_packages_are_loaded_again(loaded, home, monkeypatch):
    folder, count, times = loaded
    count(), count()
    assert len(times) == len(stored(home)) == 1
    write_atomic(folder / "merges.txt", "#version: 0.2\n")
    assert count() == 3 and len(times) == 2
    monkeypatch.setattr(token_counting.importlib.metadata, "version", lambda _: "0.0")
    assert count() == 3 and len(times) == len(stored(home)) == 3


def test_a_damaged_or_missing_store_only_takes_longer(loaded, home, monkeypatch):
    _, count, times = loaded
    before = count()
    (file,) = stored(home)
    whole = file.read_text(encoding="utf-8")
    # Of the others, which a disk may leave, each is a tokenizer that counts otherwise.
    damaged = ["{", "", whole.replace("</w>", ""), whole.replace('["f","l"],', "")]
    for text in damaged:
        assert text != whole
        file.write_text(text, encoding="utf-8")
        loaded_before = len(times)
        assert count() == before and len(times) == loaded_before + 1
    monkeypatch.setenv("KOHYA_HOME", str(file))  # a file, in which no folder can be made
    assert count() == before


def test_files_that_only_the_package_can_read_are_counted_without_a_store(loaded, home, monkeypatch):
    _, count, times = loaded
    before = count()
    (file,) = stored(home)
    file.unlink()

    def refuse(path):
        raise PermissionError(path)

    monkeypatch.setattr(type(home), "read_bytes", refuse)
    assert count() == before and len(times) == 2 and not stored(home)
