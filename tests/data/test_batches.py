"""Batches: who is in them, that they never depend on workers, and that a resume is exact."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from library import data
from library.config.dataset import SubsetConfig
from library.config.problems import ConfigError
from library.data import encoding
from library.data.batch import BatchSample, batch_of, padded
from library.data.loading import Batches
from library.data.ordering import draws
from tests.data import make

LIVELY = {
    "flip_aug": True,
    "color_aug": True,
    "random_crop": True,
    "shuffle_caption": True,
    "caption_tag_dropout_rate": 0.3,
    "caption_dropout_rate": 0.1,
    "enable_bucket": True,
    "resolution": "128",
    "max_bucket_reso": 256,
    "train_batch_size": 2,
}
SHAPES = ((128, 128), (200, 70), (140, 128), (192, 64), (128, 150))


def batches_of(config, seed=5, rank=0, world=1, images=None):
    return Batches(images or data.scan(config), config, seed, rank, world)


def same(first, other):
    assert first.captions == other.captions and first.paths == other.paths
    for name in ("latents", "pixels", "sizes", "weights", "mask"):
        left, right = getattr(first, name), getattr(other, name)
        assert (left is None and right is None) or torch.equal(left, right), name
    assert (first.text is None) == (other.text is None)
    assert all(torch.equal(first.text[key], other.text[key]) for key in first.text or {})


@pytest.fixture
def enlarge_encoder_output(tmp_path):
    make.folder(tmp_path, "3_cat", SHAPES)
    return make.config(tmp_path, **LIVELY)


# ---- order


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    size=st.integers(1, 4),
    world=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    epoch=st.integers(1, 9),
)
def test_every_image_is_seen_and_processes_have_equal_work(counts, size, world, seed, epoch):
    buckets = {f"bucket {i}": [100 * i + j for j in range(count)] for i, count in enumerate(counts)}
    sizes = dict.fromkeys(buckets, size)
    every = [draws(buckets, sizes, seed, epoch, (rank, world)) for rank in range(world)]
    total = sum(-(-count // size) for count in counts)
    assert {len(mine) for mine in every} == {-(-total // world)}
    drawn_batches = Counter(image for mine in every for draw in mine for image in draw.images)
    assert set(drawn_batches) == {image for members in buckets.values() for image in members}
    assert sum(drawn_batches.values()) <= sum(counts) + (world - 1) * size
    for draw in (draw for mine in every for draw in mine):
        assert len({image // 100 for image in draw.images}) == 1 and 1 <= len(draw.images) <= size
    if world == 1:
        assert max(drawn_batches.values()) == 1
    assert every[0] == draws(buckets, sizes, seed, epoch, (0, world))


def test_epochs_and_seeds_differ_and_short_batches_stay():
    buckets = {"a": list(range(9))}
    first, two, other = (draws(buckets, {"a": 2}, seed, epoch, (0, 1)) for seed, epoch in [(1, 1), (1, 2), (2, 1)])
    assert [d.images for d in first] != [d.images for d in two] != [d.images for d in other]
    assert sorted(len(d.images) for d in first) == [1, 2, 2, 2, 2]


def test_two_processes_see_what_one_with_twice_the_batch_sees(tmp_path):
    make.folder(tmp_path, "4_cat", ((128, 128), (128, 128), (192, 64)))
    options = {k: v for k, v in LIVELY.items() if k != "train_batch_size"}
    whole = list(batches_of(make.config(tmp_path, **options, train_batch_size=4)))
    config = make.config(tmp_path, **options, train_batch_size=2)
    halves = [list(batches_of(config, rank=rank, world=2)) for rank in range(2)]
    assert len(whole) == len(halves[0]) == len(halves[1])
    for both, left, right in zip(whole, *halves, strict=True):
        assert both.captions == left.captions + right.captions
        assert torch.equal(both.pixels, torch.cat([left.pixels, right.pixels]))


def test_three_processes_share_buckets_and_end_at_different_ones():
    """Rows of three batches: full ones of a single bucket, the rest mixed, at any time, and nothing twice in a row."""
    counts = {"a": 14, "b": 10, "c": 4}  # of two images each: 7, 5 and 2 batches, of which 2, 1 and 0 rows are full
    members = {name: [f"{name}{i}" for i in range(count)] for name, count in counts.items()}
    where = set()
    for epoch in range(1, 30):
        every = [draws(members, dict.fromkeys(members, 2), 3, epoch, (rank, 3)) for rank in range(3)]
        rows = list(zip(*every, strict=True))
        assert len(rows) == 5
        drawn_batches = Counter(image for row in rows for draw in row for image in draw.images)
        assert set(drawn_batches) == {image for images in members.values() for image in images}
        assert sum(drawn_batches.values()) == 28 + 2, "one batch is repeated, so that all have the same number"
        full = [row for row in rows if [draw.slot for draw in row] == [0, 2, 4] or any(draw.slot for draw in row)]
        assert sorted(row[0].images[0][0] for row in full) == ["a", "a", "b"]
        for row in full:
            assert len({image[0] for draw in row for image in draw.images}) == 1
            starts = {draw.slot for draw in row}
            assert {start - min(starts) for start in starts} == {0, 2, 4}
        assert all(len({draw.images for draw in row}) == 3 for row in rows)
        where.update(index for index, row in enumerate(rows) if not any(draw.slot for draw in row))
    assert where == set(range(5)), "what is left over comes at any time of an epoch"


# ---- what is in a batch


def test_a_batch_of_pixels(tmp_path):
    make.folder(tmp_path, "1_cat", ((80, 64),))
    (batch,) = batches_of(make.config(tmp_path))
    assert batch.pixels.shape == (1, 3, 64, 64) and batch.latents is None and batch.text is None
    assert batch.sizes.tolist() == [[64, 80, 6, 0, 64, 64]] and batch.sizes.dtype == torch.float32
    assert batch.weights.tolist() == [1.0] and batch.mask is None and len(batch) == 1
    assert batch.captions == ["cat number 0, sitting, on a mat"] and batch.shape == (8, 8)


def test_mirroring_mirrors_the_crop_that_sdxl_is_told():
    from library.data.buckets import BucketFit
    from library.data.images import Image
    from library.data.loading import size_conditioning

    image = Image("x", (852, 640), "", 1, None, 0, BucketFit((640, 448), (640, 481)))
    assert size_conditioning(image, flip=False) == [640, 852, 0, 21, 448, 640]
    assert size_conditioning(image, flip=True) == [640, 852, 0, 22, 448, 640], "640 - 617.4, cut to a whole number"


def test_latents_text_and_mirrored_latents_come_from_the_caches(tmp_path):
    make.folder(tmp_path, "8_cat", ((64, 64),))
    options = {"cache_latents": True, "cache_text_encoder_outputs": True, "network_train_unet_only": True}
    config = make.config(tmp_path, flip_aug=True, **options)
    images = data.scan(config)
    encoding.encode_missing_caches(images, make.Family(), make.parts(), config, make.Run(), print)
    arrays = images.latents.load(images.items[0])
    drawn_batches = Counter()
    for batch in batches_of(config, images=images):
        flipped = bool((batch.latents[0].numpy() == arrays["latents_flipped"]).all())
        assert flipped or (batch.latents[0].numpy() == arrays["latents"]).all()
        assert batch.text["hidden"].shape == (1, 3, 1) and batch.pixels is None
        drawn_batches[flipped] += 1
    assert drawn_batches[True] and drawn_batches[False]


def test_regularisation_images_weigh_what_was_asked(tmp_path):
    make.folder(tmp_path / "train", "1_cat", ((64, 64),) * 2)
    make.folder(tmp_path / "reg", "1_animal", ((64, 64),) * 2)
    config = make.config(tmp_path / "train", reg_data_dir=str(tmp_path / "reg"), prior_loss_weight=0.25)
    weights = {path: float(w) for b in batches_of(config) for path, w in zip(b.paths, b.weights, strict=True)}
    assert {("1_animal" in path, weight) for path, weight in weights.items()} == {(False, 1.0), (True, 0.25)}


@pytest.mark.parametrize("cached", [False, True])
def test_transparency_is_a_mask_at_the_size_of_the_latents(tmp_path, cached):
    from PIL import Image as Pillow

    image = Pillow.new("RGBA", (64, 64), (200, 10, 10, 255))
    image.paste((0, 0, 0, 0), (0, 0, 32, 64))
    (tmp_path / "6_cat").mkdir()
    image.save(tmp_path / "6_cat" / "a.png")
    make.picture(tmp_path / "6_cat" / "b.png")
    config = make.config(tmp_path, alpha_mask=True, flip_aug=True, cache_latents=cached, train_batch_size=12)
    images = data.scan(config)
    encoding.encode_missing_caches(images, make.Family(), make.parts(), config, make.Run(), print)
    (batch,) = batches_of(config, images=images)
    left = torch.cat([torch.zeros(8, 4), torch.ones(8, 4)], 1)
    for path, mask in zip(batch.paths, batch.mask, strict=True):
        assert mask.shape == (1, 8, 8)
        if path.endswith("b.png"):
            assert (mask == 1).all()
        else:
            assert torch.equal(mask[0], left) or torch.equal(mask[0], left.flip(-1))
    assert len({tuple(m.flatten().tolist()) for m in batch.mask}) == 3


@pytest.mark.parametrize("cached", [False, True])
def test_mask_images_are_cut_and_mirrored_like_their_image(tmp_path, cached):
    from PIL import Image as Pillow

    folder = make.folder(tmp_path, "x", ((128, 64),))
    mask = Pillow.new("RGB", (128, 64))
    mask.paste((255, 0, 0), (0, 0, 48, 64))
    (tmp_path / "masks").mkdir()
    mask.save(tmp_path / "masks" / "00.png")
    toml = f"[[datasets]]\nresolution = 64\nbatch_size = 9\n[[datasets.subsets]]\nimage_dir = '{folder}'\n"
    toml += "num_repeats = 9\n"
    (tmp_path / "d.toml").write_text(toml + f"flip_aug = true\nconditioning_data_dir = '{tmp_path / 'masks'}'\n")
    config = make.config(None, dataset_config=str(tmp_path / "d.toml"), masked_loss=True, cache_latents=cached)
    images = data.scan(config)
    encoding.encode_missing_caches(images, make.Family(), make.parts(), config, make.Run(), print)
    (batch,) = batches_of(config, images=images)
    pictures = batch.latents if cached else batch.pixels
    # Of the middle, pixels 32 to 96, the first 16 are red. Stretching the whole mask would make it 3 of 8.
    left = [1, 1, 0, 0, 0, 0, 0, 0]
    mirrored = [mask[0, 0].tolist() == left[::-1] for mask in batch.mask]
    assert all(mask[0, 0].tolist() in (left, left[::-1]) for mask in batch.mask) and len({*mirrored}) == 2
    upright = pictures[mirrored.index(False)]
    for picture, is_mirrored in zip(pictures, mirrored, strict=True):
        torch.testing.assert_close(picture, upright.flip(-1) if is_mirrored else upright)


def test_a_mask_counts_by_the_area_that_it_covers_of_each_latent(tmp_path):
    mask = torch.zeros(16, 16)
    mask[:8, :2] = 1.0  # a quarter of the first latent's 8 x 8 pixels, none of it at its middle
    mask[8:, 8:] = 0.5
    sample = BatchSample("", [16, 16, 0, 0, 16, 16], 1.0, torch.zeros(4, 2, 2), None, None, mask, [], None)
    image = SimpleNamespace(path="a.png", subset=SubsetConfig())
    assert batch_of([sample], [image]).mask.tolist() == [[[[0.25, 0.0], [0.0, 0.5]]]]


def test_larger_images_read_at_least_as_many_tokens_as_smaller_ones(tmp_path):
    folder = make.folder(tmp_path, "1_cat", ((64, 64), (128, 64), (128, 128)))
    for name, words in {"00": "one two three", "01": "one", "02": "one two"}.items():
        (folder / f"{name}.txt").write_text(words)
    batches = batches_of(make.config(tmp_path, enable_bucket=True, resolution="128", bucket_no_upscale=True))
    batches.cut_text(lambda captions: max(len(words.split()) for words in captions))
    assert batches.text_lengths == {64: 3, 128: 3, 256: 3}
    (folder / "02.txt").write_text("one two three four")
    batches = batches_of(make.config(tmp_path, enable_bucket=True, resolution="128", bucket_no_upscale=True))
    batches.cut_text(lambda captions: max(len(words.split()) for words in captions))
    assert batches.text_lengths == {64: 3, 128: 3, 256: 4}


def test_tokens_are_counted_with_what_stands_around_each_caption(tmp_path):
    make.folder(tmp_path, "1_cat", ((64, 64),))
    batches = batches_of(make.config(tmp_path, caption_prefix="a photo of", caption_suffix="by me"))
    counted = []
    batches.cut_text(lambda captions: counted.extend(captions))
    assert counted == ["a photo of cat number 0, sitting, on a mat by me"]


def test_the_base_models_answer_is_kept_where_asked(tmp_path):
    folder = make.folder(tmp_path, "x", ((64, 64),))
    toml = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{folder}'\n"
    (tmp_path / "d.toml").write_text(toml + "custom_attributes = {diff_output_preservation = true}\n")
    (batch,) = batches_of(make.config(None, dataset_config=str(tmp_path / "d.toml")))
    assert batch.keep_base.tolist() == [True]


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({"preserve_prompt": "animal", "metadata_trigger_phrase": "cat"}, "animal number 0, sitting, on a mat"),
        ({"preserve_prompt": "animal", "metadata_trigger_phrase": "dog"}, "animal"),
        ({"preserve_prompt": "animal"}, "animal"),
        ({"metadata_trigger_phrase": "cat"}, ""),
    ],
)
def test_the_class_stands_for_the_trigger_phrase_in_the_preserved_prompt(tmp_path, options, prompt):
    make.folder(tmp_path, "1_cat", ((64, 64),))
    (batch,) = batches_of(make.config(tmp_path, preserve_weight=1.0, **options))
    assert batch.preserved_captions == [prompt] and batch.captions == ["cat number 0, sitting, on a mat"]


def test_texts_of_different_length_are_filled_up_with_zeros():
    actual = padded([{"a": np.ones((2, 3), np.float32)}, {"a": np.ones((4, 3), np.float32)}]) or {}
    assert actual["a"].shape == (2, 4, 3) and actual["a"][0, 2:].abs().sum() == 0
    assert actual["a"][0, :2].eq(1).all() and actual["a"][1].eq(1).all()


@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_texts_of_one_length_are_stacked_in_their_order(shape, dtype):
    chance = np.random.default_rng(0)
    arrays = [chance.integers(0, 2, shape).astype(dtype) for _ in range(4)]
    actual = (padded([{"a": array} for array in arrays]) or {})["a"]
    assert torch.equal(actual, torch.stack([torch.from_numpy(np.atleast_1d(array)) for array in arrays]))
    before = [array.copy() for array in arrays]
    actual.zero_()
    assert all(np.array_equal(*pair) for pair in zip(arrays, before, strict=True)), "a batch shares no memory"


def test_a_face_is_in_the_image(tmp_path):
    from library.data import augment

    for seed in range(20):
        import random

        view = augment.around_face((1000, 800), (256, 256), (700, 300, 120, 100), (2.0, 4.0), random.Random(seed))
        scale = view.resized[0] / 1000
        assert 120 * scale + 1 >= 256 / 4 and 120 * scale - 1 <= 256 / 2
        assert view.left <= 700 * scale <= view.left + 256 and view.top <= 300 * scale <= view.top + 256


@pytest.mark.parametrize(
    ("size", "face", "bounds", "at_random", "seed", "expected"),
    [
        ((284, 431), (137, 173, 103, 130), (1.0, 1.0), False, 23, ((140, 212), 35, 37)),
        ((524, 313), (305, 154, 30, 39), (2.0, 2.5), False, 552, ((346, 207), 169, 54)),  # a small face stays put
        ((511, 393), (179, 109, 7, 125), (1.5, 4.0), False, 69, ((159, 122), 29, 0)),
        ((578, 385), (257, 132, 23, 21), (1.5, 4.0), True, 409, ((547, 365), 264, 99)),
    ],
)
def test_a_face_is_cropped_where_sd_scripts_crops_it(size, face, bounds, at_random, seed, expected):
    """The expected values were recorded there."""
    import random

    from library.data import augment

    view = augment.around_face(size, (64, 96), face, bounds, random.Random(seed), at_random)
    assert (view.resized, view.left, view.top) == expected


def test_random_crops_without_buckets_are_cut_from_the_image_unchanged(tmp_path):
    make.folder(tmp_path, "4_cat", ((200, 100),))
    config = make.config(tmp_path, random_crop=True)
    batches = batches_of(config)
    picture = data_of(batches.images.items[0].path)
    for batch in batches:
        pixels = batch.pixels[0]
        assert any(torch.equal(pixels, picture[:, y : y + 64, x : x + 64]) for y in range(37) for x in range(137))


def data_of(path):
    from library.data import pixels

    return pixels.to_tensor(pixels.read_pixels(path))


def test_captions_know_the_step_and_the_epoch(tmp_path):
    make.folder(tmp_path, "4_cat", ((64, 64),))
    config = make.config(tmp_path, token_warmup_step=4, gradient_accumulation_steps=2, caption_dropout_every_n_epochs=3)
    batches = batches_of(config)
    tags = [[len(b.captions[0].split(", ")) if b.captions[0] else 0 for b in batches] for _ in range(3)]
    assert tags == [[1, 1, 1, 1], [2, 2, 2, 2], [0, 0, 0, 0]]


# ---- workers and resume


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing(tmp_path, enlarge_encoder_output, persistent, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    options = {"max_data_loader_n_workers": 3, "persistent_data_loader_workers": persistent}
    alone, helped = batches_of(enlarge_encoder_output), batches_of(make.config(tmp_path, **LIVELY, **options))
    for _ in range(2):
        for first, other in zip(alone, helped, strict=True):
            same(first, other)


@pytest.mark.parametrize("stop", [0, 1, 7, 8, 11])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_is_exact(tmp_path, enlarge_encoder_output, stop, workers):
    config = make.config(tmp_path, **LIVELY, max_data_loader_n_workers=workers)

    def endless(batches):
        while True:
            yield from batches

    whole = endless(batches_of(config))
    straight = [next(whole) for _ in range(20)]
    first = batches_of(config)
    some = endless(first)
    done = [next(some) for _ in range(stop)]
    state = json.loads(json.dumps(first.state_dict()))
    second = batches_of(config, seed=99)
    assert second.load_state_dict(state) == ""
    continued = endless(second)
    for left, other in zip(straight, done + [next(continued) for _ in range(20 - stop)], strict=True):
        same(left, other)


def test_setting_the_epoch_keeps_the_place_in_the_current_one(enlarge_encoder_output):
    batches = batches_of(enlarge_encoder_output)
    second = list(batches) and list(batches)
    batches.set_epoch(2)
    for first, other in zip(second, batches, strict=True):
        same(first, other)
    batches = batches_of(enlarge_encoder_output)
    batches.load_state_dict({**batches.state_dict(), "epoch": 2, "index": 3})
    batches.set_epoch(2)
    for first, other in zip(second[3:], batches, strict=True):
        same(first, other)


def test_changed_data_is_noticed_on_resume(tmp_path, enlarge_encoder_output):
    state = batches_of(enlarge_encoder_output).state_dict()
    make.picture(tmp_path / "3_cat" / "new.png", (128, 128))
    assert "changed" in str(batches_of(enlarge_encoder_output).load_state_dict(state))


def test_leaving_an_epoch_early_leaves_no_threads(enlarge_encoder_output, tmp_path):
    import threading

    config = make.config(tmp_path, **LIVELY, max_data_loader_n_workers=2)
    before = threading.active_count()
    for _ in batches_of(config):
        break
    assert threading.active_count() == before


def test_shapes_count_batches(enlarge_encoder_output):
    batches = batches_of(enlarge_encoder_output)
    assert sum(batches.shapes.values()) == len(batches) == len(list(batches))
    assert batches.shapes == Counter(b.shape for b in batches_of(enlarge_encoder_output))


def test_moving_to_a_device_moves_everything(enlarge_encoder_output):
    batch = next(iter(batches_of(enlarge_encoder_output))).to("meta")
    assert batch.pixels.is_meta and batch.sizes.is_meta and batch.weights.is_meta and batch.captions


def test_a_broken_image_is_named_while_training(tmp_path, enlarge_encoder_output):
    batches = batches_of(enlarge_encoder_output)
    for path in (tmp_path / "3_cat").glob("*.png"):
        path.write_bytes(b"gone")
    with pytest.raises(ConfigError, match=r"\.png"):
        next(iter(batches))
