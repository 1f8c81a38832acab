"""The page in a real browser: fill in, read problems, print, save, load, train, watch, come back, stop."""

import json
import re
import threading

import pytest

from library import importers
from library.check import isolated
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.schema import changed, flatten_sections
from library.families import config_class
from library.runs import reader

pytestmark = pytest.mark.browser

READY = {
    "pretrained_model_name_or_path": "/models/base.safetensors",
    "train_data_dir": "/images",
    "resolution": "1024",
    "output_name": "cat",
    "max_train_steps": "40",
    "learning_rate": "1e-4",
}


def filled(visitor, folder, **more):
    visitor.fill(**{**READY, "output_dir": folder, **more})
    return visitor


def test_the_first_screen(visit):
    page = visit().page
    for name in ("LoRA", "DreamBooth", "Finetune"):
        assert page.get_by_role("tab", name=name, exact=True).is_visible()
    train = page.get_by_role("button", name="Train", exact=True).locator("visible=true").bounding_box()
    assert train["y"] + train["height"] <= 900
    assert page.get_by_text("No training yet.").bounding_box()["y"] < 200
    assert page.evaluate("document.documentElement.scrollWidth") == 1440


def test_the_other_tabs_are_made_ahead_and_ask_nothing_before_they_are_opened(visit):
    page, judged = (visitor := visit()).page, []
    listen = lambda request: judged.append(request.post_data_json["tab"]) if "/own/judge" in request.url else None  # noqa: E731
    page.on("request", listen)
    page.wait_for_function("""() => { idle.splice(0).forEach((act) => act());
        return document.querySelectorAll("form.settings").length === 5; }""")
    page.wait_for_function("() => { idle.splice(0).forEach((act) => act()); return !idle.length; }")
    requested = lambda what: [url for url in visitor.requests if what in url]  # noqa: E731
    assert (len(requested("/own/form?")), len(requested("/api/v1/queue"))) == (5, 1)
    ids = page.locator("form.settings [id]").evaluate_all("all => all.map((one) => one.id)")
    assert len(set(ids)) == len(ids) > 1000
    assert [form.is_visible() for form in page.locator("form.settings").all()].count(True) == 1
    with page.expect_response(lambda answer: "/own/judge" in answer.url and "dreambooth" in answer.request.post_data):
        visitor.tab("DreamBooth")
    visitor.fill(train_data_dir="/images")
    visitor.tab("LoRA")
    visitor.tab("DreamBooth")
    assert page.locator("#dreambooth-train_data_dir").input_value() == "/images"
    assert len(requested("/own/form?")) == 5
    page.remove_listener("request", listen)
    assert set(judged) <= {"lora", "dreambooth"}


def test_page_head_preloads_what_gradio_waits_for(visit):
    visitor = visit()
    ahead = visitor.page.locator("head link[rel=preload]").evaluate_all("all => all.map((one) => one.href)")
    expected = ("/own/form?", "/theme.css?v=", "/inter.woff2")
    assert len(ahead) == 3 and all(part in url for part, url in zip(expected, ahead, strict=True))
    assert [visitor.requests.count(url) for url in ahead] == [1, 1, 1]
    for url in ahead[1:]:
        assert "immutable" in visitor.context.request.get(url).headers["cache-control"]


def test_empty_form_reports_everything_that_is_missing(visit):
    visitor = visit()
    visitor.click("Train")
    visitor.until("2 problems to fix")
    for words in ("Base model is not set", "Image folder is not set"):
        assert words in visitor.said()
    marked = visitor.page.locator("#lora-train_data_dir").evaluate("e => getComputedStyle(e).borderColor")
    assert marked != visitor.page.locator("#lora-output_name").evaluate("e => getComputedStyle(e).borderColor")
    visitor.fill(train_data_dir="/images")  # editing a field removes its mark
    assert visitor.page.locator("#lora-train_data_dir").evaluate("e => getComputedStyle(e).borderColor") != marked
    visitor.fill(output_dir="")  # the page had proposed a folder
    visitor.click("Train")
    visitor.until("Output folder")
    assert reader.runs() == []


def test_what_the_form_knows_is_reported_before_the_whole_check_is_done(visit, monkeypatch):
    done = threading.Event()

    def slow(reading, launch):
        assert done.wait(60)
        more = isolated.finding("the disk is full", "disk", "bad")
        return {"findings": [*isolated.findings_of_reading(reading), more], "fit": None}

    monkeypatch.setattr(isolated, "check_reading", slow)
    visitor = visit()
    visitor.click("Train")
    visitor.until("2 problems to fix")
    assert visitor.page.locator(".bar[data-busy]").count() == 1  # the full check still runs
    visitor.click("More")
    visitor.click("Download")  # the running check must not delay this
    visitor.until("is among your downloads")
    done.set()
    visitor.until("3 problems to fix")
    visitor.page.wait_for_selector(".bar:not([data-busy])")
    done.clear()
    visitor.click("Train")
    visitor.until("2 problems to fix")
    visitor.fill(train_data_dir="/images")
    visitor.click("Train")  # the previous check still runs, but its answer is out of date
    visitor.page.wait_for_selector(".training:visible .bar > .said:empty", state="attached")
    done.set()
    visitor.until("the disk is full")
    assert "2 problems to fix" in visitor.said() and "Image folder" not in visitor.said()


def test_wrong_numbers_are_reported_together_and_a_click_leads_to_them(visit, tmp_path):
    visitor = filled(
        visit(), tmp_path / "out", max_train_steps="-5", learning_rate="abc", resolution="foo", train_batch_size=""
    )
    visitor.click("Loss")
    visitor.fill(huber_c="much")
    visitor.click("Loss")
    visitor.click("Train")
    visitor.until("5 problems to fix")
    assert "Batch size needs a whole number; the default is 1" in visitor.said()
    for words in ("Steps must be at least 1, got -5", "Learning rate must be a number, got 'abc'", "Huber threshold"):
        assert words in visitor.said()
    assert not visitor.page.locator("#lora-huber_c").is_visible()
    visitor.page.locator(".message .jump", has_text=re.compile("^Huber")).click()
    assert visitor.page.locator("#lora-huber_c").is_visible()
    assert visitor.page.evaluate("document.activeElement.id") == "lora-huber_c"
    assert not (tmp_path / "out").exists()


def test_the_family_decides_what_is_seen_and_keeps_what_was_typed(visit):
    visitor = visit()
    visitor.fill(train_data_dir="/images")
    assert not visitor.page.locator("#lora-flux-t5xxl").is_visible()
    visitor.family("FLUX.1")
    assert visitor.page.locator("#lora-flux-t5xxl").is_visible()
    assert visitor.page.locator("#lora-train_data_dir").input_value() == "/images"
    visitor.family("SDXL")
    assert not visitor.page.locator("#lora-flux-t5xxl").is_visible()


def test_torch_compile_settings_in_every_tab(visit):
    visitor = visit()
    for tab in ("LoRA", "DreamBooth", "Finetune"):
        visitor.tab(tab)
        visitor.click("Torch Compile Settings")
        for family in ("FLUX.1", "SDXL"):
            visitor.family(family)
            for name in (
                "compile",
                "compile_backend",
                "compile_mode",
                "compile_dynamic",
                "compile_fullgraph",
                "compile_cache_size_limit",
                "compile_fallback",
            ):
                assert visitor.page.locator(f"#{tab.lower()}-{name}").is_visible(), name


def test_print_shows_the_command_and_the_toml_and_writes_nothing(visit, tmp_path):
    visitor = filled(visit(), tmp_path / "my out")
    visitor.click("Torch Compile Settings")
    visitor.page.locator("#lora-compile").check()
    visitor.click("Print command")
    visitor.until("Train runs this command")
    command, toml = visitor.page.locator(".message pre").all_inner_texts()
    assert "stand_in" not in command and "sdxl_train_network.py --config_file '" in command
    assert "[compile]\ncompile = true" in toml and "compile_dynamic" not in toml and "learning_rate = 0.0001" in toml
    assert not (tmp_path / "my out").exists()


def test_sizes_and_steps_of_a_list_are_typed_into_one_field(visit, tmp_path):
    values = {
        "resolution": "512, 768, 1024",
        "save_at_steps": "20, 30",
        "save_every_n_steps": "5",
        "save_from_step": "10",
        "validation_split": "0.1",
        "early_stop_patience": "3",
        "cached_caption_variants": "4",
    }
    visitor = filled(visit(), tmp_path / "out")
    visitor.put(**values)
    visitor.click("Print command")
    visitor.until("Train runs this command")
    toml = visitor.page.locator(".message pre").all_inner_texts()[1]
    for line in (
        'resolution = "512;768;1024"',
        "save_at_steps = [20, 30]",
        "save_from_step = 10",
        "early_stop_patience = 3",
        "cached_caption_variants = 4",
    ):
        assert line in toml
    visitor.put(resolution="512;512", save_at_steps="20,20", early_stop_patience="2", validation_split="0")
    visitor.click("Train")
    visitor.until("3 problems to fix")
    for words in (
        "names the size 512 more than once",
        "Save at steps names 20 more than once",
        "needs held-out images",
    ):
        assert words in visitor.said()


def test_a_config_is_saved_changed_and_loaded_again(visit, served):
    path = served[1] / "cat.toml"
    visitor = filled(visit(), "/results")
    visitor.click("Optimizer")
    visitor.fill(max_grad_norm="0")
    visitor.page.locator("#lora-lr_scheduler").fill("cosine")
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    visitor.click("Save config")
    visitor.until("Saved")
    first = read_toml(path)
    assert first["max_grad_norm"] == 0 and first["lr_scheduler"] == "cosine" and first["max_train_steps"] == 40
    visitor.fill(max_train_steps="41", max_grad_norm="1")
    visitor.click("Load config")
    visitor.until("Loaded cat.toml for SDXL")
    assert visitor.page.locator("#lora-max_train_steps").input_value() == "40"
    assert visitor.page.locator("#lora-max_grad_norm").input_value() == "0.0"
    visitor.click("Save config")  # the loaded file may be overwritten
    visitor.until("Saved")
    assert read_toml(path) == first
    other = visit()
    other.page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    other.click("Save config")  # another visitor has not seen its contents
    other.until("exists already")
    other.click("Load config")
    other.until("Loaded cat.toml")
    other.click("Undo")
    other.until("as it was before")
    place = other.page.get_by_placeholder("Config file").locator("visible=true")
    assert place.input_value() == ""  # undoing also forgets the path, so that Save cannot overwrite the config
    place.fill(str(path))
    other.click("Save config")
    other.until("exists already")
    assert read_toml(path) == first


def test_a_json_of_kohya_ss_is_imported_and_never_written_over(visit, served):
    path = served[1] / "old.json"
    contents = {"sdxl": True, "LoRA_type": "Standard", "network_dim": "24", "output_dir": "/results", "lowvram": True}
    path.write_text(json.dumps(contents), encoding="utf-8")
    visitor = filled(visit(), "/elsewhere", max_train_steps="41")
    place = visitor.page.get_by_placeholder("Config file").locator("visible=true")
    place.fill(str(path))
    visitor.click("Load config")
    visitor.until("Loaded old.json for SDXL")
    visitor.until("ignored: lowvram")
    assert visitor.page.locator("#lora-network_dim").input_value() == "24"
    assert visitor.page.locator("#lora-max_train_steps").input_value() == "1600"  # loading replaces the whole form
    assert place.input_value() == ""
    place.fill(str(path))
    visitor.click("Save config")
    visitor.until("must end in .toml")
    assert json.loads(path.read_text(encoding="utf-8")) == contents


def test_files_outside_of_the_roots_or_of_another_tab_are_refused(visit, served, tmp_path):
    visitor = visit()
    place = visitor.page.get_by_placeholder("Config file").locator("visible=true")
    for text in (str(tmp_path / ".." / "x.toml"), "/etc/passwd", "../../../etc/x.toml", ""):
        place.fill(text)
        visitor.click("Load config")
        visitor.until("config file:")
    (served[1] / "full.toml").write_text("learning_rate_te1 = 0.1\n", encoding="utf-8")
    place.fill(str(served[1] / "full.toml"))
    visitor.click("Load config")
    visitor.until("This is a config for the DreamBooth tab").until("1 problem to fix")
    visitor.click("Load it there")
    visitor.until("Loaded full.toml for SDXL")
    assert visitor.held("dreambooth")["values"]["learning_rate_te1"] == "0.1"
    assert place.input_value() == str(served[1] / "full.toml")  # Save goes back to the same file


def test_a_config_goes_through_download_and_upload(visit, tmp_path):
    visitor = filled(visit(), "/results", network_dim="24")
    visitor.click("More")
    with visitor.page.expect_download() as download:
        visitor.click("Download")
    assert download.value.suggested_filename == "cat.toml"
    download.value.save_as(tmp_path / "cat.toml")
    other = visit()
    other.page.locator("input[type=file]").locator("nth=0").set_input_files(tmp_path / "cat.toml")
    other.until("Loaded cat.toml")
    assert other.page.locator("#lora-network_dim").input_value() == "24"
    config = build_config(config_class("sdxl_train_network"), other.held()["values"])
    assert flatten_sections(changed(config)) == read_toml(tmp_path / "cat.toml")
    recipe = {"ss_base_model_version": "sdxl_base_v1-0", "ss_network_dim": "48", "ss_seed": "7"}
    header = importers.with_header(json.dumps({"__metadata__": recipe}))
    (tmp_path / "lora.safetensors").write_bytes(header + bytes(2_000_000))  # larger than any config
    other.page.locator("input[type=file]").locator("nth=0").set_input_files(tmp_path / "lora.safetensors")
    other.until("Loaded lora.safetensors")
    assert other.page.locator("#lora-network_dim").input_value() == "48"


def test_training_is_watched_left_and_found_again(visit, tmp_path):
    visitor = filled(visit(), tmp_path / "out", max_train_steps="60")
    held = tmp_path / "out" / "held"  # keeps the training running while it is watched
    held.parent.mkdir()
    held.touch()
    visitor.click("Train")
    visitor.until("It continues when you close this page")
    run = visitor.state("running")
    folder = tmp_path / "out" / "runs" / run
    assert read_toml(folder / "run.toml")["max_train_steps"] == 60
    visitor.until("Step", ".line")
    visitor.page.wait_for_selector(".chart polyline.smooth")
    for words in ("DoubleStreamBlock: forward graph in 1.5 s", "2 images have no caption", "Loss, smoothed"):
        visitor.until(words, ".facts")
    visitor.page.locator(".log summary").click()
    visitor.until("12 images, 1 bucket", ".log pre")
    visitor.open()  # a reload
    assert visitor.state("running") == run
    second = visit()
    assert second.state("running") == run
    second.click("Train")  # the second visitor's form is empty
    second.until("problems to fix")
    held.unlink()
    assert visitor.state("finished") == run and second.state("finished") == run
    visitor.until("cat.safetensors (2.0 MB)", ".facts")
    assert not visitor.page.get_by_role("button", name="Stop now").is_visible()


def test_the_form_survives_a_reload(visit):
    visitor = filled(visit(), "/results")
    visitor.family("FLUX.1")
    visitor.fill(clip_l="/models/clip.safetensors")
    visitor.page.get_by_label("Config file").first.fill("/results/cat.toml")
    visitor.open()
    assert visitor.page.get_by_label("Config file").first.input_value() == "/results/cat.toml"
    assert visitor.page.locator("#lora-output_dir").input_value() == "/results"
    assert visitor.page.locator("#lora-flux-clip_l").input_value() == "/models/clip.safetensors"


def test_stop_after_this_step(visit, tmp_path):
    visitor = filled(visit(), tmp_path / "out", max_train_steps="2000")
    visitor.click("Train")
    visitor.until("Step", ".line")
    visitor.click("Stop after this step")
    run = visitor.state("stopped")
    assert reader.find_run(run).facts["step"] < 2000 and (tmp_path / "out" / "cat.safetensors").exists()
    # The button is gone: with the keyboard one continues where it was.
    visitor.page.wait_for_function("document.activeElement.matches('.acts button')")


def test_stop_now_saves_a_state_to_resume_from(visit, tmp_path):
    visitor = filled(visit(), tmp_path / "out", max_train_steps="2000")
    visitor.click("Train")
    run = visitor.state("running")
    visitor.click("Train")
    visitor.until("is still running")
    visitor.click("Stop now")
    assert visitor.state("stopped") == run and (tmp_path / "out" / "cat-state" / "train_state.json").exists()
    visitor.page.get_by_role("button", name=f"Resume from step {reader.find_run(run).facts['step']}").wait_for()


def test_a_failure_says_why_and_what_to_do(visit, tmp_path):
    visitor = filled(visit(), tmp_path / "out", learning_rate="0.5")
    visitor.click("Train")
    visitor.state("failed")
    visitor.until("The GPU ran out of memory", ".cause")


def test_a_run_from_a_shell_shows_up_and_older_ones_can_be_chosen(visit, tmp_path):
    from library.runs.record import Record

    with Record.start({}, "sdxl_train", tmp_path / "out", "dog", "SDXL fine-tune") as first:
        first.step({"step": 1, "loss": 0.5})
    visitor = visit()
    assert visitor.state("finished") == first.id
    with Record.start({}, "sdxl_train", tmp_path / "out", "fox", "SDXL fine-tune") as second:
        assert visitor.state("running") == second.id
        visitor.page.get_by_label("Run", exact=True).select_option(value=first.id)
        assert visitor.state("finished") == first.id
    assert visitor.state("finished") == first.id


def test_on_a_phone_nothing_is_cut_or_too_small(visit):
    visitor = visit(has_touch=True)
    visitor.page.set_viewport_size({"width": 390, "height": 844})
    visitor.click("Torch Compile Settings")
    assert visitor.page.evaluate("document.documentElement.scrollWidth") == 390
    train = visitor.page.get_by_role("button", name="Train", exact=True).locator("visible=true").bounding_box()
    assert train["y"] + train["height"] <= 844
    visitor.has_none(SMALL)


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_words_stand_out_from_their_ground(visit, tmp_path, mode):
    from library.runs.record import Record

    with Record.start({}, "sdxl_train", tmp_path / "out", "dog", "SDXL fine-tune") as run:
        run.step({"step": 1, "loss": 0.5, "lr": 1e-4})
        run.event("warning", text="2 images have no caption")
        run.finish("failed", "CUDA out of memory")
    visitor = visit(color_scheme=mode)
    visitor.state("failed")
    visitor.click("Torch Compile Settings")
    visitor.click("Train")
    visitor.until("to fix")
    visitor.has_none(FAINT)


# Text with a contrast below 4.5 to 1 (WCAG AA), against the grounds that are painted behind it.
FAINT = """() => {
  const paint = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const over = (colors) => {
    for (const color of ['white', ...colors]) { paint.fillStyle = color; paint.fillRect(0, 0, 1, 1); }
    return [...paint.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const faint = [];
  for (const e of document.querySelectorAll('body *')) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    const seen = e.checkVisibility({ visibilityProperty: true, opacityProperty: true });
    if (!seen || !(own || e.matches('input:not([type=checkbox], [type=radio]), textarea, select'))) continue;
    const grounds = [];
    for (let at = e; at; at = at.parentElement) grounds.unshift(getComputedStyle(at).backgroundColor);
    const [ground, text] = [over(grounds), over([...grounds, getComputedStyle(e).color])];
    const [dim, bright] = [light(ground), light(text)].sort((a, b) => a - b);
    if ((bright + 0.05) / (dim + 0.05) < 4.5) faint.push([e.tagName, e.textContent.trim().slice(0, 30), text, ground]);
  }
  return faint;
}"""

SMALL = """() => [...document.querySelectorAll('button, select, input:not([type=hidden]), textarea')]
  .filter(e => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }))
  .map(e => { const label = e.closest('label'); const r = (label || e).getBoundingClientRect();
              return [e.id || e.textContent || e.className, Math.round(r.width), Math.round(r.height)]; })
  .filter(([, w, h]) => w < 24 || h < 24)"""
