"""What is in a folder: the trainer's own numbers, and every mistake by its name."""

import os
import struct
import zlib

import pytest

from library import data as trainer
from library.config.problems import ConfigError
from library.curation import changes, scanning, selection, similar_images, thumbs
from tests.curation.conftest import config, picture


@pytest.fixture
def scanned(data):
    return scanning.scan_collection(data, config(data))


def names(pictures):
    return [p.name for p in pictures]


def test_numbers_are_those_of_a_training(data):
    for name in ("broken.png", "broken.txt"):
        (data / "2_dog" / name).unlink()
    run_config = config(data, train_batch_size=3, max_train_epochs=4)
    told, wanted = (
        scanning.scan_collection(data, run_config).count(),
        trainer.summarise_images(trainer.scan(run_config)),
    )
    assert {key: told[key] for key in ("images", "repeats", "buckets", "batches_per_epoch")} == {
        key: wanted[key] for key in ("images", "repeats", "buckets", "batches_per_epoch")
    }
    assert told["steps"] == 4 * wanted["batches_per_epoch"] and told["epochs"] == 4


def test_each_mistake_is_found(scanned):
    assert names(selection.select_pictures(scanned, "missing")) == [
        "d.png",
        "2_dog/a small.png",
        "2_dog/panorama.png",
        "later/c.png",
    ]
    for kind, wanted in (
        ("empty", ["2_dog/b.png"]),
        ("foreign", ["2_dog/broken.png"]),
        ("lines", ["2_dog/a.png"]),
        ("broken", ["2_dog/broken.png"]),
        ("unused", ["d.png", "later/c.png"]),
        ("cut", ["2_dog/panorama.png"]),
        ("enlarged", ["2_dog/a small.png"]),
    ):
        assert names(selection.select_pictures(scanned, kind)) == wanted, kind
    counts = selection.count_kinds(scanned, "zorb")
    assert counts["all"] == 11 and counts["missing"] == 4 and counts["trigger"] == 7
    assert names(selection.select_pictures(scanned, "all", "RED hat", "10_cat")) == [
        f"10_cat/{i}.png" for i in range(4)
    ]
    assert len(selection.select_pictures(scanned, "trigger", trigger="Zorb")) == 7
    with pytest.raises(ConfigError):
        selection.select_pictures(scanned, "nonsense")


def test_what_is_cut_is_what_the_trainer_cuts(scanned):
    wide = scanned.find("2_dog/panorama.png")
    left, top, width, height = wide.seen
    assert top == 0 and height == 1 and left == pytest.approx((1 - width) / 2, abs=0.01)
    assert wide.cut[0] == pytest.approx(1 - width) and width == wide.fit.bucket[0] / wide.fit.resized[0]


def test_a_folder_of_images_says_how_often_each_is_seen(data):
    alone = scanning.scan_collection(data / "later", config())
    assert [p.repeats for p in alone.pictures] == [1] and not alone.notes
    often = scanning.scan_collection(data / "later", config(dataset_repeats=5))
    assert [(p.repeats, p.used) for p in often.pictures] == [(5, True)] and "seen per epoch: 5" in str(often.notes[0])
    leaf = scanning.scan_collection(data / "10_cat", config())
    assert {p.repeats for p in leaf.pictures} == {10} and str(data) in str(leaf.notes[0])
    other = scanning.scan_collection(data / "10_cat", config(caption_extension=".caption"))
    assert any("4 .txt files" in str(note) for note in other.notes)
    with pytest.raises(ConfigError, match="cannot be listed"):
        scanning.scan_collection(data / "not", config())


@pytest.mark.skipif(os.name == "nt", reason="symbolic links need rights on Windows")
def test_links_are_followed_only_where_that_is_allowed(data, tmp_path):
    (tmp_path / "secret.txt").write_text("password")
    (tmp_path / "5_out").mkdir()
    picture(1).save(tmp_path / "5_out" / "x.png")
    (data / "10_cat" / "0.txt").unlink()
    (data / "10_cat" / "0.txt").symlink_to(tmp_path / "secret.txt")
    (data / "10_cat" / "l.png").symlink_to(tmp_path / "5_out" / "x.png")
    (data / "5_out").symlink_to(tmp_path / "5_out")
    collection = scanning.scan_collection(data, config(data), may=lambda path: False)
    assert collection.find("10_cat/0.png").caption == "" and "link" in collection.find("10_cat/l.png").broken
    assert not any(p.folder == "5_out" for p in collection.pictures)


def test_doubles_by_bytes_and_by_looks(scanned):
    changes.find_similar_groups(scanned)
    groups = {tuple(names(selection.select_pictures(scanned, "double")[at : at + 2])) for at in (0, 2)}
    assert groups == {("10_cat/0.png", "2_dog/b.png"), ("2_dog/a small.png", "2_dog/a.png")}
    assert sorted(group["how"] for group in scanned.double_groups) == ["alike", "the same"]


def test_looks_survive_saving_and_not_another_image(tmp_path):
    hashes = []
    for i in range(40):
        for name, side, quality in ((f"{i}.png", 96, None), (f"{i}.jpg", 300, 60)):
            picture(i, side, side).save(tmp_path / name, **({"quality": quality} if quality else {}))
            hashes.append(similar_images.looks(str(tmp_path / name)))
    assert similar_images.near(hashes) == [[2 * i, 2 * i + 1] for i in range(40)]
    picture(0, 8, 8).resize((1, 1)).resize((64, 64)).save(tmp_path / "plain.png")
    assert similar_images.looks(str(tmp_path / "plain.png")) is None


def test_thumbnails_are_kept_and_follow_their_image(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    path = tmp_path / "a.png"
    picture(1, 900, 600).save(path)
    first = thumbs.thumb(path)
    assert thumbs.thumb(path) == first and len(list(thumbs.thumbnail_folder().glob("*/*"))) == 1
    picture(2, 900, 600).save(path)
    os.utime(path, (1, 1))
    assert thumbs.thumb(path) != first
    assert thumbs.prune_thumbnails(0) == 0 and list(thumbs.thumbnail_folder().glob("*/*")) == []
    monkeypatch.setattr(thumbs, "write_atomic", lambda *_: (_ for _ in ()).throw(ConfigError("the disk is full")))
    assert thumbs.thumb(path)[:4] == b"RIFF"


def test_bombs_and_rubbish_are_one_sentence(tmp_path):
    bomb = tmp_path / "bomb.png"
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    bomb.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + struct.pack(">I", 13)
        + chunk
        + struct.pack(">I", zlib.crc32(chunk))
        + struct.pack(">I", 0)
        + b"IDAT"
        + struct.pack(">I", zlib.crc32(b"IDAT"))
    )
    rubbish = tmp_path / "rubbish.jpg"
    rubbish.write_bytes(b"\xff\xd8\xff" + bytes(range(256)) * 4)
    text = tmp_path / "text.webp"
    text.write_text("hello")
    for path in (bomb, rubbish, text, tmp_path / "absent.png"):
        with pytest.raises(ConfigError) as wrong:
            thumbs.thumb(path)
        assert "\n" not in str(wrong.value)
    with pytest.raises(ConfigError):
        thumbs.thumb(bomb, 100_000)
    assert "too many" in scanning.scan_collection(tmp_path, config()).find("bomb.png").broken
