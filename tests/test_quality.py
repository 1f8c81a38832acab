"""benchmarks/quality.py: the project has its settings, a run that fails is a row, and its figures tell things apart."""

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from benchmarks import quality, quality_report
from benchmarks.small_model.data import GROUNDS, compose
from library.config.schema import options_of
from library.families import config_class

# What has to be compared, by the option that does it.
EXPECTED = {
    "float32": ("mixed_precision", "no"),
    "bf16": ("mixed_precision", "bf16"),
    "compiled": ("compile", True),
    "recorded": ("cuda_graphs", "true"),
    "checkpointed": ("gradient_checkpointing", True),
    "swapped": ("blocks_to_swap", 2),
    "fp8 base": ("fp8_base", True),
    "fp8 products": ("fp8_compute", True),
    "int8 base": ("int8_base", True),
    "int8 products": ("int8_compute", True),
    "8-bit AdamW": ("optimizer_type", "AdamW8bit"),
    "full bf16": ("full_bf16", True),
    "fused backward": ("fused_backward_pass", True),
    "cached text": ("cache_text_encoder_outputs", True),
}
# What the project does not do, and says so.
LEFT_OUT = {
    "lora": {"fused backward"},
    "full": {"fp8 base", "fp8 products", "int8 base", "int8 products"},
}


def asked_for(tmp_path, *more):
    models = ["--models", str(tmp_path / "models"), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    return quality.arguments([*models, "--device", "cpu", *more])


def test_the_table_has_every_setting():
    settings = {setting.name: setting for setting in quality.settings()}
    for name, (option, value) in EXPECTED.items():
        assert settings[name].options[option] == value
    assert settings["two GPUs"].processes == 2
    assert {setting.yardstick for setting in settings.values()} <= settings.keys()
    assert (
        settings["fused backward"].options.items()
        > {name: value for name, value in settings["Adafactor"].options.items() if name != "mixed_precision"}.items()
    )


def test_the_project_takes_every_setting_or_says_why_not(tmp_path):
    asked = asked_for(tmp_path, "--seeds", "1")
    left_out = {"lora": set(), "full": set()}
    for job in quality.planned_jobs(asked):
        unknown = quality.options_of(job, tmp_path, asked).keys() - options_of(config_class(job.script)).keys()
        assert not unknown, job
        if why := quality.why_left_out(job, tmp_path, asked):
            assert "no effect" in why
            left_out[job.method].add(job.setting.name)
    assert left_out == LEFT_OUT


def test_the_first_seed_of_all_comes_first(tmp_path):
    jobs = list(quality.planned_jobs(asked_for(tmp_path, "--seeds", "2")))
    assert [job.seed for job in jobs] == sorted(job.seed for job in jobs)
    assert jobs[0].setting.name == "compiled" and len({job.key for job in jobs}) == len(jobs)


def test_epochs_are_whole_and_nothing_held_out_is_trained(tmp_path):
    from library import data
    from library.config.building import build_config

    quality.write_data(tmp_path, 192, 4, 2)
    config = build_config(config_class("flux_train"), {"dataset_config": str(tmp_path / "data.toml")}, notes=[])
    images = data.scan(config)
    assert {Path(image.path).parent.name for image in images.items} == {"train"}
    assert len(images.validation.items) == 8
    assert sum(image.subset.num_repeats for image in images.items) * quality.EPOCHS == 192 * 4
    with pytest.raises(SystemExit):
        asked_for(tmp_path, "--steps", "10")


def test_a_drawing_is_nearer_to_others_of_its_kind():
    references = [quality.draw_subject("blue", number) for number in range(4)]
    square = Image.new("RGBA", (120, 120), (0, 0, 0, 0))
    ImageDraw.Draw(square).rectangle((20, 20, 100, 100), fill=(244, 140, 36))
    own = max(quality_report.distance(quality.draw_subject("blue", number), references) for number in range(10, 20))
    other = quality_report.distance(compose(square, GROUNDS["blue"], Random(0)), references)
    assert own < 0.1 < other < quality_report.distance(quality.draw_subject("pink", 0), references)


def row(setting, seed, loss, shade=100, **more):
    picture = quality_report.pack([Image.new("RGB", (128, 128), (shade, 100, 100))] * len(quality.QUALITY_PROMPTS))
    return {
        **dict(zip(quality_report.KEY, ("flux", "lora", setting, seed), strict=True)),
        **{"losses": [1.0, 0.5], "held_out": [[2, loss]], "pictures": picture, "signature": ""},
        **more,
    }


def test_what_is_beyond_the_spread_is_said(tmp_path):
    noise = [0.01, -0.01, 0.005, -0.005, 0.0]
    for seed, shift in enumerate(noise, 1):
        start = {"before": row("float32", 1, 1.0)["pictures"]} if seed == 1 else {}
        quality_report.append(tmp_path, row("float32", seed, 1 + shift, 100 + seed, **start))
        quality_report.append(tmp_path, row("bf16", seed, 1.001 + shift, 100 + seed))
        quality_report.append(tmp_path, row("fp8 base", seed, 1.05 + shift, 180 + seed))
    failed = {"failed": "no such thing as a | b", "signature": ""}
    quality_report.append(tmp_path, dict(zip(quality_report.KEY, ("flux", "lora", "swapped", 1), strict=True)) | failed)
    with (tmp_path / "runs-flux.jsonl").open("a") as file:
        file.write('{"family": "flux", "cut off')
    prompts = [
        (prompt, [Image.new("RGB", (128, 128))] if ground else []) for prompt, _, ground in quality.QUALITY_PROMPTS
    ]
    quality_report.write(tmp_path, prompts, {setting.name: "float32" for setting in quality.settings()})
    lines = (tmp_path / "quality.md").read_text().splitlines()
    table = {line.split(" | ")[1]: line for line in lines if line.startswith("| flux")}
    assert "worse" not in table["bf16"] and "held-out loss: worse" in table["fp8 base"]
    assert "no such thing as a / b" in table["swapped"]
    assert {line.count("|") for line in lines if line.startswith("|")} == {9}
    said = [line for line in lines if line.startswith("- ")]
    assert any("fp8 base: held-out loss 1.05000 instead of 1.00000" in line for line in said)
    assert any("fp8 base: its images are further" in line for line in said)
    assert not any("bf16" in line for line in said)
    assert len(json.loads((tmp_path / "quality.json").read_text())) == 16
    assert all(np.asarray(Image.open(tmp_path / name)).any() for name in ("quality.png", "samples-flux.png"))


def test_a_run_that_fails_is_a_row_and_is_tried_again(tmp_path, monkeypatch):
    def start(job, toml, log, gpu, asked):
        log.write_text("reading\nerror: no such file\n")
        return [Ended(job.seed == 1)]

    class Ended:
        def __init__(self, code):
            self.exitcode = int(code)

        join = kill = is_alive = lambda self, *seconds: None

    monkeypatch.setattr(quality, "start", start)
    monkeypatch.setattr(quality_report, "collect", lambda folder, count: {"held_out": [[1, 0.5]], "pictures": ""})
    few = ["--seeds", "2", "--workers", "2", "--families", "flux", "--methods", "lora"]
    asked = asked_for(tmp_path, *few, "--settings", "float32", "fused backward")
    quality.run_all(asked)
    rows_by_key = {(row["setting"], row["seed"]): row for row in quality_report.read_rows(tmp_path / "out")}
    assert rows_by_key["float32", 1]["failed"] == "error: no such file" and "failed" not in rows_by_key["float32", 2]
    assert "no effect" in rows_by_key["fused backward", 1]["left_out"] and len(rows_by_key) == 3
    monkeypatch.setattr(Ended, "__init__", lambda self, code: setattr(self, "exitcode", 0))
    quality.run_all(asked)
    assert not any("failed" in row for row in quality_report.read_rows(tmp_path / "out"))
    assert len((tmp_path / "out" / "runs-flux.jsonl").read_text().splitlines()) == 5
    asked.steps = 96
    with pytest.raises(SystemExit, match="another folder"):
        quality.run_all(asked)
