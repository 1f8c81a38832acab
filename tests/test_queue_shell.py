"""`kohya queue` and `kohya runs`: what a person with a shell alone does with trainings."""

import json

import pytest

from library.check import isolated
from library.cli import main
from library.runs import gpu_slots, queue, reader
from library.runs.record import Record

CONFIG = (
    'output_dir = "{out}"\noutput_name = "{name}"\nmax_train_steps = 30\nsample_prompts = "{prompts}"\nseed = {seed}\n'
)


@pytest.fixture
def kohya(tmp_path, monkeypatch, capsys):
    """Run a command; its exit code, and its output: an object with --json, else text."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(queue, "work", lambda: None)

    def check(reading, launch):
        return {"findings": isolated.findings_of_reading(reading), "fit": {"step": 2.0, "peak": 9.5}, "steps": 30}

    monkeypatch.setattr(isolated, "check_reading", check)

    def run(*arguments):
        try:
            code = main.main([*arguments])
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        return code, json.loads(said.out) if "--json" in arguments else said.out + said.err

    return run


def write(tmp_path, name, seed=1, prompt="a fox"):
    (tmp_path / "prompts.txt").write_text(prompt, encoding="utf-8")
    values = {"out": (tmp_path / "out").as_posix(), "prompts": (tmp_path / "prompts.txt").as_posix()}
    (tmp_path / f"{name}.toml").write_text(CONFIG.format(name=name, seed=seed, **values), encoding="utf-8")
    return str(tmp_path / f"{name}.toml")


def test_the_queue_without_a_page(kohya, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_slots, "has_gpu", lambda: True)
    script = ("--script", "flux_train_network")
    code, wrong = kohya("queue", "add", write(tmp_path, "fox"), *script, "--learning_rate", "-5", "--json")
    assert code == 1 and wrong["field"] == "learning_rate" and "--learning_rate" in wrong["error"]
    assert kohya("queue", "add", write(tmp_path, "fox"), *script)[0] == 0
    code, added = kohya("queue", "add", write(tmp_path, "dog", 2), *script, "--first", "--json")
    assert code == 0 and added["name"] == "dog"
    code, said = kohya("queue", "add", write(tmp_path, "dog"), *script)
    assert code == 1 and "dog waits in the queue for the same folder" in said
    code, listed = kohya("queue", "list", "--json")
    assert [(row["name"], row["total_steps"], row["seconds"], row["memory"]) for row in listed["entries"]] == [
        ("dog", 30, 60.0, 9.5),
        ("fox", 30, 60.0, 9.5),
    ]
    assert "fox, unlike dog: seed 1 instead of 2" in kohya("queue")[1]
    assert kohya("queue", "move", "fox", "first") == (0, "fox is number 1 of 2 waiting\n")
    assert kohya("queue", "move", "fox", "up")[0] == 0 and kohya("queue", "move", "fox", "2")[0] == 0
    assert kohya("queue", "move", "fox", "there")[0] == 1 and kohya("queue", "move")[0] == 2
    assert kohya("queue", "remove", "cat") == (1, "error: no entry of the queue is called cat: dog, fox\n")
    assert kohya("queue", "remove", added["id"])[0] == 0 and kohya("queue", "restore")[0] == 0
    assert kohya("queue", "duplicate", "fox") == (0, "fox-2 is in the queue\n")
    assert kohya("queue", "pause", "--json")[1]["paused"] == "by you"
    assert "kohya queue resume" in kohya("queue", "list")[1]
    assert kohya("queue", "resume")[0] == 0 and not queue.read_queue().paused
    assert "Did you mean" in kohya("que")[1] and "did you mean remove" in kohya("queue", "remov")[1]


def test_runs_are_shown_asked_compared_and_removed(kohya, tmp_path):
    out = tmp_path / "out"
    model, sample = out / "fox.safetensors", out / "sample" / "fox.png"
    sample.parent.mkdir(parents=True)
    for path in (model, sample, out / "mine.safetensors"):
        path.write_bytes(b"x" * 1000)
    settings = {"optim": {"learning_rate": 1e-4}}
    with Record.start(settings, "flux_train_network", out, "fox", "FLUX.1 LoRA") as fox:
        fox.plan(9)
        fox.step({"step": 9, "loss": 0.25, "s_it": 1.5})
        fox.event("saved", file=str(model), step=9)
        fox.event("sample", file=str(sample), step=9, number=0, prompt="a fox")
        fox.event("saved", file=str(tmp_path / "prompts.txt"), step=9)  # outside of its folder
    with Record.start({}, "flux_train_network", out, "dog", "FLUX.1 LoRA") as dog:
        assert kohya("runs", "rm", "dog", "--yes") == (1, "error: dog is still running: stop it first.\n")
        assert kohya("runs", "save")[0] == 0 and kohya("runs", "sample", "dog")[0] == 0
        assert dog.requests() == ["sample", "save"]
        code, said = kohya("runs", "stop", "dog", "--pause-queue")
        assert code == 0 and "it stops before the first one, or right after it" in said
        assert dog.stop_requested() == "after_step"
    assert queue.read_queue().paused and kohya("runs", "stop") == (1, "error: no run is active\n")
    assert "has ended" in kohya("runs", "sample", "dog")[1]
    (tmp_path / "prompts.txt").write_text("a fox", encoding="utf-8")
    listed = kohya("runs", "--json")[1]["runs"]
    assert [(run["name"], run["state"], run["loss"]) for run in listed] == [
        ("dog", "stopped", None),
        ("fox", "finished", 0.25),
    ]
    assert "fox" not in kohya("runs", "--state", "stopped")[1] and kohya("runs", "--state", "gone")[0] == 2
    shown = kohya("runs", "show", "fox", "--json")[1]
    assert shown["settings"] == {"learning_rate": 1e-4} and str(model) in shown["saved"]
    compared = kohya("runs", "compare", "fox", "dog", "--json")[1]
    assert compared["options"] == [{"option": "learning_rate", "values": ["0.0001", None], "words": ""}]
    code, said = kohya("runs", "rm", "fox")
    assert code == 1 and "2 files that it has written stay" in said
    assert "--yes" in said and reader.find_run(fox.id)
    code, removed = kohya("runs", "rm", "fox", "--files", "--yes", "--json")
    assert code == 0 and sorted(removed["files"]) == sorted([str(model), str(sample)])
    assert not model.exists() and not sample.exists() and not fox.folder.exists()
    assert (out / "mine.safetensors").exists() and (tmp_path / "prompts.txt").exists()
    assert [run.id for run in reader.runs()] == [dog.id]
    assert kohya("runs", "show", "fox")[1] == "error: no run is called fox: dog\n"
