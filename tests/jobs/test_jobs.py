"""Jobs as processes: progress and result in files, a stop that leaves nothing unfinished."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import jobs
from library.config.schema import ConfigError
from library.tools.forms import FORMS

MODULE = "lora_unet_input_blocks_4_1_proj_in"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))


def lora(path, seed=0, rank=2):
    torch.manual_seed(seed)
    tensors = {
        "lora_up.weight": torch.randn(20, rank),
        "lora_down.weight": torch.randn(rank, 20),
        "alpha": torch.tensor(1.0),
    }
    save_file({f"{MODULE}.{name}": tensor for name, tensor in tensors.items()}, path)
    return path


def product(path):
    t = {name.removeprefix(f"{MODULE}."): tensor.float() for name, tensor in load_file(path).items()}
    return t["lora_up.weight"] @ t["lora_down.weight"] * t["alpha"] / len(t["lora_down.weight"])


def ended(job_id, seconds=60):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if (job := jobs.read(job_id)).state not in ("running", "stopping"):
            return job
        time.sleep(0.1)
    raise AssertionError(f"still {job.state}: {job.log}")


def guard(text, kind, label):
    return text


def test_a_form_becomes_a_process_whose_result_is_exact(tmp_path):
    first, second = lora(tmp_path / "a.safetensors"), lora(tmp_path / "b=2.safetensors", 1)
    values = {"loras": f"{first}=0.7\n{second}", "out": str(tmp_path / "sum.safetensors"), "dtype": "float"}
    job = ended(jobs.begin(FORMS.words("merge", values, guard), "merge"))
    assert job.state == "finished" and "one LoRA of 2" in job.log, job.log
    torch.testing.assert_close(product(tmp_path / "sum.safetensors"), 0.7 * product(first) + product(second))
    assert (job.done, job.total) == (job.total, job.total) and job.total > 0
    again = ended(jobs.begin(FORMS.words("merge", values, guard), "merge"))
    assert again.state == "failed" and "exists already and is not overwritten" in again.log and "Trace" not in again.log


def test_a_stop_reaches_the_next_step(tmp_path, monkeypatch):
    """The stop is there before the first step, so that nothing depends on how fast a machine is."""
    first = lora(tmp_path / "a.safetensors")
    real = jobs.start.detached

    def detached(arguments, log, environment, folder):
        jobs.write_atomic(log.with_name(jobs.STOP), "")
        return real(arguments, log, environment, folder)

    monkeypatch.setattr(jobs.start, "detached", detached)
    words = FORMS.words("resize", {"lora": str(first), "out": str(tmp_path / "o.safetensors"), "rank": "1"}, guard)
    job = ended(jobs.begin(words, "resize"))
    assert job.state == "stopped" and sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["a.safetensors"]


def test_unknown_jobs_and_dead_ones(tmp_path):
    for job_id in ("nothing", "../x", "", 7):
        with pytest.raises(ConfigError):
            jobs.read(job_id)
    folder = jobs.root() / "merge-20260101-000000-aaaa"
    folder.mkdir(parents=True)
    (folder / jobs.JOB).write_text(json.dumps({"command": ["tools"], "pid": 1, "process_start": 5.0}))
    assert jobs.read(folder.name).state == "interrupted"
    jobs.stop(folder.name)
    assert jobs.read(folder.name).state == "stopped"


def test_the_last_jobs_are_kept(monkeypatch):
    monkeypatch.setattr(jobs, "KEPT", 2)
    for i in range(4):
        folder = jobs.root() / f"merge-{i}"
        folder.mkdir(parents=True)
        (folder / jobs.END).write_text('{"code": 0}')
    jobs._forget_old()
    assert len(list(jobs.root().iterdir())) == 2
