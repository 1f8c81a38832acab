"""Samples that became noise or one colour, or that nothing has changed, are told beside them; others are not."""

import numpy as np
import pytest
from PIL import Image

from library.sampling.prompts import Prompt
from library.train.evaluation import sample_changes
from library.train.evaluation.sample_changes import SampleChanges
from tests.training import LORA_OF_EACH_KIND, config_of, train

PROMPTS = [Prompt(f"a zorb {number}", seed=number) for number in range(3)]


def picture(number, kind):
    """A disc on a plain ground; `kind` says what a training made of it."""
    rng, side = np.random.default_rng(number), 96
    down, across = np.mgrid[:side, :side]
    pixels = np.full((side, side, 3), (120, 160, 250))
    pixels[(down - 50) ** 2 + (across - 40) ** 2 < 30**2] = (240, 150, 40)
    if kind == "noise":
        pixels = np.kron(rng.integers(0, 2, (side // 4, side // 4, 3)) * 255, np.ones((4, 4, 1)))
    if kind in ("black", "white"):
        pixels = np.full_like(pixels, 255 * (kind == "white"))
    if kind == "learned":
        pixels[(down - 30) ** 2 + (across - 70) ** 2 < 18**2] = (20, 20, 30)
    if kind == "rounded":
        pixels = pixels + rng.integers(-1, 2, pixels.shape)
    if kind == "another style":  # fine stripes all over: rougher, and not far from what it was
        pixels = pixels - 50 * (down[..., None] // 3 % 2)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def saved(folder, kinds):
    files = []
    for number, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True)):
        path = folder / f"{len([*folder.iterdir()])}.png"
        picture(number, kind).save(path)
        files.append((prompt, path))
    return files


def judgement(folder, kinds, is_last=False):
    changes = SampleChanges()
    assert changes.judge(saved(folder, ["base"] * 3), 0, False) is None
    return changes, changes.judge(saved(folder, kinds), 100, is_last)


@pytest.mark.parametrize(
    ("kinds", "is_last", "said"),
    [
        (["noise"] * 3, False, sample_changes.BECAME_NOISE),
        (["noise", "noise", "learned"], True, sample_changes.BECAME_NOISE),
        (["noise", "learned", "learned"], True, None),
        (["black"] * 3, False, sample_changes.BECAME_ONE_COLOUR),
        (["white"] * 3, True, sample_changes.BECAME_ONE_COLOUR),
        (["white", "learned", "base"], True, None),
        (["learned"] * 3, True, None),
        (["another style"] * 3, True, None),
        (["base"] * 3, False, None),  # there is time left
        (["base"] * 3, True, sample_changes.NOTHING_LEARNED),
        (["rounded"] * 3, True, sample_changes.NOTHING_LEARNED),
        (["base", "base", "learned"], True, None),
    ],
)
def test_what_the_samples_of_a_step_say(tmp_path, kinds, is_last, said):
    _, judged = judgement(tmp_path, kinds, is_last)
    assert (judged and str(judged)) == said


def test_it_is_said_once(tmp_path):
    changes, judged = judgement(tmp_path, ["noise"] * 3)
    assert judged
    assert changes.judge(saved(tmp_path, ["noise"] * 3), 200, True) is None


def test_a_try_of_a_few_steps_is_not_expected_to_learn(tmp_path):
    changes = SampleChanges()
    changes.judge(saved(tmp_path, ["base"] * 3), 0, False)
    assert changes.judge(saved(tmp_path, ["base"] * 3), sample_changes.MIN_STEPS - 1, True) is None


@pytest.mark.parametrize("missing", ["base model", "seed", "file"])
def test_without_an_image_of_the_same_prompt_and_seed_nothing_is_said(tmp_path, missing):
    changes = SampleChanges()
    if missing != "base model":
        changes.judge(saved(tmp_path, ["base"] * 3), 0, False)
    files = saved(tmp_path, ["noise"] * 3)
    if missing == "seed":
        files = [(Prompt(prompt.prompt, seed=9), path) for prompt, path in files]
    if missing == "file":
        for _, path in files:
            path.unlink()
    assert changes.judge(files, 100, True) is None


def test_a_base_model_that_draws_one_colour_is_not_said_to_have_become_so(tmp_path):
    changes = SampleChanges()
    changes.judge(saved(tmp_path, ["black"] * 3), 0, False)
    judged = changes.judge(saved(tmp_path, ["black"] * 3), 100, True)
    assert str(judged) == sample_changes.NOTHING_LEARNED


@pytest.mark.parametrize("script", LORA_OF_EACH_KIND)
@pytest.mark.parametrize("seed", [" --d 1", ""])
def test_a_training_that_changes_nothing_says_so_once_if_its_samples_can_be_compared(
    demo, squares, tmp_path, monkeypatch, script, seed
):
    monkeypatch.setattr(sample_changes, "MIN_STEPS", 2)
    (tmp_path / "prompts.txt").write_text(f"a cat --w 64 --h 64{seed}\n", encoding="utf-8")
    sampling = {"sample_prompts": tmp_path / "prompts.txt", "sample_at_first": True, "sample_every_n_steps": 1}
    values = {"train_data_dir": squares, "output_dir": tmp_path / "out", "max_train_steps": 2, "learning_rate": 1e-12}
    events = train(config_of(demo, script, sample_steps=2, seed=3, **values, **sampling)).events("warning")
    said = [event["text"] for event in events if event.get("about") == "samples"]
    assert said == [sample_changes.NOTHING_LEARNED] * bool(seed)
