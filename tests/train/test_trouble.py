"""What ends a training before its time: told in a sentence, kept in the log, and nothing else is harmed."""

import errno
import io
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from library.adapter_files.storage import FilePlan
from library.cli import train_script
from library.config import phases
from library.config.formats import to_toml
from library.config.problems import FAILS_AGAIN, ConfigError, Message
from library.families import config_class
from library.runs import layout, reader, record
from library.runs.record import Record
from library.sampling import sheet
from library.train import errors
from library.train.saving import resume_check, state_files
from library.train.step.loss import LossFunction
from library.train.step_log import StepLog
from tests.training import config_of, fresh, listing, pictures, runs_in, train

SCRIPT = "flux_train_network"
SECRETS = {"wandb_api_key": "canary-of-the-wandb-key", "huggingface_token": "canary-of-the-hub-token"}

FP8 = {"fp8_base": True, "mixed_precision": "bf16"}
CKPT_BF16 = {"gradient_checkpointing": True, "mixed_precision": "bf16"}


@pytest.fixture
def config(demo, squares, tmp_path):
    def make(script=SCRIPT, **values):
        values = {
            "train_data_dir": squares,
            "output_dir": tmp_path / "out",
            "output_name": "m",
            "save_every_n_steps": 2,
            "save_state": True,
        } | values
        return config_of(demo, script, **values)

    return make


@pytest.fixture
def run_shell(config, tmp_path, capsys):
    """Run a script as a shell does; exit code, and what it said."""

    def run(**values):
        (tmp_path / "run.toml").write_text(to_toml(config(**values), secrets=True), encoding="utf-8")
        fresh()
        try:
            code = train_script.main(config_class(SCRIPT), ["--config_file", str(tmp_path / "run.toml")])
        except SystemExit as e:
            code = e.code
        return code, capsys.readouterr()

    return run


def fails_at(monkeypatch, step, error):
    """Let a step fail."""
    compute, count = LossFunction.__call__, iter(range(1, 1000))

    def spoilt(*args):
        if next(count) == step:
            raise error
        return compute(*args)

    monkeypatch.setattr(LossFunction, "__call__", spoilt)


def the_run(output):
    return reader.run_at(next(iter(runs_in(output))))


def test_a_mistake_of_ours_is_a_sentence_and_its_traceback_is_in_the_log(run_shell, monkeypatch, tmp_path):
    fails_at(monkeypatch, 3, KeyError("img_in"))
    code, said = run_shell()
    run = the_run(tmp_path / "out")
    log = run.folder / "log.txt"
    assert code == 1 and "Traceback" not in said.out + said.err
    assert said.err.splitlines()[-2:] == ["error: KeyError: 'img_in'", f"error: The whole story is in {log}"]
    assert "Traceback" in log.read_text() and "in spoilt" in log.read_text()
    assert run.state == "failed" and run.error == "KeyError: 'img_in'"


def test_what_the_user_can_mend_is_one_sentence(run_shell, monkeypatch, tmp_path):
    fails_at(monkeypatch, 1, ConfigError("loss: it is too Monday"))
    code, said = run_shell()
    assert code == 1
    assert [line for line in said.err.splitlines() if "error" in line] == ["error: loss: it is too Monday"]
    assert "Traceback" in (the_run(tmp_path / "out").folder / "log.txt").read_text()


def test_before_there_is_a_log_the_traceback_is_shown(monkeypatch, run_shell):
    monkeypatch.setattr("library.check.preflight.check_before_training", lambda config: 1 / 0)
    code, said = run_shell()
    assert code == 1 and "Traceback" in said.err and "error: ZeroDivisionError" in said.err


def test_the_log_of_a_run_from_the_page_gets_the_traceback_too(tmp_path, monkeypatch):
    folder = tmp_path / "out" / "runs" / "cat"
    folder.mkdir(parents=True)
    layout.store(folder / layout.RUN, {"id": "cat", "state": "starting"})
    (folder / layout.LOG).write_text("first line\n")
    monkeypatch.setenv("KOHYA_RUN_DIR", str(folder))
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    with pytest.raises(RuntimeError) as raised, Record.start({}, SCRIPT, tmp_path / "out", "cat") as record:
        record.say("spoken lines get there by the console")
        raise RuntimeError("odd")
    log = (folder / layout.LOG).read_text()
    assert log.startswith("first line\nTraceback") and "spoken" not in log and 'RuntimeError("odd")' in log
    assert raised.value.__notes__ == [f"The whole story is in {folder / layout.LOG}"]


def test_no_secret_is_in_any_file(run_shell, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_TOKEN", "canary-of-the-environment")
    words = " ".join([*SECRETS.values(), "canary-of-the-environment"])
    fails_at(monkeypatch, 3, RuntimeError(f"401 for https://user:{words}@hub"))
    code, said = run_shell(**SECRETS, log_config=True, logging_dir=str(tmp_path / "logs"))
    assert code == 1
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path.name != "run.toml"):
        assert b"canary" not in path.read_bytes(), path
    assert the_run(tmp_path / "out").error == "RuntimeError: 401 for https://user:*** *** ***@hub"


# ---- data


def test_an_image_that_is_gone_costs_no_step(config, tmp_path, monkeypatch):
    """Of several batches a step, those before it are read again. Nothing but the state shows that it was gone."""
    own = pictures(tmp_path / "pictures", ((64, 64),) * 6, repeats=1)
    values = {
        "train_data_dir": own,
        "train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 5,
        "cache_latents": False,
        "save_state": False,
        "save_every_n_steps": None,
        "max_data_loader_n_workers": 0,
        "network_dropout": 0.2,
    }
    straight = train(config(**values, output_dir=tmp_path / "straight"))
    (path,) = own.rglob("4.png")
    content, push = path.read_bytes(), StepLog.push
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="4.png is missing.*; resume from") as raised:
        patch.setattr(StepLog, "push", lambda self, *told: (push(self, *told), path.unlink(missing_ok=True)))
        train(config(**values))
    (state,) = (tmp_path / "out").glob("m-backup-step*-state")
    assert str(state) in str(raised.value) and str(the_run(tmp_path / "out").error) == str(raised.value)
    path.write_bytes(content)
    done = state_files.read_progress(state)["current_step"]
    resumed = train(config(**values, resume=state))
    assert 0 < done < 5 and resumed.losses == straight.losses[done:]
    assert all(torch.equal(resumed.tensors()[name], tensor) for name, tensor in straight.tensors().items())


# ---- memory


def test_out_of_memory_names_the_levers_and_the_state(run_shell, monkeypatch, tmp_path):
    fails_at(monkeypatch, 4, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."))
    code, said = run_shell()
    last = said.err.splitlines()[-1]
    assert code == 1 and last == (
        "error: the GPU ran out of memory (step 4): use gradient_checkpointing, lower train_batch_size, use "
        "offload_modulation, set blocks_to_swap, use cpu_offload_checkpointing or lower resolution; resume "
        f"from {tmp_path / 'out' / 'm-step00000002-state'}"
    )
    run = the_run(tmp_path / "out")
    assert run.state == "failed" and f"error: {run.error}" == last
    assert "Tried to allocate" in (run.folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("script", "values", "doing", "words"),
    [
        (SCRIPT, {"vae_batch_size": 4}, "caching latents", "latents): lower resolution"),
        (SCRIPT, {}, "caching captions", "lower text_encoder_batch_size"),
        (
            SCRIPT,
            {"blocks_to_swap": 2, "train_batch_size": 1, **FP8},
            "",
            "step 7): use offload_modulation, raise blocks_to_swap",
        ),
        (SCRIPT, {"cache_text_encoder_outputs": False}, "", "cache_text_encoder_outputs"),
        ("sdxl_train", {**CKPT_BF16, "train_batch_size": 1}, "", "use full_bf16 or lower"),
        ("flux_train", {"full_bf16": True, "mixed_precision": "bf16"}, "", "Adafactor and use fused_backward_pass"),
        (SCRIPT, {}, "generating samples", "smaller sample images"),
    ],
)
def test_levers_are_those_that_are_left(config, script, values, doing, words):
    phase = Message(doing) if doing else Message("step {step}", step=7)
    error = errors.explain_error(torch.OutOfMemoryError("..."), config(script, **values), phase, {})
    assert words in str(error)


def test_the_computers_own_memory(config):
    where = (config(), phases.CACHING_LATENTS, {})
    for error in (MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")):
        assert str(errors.explain_error(error, *where)).startswith(
            "the computer ran out of CPU memory (caching latents): use fewer"
        )
    other = ValueError("x")
    assert errors.explain_error(other, *where) is other


@pytest.mark.parametrize(
    ("error", "is_likely_again"),
    [(torch.OutOfMemoryError("..."), True), (MemoryError(), True), (RuntimeError("Connection reset by peer"), False)],
)
def test_errors_say_whether_the_same_settings_fail_again(config, monkeypatch, error, is_likely_again):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    explained = errors.explain_error(error, config(), Message("step 7"), {})
    assert [problem.code == FAILS_AGAIN for problem in explained.problems] == [is_likely_again]


def test_a_process_that_has_ended_is_named_where_there_are_several(config, monkeypatch):
    """gloo's and NCCL's own words, as they come from the processes that are left."""
    where = config(), "step 7", {"state": Path("out/at-5-state")}
    for words in (
        "[pair.cc:537] Read error [127.0.0.1]:2963: Connection reset by peer. GLHF!",
        "NCCL error: remote process exited or there was a network error",
    ):
        error = RuntimeError(words)
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        said = str(errors.explain_error(error, *where))
        assert said.startswith("another process of this training has ended") and "at-5-state" in said
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
        assert errors.explain_error(error, *where) is error


def test_process_that_does_not_respond_in_time_is_reported(config, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    error = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 60000ms for recv operation to complete")
    said = str(errors.explain_error(error, config(), "step 7", {"state": Path("out/at-5-state")}))
    assert "has not answered in time (step 7)" in said and "ddp_timeout" in said and "at-5-state" in said


def test_the_sentence_is_that_of_the_process_that_failed():
    said = str(errors.process_gone("step 7", {"state": Path("at-5-state")}, "process 1 ... has ended: no memory"))
    assert said == "process 1 ... has ended: no memory; resume from at-5-state"


def test_a_scaler_that_never_finds_its_scale_ends_it():
    numbers = errors.NonFiniteWatch(scaled=True)
    lines = [{"loss": 1.0, "grad_norm": float("inf")}] * errors.MAX_SKIPPED_STEPS
    assert [numbers.check(line) for line in lines] == [""] * (errors.MAX_SKIPPED_STEPS - 1) + ["gradients"]
    assert errors.NonFiniteWatch(scaled=True).check({"loss": float("nan"), "grad_norm": 1.0}) == "loss"


# ---- disk


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_in_a_file_harms_nothing(run_shell, monkeypatch, tmp_path):
    """The fourth file breaks off after its header."""
    write, count = FilePlan.write, iter(range(1, 100))

    def filling(self, path, metadata):
        if next(count) < 4:
            write(self, path, metadata)
        else:
            path.write_bytes(self.header(metadata))
            full()

    monkeypatch.setattr(FilePlan, "write", filling)
    code, said = run_shell(max_train_steps=8)
    check_full(tmp_path / "out", code, said)


def check_full(output, code, said):
    run = the_run(output)
    assert code == 1 and run.state == "failed"
    assert said.err.splitlines()[-1].startswith(f"error: the disk is full: cannot write {output / 'm.safetensors'}")
    names = {path.name for path in output.iterdir()} - {"runs"}
    assert not [name for name in names if name.startswith(".")]
    states = [output / name for name in names if name.endswith("-state")]
    assert states and all(resume_check.problems(folder) == [] for folder in states)
    files = [name for name in names if name.endswith(".safetensors")]
    assert files and all(load_file(output / name) for name in files)


def test_too_little_room_is_seen_before_writing(run_shell, monkeypatch, tmp_path):
    usage = shutil.disk_usage
    free = iter([*[2**40] * 3, *[2**10] * 1000])
    monkeypatch.setattr("library.files.shutil.disk_usage", lambda place: usage(place)._replace(free=next(free)))
    code, said = run_shell(max_train_steps=4)
    assert code == 1 and "error: not enough disk space for" in said.err
    assert the_run(tmp_path / "out").state == "failed"
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith(".")]


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can mount a small disk")
def test_a_disk_that_is_really_full(tmp_path, config, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    monkeypatch.setattr("library.check.preflight.MIN_SPACE", 0)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(small)], capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with pytest.raises(ConfigError, match="disk"):
            train(config(output_dir=small, max_train_steps=40, save_every_n_steps=1))
        run = the_run(small)
        assert run.state == "failed" and "disk" in str(run.error)
        assert [path for path in small.iterdir() if path.name.endswith("-state")]
        for folder in small.glob("*-state"):
            assert resume_check.problems(folder) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


class Closed(io.StringIO):
    """As when the terminal goes away, or `| head` has seen enough."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_log_without_room_is_no_error(capsys):
    log = record._LogFile("/dev/full", encoding="utf-8")
    log.emit(logging.makeLogRecord({"msg": "a line"}))
    log.close()
    assert not capsys.readouterr().err


def test_a_console_that_was_closed_does_not_end_a_training(config, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Closed())
    outcome = train(config())
    monkeypatch.undo()
    assert outcome.facts["state"] == "finished"


# ---- the record


def test_the_record_is_complete(config, tmp_path, monkeypatch):
    """Also where a sample cannot be written, which ends nothing."""
    (tmp_path / "prompts.txt").write_text("zorb --w 64 --h 64 --s 1 --d 3\nfull --w 64 --h 64 --s 1 --d 3\n")
    write = sheet.write_atomic
    monkeypatch.setattr(sheet, "write_atomic", lambda path, save: write(path, full if "_01_" in path.name else save))
    outcome = train(
        config(
            max_train_steps=4,
            compile=True,
            compile_backend="eager",
            save_last_n_steps=100,
            cache_latents_to_disk=False,
            cache_text_encoder_outputs_to_disk=False,
            sample_prompts=tmp_path / "prompts.txt",
            sample_every_n_steps=4,
            sample_at_first=True,
            seed=3,
        )
    )
    facts = outcome.facts
    assert facts["total_steps"] == facts["step"] == 4 and facts["state"] == "finished" and facts["error"] is None
    assert facts["peak_ram_gb"] > 0.1 and facts["peak_memory_gb"] is None and facts["seed"] == 3
    assert facts["compile"]["num_graphs"] and facts["hardware"]["device"] == "cpu"
    assert facts["process_start"] <= facts["started"] <= facts["ended"] and facts["heartbeat"] >= facts["ended"] - 1
    phases = {event["name"] for event in outcome.events("phase")}
    assert {"reading the data set", "loading the model", "caching latents", "caching captions", "saving"} <= phases
    assert outcome.events("compile") and all(event["step"] <= 1 for event in outcome.events("compile"))
    saved = {os.path.basename(event["file"]): event for event in outcome.events("saved")}
    assert set(saved) == {
        "m-step00000002.safetensors",
        "m-step00000002-state",
        "m-step00000004.safetensors",
        "m-step00000004-state",
        "m.safetensors",
        "m-state",
    }
    assert saved["m.safetensors"]["bytes"] == outcome.file.stat().st_size
    assert saved["m-state"]["bytes"] == sum(f.stat().st_size for f in (tmp_path / "out" / "m-state").iterdir())
    assert [(event["step"], event["number"]) for event in outcome.events("sample")] == [(0, 0), (4, 0)]
    left_out = [event["text"] for event in outcome.events("warning") if "is left out" in event["text"]]
    assert len(left_out) == 2 and all("the disk is full: cannot write" in text for text in left_out)
    lines = outcome.events("step")
    assert {"step", "epoch", "loss", "avr_loss", "lr", "grad_norm", "memory_gb"} <= lines[0].keys()
    assert listing(tmp_path / "out" / "sample")
