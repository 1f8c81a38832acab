"""Buckets against sd-scripts' numbers, and what must hold for every image."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from library.data.buckets import Buckets, crop_ltrb, resolutions

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/sd_scripts_vectors.json").read_text(encoding="utf-8"))
SDXL = {"resolution": (1024, 1024), "smallest": 256, "largest": 2048, "step": 64}


@pytest.mark.parametrize("case", GOLDEN["bucket_resolutions"], ids=lambda c: f"{c['max_reso']}-{c['steps']}")
def test_lists_of_buckets_are_sd_scripts(case):
    actual = resolutions(tuple(case["max_reso"]), case["min"], case["max"], case["steps"])
    assert [list(size) for size in actual] == case["resos"]


def test_bounds_between_two_steps_are_widened():
    assert resolutions((1024, 1024), 300, 1500, 64) == resolutions((1024, 1024), 256, 1536, 64)


@pytest.mark.parametrize("mode", ["upscale", "no_upscale"])
@pytest.mark.parametrize("case", GOLDEN["select_bucket_1024_256_2048_64"], ids=lambda c: str(c["image"]))
def test_images_fall_into_the_buckets_of_sd_scripts(case, mode):
    size, expected = tuple(case["image"]), case[mode]
    fit = Buckets(no_upscale=mode == "no_upscale", **SDXL).fit(size)
    assert [list(fit.bucket), list(fit.resized)] == [expected["bucket"], expected["resized"]]
    assert crop_ltrb(fit.bucket, size) == pytest.approx(expected["crop_ltrb"])


sides = st.integers(64, 9000)


@settings(max_examples=200, deadline=None)
@given(width=sides, height=sides, no_upscale=st.booleans(), step=st.sampled_from([16, 32, 64]))
def test_every_image_covers_its_bucket(width, height, no_upscale, step):
    rules = Buckets((1024, 768), no_upscale=no_upscale, smallest=256, largest=2048, step=step)
    fit = rules.fit((width, height))
    if fit is None:
        # Only what is far too thin for the grid has no place.
        assert no_upscale and max(width, height) / min(width, height) > 64
        return
    assert fit.bucket[0] % step == fit.bucket[1] % step == 0 < min(fit.bucket)
    assert fit.resized[0] >= fit.bucket[0] and fit.resized[1] >= fit.bucket[1]
    if no_upscale:
        assert fit.resized[0] <= width + step and fit.resized[1] <= height + step
        assert fit.resized[0] - fit.bucket[0] < step or fit.resized[1] - fit.bucket[1] < step
    else:
        assert fit.resized[0] == fit.bucket[0] or fit.resized[1] == fit.bucket[1]
        assert fit.bucket[0] * fit.bucket[1] <= 1024 * 768


@settings(max_examples=100, deadline=None)
@given(width=sides, height=sides, bucket_width=st.integers(1, 32), bucket_height=st.integers(1, 32))
def test_the_letterbox_has_the_shape_of_the_image_and_lies_in_the_bucket(width, height, bucket_width, bucket_height):
    bucket = bucket_width * 64, bucket_height * 64
    left, top, right, bottom = crop_ltrb(bucket, (width, height))
    assert 0 <= left < right <= bucket[0] + 1e-6 and 0 <= top < bottom <= bucket[1] + 1e-6
    assert (right - left) / (bottom - top) == pytest.approx(width / height)


def test_without_buckets_every_image_gets_the_one_size():
    rules = Buckets((512, 640), enabled=False)
    assert {rules.fit(size).bucket for size in [(100, 100), (3000, 200), (512, 640)]} == {(512, 640)}


def test_too_thin_an_image_has_no_bucket():
    assert Buckets((1024, 1024), no_upscale=True).fit((40, 900)) is None
    assert Buckets((1024, 1024), no_upscale=True).fit((60000, 64)) is None


@pytest.mark.parametrize(
    ("rules", "grid", "word"),
    [
        (Buckets((1024, 1024), step=16), 32, "bucket_reso_steps"),
        (Buckets((512, 512), smallest=640), 32, "min_bucket_reso"),
        (Buckets((512, 512), smallest=32), 32, "min_bucket_reso"),
        (Buckets((1536, 1024), largest=1024), 32, "max_bucket_reso"),
        (Buckets((1000, 1024), enabled=False), 64, "resolution"),
    ],
)
def test_impossible_rules_are_named(rules, grid, word):
    assert [word] == [str(problem).partition(" ")[0].rstrip(":") for problem in rules.problems(grid)]


def test_possible_rules_have_no_problem():
    assert not list(Buckets((1024, 1024), largest=1024).problems(64))
    assert not list(Buckets((512, 512), smallest=640, no_upscale=True).problems(32)), (
        "the bounds count for nothing there"
    )
