"""The demo that shows what was learned: its pictures, the small trained models, the TOML files, and the one picture."""

import hashlib
import json
import shutil
import tomllib

import numpy as np
import pytest
from PIL import Image, ImageFont

from library import families
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.demo import files, learning, small_model, summary, zorb
from library.demo import main as command
from library.runs import layout, sample_sheet
from library.runs.sample_sheet import CELL, MARGIN, arrange_samples, draw_sheet
from library.sampling import prompt_checks, prompts
from library.sampling.prompt_use import prompt_use
from tests.source import ROOT

SMALL = [family for family in families.FAMILIES if small_model.small_model_of(family)]
CASES = [(family, script) for family in SMALL for script in learning.scripts(family)]
LARGEST = 16e6  # bytes of a family's small model


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return files.prepare_demo(tmp_path_factory.mktemp("learning") / "demo", SMALL, trained=SMALL)


def test_every_machine_draws_the_same_dozen_zorbs(tmp_path):
    left, other = (zorb.write_zorbs(tmp_path / name) for name in "ab")
    names = sorted(path.relative_to(left) for path in left.rglob("*.*"))
    assert len([name for name in names if name.suffix == ".png"]) == 12
    for name in names:
        assert (left / name).read_bytes() == (other / name).read_bytes()
    with Image.open(next(left.rglob("01.png"))) as first:
        assert first.size == (zorb.SIDE, zorb.SIDE)


def test_held_out_zorbs_are_not_among_those_to_learn_from():
    assert not set(zorb.HELD_OUT_SCENES) & set(zorb.TRAINING_SCENES)
    assert zorb.UNSEEN_GROUND not in {scene.ground for scene in zorb.TRAINING_SCENES}
    assert all(zorb.NAME in scene.caption for scene in (*zorb.TRAINING_SCENES, *zorb.HELD_OUT_SCENES))


def test_a_zorb_stays_in_its_image():
    for scene in (*zorb.TRAINING_SCENES, *zorb.HELD_OUT_SCENES):
        shown = np.asarray(zorb.draw_scene(scene)).astype(int)
        edge = np.concatenate([shown[0], shown[-1], shown[:, 0], shown[:, -1]])
        assert np.abs(edge - zorb.GROUNDS[scene.ground]).max() <= 8, scene
        assert (np.abs(shown - zorb.GROUNDS[scene.ground]).max(-1) > 8).mean() > 0.1


@pytest.mark.parametrize("family", SMALL)
def test_a_small_model_is_whole_and_small(family):
    assert sum(path.stat().st_size for path in small_model.whole_files(family)) <= LARGEST


def test_equal_files_are_shipped_once_and_copied_to_each_place(tmp_path):
    copied = {}
    for family in SMALL:
        small_model.copy_small_model(family, tmp_path / family)
        names = [path.relative_to(tmp_path) for path in (tmp_path / family).rglob("*") if path.is_file()]
        copied |= {name.as_posix(): hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in names}
    assert copied == {name: digest for name, digest in small_model.checksums().items() if name.split("/")[0] in SMALL}
    shipped = [name for name in copied if (small_model.SMALL_MODELS_FOLDER / name).exists()]
    assert len(shipped) == len({copied[name] for name in shipped}) < len(copied)


def test_the_package_ships_the_small_models():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["library"]
    shipped = {path for pattern in patterns for path in (ROOT / "library").glob(pattern)}
    shipped_files = {path for path in small_model.SMALL_MODELS_FOLDER.rglob("*") if path.is_file()}
    assert len(shipped_files) > 2 and shipped_files <= shipped


@pytest.mark.parametrize(("family", "script"), CASES)
def test_its_toml_is_a_real_one(demo, family, script):
    path = demo.configs[script]
    config = build_config(families.config_class(script), read_toml(path), path.name, notes=(notes := []))
    assert not notes and not list(families.family_for(config).problems())
    text = path.read_text(encoding="utf-8")
    assert f"kohya train {script} --config_file {path.name}" in text and "real: " in text
    shown = prompts.read_prompts(config.sample.sample_prompts)
    assert [prompt.prompt for prompt in shown] == [prompt for _, prompt, _ in learning.DEMO_PROMPTS]
    use = prompt_use(config, families.family_for(config), config.control_images)
    assert not prompt_checks.notes(config.sample.sample_prompts, use)
    assert all(prompt.scale and prompt.scale > 1 for prompt in shown)  # without guidance they show little
    assert config.sample.sample_at_first and config.steps.max_train_steps == 2 * config.sample.sample_every_n_steps


def test_scripts_that_train_no_small_model_keep_their_random_one(demo):
    for script in set(families.facts_of("sdxl").scripts) - set(learning.scripts("sdxl")):
        assert "models/sdxl/" in demo.configs[script].read_text(encoding="utf-8").replace("\\\\", "/")
    assert "flux" not in demo.models  # all of its scripts train the small one


def damaged(folder, monkeypatch, harm):
    """The small models in another folder, where something happens to one of their files."""
    shutil.copytree(small_model.SMALL_MODELS_FOLDER, folder)
    harm(folder / "flux" / "ae.safetensors")
    monkeypatch.setattr(small_model, "SMALL_MODELS_FOLDER", folder)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("harm", [cut_short, lambda path: path.unlink()], ids=["cut", "missing"])
def test_a_damaged_small_model_is_one_sentence(tmp_path, monkeypatch, harm):
    damaged(tmp_path / "small", monkeypatch, harm)
    with pytest.raises(ConfigError, match=r"flux/ae\.safetensors in .* is missing or damaged; download") as raised:
        command(["--no-train", "--family", "flux", "--out", str(tmp_path / "demo")])
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "demo").glob("small-models/flux"))  # the next demo makes it again


def test_without_the_list_of_checksums_no_file_is_trusted(tmp_path, monkeypatch):
    damaged(tmp_path / "small", monkeypatch, lambda path: (path.parents[1] / small_model.CHECKSUMS).unlink())
    with pytest.raises(ConfigError, match="is not whole: flux/"):
        small_model.whole_files("flux")


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write .*: a file has the name of its folder"):
        command(["--no-train", "--out", str(tmp_path / "file" / "demo")])


def run_of(folder, samples, failed=()):
    """The record of a run that left these samples: step and number."""
    place = folder / "output" / "runs" / "zorb-1"
    place.mkdir(parents=True)
    events = []
    for step, number in samples:
        path = folder / f"{step}-{number}.png"
        Image.new("RGB", (64, 64), (step, 50 * number, 0)).save(path)
        events.append({"t": 1, "kind": "sample", "file": str(path), "step": step, "number": number, "prompt": "a zorb"})
    events += [{"t": 1, "kind": "sample_failed", "step": 0, "text": why} for why in failed]
    layout.store(
        place / layout.RUN, {"state": "finished", "output_dir": str(folder / "output"), "output_name": "flux-lora"}
    )
    (place / layout.PROGRESS).write_text("".join(json.dumps(event) + "\n" for event in events))
    return place


def test_the_image_has_a_row_for_each_prompt_and_base_middle_and_end(tmp_path):
    run = run_of(tmp_path, [(step, number) for step in (0, 60, 120, 180, 240) for number in (0, 1)])
    first, *_ = summary.write_picture(run)
    path = tmp_path / "output" / "flux-lora.png"
    assert first.endswith(str(path))
    with Image.open(path) as picture:
        width, height = picture.size
        corner = picture.getpixel((width - 20, height - 20))
    assert corner == (240, 50, 0)
    events = [{"step": step, "number": 0, "prompt": "a"} for step in (0, 60, 120, 180, 240)]
    sheet = arrange_samples(events)
    assert sheet.steps == (0, 120, 240) and width == sheet.size[0] and height > 2 * CELL


@pytest.mark.parametrize("state", ["there", "damaged", "gone"])
def test_the_last_row_shows_images_of_the_training(tmp_path, state):
    run, images = run_of(tmp_path, [(step, 0) for step in (0, 60, 120)]), tmp_path / "zorb" / "2_zorb"
    facts = layout.load_facts(run / layout.RUN) | {"config": {"data": {"train_data_dir": str(images.parent)}}}
    layout.store(run / layout.RUN, facts)
    if state != "gone":
        images.mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (64, 64), (0, 0, 40 * number)).save(images / f"{number}.png")
    if state == "damaged":
        for file in images.iterdir():
            file.write_bytes(b"no image")
    lines = summary.write_picture(run)
    assert any("The last row" in line for line in lines) == (state == "there")
    with Image.open(tmp_path / "output" / "flux-lora.png") as picture:
        shown = [picture.getpixel((MARGIN + column * (CELL + MARGIN) + 20, picture.height - 20)) for column in range(3)]
    assert shown == ([(0, 0, 0), (0, 0, 80), (0, 0, 160)] if state == "there" else [(s, 0, 0) for s in (0, 60, 120)])


def test_samples_that_are_gone_leave_their_cells_empty():
    sheet = arrange_samples([{"step": step, "number": 0, "prompt": "a"} for step in (0, 9)])
    assert draw_sheet(sheet, lambda place: None).size == sheet.size


def test_a_run_whose_samples_all_failed_has_no_image_and_says_why(tmp_path):
    lines = summary.write_picture(run_of(tmp_path, [], ["the GPU ran out of memory"]))
    assert lines[0].startswith("There is no image") and "the GPU ran out of memory" in lines[1]
    assert not (tmp_path / "output" / "flux-lora.png").exists()


def test_on_a_gpu_a_short_eager_training_is_compared_with_the_compiled_one(demo, tmp_path, monkeypatch):
    trained = []
    monkeypatch.setattr("library.demo.train_headless", lambda *args: trained.append(args[3:]) or tmp_path)
    monkeypatch.setattr("library.demo.summary.read_outcome", lambda folder: None)
    monkeypatch.setattr("library.demo.summary.summary_text", lambda *args: "")
    monkeypatch.setattr("library.demo.summary.write_picture", lambda run: ["What it has learned"])
    assert command(["--compile", "--family", "flux", "--out", str(tmp_path / "demo"), "--steps", "100"]) == 0
    (eager, eager_flags, few), (name, flags, steps) = trained
    assert (eager, few, name, steps) == ("flux-lora-eager", 40, "flux-lora", 100)
    assert eager_flags == ["--no-compile", "--no-sample_images"]
    assert flags[:2] == ["--compile", "--compile_fallback"] and flags[2:] == ["--sample_every_n_steps", "50"]


class WideFont(ImageFont.FreeTypeFont):
    """A font that draws Chinese and Japanese letters, all alike, instead of Latin ones."""

    def __init__(self):
        self.real = ImageFont.load_default(sample_sheet.TEXT_SIZE)

    def getlength(self, text, *how, **named):
        return 20.0 * len(text)

    def getmask2(self, text, *how, **named):
        shown = "".join("a" if "\u3000" < letter < "\ua000" else sample_sheet.NO_LETTER for letter in text)
        return self.real.getmask2(shown, *how, **named)


@pytest.mark.parametrize("has_font", [False, True])
def test_prompts_in_letters_that_the_fonts_lack_are_called_by_their_number(monkeypatch, has_font):
    fonts = [ImageFont.load_default(sample_sheet.TEXT_SIZE), *([WideFont()] if has_font else [])]
    monkeypatch.setattr(sample_sheet, "_fonts", lambda: fonts)
    prompts = (
        "a cat",
        "青い背景の猫😀\ud800",
        "",
        "un chat à la fenêtre " * 9,
        "猫" * 70,
        "😀😀",
        "שלום",
        "안녕하세요",
    )
    sheet = arrange_samples(
        [{"step": s, "number": n, "prompt": prompt} for n, prompt in enumerate(prompts) for s in (0, 9)]
    )
    labels = sheet.labels
    assert labels[0] == ["a cat"] and [labels[n] for n in (2, 5, 6, 7)] == [[f"prompt {n}"] for n in (3, 6, 7, 8)]
    assert len(labels[3]) == 2 and labels[3][1].endswith(" ...")
    assert labels[1] == ["青い背景の猫" if has_font else "prompt 2"]
    if has_font:
        assert len(labels[4]) == 2 and 20 * len(labels[4][0]) <= sheet.width
    assert draw_sheet(sheet, lambda place: None).size == sheet.size
