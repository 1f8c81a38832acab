"""Without a prompt file samples come from captions: which, of what size, and with which images beside them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from library.check import preflight
from library.config.building import build_config
from library.config.problems import as_problems
from library.config.run_config import ControlUse
from library.config.schema import changed, flatten_sections
from library.families import config_class
from library.sampling import caption_prompts
from library.train.evaluation import samples
from tests.training import LORAS, config_of, pictures, problems_and_remarks, references, train

FLUX, PLAIN = "flux_train_network", ControlUse()


def image(caption, bucket=(1024, 1024), is_reg=False, controls=(), mask_file=""):
    return SimpleNamespace(
        encoded_caption=caption,
        fit=SimpleNamespace(bucket=bucket),
        is_reg=is_reg,
        controls=controls,
        mask_file=mask_file,
    )


def prompts_of(items, number=2, use=PLAIN, sentences=()):
    config = SimpleNamespace(
        control_images=use,
        sample=SimpleNamespace(sample_from_captions=number),
        caption_change=SimpleNamespace(sentences=sentences),
    )
    return caption_prompts.prompts_from(SimpleNamespace(items=list(items), validation=None), config)


def test_captions_from_all_over_the_data_and_one_that_is_new():
    items = [image(f"zorb toy, number {n}\n") for n in range(10)] + [image("a toy", is_reg=True), image(" ")]
    chosen = prompts_of(items)
    assert [prompt.prompt for prompt in chosen] == [
        "zorb toy, number 0",
        "zorb toy, number 5",
        "zorb toy, number, on a beach at sunset",
    ]
    assert [prompt.seed for prompt in chosen] == [1, 2, 3] and chosen == prompts_of(items)


def test_the_new_prompt_is_in_no_caption():
    assert prompts_of([image("zorb at sunset")])[-1].prompt == "zorb at sunset, in a snowy forest"
    assert prompts_of([image("a cat"), image("two dogs")])[-1].prompt == "a lighthouse on a cliff"
    (only,) = prompts_of([image("")])  # no captions at all: there is an image nevertheless
    assert only.prompt == "a lighthouse on a cliff"
    assert len(prompts_of([image("same")] * 5, number=4)) == 2


@pytest.mark.parametrize(
    ("bucket", "size"), [((1024, 1024), (640, 640)), ((1536, 768), (905, 453)), ((512, 512), (512, 512))]
)
def test_samples_are_small_and_have_the_proportions_of_the_image(bucket, size):
    prompt = prompts_of([image("a", bucket)])[0]
    assert (prompt.width, prompt.height) == size


def test_a_model_that_edits_is_shown_the_references_of_the_image():
    shown = [SimpleNamespace(path=f"{n}.png", is_masked=False, mask="") for n in range(3)]
    first, new = prompts_of([image("make it red", controls=shown)], use=ControlUse(least=1, most=2))
    assert first.control_image_path == new.control_image_path == ("0.png", "1.png")
    assert new.prompt == "make it a pencil drawing"
    masked = [SimpleNamespace(path="a.png", is_masked=True, mask="m.png", drawn=None)]
    painted = prompts_of([image("a", controls=masked)], use=ControlUse(inpaints=True))[0]
    assert (painted.control_image_path, painted.control_image_mask_path) == (("a.png",), "m.png")
    assert prompts_of([image("a", mask_file="c.png")], use=ControlUse(guided=True))[0].controlnet_image == "c.png"


def test_sentences_of_words_that_learn_take_the_place_of_captions():
    chosen = prompts_of([image("a")], sentences=("a photo of {}", "a painting of {}"))
    assert [prompt.prompt for prompt in chosen[:2]] == ["a photo of {}", "a painting of {}"]


@pytest.fixture
def run(demo, tmp_path, monkeypatch):
    monkeypatch.setattr(caption_prompts, "MAX_STEPS", 1)
    place = pictures(tmp_path / "data", repeats=1)

    def start(script=FLUX, **values):
        options = {"train_data_dir": place, "output_dir": tmp_path / "out", "output_name": "m", "max_train_steps": 3}
        return train(config_of(demo, script, **options | values))

    return start


FROM_CAPTIONS = {"sample_from_captions": 2, "sample_at_first": True, "sample_every_n_steps": 2}


def test_a_training_without_prompts_ends_with_images(run, tmp_path):
    plain = run(output_dir=tmp_path / "plain", seed=3)
    sampled = run(seed=3, **FROM_CAPTIONS)
    assert sampled.losses == plain.losses
    assert [event["step"] for event in sampled.events("sample")] == [0] * 3 + [2] * 3 + [3] * 3
    told = [event["prompt"] for event in sampled.events("sample")][:3]
    assert all(text.startswith("zorb toy, ") for text in told) and len(set(told)) == 3
    assert all(Image.open(path).size == (64, 64) for path in (tmp_path / "out" / "sample").iterdir())


def test_a_training_with_a_prompt_file_ends_with_images_of_the_last_step_once(run, tmp_path):
    (tmp_path / "p.txt").write_text("zorb --w 64 --h 64 --s 1 --d 3\n", encoding="utf-8")
    plain = run(output_dir=tmp_path / "plain", seed=3)
    steps = {}
    for every in (2, 3):
        made = run(
            seed=3, output_dir=tmp_path / str(every), sample_prompts=tmp_path / "p.txt", sample_every_n_steps=every
        )
        assert made.losses == plain.losses
        steps[every] = [event["step"] for event in made.events("sample")]
    assert steps == {2: [2, 3], 3: [3]}


def test_a_dataset_file_gives_prompts_too(run, tmp_path):
    place = pictures(tmp_path / "other", repeats=1)
    text = f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{place / '1_zorb toy'}'\n"
    (tmp_path / "set.toml").write_text(f"{text}caption_extension = '.txt'\n", encoding="utf-8")
    outcome = run(
        train_data_dir=None, dataset_config=tmp_path / "set.toml", sample_from_captions=1, sample_at_first=True
    )
    assert [event["step"] for event in outcome.events("sample")] == [0, 0, 3, 3]


def test_an_edit_model_is_sampled_with_references(run, tmp_path):
    shown = references(pictures(tmp_path / "data", repeats=1), tmp_path)
    outcome = run("flux_2_train_network", control_directory=shown, max_train_steps=1, **FROM_CAPTIONS)
    assert len(outcome.events("sample")) == 6 and not outcome.events("sample_failed")


def test_one_switch_leaves_all_samples_out(run, tmp_path):
    outcome = run(sample_images=False, sample_prompts=tmp_path / "gone.txt", **FROM_CAPTIONS)
    assert outcome.facts["state"] == "finished" and not outcome.events("sample") and not outcome.events("sample_failed")


def test_a_training_whose_samples_all_fail_goes_on_and_says_so(run, monkeypatch):
    def fails(*_):
        raise RuntimeError("broken VAE")

    monkeypatch.setattr(samples.SampleRunner, "_images", fails)
    outcome = run(**FROM_CAPTIONS)
    said = [str(event["text"]) for event in outcome.events("warning")]
    assert outcome.facts["state"] == "finished" and len(outcome.losses) == 3 and all(map(math.isfinite, outcome.losses))
    assert sum("left out (RuntimeError: broken VAE)" in text for text in said) == 3
    assert len(outcome.events("sample_failed")) == 3 and not outcome.events("sample")


def test_samples_of_one_size_are_one_batch_until_memory_is_short(run, monkeypatch, tmp_path):
    plain, sizes, together = run(output_dir=tmp_path / "plain", seed=3), [], samples.SampleRunner._images

    def counting(self, requests):
        sizes.append(len(requests))
        if sizes[:1] != [3] or len(sizes) > 1 and len(requests) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return together(self, requests)

    monkeypatch.setattr(samples.SampleRunner, "_images", counting)
    made = run(seed=3, sample_batch_size=4, **FROM_CAPTIONS)
    assert sizes == [3, 3, 1, 1, 1, 1, 1, 1] and made.losses == plain.losses
    assert [event["step"] for event in made.events("sample")] == [0] * 3 + [2] * 3 + [3] * 3


def test_a_check_names_what_is_missing_and_what_would_help(demo, squares):
    asked = config_of(demo, FLUX, train_data_dir=squares, sample_at_first=True)
    problems = [problem for problem in problems_and_remarks(asked)[0] if problem.option == "sample_prompts"]
    assert problems and problems[0].fix == {"sample_from_captions": 2}
    never = build_config(
        type(asked), flatten_sections(changed(asked)) | {"sample_from_captions": 2, "sample_at_first": False}, notes=[]
    )
    assert any(
        said.option == "sample_from_captions" and "only on request" in str(said)
        for said in as_problems(preflight.check_before_training(never))
    )
    assert config_class(FLUX)().sample.sample_images


def test_one_caption_is_enough(run):
    assert len(run(sample_from_captions=1, sample_at_first=True, max_train_steps=1).events("sample")) == 4


@pytest.mark.parametrize("script", LORAS)
def test_the_first_image_shows_the_last_step_too(demo, squares, tmp_path, script):
    """Samplers compute what all steps read of a prompt before the denoiser runs as a whole."""
    (tmp_path / "p.txt").write_text("a cat --w 64 --h 64 --d 3\n" * 2, encoding="utf-8")
    values = {"sample_prompts": tmp_path / "p.txt", "sample_every_n_steps": 2, "sample_steps": 2, "sample_scale": 4.0}
    values |= {"train_data_dir": squares, "max_train_steps": 2, "seed": 3, "learning_rate": 5e-2}
    run = train(config_of(demo, script, output_dir=tmp_path / "out", **values))
    first, second = (np.asarray(Image.open(event["file"])) for event in run.events("sample"))
    assert np.array_equal(first, second)
