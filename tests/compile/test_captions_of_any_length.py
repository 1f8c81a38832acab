"""Captions of many lengths, at many sizes: one graph, made once, and the numbers of eager code."""

import numpy as np
import pytest
from PIL import Image

from tests.training import config_of, train

SIDES = [(64, 64), (64, 80), (80, 64), (48, 96), (96, 48), (64, 96), (96, 64), (48, 80), (80, 48), (80, 80), (48, 112),
         (112, 48)]  # fmt: skip
WORDS = (1, 12, 30, 70, 140)
BUCKETS = {"resolution": "80", "min_bucket_reso": 16, "bucket_reso_steps": 16, "bucket_no_upscale": True}


@pytest.mark.parametrize("cached", [True, False])
def test_twelve_sizes_and_five_lengths_are_one_graph(demo, tmp_path, cached):
    place = tmp_path / "set" / "1_zorb toy"
    place.mkdir(parents=True)
    for number, size in enumerate(SIDES):
        colour = np.random.default_rng(number).integers(0, 255, 3)
        Image.new("RGB", size, tuple(map(int, colour))).save(place / f"{number:02}.png")
        (place / f"{number:02}.txt").write_text("red " * WORDS[number % len(WORDS)], encoding="utf-8")
    steps = len(SIDES) if cached else 4
    given = {"train_data_dir": tmp_path / "set", "max_train_steps": steps, "train_batch_size": 1, **BUCKETS}
    given |= {"cache_text_encoder_outputs": cached, "enable_bucket": True}

    def losses(name, **more):
        done = train(config_of(demo, "qwen_image_train_network", output_dir=tmp_path / name, **given, **more))
        return done.losses, done.facts["compile"]

    eager, _ = losses("eager")
    backend = "aot_eager" if cached else "eager"  # backward passes are traced in one of both
    compiled, told = losses("compiled", compile=True, compile_backend=backend, compile_fullgraph=True)
    assert len(set(eager)) == steps
    assert compiled == pytest.approx(eager, rel=1e-4)
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0
    assert told["num_graphs"] == 1
