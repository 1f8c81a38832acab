"""The doctor's newer checks and its advice, and the cache of compiled code."""

import json
import os
import time

import pytest

from library.cli import cache as cache_command
from library.cli import main
from library.config.building import draft
from library.doctor import advice, kernels, report
from library.doctor.advice import MachineFacts
from library.families import FAMILIES, config_class
from library.jobs import jobs
from library.recipes import preset_files
from tests.families.expectations import expected


@pytest.mark.parametrize(
    ("machine", "settings", "gigabytes"),
    [
        (MachineFacts(), {"mixed_precision": "no", "compile": False}, ""),
        (
            MachineFacts(6.0, (7, 5), False, compiles=True),
            {"mixed_precision": "fp16", "gradient_checkpointing": True},
            "6",
        ),
        (
            MachineFacts(11.6, (8, 6), True, compiles=True),
            {"mixed_precision": "bf16", "cuda_allow_tf32": True, "checkpoint_keep_attention": False},
            "12",
        ),
        (MachineFacts(23.6, (8, 9), True, True, True), {"compile": True}, "24"),
        (MachineFacts(139.8, (9, 0), True, True, True), {"compile": True}, "140"),
    ],
)
def test_advice_for_machines(machine, settings, gigabytes):
    assert settings.items() <= advice.advised_for_machine(machine).items()
    by_memory = {family: expected(family, "presets").get(gigabytes) for family in FAMILIES}
    fitting = {family: f"{family}/{preset}" for family, preset in by_memory.items() if preset}
    assert advice.fitting_presets(machine) == fitting, "see tests/families/expected"
    assert advice.advice_sentence(machine)


@pytest.mark.parametrize("found", [MachineFacts(), MachineFacts(4.0, (7, 5))])
def test_the_least_memory_that_is_advised_is_that_of_the_smallest_preset(found):
    least = min(preset.gigabytes for preset in preset_files.presets_of_kind("lora") if preset.gigabytes)
    assert f"{least} GB" in str(advice.advice_sentence(found))


FP8_IMAGES = {"fp8_base", "fp8_compute", "sample_compile", "sample_attention"}
INT8_IMAGES = {"int8_base", "int8_compute", "sample_compile", "sample_attention"}
CARDS = {  # memory, compute capability, and the options that they are advised for images
    "RTX 2080 Ti": (11.0, (7, 5), {"sample_compile", "sample_attention"}),
    "RTX 3090": (24.0, (8, 6), INT8_IMAGES),
    "A100": (80.0, (8, 0), INT8_IMAGES),
    "RTX 4090": (24.0, (8, 9), FP8_IMAGES),
    "L40S": (48.0, (8, 9), FP8_IMAGES),
    "H100": (80.0, (9, 0), FP8_IMAGES),
    "RTX 5090": (32.0, (12, 0), FP8_IMAGES),
}


@pytest.mark.parametrize("card", CARDS)
def test_a_card_is_advised_settings_for_images_with_reasons(card):
    memory, capability, wanted = CARDS[card]
    facts = MachineFacts(memory, capability, capability >= (8, 0), capability >= (8, 9), compiles=True)
    settings = advice.settings_for_images(facts)
    options = {name: value for each, _ in settings for name, value in each.items()}
    assert options.keys() == wanted and all(str(why) for _, why in settings)
    said = str(advice.images_sentence(facts))
    assert all(name in said for name in wanted) and ("cuDNN" in said) == (card == "H100")
    config = draft(config_class("flux_train_network"), {**advice.advised_for_machine(facts), **options})
    assert not [*config.precision.check(config), *config.sample.check(config)]


def test_presets_that_are_advised_exist():
    there = {preset.id for preset in preset_files.presets_of_kind("lora") if preset.path.stem[5:6].isdigit()}
    advised = {
        name for memory in range(6, 150) for name in advice.fitting_presets(MachineFacts(float(memory))).values()
    }
    assert advised == {name for name in there if not name.startswith(preset_files.PROFILES)}


def test_advice_follows_from_the_findings():
    gpu = {"name": "GPU", "memory_gb": 23.6, "capability": "8.9", "bf16": True}
    findings = [
        report.ok("gpu", "one", devices=[gpu]),
        report.ok("compile", "works", device="cuda", works=True),
        report.hint("compile", "does not", device="cpu", works=False),
        report.ok("fp8", "yes", works=True),
    ]
    said = report.suggest_settings(findings)
    assert said.data["options"]["compile"] is True and said.data["presets"]["flux"] == "flux/lora-24gb"
    assert "fp8 works" in str(said.text)
    assert report.suggest_settings(findings[2:3]).data["options"] == {"compile": False, "mixed_precision": "no"}


def test_attention_is_really_tried():
    kernel_times = kernels.time_attention("cpu")
    assert "math" in kernel_times and all(ms > 0 for ms in kernel_times.values())


def test_the_doctor_for_the_page(home, monkeypatch, capsys):
    monkeypatch.setattr(
        report, "examine_machine", lambda quick: iter([report.ok("torch", "2.13"), report.hint("gpu", "none")])
    )
    folder = jobs.new("doctor")
    monkeypatch.setenv(jobs.JOB_FOLDER_VARIABLE, str(folder))
    assert report.main(["--json"]) == 0
    job = jobs.job_at(folder)
    shown = json.loads(capsys.readouterr().out)
    assert job.state == "finished" and job.result == {"kind": "doctor", "finished": True, **shown}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Three folders of a megabyte each; `old` was used longest ago."""
    from library.compiler import cache as compile_cache

    root = tmp_path / "compile"
    for age, name in enumerate(("new", "middle", "old")):
        (root / name / "inner").mkdir(parents=True)
        (root / name / "inner" / "code").write_bytes(b"x" * 1_000_000)
        os.utime(root / name, (time.time() - age * 86400 * 3,) * 2)
    monkeypatch.setattr(compile_cache, "default_root", lambda: root)
    return root


def test_the_cache_is_shown_shrunk_and_cleaned(cache, home, capsys):
    assert main.main(["cache", "--json"]) == 0
    assert [f["name"] for f in json.loads(capsys.readouterr().out)["kept"]] == ["new", "middle", "old"]
    assert main.main(["cache", "--limit", "0.0021"]) == 0
    shown = capsys.readouterr().out
    assert "0.00 GB of compiled code" in shown and "used 3 days ago" in shown and "old" not in shown
    assert sorted(p.name for p in cache.iterdir() if p.is_dir()) == ["middle", "new"]
    assert cache_command.describe_cache()["limit"] == 2_100_000  # for later, too
    assert main.main(["cache", "--clean"]) == 0
    assert not [p for p in cache.iterdir() if p.is_dir()]
    assert main.main(["cache", "--limit", "-1"]) == 1


def test_the_cache_stays_while_something_trains(cache, home, monkeypatch, capsys):
    from library.runs import reader

    monkeypatch.setattr(reader, "active", lambda: type("Run", (), {"name": "cat-1"}))
    assert main.main(["cache", "--clean"]) == 1
    assert "cat-1 is training" in capsys.readouterr().err
    assert len(list(cache.iterdir())) == 3
    assert cache_command.describe_cache()["removed"] == 0
