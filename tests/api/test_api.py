"""HTTP under /api/v1: each operation of the schema answers as the schema says, and none without the token."""

import json
import re
from urllib.parse import quote, urlencode

import pytest
from PIL import Image
from starlette.testclient import TestClient

from kohya_gui.api import event_routes, words_page
from kohya_gui.api.app import ApiV1
from kohya_gui.api.building import build_api
from kohya_gui.gradio_host.routes import Routes
from kohya_gui.i18n.texts import LANGUAGES, MEANINGS_FOLDER, load_catalogue
from kohya_gui.server.auth import AuthGate
from library.check import isolated
from library.config.problems import ConfigError, Problem
from library.runs import queue, start
from library.runs.record import Record
from tests.data import make

SCRIPT = "flux_train_network"
TOKEN = "a-token-of-at-least-128-bits-01234567"


async def nothing_else(scope, receive, send):
    raise AssertionError(f"{scope['path']} is passed on")


@pytest.fixture
def api(tmp_path, monkeypatch):
    """A client with the token, on a user without runs whose queue has entries and does not start them."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(queue, "work", lambda: None)
    gate = AuthGate(Routes(ApiV1(nothing_else, lambda: build_api([tmp_path]))), "0.0.0.0", TOKEN)
    return TestClient(gate, "http://127.0.0.1", headers={"Authorization": f"Bearer {TOKEN}"})


def add(tmp_path, name):
    toml = f'output_dir = "{tmp_path.as_posix()}/out"\noutput_name = "{name}"\n'
    return queue.add_to_queue(start.TrainingJob(SCRIPT, "FLUX.1 LoRA", name, f"{tmp_path}/out", toml))


def operations(schema):
    return {
        item[method]["operationId"]: (method, path, item[method])
        for path, item in schema["paths"].items()
        for method in item
    }


def mismatch(schemas, part, value, where="answer"):
    """Where a value does not fit a part of an OpenAPI schema, or ""."""
    if "$ref" in part:
        part = schemas[part["$ref"].rpartition("/")[2]]
    if "anyOf" in part:
        found = [mismatch(schemas, inner, value, where) for inner in part["anyOf"]]
        return "" if "" in found else found[0]
    kinds = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    kind = part.get("type", "")
    if kind == "null" or value is None:
        return "" if kind in ("null", "") and value is None else f"{where} is {value!r}"
    if kind and (not isinstance(value, kinds[kind]) or isinstance(value, bool) != (kind == "boolean")):
        return f"{where} is no {kind}: {value!r}"
    if kind == "array":
        inner = [mismatch(schemas, part["items"], each, f"{where}[{at}]") for at, each in enumerate(value)]
        return next(filter(None, inner), "")
    named = part.get("properties", {})
    if missing := [name for name in part.get("required", ()) if name not in value]:
        return f"{where} lacks {missing}"
    if named and (unknown := value.keys() - named):
        return f"{where} has {sorted(unknown)}"
    return next(filter(None, [mismatch(schemas, named[n], value[n], f"{where}.{n}") for n in named if n in value]), "")


@pytest.fixture
def run(tmp_path, api):
    """An active run with a sample image, whose settings are those of a config."""
    (tmp_path / "out").mkdir(exist_ok=True)
    Image.new("RGB", (64, 48), "red").save(tmp_path / "out" / "fox.png")
    with Record.start({"optim": {"learning_rate": 1e-4}}, SCRIPT, tmp_path / "out", "fox", "FLUX.1 LoRA") as record:
        record.plan(9)
        record.step({"step": 3, "loss": 0.25, "s_it": 1.5, "eta": 9.0})
        record._write()
        record.event("sample", file=str(tmp_path / "out" / "fox.png"), step=3, number=0, prompt="<b>a fox</b>")
        yield record


def examples(tmp_path, run):
    """For each operation, in this order: what stands in its path and its query, and its body."""
    first, other = add(tmp_path, "first"), add(tmp_path, "other")
    make.folder(tmp_path / "images", "cats")
    with Record.start({}, SCRIPT, tmp_path / "out", "dog") as dog:
        dog.stopping("after_step")
    training = {"script": SCRIPT, "toml": "seed = 7", "config": {"output_dir": str(tmp_path / "out")}}
    return {
        "list_queue": ({}, None),
        "pause_queue": ({}, {}),
        "resume_queue": ({}, {}),
        "set_after_failure": ({}, {"go_on": False}),
        "move_entry": ({"entry": other.id}, {"to": 1}),
        "duplicate_entry": ({"entry": other.id}, {}),
        "remove_entry": ({"entry": first.id}, {}),
        "restore_entry": ({"entry": first.id}, {}),
        "clear_queue": ({}, {}),
        "add_entry": ({}, {**training, "config": {"output_dir": str(tmp_path / "out"), "output_name": "new"}}),
        "check": ({}, training),
        "import_config": ({}, {"name": "mine.toml", "text": "network_dim = 8", "script": SCRIPT}),
        "list_presets": ({"family": "flux"}, None),
        "show_preset": ({"family": "flux", "name": "lora-24gb"}, None),
        "show_dataset": ({"folder": str(tmp_path / "images"), "count": 2}, None),
        "list_runs": ({"state": "running"}, None),
        "show_run": ({"run": run.id}, None),
        "show_series": ({"run": run.id, "since": "0 1 0"}, None),
        "note_run": ({"run": run.id}, {"text": "<b>good</b>", "before": ""}),
        "compare_runs": ({"run": [run.id, dog.id]}, None),
        "list_samples": ({"run": run.id, "resumed": True}, None),
        "show_sample": ({"run": run.id, "place": 0, "small": True}, None),
        "save_run": ({"run": run.id}, {}),
        "sample_run": ({"run": run.id}, {}),
        "stop_run": ({"run": run.id}, {"how": "after_step"}),
        "resume_run": ({"run": dog.id}, {}),
        "unlist_runs": ({}, {"runs": [dog.id]}),
        "relist_runs": ({}, {"runs": [dog.id]}),
        "remove_run": ({"run": dog.id}, {"sure": True}),
        "stream_events": ({"seconds": 0}, None),
    }


def ask(api, operation, places, body, **how):
    """Send a request that is put together from the schema alone."""
    method, path, about = operation
    query = {
        p["name"]: places[p["name"]] for p in about.get("parameters", ()) if p["in"] == "query" and p["name"] in places
    }
    path = re.sub(r"{(\w+)}", lambda match: str(places[match[1]]), path)
    assert ("requestBody" in about) == (body is not None)
    return api.request(method.upper(), path, params=query, json=body, **how)


def test_each_operation_answers_as_the_schema_says_and_none_without_the_token(api, run, tmp_path, monkeypatch):
    no_findings = lambda reading, launch: {"findings": [], "fit": {"peak": 9.5}, "steps": 9}  # noqa: E731
    monkeypatch.setattr(isolated, "check_reading", no_findings)
    monkeypatch.setattr(start, "begin_job", lambda job: "the-new-run")
    schema = api.get("/api/v1/openapi.json").json()
    known, schemas = operations(schema), schema["components"]["schemas"]
    calls = examples(tmp_path, run)
    assert set(calls) == set(known), "an example for each operation"
    stranger = TestClient(api.app, "http://127.0.0.1")
    wrong = {"Authorization": f"Bearer {TOKEN[::-1]}"}  # only once, as each guess makes the next answer slower
    assert stranger.get("/api/v1/runs", headers=wrong).status_code == 401
    for name, (places, body) in calls.items():
        refused = ask(stranger, known[name], places, body)
        assert refused.status_code == 401 and "token" in refused.json()["error"].lower(), name
        answer = ask(api, known[name], places, body)
        documented = known[name][2]["responses"][str(answer.status_code)]["content"]
        assert answer.status_code == 200, (name, answer.text)
        if "application/json" in documented:
            assert not mismatch(schemas, documented["application/json"]["schema"], answer.json()), name


def test_mistakes_are_sentences_with_a_field_and_a_status(api, run, tmp_path, monkeypatch):
    entry = add(tmp_path, "fox").id
    move = f"/api/v1/queue/{entry}/move"
    wrong = {"script": SCRIPT, "config": {"learning_rate": -5}}
    monkeypatch.setattr(
        isolated, "check_reading", lambda reading, launch: {"findings": isolated.findings_of_reading(reading)}
    )
    monkeypatch.setattr(queue, "starts_next", lambda run: queue.read_queue().find(entry))
    refusals = [
        (api.post("/api/v1/queue/gone/remove", json={}), 404, "", "not in the queue any more"),
        (api.post(move, json={"to": "soon"}), 422, "to", "to: Input should be a valid integer"),
        (api.post(move, json={}), 422, "", "write either to or by"),
        (api.post(move, json={"to": 1, "nope": 1}), 422, "nope", "nope: Extra inputs"),
        (api.post(move, content="{", headers={"content-type": "application/json"}), 400, "", "not JSON"),
        (api.post(move, data={"to": 1}), 415, "", "Content-Type: application/json"),
        (api.post(move, json={"to": 1, "pad": "x" * 5_000_000}), 413, "", "too large"),
        (api.get(move), 405, "", "does not take"),
        (api.get("/api/v1/nothing"), 404, "", "nothing here"),
        (api.get("/api/v1/runs/..%2Fx"), 404, "", "nothing here"),
        (api.get("/api/v1/runs/gone"), 404, "", "no run called gone"),
        (api.get(f"/api/v1/runs/{run.id}/samples/1"), 404, "", "no such image"),
        (api.post(f"/api/v1/runs/{run.id}/remove", json={"sure": True}), 409, "", "still running: stop it first"),
        (api.post("/api/v1/runs/unlist", json={"runs": [run.id]}), 409, "", "fox is still running: stop it first"),
        (api.post(f"/api/v1/runs/{run.id}/note", json={"text": "a", "before": "b"}), 409, "", "in another window"),
        (api.post(f"/api/v1/runs/{run.id}/stop", json={"ask_about_queue": True}), 409, "sure", "queue starts fox."),
        (api.get("/api/v1/datasets?folder=/etc"), 422, "folder", "etc is outside"),
        (api.post("/api/v1/check", json={"script": "nope"}), 422, "script", "script: nope is not a script"),
        (api.post("/api/v1/queue/add", json=wrong), 422, "learning_rate", "learning_rate"),
    ]
    for answer, status, field, words in refusals:
        content = answer.json()
        assert (answer.status_code, content["field"]) == (status, field) and words in content["error"], content
    nothing = api.get(f"/api/v1/runs/{run.id}/samples/1?small=true&or_nothing=true")  # browsers log a 404 as an error
    assert (nothing.status_code, nothing.content) == (204, b"")
    quiet = api.post("/api/v1/queue/gone/remove", json={}, headers={"Prefer": "status=200"})
    assert quiet.status_code == 200 and "not in the queue" in quiet.json()["error"]


HALF = '"\\ud800"'  # what JSON can write and UTF-8 cannot


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("check", f'{{"script": "{SCRIPT}", "config": {{{HALF}: 1}}}}'),
        ("check", f'{{"script": "{SCRIPT}", "launch": {{{HALF}: 1}}}}'),
        ("queue/add", f'{{"script": "{SCRIPT}", "config": {{{HALF}: 1}}}}'),
        ("runs/RUN/note", f'{{"text": {HALF}}}'),
        ("runs/unlist", f'{{"runs": [{HALF}]}}'),
        ("check", f'{{"script": "{SCRIPT}", "config": {"[" * 90}{"]" * 90}}}'),
        ("runs/RUN/note", '{"text": ' + "9" * 5000 + "}"),
    ],
)
def test_values_that_no_file_can_hold_are_refused(api, run, path, content):
    answer = api.post(
        f"/api/v1/{path.replace('RUN', run.id)}", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 422) and answer.json()["error"].startswith("The body "), answer.text


def test_an_import_answers_with_the_reason_of_each_key(api):
    text = json.dumps({"LoRA_type": "Standard", "sdxl": "maybe", "gpu_ids": "0", "epoch": 3, "unheard_of": 1})
    answer = api.post("/api/v1/import", json={"name": "mine.json", "text": text})
    reasons = [value for key in answer.json()["keys"] for value in key.values()]
    assert answer.status_code == 200 and any("unheard_of" in str(value) for value in reasons)


def test_an_error_is_a_sentence_without_flags_and_none_is_empty(api, run, tmp_path):
    wrong = ConfigError(Problem("ae", "is too large", place="--"))
    with pytest.raises(ConfigError), Record.start({}, SCRIPT, tmp_path / "out", "dog", "FLUX.1 LoRA") as failed:
        raise wrong
    listed = {each["id"]: each["error"] for each in api.get("/api/v1/runs").json()["runs"]}
    assert listed == {run.id: "", failed.id: "ae is too large"}


def test_a_list_since_a_mark_has_only_what_has_changed(api, run, tmp_path):
    listed = lambda mark: api.get("/api/v1/runs", params={"since": mark}).json()  # noqa: E731
    first = listed("")
    assert [r["name"] for r in first["runs"]] == ["fox"] and first["ids"] == [run.id]
    api.post(f"/api/v1/runs/{run.id}/note", json={"text": "good"})
    noted = listed(first["mark"])
    assert [(r["id"], r["note"]) for r in noted["runs"]] == [(run.id, "good")] and noted["ids"] is None
    run.finish("finished")
    ended = listed(noted["mark"])
    assert [r["state"] for r in ended["runs"]] == ["finished"]
    assert listed(ended["mark"])["runs"] == [] and len(listed("another-9")["runs"]) == 1
    with Record.start({}, SCRIPT, tmp_path / "out", "dog") as dog:
        newer = listed(ended["mark"])
    assert newer["ids"] == [dog.id, run.id] and [r["name"] for r in newer["runs"]] == ["dog"]


def test_a_stream_says_what_changes_and_continues_where_it_was_left(api, run, monkeypatch):
    monkeypatch.setattr(event_routes, "EVENT_INTERVAL", 0.0)

    def events(**headers):
        text = api.get("/api/v1/events?seconds=0", headers=headers).text
        blocks = [dict(line.split(": ", 1) for line in block.splitlines()) for block in text.split("\n\n") if block]
        return [(block["event"], block["id"], json.loads(block["data"])) for block in blocks]

    ((kind, last, now),) = events()
    assert kind == "snapshot" and [(r["name"], r["steps_done"], r["loss"]) for r in now["runs"]] == [("fox", 3, 0.25)]
    assert events(**{"Last-Event-ID": last}) == []
    run.step({"step": 4, "loss": 0.2})
    run._write()
    queue.pause()
    run.finish("finished")
    changes = events(**{"Last-Event-ID": last})
    assert [kind for kind, _, _ in changes] == ["run", "step", "queue"] and changes[0][2]["state"] == "finished"
    assert [kind for kind, _, _ in events(**{"Last-Event-ID": changes[0][1]})] == ["step", "queue"]
    assert [kind for kind, _, _ in events(**{"Last-Event-ID": "another-1"})] == ["snapshot"]
    monkeypatch.setattr(event_routes, "MAX_STREAMS", 0)
    assert api.get("/api/v1/events").status_code == 429


def test_the_docs_are_one_page_without_scripts_or_other_sites(api):
    page = api.get("/api/v1/docs").text
    schema = api.get("/api/v1/openapi.json").json()
    assert all(f'id="{name}"' in page for name in operations(schema))
    assert not re.search(r"<script|<link|src=|https?://|@import", page)


STRANGE = (
    None,
    True,
    -1,
    2**63,
    1e308,
    "",
    "x",
    "\0",
    "a\ud800",
    "../../etc",
    "{path}",
    "9" * 5000,
    [],
    [[]],
    {"a": [1]},
)


def ask_strangely(api, operation, places, body):
    """Send a request whose path, query and body may hold anything that fits into one."""
    method, path, about = operation
    queried = {p["name"] for p in about.get("parameters", ()) if p["in"] == "query"}
    query = urlencode({name: places[name] for name in queried & places.keys()}, doseq=True, errors="surrogatepass")
    path = re.sub(r"{(\w+)}", lambda match: quote(str(places[match[1]]), "", errors="surrogatepass"), path)
    content = {} if body is None else {"content": json.dumps(body), "headers": {"Content-Type": "application/json"}}
    return api.request(method.upper(), f"{path}?{query}", **content)


@pytest.mark.parametrize("part", ["places", "body"])
def test_no_value_of_any_operation_breaks_it(api, run, tmp_path, monkeypatch, part):
    """Each value of a path, a query and a body is replaced by strange ones: the answer is a sentence, or fits."""
    monkeypatch.setattr(isolated, "check_reading", lambda reading, launch: {"findings": [], "fit": {}, "steps": 9})
    monkeypatch.setattr(start, "begin_job", lambda job: "the-new-run")
    known = operations(api.get("/api/v1/openapi.json").json())
    for name, (places, body) in examples(tmp_path, run).items():
        sent = {"places": places, "body": body}
        for key in [*(sent[part] or {})]:
            for value in STRANGE if name != "stream_events" else ():  # which would stream for so many seconds
                changed = {**sent, part: {**(sent[part] or {}), key: value}}
                answer = ask_strangely(api, known[name], **changed)
                assert answer.status_code < 500, (name, key, value, answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"] and "Traceback" not in answer.text, (name, key, value)


@pytest.mark.parametrize("language", [name for name in LANGUAGES if name != "en"])
def test_the_page_of_words_is_translated_whole(api, language):
    english, meanings = words_page.WORDS.read_text("utf-8"), load_catalogue(language, MEANINGS_FOLDER)
    texts = [row[1] for row in words_page.table_rows(english)[1:]] + [*words_page.explained_names(english)]
    assert len(texts) > 70 and {*texts, *words_page.FIXED_TEXTS} == meanings.keys()
    page = api.get(f"/api/v1/words?language={language}").text
    assert (
        f'lang="{language}"' in page and f"<h1>{meanings['Words']}</h1>" in page and "<code>network_dim</code>" in page
    )
    left = [text for text in texts if text in page]
    assert not left and page.count("<tr>") == len(words_page.table_rows(english)) and "](" not in page
    assert api.get("/api/v1/words?language=xx").text == api.get("/api/v1/words").text


def test_the_page_of_words_has_all_entries_and_nothing_active(api, monkeypatch, tmp_path):
    page = api.get("/api/v1/words").text
    for words in (
        "<th>word</th>",
        "<td>learning rate</td>",
        "<td>学習率</td>",
        "<strong>LoRA</strong>",
        "<code>network_dim</code>",
    ):
        assert words in page
    assert "**" not in page and "](" not in page and "<td>---" not in page
    (tmp_path / "words.md").write_text(
        "# <script>\n\n| a | <img onerror=x> |\n|---|---|\n\n- [x](javascript:y) ![z](z.png)\n"
    )
    monkeypatch.setattr(words_page, "WORDS", tmp_path / "words.md")
    page = api.get("/api/v1/words").text
    assert not any(part in page for part in ("<script", "<img", "javascript:", "href"))
    assert "&lt;script" in page
