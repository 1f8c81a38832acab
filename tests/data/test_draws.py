"""The random draws of batches: generators are seeded when they first draw, and every version draws the same."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from library import data
from library.data import encoding, loading
from library.data.images import ControlImage
from library.data.loading import Batches
from tests.data import make
from tests.data.test_batches import LIVELY


def random_choices(batches, epochs=2):
    """Captions, mirroring, masks and the next number of each image's generator."""
    parts = [part for epoch in range(1, epochs + 1) for draw in batches.draws(epoch) for part in batches.choices(draw)]
    return [(part.caption, part.flip, part.mask, part.random.random()) for part in parts]


@pytest.mark.parametrize(
    "values",
    [
        {"flip_aug": True},
        {"shuffle_caption": True, "keep_tokens": 1},
        {"caption_tag_dropout_rate": 0.4, "caption_dropout_rate": 0.3},
        {"caption_dropout_every_n_epochs": 2, "enable_wildcard": True},
        LIVELY,
    ],
)
def test_generators_that_are_seeded_when_used_draw_the_same(tmp_path, values, monkeypatch):
    for number in range(3):
        make.picture(tmp_path / "3_cat" / f"{number}.png", (64, 64), seed=number)
        words = f"cat {number}, {{red|blue|green}}, soft light, on a mat\na second line, of tags"
        (tmp_path / "3_cat" / f"{number}.txt").write_text(words, encoding="utf-8")
    config = make.config(tmp_path, **values)
    images = data.scan(config)
    for number, image in enumerate(images.items):
        masks = (ControlImage(image.path, image.size, image.fit, drawn=drawn) for drawn in range(5))
        image.controls = tuple(masks) if number else ()
    batches = Batches(images, config, 5)
    draws = random_choices(batches)
    monkeypatch.setattr(loading, "seeded_when_used", Random)
    assert draws == random_choices(batches)
    assert len({mask for _, _, mask, _ in draws}) > 2 and len({number for *_, number in draws}) == len(draws)


def test_draws_stay_those_of_earlier_versions(tmp_path):
    make.folder(tmp_path, "2_cat", ((64, 64),) * 2)
    values = {"flip_aug": True, "shuffle_caption": True, "caption_tag_dropout_rate": 0.3}
    config = make.config(tmp_path, **values)
    draws = random_choices(Batches(data.scan(config), config, 5), epochs=1)
    assert draws == [
        ("cat number 1, sitting, on a mat", True, None, 0.688425508258022),
        ("sitting, cat number 1", False, None, 0.20950232468088414),
        ("on a mat, sitting, cat number 0", False, None, 0.8477326962847337),
        ("cat number 0", False, None, 0.3402764391569427),
    ]


def test_cached_images_that_draw_nothing_seed_no_generator(tmp_path, monkeypatch):
    make.folder(tmp_path, "4_cat", ((64, 64),) * 2)
    options = {"cache_latents": True, "cache_text_encoder_outputs": True, "network_train_unet_only": True}
    config = make.config(tmp_path, **options)
    images = data.scan(config)
    family: Any = make.Family()
    encoding.encode_missing_caches(images, family, make.parts(), config, make.Run(), print)
    seeds = []
    monkeypatch.setattr(loading, "Random", lambda seed: seeds.append(seed) or Random(seed))
    assert len(list(Batches(images, config, 5))) == 8 and not seeds
    for image in images.items:
        image.subset = replace(image.subset, caption_dropout_rate=0.5)
    assert len(list(Batches(images, config, 5))) == 8 and len(seeds) == 8
