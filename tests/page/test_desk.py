"""The form in a real browser: hints while typing, presets, undo, comparing, a first training."""

import json
import re
import shutil

import pytest

from kohya_gui.form import start_preset
from library.check import check_process, isolated
from library.config.formats import read_toml
from library.recipes import preset_files
from library.runs import keys, launcher, reader, start
from tests import fork_server
from tests.training import copied

pytestmark = pytest.mark.browser
REAL = isolated.check_reading, isolated.check_all, launcher.launch_command  # the tests' stand-ins replace these


@pytest.fixture(scope="module")
def demo(demo, served):
    return copied(demo, served[1] / "demo")


def help_of(visitor, field):
    return visitor.page.locator(f"#{field}-help")


def choose_models(visitor, flux, chroma):
    """The form follows the contents of the chosen files."""
    page = visitor.page
    # The family is what the checkpoint's header says.
    visitor.fill(pretrained_model_name_or_path=flux)
    page.locator("#lora-flux-t5xxl").wait_for()
    visitor.until("The file is a FLUX.1 transformer.", ".field")
    # And so is which of its relatives the model is, with what that one needs.
    chroma.mkdir()
    (chroma / "model_index.json").write_text('{"_class_name": "ChromaPipeline"}', encoding="utf-8")
    visitor.fill(pretrained_model_name_or_path=chroma)
    page.wait_for_function("document.querySelector('#lora-flux-model_type').value === 'chroma'")
    assert page.locator("#lora-flux-apply_t5_attn_mask").is_checked()
    # What it needed goes with it, and what was chosen by hand stays.
    visitor.fill(pretrained_model_name_or_path=flux)
    page.wait_for_function("document.querySelector('#lora-flux-model_type').value === 'flux'")
    assert not page.locator("#lora-flux-apply_t5_attn_mask").is_checked()
    # Of one whose header is that of another the name tells, unless a config has named it.
    kontext = shutil.copy(flux, chroma.with_name("flux1-kontext-dev.safetensors"))
    visitor.fill(pretrained_model_name_or_path=kontext)
    page.wait_for_function("document.querySelector('#lora-flux-model_type').value === 'kontext'")
    visitor.fill(pretrained_model_name_or_path=flux)
    page.wait_for_function("document.querySelector('#lora-flux-model_type').value === 'flux'")
    visitor.put(pretrained_model_name_or_path=str(kontext))
    page.wait_for_function("document.querySelector('#lora-form').dataset.seen.includes('kontext')")
    assert page.locator("#lora-flux-model_type").input_value() == "flux"
    visitor.put(model_type="kontext")
    visitor.fill(pretrained_model_name_or_path=f"{flux.parent}/../flux/{flux.name}")
    page.wait_for_function("document.querySelector('#lora-form').dataset.seen.includes('..')")
    assert page.locator("#lora-flux-model_type").input_value() == "kontext"


def test_reports_while_typing(visit, demo, served):
    visitor = visit()
    page = visitor.page
    visitor.fill(max_train_steps="-5")
    page.locator("#lora-max_train_steps[aria-invalid=true]").wait_for()
    assert help_of(visitor, "lora-max_train_steps").inner_text() == "Must be at least 1, got -5"
    page.locator(".field:has(#lora-max_train_steps) .reset").click()
    page.locator("#lora-max_train_steps:not([aria-invalid])").wait_for()
    assert page.locator("#lora-max_train_steps").input_value() == "2000"
    visitor.fill(max_train_steps="2000.0")  # the same number as the start's
    assert not page.locator(".reset:visible").count()
    # What describes the data in detail stands for the folder and the size.
    for dataset_file, required in (("set.toml", 0), ("", 2)):
        visitor.put(dataset_config=dataset_file)
        required_fields = page.locator(".required > :is(#lora-train_data_dir, #lora-resolution)[aria-required=true]")
        assert required_fields.count() == required
    # Search leads to a field that is folded away and rare, and marks it.
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("huber thr")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "lora-huber_c"
    assert page.locator(".field.found #lora-huber_c").is_visible()
    visitor.until("No effect: Loss is neither huber nor Smooth L1", ".ineffective")
    page.locator("#lora-loss_type").select_option("huber")
    page.locator(".field:not(.ineffective) > #lora-huber_c").wait_for()
    # A profile compiles, and says what that means; the rest of the form stays as it is written.
    visitor.fill(learning_rate="1e-")
    visitor.click("Torch Compile Settings")
    page.locator(".profile:visible", has_text="Balanced").click()
    visitor.until("3 settings changed")
    changed = page.locator(".message:visible .changes-made code").all_inner_texts()
    assert sorted(changed) == ["compile", "compile_autotune", "compile_fallback"]
    visitor.until("graphs, about", ".outlook")
    page.locator("#lora-compile_autotune:checked").wait_for(state="attached")
    assert page.locator("#lora-learning_rate").input_value() == "1e-"
    page.locator(".message .undo").click()
    visitor.until("Enable torch.compile: off again")
    page.locator("#lora-compile_autotune:not(:checked)").wait_for(state="attached")
    choose_models(visitor, demo.folder / "models" / "flux" / "tiny-flux1-dev.safetensors", served[1] / "chroma")


# What people type who come from elsewhere, or in a hurry -> the setting that is shown first.
SOUGHT = {
    "--network_dim": "network_dim",
    "Network Rank (Dimension)": "network_dim",
    "rnak": "network_dim",
    "learnig rate": "learning_rate",
    "LR warmup (% of total steps)": "lr_warmup_steps",
    "LoCon": "network_module",
    "gradint checkpoiting": "gradient_checkpointing",
    "CrossAttention": "sdpa",
    "prodigy": "optimizer_type",
    "flip augmentation": "flip_aug",
    "max-train-steps": "max_train_steps",
    "vram": "blocks_to_swap",
    "CUDA out of memory": "blocks_to_swap",
    "oom": "blocks_to_swap",
    "slow": "compile",
    "training speed": "compile",
}


def test_a_setting_is_found_by_its_flag_its_name_in_kohya_ss_and_with_typing_errors(visit):
    page = visit().page
    box, rows = page.locator(".search input:visible"), page.locator(".search [role=listbox]:visible li")
    for words, option in SOUGHT.items():
        box.fill(words)
        assert rows.locator("code").all_inner_texts()[:1] == [option], words
    box.fill("guidance scale")
    assert rows.first.inner_text() == "Only found for FLUX.1: Guidance scale"
    page.locator("#lora-form").get_by_text("FLUX.1", exact=True).click()
    box.fill("min snr")  # a field that is hidden, as it means nothing there
    assert rows.first.inner_text() == "Only found for SDXL, SD 1.5: Min-SNR gamma"
    box.fill("zzzzqq")
    assert rows.all_inner_texts() == ["No setting matches."]


def test_presets_have_sentences_keep_paths_and_can_be_undone(visit):
    visitor = visit()
    page = visitor.page
    chosen = max(preset_files.of_kind("lora", ["flux"]), key=lambda preset: preset.gigabytes)
    rank = str(read_toml(chosen.path)["network_dim"])
    visitor.fill(output_dir="/results", network_dim="3")
    visitor.click("Presets")
    page.locator(f'.preset:visible[data-preset="{chosen.id}"]').click()
    sentence = ", ".join(part for part in chosen.description.settings if part not in start_preset.OF_A_GPU)
    visitor.until(sentence)  # without a GPU nothing is compiled, or computed in bf16
    assert page.locator("#lora-flux-clip_l").is_visible()
    assert page.locator("#lora-presets h3").first.text_content() == "FLUX.1"  # the chosen family's come first
    assert page.locator("#lora-network_dim").input_value() == rank
    assert page.locator("#lora-output_dir").input_value() == "/results"
    assert page.locator(".start:visible b").inner_text() == str(chosen.title)
    assert page.locator(".changed:visible [data-option]").count() == 1  # only the folder
    row = page.locator(".changes-made tr", has_text="network_dim")  # what it changed, with both values
    assert row.locator("td").all_inner_texts()[1:] == ["3", rank]
    page.locator(".message .undo").click()
    assert page.locator("#lora-network_dim").input_value() == "3"
    assert not page.locator("#lora-flux-clip_l").is_visible()


def test_a_profile_looks_chosen_while_the_form_compiles_by_it_and_help_stays_below_idle_settings(visit):
    visitor = visit()
    page = visitor.page
    page.get_by_role("button", name="sd-scripts' defaults").locator("visible=true").click()
    visitor.click("Torch Compile Settings")
    chosen = page.locator('.profile:visible[aria-pressed="true"]')
    asleep = page.locator(".ineffective:visible #lora-compile_backend-help")
    asleep.locator("em", has_text="No effect: Enable torch.compile is off").wait_for()
    words = asleep.inner_text().split("\n")
    assert len(words) == 2 and "inductor" in words[0] and words[1] == "No effect: Enable torch.compile is off"
    assert chosen.count() == 0
    box = page.locator(".profile:visible", has_text="Max").bounding_box()
    page.mouse.move(box["x"] + 20, box["y"] + 20)  # hovering does not choose
    edge = "e => getComputedStyle(e).borderColor"
    assert len({card.evaluate(edge) for card in page.locator(".profile:visible").all()}) == 1
    page.locator(".profile:visible", has_text="Max").click()
    chosen.filter(has_text="Max").wait_for()
    assert chosen.count() == 1
    page.locator("#lora-compile:visible").uncheck()
    page.wait_for_function("!document.querySelector('.profile[aria-pressed=\"true\"]')")


def test_messages_take_a_line_of_the_desk_and_the_run_one_of_a_phone(visit, served, tmp_path):
    from library.runs.record import Record

    visitor = visit()
    page, file = visitor.page, served[1] / "lines.toml"  # a short path, as a long one would wrap
    height = lambda selector: page.locator(f"{selector}:visible").bounding_box()["height"]  # noqa: E731
    page.get_by_placeholder("Config file").locator("visible=true").fill(str(file))
    visitor.click("Save config")
    visitor.until("Saved")
    assert height(".message") < 40
    visitor.click("Load config")
    visitor.until("Loaded").until("Undo")
    assert height(".message") < 44  # one line, including its button
    page.locator(".message:visible .undo").click()
    visitor.until("The form is as it was before")
    file.write_text(file.read_text() + "\nnum_processes = 2\nepoch = 3\n")  # two keys that belong elsewhere
    visitor.click("Load config")
    visitor.until("2 notes")
    assert height(".message") < 44
    page.locator(".message:visible summary").click(position={"x": 8, "y": 8})
    page.locator(".message:visible li").nth(1).wait_for()
    with Record.start({}, "sdxl_train", tmp_path / "out", "fox", "SDXL fine-tune") as run:
        run.step({"step": 1, "loss": 0.5, "lr": 1e-4})
        visitor.state("running")
        page.set_viewport_size({"width": 390, "height": 844})
        assert height(".live") < 60
        first = page.locator("#lora-pretrained_model_name_or_path").bounding_box()
        page.get_by_role("button", name="Details of the run").click()
        page.wait_for_function("document.querySelector('.live').offsetHeight > 200")
    assert first["y"] + first["height"] < 844 - 100  # the first field is visible above the buttons


def test_settings_of_kohya_ss_come_back_whole_and_are_compared(visit, served, tmp_path):
    path = served[1] / "theirs.json"
    contents = {
        "sdxl": True,
        "LoRA_type": "Standard",
        "network_dim": "24",
        "output_dir": "/results",
        "own_key": "kept",
        "wandb_api_key": "canary",
    }
    path.write_text(json.dumps(contents), encoding="utf-8")
    visitor = visit()
    visitor.page.get_by_placeholder("Config file").locator("visible=true").fill(str(path))
    visitor.click("Load config")
    visitor.until("Loaded theirs.json for SDXL")
    visitor.fill(network_dim="48", output_name="cat")
    visitor.open()  # a reload keeps what was loaded, except tokens
    assert "canary" not in visitor.page.evaluate("JSON.stringify(sessionStorage)")
    visitor.click("More")
    with visitor.page.expect_download() as download:
        visitor.click("Download for kohya_ss")
    download.value.save_as(tmp_path / "back.json")
    back = json.loads((tmp_path / "back.json").read_text(encoding="utf-8"))
    assert download.value.suggested_filename == "cat.json"
    assert back["own_key"] == "kept" and back["network_dim"] == 48 and back["LoRA_type"] == "Standard"
    visitor.page.locator(".saveas:visible").click()
    visitor.page.get_by_label("Name of the new file").fill("mine")
    visitor.page.get_by_role("button", name="Use this name").click()
    visitor.until("Saved")
    assert read_toml(served[1] / "mine.toml")["network_dim"] == 48
    visitor.page.locator(".compare:visible").click()
    second = visitor.page.get_by_label("with that")
    second.select_option(label="A file")
    visitor.page.locator(".side input:visible").fill(str(path))
    visitor.page.locator(".go").click()
    rows = visitor.page.locator(".differences tbody tr")
    rows.first.wait_for()
    assert sorted(re.sub(r"\s+", " ", text) for text in rows.all_inner_texts()) == [
        "Output name output_name cat not set",
        "Rank network_dim 48 24",
    ]


def test_from_nothing_to_a_trained_lora(visit, demo, monkeypatch, tmp_path):
    """With the real check and the real training: problems are shown, fixed by a click, and the training runs."""
    for name, real in zip(("check_reading", "check_all"), REAL, strict=False):
        monkeypatch.setattr(isolated, name, real)
    monkeypatch.setattr(check_process, "run_checks", fork_server.answer_check)  # four processes: none has to load torch
    monkeypatch.setattr(start, "subprocess", fork_server.DETACHED)
    monkeypatch.setattr(
        start, "launch_command", lambda path, script, **how: REAL[2](path, script, **{**how, "cpu": True})
    )
    visitor, out = visit(), tmp_path / "out"
    visitor.page.set_default_timeout(60_000)  # the check loads torch
    leaf = next(demo.images.iterdir())
    visitor.fill(
        pretrained_model_name_or_path=demo.folder / "models" / "sdxl" / "tiny_sdxl.safetensors",
        train_data_dir=leaf,
        output_dir=out,
        output_name="first",
        resolution="256",
        max_train_steps="2",
        learning_rate="1e-3",
    )
    visitor.click("Torch Compile Settings")
    visitor.page.locator("#lora-compile").uncheck()  # compiling on a CPU would take longer than the rest of this test
    visitor.click("Captions")
    visitor.click("Logs")
    visitor.page.locator("#lora-log_with").select_option("wandb")
    visitor.page.locator("#lora-wandb_api_key").fill("secret-0123456789")
    visitor.page.locator("#lora-log_with").select_option("")
    visitor.click("Train")
    visitor.until("holds the images themselves")
    assert not out.exists() and reader.runs() == []
    visitor.page.locator(".findings .fix").first.click()
    assert visitor.page.locator("#lora-train_data_dir").input_value() == str(demo.images)
    visitor.fill(caption_extension=".caption")
    visitor.click("Train")  # it asks before it ignores captions
    visitor.until("It has not started: caption files are not read")
    assert 'set Caption extension = ".txt" to use them' in visitor.said() and reader.runs() == []
    visitor.click("Check")
    visitor.until("No problems found")
    for words in ("12 images", "Caption extension is '.caption'", "no GPU was found", "one saved file takes about"):
        assert words in visitor.said()
    visitor.page.locator(".findings .fix").first.click()
    assert visitor.page.locator("#lora-caption_extension").input_value() == ".txt"
    visitor.click("Train")
    visitor.page.wait_for_selector('.run[data-state="finished"]', timeout=90_000)
    assert (out / "first.safetensors").is_file()
    run = reader.runs()[0].folder
    assert read_toml(run / "run.toml")["max_train_steps"] == 2
    # The key is in one file, for its owner only, and in nothing else that was written.
    assert (
        keys.stored_keys() == {"wandb_api_key": "secret-0123456789"}
        and keys.keys_file().stat().st_mode & 0o777 == 0o600
    )
    written = [path for path in (*out.rglob("*"), *run.rglob("*")) if path.is_file()]
    assert all(b"secret-0123456789" not in path.read_bytes() for path in written)
    visitor.open()
    visitor.click("Logs")
    visitor.page.locator(".forget:visible").click()
    visitor.page.locator(".forget").wait_for(state="hidden")
    assert keys.stored_keys() == {}


@pytest.mark.parametrize("locale", ["en", "ja-JP"])
def test_on_a_phone_the_tabs_are_one_row_that_is_scrolled_and_the_keyboard_gets_there(visit, locale):
    page = visit(locale=locale).page
    page.set_viewport_size({"width": 390, "height": 844})
    tabs = page.locator("#rooms > .tab-wrapper").get_by_role("tab")
    page.locator("#kinds [role=tab]").nth(4).wait_for()
    boxes = [tab.bounding_box() for tab in tabs.all()]
    assert len(boxes) == 6 and not page.locator(".overflow-menu button").locator("visible=true").count()
    assert all(box["width"] >= 24 and box["height"] >= 24 for box in boxes)
    assert len({round(box["y"]) for box in boxes}) == 1 and page.evaluate("document.documentElement.scrollWidth") == 390
    tabs.first.focus()
    for _ in boxes[1:]:
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".lab").locator("visible=true").first.wait_for()
    assert tabs.last.get_attribute("aria-selected") == "true"
    box = tabs.last.bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 390
    tabs.first.press("Enter")
    assert tabs.first.bounding_box()["x"] >= 0


# The buttons of the bar whose words do not fit in, or that are out of the window.
CUT = """() => [...document.querySelectorAll(".training .bar .row > button")]
  .filter((button) => button.checkVisibility())
  .filter((button) => button.scrollWidth > button.clientWidth || button.getBoundingClientRect().right > innerWidth)
  .map((button) => button.textContent)"""


@pytest.mark.parametrize("language", ["en", "zh", "ja"])
def test_the_buttons_of_a_training_fit_onto_small_phones(visit, language):
    visitor = visit(locale=language)
    for width in (390, 360):
        visitor.page.set_viewport_size({"width": width, "height": 740})
        visitor.has_none(CUT)


def test_on_a_phone_paths_show_their_ends_until_they_are_edited(visit):
    visitor = visit()
    page = visitor.page
    page.set_viewport_size({"width": 390, "height": 844})
    is_cut = "getComputedStyle(e).textOverflow === 'ellipsis'"
    at_end = f"(e) => e.scrollWidth > e.clientWidth && e.scrollWidth - e.clientWidth - e.scrollLeft < 2 && !({is_cut})"
    path = f"/models/{'of somebody/' * 5}base.safetensors"

    def shows_end(name):
        page.wait_for_function(at_end, arg=page.locator(f"#lora-{name}").element_handle())

    visitor.fill(pretrained_model_name_or_path=path)
    page.locator("#lora-pretrained_model_name_or_path").blur()
    shows_end("pretrained_model_name_or_path")
    visitor.put(
        pretrained_model_name_or_path=path, output_dir=path, logging_dir=path
    )  # by a script, as a loaded config
    shows_end("output_dir")
    page.locator("#lora-output_dir").focus()
    page.keyboard.press("Home")
    assert page.locator("#lora-output_dir").evaluate("e => e.scrollLeft") == 0
    page.locator("#lora-output_dir").blur()
    shows_end("output_dir")
    page.evaluate(
        "document.querySelector('#lora-logging_dir').closest('.section').querySelector('.fold button').click()"
    )
    shows_end("logging_dir")  # a field that was not visible when it was filled in
