"""Images at several sizes: a data set for each, one image on one side of validation, and caches beside each other."""

from collections import Counter

import numpy as np
import pytest

from library import data
from library.config.problems import ConfigError
from library.curation import image_folders, sources
from library.data import encoding
from library.data.images import summarise_images
from library.data.loading import Batches
from tests.data import make

SIZES = {"resolution": "64;96;128", "enable_bucket": True, "max_bucket_reso": 128, "bucket_reso_steps": 32}
DISK = {"cache_latents_to_disk": True}
TEXT = {"cache_text_encoder_outputs_to_disk": True, "network_train_unet_only": True}
FILE = """[general]
enable_bucket = true
min_bucket_reso = 64
max_bucket_reso = 128
bucket_reso_steps = 32
caption_extension = ".txt"

[[datasets]]
resolution = [64, 96, 128]
batch_size = 2
[[datasets.subsets]]
image_dir = '{folder}'
num_repeats = 2

[[datasets]]
resolution = 64
[[datasets.subsets]]
image_dir = '{other}'
"""


@pytest.fixture
def folder(tmp_path):
    return make.folder(tmp_path / "images", "2_cat", ((64, 64), (128, 128), (128, 64), (96, 96), (130, 128)))


@pytest.fixture
def of_file(folder, tmp_path):
    """A function: options -> a config whose dataset file has a table of three sizes, and another of one."""
    other = make.folder(tmp_path / "other", "1_dog", ((64, 64),))
    path = tmp_path / "data.toml"
    path.write_text(FILE.format(folder=folder, other=other), encoding="utf-8")
    return lambda **values: make.config(None, dataset_config=path, resolution=None, **values)


def test_each_image_is_in_a_data_set_for_each_size(folder):
    images = data.scan(make.config(folder.parent, **SIZES))
    assert [dataset.resolution for dataset in images.datasets] == [(128, 128), (96, 96), (64, 64)]
    assert Counter(image.path for image in images.items) == {str(path): 3 for path in folder.glob("*.png")}
    for image in images.items:
        width, height = image.fit.bucket
        side = images.datasets[image.dataset].resolution[0]
        assert width * height <= side * side and max(width, height) <= 128 and image.repeats == 2
    counts = summarise_images(images)
    assert (counts["images"], counts["repeats"], {row["dataset"] for row in counts["buckets"]}) == (5, 30, {0, 1, 2})
    alone = [
        summarise_images(data.scan(make.config(folder.parent, **SIZES | {"resolution": size})))
        for size in (128, 96, 64)
    ]
    assert counts["batches_per_epoch"] == sum(summary["batches_per_epoch"] for summary in alone)
    assert [{**row, "dataset": 0} for row in counts["buckets"]] == [
        row for summary in alone for row in summary["buckets"]
    ]


def test_an_epoch_has_every_image_at_every_size_as_often_as_its_repeats(folder):
    config = make.config(folder.parent, **SIZES, train_batch_size=2)
    batches = Batches(data.scan(config), config, 3)
    drawn_batches = Counter()
    for draw in batches.draws(1):
        batch = batches.make(draw)
        drawn_batches.update(
            (path, batches.images.items[at].dataset) for path, at in zip(batch.paths, draw.images, strict=True)
        )
        assert len({batches.images.items[at].dataset for at in draw.images}) == 1
    assert set(drawn_batches.values()) == {2} and len(drawn_batches) == 15


def test_a_dataset_file_says_it_for_each_table(of_file, folder):
    config = of_file()
    images = data.scan(config)
    assert [
        (dataset_of_size.table, dataset_of_size.resolution, dataset_of_size.sizes)
        for dataset_of_size in images.datasets
    ] == [
        *((0, (side, side), ((64, 64), (96, 96), (128, 128))) for side in (128, 96, 64)),
        (1, (64, 64), ((64, 64),)),
    ]
    counted = image_folders.count_by_folder(config, lambda path: True)
    assert [(row["dataset"], row["images"], row["seen"]) for row in counted["rows"]] == [(0, 5, 30), (1, 1, 1)]
    shown = sources.scan_sources(config)
    assert Counter(picture.path for picture in shown.pictures) == {picture.path: 1 for picture in shown.pictures}
    assert len(shown.pictures) == 6 and [place.images for place in shown.places] == [5, 1]
    assert shown.count()["repeats"] == 31


@pytest.mark.parametrize("described", [False, True])
def test_held_out_images_are_held_out_at_every_size(folder, of_file, described):
    share = {"validation_split": 0.4}
    config = of_file(**share) if described else make.config(folder.parent, **SIZES, **share)
    images = data.scan(config)
    learned, held = ({(i.path, i.dataset) for i in image_set.items} for image_set in (images, images.validation))
    assert not {path for path, _ in learned} & {path for path, _ in held}
    assert set(Counter(path for path, at in held if at < 3).values()) == {3}
    assert len({path for path, at in held if at < 3}) == 2


def test_regularisation_images_balance_each_size(folder, tmp_path):
    reg = make.folder(tmp_path / "reg", "1_animal", ((64, 64),) * 3)
    images = data.scan(make.config(folder.parent, **SIZES, reg_data_dir=str(reg.parent)))
    for position in range(3):
        own = [image for image in images.items if image.dataset == position]
        assert sum(i.repeats for i in own if i.is_reg) == sum(i.repeats for i in own if not i.is_reg) == 10


@pytest.mark.parametrize("cache", [make.SDXL, make.FLUX], ids=["sdxl", "flux"])
def test_latents_of_all_sizes_are_cached_and_found_again(folder, cache):
    def counts(**values):
        config, family = make.config(folder.parent, **SIZES | {**DISK, **TEXT} | values), make.Family(cache)
        images = data.scan(config)
        encoding.encode_missing_caches(images, family, make.parts(), config, make.Run(), lambda *told: None)
        for image in images.items:
            height, width = images.latents.load(image)["latents"].shape[-2:]
            assert (width * 8, height * 8) == image.fit.bucket
        return sum(map(len, family.seen)), len(family.read)

    assert counts(resolution="128") == (5, 5)
    assert counts(resolution="64;128") == (5, 0)  # the largest is there, and captions have no size
    assert counts(skip_cache_check=True) == (4, 0)  # a size is new, at which one image has the bucket of another size
    assert counts() == (0, 0) and counts(resolution="128;96;64") == (0, 0) and counts(resolution="128") == (0, 0)
    with np.load(folder / f"00_0064x0064{cache.suffix}") as npz:
        assert len({npz[name].shape for name in npz.files if name.startswith("latents")}) >= 3


def test_mistakes_of_all_sizes_are_reported_once(folder, of_file, tmp_path):
    (folder / "00.txt").unlink()
    (folder / "broken.png").write_bytes(b"no image")
    (tmp_path / "data.toml").write_text(FILE.format(folder=folder, other=folder.parent), encoding="utf-8")
    for config in (make.config(folder.parent, **SIZES), of_file()):
        mistakes = data.check_data(config, 8)
        said = [str(problem) for problem in (*mistakes.problems, *mistakes.warnings)]
        assert len([text for text in said if "be read as images" in text]) == 1 and len(said) == len(set(said))
    with pytest.raises(ConfigError, match="resolution must not be above max_bucket_reso") as refused:
        make.config(folder.parent, **SIZES | {"resolution": "64;256;512"})
    (problem,) = refused.value.problems
    assert problem.fix["max_bucket_reso"] == 512
    with pytest.raises(ConfigError, match="resolution must not be below min_bucket_reso") as refused:
        make.config(folder.parent, **SIZES | {"min_bucket_reso": 128})
    assert refused.value.problems[0].fix == {"min_bucket_reso": 64}  # and what stays is left out


def test_reference_images_that_the_text_encoder_reads_need_one_size_on_disk():
    from types import SimpleNamespace

    from library.data.buckets import BucketFit
    from library.data.text_encoding import _entries_by_file

    def at(side):
        fit = BucketFit((side, side), (side, side))
        return 0, SimpleNamespace(path="a.png", controls=(SimpleNamespace(fit=fit),)), "a"

    assert len(_entries_by_file([at(64), at(128)], "_te.npz", False)) == 1
    with pytest.raises(ConfigError, match="control_resolution"):
        _entries_by_file([at(64), at(128)], "_te.npz", True)
