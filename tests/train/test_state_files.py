"""A state that is not what was saved is refused, with the file and what is wrong with it."""

import json
import os
import shutil
import subprocess

import pytest
import torch

from library.config.problems import ConfigError
from library.train.saving import resume_check, state_files
from tests.training import cached, config_of, pictures, short_captions, train  # noqa: F401

FILES = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.bin", "train_state.json")
EMA = "ema.safetensors"


@pytest.fixture(scope="module")
def began(demo, tmp_path_factory):
    """A training with its states of steps 2 and 3, and the config that continues it."""
    few = cached(pictures(tmp_path_factory.mktemp("few"), ((64, 64),) * 2, repeats=1))
    out = tmp_path_factory.mktemp("out")
    how = {"train_data_dir": few, "output_dir": out, "output_name": "m", "network_dropout": 0.1, "ema_decay": 0.9}
    train(config_of(demo, "flux_train_network", **how, max_train_steps=3, save_every_n_steps=2, save_state=True))
    return out, lambda state, **more: config_of(
        demo, "flux_train_network", **{**how, "max_train_steps": 4, "resume": state, **more}
    )


@pytest.fixture
def state(began, tmp_path):
    return shutil.copytree(began[0] / "m-state", tmp_path / "m-state")


def refused(state):
    """What is said of a state."""
    return [str(problem) for problem in resume_check.problems(state)]


def flipped(path):
    """One bit of a file is another, its size and time are not."""
    about, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))


def test_every_file_of_a_state_is_listed_as_sha256sum_reads_it(state):
    names = {line.split()[1] for line in (state / state_files.SUMS).read_text().splitlines()[1:-1]}
    assert names == {path.name for path in state.iterdir()} - {state_files.SUMS} == {*FILES, EMA}
    assert refused(state) == []
    if shutil.which("sha256sum"):
        assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=state, check=False).returncode == 0


@pytest.mark.parametrize("name", [*FILES, EMA, state_files.SUMS])
def test_a_missing_file_is_named(state, name):
    (state / name).unlink()
    assert refused(state) == [f"resume: {state} cannot be resumed, as {name} is missing; choose another -state folder"]


@pytest.mark.parametrize("name", [*FILES, EMA, state_files.SUMS])
def test_one_flipped_bit_is_named(state, name):
    flipped(state / name)
    (said,) = refused(state)
    assert said.startswith(f"resume: {state} cannot be resumed, as ") and f"{name} is" in said


@pytest.mark.parametrize("name", [*FILES, EMA])
def test_a_file_of_another_step_is_named_with_both_steps(began, state, name):
    shutil.copy(began[0] / "m-step00000002-state" / name, state / name)
    assert refused(state) == [
        f"resume: {state} cannot be resumed, as {name} is of step 2 and not of step 3; choose another -state folder"
    ]


@pytest.mark.parametrize("name", ["random_states_1.bin", "scaler.pt"])
def test_a_file_that_was_added_is_named(state, name):
    shutil.copy(state / "random_states_0.bin", state / name)
    (said,) = refused(state)
    assert f"{name} is not in SHA256SUMS, so it is of another state" in said
    (state / name).rename(state / "notes.bin")  # which a resume does not read
    assert refused(state) == []


def test_a_file_that_the_list_leaves_out_is_not_read(state):
    lines = [line for line in (state / state_files.SUMS).read_text().splitlines(keepends=True)[:-1] if EMA not in line]
    (state / state_files.SUMS).write_text("".join(lines) + state_files._last_line("".join(lines)), newline="\n")
    (said,) = refused(state)
    assert f"{EMA} is not in SHA256SUMS" in said


def test_a_list_of_other_places_is_damaged(state):
    for name in ("../m-state/model.safetensors", "/etc/passwd", "a b"):
        text = (state / state_files.SUMS).read_text()
        text = "".join(text.splitlines(keepends=True)[:-1]) + f"{'0' * 64}  {name}\n"
        (state / state_files.SUMS).write_text(text + state_files._last_line(text), newline="\n")
        assert "SHA256SUMS is damaged" in refused(state)[0]


def test_all_that_is_wrong_is_one_sentence(began, state):
    (state / "scheduler.bin").unlink()
    (state / "optimizer.bin").write_bytes(b"")
    shutil.copy(began[0] / "m-step00000002-state" / "model.safetensors", state)
    (said,) = refused(state)
    wrong = ("scheduler.bin is missing", "model.safetensors is of step 2 and not of step 3", "optimizer.bin is damaged")
    assert all(part in said for part in wrong)


def test_a_damaged_state_is_refused_before_anything_is_trained(began, state, tmp_path):
    flipped(state / "optimizer.bin")
    with pytest.raises(ConfigError, match="optimizer.bin is damaged"):
        train(began[1](state, output_dir=tmp_path / "new"))


def test_an_older_state_without_the_list_is_resumed_with_a_remark(began, state, tmp_path):
    """As version 0.3 wrote it: no list, no word of it or of its version in train_state.json, no step in the files."""
    facts = state_files.read_progress(state)
    remaining = {
        name: value for name, value in facts.items() if name not in (state_files.CHECKED, "groups", "arithmetic")
    }
    (state / "train_state.json").write_text(json.dumps(remaining))
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.bin"):
        value = torch.load(state / name, weights_only=True)
        value.pop(state_files.STEP_KEY)
        torch.save(value, state / name)
    (state / state_files.SUMS).unlink()
    assert refused(state) == []
    part = train(began[1](state, output_dir=tmp_path / "new"))
    assert [event["text"] for event in part.events("warning") if event["text"].startswith("resume")] == [
        f"resume: {state} was saved by another version of this trainer: the training continues, but perhaps not "
        "bit-exactly; CHANGELOG.md names what has changed",
        f"resume: {state} was saved without checksums, by an older version, so damage to its files is not noticed",
    ]
    straight = train(began[1](began[0] / "m-state", output_dir=tmp_path / "straight"))
    assert part.losses == straight.losses
    (state / "random_states_0.bin").unlink()
    assert "it lacks random_states_0.bin" in refused(state)[0]


def test_the_check_says_that_another_version_may_compute_otherwise(began, state):
    config = began[1](state)
    assert resume_check.changes(config, 6) == []
    facts = json.loads((state / "train_state.json").read_text())
    (state / "train_state.json").write_text(json.dumps(facts | {"arithmetic": facts["arithmetic"] + 1}))
    (said,) = resume_check.changes(config, 6)
    assert "by another version of this trainer: the training continues, but perhaps not bit-exactly" in str(said)


def test_a_file_is_read_once_for_the_check_and_the_training(state, monkeypatch):
    assert refused(state) == []
    monkeypatch.setattr(state_files.hashlib, "file_digest", None)
    assert refused(state) == []
