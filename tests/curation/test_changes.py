"""Edits of captions and folders, and that each can be taken back to the letter."""

import pytest

from library import data as trainer
from library.config.problems import ConfigError
from library.curation import changes, scanning, tags
from library.curation.tags import Edit
from library.curation.trash import history, undo
from tests.curation.conftest import config
from tests.curation.test_trash import tree


@pytest.fixture
def scan_result(data):
    return scanning.scan_collection(data, config(data))


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        (Edit("add", put="zorb"), "cat, hat", "zorb, cat, hat"),
        (Edit("add", put="zorb, x", at_end=True), "cat, Zorb", "cat, Zorb, x"),
        (Edit("add", put="zorb"), "", "zorb"),
        (Edit("add", put="zorb"), "a\r\nb\n", "zorb, a\r\nzorb, b\n"),
        (Edit("remove", find="Hat, cat"), "cat,hat,  dog", "dog"),
        (Edit("remove", find="Hat", match_case=True), "cat,hat,  dog", "cat,hat,  dog"),
        (Edit("remove", find="at"), "cat, hat", "cat, hat"),
        (Edit("replace_tag", find="cat", put="dog"), "a, cat, b, cat", "a, dog, b"),
        (Edit("replace_tag", find="cat", put="a, kitten"), "cat, a", "kitten, a"),
        (Edit("replace_tag", find="c+", put="d"), "c+, cc", "d, cc"),
        (Edit("replace_tag", find="x", put="d"), "a ,b", "a ,b"),
        (Edit("replace_text", find="a.b", put=r"\1"), "A.B axb", r"\1 axb"),
        (Edit("replace_text", find="red hat", put="", match_case=True), "Red hat, red hat", "Red hat, "),
        (Edit("remove", find="b", separator="|"), "a|b| c", "a| c"),
    ],
)
def test_an_edit_changes_what_it_names_and_nothing_else(edit, before, after):
    assert edit.apply(before) == after
    assert edit.apply(after) in (after, edit.apply(edit.apply(after)))


def test_edits_without_a_meaning_are_refused():
    for action, words in (
        ("add", {}),
        ("remove", {"find": " , "}),
        ("replace_text", {"put": "x"}),
        ("eat", {"find": "x"}),
    ):
        if action == "remove":
            words = {"find": " "}
        with pytest.raises(ConfigError):
            Edit(action, **words)


def test_tags_are_counted_once_for_each_caption():
    frequencies = tags.frequencies(["a, b, A", "a\nb", "c", ""])
    assert frequencies == [("a", 2), ("b", 2), ("c", 1)]
    assert tags.frequencies(["red hat, hat"], prefix="RED") == [("red hat", 1)]
    assert tags.trigger("zorb")("a Zorb, cat") and not tags.trigger("zorb")("zorbs") and tags.trigger("c++")("c++, x")


def test_a_caption_is_edited_and_taken_back(scan_result, data):
    start = tree(data)
    picture = changes.change_caption(scan_result, "10_cat/1.png", "a new one", "zorb, cat, red hat, 1")
    assert picture.caption == "a new one" and (data / "10_cat" / "1.txt").read_text() == "a new one"
    changes.change_caption(scan_result, "2_dog/panorama.png", "wide", None)
    with pytest.raises(ConfigError, match="changed elsewhere"):
        changes.change_caption(scan_result, "10_cat/1.png", "lost", "zorb, cat, red hat, 1")
    with pytest.raises(ConfigError, match="is not in"):
        changes.change_caption(scan_result, "../../etc/passwd", "x", None)
    assert [past.title for past in history(data)] == ["Caption of 2_dog/panorama.png", "Caption of 10_cat/1.png"]
    undo(data)
    undo(data)
    assert tree(data) == start


def test_many_captions_are_edited_and_taken_back(scan_result, data):
    start = tree(data)
    edit = Edit("replace_tag", find="red hat", put="blue hat")
    assert len(changes.preview(scan_result.pictures, edit)) == 5 and tree(data) == start
    assert changes.edit_tags(scan_result, scan_result.pictures, edit) == 5
    assert (data / "10_cat" / "3.txt").read_text() == "zorb, cat, blue hat, 3"
    assert (data / "2_dog" / "broken.txt").read_bytes() == b"caf\xe9"
    assert (
        changes.edit_tags(scan_result, scan_result.pictures, Edit("add", put="zorb")) == 6
    )  # four have it, one is no UTF-8
    assert (data / "2_dog" / "panorama.txt").read_text() == "zorb"
    assert changes.edit_tags(scan_result, scan_result.pictures, Edit("remove", find="absent")) == 0
    assert len(history(data)) == 2
    undo(data)
    undo(data)
    assert tree(data) == start


def test_images_go_with_what_belongs_to_them(scan_result, data):
    folder = data / "10_cat"
    for name in ("1_0096x0064_sdxl.npz", "1_te_outputs.npz", "1.npz", "10.txt", "1_other.txt"):
        (folder / name).write_text("x")
    start = tree(data)
    assert changes.remove_images(scan_result, ["10_cat/1.png", "10_cat/1.png"]) == 1
    gone = start.keys() - tree(data).keys()
    assert gone == {f"10_cat/1{end}" for end in (".png", ".txt", "_0096x0064_sdxl.npz", "_te_outputs.npz", ".npz")}
    assert len(scan_result.pictures) == 10
    undo(data)
    assert tree(data) == start


# As the families name them, whose names and sizes vary; tests/train/test_training.py makes those of all.
CACHES = (
    "_0096x0064_flux.npz",
    "_upright_0064x0096_f2k4b.safetensors",
    "_0064x1024_fk.safetensors",
    "_flux_te.npz",
    "_f2k4b_te.safetensors",
    "_qi_te.safetensors",
    "_zi_te.safetensors",
    "_anima_te.npz",
)


def test_caches_in_either_format_go_with_their_image_alone(scan_result, data):
    folder = data / "10_cat"
    (folder / "1_b.png").write_bytes((folder / "2.png").read_bytes())
    mine = {f"1{ending}" for ending in CACHES}
    others = {*(f"1_b{ending}" for ending in CACHES), "1_b_te_outputs.npz", "1_lora.safetensors", "1.safetensors"}
    for name in mine | others:
        (folder / name).write_text("x")
    before = {path.name for path in folder.iterdir()}
    changes.remove_images(scan_result, ["10_cat/1.png"])
    assert before - {path.name for path in folder.iterdir()} == {"1.png", "1.txt", *mine}


def test_a_folder_is_prepared_for_a_training_and_back(data):
    plain = data / "later"
    (plain / "c.txt").write_text("words")
    start = tree(plain)
    collection = scanning.scan_collection(plain, config(plain))
    assert changes.gather(collection, 7, "zorb cat") == "7_zorb cat"
    scanned = trainer.scan(config(plain))
    assert [(i.repeats, i.caption) for i in scanned.items] == [(7, "words")]
    collection = scanning.scan_collection(plain, config(plain))
    assert changes.rename(collection, "7_zorb cat", 3, "zorb") == "3_zorb"
    collection = scanning.scan_collection(plain, config(plain))
    before = tree(data / "10_cat")
    assert changes.bring(collection, data / "10_cat", 2, "more") == "2_more"
    assert len(trainer.scan(config(plain))) == 5 and tree(data / "10_cat") == before
    for _ in range(3):
        assert undo(plain).left == ()
    assert tree(plain) == start and sorted(p.name for p in plain.iterdir()) == [".trash", "c.png", "c.txt"]


def test_folders_that_cannot_be_made_are_refused(scan_result, data):
    start = tree(data)
    for attempt in (
        lambda: changes.rename(scan_result, "10_cat", 0, "cat"),
        lambda: changes.rename(scan_result, "10_cat", 3, "a/b"),
        lambda: changes.rename(scan_result, "10_cat", 3, ".."),
        lambda: changes.rename(scan_result, "..", 3, "x"),
        lambda: changes.rename(scan_result, "", 3, "x"),
        lambda: changes.rename(scan_result, "10_cat", 2, "dog"),
        lambda: changes.gather(scan_result, 3, " "),
        lambda: changes.bring(scan_result, data / "10_cat", 10, "cat"),
        lambda: (
            changes.bring(scan_result, data / "later", 2, "dog")
            and changes.bring(scan_result, data / "later", 2, "dog")
        ),
    ):
        with pytest.raises(ConfigError):
            attempt()
    undo(data)  # the one that could be copied
    assert tree(data) == start
