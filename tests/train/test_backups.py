"""States that are saved by time: what is left of a training that is killed, and that they cost nothing else."""

import shutil
from pathlib import Path

import pytest
import torch

from kohya_gui.panel import actions, history
from library.check import estimate, report
from library.config.building import build_config, replace_options
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.families import config_class
from library.files import remove_folder
from library.measuring.model_stats import model_stats
from library.outputs import paths
from library.runs import reader, resume
from library.runs.lineage import step_of
from library.train.journal import Journal
from library.train.saving import checkpointer, resume_check, state_files
from library.train.step_log import StepLog
from tests.source import ROOT
from tests.training import config_of, ranks, runs_in, train, wait_for

STEPS = 5
OFTEN = {"save_state_every_n_minutes": 1e-9}  # as often as it can be


class Cut(BaseException):
    """The training is gone, as after a kill: nothing else is written."""


def states(folder):
    return sorted(path for path in Path(folder).glob("*-state"))


def number_of(path):
    return int(path.name.removesuffix("-state")[-8:])


def after_the_next_step(training, *_told):
    return training._clock.step == 4


def before_it_is_told(_journal, path, step, **_checked):
    return step == 3


@pytest.mark.parametrize(
    "script, place, name, now",
    [
        ("flux_train_network", StepLog, "push", after_the_next_step),
        ("flux_train", Journal, "saved", before_it_is_told),
    ],
)
def test_a_training_that_is_cut_off_goes_on_exactly_from_its_newest(
    demo, shapes, tmp_path, script, place, name, now, monkeypatch
):
    values = {"train_data_dir": shapes, "output_name": "m", "max_train_steps": STEPS, "gradient_accumulation_steps": 2}
    straight = train(config_of(demo, script, output_dir=tmp_path / "straight", **values))
    values |= {"output_dir": tmp_path / "out", **OFTEN}
    with monkeypatch.context() as patch, pytest.raises(Cut):
        does = getattr(place, name)

        def cut(*given, **more):
            if now(*given, **more):
                raise Cut
            does(*given, **more)

        patch.setattr(place, name, cut)
        train(config_of(demo, script, **values))
    state = states(tmp_path / "out")[-1]
    assert state.name == "m-backup-step00000003-state" and resume_check.problems(state) == []
    (folder,) = runs_in(tmp_path / "out")
    run = reader.run_at(folder)
    assert resume.newest_state(run) == state and "Resume from step 3" in actions.buttons(run, [run])
    rows = history.history_html(run, reader.progress(folder).update())
    assert rows.count("backup") == 1  # those before are not there any more, or the last is not told of

    again = train(config_of(demo, script, **values, resume=state))
    assert again.numbers() == {step: loss for step, loss in straight.numbers().items() if step > 3}
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in straight.tensors().items())
    assert states(tmp_path / "out") == []  # a training that has finished needs none


def test_another_state_replaces_it_and_starts_its_clock_anew(demo, squares, tmp_path):
    config = config_of(
        demo,
        "flux_train_network",
        train_data_dir=squares,
        output_dir=tmp_path,
        output_name="m",
        max_train_steps=6,
        save_state=True,
        save_every_n_steps=3,
        **OFTEN,
    )
    saved = [Path(event["file"]).name for event in train(config).events("saved") if event["file"].endswith("state")]
    assert saved == [
        *("m-backup-step00000002-state", "m-step00000003-state", "m-backup-step00000004-state"),
        *("m-backup-step00000005-state", "m-step00000006-state", "m-state"),
    ]
    assert {path.name for path in states(tmp_path)} == {"m-step00000003-state", "m-step00000006-state", "m-state"}


def far(state):
    return number_of(state) > 3


# NCCL waits for a lost process without an end where gloo, which CPUs have, answers with an error.
HANGS = """
import sys, threading
from library.cli.train_script import main
from library.families import config_class
from library.train import journal
from library.distributed import process_watch
process_watch.GRACE, ends = 0.5, journal.Journal.__exit__

def hangs(self, kind, error, trace):
    if isinstance(error, RuntimeError):
        threading.Event().wait()
    ends(self, kind, error, trace)

journal.Journal.__exit__ = hangs
sys.exit(main(config_class("flux_train_network"), ["--config_file", sys.argv[1]]))
"""


def test_where_one_of_two_processes_is_killed_the_other_says_so_and_both_go_on(demo, squares, tmp_path):
    """The first is the one that says everything otherwise. The other ends although it hangs."""
    config = config_of(
        demo,
        "flux_train_network",
        train_data_dir=squares,
        output_dir=tmp_path / "out",
        output_name="m",
        max_train_steps=100000,
        **OFTEN,
    )
    (tmp_path / "run.toml").write_text(to_toml(config), encoding="utf-8")
    both = ranks(["-c", HANGS, tmp_path / "run.toml"])
    try:
        wait_for(lambda: any(state.poll() is not None for state in both) or any(map(far, states(tmp_path / "out"))))
    finally:
        both[0].kill()
        said = both[1].communicate(timeout=600)[0]
        print(both[0].communicate()[0], said)
    newest = states(tmp_path / "out")[-1]
    assert resume_check.problems(newest) == [] and number_of(newest) == step_of(newest) > 3
    assert {f"random_states_{rank}.bin" for rank in range(2)} <= {path.name for path in newest.iterdir()}
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: another process of this training has ended") and str(newest) in line
    assert both[1].returncode == 1 and "Traceback" not in said
    (run,) = map(reader.run_at, runs_in(tmp_path / "out"))
    assert (run.state, f"error: {run.error}") == ("failed", line)
    more = replace_options(config, resume=str(newest), max_train_steps=step_of(newest) + 2)
    (tmp_path / "run.toml").write_text(to_toml(more), encoding="utf-8")
    for process in ranks([ROOT / "sd-scripts" / "flux_train_network.py", "--config_file", tmp_path / "run.toml"]):
        said = process.communicate(timeout=600)[0]
        assert process.returncode == 0, said
    assert (tmp_path / "out" / "m.safetensors").is_file() and states(tmp_path / "out") == []


# ---- room on the disk


def test_without_room_it_is_left_out_and_reported_once(demo, squares, tmp_path, monkeypatch):
    values = {"train_data_dir": squares, "output_name": "m", "max_train_steps": 6}
    plain = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "plain", **values))
    monkeypatch.setattr(checkpointer, "free_space", lambda place: 10**6)
    outcome = train(config_of(demo, "flux_train_network", output_dir=tmp_path / "full", **values, **OFTEN))
    (told,) = [
        event["text"] for event in outcome.events("warning") if "save_state_every_n_minutes" in str(event["text"])
    ]
    assert "there is none yet" in told and "1.0 MB free" in told
    assert states(tmp_path / "full") == [] and outcome.facts["state"] == "finished"
    assert outcome.losses == plain.losses


def test_the_only_one_is_not_deleted_to_make_room(demo, squares, tmp_path, monkeypatch):
    """Nor does it fill the disk: what is saved at the end has its room."""
    free, asked = [2**40, 0], []

    def room(place):
        asked.append(states(tmp_path))
        return free[0] if len(asked) == 1 else free[1]

    monkeypatch.setattr(checkpointer, "free_space", room)
    config = config_of(
        demo,
        "flux_train_network",
        train_data_dir=squares,
        output_dir=tmp_path,
        output_name="m",
        max_train_steps=5,
        **OFTEN,
    )
    (told,) = [event["text"] for event in train(config).events("warning") if "minutes" in str(event["text"])]
    assert "the newest is m-backup-step00000002-state" in told
    assert [len(there) for there in asked] == [0, 1, 1, 1][: len(asked)] and len(asked) >= 3


def test_room_is_kept_for_what_is_saved_later(tmp_path, monkeypatch):
    state = state_files.State({state_files.WEIGHTS: {"a": torch.zeros(2**20)}}, {"optimizer": torch.zeros(2**21)}, {})
    names = paths.Names(tmp_path, "m", ".safetensors")
    keeper = checkpointer.Backups.__new__(checkpointer.Backups)
    keeper._names = names
    later = state.size + state.size_of_weights
    for free, held, fits in (
        (state.size + later, 0, True),
        (state.size + later - 1, 0, False),
        (later, state.size, True),
        (later - 1, state.size, False),
    ):
        shutil.rmtree(tmp_path / "m-backup-step00000001-state", ignore_errors=True)
        if held:
            names.backup(1).mkdir()
            (names.backup(1) / "x").write_bytes(bytes(held))
        monkeypatch.setattr(checkpointer, "free_space", lambda place, free=free: free)
        assert (keeper._short(names.backup(2), state) == "") == fits, (free, held)


def test_a_disk_error_ends_no_training(demo, squares, tmp_path, monkeypatch):
    def broken(self, folder):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(state_files.State, "write", broken)
        config = config_of(
            demo,
            "flux_train_network",
            train_data_dir=squares,
            output_dir=tmp_path,
            output_name="m",
            max_train_steps=4,
            **OFTEN,
        )
        outcome = train(config)
    assert outcome.facts["state"] == "finished" and outcome.file.is_file()
    assert sum("was not saved" in str(event["text"]) for event in outcome.events("warning")) == 1


def test_check_counts_the_room(demo, squares, tmp_path, monkeypatch):
    config = config_of(demo, "sdxl_train", train_data_dir=squares, output_dir=tmp_path / "out")
    size = estimate.state_size(config, model_stats(config))

    def disk(config):
        return next(finding for finding in report.make_report(config).findings if finding.topic == "disk")

    often = replace_options(config, save_state_every_n_minutes=10)
    assert "a state to resume from" in str(disk(often).text) and "a state" not in str(disk(config).text)
    monkeypatch.setattr(report, "free_space", lambda place: 82 * 10**9)
    assert str(disk(config).text).startswith("82.0 GB free")  # as the panel and the doctor count
    monkeypatch.setattr(report, "free_space", lambda place: report.saved_size(config) + 2.9 * size)
    assert disk(config).verdict == "ok"
    assert disk(often).verdict == "hint" and "save_state_every_n_minutes" in str(disk(often).text)


def test_the_estimate_is_near_to_what_is_written(demo, squares, tmp_path):
    for script in ("flux_train_network", "sdxl_train"):
        config = config_of(
            demo,
            script,
            train_data_dir=squares,
            output_dir=tmp_path / script,
            output_name="m",
            max_train_steps=1,
            save_state_on_train_end=True,
        )
        train(config)
        written = sum(path.stat().st_size for path in (tmp_path / script / "m-state").iterdir())
        assert estimate.state_size(config, model_stats(config)) == pytest.approx(written, rel=0.35)


# ---- names


def test_names_of_another_training_are_left_alone(tmp_path):
    mine = paths.Names(tmp_path, "m", ".safetensors")
    for name in ("m-backup-step00000001-state", "m-2-backup-step00000001-state", "m-backup-step1-state", "m-state"):
        (tmp_path / name).mkdir()
    assert [path.name for path in mine.backups()] == ["m-backup-step00000001-state"]
    assert mine.owns("m-backup-step00000001-state") and not mine.owns("m-2-backup-step00000001-state")


def test_a_folder_is_never_there_in_part(tmp_path, monkeypatch):
    """Who is killed while it is deleted leaves a name that is tidied up at the next start."""
    folder = paths.Names(tmp_path, "m", ".safetensors").backup(3)
    folder.mkdir()
    (folder / "train_state.json").write_text("{}")
    monkeypatch.setattr("library.files.shutil.rmtree", lambda *given, **how: None)
    remove_folder(folder)
    assert not folder.exists() and len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir())[0].name.endswith(".tmp")


@pytest.mark.parametrize("options", [-1, "nan", "inf", "soon"])
def test_no_number_of_minutes(options):
    with pytest.raises(ConfigError, match="save_state_every_n_minutes"):
        build_config(config_class("flux_train_network"), {"save_state_every_n_minutes": options})


def test_nothing_is_the_default_as_upstream():
    config = config_class("flux_train_network")
    assert build_config(config, {}).save.save_state_every_n_minutes is None
    assert build_config(config, {"save_state_every_n_minutes": "0"}).save.save_state_every_n_minutes is None
    assert build_config(config, {"save_state_every_n_minutes": "7.5"}).save.save_state_every_n_minutes == 7.5
