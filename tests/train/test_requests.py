"""What a run does on the way when somebody asks for it, and what it says about its files and its time."""

import json
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from library.config.building import replace_options
from library.outputs import verify
from library.runs import layout, reader
from library.runs.record import Record
from library.train import stop_requests
from library.train.saving import resume_check
from library.train.step import step_metrics
from tests.training import LORAS, config_of, train


@pytest.fixture
def ask(monkeypatch):
    """Ask the run for something as soon as it has written down a step."""
    monkeypatch.setattr(stop_requests, "MAX_READ_SHARE", 1e9)  # look at the disk after every step

    def at(step, *requests):
        write = Record.step

        def told(self, values):
            write(self, values)
            for request in requests if values["step"] == step else ():
                layout.request_file(self.folder, request).touch()

        monkeypatch.setattr(Record, "step", told)

    return at


@pytest.mark.parametrize("script", LORAS)
def test_samples_and_saves_on_demand_change_no_number(demo, squares, tmp_path, ask, script):
    (tmp_path / "prompts.txt").write_text("zorb toy --w 64 --h 96 --s 2 --d 1\n", encoding="utf-8")
    values = {"train_data_dir": squares, "sample_prompts": tmp_path / "prompts.txt", "max_train_steps": 4}
    plain = train(config_of(demo, script, output_dir=tmp_path / "plain", **values))
    ask(1, "sample", "save")
    asked = train(config_of(demo, script, output_dir=tmp_path / "asked", **values))
    assert asked.losses == plain.losses
    assert all(torch.equal(asked.tensors()[name], tensor) for name, tensor in plain.tensors().items())
    (sampled,) = asked.events("sample")
    assert Image.open(sampled["file"]).size == (64, 96)
    file, folder, last = asked.events("saved")
    assert plain.events("sample") == [] and len(plain.events("saved")) == 1
    assert sampled["step"] == file["step"] == folder["step"] < 4 and last["step"] == 4
    assert (
        file["file"].endswith(f"-step{file['step']:08d}.safetensors")
        and resume_check.problems(Path(folder["file"])) == []
    )
    assert file["ok"] and last["ok"] and "it loads" in file["text"]
    assert not any(layout.request_file(asked.folder, request).exists() for request in layout.REQUESTS)
    for name in ("data_s", "transfer_s", "compute_s"):
        assert all(seconds >= 0 for seconds in asked.numbers(name).values())
    assert asked.numbers("compute_s")[4] > 0
    assert [run.state for run in map(reader.run_at, (plain.folder, asked.folder))] == ["finished"] * 2


@pytest.mark.parametrize(("script", "cached"), [("flux_train_network", True), ("flux_train_network", False)])
def test_prompts_that_are_changed_while_it_trains_are_sampled_from_then_on(
    demo, squares, tmp_path, monkeypatch, script, cached
):
    first, second = "zorb toy --w 64 --h 64 --s 2 --d 1\n", "# night\nsea, night --w 64 --h 64 --s 2 --d 1\n"
    file, write, said = tmp_path / "prompts.txt", Record.step, {1: second + first, 3: "zorb --w 99999", 5: "  "}

    def change(self, values):
        write(self, values)
        if values["step"] in said:
            file.write_text(said[values["step"]], encoding="utf-8")

    options = {} if cached else {"cache_text_encoder_outputs": False, "cache_text_encoder_outputs_to_disk": False}
    values = {
        "train_data_dir": squares,
        "sample_prompts": file,
        "sample_every_n_steps": 2,
        "max_train_steps": 6,
    } | options
    file.write_text(second + first, encoding="utf-8")
    straight = train(config_of(demo, script, output_dir=tmp_path / "straight", **values))
    file.write_text(first, encoding="utf-8")
    monkeypatch.setattr(Record, "step", change)
    changed = train(config_of(demo, script, output_dir=tmp_path / "changed", **values))
    sampled = [(left["step"], left["prompt"]) for left in changed.events("sample")]
    assert sampled == [(step, text) for step in (2, 4, 6) for text in ("sea, night", "zorb toy")]
    for left, other in zip(changed.events("sample"), straight.events("sample"), strict=True):
        assert Path(left["file"]).read_bytes() == Path(other["file"]).read_bytes()
    assert changed.losses == straight.losses
    log = (changed.folder / "log.txt").read_text(encoding="utf-8")
    assert "prompts.txt was changed: 2 sample prompts from here on" in log
    assert log.count("Until this is fixed") == 2 and "holds no prompt" in log
    assert "line 1: width must be from 1 to 8192, not 99999" in log


def test_a_step_is_split_where_its_time_went(monkeypatch):
    now = iter([0.0, 3.0, 3.0, 4.0, 5.0, 5.5, 10.0])  # asked, there; two batches moved; the end
    monkeypatch.setattr(step_metrics, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    watch = step_metrics.StepTimer(device=type("Device", (), {"type": "cpu"}))
    batch = type("Batch", (), {"to": lambda self, device: self})()
    next(watch.waited([[batch, batch]]))
    watch.moved(batch), watch.moved(batch)
    assert step_metrics.seconds(watch.ended()) == {"data_s": 3.0, "transfer_s": 1.5, "compute_s": 5.5}
    assert step_metrics.seconds(watch.ended()) == {}


def rewritten(path, change):
    """The same file with another header: names and shapes that the model does not have."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def test_a_file_that_does_not_load_is_found_out(demo, squares, tmp_path):
    config = config_of(demo, "sdxl_train_network", train_data_dir=squares, output_dir=tmp_path, max_train_steps=1)
    outcome = train(config)
    file, shapes = outcome.file, {name: tuple(tensor.shape) for name, tensor in outcome.tensors().items()}
    assert verify.verify_saved_file(file, lambda: shapes, config)["ok"]
    first = next(iter(shapes))
    for change, words in (
        (lambda h: h.update(foreign=h.pop(first)), "unknown to the model"),
        (lambda h: h[next(n for n in h if "lora_up" in n)]["shape"].reverse(), "another shape"),
    ):
        before = file.read_bytes()
        rewritten(file, change)
        problem = verify.verify_saved_file(file, lambda: shapes, config)
        assert not problem["ok"] and words in str(problem["text"])
        file.write_bytes(before)
    for ending in ("ckpt", "safetensors"):  # a base that the tools do not read, whose LoRA is none the worse
        base = tmp_path / f"base.{ending}"
        save_file({"a.weight": torch.ones(2, 2, dtype=torch.int8), "a.weight_scale": torch.ones(())}, base)
        other = replace_options(config, pretrained_model_name_or_path=str(base))
        assert verify.verify_saved_file(file, lambda: shapes, other)["ok"]
    file.write_bytes(before[:500])
    assert "cannot be read back" in str(verify.verify_saved_file(file, lambda: shapes, config)["text"])
