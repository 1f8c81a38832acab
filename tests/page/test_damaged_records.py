"""An edited or damaged run.json: the panel shows the valid part, and never raises."""

import json
import time

import pytest

from kohya_gui.panel import actions, html, monitor
from kohya_gui.server import tensorboard_proxy
from library.runs import layout, process, queue, queue_rows, reader, registry, resume, stop

WRONG = (None, True, -1, 10**30, 0.5, "x", "", [], [1, {}], {}, {"a": 1}, {"a": {"b": []}})
FACTS = {
    "id": "cat-1",
    "script": "flux_train_network",
    "title": "FLUX.1 LoRA",
    "state": "running",
    "from": "page",
    **process.identity(),
    "started": time.time(),
    "heartbeat": time.time(),
    "ended": 1e9,
    "restored": 1e9,
    "folder": "/",
    "output_dir": "/",
    "output_name": "cat",
    "step": 3,
    "total_steps": 9,
    "error": "it broke",
    "resumes": "cat-0",
    "devices": ["0"],
    "launch": {"gpus": "0"},
    "seed": 1,
    "phase": None,
    "versions": {"python": "3"},
    "hardware": {"processes": 1, "gpu": "H100"},
    "data": {"images": 4},
    "config": {
        "compile": {"compile": True},
        "steps": {"resume": "x", "gradient_accumulation_steps": 2},
        "sample": {"sample_prompts": "x"},
        "log": {"logging_dir": "x"},
    },
    "compile": {"graphs": 2, "seconds": 3.0, "disabled": ""},
    "lost": False,
    "utilization": 0.3,
    "products": {},
}
INSIDE = ("config", "hardware", "compile", "launch", "data", "versions")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("library.runs.machine.GPUS.now", lambda: [])


@pytest.fixture
def folder(tmp_path):
    run_folder = tmp_path / "out" / "runs" / "cat-1"
    run_folder.mkdir(parents=True)
    layout.store(run_folder / "run.json", FACTS)
    registry.add_pointer(run_folder)
    (run_folder / "progress.jsonl").write_text(
        json.dumps({"kind": "step", "t": 1.0, "step": 1, "loss": 0.5, "lr": {"unet": 1e-4}}) + "\n"
    )
    return run_folder


def shown(folder):
    """Everything that the page renders of a run."""
    run = reader.runs()[0]
    for part in monitor.panel_parts("").values():
        part.mark, part.render()
    html.log("x", run), html.machine_usage_html(run), actions._can_be_tried(run)
    for how in ("now", "kill"):
        stop.question_before(run, how)
    (
        stop.hangs(run),
        resume.newest_state(run),
        resume.run_settings(run),
        queue_rows.queue_rows(queue.read_queue()),
        reader.active(),
        tensorboard_proxy.curve_folders(),
    )
    return run


def mutated():
    for name in FACTS:
        for value in WRONG:
            yield name, {**FACTS, name: value}
    for section, options in FACTS["config"].items():
        for option in options:
            for value in WRONG:
                changed = {**FACTS["config"], section: {**options, option: value}}
                yield f"config.{section}.{option}", {**FACTS, "config": changed}
    for name in INSIDE:
        for inner in FACTS[name]:
            for value in WRONG:
                yield f"{name}.{inner}", {**FACTS, name: {**FACTS[name], inner: value}}


@pytest.mark.parametrize("state", ["running", "failed"])
def test_no_wrong_type_of_a_fact_raises(folder, state):
    wrong = []
    for name, facts in mutated():
        for stored_state in (
            {state, facts["state"]} if name == "state" and isinstance(facts["state"], str) else (state,)
        ):
            (folder / "run.json").write_text(json.dumps(facts if name == "state" else {**facts, "state": stored_state}))
            layout._load_cached.cache_clear()
            try:
                shown(folder)
            except Exception as error:
                wrong.append(f"{name} = {json.dumps(facts.get(name.partition('.')[0]))[:60]}: {error!r}")
    assert not wrong, "\n".join(dict.fromkeys(wrong))


@pytest.mark.parametrize(
    "text", ["", "[]", "7", "null", '"x"', "{", "{}", "[" * 9999, '{"state": NaN}', '{"texts": 5}']
)
def test_what_is_no_record_is_an_interrupted_run(folder, text):
    (folder / "run.json").write_text(text)
    layout._load_cached.cache_clear()
    assert shown(folder).state == "interrupted"
