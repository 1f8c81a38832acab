"""Trainings that begin in the middle: initial_step, initial_epoch and skip_until_initial_step."""

import pytest

from library.config.problems import ConfigError
from tests.training import config_of, train

FROZEN = {"learning_rate": 1e-12, "save_precision": None}  # so that a loss tells the images and the noise of its step


@pytest.fixture(scope="module")
def run(demo, shapes, tmp_path_factory):
    def start(**values):
        base = {"output_dir": tmp_path_factory.mktemp("out"), "output_name": "m", "resolution": 96}
        base |= {"max_train_epochs": 3, "gradient_accumulation_steps": 2, "min_bucket_reso": 64, "train_batch_size": 1}
        config = config_of(demo, "flux_train_network", train_data_dir=shapes, **base | FROZEN | values)
        return train(config)

    return start


@pytest.fixture(scope="module")
def straight(run):
    return run(save_state=True, save_every_n_steps=6)  # seven images: four steps an epoch, the last of one batch


def test_data_and_numbers_go_on_from_the_first_step(run, straight):
    outcome = run(initial_step=6, skip_until_initial_step=True)
    assert list(outcome.numbers()) == [7, 8, 9, 10, 11, 12]
    assert outcome.losses == pytest.approx(straight.losses[6:], rel=1e-5)
    assert [event["epoch"] for event in outcome.events("step")] == [2, 2, 3, 3, 3, 3]
    (said,) = [event["text"] for event in outcome.events("warning") if "start again" in str(event["text"])]
    assert "without resume" in said


def test_without_skipping_only_epochs_are_counted_from_there(run, straight):
    outcome = run(initial_epoch=2, save_every_n_epochs=1)
    assert list(outcome.numbers()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [event["epoch"] for event in outcome.events("step")] == [2] * 4 + [3] * 4
    assert outcome.facts["total_steps"] == 8 and outcome.facts["state"] == "finished"
    assert {path.name for path in outcome.file.parent.glob("*.safetensors")} == {
        "m.safetensors",
        "m-000002.safetensors",
    }


def test_an_epoch_can_be_skipped_as_well(run, straight):
    outcome = run(initial_epoch=3, skip_until_initial_step=True)
    assert list(outcome.numbers()) == [9, 10, 11, 12]
    assert outcome.losses == pytest.approx(straight.losses[8:], rel=1e-5)


def test_the_first_step_wins_over_that_of_the_state(run, straight):
    state = straight.file.parent / "m-step00000006-state"
    same = run(resume=state, initial_step=6, skip_until_initial_step=True)
    assert same.numbers() == run(resume=state).numbers()
    other = run(resume=state, initial_step=8, initial_epoch=1, skip_until_initial_step=True)
    assert list(other.numbers()) == [9, 10, 11, 12]
    assert other.losses == pytest.approx(straight.losses[8:], rel=1e-5)
    assert any(str(event["text"]).startswith("initial_epoch has no effect") for event in other.events("warning"))
    end = straight.file.parent / "m-state"
    assert list(run(resume=end, initial_step=0, max_train_epochs=1).numbers()) == [1, 2, 3, 4]


def test_a_beginning_behind_the_end_is_a_sentence(run):
    with pytest.raises(ConfigError, match=r"initial_step: this training has 12 steps in 3 epochs"):
        run(initial_step=12)
    with pytest.raises(ConfigError, match=r"initial_epoch \(4\) must not be above max_train_epochs \(3\)"):
        run(initial_epoch=4)
    with pytest.raises(ConfigError, match=r"initial_step \(5\) must be below max_train_steps \(5\)"):
        run(initial_step=5, max_train_steps=5, max_train_epochs=None)
