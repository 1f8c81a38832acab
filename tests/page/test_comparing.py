"""Comparing the files of a run on the page: started from the run's panel, shown with marks, below the roots only."""

import pytest
from PIL import Image

from kohya_gui.sampling.comparing import FileComparison
from kohya_gui.server.json_api import ApiRequest
from library.config.problems import ConfigError, Message
from library.jobs import jobs
from library.runs import layout
from tests.page.test_sampling import run_with_samples
from tests.training import wait_for


@pytest.fixture
def compared(tmp_path, monkeypatch):
    """The handlers, a run with two files, and the arguments of the started job."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    root = (tmp_path / "root").resolve()
    root.mkdir()
    (root / "model.safetensors").write_text("x")
    comparison = FileComparison([root])
    comparison.run = run_with_samples(root)
    comparison.started = []

    def start(kind, words, folder):
        comparison.started.append(words)
        return jobs.BackgroundJob(folder, {"kind": kind, "arguments": words})

    monkeypatch.setattr(jobs, "start_job", start)
    return comparison


def store(run, name="compare-20260101-000000", **more):
    """A comparison of two files with two prompts in a run's folder."""
    place = run / name
    place.mkdir()
    files = [[str(place / f"{row:02d}_{at:02d}.png") for at in range(2)] for row in range(2)]
    for row, names in enumerate(files):
        for at, path in enumerate(names):
            Image.new("RGB", (64, 64), (200 - 90 * at, 60 + 80 * row, 90)).save(path)
    columns = [Message("step {step}", step=step) for step in (10, 20)]
    reasons = Message("{file}: {reasons}", file=columns[0], reasons=Message("lowest held-out loss"))
    comparison = {
        "run": run.name,
        "folder": str(place),
        "columns": columns,
        "rows": ["a cat", "a dog"],
        "files": files,
        "saved": ["zorb-10.safetensors", "zorb-20.safetensors"],
        "copies": [["", ""], ["", "/data/7.png"]],
        "losses": [0.1234, 0.2],
        "held_out": True,
        "likeness": [None, None],
        "grid": "",
        "proposal": {"column": 0, "reason": reasons},
        "notes": [Message("The run held no images out.")],
    }
    layout.store(place / "comparison.json", comparison | more)
    return place


def test_a_runs_files_are_compared_by_a_command(compared, tmp_path):
    assert [name for name, _ in compared.choices(ApiRequest({}))["runs"]] == ["zorb-1"]
    sent = {"run": "zorb-1", "encoder": "", "folder": "", "prompts": ""}
    compared.begin(ApiRequest(sent))
    compared.begin(ApiRequest({**sent, "encoder": "dinov2", "prompts": "a cat\n\n a dog "}))
    compared.begin(ApiRequest({**sent, "encoder": "folder", "folder": str(tmp_path / "root" / "out")}))
    plain, prompted, local = compared.started
    assert plain == ["compare", "zorb-1"] and prompted[:3] == ["compare", "zorb-1", "--encoder=dinov2"]
    with open(prompted[3].removeprefix("--prompts="), encoding="utf-8") as file:
        assert file.read() == "a cat\na dog\n"
    assert local == ["compare", "zorb-1", f"--encoder={tmp_path / 'root' / 'out'}"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"run": "../../x"}, "no longer exists"),
        ({"encoder": "rm"}, "no such choice"),
        ({"encoder": "folder", "folder": "/etc"}, "outside"),
        ({"prompts": "a --ci /etc/passwd"}, "use the fields"),
    ],
)
def test_what_makes_no_sense_or_leads_out_is_refused(compared, more, words):
    with pytest.raises(ConfigError, match=words):
        compared.begin(ApiRequest({"run": "zorb-1", "encoder": "", "folder": "", "prompts": "", **more}))
    assert compared.started == []


def test_models_and_files_outside_of_the_roots_are_refused(compared, tmp_path):
    (compared.run / layout.TOML).write_text('pretrained_model_name_or_path = "/etc/passwd"\n', "utf-8")
    with pytest.raises(ConfigError, match="outside"):
        compared.begin(ApiRequest({"run": "zorb-1", "encoder": "", "folder": "", "prompts": ""}))


def test_the_newest_comparison_is_shown_and_its_images_alone(compared, tmp_path):
    assert compared.found(ApiRequest({"run": "zorb-1"}))["columns"] == []
    store(compared.run, losses=[1, 2])
    place = store(compared.run, "compare-20260102-000000")
    answer = compared.found(ApiRequest({"run": "zorb-1"}))
    assert [*map(str, answer["columns"])] == ["Step 10", "Step 20"] and answer["losses"] == ["0.1234", "0.2000"]
    assert [column.template for column in answer["columns"]] == ["Step {step}"] * 2  # templates to translate
    assert (
        answer["best"] == 0
        and str(answer["reason"]) == "Step 10: lowest held-out loss"
        and answer["likeness"] == ["", ""]
    )
    assert answer["cells"][1][1]["copy"] == "7.png" and answer["cells"][0][0]["copy"] == ""
    query = {"run": "zorb-1", "at": place.name, "row": "0", "column": "1"}
    assert compared.show(query).media_type == "image/png" and compared.show({**query, "small": "1"}).body
    for more in ({"at": ".."}, {"at": "compare-1/.."}, {"row": "9"}, {"row": "x"}, {"run": "../x"}, {"column": "-1"}):
        with pytest.raises(ConfigError, match="no such image"):
            compared.show({**query, **more})


def test_columns_are_called_as_samples_of_runs_are(compared):
    titles = ["base model", Message("base model"), Message("step {step}, average", step=3), "zorb-10", "Zorb.v1"]
    store(compared.run, columns=titles)
    columns = compared.found(ApiRequest({"run": "zorb-1"}))["columns"]
    assert [*map(str, columns)] == ["Base model", "Base model", "Step 3, average", "zorb-10", "Zorb.v1"]


def test_deleted_images_are_left_out_and_the_numbers_stay(compared):
    place = store(compared.run)
    (place / "00_01.png").unlink()
    answer = compared.found(ApiRequest({"run": "zorb-1"}))
    assert [[cell is not None for cell in row] for row in answer["cells"]] == [[True, False], [True, True]]
    assert answer["losses"] == ["0.1234", "0.2000"]


def test_a_damaged_record_shows_what_is_left_of_it(compared):
    store(compared.run, copies="x", losses={}, proposal=[], notes=None, files=[["a"], 3], likeness=["x"])
    answer = compared.found(ApiRequest({"run": "zorb-1"}))
    assert answer["columns"] and answer["losses"] == ["", ""] and answer["best"] is None


@pytest.mark.browser
def test_the_comparison_stays_in_view_when_images_above_it_load_late(visit, served):
    root = served[1]
    (root / "model.safetensors").write_text("x")
    run_with_samples(root, "compared-late")
    page, held = visit().page, []
    page.route("**/own/sampling_sheet", lambda route: held.append(route))
    page.locator("[data-compare]").click()
    box = page.locator(".comparing")
    box.get_by_role("button", name="Compare", exact=True).wait_for()
    wait_for(lambda: page.wait_for_timeout(20) or held, 30)
    for route in held:
        route.continue_()
    page.unroute_all()
    page.wait_for_function("document.querySelector('.sampling .strip img')?.naturalWidth > 0")
    inside = "e => { const { top, bottom } = e.getBoundingClientRect(); return top >= 0 && bottom <= innerHeight; }"
    page.wait_for_function(inside, arg=box.get_by_role("button", name="Compare", exact=True).element_handle())


@pytest.mark.browser
def test_the_panel_opens_the_comparison_of_its_run(visit, served, monkeypatch):
    root = served[1]
    (root / "model.safetensors").write_text("x")
    run = run_with_samples(root, "compared-1")
    commands = []

    def finished(kind, words, folder):
        commands.append(words)
        place = store(run)
        layout.store(folder / jobs.RESULT, layout.load_facts(place / "comparison.json"))
        layout.store(folder / jobs.JOB, {"kind": kind, "state": "finished", "started": 2.0, "arguments": words})
        return jobs.job_at(folder)

    monkeypatch.setattr(jobs, "start_job", finished)
    visitor = visit()
    page = visitor.page
    page.locator("[data-compare]").click()
    box = page.locator(".comparing")
    box.get_by_role("button", name="Compare", exact=True).wait_for()
    assert box.locator("#comparing-run").input_value() == "compared-1" and not box.locator(".verdict").is_visible()
    assert not box.locator("#comparing-folder").is_visible()
    box.locator("#comparing-encoder").select_option("folder")
    assert box.locator("#comparing-folder").is_visible()
    box.locator("#comparing-encoder").select_option("")
    box.get_by_role("button", name="Compare", exact=True).click()
    box.locator(".reason", has_text="Step 10: lowest held-out loss").wait_for()
    assert commands == [["compare", "compared-1"]]
    assert box.locator(".head.best").inner_text().split("\n") == ["Step 10", "Proposed"]
    assert box.locator(".numbers").all_inner_texts() == ["0.1234\n0.2000"]
    assert box.locator(".sample.copied").count() == 1 and "7.png" in box.locator(".copies").inner_text()
    box.locator(".sample").first.click()
    page.locator("dialog.viewer").wait_for()
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
