"""A step that reads fewer tokens of text: as if T5 had given no more, and with no graph more than before."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from library import families
from library.config.problems import ConfigError
from library.data import text_encoding
from library.train.step.loss import LossFunction
from tests.training import LORAS, config_of, problems_and_remarks, train, untouched

SCRIPT = "flux_train_network"
DISK = {"cache_latents_to_disk": True, "cache_text_encoder_outputs_to_disk": True}
SIDES = [(64, 64), (64, 80), (80, 64), (48, 96), (64, 96), (48, 80)]
WORDS = (5, 70, 12, 9, 130, 8)  # of their captions
BUCKETS = {"resolution": "80", "min_bucket_reso": 16, "bucket_reso_steps": 16, "bucket_no_upscale": True}


def described(folder, sizes, words):
    """Pictures, each with a caption of so many words."""
    place = folder / "1_zorb toy"
    place.mkdir(parents=True)
    for number, (size, count) in enumerate(zip(sizes, words, strict=True)):
        colour = np.random.default_rng(number).integers(0, 255, 3)
        Image.new("RGB", size, tuple(map(int, colour))).save(place / f"{number:02}.png")
        (place / f"{number:02}.txt").write_text("red " * count, encoding="utf-8")
    return folder


def described_as(path, caption):
    """What stands for an image where only its caption is read."""
    return SimpleNamespace(path=path, caption=caption, encoded_caption=caption)


@pytest.fixture
def run(demo, tmp_path):
    count = iter(range(100))

    def start(folder, script=SCRIPT, **values):
        options = {"t5xxl_max_token_length": 256, "output_dir": tmp_path / f"run{next(count)}", "max_train_steps": 3}
        return train(config_of(demo, script, train_data_dir=folder, **options | values))

    return start


@pytest.fixture
def read(monkeypatch):
    """The tokens of image and of text that each loss was made with, and whether gradients were on."""
    lengths, text_of = [], LossFunction.text

    def text(self, batch):
        text = text_of(self, batch)
        lengths.append((batch.shape[0] * batch.shape[1] // 4, text["t5_out"].shape[1], torch.is_grad_enabled()))
        assert text["t5_out"].shape[:2] == text["t5_attn_mask"].shape == text["txt_ids"].shape[:2]
        return text

    monkeypatch.setattr(LossFunction, "text", text)
    return lengths


@pytest.mark.parametrize("cached", [True, False])
def test_a_masked_run_gives_the_numbers_of_a_shorter_maximum(run, read, tmp_path, cached):
    folder = described(tmp_path / "set", [(64, 64)] * 3, (5, 30, 90))
    values = {"apply_t5_attn_mask": True, "cache_text_encoder_outputs": cached, "train_batch_size": 2}
    cut = run(folder, t5xxl_max_token_length=320, t5xxl_train_length="256", **values)
    assert {length for _, length, _ in read} == {256}
    assert cut.losses == pytest.approx(run(folder, t5xxl_max_token_length=256, **values).losses, rel=1e-5)
    assert cut.losses != run(folder, t5xxl_max_token_length=320, **values | {"apply_t5_attn_mask": False}).losses


def test_files_keep_all_tokens_and_serve_every_length(run, read, tmp_path):
    folder = described(tmp_path / "set", [(64, 64)] * 3, (5, 30, 90))
    whole = run(folder, **DISK)
    with untouched(folder):
        longest = run(folder, t5xxl_train_length="longest", **DISK)
        assert run(folder, t5xxl_train_length="longest", cache_text_encoder_outputs=True).losses == longest.losses
        assert run(folder, **DISK).losses == whole.losses != longest.losses
    for file in folder.rglob("*_te.npz"):
        with np.load(file) as npz:
            assert npz["t5_out"].shape[0] == npz["t5_attn_mask"].shape[0] == 256
    assert {length for _, length, _ in read} == {256, 128}  # 90 words and the end mark


def test_validation_and_previews_read_all(run, read, tmp_path):
    folder = described(tmp_path / "set", [(64, 64)] * 6, (5, 30, 20, 30, 8, 9))
    measured = run(folder, t5xxl_train_length="longest", validation_split=0.3, validate_every_n_steps=1)
    assert measured.events("validation")
    assert {(length, learns) for _, length, learns in read} == {(64, True), (256, False)}


def test_six_sizes_and_lengths_need_the_graphs_of_one_length(run, read, tmp_path):
    folder = described(tmp_path / "set", SIDES, WORDS)
    eager = {"script": "flux_train", "max_train_steps": 6, "t5xxl_train_length": "longest", **BUCKETS}
    losses = run(folder, **eager).losses
    for blocks, dynamic in (("double:all", "auto"), ("single:all", "false")):  # which is a graph for each size
        read.clear()
        compiled = eager | {"compile": True, "compile_backend": "eager", "compile_dynamic": dynamic}
        cut = run(folder, **compiled, compile_blocks=blocks)
        whole = compiled | {"t5xxl_train_length": "max"}
        plain = run(folder, **whole, compile_blocks=blocks)
        graphs = cut.facts["compile"]
        assert graphs["graphs"] == graphs["predicted"] == plain.facts["compile"]["graphs"]
        assert not graphs["recompiles"]
        assert dynamic == "false" or {event["step"] for event in cut.events("compile")} == {0}
        pairs = sorted({(image, text) for image, text, _ in read if text < 256})
        images, lengths = zip(*pairs, strict=True)
        assert len(set(images)) == len(pairs) >= 5
        assert [*lengths] == sorted(lengths) and len(set(lengths)) >= 3
        assert cut.losses == pytest.approx(losses)


def test_what_cannot_be_known_ahead_is_refused_and_what_changes_nothing_is_reported(demo, tmp_path):
    with pytest.raises(ConfigError, match="t5xxl_train_length = longest needs cache_text_encoder_outputs"):
        config_of(demo, SCRIPT, cache_text_encoder_outputs=False, t5xxl_train_length="longest")
    short = config_of(demo, SCRIPT, t5xxl_train_length="256")
    assert ["has no effect: t5xxl_max_token_length is 32" in str(note) for note in short.model.notes(short)] == [True]
    assert config_of(demo, SCRIPT, t5xxl_max_token_length=512, t5xxl_train_length="256").model.text_tokens == 256


@pytest.mark.parametrize("script", LORAS)
def test_captions_that_are_longer_than_what_is_read_are_reported_once_with_what_reads_more(demo, script):
    family = families.family_for(config_of(demo, script))
    words, limit = family.tokenizers_of_captions(), family.caption_limit
    word = limit.count(words[limit.encoder], "red red") - limit.count(words[limit.encoder], "red")
    most = limit.tokens // word
    images = [described_as(f"{count}.png", " ".join(["red"] * count)) for count in (1, most)]
    assert not [*text_encoding.cut_captions(images, family)]
    images += [described_as(f"long{number}.png", "red " * (most + 1 + number)) for number in (0, 1)]
    (told,) = map(str, text_encoding.cut_captions(images, family))
    assert told.startswith(f"2 captions cut after {limit.tokens} tokens, the first is that of long0.png: ")
    assert told.endswith(f"{limit.more or 'nothing'} reads more")


def test_the_check_tells_of_captions_that_are_cut(demo, tmp_path):
    Image.new("RGB", (64, 64)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("red " * 99)
    said = problems_and_remarks(config_of(demo, SCRIPT, train_data_dir=tmp_path))[1]
    (told,) = [str(warning) for warning in said if "cut after" in str(warning)]
    assert told.startswith("1 caption cut after 31 tokens") and told.endswith("t5xxl_max_token_length = 512 reads more")
