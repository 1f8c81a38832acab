"""What a training will see beyond its image folder: the numbers are the trainer's, whatever describes the images."""

import json
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from library import data as trainer
from library.config.building import replace_options
from library.config.problems import ConfigError
from library.curation import changes, selection, sources
from library.curation.tags import Edit
from library.data.loading import Batches
from library.train.step.clock import Clock
from tests.curation.conftest import config, picture


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Folders, a metadata file and a dataset file; nothing in them is broken."""
    root = tmp_path_factory.mktemp("sets")
    sizes = {
        "train/3_cat": [(72, 64)] * 5 + [(40, 96)] * 2,
        "train/1_dog": [(64, 64)] * 3,
        "reg/2_animal": [(64, 64)] * 4,
        "reg/1_thing": [(90, 60)] * 20,
        "few/1_animal": [(64, 64)] * 2,
    }
    for at, (folder, shapes) in enumerate(sizes.items()):
        (root / folder).mkdir(parents=True)
        for i, shape in enumerate(shapes):
            picture(100 * at + i, *shape).save(root / folder / f"{i}.png")
            if i:
                (root / folder / f"{i}.txt").write_text(f"zorb, number {i}")
    named = {f"3_cat/{i}.png": {"caption": f"cat {i}", "tags": "zorb"} for i in range(6)}
    (root / "meta.json").write_text(json.dumps({**named, str(root / "reg/2_animal/0.png"): {"caption": "animal"}}))
    (root / "sets.toml").write_text(f"""
[general]
enable_bucket = true
caption_extension = ".txt"
cache_info = true
bucket_reso_steps = 32
min_bucket_reso = 32
max_bucket_reso = 128
[[datasets]]
resolution = 64
batch_size = 4
validation_split = 0.2
[[datasets.subsets]]
image_dir = "{(root / "train/3_cat").as_posix()}"
num_repeats = 6
[[datasets.subsets]]
image_dir = "{(root / "reg/1_thing").as_posix()}"
is_reg = true
class_tokens = "thing"
[[datasets]]
resolution = 96
batch_size = 1
[[datasets.subsets]]
image_dir = "{(root / "train/3_cat").as_posix()}"
[[datasets.subsets]]
image_dir = "{(root / "train/1_dog").as_posix()}"
num_repeats = 2
""")
    (root / "sets.json").write_text(json.dumps(tomllib.loads((root / "sets.toml").read_text())))
    return root


KINDS = {
    "plain": {},
    "reg, too many": {"reg_data_dir": "reg"},
    "reg, too few": {"reg_data_dir": "few"},
    "held back": {"validation_split": 0.3, "seed": 7, "reg_data_dir": "reg"},
    "metadata": {"in_json": "meta.json", "dataset_repeats": 4, "max_train_epochs": 3},
    "dataset file": {"dataset_config": "sets.toml", "gradient_accumulation_steps": 2},
    "dataset file, JSON": {"dataset_config": "sets.json", "max_train_epochs": 5},
}


def given(places, kind, **more):
    values = {k: str(places / v) if isinstance(v, str) else v for k, v in KINDS[kind].items()}
    return config(places / "train", train_batch_size=3, **values, **more)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_the_training(places, kind):
    run_config = given(places, kind)
    collection = sources.scan_sources(run_config)
    assert not list(places.rglob("metadata_cache.json"))  # a look writes nothing
    images, told = trainer.scan(replace_options(run_config, cache_info=False)), collection.count()
    wanted = trainer.summarise_images(images)
    assert {k: told[k] for k in wanted if k != "dropped"} == {k: wanted[k] for k in wanted if k != "dropped"}
    batches = Batches(images, run_config, 0)
    clock = Clock.of(run_config, len(batches))
    assert (told["steps_per_epoch"], told["steps"], told["epochs"]) == (clock.per_epoch, clock.total, clock.epochs)
    assert told["batches_per_epoch"] == len(batches) == len(list(batches.draws(1)))
    shared = sources.scan_sources(run_config, world=2).count()
    assert shared["batches_per_epoch"] == len(Batches(images, run_config, 0, world=2))
    paths_seen = {(p.path, p.fit, p.repeats) for p in collection.pictures if p.used and p.role != "held"}
    assert paths_seen == {(i.path, i.fit, i.repeats) for i in images.items}
    held = {i.path for i in images.validation.items} if images.validation else set()
    assert {p.path for p in collection.pictures if p.role == "held"} == held and held.isdisjoint(
        i.path for i in images.items
    )
    for left in places.rglob("metadata_cache.json"):  # which the trainer keeps where a dataset file says so
        left.unlink()


def test_regularisation_is_shown_with_its_balance_and_not_changed_here(places):
    collection = sources.scan_sources(given(places, "reg, too many"))
    reg = selection.select_pictures(collection, "reg")
    assert {p.folder for p in reg} == {"reg/2_animal", "reg/1_thing"} and len(reg) == 24
    assert sum(p.repeats for p in reg if p.used) == sum(p.repeats for p in collection.pictures if not p.role) == 24
    assert {p.unused for p in reg if not p.used} == {sources.LEFT_OVER}
    few = selection.select_pictures(sources.scan_sources(given(places, "reg, too few")), "reg")
    assert [p.repeats for p in few] == [12, 12]
    assert selection.count_kinds(collection, "zorb")["trigger"] == 2  # of the training's own
    with pytest.raises(ConfigError, match="open .*reg"):
        changes.change_caption(collection, reg[0].name, "new", reg[0].caption)
    with pytest.raises(ConfigError, match="open .*reg"):
        changes.remove_images(collection, [reg[0].name])
    edit = Edit("remove", "zorb", "", False, False, ",")
    assert {p.folder for p, _ in changes.preview(collection.pictures, edit)} == {"3_cat", "1_dog"}


def test_a_metadata_file_tells_the_words_and_what_it_leaves_out(places):
    collection = sources.scan_sources(given(places, "metadata"))
    assert collection.find("meta.json/3_cat/1.png").caption == "cat 1,zorb" and str(collection.fixed).startswith(
        "meta.json"
    )
    for change in (lambda: changes.gather(collection, 1, "x"), lambda: changes.rename(collection, "3_cat", 1, "x")):
        with pytest.raises(ConfigError, match="meta.json describes"):
            change()
    alone = sources.scan_sources(config(places / "train/3_cat", **{"in_json": str(places / "meta.json")}))
    assert "lists images that are not there" in str(alone.problems[0])


def test_one_folder_in_two_data_sets_is_two_places(places):
    collection = sources.scan_sources(given(places, "dataset file"))
    cat = (places / "train/3_cat").as_posix()
    assert {f"{cat} · 64 × 64", f"{cat} · 96 × 96"} < {place.folder for place in collection.places}
    assert len({p.name for p in collection.pictures}) == len(collection.pictures)
    changes.find_similar_groups(collection)
    assert not collection.doubles  # the same file twice is no double
    assert collection.find(f"{cat} · 96 × 96/1.png").caption == "zorb, number 1"


def test_a_folder_is_one_however_it_is_spelled(places, tmp_path):
    """In dataset files of Windows both slashes are usual, and elsewhere one at the end."""
    spelled = (places / "train/3_cat").as_posix() + "/"
    sets = f'[[datasets]]\n[[datasets.subsets]]\nimage_dir = "{spelled}"\n'
    (tmp_path / "sets.toml").write_text(sets)
    (tmp_path / "meta.json").write_text(json.dumps({f"./{i}.png": {"caption": "cat"} for i in range(7)}))
    (tmp_path / "rows.toml").write_text(sets + f'metadata_file = "{(tmp_path / "meta.json").as_posix()}"\n')
    for file in ("sets.toml", "rows.toml"):
        run_config = config(dataset_config=str(tmp_path / file))
        collection = sources.scan_sources(run_config)
        assert sorted(picture.path for picture in collection.pictures) == sorted(
            str(path) for path in (places / "train/3_cat").glob("*.png")
        )
        assert all(picture.used for picture in collection.pictures)


def test_nothing_outside_of_the_roots_is_looked_into(places, tmp_path):
    inside = lambda path: not Path(path).is_relative_to(places / "reg")  # noqa: E731
    for kind in ("metadata", "dataset file"):
        with pytest.raises(ConfigError, match="--root"):
            sources.scan_sources(given(places, kind), may=inside)
    (tmp_path / "bad.toml").write_text("[[datasets]]\nresolution = 64\nnonsense = 1\n")
    with pytest.raises(ConfigError, match="nonsense"):
        sources.scan_sources(config(dataset_config=str(tmp_path / "bad.toml")))
    endless = SimpleNamespace(repeats=10**9, path="", is_reg=False)
    collection = sources.scan_sources(given(places, "reg, too few"))
    collection.found.items.append(endless)
    with pytest.raises(ConfigError, match="lower the repeats"):
        collection.count()
