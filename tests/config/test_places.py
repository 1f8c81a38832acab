"""Two spellings of a path are one place on a disk that ignores case or composed letters, and two on any other."""

import os
import unicodedata
from types import SimpleNamespace

import pytest

from library.config import places
from library.config.building import build_config
from library.data import finding
from library.families.sdxl.options import SdxlLora
from tests.data import make

COMPOSED, DECOMPOSED = unicodedata.normalize("NFC", "Bébé"), unicodedata.normalize("NFD", "Bébé")
DISKS = {
    "ignores nothing": lambda name: name,
    "ignores case": str.lower,
    "ignores both": lambda name: unicodedata.normalize("NFC", name).lower(),
}


@pytest.fixture(params=DISKS)
def disk(request, tmp_path, monkeypatch):
    """A disk that finds files as Linux, Windows and macOS do."""
    spell, whole = DISKS[request.param], os.lstat

    def lstat(path):
        found = os.path.sep
        for part in os.fspath(path).strip(os.path.sep).split(os.path.sep):
            names = os.listdir(found) if os.path.isdir(found) else []
            found = os.path.join(found, next((name for name in names if spell(name) == spell(part)), part))
        return whole(found)

    spelled = SimpleNamespace(**{name: getattr(os, name) for name in dir(os)})
    spelled.lstat = lstat
    monkeypatch.setattr(places, "os", spelled)
    places._is_same_in.cache_clear()
    yield request.param
    places._is_same_in.cache_clear()


def test_spellings_are_one_place_where_the_disk_says_so(disk, tmp_path):
    (tmp_path / "Cats" / COMPOSED).mkdir(parents=True)
    pairs = {
        ("Cats", "cats"): "ignores case",
        ("Cats/new.txt", "CATS/New.txt"): "ignores case",
        (f"Cats/{COMPOSED}", f"Cats/{DECOMPOSED}"): "ignores both",
        (f"Cats/{COMPOSED}/x", f"cats/{DECOMPOSED.upper()}/X"): "ignores both",
    }
    order = [*DISKS]
    for (first, second), needed in pairs.items():
        is_same = order.index(disk) >= order.index(needed)
        assert places.same_place(tmp_path / first, tmp_path / second) == is_same, (first, second)
    for other in ("Dogs", "Cats2", f"{COMPOSED}2", "Cats/ss", "Cats/ß"):
        assert not places.same_place(tmp_path / "Cats", tmp_path / other)
    assert not places.same_place(tmp_path / "Cats/ss", tmp_path / "Cats/ß")


def test_a_link_of_another_spelling_does_not_make_a_disk_ignore_case(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "CATS").symlink_to("cats")
    (tmp_path / "cats" / "a").write_text("")
    assert not places.same_place(tmp_path / "cats" / "a", tmp_path / "cats" / "A")


def test_a_folder_of_two_spellings_counts_once_in_a_data_set(disk, tmp_path):
    folder = make.folder(tmp_path, "10_Cat")
    other = folder.with_name("10_CAT")
    if disk == "ignores nothing":
        return
    file = tmp_path / "data.toml"
    subsets = "".join(f"[[datasets.subsets]]\nimage_dir = '{place}'\n" for place in (folder, other))
    file.write_text(f"[[datasets]]\nresolution = 64\n{subsets}", encoding="utf-8")
    config = build_config(SdxlLora, {"dataset_config": str(file)}, notes=[])
    survey = finding.survey_data(config)
    assert {os.path.dirname(image.path) for image in survey.images.items} == {str(folder)}
