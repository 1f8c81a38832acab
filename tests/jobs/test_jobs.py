"""Jobs as processes: begun, watched, stopped with nothing left unfinished, and what is reported of one that died."""

import os
import sys
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from kohya_gui.tools.commands import job_status
from library.config.problems import ConfigError, Message
from library.config.stored_messages import how_made
from library.jobs import jobs
from library.jobs.work import JobRecord, begin_work, join_work
from library.runs import layout, start
from library.tools.forms import FORMS
from tests import fork_server

pytestmark = pytest.mark.slow  # processes are started
MODULE = "lora_unet_input_blocks_4_1_proj_in"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(start, "subprocess", fork_server.DETACHED)


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


STAND_IN = (
    "import time; from library.jobs.work import begin_work\n"
    "with begin_work('bench') as work:\n"
    "    work.phase('first', 1, 3); work.store({'results': [1]}); print('up', flush=True); time.sleep(60)\n"
)


def until(job, wanted, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if wanted(current := jobs.find_job(job.id)):
            return current
        time.sleep(0.1)
    raise AssertionError(f"{jobs.find_job(job.id).facts}, {job.log}")


def ended(job):
    return until(job, lambda now: not now.active)


def guard(text, kind, label):
    return text


def test_a_form_becomes_a_process_whose_result_is_exact(tmp_path):
    first, second = lora(tmp_path / "a.safetensors"), lora(tmp_path / "b=2.safetensors", 1)
    values = {"loras": f"{first}=0.7\n{second}", "out": str(tmp_path / "sum.safetensors"), "dtype": "float"}
    job = ended(jobs.start_job("tools", FORMS.words("merge", values, guard)))
    assert job.state == "finished" and "one LoRA of 2" in job.log, job.log
    torch.testing.assert_close(product(tmp_path / "sum.safetensors"), 0.7 * product(first) + product(second))
    # The command says why after its job has noted it.
    again = until(jobs.start_job("tools", FORMS.words("merge", values, guard)), lambda now: not now.active and now.log)
    assert again.state == "failed" and "exists already and is not overwritten" in str(again.error)
    assert again.log == f"error: {again.error}\n"


def test_a_stop_reaches_the_next_step(tmp_path):
    """The stop is there before the first step, so that nothing depends on how fast a machine is."""
    words = FORMS.words(
        "resize",
        {"lora": str(lora(tmp_path / "a.safetensors")), "rank": "1", "out": str(tmp_path / "o.safetensors")},
        guard,
    )
    folder = jobs.new("tools")
    (folder / jobs.STOP).touch()
    job = ended(jobs.start_job("tools", words, folder))
    assert job.state == "stopped" and sorted(p.name for p in tmp_path.glob("*.safetensors")) == ["a.safetensors"]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_job_is_watched_and_ended_with_what_it_has(monkeypatch, at_once):
    monkeypatch.setattr(jobs, "job_command", lambda arguments: [sys.executable, "-c", STAND_IN])
    job = until(jobs.start_job("bench", ["bench"]), lambda now: "up" in now.log)
    assert job.state == "running" and job.doing == {"text": "first", "done": 1, "total": 3}
    assert [other.id for other in jobs.jobs_of_kinds("doctor", "bench")] == [job.id] and not jobs.jobs_of_kinds("tools")
    if not at_once:
        job = jobs.stop_job(job)
        assert job.state == "stopping" and job.active
    stopped = jobs.stop_job(job, at_once)
    assert stopped.state == "stopped" and not stopped.error and stopped.result == {"results": [1]}
    assert jobs.stop_job(stopped).state == "stopped"


def test_unknown_jobs_and_dead_ones():
    for job_id in ("nothing", "../x", "", 7, "/etc", "a" * 300):
        with pytest.raises(ConfigError):
            jobs.find_job(job_id)
    dead = {"state": "running", "pid": os.getpid(), "process_start": 1.0}  # the number is another process's by now
    for stop, state in ((False, "interrupted"), (True, "stopped")):
        folder = jobs.new("tools")
        layout.store(folder / jobs.JOB, dead)
        if stop:
            (folder / jobs.STOP).touch()
        job = jobs.find_job(folder.name)
        assert job.state == state and job.error == ("" if stop else jobs.GONE)


def test_the_end_is_written_down(monkeypatch):
    ends = (ConfigError("there is no such model"), MemoryError(), KeyboardInterrupt(), SystemExit(2), OSError("x"))
    told = ("there is no such model", "there is not enough memory for this", "", "", "OSError: x")
    for error, text in zip(ends, told, strict=True):
        with pytest.raises(type(error)), begin_work("bench") as work:
            raise error
        job = jobs.job_at(work.folder)
        assert (job.state, str(job.error)) == ("stopped" if isinstance(error, KeyboardInterrupt) else "failed", text)
    monkeypatch.setenv(jobs.JOB_FOLDER_VARIABLE, str(folder := jobs.new("tools")))
    with join_work("tools") as work:
        assert work.folder == folder and jobs.JOB_FOLDER_VARIABLE not in os.environ
        work.fail()
    assert jobs.job_at(folder).state == "failed" and not jobs.job_at(folder).error
    with join_work("tools") as work:  # in a shell: nothing is written
        work.phase(Message("one"), 1, 2)
        work.store({"x": 1})
    assert work.folder is None and len(jobs.jobs_of_kinds("tools")) == 1


def test_page_gets_templates_of_a_jobs_messages():
    with pytest.raises(ConfigError), begin_work("tools") as work:
        work.phase(Message("checking {file}", file="a.safetensors"), 1, 2)
        doing = job_status(jobs.job_at(work.folder))
        work.store({"problems": [Message("{name} has no {part} matrix", name="a", part="lora_up")]})
        raise ConfigError("{path} is no LoRA", path="a.safetensors")
    failed = job_status(jobs.job_at(work.folder))
    templates = [[note["template"] for note in how_made({**told, "when": ""})] for told in (doing, failed)]
    assert templates == [["checking {file}"], ["{path} is no LoRA", "{name} has no {part} matrix"]]
    assert isinstance(failed["when"], Message)  # in the reader's language, too
    assert [*map(str, failed["problems"])] == ["a has no lora_up matrix"] and failed["warnings"] == []


def test_the_last_jobs_of_a_kind_are_kept_but_none_that_works(monkeypatch):
    monkeypatch.setattr(jobs, "MAX_FOLDERS_PER_KIND", 3)
    with begin_work("bench") as works, begin_work("doctor"):
        for _ in range(5):
            with JobRecord("bench", jobs.new("bench")):
                pass
        folders = [job.folder for job in jobs.jobs_of_kinds("bench")]
    assert works.folder in folders and len(folders) <= 4 and len(jobs.jobs_of_kinds("doctor")) == 1
