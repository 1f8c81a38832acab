"""Stop after this step, and Stop now: whatever a training is doing, what it learned is saved and continues exactly."""

import signal
import time
from types import SimpleNamespace

import pytest
import torch

from library.config.formats import to_toml
from library.runs import reader, resume, stop
from library.runs.lineage import step_of
from library.runs.record import Record
from library.train import stop_requests
from library.train.evaluation import samples, validation
from library.train.journal import Journal
from library.train.saving import resume_check, state_files
from library.train.step.rng import StepGenerators
from library.train.step.stepper import Stepper
from library.train.stop_requests import ControlRequests, Stopped
from tests import fork_server
from tests.source import ROOT
from tests.training import config_of, ranks, runs_in, train, wait_for

LORA, FULL = "flux_train_network", "sdxl_train"
RANDOM = {
    "flux_train_network": {"network_dropout": 0.3},
    "sdxl_train": {"train_text_encoder": True, "cache_text_encoder_outputs": False, "caption_dropout_rate": 0.3},
}


@pytest.fixture
def when(monkeypatch):
    """Write the stop file of the run, as the page does, just before a method runs for which a condition holds."""
    monkeypatch.setattr(stop_requests, "MAX_READ_SHARE", 1e9)  # look at the disk every time

    def ask(place, name, condition=lambda *given: True, how="now"):
        """Once, and of the training that works then."""
        asked = []
        original = getattr(place, name)

        def told(*given, **more):
            if records and not asked and condition(*given):
                asked.append((records[0].folder / "stop").write_text(how))
            return original(*given, **more)

        monkeypatch.setattr(place, name, told)

    records, begin = [], Record.__init__

    def noted(self, *given, **more):
        begin(self, *given, **more)
        records[:] = [self]

    monkeypatch.setattr(Record, "__init__", noted)
    return ask


@pytest.fixture(scope="module")
def whole(demo, tmp_path_factory):
    """Trainings that nobody stops, each done once."""
    done = {}

    def trained(script, **values):
        key = script, repr(values)
        if key not in done:
            done[key] = train(config_of(demo, script, output_dir=tmp_path_factory.mktemp("whole"), **values))
        return done[key]

    return trained


def goes_on(demo, script, stopped, straight, tmp_path, values):
    """A stopped training has a whole state, and what comes of it is what would have come."""
    folder = tmp_path / "out" / "m-state"
    assert stopped.facts["state"] == "stopped" and resume_check.problems(folder) == []
    assert step_of(resume.newest_state(reader.run_at(stopped.folder))) == step_of(folder) and stopped.file.is_file()
    again = train(config_of(demo, script, output_dir=tmp_path / "out", **values, resume=folder))
    assert stopped.numbers() | again.numbers() == straight.numbers()
    assert not stopped.numbers().keys() & again.numbers().keys()
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in straight.tensors().items())


@pytest.mark.parametrize(
    ("script", "at"),
    [(LORA, (3, 2)), (LORA, (3, 1)), (FULL, (3, 2))],
    ids=["in the middle of an epoch", "at its first batch", "of a whole model"],
)
def test_now_drops_the_batches_of_an_unfinished_step(demo, shapes, tmp_path, whole, script, at, when):
    values = {"train_data_dir": shapes, "output_name": "m", "max_train_steps": 4, "gradient_accumulation_steps": 3}
    values |= RANDOM[script]
    straight = whole(script, **values)
    when(StepGenerators, "seed_batch", lambda _, *place: place == at)
    stopped = train(config_of(demo, script, output_dir=tmp_path / "out", **values))
    step, number = at
    assert max(stopped.numbers()) == step - 1, "the step was not ended early"
    goes_on(demo, script, stopped, straight, tmp_path, values)


@pytest.mark.parametrize(("script", "how"), [(LORA, "after_step"), (LORA, "now"), (FULL, "now")])
def test_without_accumulation_the_step_is_finished(demo, shapes, tmp_path, whole, script, how, when):
    values = {"train_data_dir": shapes, "output_name": "m", "max_train_steps": 5}
    straight = whole(script, **values)
    when(StepGenerators, "seed_batch", lambda _, step, number: step == 3, how)
    stopped = train(config_of(demo, script, output_dir=tmp_path / "out", **values))
    assert max(stopped.numbers()) == 3
    goes_on(demo, script, stopped, straight, tmp_path, values)


def test_samples_and_validation_are_left_as_they_are(demo, shapes, tmp_path, when):
    (tmp_path / "prompts.txt").write_text("zorb toy --w 64 --h 64 --s 9 --d 1\nmore --w 64 --h 64 --s 9\n")
    values = {
        "train_data_dir": shapes,
        "output_name": "m",
        "max_train_steps": 4,
        "validation_split": 0.4,
        "validate_every_n_steps": 2,
        "sample_prompts": tmp_path / "prompts.txt",
        "sample_every_n_steps": 2,
    }
    straight = train(config_of(demo, LORA, output_dir=tmp_path / "straight", **values))
    assert len(straight.events("sample")) == 4 and len(straight.events("validation")) > 1
    for place, name in ((validation.ValidationRunner, "_loss"), (samples.SampleRunner, "_images")):
        when(place, name)
        stopped = train(config_of(demo, LORA, output_dir=tmp_path / "out", **values))
        assert stopped.events("sample") == [] and max(stopped.numbers()) == 2
        assert {event["step"] for event in stopped.events("validation")} == ({2} if name == "_images" else set())
        goes_on(demo, LORA, stopped, straight, tmp_path, values)
        for path in (tmp_path / "out").glob("m*"):
            path.rename(tmp_path / f"{name}{path.name}")


@pytest.mark.parametrize("how", ["after_step", "now"])
def test_a_checkpoint_that_is_being_written_is_finished(demo, squares, tmp_path, whole, how, when):
    values = {
        "train_data_dir": squares,
        "output_name": "m",
        "max_train_steps": 6,
        "save_state": True,
        "save_every_n_steps": 2,
    }
    straight = whole(LORA, **values)
    when(state_files.State, "_fill", lambda self, place: "m-step00000002" in place.name, how)
    stopped = train(config_of(demo, LORA, output_dir=tmp_path / "out", **values))
    assert resume_check.problems(tmp_path / "out" / "m-step00000002-state") == []
    goes_on(demo, LORA, stopped, straight, tmp_path, values)


@pytest.mark.parametrize("doing", ["loading", "caching"])
@pytest.mark.parametrize("how", ["after_step", "now"])
def test_before_the_first_step_nothing_is_there_to_save(demo, squares, tmp_path, when, how, doing):
    when(Journal, "phase", lambda self, what, *numbers: doing in str(what), how)
    values = {"train_data_dir": squares, "output_name": "m", "cache_latents_to_disk": False}
    with pytest.raises(Stopped):
        train(config_of(demo, LORA, output_dir=tmp_path, **values))
    (folder,) = runs_in(tmp_path)
    assert reader.run_at(folder).state == "stopped" and set(path.name for path in tmp_path.iterdir()) == {"runs"}


def test_who_watches_for_stop_now_does_not_interrupt_the_end_of_a_record(demo, squares, tmp_path, when, monkeypatch):
    def slow(self):
        time.sleep(0.2 * self._ended.is_set())  # until the file has surely been looked at, beside
        write(self)

    write = Record._write
    monkeypatch.setattr(stop_requests, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(Record, "_write", slow)
    when(Journal, "phase", lambda self, what, *numbers: "loading" in str(what))
    with pytest.raises(Stopped):
        train(config_of(demo, LORA, train_data_dir=squares, output_dir=tmp_path, output_name="m"))
    assert reader.run_at(*runs_in(tmp_path)).state == "stopped"


@pytest.mark.parametrize("ends", [True, False])
def test_stop_now_interrupts_no_training_that_ends_already(monkeypatch, ends):
    interrupted = []
    monkeypatch.setattr(stop_requests._thread, "interrupt_main", interrupted.append)
    requests = ControlRequests(SimpleNamespace(stop_requested=lambda: "now"))
    requests._wakeup_read = object()
    if ends:
        requests.end()
    requests._watch()
    assert interrupted == ([] if ends else [signal.SIGINT])


def test_now_interrupts_the_first_step_which_may_compile_for_minutes(demo, squares, tmp_path, when, monkeypatch):
    def slow(self, *given):
        (self.requests._record.folder / "stop").write_text("now")
        for _ in range(3000):
            time.sleep(0.1)
        pytest.fail("nothing has interrupted it")

    monkeypatch.setattr(Stepper, "micro_batches", slow)
    with pytest.raises(Stopped):
        train(config_of(demo, LORA, train_data_dir=squares, output_dir=tmp_path, output_name="m"))
    (folder,) = runs_in(tmp_path)
    assert reader.run_at(folder).state == "stopped"


# ---- by the page, of a training in processes of its own, whose saves are slow

SLOW = """
import pathlib, sys, time
from library.train.saving import resume_check, state_files
from library.cli.train_script import main
from library.families import config_class
fill = state_files.State._fill
def slowly(self, place):
    while not pathlib.Path(__file__).with_name("go").exists():
        time.sleep(0.05)
    fill(self, place)
    print("the state is written", flush=True)
state_files.State._fill = slowly
sys.exit(main(config_class("flux_train_network"), sys.argv[1:]))
"""


def test_a_slow_save_is_waited_for_and_never_killed(demo, squares, tmp_path, monkeypatch):
    monkeypatch.setattr("library.runs.process.GRACE", 0.2)
    config = config_of(
        demo, LORA, train_data_dir=squares, output_dir=tmp_path / "out", output_name="m", max_train_steps=100000
    )
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    started = fork_server.start([str(tmp_path / "slow.py"), "--config_file", str(tmp_path / "run.toml")])
    try:
        run = wait_for(
            lambda: next((r for f in runs_in(tmp_path / "out") if (r := reader.run_at(f)).facts.get("step")), None)
        )
        for _ in range(4):  # who asks does not wait
            stop.request(run.id, "now")
        assert not stop.hangs(run)
        time.sleep(1)  # some times GRACE
        assert started.poll() is None
        (tmp_path / "go").touch()
        words = started.communicate(timeout=300)[0]
    finally:
        started.kill()
    run = reader.run_at(run.folder)
    assert started.returncode == 0 and run.state == "stopped", words
    assert resume_check.problems(tmp_path / "out" / "m-state") == []
    assert state_files.read_progress(tmp_path / "out" / "m-state")["current_step"] == run.facts["step"]


def test_two_processes_sample_and_stop_now(demo, squares, tmp_path):
    (tmp_path / "prompts.txt").write_text("one --w 64 --h 64 --s 1 --d 1\ntwo --w 64 --h 64 --s 1 --d 2\n")
    config = config_of(
        demo,
        LORA,
        train_data_dir=squares,
        output_dir=tmp_path / "out",
        output_name="m",
        max_train_steps=100000,
        gradient_accumulation_steps=2,
        sample_prompts=tmp_path / "prompts.txt",
        sample_at_first=True,
    )
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    script = [str(ROOT / "sd-scripts" / f"{LORA}.py"), "--config_file", str(tmp_path / "run.toml")]
    started = ranks(script)
    try:
        run = wait_for(
            lambda: next((r for f in runs_in(tmp_path / "out") if (r := reader.run_at(f)).facts.get("step")), None)
        )
        stop.request(run.id, "now")
        words = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0] and reader.run_at(run.folder).state == "stopped", words
    assert resume_check.problems(tmp_path / "out" / "m-state") == []
    sampled = [event for event in reader.read_events(run.folder) if event["kind"] == "sample"]
    assert [(event["number"], event["prompt"]) for event in sampled] == [(0, "one"), (1, "two")]
