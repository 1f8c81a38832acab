"""Training ends when the held-out loss no longer falls, says why, and is not taken further by mistake."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from library.config.building import build_config, draft
from library.config.formats import to_toml
from library.families import config_class
from library.runs import reader
from library.train.evaluation.early_stop import IN_STATE, EarlyStop
from library.train.saving import state_files
from library.train.step.clock import Clock
from tests.source import ROOT
from tests.training import Outcome, cached, config_of, pictures, problems_and_remarks, ranks, runs_in, train

SCRIPT = "flux_train_network"
STILL = {"learning_rate": 1e-30, "early_stop_patience": 1, "max_train_steps": 30, "validation_split": 0.25}


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    return cached(pictures(tmp_path_factory.mktemp("eight"), ((64, 64),) * 8, repeats=1))


def patient(patience=2):
    return EarlyStop(SimpleNamespace(steps=SimpleNamespace(early_stop_patience=patience)))


def test_validations_since_the_best_are_counted_and_survive_a_state():
    stop = patient()
    for step, loss in enumerate((3.0, 2.0, 2.0, float("nan")), 1):
        assert not stop.due and stop.lacks(step)
        stop.count(step, loss)
        assert not stop.lacks(step)
    assert stop.due
    assert stop.state() == {IN_STATE: {"best_loss": 2.0, "best_step": 2, "waited": 2, "last_step": 4}}
    again = patient(3)
    again.restore(stop.state())
    assert not again.due and again.state() == stop.state()
    again.count(5, 1.5)
    assert again.state()[IN_STATE] == {"best_loss": 1.5, "best_step": 5, "waited": 0, "last_step": 5}
    assert patient(None).state() == {} and not patient(None).lacks(7)
    fresh = patient()
    fresh.restore(fresh.state())  # infinity is no number of JSON
    fresh.count(1, 9.0)
    assert fresh.state()[IN_STATE]["best_loss"] == 9.0


def test_every_process_does_what_the_first_one_decides():
    clock, silent = Clock(total=9, per_epoch=3, epochs=3), MagicMock()
    patient().end_when_due(clock, SimpleNamespace(gather=lambda mine: [True, mine]), silent)
    assert clock.done
    other, over = Clock(total=9, per_epoch=3, epochs=3), patient(1)
    over.count(1, float("nan"))
    assert over.due
    over.end_when_due(other, SimpleNamespace(gather=lambda mine: [False, mine]), silent)
    assert not other.done


def test_an_ended_training_is_not_taken_further_by_mistake(demo, eight, tmp_path):
    def run(**values):
        return train(config_of(demo, SCRIPT, train_data_dir=eight, output_name="m", **STILL | values))

    done = run(output_dir=tmp_path / "a", save_state_on_train_end=True)
    assert done.facts["state"] == "finished" and len(done.losses) == done.facts["total_steps"] == 6
    assert done.facts["early_stop"]["planned_steps"] == 30
    (event,) = done.events("early_stop")
    assert event["best_step"] == done.facts["early_stop"]["best_step"] == 3
    assert "after step 6 (early_stop_patience)" in str(event["text"]) and "1 validation" in str(event["text"])
    state = tmp_path / "a" / "m-state"

    def problems(**values):
        options = STILL | {"resume": state, "output_dir": tmp_path / "a", "output_name": "m"} | values
        return [*problems_and_remarks(config_of(demo, SCRIPT, train_data_dir=eight, **options))[0]]

    (problem,) = problems()
    assert problem.option == "resume" and "early_stop_patience" in problem.options and "step 3" in str(problem)
    assert not problems(early_stop_patience=2) and not problems(early_stop_patience=None)
    # Without its result there is something left to do: to write it.
    again = run(output_dir=tmp_path / "b", resume=state)
    assert again.file.is_file() and not again.losses and again.facts["state"] == "finished"
    further = run(output_dir=tmp_path / "c", resume=state, early_stop_patience=2)
    assert list(further.numbers()) == [7, 8, 9] and further.facts["early_stop"]["step"] == 9


def test_two_processes_end_after_the_same_step(demo, eight, tmp_path):
    config = config_of(demo, SCRIPT, train_data_dir=eight, output_dir=tmp_path, output_name="m", **STILL)
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    for process in ranks([ROOT / "sd-scripts" / f"{SCRIPT}.py", "--config_file", tmp_path / "run.toml"]):
        said = process.communicate()[0]
        assert process.returncode == 0, said
    (folder,) = runs_in(tmp_path)
    done = Outcome(tmp_path / "m.safetensors", folder)
    assert done.file.is_file() and reader.run_at(folder).state == "finished"
    assert len(done.losses) == done.facts["early_stop"]["step"] == 4


def test_a_patience_that_no_training_of_this_length_needs_is_pointed_out(demo, eight, tmp_path):
    def told(**values):
        options = {"train_data_dir": eight, "output_dir": tmp_path, "max_train_steps": 9} | values
        problems = problems_and_remarks(config_of(demo, SCRIPT, **STILL | options))[1]
        return [str(problem) for problem in problems if problem.option == "early_stop_patience"]

    assert told(early_stop_patience=3) == [
        "early_stop_patience has no effect here: this training has only 3 validations"
    ]
    assert not told(early_stop_patience=2) and not told(early_stop_patience=3, validate_every_n_steps=2)


def test_a_training_that_ends_before_its_first_validation_is_pointed_out(demo, eight, tmp_path):
    """The end of an epoch that is cut short is none."""

    def told(**values):
        options = {"train_data_dir": eight, "output_dir": tmp_path, "max_train_steps": 2} | values
        problems = problems_and_remarks(config_of(demo, SCRIPT, **STILL | options))[1]
        return [problem for problem in problems if "validation never runs" in str(problem)]

    (first,) = told()
    assert first.option == "early_stop_patience" and "the training ends after 2 steps" in str(first)
    assert first.fix["validate_every_n_steps"] <= 2 and not told(**first.fix)
    (second,) = told(early_stop_patience=None)
    assert second.option == "validation_split"
    assert not told(max_train_steps=3) and not told(early_stop_patience=None, validation_split=0)


def test_early_stopping_needs_held_out_images(eight, tmp_path):
    with pytest.raises(Exception, match="early_stop_patience needs held-out images: set validation_split"):
        build_config(config_class(SCRIPT), {"early_stop_patience": 2}, notes=[])
    with pytest.raises(Exception, match="dataset_config with validation_split"):
        build_config(config_class("sdxl_train"), {"early_stop_patience": 2}, notes=[])
    file = tmp_path / "data.toml"
    file.write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = '{eight / '1_zorb toy'}'\n")
    config = draft(config_class("sdxl_train"), {"early_stop_patience": 2, "dataset_config": file, "max_train_steps": 3})
    problems = [str(problem) for problem in problems_and_remarks(config)[0] if problem.option == "early_stop_patience"]
    assert problems == [
        "early_stop_patience needs held-out images, and none are held out: set validation_split in the dataset_config"
    ]


def test_states_of_trainings_without_it_say_nothing_of_it(demo, eight, tmp_path):
    options = {"train_data_dir": eight, "output_dir": tmp_path, "output_name": "m", "max_train_steps": 1}
    train(config_of(demo, SCRIPT, save_state_on_train_end=True, **options))
    assert IN_STATE not in state_files.read_progress(tmp_path / "m-state")
