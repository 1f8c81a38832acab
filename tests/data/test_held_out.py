"""Images for validation: held out of all data sets with their copies, exactly as many as asked for, and for good."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest

from library import data
from library.config.building import replace_options
from library.config.dataset import DatasetConfig
from library.curation import image_folders, sources
from library.data import held_out
from library.data.images import Image
from library.files import STATE_FACTS
from tests.data import make


def apart(names, share, seed=0):
    """The split of one data set of these images, of which only names are known: (for training, for validation)."""
    images = [Image(name, (64, 64), "", 1, None, 0, None) for name in names]
    held = held_out.hold_out([DatasetConfig(validation_split=share)], [images], [[]], seed)
    return [image.path for image in held.learned[0]], [image.path for image in held.held_out[0]]


def test_the_parts_are_disjoint_and_cover_everything():
    for count in range(1, 41):
        names = [f"{number}.png" for number in range(count)]
        for share in (0.01, 0.1, 0.25, 1 / 3, 0.5, 0.75, 0.9, 0.99):
            learned, held = apart(names, share, seed=count)
            assert sorted([*learned, *held]) == sorted(names) and learned
            assert len(held) == min(round(share * count), count - 1)
    assert apart(names, 0) == (names, []) and apart(names, 1) == ([], names)  # a data set of validation images alone


def test_the_seed_chooses_them():
    names = [f"{number}.png" for number in range(20)]
    assert apart(names, 0.25, 1) == apart(names, 0.25, 1) != apart(names, 0.25, 2)
    assert sorted(apart(names[::-1], 0.25, 1)[1]) == sorted(apart(names, 0.25, 1)[1])


def test_more_images_leave_the_others_where_they_are():
    names = [f"{number}.png" for number in range(100)]
    few, many = (set(apart(names[:count], 0.2)[1]) for count in (80, 100))
    assert len(few) == 16 and len(many) == 20
    assert many & set(names[:80]) <= few  # nothing that was trained on is validated
    with_one_more = set(apart([*names, "new.png"], 0.2)[1])
    assert len(many - with_one_more) <= 1


def folders(tmp_path, count=10, images=6):
    for number in range(count):
        for at in range(images):
            make.picture(tmp_path / f"{number + 1}_x" / f"{at}.png", seed=100 * number + at)
    return tmp_path


@pytest.fixture
def ten(tmp_path):
    return make.holding_back(make.config(folders(tmp_path / "train"), caption_extension=".txt"), 0.1)


def test_the_share_is_of_the_whole_data_set_and_reported_folder_by_folder(ten):
    images = data.scan(ten)
    assert len(images.items) == 54 and len(images.validation.items) == 6
    said = str(held_out.held_out_by_folder(images))
    assert said.startswith("6 of 60 images held out for validation: ")
    parts = [part.split(" of 6 in ") for part in said.partition(": ")[2].split(", ")]
    assert sum(int(held) for held, _ in parts) == 6 and {folder[-2:] for _, folder in parts} == {"_x"}
    held = {row["source"]: row["held"] for row in image_folders.count_by_folder(ten, lambda path: True)["rows"]}
    assert sum(held.values()) == 6 and {f"{count} {place[-3:]}" for place, count in held.items() if count} == {
        f"{count} {folder[-3:].rjust(3, '/')}" for count, folder in parts
    }


def test_the_root_of_a_drive_is_named_whole(tmp_path):
    root = tmp_path.anchor
    source = SimpleNamespace(image_dir=root)
    items = [SimpleNamespace(path=os.path.join(root, name), is_reg=False, subset=source) for name in ("a", "b")]
    images = SimpleNamespace(items=items[:1], validation=SimpleNamespace(items=items[1:]))
    assert str(held_out.held_out_by_folder(images)).endswith(f"1 of 2 in {root}")


def test_files_may_be_moved_and_renamed(ten, tmp_path):
    def seen(config):
        return sorted(open(image.path, "rb").read() for image in data.scan(config).validation.items)

    before = seen(ten)
    shutil.move(tmp_path / "train" / "1_x", tmp_path / "train" / "30_other")
    (tmp_path / "train" / "2_x" / "0.png").rename(tmp_path / "train" / "2_x" / "z.png")
    assert seen(ten) == before


@pytest.mark.parametrize("twice", ["in one folder", "in two folders", "as regularisation"])
def test_copies_of_an_image_are_never_on_both_sides(ten, tmp_path, twice):
    places = {"in one folder": "train/1_x", "in two folders": "train/12_copies", "as regularisation": "reg/1_thing"}
    place = tmp_path / places[twice]
    place.mkdir(parents=True, exist_ok=True)
    for path in sorted((tmp_path / "train" / "1_x").glob("?.png")):
        shutil.copy(path, place / f"copy{path.name}")
    config = replace_options(ten, reg_data_dir=str(tmp_path / "reg")) if twice == "as regularisation" else ten
    for seed in range(8):
        images = data.scan(replace_options(config, seed=seed))
        marks = [
            {held_out.digest_image(image.path) for image in part} for part in (images.items, images.validation.items)
        ]
        assert not marks[0] & marks[1]
        share = 6 if twice == "as regularisation" else round(66 * 0.1)
        assert abs(len(images.validation.items) - share) <= 1


SEVERAL = """
[general]
enable_bucket = false
caption_extension = ".txt"
[[datasets]]
resolution = 64
validation_split = {first}
{seeds[0]}
[[datasets.subsets]]
image_dir = '{folder}/1_x'
[[datasets.subsets]]
image_dir = '{folder}/2_x'
[[datasets]]
resolution = 128
validation_split = {second}
{seeds[1]}
[[datasets.subsets]]
image_dir = '{folder}/2_x'
[[datasets.subsets]]
image_dir = '{folder}/3_x'
"""


@pytest.mark.parametrize("seeds", [("", ""), ("validation_seed = 1", "validation_seed = 2")])
@pytest.mark.parametrize(("first", "second"), [(0.25, 0.0), (0.0, 0.25), (0.25, 0.25), (0.1, 0.5)])
def test_what_one_data_set_holds_out_no_other_trains_on(tmp_path, first, second, seeds):
    folder = folders(tmp_path / "train", 3, 10)
    (tmp_path / "sets.toml").write_text(
        SEVERAL.format(folder=folder.as_posix(), first=first, second=second, seeds=seeds)
    )
    for seed in range(6):
        config = make.config(None, dataset_config=str(tmp_path / "sets.toml"), resolution=None, seed=seed)
        checked = data.check_data(config, 32)
        images = checked.images
        held = {image.path for image in images.validation.items}
        assert not held & {image.path for image in images.items}
        for position, share in enumerate((first, second)):
            assert sum(image.dataset == position for image in images.validation.items) == round(20 * share)
        left = {path for path in held if "2_x" in path} if 0.0 in (first, second) else set()
        assert any("held out for validation" in str(warning) for warning in checked.warnings) is bool(left)
        opened = sources.scan_sources(config)
        assert sum(picture.unused == sources.HELD_OUT for picture in opened.pictures) == len(left)


def state(tmp_path, **facts):
    place = tmp_path / "m-state"
    place.mkdir(exist_ok=True)
    (place / STATE_FACTS).write_text(json.dumps({"version": 1, "current_step": 3, **facts}))
    return str(place)


def names(images):
    return [image.path for image in images.validation.items]


def test_a_resumed_training_goes_on_with_the_split_it_began_with(ten, tmp_path):
    began = data.scan(ten)
    for number in range(40):
        make.picture(tmp_path / "train" / "20_more" / f"{number}.png", seed=5000 + number)
    later = replace_options(ten, resume=state(tmp_path, held_out=began.held_out), seed=9)
    assert names(data.scan(later)) == names(began) != names(data.scan(replace_options(later, resume=None)))
    assert len(data.scan(later).items) == 54 + 40


def told(config):
    return [
        str(warning) for warning in data.check_data(config, 32).warnings if str(warning).startswith("validation_split")
    ]


def test_a_resume_says_that_another_share_changes_nothing(ten, tmp_path):
    began = data.scan(ten)
    later = replace_options(ten, resume=state(tmp_path, held_out=began.held_out))
    assert told(later) == []
    more = make.holding_back(later, 0.5)
    assert names(data.scan(more)) == names(began) and "6 instead of 30" in told(more)[0]


def test_held_out_images_that_are_gone_are_never_trained_on_later(ten, tmp_path):
    began = data.scan(ten)
    first, *others = [image.path for image in began.validation.items]
    shutil.move(first, tmp_path / "kept.png")
    later = replace_options(ten, resume=state(tmp_path, held_out=began.held_out))
    middle = data.scan(later)
    assert names(middle) == others and "5 instead of 6" in told(later)[0]
    shutil.move(tmp_path / "kept.png", first)
    last = replace_options(ten, resume=state(tmp_path, held_out=middle.held_out))
    assert names(data.scan(last)) == [first, *others] and not told(last)
    for path in (first, *others):
        os.remove(path)
    assert "are gone" in told(later)[0] and data.scan(later).validation


def test_validation_that_begins_with_a_resume_says_that_its_images_are_known(ten, tmp_path):
    later = replace_options(ten, resume=state(tmp_path, held_out=[]))
    assert len(names(data.scan(later))) == 6
    assert any("began without validation" in str(warning) for warning in data.check_data(later, 32).warnings)
    assert not any("began without validation" in str(warning) for warning in data.check_data(ten, 32).warnings)


def test_a_state_of_an_earlier_version_keeps_the_split_of_that_version(ten, tmp_path):
    """Both parts were rounded up in each folder: all ten images for validation were trained on."""
    later = replace_options(ten, resume=state(tmp_path))
    images = data.scan(later)
    assert len(images.items) == 60 and len(images.validation.items) == 10 and images.held_out is None
    assert {image.path for image in images.validation.items} < {image.path for image in images.items}
    assert any(
        "10 images that are trained on and validated" in str(warning) for warning in data.check_data(later, 32).warnings
    )


@pytest.mark.parametrize("content", ["", "[]", '{"held_out": 3}'])
def test_a_state_that_cannot_be_read_splits_nothing(ten, tmp_path, content):
    place = tmp_path / "m-state"
    place.mkdir()
    (place / STATE_FACTS).write_text(content)
    assert names(data.scan(replace_options(ten, resume=str(place)))) == names(data.scan(ten))
