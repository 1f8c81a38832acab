"""The room Runs: from the table to a run's page, its charts, samples and note, two runs together, and back."""

import io
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from kohya_gui.api.building import build_api
from kohya_gui.panel import monitor, samples
from kohya_gui.runs.runs import RunsRoom
from kohya_gui.sampling import sampling
from library.config.problems import ConfigError
from library.runs import keys, layout, notes, process, reader, registry
from tests.training import wait_for


def recorded(home, name, rate, **facts):
    """Write the record of a training of 60 steps with two prompts, sampled three times."""
    folder = home / name / "runs" / f"{name}-20261101-101010-{name}"
    folder.mkdir(parents=True)
    config = {"optim": {"learning_rate": rate}, "save": {"output_dir": str(home / name), "output_name": name}}
    told = {"id": folder.name, "state": "finished", "script": "flux_train_network", "title": "FLUX.1 LoRA"}
    told |= {"started": time.time() - 600, "ended": time.time() - 300, "output_dir": str(home / name)}
    told |= {"output_name": name, "step": 60, "total_steps": 60, "config": config, **facts}
    events = [
        {"kind": "step", "t": 100.0 + n, "step": n, "loss": math.exp(-n / 30), "lr": {"unet": rate}, "grad_norm": 1 / n}
        for n in range(1, 61)
    ]
    for step in (0, 30, 60):
        for number, prompt in enumerate(("a <b>cat</b>", "a dog")):
            path = home / name / f"{name}-{step}-{number}.png"
            Image.new("RGB", (64, 64), (step * 4, 80, 40 * number)).save(path)
            events.append(
                {"kind": "sample", "t": 200.0, "step": step, "number": number, "prompt": prompt, "file": str(path)}
            )
    (folder / layout.PROGRESS).write_text("".join(json.dumps(event) + "\n" for event in events))
    layout.store(folder / layout.RUN, told)
    registry.add_pointer(folder)
    return folder


def levels(colour):
    """Return red, green and blue from 0 to 255 of a colour as a browser gives it."""
    numbers = [float(number) for number in re.findall(r"[\d.]+", colour.replace("srgb", ""))][:3]
    return [number * 255 for number in numbers] if colour.startswith("color(") else numbers


def at_work(home):
    """Write the record of a training at work, whose process is killed as the visit ends."""
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    recorded(home, "one", 1e-4, state="running", ended=None, **process.identity(worker.pid))


def test_the_panel_shows_samples_of_a_run_at_work_above_its_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    recorded(tmp_path, "one", 1e-4)
    for active, place in ((True, "pictures"), (False, "gallery")):
        monkeypatch.setattr(reader.RecordedRun, "active", active)
        rendered = {name: part.render() for name, part in monitor.panel_parts("").items()}
        assert [name for name, markup in rendered.items() if 'class="sample"' in markup] == [place]
        assert ">Base model</span>" in rendered[place] and ">Step 30</span>" in rendered[place]
    assert list(rendered).index("pictures") < min(list(rendered).index(name) for name in ("rates", "numbers", "usage"))


def test_a_saved_model_is_a_download_and_nothing_else_is(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    folder = recorded(tmp_path, "one", 1e-4, folder=str(tmp_path), output_dir="one")
    (tmp_path / "one/one-state").mkdir()
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    (tmp_path / "one/one.safetensors").write_bytes(b"weights")
    (tmp_path / "one/led.safetensors").symlink_to(tmp_path / "secret.safetensors")
    names = ["one/one.safetensors", "one/one-state", "one/gone.safetensors", "one/led.safetensors", "one/one-0-0.png"]
    with (folder / layout.PROGRESS).open("a") as progress:
        for name in [*names, "secret.safetensors"]:
            progress.write(json.dumps({"kind": "saved", "step": 60, "file": name}) + "\n")
    room = object.__new__(RunsRoom)
    room.roots = []
    sent = room.saved_file({"run": folder.name, "file": "one.safetensors"})
    assert Path(sent.path).read_bytes() == b"weights"
    assert sent.headers["content-disposition"] == 'attachment; filename="one.safetensors"'
    wrong = ["", "one", "../secret.safetensors", "secret.safetensors", *(Path(name).name for name in names[1:])]
    for name in wrong:
        with pytest.raises(ConfigError):
            room.saved_file({"run": folder.name, "file": name})


def find_in_table(visitor):
    """Sort and filter the table."""
    page = visitor.page
    page.get_by_role("tab", name="Runs", exact=True).click()
    rows = page.locator(".runs-table tbody tr")
    page.locator(".runs-table", has_text="cannot be read").wait_for()
    assert rows.count() == 3 and rows.first.locator("a").inner_text() == "one"
    page.get_by_role("button", name="Name", exact=True).click()
    assert [name[:3] for name in page.locator(".runs-table tbody a").all_inner_texts()] == ["one", "tor", "two"]
    page.get_by_label("Find runs").fill("two failed")
    assert rows.count() == 1 and "The GPU ran out of memory" in rows.inner_text()
    page.get_by_label("Find runs").fill("")


def read_charts(visitor):
    """Hover, zoom, change scale and axis, and read values by keyboard and as a table."""
    page = visitor.page
    loss, gradient = (page.locator(f'[data-chart="{name}"]') for name in ("loss", "gradient"))
    loss.locator("canvas").wait_for()
    over = loss.locator(".u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] / 2, over["y"] + 40)
    loss.locator(".where", has_text="Step 3").wait_for()  # 30 or 31
    assert gradient.locator(".where").inner_text() == loss.locator(".where").inner_text()
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] * 0.75, over["y"] + 40, steps=4)
    page.mouse.up()
    whole = page.get_by_role("button", name="Show all", exact=True)
    whole.wait_for()
    for _ in range(20):  # a slow browser takes two slow clicks for two selections
        page.mouse.dblclick(over["x"] + 100, over["y"] + 40)
        page.wait_for_timeout(500)
        if whole.is_hidden():
            break
    assert whole.is_hidden()
    page.get_by_text("Log scale").click()
    page.get_by_role("button", name="Hours").click()
    loss.locator(".plot").press("Home")
    assert "0 s" in loss.locator(".plot").get_attribute("aria-valuetext")
    page.get_by_text("Values as a table").click()
    assert "Gradient norm" in page.locator(".values-table table").inner_text()


def look_at_samples(visitor):
    """Open a sample, move with the keyboard, and lay another step over it."""
    page, viewer = visitor.page, visitor.page.locator("dialog.viewer")
    shots = page.locator(".gallery .shot")
    shots.nth(5).wait_for()
    above, charts = page.locator(".run-samples").bounding_box(), page.locator(".plots").bounding_box()
    assert above["y"] < charts["y"]  # what it has learned comes first
    assert shots.count() == 6 and page.locator(".gallery").get_by_text("a <b>cat</b>").count() == 1
    shots.nth(1).click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert (
        "Step 60" in viewer.locator(".at option:checked").inner_text()
        and viewer.locator("header p").inner_text() == "a dog"
    )
    viewer.get_by_label("Compare with").select_option("0")
    viewer.locator(".stage").click(position={"x": 80, "y": 80})
    assert viewer.get_by_label("Where the left one ends").input_value() != "50"
    page.keyboard.press("Escape")


def compare_and_remove(visitor):
    """Lay the charts of two runs over each other, take both off the list, and put them back."""
    page = visitor.page
    for name in ("one", "two"):
        page.get_by_label(f"Choose {name}", exact=True).check()
    visitor.click("Compare")
    page.locator(".run-settings", has_text="0.0003").wait_for()
    page.locator('[data-chart="loss"] .values', has_text="two").wait_for()
    page.go_back()
    visitor.click("Remove from the list")
    visitor.until("2 runs removed", ".runs-list .answer")
    page.wait_for_function("document.querySelectorAll('.runs-table tbody tr').length === 1")
    visitor.click("Undo")
    page.wait_for_function("document.querySelectorAll('.runs-table tbody tr').length === 3")


def test_from_the_table_to_charts_samples_note_and_comparison(visit, tmp_path):
    first = recorded(tmp_path, "one", 1e-4)
    recorded(tmp_path, "two", 3e-4, started=time.time() - 900, state="failed", error="CUDA out of memory")
    (recorded(tmp_path, "torn", 1.0) / layout.RUN).write_text("{")
    visitor = visit()
    page = visitor.page
    find_in_table(visitor)
    assert not [url for url in visitor.requests if "uPlot" in url]  # loaded with the first chart
    page.get_by_role("link", name="one", exact=True).click()
    read_charts(visitor)
    assert page.url.endswith(f"#runs/{first.name}") and page.locator("#side").is_hidden()
    look_at_samples(visitor)
    page.get_by_label("Note about this run").fill("<i>good</i>")
    page.get_by_label("Note about this run").blur()
    visitor.until("Saved", ".run-note")
    assert notes.read_note(first) == "<i>good</i>"
    page.go_back()
    page.locator(".runs-table", has_text="<i>good</i>").wait_for()
    compare_and_remove(visitor)
    page.goto(f"{visitor.address}#runs/never-was")
    page.locator("#top .notices", has_text="no longer exists: never-was").wait_for()
    assert page.locator(".runs-table").is_visible()
    page.get_by_text("Notifications", exact=True).click()
    page.get_by_label("Address of a webhook").fill("file:///etc/passwd")
    visitor.click("Save address")
    visitor.until("A webhook is an address", ".notices .answer")
    page.get_by_label("Address of a webhook").fill("https://example.invalid/key")
    visitor.click("Save address")
    visitor.until("A message goes there when a run ends.", ".notices .answer")
    assert keys.stored_webhook() == "https://example.invalid/key"


def test_a_late_answer_does_not_bring_a_removed_run_back(visit, tmp_path):
    for name in ("one", "two"):
        recorded(tmp_path, name, 1e-4)
    visitor, held = visit(), []
    page = visitor.page
    page.get_by_role("tab", name="Runs", exact=True).click()
    page.get_by_label("Choose one", exact=True).check()
    page.route("**/api/v1/runs?**", lambda route: held.append((route, route.fetch())), times=1)
    while not held:  # the next poll
        page.wait_for_timeout(20)
    visitor.click("Remove from the list")
    visitor.until("1 run removed", ".runs-list .answer")
    page.wait_for_function("document.querySelectorAll('.runs-table tbody tr').length === 1")
    (route, response) = held[0]
    with page.expect_response("**/api/v1/runs?**"):
        route.fulfill(response=response)
    page.wait_for_timeout(100)
    assert page.locator(".runs-table tbody tr").count() == 1


def test_two_runs_of_one_name_are_told_apart_in_the_table_and_in_charts(visit, tmp_path):
    folders = [recorded(tmp_path, name, 1e-4, output_name="cat") for name in ("one", "two")]
    ends = [folder.name[-20:] for folder in folders]
    page = visit().page
    page.get_by_role("tab", name="Runs", exact=True).click()
    table = page.locator(".runs-table tbody")
    for end in ends:
        table.get_by_text(end).wait_for()
    for box in table.get_by_label("Choose cat", exact=True).all():
        box.check()
    compare = page.get_by_role("button", name="Compare", exact=True)
    compare.hover()

    def contrast():
        text, ground = compare.evaluate("e => [getComputedStyle(e).color, getComputedStyle(e).backgroundColor]")
        return sum(abs(one - two) for one, two in zip(levels(text), levels(ground), strict=True))

    wait_for(lambda: contrast() > 200, 30)  # colours change gradually
    compare.click()
    for end in ends:
        page.locator('[data-chart="loss"] .values', has_text=f"cat ({end})").wait_for()
        page.locator(".run-samples", has_text=f"cat ({end})").wait_for()


def test_buttons_say_how_many_more_they_show(visit, tmp_path):
    """At first some settings that differ are shown, and of 26 steps with samples 24."""
    noise = {f"metadata_{name}": "x" for name in ("author", "title", "description", "license", "tags")}
    config = {
        "metadata": noise,
        "save": {"output_name": "x", "output_dir": "x", "training_comment": "x"},
        "optim": {"learning_rate": 3e-4, "max_grad_norm": 0.5},
        "steps": {"seed": 7, "max_train_steps": 9, "gradient_accumulation_steps": 2},
        "network": {"network_dim": 3, "network_alpha": 2.0},
        "data": {"train_batch_size": 2},
    }
    recorded(tmp_path, "one", 1e-4)
    folder = recorded(tmp_path, "two", 3e-4, config=config)
    with (folder / layout.PROGRESS).open("a", encoding="utf-8") as events:
        for step in range(1, 24):  # beside 0, 30 and 60
            sample = {"kind": "sample", "t": 200.0, "step": step, "number": 0, "prompt": "a <b>cat</b>"}
            sample["file"] = str(tmp_path / "two" / "two-0-0.png")
            events.write(json.dumps(sample) + "\n")
    visitor = visit()
    page = visitor.page
    page.get_by_role("tab", name="Runs", exact=True).click()
    for name in ("one", "two"):
        page.get_by_label(f"Choose {name}", exact=True).check()
    page.get_by_role("button", name="Compare", exact=True).click()
    settings = page.locator(".run-settings")
    settings.locator("tbody tr").nth(14).wait_for(state="attached")
    hidden = settings.locator("tbody tr[hidden]").count()
    settings.get_by_role("button", name=f"Show {hidden} more setting", exact=hidden == 1).click()
    assert settings.locator("tbody tr[hidden]").count() == 0
    page.get_by_role("button", name="Show 3 more images", exact=True).click()
    page.locator(".run-samples thead th").nth(26).wait_for()


@pytest.mark.browser
def test_settings_that_are_words_are_in_the_users_language_and_own_values_are_not(visit, tmp_path):
    run = recorded(tmp_path, "Memory", 1e-4).name  # a name that a catalogue translates elsewhere
    page = visit(locale="ja").page
    page.evaluate("run => { location.hash = `#runs/${run}`; }", run)
    settings = page.locator(".run-settings .differences")
    settings.locator("td", has_text="オン").first.wait_for(state="attached")
    values = settings.locator("td").all_text_contents()
    assert "Memory" in values and not {"On", "Off", "not set"} & {*values}


def test_a_resumed_run_shows_the_samples_that_it_goes_on_from(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    first = recorded(tmp_path, "first", 1e-4, started=time.time() - 900)
    second = recorded(tmp_path, "second", 1e-4, resumes=first.name)
    events = [json.loads(line) for line in (second / layout.PROGRESS).read_text().splitlines()]
    later = [event for event in events if event["step"] > 40]  # resumed after step 40, with a sample after 60
    (second / layout.PROGRESS).write_text("".join(json.dumps(event) + "\n" for event in later))
    api = TestClient(build_api([]))
    shown = api.get(f"/api/v1/runs/{second.name}/samples?resumed=true").json()["samples"]
    assert [sample["step"] for sample in shown] == [0, 0, 30, 30, 60, 60]
    for sample in (shown[1], shown[5]):
        answer = api.get(f"/api/v1/runs/{sample['run']}/samples/{sample['place']}")
        maker = "first" if sample["step"] == 0 else "second"
        assert answer.content == (tmp_path / maker / f"{maker}-{sample['step']}-1.png").read_bytes()
    parts = {name: part.render() for name, part in monitor.panel_parts(second.name).items()}
    assert parts["gallery"].count(">Base model</span>") == 2 and f"runs/{first.name}/samples/0" in parts["gallery"]
    assert f"run={second.name}" in parts["learned"]  # the picture from the base model to the end
    sheet = Image.open(io.BytesIO(samples.show_learned({"run": second.name}).body)).convert("RGB")
    assert {(0, 80, 40), (120, 80, 40), (240, 80, 40)} <= {colour for _, colour in sheet.getcolors(1 << 20)}


def test_a_prompt_that_a_resume_has_changed_is_not_mixed_with_the_one_before(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    first = recorded(tmp_path, "first", 1e-4, started=time.time() - 900)
    second = recorded(tmp_path, "second", 1e-4, resumes=first.name)
    later = [line for line in (second / layout.PROGRESS).read_text().splitlines() if json.loads(line)["step"] > 20]
    (second / layout.PROGRESS).write_text("\n".join(later).replace("a dog", "a red dog") + "\n")
    beside = sampling._build_sample_sheet(reader.existing_run(second.name))
    assert beside["rows"] == ["a <b>cat</b>", "a dog", "a red dog"]
    makers = [[cell and cell["large"].split("/")[3] for cell in row] for row in beside["cells"]]
    one, two = first.name, second.name
    assert makers == [[one, two, two], [one, None, None], [None, two, two]]
    parts = {name: part.render() for name, part in monitor.panel_parts(second.name).items()}
    rows = parts["gallery"].split('<div class="strip"')[1:]
    assert [row.count('class="sample"') for row in rows] == [3, 1, 2]  # the cat, the first dog, and the red one
    assert "a red dog" not in rows[1].split("<p ")[0] and "of the base model" not in rows[2]
    sheet = Image.open(io.BytesIO(samples.show_learned({"run": second.name}).body)).convert("RGB")
    colours = {colour for _, colour in sheet.getcolors(1 << 20)}
    assert {(0, 80, 0), (120, 80, 40), (240, 80, 40)} <= colours and (0, 80, 40) not in colours


@pytest.mark.browser
def test_the_page_of_a_run_has_a_row_for_each_wording_of_a_prompt(visit, tmp_path):
    folder = recorded(tmp_path, "one", 1e-4)
    *before, last = (folder / layout.PROGRESS).read_text().splitlines()
    (folder / layout.PROGRESS).write_text("\n".join([*before, last.replace("a dog", "a red dog")]) + "\n")
    page = visit().page
    page.goto(f"{page.url.split('#')[0]}#runs/{folder.name}")
    rows = page.locator(".run-samples tbody tr")
    rows.nth(2).wait_for()
    pictures = [(row.locator("th").inner_text(), row.locator("button").count()) for row in rows.all()]
    assert pictures == [("a <b>cat</b>", 3), ("a dog", 2), ("a red dog", 1)]
    rows.nth(2).locator("button").click()
    viewer = page.locator("dialog.viewer")
    assert viewer.locator("header p").inner_text() == "a red dog" and viewer.locator(".previous").is_disabled()
    viewer.locator(".up").click()
    assert viewer.locator("header p").inner_text() == "a dog"
    assert viewer.get_by_label("Sample", exact=True).locator("option:checked").inner_text() == "Step 30 · 2 of 2"


@pytest.mark.browser
@pytest.mark.parametrize("size", [(1440, 900), (390, 844)])
def test_progress_and_stop_stay_in_view_while_a_tall_panel_is_scrolled(visit, tmp_path, size):
    at_work(tmp_path)
    page = visit().page
    page.set_viewport_size({"width": size[0], "height": size[1]})
    if size[0] < 880:
        page.get_by_label("Details of the run").click()
    page.locator(".live .sample").first.wait_for()
    page.locator(".live details.log").scroll_into_view_if_needed()
    page.locator(".live details.log summary").click()
    page.mouse.wheel(0, 400)
    page.wait_for_function("document.querySelector('.live').getBoundingClientRect().top < -100")
    bar = page.get_by_role("progressbar", name="Progress")
    for part in (bar, page.get_by_role("button", name="Stop now", exact=True)):
        part.click(trial=True)  # nothing covers it
        box = part.bounding_box()
        assert 0 <= box["y"] < 250


@pytest.mark.browser
def test_progress_is_also_said_in_words_in_the_readers_language(visit, tmp_path):
    at_work(tmp_path)
    visitor = visit()
    page, bars = visitor.page, visitor.page.locator("[role=progressbar]:visible")
    page.locator("[role=progressbar][aria-valuetext^='Step 60 / 60']:visible").wait_for()
    visitor.room("Runs")
    page.locator(".runs-table [role=progressbar][aria-valuetext='Step 60 / 60']").wait_for()
    page.locator("select.language").select_option("zh")
    page.locator("[aria-valuetext^='第 60 / 60 步']:visible").wait_for()
    assert bars.get_attribute("aria-valuenow") == "100"
    page.locator("select.language").select_option("en")


@pytest.mark.browser
def test_labels_beside_values_on_a_phone_follow_the_language(visit, tmp_path):
    recorded(tmp_path, "one", 1e-4)
    visitor = visit()
    page = visitor.page
    visitor.room("Runs")
    page.locator(".runs-table [data-run]").wait_for()
    heads = page.locator(".runs-table thead th[data-column]")
    labels = "[...document.querySelectorAll('[data-run] [data-label]')].map((cell) => cell.dataset.label)"
    seen = []
    for language in ("zh", "ja", "en"):
        page.locator("select.language").select_option(language)
        page.wait_for_function("name => document.documentElement.lang === name", arg=language)
        seen.append(page.evaluate(labels))
        assert seen[-1] == [title.rstrip(" ↓↑") for title in heads.all_inner_texts()]
    assert "Steps" in seen[2] and not any("Steps" in labels for labels in seen[:2]) and seen[0] != seen[1]


@pytest.mark.browser
def test_a_name_that_turns_the_direction_of_writing_turns_no_other_words(visit, tmp_path):
    recorded(tmp_path, "one", 1e-4, output_name="\u202egnp.tac")
    visitor = visit()
    visitor.room("Runs")
    name = visitor.page.locator(".runs-table [data-run] .who .own").first
    assert name.evaluate("e => getComputedStyle(e).unicodeBidi") == "isolate"
