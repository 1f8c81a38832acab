"""Several sizes, variants of captions that are encoded once, and the empty caption among them: in every script."""

import shutil

import pytest

from library import data, families
from library.demo.images import write_references
from tests.contract.test_family import assert_equal
from tests.training import RUNS, config_of, pictures, train

SIZES = {"resolution": "64;96", "enable_bucket": True, "min_bucket_reso": 64, "bucket_reso_steps": 32}
WORDS = {"shuffle_caption": True, "keep_tokens": 1, "caption_dropout_rate": 0.3}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Images of two shapes with several tags each, and other pictures of their names."""
    folder = tmp_path_factory.mktemp("sources")
    images = pictures(folder / "images", ((64, 64), (128, 64), (64, 64)), repeats=1)
    for number, file in enumerate(sorted(images.rglob("*.txt"))):
        file.write_text(f"zorb toy {number}, red, night, sea, smile", encoding="utf-8")
    return images, write_references(images, folder / "controls")


# Of one U-Net only: both encode and draw alike.
@pytest.mark.parametrize("script", [script for script in RUNS if families.config_class(script).family != "sd15"])
def test_sizes_and_variants_of_captions_train_and_resume(demo, sources, tmp_path, script):
    """On disk and in memory alike; a resumed training draws the same sizes, variants and empty captions."""
    kind = families.config_class(script)
    images = shutil.copytree(sources[0], tmp_path / "images")
    encodes = kind.kind != "textual-inversion"  # there, words that learn are read in each step
    options = {"train_data_dir": images, "output_name": "m", "max_train_steps": 8, **SIZES, **WORDS}
    options |= {"conditioning_data_dir": sources[1]} if kind().control_images.guided else {}
    cache = {"cache_latents": True, "cache_text_encoder_outputs": encodes}
    cache |= {"cached_caption_variants": 3} if encodes else {}

    def run(folder, **values):
        return train(config_of(demo, script, output_dir=tmp_path / folder, **options | cache | values))

    memory = run("a", save_at_steps="3", save_state=True)
    image_set = data.scan(config_of(demo, script, output_dir=tmp_path, **options | cache))
    assert {image_set.datasets[image.dataset].resolution for image in image_set.items} == {(64, 64), (96, 96)}
    assert memory.facts["data"]["images"] == 3 and memory.facts["data"]["repeats"] == 6
    assert {event["step"] for event in memory.events("step")} == set(range(1, 9))

    disk = run("b", **{f"{name}_to_disk": value for name, value in cache.items() if value is True})
    assert disk.losses == memory.losses
    assert_equal(memory.tensors(), disk.tensors())
    if encodes and families.config_class(script).family != "anima":
        assert [*images.rglob("empty-caption*")] and [*images.rglob("*_v1.*")]

    again = run("c", resume=tmp_path / "a" / "m-step00000003-state")
    assert list(again.numbers()) == [4, 5, 6, 7, 8] and again.losses == memory.losses[3:]
    assert_equal(memory.tensors(), again.tensors())
