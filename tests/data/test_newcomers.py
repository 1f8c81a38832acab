"""Remarks on a newcomer's folders: once, about what is there, and only what matters to the training."""

import pytest

from library import data
from library.config.building import Layer, read_layers
from library.families import config_class
from tests.data import make


@pytest.mark.parametrize(
    ("values", "matters"),
    [
        ({}, False),
        ({"max_train_steps": 500}, False),
        ({"max_train_epochs": 2}, True),
        ({"save_every_n_epochs": 1}, True),
        ({"sample_every_n_epochs": 1}, True),
    ],
)
def test_repeats_are_proposed_only_where_something_counts_epochs(tmp_path, values, matters):
    make.folder(tmp_path, "cats")
    told = data.check_data(make.config(tmp_path / "cats", **values), 32).warnings
    assert any("set dataset_repeats" in str(note) for note in told) == matters


@pytest.mark.parametrize(
    ("captions", "expected"),
    [
        ((), "no image has a caption: none of 3 images"),
        (("00",), "2 images without a .txt file, trained without a caption"),
    ],
)
def test_missing_captions_are_reported_once(tmp_path, captions, expected):
    folder = make.folder(tmp_path, "cats", ((64, 64),) * 3, captions=False)
    for name in captions:
        (folder / f"{name}.txt").write_text("a cat", encoding="utf-8")
    (told,) = (note for note in data.check_data(make.config(folder), 32).warnings if "caption" in str(note))
    assert expected in str(told)


@pytest.mark.parametrize(("files", "expected"), [((), "is empty; it should hold"), (("a.txt",), "holds no images")])
def test_a_folder_with_other_files_is_not_called_empty(tmp_path, files, expected):
    for name in files:
        (tmp_path / name).write_text("x", encoding="utf-8")
    (problem,) = data.check_data(make.config(tmp_path), 32).problems
    assert expected in str(problem)


@pytest.mark.parametrize(
    ("script", "size"), [("sdxl_train_network", "1024"), ("train_network", "512"), ("fine_tune", "512")]
)
def test_the_size_that_is_proposed_suits_the_model(tmp_path, script, size):
    make.folder(tmp_path, "cats")
    config = make.config(tmp_path / "cats", script, resolution=None)
    (problem,) = (found for found in data.check_data(config, 32).problems if found.option == "resolution")
    assert str(problem) == f"resolution is not set: {size} is usual"
    cls = config_class(script)
    missing = {found.option: found.fix for found in read_layers(cls, [Layer({})]).config.data.missing(cls)}
    assert missing["resolution"] == {"resolution": size}
