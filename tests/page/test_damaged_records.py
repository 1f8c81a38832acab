"""An edited or damaged run.json: the panel shows the valid part, and never raises."""

import itertools
import json
import time

import pytest
from starlette.testclient import TestClient

from kohya_gui.api.app import ApiV1
from kohya_gui.api.building import build_api
from kohya_gui.gradio_host.routes import Routes
from kohya_gui.panel import actions, html, monitor
from kohya_gui.server import tensorboard_proxy
from kohya_gui.server.auth import AuthGate
from library.runs import layout, process, queue, queue_rows, reader, registry, resume, series, stop

TOKEN = "a-token-of-at-least-128-bits-01234567"

WRONG = (None, True, -1, 10**30, 0.5, "x", "", [], [1, {}], {}, {"a": 1}, {"a": {"b": []}}, "x" * 5000, "a\0b")
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


# As JSON, which can write more than Python's numbers and its stack hold.
STRANGE = (
    *(
        "null",
        "true",
        "-1",
        "0.5",
        "1e999",
        "NaN",
        "-Infinity",
        f"1{'0' * 19}",
        f"1{'0' * 400}",
        "9" * 5000,
        "[]",
        "{}",
    ),
    *('""', '"\\u0000"', '"\\ud800"', '"' + "x" * 5000 + '"', '{"a": NaN}', '{"a": "x"}', '["\\ud800"]'),
    *(before * depth + "1" + after * depth for before, after in ("[]", ('{"a":', "}")) for depth in (60, 500, 3000)),
)
EVENTS = {
    "step": "t step loss lr s_it eta avr_loss grad_norm memory_gb data_s transfer_s compute_s epoch",
    "phase": "t name text done total step",
    "validation": "t step loss",
    "sample": "t step number file prompt",
    "saved": "t file step bytes",
    "compile": "t seconds graph failed",
    "warning": "t text",
    "": "kind",
}


@pytest.fixture
def scripts(tmp_path):
    """A client of the HTTP API, which has the same records as the page."""
    gate = AuthGate(Routes(ApiV1(None, lambda: build_api([tmp_path]))), "0.0.0.0", TOKEN)
    return TestClient(gate, "http://127.0.0.1", headers={"Authorization": f"Bearer {TOKEN}"})


def listed_everywhere(folder, scripts):
    """Show a run in the page, and by each operation that reads it: all answer with JSON that a browser can read."""
    for cache in (reader.progress, series.series_of, layout._load_cached):
        cache.cache_clear()
    shown(folder)
    for place in ("", "/cat-1", "/cat-1/series", "/cat-1/samples"):
        answer = scripts.get(f"/api/v1/runs{place}")
        assert answer.status_code == 200, (place, answer.text)
        json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize(("kind", "names"), EVENTS.items())
def test_no_value_of_an_event_breaks_the_list_of_all_runs(folder, scripts, kind, names):
    usual = {"kind": kind, "t": 1.0, "step": 2, "loss": 0.5, "lr": {"unet": 1e-4}, "file": "/x.png", "prompt": "a"}
    wrong = []
    for name, value in itertools.product(names.split(), STRANGE):
        line = json.dumps({key: usual[key] for key in usual if key != name})[:-1] + f', "{name}": {value}}}\n'
        (folder / "progress.jsonl").write_text(line + json.dumps({**usual, "kind": "step"}) + "\n")
        try:
            listed_everywhere(folder, scripts)
        except Exception as error:
            wrong.append(f"{name} = {value[:30]}: {str(error)[:200]!r}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["run.toml", "launcher.json", "stop", "note.txt", "log.txt", "sample-now"])
def test_no_file_in_the_folder_of_a_run_breaks_the_list(folder, scripts, name):
    without_config = {key: value for key, value in FACTS.items() if key not in ("config", "resumes")}
    (folder / "run.json").write_text(json.dumps(without_config))
    for content in (b"[" * 10**5, b"a = " + b"[" * 5000, b'{"a":' * 10**5, b"\0", b"\xff", b"9" * 5000):
        (folder / name).write_bytes(content)
        listed_everywhere(folder, scripts)
