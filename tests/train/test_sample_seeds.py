"""A seed that is drawn for a sample is recorded wherever a written one is, and makes the same image again."""

import json

import pytest
from PIL import Image

from tests.training import LORA_OF_EACH_KIND, config_of, train


def texts_of(path):
    with Image.open(path) as image:
        return image.text["parameters"], json.loads(image.text["kohya"])


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
@pytest.mark.parametrize("seed", ["", " --d -1"])
def test_a_drawn_seed_is_recorded_and_makes_the_image_again(demo, squares, tmp_path, script, seed):
    def samples(name, line):
        (tmp_path / f"{name}.txt").write_text(line, encoding="utf-8")
        sampling = {"sample_prompts": tmp_path / f"{name}.txt", "sample_at_first": True, "sample_every_n_steps": 1}
        values = {"train_data_dir": squares, "output_dir": tmp_path / name, "max_train_steps": 1, "seed": 3}
        events = train(config_of(demo, script, sample_steps=2, **values, **sampling)).events("sample")
        return [event for event in events if event["step"] == 0]

    drawn = samples("drawn", f"a cat --w 64 --h 64{seed}\n" * 2)
    seeds = [event["seed"] for event in drawn]
    assert len({*seeds}) == 2, "two lines with one prompt are two images"
    for event in drawn:
        parameters, everything = texts_of(event["file"])
        assert f"Seed: {event['seed']}," in parameters and everything["seed"] == event["seed"]
        assert event["file"].endswith(f"_{event['seed']}.png")
    again = samples("again", "".join(f"a cat --w 64 --h 64 --d {one}\n" for one in seeds))
    for first, second in zip(drawn, again, strict=True):
        assert Image.open(first["file"]).tobytes() == Image.open(second["file"]).tobytes()
