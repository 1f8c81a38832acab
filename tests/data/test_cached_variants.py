"""Variants of captions, and the empty caption, that are encoded once: on disk and in memory, and drawn by the seed."""

import os
from collections import Counter

import pytest

from library import data
from library.check import report
from library.curation.changes import companions
from library.data import encoding
from library.data.loading import Batches
from tests.data import make

UNET = {"network_train_unet_only": True}
DISK = {"cache_text_encoder_outputs_to_disk": True, **UNET}
MEMORY = {"cache_text_encoder_outputs": True, **UNET}
VARIED = {"shuffle_caption": True, "keep_tokens": 1, "cached_caption_variants": 4}


@pytest.fixture
def folder(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64),) * 3)
    for number in range(3):
        (folder / f"{number:02d}.txt").write_text(f"cat {number}, sitting, on a mat, at night, by rain")
    return folder


def encoded(config, family=None, ranks=1):
    """Images with their encoded captions, and the captions that were read for that."""
    family = family or make.Family()
    for rank in range(ranks):
        images = data.scan(config)
        encoding.encode_missing_caches(images, family, make.parts(), config, make.Run(rank, ranks), lambda *told: None)
    return images, family.read


def drawn(images, config, epochs=40, seed=3):
    """What each step trains with: the path and the caption of the image, and its outputs."""
    batches = Batches(images, config, seed)
    for epoch in range(1, epochs + 1):
        for draw in batches.draws(epoch):
            batch = batches.make(draw)
            yield from zip(batch.paths, batch.captions, batch.text["hidden"].tolist(), strict=True)


def outputs(words):
    return [[float(len(word))] for word in (words.split() + ["", "", ""])[:3]]


@pytest.mark.parametrize("cache", [DISK, MEMORY], ids=["disk", "memory"])
def test_each_step_draws_one_of_the_variants_with_its_own_outputs(folder, cache):
    config = make.config(folder.parent, **cache, **VARIED)
    images, read = encoded(config)
    assert Counter(words.split(",")[0] for words in read) == {f"cat {number}": 4 for number in range(3)}
    assert len(set(read)) == 12 and all(set(words.split(", ")) for words in read)
    assert {images.items[0].encoded_caption} < set(read)
    drawn_items = list(drawn(images, config))
    assert {words for _, words, _ in drawn_items} == set(read)
    assert all(hidden == outputs(words) for _, words, hidden in drawn_items)
    assert drawn_items == list(drawn(images, config)) != list(drawn(images, config, seed=4))


@pytest.mark.parametrize("cache", [DISK, MEMORY], ids=["disk", "memory"])
@pytest.mark.parametrize("variants", [1, 3])
def test_the_empty_caption_is_drawn_by_its_rate(folder, cache, variants):
    values = {"caption_dropout_rate": 0.25, "shuffle_caption": variants > 1, "cached_caption_variants": variants}
    config = make.config(folder.parent, **cache, **values)
    images, read = encoded(config)
    assert read.count("") == 1 and len(read) == 3 * variants + 1
    drawn_variants = list(drawn(images, config, epochs=200))
    share = sum(not words for _, words, _ in drawn_variants) / len(drawn_variants)
    assert 0.2 < share < 0.3 and all(hidden == outputs(words) for _, words, hidden in drawn_variants)
    every = make.config(
        folder.parent, **cache, **values | {"caption_dropout_rate": 0, "caption_dropout_every_n_epochs": 2}
    )
    images, _ = encoded(every)
    batches = Batches(images, every, 0)
    assert [{*batches.make(draw).captions} == {""} for epoch in (1, 2, 3) for draw in batches.draws(epoch)][::3] == [
        False,
        True,
        False,
    ]


def test_files_of_variants_are_found_again_and_old_ones_stay(folder):
    once = make.config(folder.parent, **DISK)
    encoded(once)
    before = {path.name: path.read_bytes() for path in folder.glob("*_te_outputs*")}
    assert len(before) == 3
    varied = make.config(folder.parent, **DISK, **VARIED, caption_dropout_rate=0.1)
    assert len(encoded(varied)[1]) == 3 * 3 + 1  # the first variant is what was there
    names = {path.name for path in folder.glob("*_te_outputs*")}
    assert names == {f"{n:02d}_te_outputs{v}.npz" for n in range(3) for v in ("", "_v1", "_v2", "_v3")} | {
        "empty-caption_te_outputs_v0.npz"
    }
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert encoded(varied)[1] == [] and encoded(once)[1] == []
    assert encoded(make.config(folder.parent, **DISK, **VARIED, seed=99))[1] == []  # no variant depends on the seed
    more = make.config(folder.parent, **DISK, **VARIED | {"cached_caption_variants": 6})
    assert 0 < len(encoded(more)[1]) <= 6  # of few tags some orders come twice, and are encoded once
    other = make.config(folder.parent, **DISK, **VARIED | {"keep_tokens": 2})
    read = encoded(other)[1]
    assert len(read) > 3 and all(words.split(", ")[1] == "sitting" for words in read)
    (folder / "00.txt").write_text("a dog, sitting")
    os.utime(folder / "00.txt", (1, 1))
    assert encoded(other)[1] == ["a dog, sitting"]  # two tags that are kept have one order
    mine = {path.name for path in companions(folder / "01.png", sorted(os.listdir(folder)))}
    assert {"01_te_outputs.npz", "01_te_outputs_v3.npz"} < mine and "empty-caption_te_outputs_v0.npz" not in mine


def test_variants_that_are_equal_are_one(folder):
    (folder / "00.txt").write_text("cat 0")
    images, read = encoded(make.config(folder.parent, **DISK, **VARIED))
    assert read.count("cat 0") == 1 and not (folder / "00_te_outputs_v1.npz").exists()
    config = make.config(folder.parent, **MEMORY, cached_caption_variants=50, enable_wildcard=True)
    (folder / "00.txt").write_text("a {red|blue} cat")
    images, read = encoded(config)
    assert sorted(words for words in read if "{" not in words and words.startswith("a ")) == ["a blue cat", "a red cat"]
    assert {words for path, words, _ in drawn(images, config) if path.endswith("00.png")} == {"a blue cat", "a red cat"}


def test_tags_that_are_dropped_leave_variants_and_at_times_nothing(folder):
    config = make.config(folder.parent, **MEMORY, caption_tag_dropout_rate=0.9, cached_caption_variants=30)
    images, read = encoded(config)
    assert "" in read and all(hidden == outputs(words) for _, words, hidden in drawn(images, config))


def test_validation_always_measures_with_the_caption_as_written(folder):
    for number in range(3, 8):
        make.picture(folder / f"{number:02d}.png", seed=number).with_suffix(".txt").write_text(f"dog {number}, a, b, c")
    config = make.config(folder.parent, **DISK, **VARIED, caption_dropout_rate=0.5, validation_split=0.25)
    images, read = encoded(config)
    held = images.validation
    assert len(held) == 2 and not any(image.variant(1) in read for image in held.items)
    assert set(read) == {words for image in images.items for words in image.encoded_captions(4)} | {
        image.encoded_caption for image in held.items
    }
    assert {words for _, words, _ in drawn(held, config)} == {image.encoded_caption for image in held.items}


def test_several_processes_encode_all_of_it_once(folder):
    config = make.config(folder.parent, **DISK, **VARIED, caption_dropout_rate=0.5)
    images, read = encoded(config, ranks=2)
    assert len(read) == len(set(read)) == 13
    assert all(hidden == outputs(words) for _, words, hidden in drawn(images, config))


def test_a_family_with_a_rule_for_no_caption_keeps_it(folder):
    from dataclasses import replace

    family = make.Family()
    family.text_cache = replace(
        family.text_cache, without_caption=lambda arrays: {k: v * 0 - 7 for k, v in arrays.items()}
    )
    config = make.config(folder.parent, **DISK, **VARIED, caption_dropout_rate=0.5)
    images, read = encoded(config, family)
    assert "" not in read and len(read) == 12
    drawn_variants = {words: hidden for _, words, hidden in drawn(images, config)}
    assert drawn_variants.pop("") == [[-7.0]] * 3 and all(
        hidden == outputs(words) for words, hidden in drawn_variants.items()
    )


def test_check_says_how_many_encodings_it_makes(folder, monkeypatch):
    def said(**values):
        config = make.config(folder.parent, **MEMORY, **values)
        texts = [str(finding.text) for finding in report._check_caches(config, data.scan(config))]
        return next(text for text in texts if "captions are encoded once" in text)

    assert said() == "captions are encoded once: 3 encodings"
    assert said(caption_dropout_rate=0.1) == "captions are encoded once: 4 encodings, with that of the empty caption"
    assert said(**VARIED) == "captions are encoded once: 12 encodings, up to 4 variants of each caption"
    monkeypatch.setattr(report, "MANY", 10)
    assert said(**VARIED) == "captions are encoded once: up to 12 encodings, 4 variants of each caption"


def test_what_varies_nothing_or_cannot_be_encoded_once_is_reported(folder):
    def remarks(**values):
        from library.config.ineffective import ineffective_options

        return ineffective_options(make.config(folder.parent, **values))

    assert "cache_text_encoder_outputs is off" in str(remarks(cached_caption_variants=3)["cached_caption_variants"])
    assert "enable_wildcard are off" in str(remarks(cached_caption_variants=3, **MEMORY)["cached_caption_variants"])
    assert "cached_caption_variants" not in remarks(**VARIED, **MEMORY)
    with pytest.raises(Exception, match="set cached_caption_variants above 1") as refused:
        make.config(folder.parent, **MEMORY, shuffle_caption=True)
    assert refused.value.problems[0].fix == {"cached_caption_variants": 4}
    with pytest.raises(Exception, match="token_warmup_step cannot be used with cache_text_encoder_outputs: switch"):
        make.config(folder.parent, **MEMORY, **VARIED, token_warmup_step=5)
