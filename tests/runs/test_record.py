"""The record of a training: what it writes, and what it must never write."""

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import psutil
import pytest

from library.config.problems import ConfigError, Message, Problem, join_messages, ngettext
from library.runs import layout, process, reader, registry, stop
from library.runs.record import Record
from library.runs.refusal import refuse
from tests.source import ROOT
from tests.training import wait_for


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KOHYA_RUN_DIR", raising=False)
    return tmp_path / "home"


def begin(tmp_path, **config):
    return Record.start(config, "flux_train_network", tmp_path / "out", "cat", "FLUX LoRA")


def facts(record):
    return json.loads((record.folder / "run.json").read_text(encoding="utf-8"))


def test_a_run_is_a_folder_that_the_registry_knows(tmp_path):
    with begin(tmp_path) as record:
        assert record.folder.parent == tmp_path / "out" / "runs"
        assert registry.folder_of_run(record.id) == record.folder
        assert [run.id for run in reader.runs()] == [record.id]
        stored = facts(record)
        assert (
            stored["state"] == "running" and stored["pid"] == os.getpid() and stored["script"] == "flux_train_network"
        )
        assert stored["versions"]["python"] and stored["hardware"]["cpus"]
    assert reader.find_run(record.id).state == "finished"


def test_steps_phases_and_events_are_lines(tmp_path):
    with begin(tmp_path) as record:
        record.plan(10)
        record.phase(Message("caching latents"), 1, 2)
        record.step({"step": 1, "epoch": 1, "loss": 0.5, "lr": {"unet": 1e-4}})
        record.event("saved", path="cat.safetensors")
    lines = [json.loads(line) for line in (record.folder / "progress.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["phase", "step", "saved"]
    assert lines[1]["loss"] == 0.5 and lines[1]["lr"] == {"unet": 1e-4} and lines[1]["t"] > 0
    assert facts(record)["step"] == 1 and facts(record)["total_steps"] == 10


def test_a_phase_that_reports_every_image_does_not_fill_the_disk(tmp_path):
    with begin(tmp_path) as record:
        for done in range(1, 1001):
            record.phase(Message("caching latents"), done, 1000)
    lines = (record.folder / "progress.jsonl").read_text().splitlines()
    assert len(lines) < 20 and json.loads(lines[-1])["done"] == 1000


def test_numbers_that_json_does_not_know(tmp_path):
    class Number:
        def __float__(self):
            return 0.25

    with begin(tmp_path) as record:
        record.step({"step": 1, "loss": float("nan"), "grad_norm": Number()})
    line = (record.folder / "progress.jsonl").read_text()
    assert json.loads(line, parse_constant=pytest.fail)["loss"] is None
    assert json.loads(line)["grad_norm"] == 0.25


def test_secrets_are_not_written(tmp_path):
    config = {"log": {"wandb_api_key": "canary-1", "log_with": "wandb"}, "huggingface_token": "canary-2"}
    with Record.start(config, "flux_train_network", tmp_path / "out", "cat", "") as record:
        pass
    assert facts(record)["config"] == {"log": {"log_with": "wandb"}}
    for file in tmp_path.rglob("*"):
        assert file.is_dir() or b"canary" not in file.read_bytes(), file


def test_an_exception_is_the_cause_of_the_failure(tmp_path):
    with pytest.raises(RuntimeError), begin(tmp_path) as record:
        raise RuntimeError("the loss is not a number")
    run = reader.find_run(record.id)
    assert run.state == "failed" and run.error == "RuntimeError: the loss is not a number"
    assert "Traceback" in reader.tail(record.folder)


def test_what_is_reported_can_be_translated_where_it_is_read_and_holds_no_secret(tmp_path):
    problems = [Problem("vae", "{path} is missing", path="/x"), Problem("", "bad token {token}", token="canary-3")]
    with pytest.raises(ConfigError), Record.start({"huggingface_token": "canary-3"}, "s", tmp_path, "cat") as record:
        record.phase(Message("trying {settings}", settings="fp8"), 1, 2)
        record.event("warning", text=Message("canary-3 is wrong"))
        raise ConfigError(*problems)
    [phase, warning, _] = reader.read_events(registry.folder_of_run(record.id))
    assert str(phase["name"]) == "trying fp8" and phase["name"].arguments == {"settings": "fp8"}
    assert str(warning["text"]) == "*** is wrong"
    error = reader.find_run(record.id).error
    first, second = error.arguments.values()
    assert str(error) == "vae /x is missing\nbad token ***" and (first.option, first.template) == (
        "vae",
        "{path} is missing",
    )
    assert second.arguments == {"token": "***"} and b"canary" not in (record.folder / "run.json").read_bytes()


def test_a_users_words_that_read_like_a_message_stay_the_users(tmp_path):
    counted = Message("{count} images", count=3)
    stored = layout.dump({"summary": counted, "caption": "3 images", "deep": [{"caption": "3 images"}, counted]})
    read = layout.parse_facts(stored)
    assert isinstance(read["summary"], Message) and isinstance(read["deep"][1], Message)
    assert type(read["caption"]) is str and type(read["deep"][0]["caption"]) is str
    assert layout.dump(read) == stored
    changed = layout.parse_facts(stored.replace('"summary": "3 images"', '"summary": "of another version"'))
    assert type(changed["summary"]) is str and str(changed["summary"]) == "of another version"


@pytest.mark.parametrize(
    ("template", "arguments"),
    [
        ("{a:>1000000000}", {"a": "b"}),
        ("{", {"a": "b"}),
        ("{b}", {"a": "b"}),
        ("{0}", {"0": "b"}),
        ("{a!x}", {"a": "b"}),
        ("{a.__class__}", {"a": "b"}),
        ("{a}" * 2000, {"a": "b" * 2000}),
        ("{a}", {"a": 1}),
        ("{a}", [1]),
        (3, {}),
        ("{a}", {"a": {"text": "b", "template": "{c:>1000000000}", "arguments": {"c": "b"}}}),
    ],
)
def test_a_stored_text_that_its_template_does_not_give_is_never_formatted(template, arguments):
    event = {"text": "saving", "template": template, "arguments": arguments, "at": ["name"]}
    read = layout.parse_facts(json.dumps({"kind": "phase", "name": "saving", "texts": [event]}))
    assert read == {"kind": "phase", "name": "saving"} and type(read["name"]) is str


@pytest.mark.parametrize("count", [1, 2])
def test_stored_texts_with_forms_braces_and_options_come_back_as_they_were(count):
    images = ngettext("{count} image of {{x}}", "{count} images of {{x}}", count)
    told = Problem(
        "vae", ": {images} {{z}}", images=join_messages([images, "{y}"]), other="unused", place="in a.toml: "
    )
    read = layout.parse_facts(layout.dump({"a": told, "b": images, "c": Message("{plain} text")}))
    assert read["a"] == told and read["b"] == images and str(read["c"]) == "{plain} text"


def test_an_older_record_is_read_unchanged(tmp_path):
    layout.store(tmp_path / "run.json", {"state": "failed", "error": "vae /x is missing"})
    assert reader.run_at(tmp_path).error == "vae /x is missing"
    (tmp_path / "progress.jsonl").write_text('{"kind": "phase", "name": "saving"}\n{"kind": "x", "texts": [{}]}\n')
    assert reader.read_events(tmp_path) == [{"kind": "phase", "name": "saving"}, {"kind": "x"}]


def test_why_a_training_of_the_page_cannot_begin_is_in_its_record(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_RUN_DIR", str(tmp_path))
    layout.store(tmp_path / "run.json", {"state": "starting", "id": "cat"})
    refuse(ConfigError("{path} is no model", path="/x"))
    stored = layout.load_facts(tmp_path / "run.json")
    assert (stored["state"], str(stored["error"]), stored["error"].arguments) == (
        "failed",
        "/x is no model",
        {"path": "/x"},
    )
    refuse(ConfigError("a second word"))  # of one that has ended
    assert str(layout.load_facts(tmp_path / "run.json")["error"]) == "/x is no model"


def test_the_first_word_about_the_end_counts(tmp_path):
    with begin(tmp_path) as record:
        record.finish("stopped")
    assert facts(record)["state"] == "stopped"
    with pytest.raises(ValueError, match="finished"):
        record.finish("done")


def test_in_a_shell_the_log_is_kept(tmp_path, capsys):
    with begin(tmp_path) as record:
        logging.getLogger("library.test").warning("twelve images have no caption")
        record.say("12 images, 40 steps")
    text = (record.folder / "log.txt").read_text(encoding="utf-8")
    assert "twelve images have no caption" in text and "12 images, 40 steps" in text
    assert "12 images, 40 steps" in capsys.readouterr().out
    logging.getLogger("library.test").warning("after the end")
    assert "after the end" not in (record.folder / "log.txt").read_text(encoding="utf-8")


def test_a_folder_that_the_page_prepared_is_taken_over(tmp_path, monkeypatch):
    folder = tmp_path / "out" / "runs" / "cat-1"
    folder.mkdir(parents=True)
    layout.store(folder / "run.json", {"id": "cat-1", "state": "starting", "started": 7.0, "from": "page"})
    monkeypatch.setenv("KOHYA_RUN_DIR", str(folder))
    with begin(tmp_path) as record:
        assert record.folder == folder and facts(record)["started"] == 7.0
        assert not (folder / "log.txt").exists()  # what the page started has its console there already
    with begin(tmp_path) as second:  # the variable is still set, but that folder is used up
        assert second.folder != folder


def test_a_record_hears_a_request_to_stop(tmp_path):
    with begin(tmp_path) as record:
        assert record.stop_requested() == ""
        (record.folder / "stop").write_text("after_step")
        assert record.stop_requested() == "after_step"
    assert facts(record)["state"] == "stopped"


def test_a_record_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr("library.runs.record.HEARTBEAT", 0.02)
    with begin(tmp_path) as record:
        first = facts(record)["heartbeat"]
        wait_for(lambda: facts(record)["heartbeat"] > first)


def test_a_killed_trainer_is_interrupted(tmp_path):
    script = (
        "import os, signal, sys; from library.runs.record import Record\n"
        "r = Record.start({}, 'flux_train_network', sys.argv[1], 'cat'); print(r.id, flush=True)\n"
        "os.kill(os.getpid(), getattr(signal, 'SIGKILL', signal.SIGTERM))"
    )
    trainer = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], capture_output=True, text=True)
    run = reader.find_run(trainer.stdout.strip())
    assert run.state == "interrupted" and not run.active
    assert json.loads((run.folder / "run.json").read_text())["state"] == "interrupted"


def test_another_process_with_the_same_number_is_not_the_run(tmp_path):
    with begin(tmp_path) as record:
        pass
    other = {"state": "running", **process.identity(), "heartbeat": time.time() - 60}
    other |= {"process_start": other["process_start"] - 100, "since_boot": 1.0}
    layout.store(record.folder / "run.json", other)
    assert reader.find_run(record.id).state == "interrupted"


def test_a_clock_that_is_set_interrupts_nothing(tmp_path):
    with begin(tmp_path) as record:
        moved = {"state": "running", **process.identity(), "heartbeat": time.time()}
        moved["process_start"] -= 3600  # when the system sets its clock, every process seems to have started then
        layout.store(record.folder / "run.json", {**moved, "boot": ""})  # where the system does not name its start
        assert reader.find_run(record.id).state == "running"


@pytest.mark.skipif(not process._boot(), reason="the system does not name its start")
@pytest.mark.parametrize("by", [-3600, 3600])
def test_a_process_is_found_whatever_its_clock_is_set_to(monkeypatch, by):
    identity, create_time, boot_time = process.identity(), psutil.Process.create_time, psutil.boot_time
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: create_time(self) + by)
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + by)
    assert process.alive(identity)
    assert not process.alive({**identity, "since_boot": identity["since_boot"] - 100})
    assert not process.alive({**identity, "boot": "of another start of the system"})


def deleted(record):
    witness = record.folder / "witness.txt"  # the run never writes this one again
    witness.write_text("")
    shutil.rmtree(record.folder.parents[1], ignore_errors=True)  # the run writes meanwhile
    assert not witness.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
def test_a_deleted_folder_is_written_again_with_all_that_was_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("library.runs.record.HEARTBEAT", 0.05)
    with begin(tmp_path) as record:
        (record.folder / "run.toml").write_text("max_train_steps = 10")
        logging.getLogger("x").warning("before")
        record.plan(10)
        for step in range(1, 4):
            record.step({"step": step, "loss": 0.5})
        wait_for(lambda: layout.TOML in record._copy._small)  # which came after the run had begun
        for step in (4, 5):  # deleted twice, and told once
            deleted(record)
            record.step({"step": step, "loss": 0.5})
            wait_for(lambda: (record.folder / "progress.jsonl").exists())
            wait_for(lambda: (record.folder / "run.toml").exists())
            wait_for(lambda: (record.folder / "run.json").exists())  # written last
        logging.getLogger("x").warning("after")
        run = reader.find_run(record.id)
        assert run.state == "running" and run.facts["restored"] and run.facts["total_steps"] == 10
    events = reader.read_events(record.folder)
    assert [event["step"] for event in events if event["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert ["was deleted" in str(event["text"]) for event in events if event["kind"] == "warning"] == [True]
    log = (record.folder / "log.txt").read_text()
    assert "before" in log and "after" in log
    assert reader.find_run(record.id).state == "finished" and reader.find_run(record.id).facts["restored"]


def test_a_log_that_is_written_anew_while_a_line_is_written_takes_the_line(tmp_path):
    with begin(tmp_path) as record:
        log, closing = record._log, []
        write = log.stream.write

        def write_while_it_closes(text):
            closing.append(threading.Thread(target=log.close_until_next_line))
            closing[0].start()
            closing[0].join(0.2)  # it waits until the line is written
            return write(text)

        log.stream = Mock(wraps=log.stream, write=write_while_it_closes)
        record.say("a line of the training")
        closing[0].join()
        record.say("and one after it")
    text = (record.folder / "log.txt").read_text()
    assert "a line of the training" in text and "and one after it" in text


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
def test_the_end_of_a_run_is_reported_although_its_folder_was_just_deleted(tmp_path):
    with begin(tmp_path) as record:
        record.step({"step": 1, "loss": 0.5})
        deleted(record)
    assert reader.find_run(record.id).state == "finished"
    assert [event["kind"] for event in reader.read_events(record.folder)] == ["step", "warning"]


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
def test_a_run_that_cannot_write_its_folder_again_is_still_seen_and_can_be_stopped(tmp_path):
    code = (
        "import sys, time; from library.runs.record import Record\n"
        "with Record.start({}, 'sdxl_train', sys.argv[1], 'cat') as record:\n"
        "    record._restore = record._write = lambda: None\n"
        "    print(record.id, flush=True); time.sleep(60)"
    )
    out = tmp_path / "out"
    asked = [sys.executable, "-c", code, str(out)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True, cwd=ROOT) as trainer:
        run_id = trainer.stdout.readline().strip()
        time.sleep(0.1)
        shutil.rmtree(out)
        (run,) = reader.runs()
        assert (run.id, run.state, run.active, run.facts["lost"]) == (run_id, "running", True, True)
        stop.request(run_id, "kill")
        trainer.wait(120)
    assert not any(run.active for run in reader.runs())


@pytest.mark.skipif(os.name == "nt", reason="Windows deletes no open file")
def test_what_a_run_of_the_page_prints_goes_on_into_its_new_log(tmp_path):
    code = (
        "import sys, time, shutil, pathlib; from library.runs import record, layout\n"
        "record.HEARTBEAT = 0.05\n"
        "with record.Record.start({}, 'sdxl_train', sys.argv[1], 'cat') as made:\n"
        "    print('one', flush=True)\n"
        "    # at once, as the heartbeat writes meanwhile\n"
        "    shutil.rmtree(pathlib.Path(sys.argv[1]).rename(sys.argv[1] + '-gone'))\n"
        "    while not made.facts.get('restored'): time.sleep(0.02)\n"
        "    print('two', flush=True)"
    )
    out = tmp_path / "out"
    folder = out / "runs" / "cat-20260101-000000-0000"
    folder.mkdir(parents=True)
    layout.store(folder / layout.RUN, {"id": folder.name, "state": "starting", "started": time.time()})
    with (folder / layout.LOG).open("ab") as log:
        environment = {**os.environ, "KOHYA_RUN_DIR": str(folder)}
        subprocess.run(
            [sys.executable, "-c", code, str(out)], stdout=log, stderr=log, check=True, cwd=ROOT, env=environment
        )
    said = (folder / layout.LOG).read_text()
    assert said.index("one") < said.index("deleted while it trained") < said.index("two")
    assert reader.run_at(folder).state == "finished"


def test_how_a_run_ended_is_recorded_on_a_full_disk(tmp_path, monkeypatch):
    """Nothing can be written while it runs; what is kept free for the end is enough."""
    record = begin(tmp_path)
    write = layout.write_atomic

    def full(path, content):
        if (record.folder / layout.ROOM).exists():
            raise ConfigError("the disk is full")
        return write(path, content)

    monkeypatch.setattr(layout, "write_atomic", full)
    record.note(total_steps=9)
    record.finish("failed", "the disk is full")
    assert facts(record)["state"] == "failed" and facts(record)["error"] == "the disk is full"
    assert not (record.folder / layout.ROOM).exists()


def test_a_run_that_died_is_shown_as_such_where_that_cannot_be_recorded(tmp_path, monkeypatch):
    folder = tmp_path / "out" / "runs" / "cat-1"
    folder.mkdir(parents=True)
    layout.store(folder / "run.json", {"id": "cat-1", "state": "running", **process.identity(), "pid": 2**30})

    def full(path, values):
        raise ConfigError("the disk is full")

    monkeypatch.setattr(layout, "store", full)
    assert reader.run_at(folder).state == "interrupted"
