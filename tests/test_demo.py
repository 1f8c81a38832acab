"""The demo's files are what they claim to be, are made once, and are never written over anything else."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.config.sections import AdapterRun
from library.demo import demo_closing_lines, files, free_demo_name, images, summary
from library.demo import main as command
from library.families import FAMILIES, RUNS, config_class
from library.families.shared import weights
from library.jobs import jobs
from library.runs import layout


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return files.prepare_demo(tmp_path_factory.mktemp("demo") / "out", FAMILIES, compiled=True)


def config_of(demo, script):
    return build_config(config_class(script), read_toml(demo.configs[script]), demo.configs[script].name)


def test_the_checkpoints_have_the_layouts_people_have(demo):
    flux = weights.header(demo.models["flux"]["flux"])
    assert {"img_in.weight", "double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"} <= flux.keys()
    assert "decoder.conv_in.weight" in weights.header(demo.models["flux"]["ae"])
    assert "text_model.embeddings.token_embedding.weight" in weights.header(demo.models["flux"]["clip_l"])
    assert "encoder.block.0.layer.0.SelfAttention.q.weight" in weights.header(demo.models["flux"]["t5xxl"])
    sdxl = weights.header(demo.models["sdxl"]["sdxl"])
    assert {
        "model.diffusion_model.input_blocks.0.0.weight",
        "conditioner.embedders.0.transformer.text_model.embeddings.token_embedding.weight",
        "conditioner.embedders.1.model.text_projection",
        "first_stage_model.encoder.conv_in.weight",
    } <= sdxl.keys()


def test_as_a_job_it_says_where_its_configs_are(demo, tmp_path, monkeypatch):
    monkeypatch.setenv(jobs.JOB_FOLDER_VARIABLE, str(tmp_path))
    assert command(["--no-train", "--family", "flux", "--out", str(demo.folder)]) == 0
    assert layout.load_facts(tmp_path / jobs.JOB)["state"] == "finished"
    told = layout.load_facts(tmp_path / jobs.RESULT)["configs"]
    assert told == {name: str(path) for name, path in demo.configs.items()}


def test_the_images_come_in_shapes_with_captions(demo):
    pictures = sorted(demo.images.glob("*/*.png"))
    assert len(pictures) == 12
    shapes = {Image.open(path).size for path in pictures}
    assert len(shapes) == 6
    assert all(96 <= side <= 176 for shape in shapes for side in shape)
    for path in pictures:
        repeats, words = path.parent.name.split("_", 1)
        assert int(repeats) > 0
        assert path.with_suffix(".txt").read_text(encoding="utf-8").startswith(words)


def test_the_same_seed_draws_the_same_images(tmp_path):
    first, other, third = (images.draw_images(tmp_path / str(n), seed) for n, seed in enumerate((0, 0, 1)))
    path = "4_zorb toy/03.png"
    assert (first / path).read_bytes() == (other / path).read_bytes()
    assert (first / path).read_bytes() != (third / path).read_bytes()


@pytest.mark.parametrize("script", list(RUNS))
def test_every_toml_builds_and_finds_its_files(demo, script):
    from library import data, families, importers

    config = config_of(demo, script)
    assert config.compile.compile
    assert not list(families.family_for(config).problems())
    assert not data.check_data(config, config.grid).problems
    assert not data.scan(config).warnings
    assert len(data.scan(config).buckets()) == 3
    assert not importers.is_foreign_config(read_toml(demo.configs[script]))
    adapter = {"network_module": config.network.network_module} if isinstance(config, AdapterRun) else {}
    assert not importers.is_foreign_config(adapter)  # as it is saved from a form in which little is set


def test_a_second_demo_keeps_what_is_there(demo):
    before = {path: path.stat().st_mtime_ns for path in demo.folder.rglob("*") if path.is_file()}
    toml = demo.configs["flux_train"]
    toml.write_text(toml.read_text(encoding="utf-8") + "\n# mine\n", encoding="utf-8")
    before[toml] = toml.stat().st_mtime_ns
    again = files.prepare_demo(demo.folder, ("flux",))
    assert again == demo
    assert [path for path, time in before.items() if path.stat().st_mtime_ns != time] == []


def test_what_an_interruption_left_is_made_again(tmp_path):
    out = tmp_path / "out"
    files.prepare_demo(out, ())
    shutil.rmtree(out / "images")
    (out / ".images.unfinished" / "half").mkdir(parents=True)
    assert len(list(files.prepare_demo(out, ()).images.glob("*/*.png"))) == 12
    assert not (out / ".images.unfinished").exists()


def test_other_peoples_files_are_left_alone(tmp_path, capsys):
    mine = tmp_path / "demo"
    mine.mkdir()
    (mine / "thesis.txt").write_text("ten years of work")
    older = tmp_path / "demo-2"
    older.mkdir()
    (older / files.RECORD).write_text(json.dumps({"demo": "made by another version"}))
    demo = files.prepare_demo(mine, ())
    assert demo.folder == tmp_path / "demo-3"
    assert list(mine.iterdir()) == [mine / "thesis.txt"]
    assert "using" in capsys.readouterr().out


def test_results_of_earlier_demos_keep_their_names(tmp_path):
    assert free_demo_name(tmp_path, "flux-lora") == "flux-lora"
    (tmp_path / "flux-lora.safetensors").touch()
    (tmp_path / "runs" / "flux-lora-2-20260101-120000-abcd").mkdir(parents=True)
    assert free_demo_name(tmp_path, "flux-lora") == "flux-lora-3"
    assert free_demo_name(tmp_path, "flux") == "flux"


def test_a_demo_in_the_root_of_a_drive_has_a_folder_there(tmp_path, monkeypatch):
    root = Path(tmp_path.anchor)
    monkeypatch.setattr(files, "_fits", lambda folder: folder.name == "demo-2")
    assert files._free_demo_folder(root) == root / "demo-2"


def test_the_command_that_trains_again_names_a_file_that_is_free(demo):
    result = demo.folder / "output" / "flux-lora.safetensors"
    result.parent.mkdir(exist_ok=True)
    result.touch()
    command = demo_closing_lines(demo, "flux")[-1]
    result.unlink()
    assert command.endswith("--output_name flux-lora-2")


# ---- the summary


def outcome(tmp_path, name, losses, compiled=None):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"state": "finished", "compile": compiled or {}}))
    lines = [{"t": 100 + 0.5 * n, "kind": "step", "step": n, "loss": loss} for n, loss in enumerate(losses, start=1)]
    lines[0]["t"] = 0  # the first step compiles for a long time
    (folder / "progress.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return summary.read_outcome(folder)


def test_the_summary_is_read_from_the_records(tmp_path):
    losses = [1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2, 0.1]
    eager = outcome(tmp_path, "eager", losses)
    fast = outcome(
        tmp_path,
        "fast",
        [*losses[:-1], 0.11],
        {"num_graphs": 2, "recompiles": 0, "seconds": 12.5, "fallback": ""},
    )
    assert (eager.first, eager.last, eager.speed) == (1.0, 0.1, 2.0)
    assert summary.largest_difference(eager, fast) == pytest.approx(0.1)
    shown = "\n".join(summary.outcome_table({"eager": eager, "compiled": fast}))
    for row in ("steps per second 2.00 2.00", "compile seconds - 12.5", "graphs - 2", "recompiles - 0"):
        assert row.split() in [line.split() for line in shown.splitlines()]


def test_without_compiling_the_summary_says_nothing_about_it(tmp_path):
    shown = "\n".join(summary.outcome_table({"eager": outcome(tmp_path, "eager", [1.0, 0.8, 0.6, 0.4])}))
    assert "steps per second" in shown and not any(word in shown for word in ("compile", "graphs", "eager"))


def test_the_speed_is_that_of_steps_without_the_samples_between_them():
    times = [0, 1, 2, 3, 13, 14, 15, 16]  # ten seconds of samples after the fourth
    steps = [{"t": 0.5 * at, "step": number} for number, at in enumerate(times, start=1)]
    assert summary.speed_of(steps) == 2.0
    assert summary.speed_of(steps[:1]) is None is summary.speed_of([])


def compared(tmp_path, speeds, seconds=12.0, device="cpu"):
    """The summary's sentences about compiling, for steps per second without and with it."""
    eager = replace(outcome(tmp_path, "eager", [1.0, 0.9]), speed=speeds[0], device=device)
    compiled = {"num_graphs": 2, "recompiles": 0, "seconds": seconds, "fallback": ""}
    fast = replace(outcome(tmp_path, "fast", [1.0, 0.9], compiled), speed=speeds[1], device=device)
    return summary.verdict("sdxl", eager, fast)


def test_a_loss_by_compiling_is_reported_with_what_a_gpu_gives(tmp_path):
    first, second, third = compared(tmp_path, (3.84, 2.38), 148.0)
    assert first == "Compiling did not pay here: 2.38 steps per second instead of 3.84, after 148.0 s of compiling."
    assert second.startswith("On a CPU ")
    assert re.search(
        r"H200 a step of full-size SDXL took 0\.772 s eagerly .* and 0\.0965 s compiled .*reduce-over", third
    )
    assert "docs/measured/" in third and "slow" in third  # the factor is also one of the processor


def test_a_gain_by_compiling_says_when_its_time_is_recovered(tmp_path):
    (only,) = compared(tmp_path, (2.0, 4.0), device="cuda")
    assert only == "Compiled steps were 2.00 times as fast; the 12.0 s of compiling are recovered after 48 steps."


def test_speeds_that_are_not_known_are_not_compared(tmp_path):
    assert compared(tmp_path, (None, 2.0), device="cuda") == []


def test_without_measurements_of_both_the_demo_says_where_figures_are(tmp_path):
    assert "docs/dev/performance.md" in summary.gain("flux", tmp_path)
    half = {"trainer": "here", "family": "flux", "method": "lora", "batch": 1, "how": "checkpointing", "s_it": 1.0}
    (tmp_path / "2030-01-01-gpu.json").write_text(json.dumps({"machine": {"gpu": "GPU"}, "rows": [half]}))
    assert "docs/dev/performance.md" in summary.gain("flux", tmp_path)


def test_the_demo_of_sdxl_compiles_what_takes_seconds(demo):
    for script in ("sdxl_train_network", "sdxl_train"):
        assert config_of(demo, script).compile.compile_blocks == "transformer:all"
    assert config_of(demo, "flux_train_network").compile.compile_blocks is None


def test_an_eager_run_has_no_compile_numbers(tmp_path):
    eager = outcome(tmp_path, "eager", [1.0], {"num_graphs": 0, "recompiles": 0, "seconds": 0.0, "fallback": "no g++"})
    assert not eager.compiled
    assert eager.fallback == "no g++"


def test_a_run_without_steps_has_dashes(tmp_path):
    empty = replace(outcome(tmp_path, "empty", [1.0]), losses={}, speed=None)
    assert "-" in summary.outcome_table({"eager": empty})[0]


# ---- does a LoRA fit diffusers' model


def flux_lora(demo, rank=4):
    """Adapters for the tiny model's own layers, under kohya's names."""
    out = {}
    for name, shape in weights.header(demo.models["flux"]["flux"]).items():
        if "_blocks." in name and name.endswith(".weight") and len(shape) == 2:
            key = "lora_unet_" + name.removesuffix(".weight").replace(".", "_")
            out[f"{key}.lora_down.weight"] = torch.randn(rank, shape[1])
            out[f"{key}.lora_up.weight"] = torch.randn(shape[0], rank)
            out[f"{key}.alpha"] = torch.tensor(float(rank))
    return out


def test_a_flux_lora_fits_diffusers(demo, tmp_path):
    adapters = flux_lora(demo)
    save_file(adapters, tmp_path / "lora.safetensors")
    matched, wrong = summary.check_lora_layers(tmp_path / "lora.safetensors", config_of(demo, "flux_train_network"))
    assert wrong == []
    # A fused qkv becomes three layers, a fused qkv + mlp becomes four.
    fused = (
        sum(name.endswith("_qkv.alpha") for name in adapters),
        sum(name.endswith("linear1.alpha") for name in adapters),
    )
    assert matched == len(adapters) // 3 + 2 * fused[0] + 3 * fused[1]


@pytest.mark.parametrize("key", ["lora_unet_double_blocks_0_img_attn_proj", "lora_unet_single_blocks_0_linear2"])
def test_a_lora_of_another_size_does_not_fit(demo, tmp_path, key):
    adapters = flux_lora(demo)
    adapters[f"{key}.lora_up.weight"] = adapters[f"{key}.lora_up.weight"][:-1]
    save_file({k: v.contiguous() for k, v in adapters.items()}, tmp_path / "lora.safetensors")
    matched, wrong = summary.check_lora_layers(tmp_path / "lora.safetensors", config_of(demo, "flux_train_network"))
    assert matched == 0
    assert len(wrong) == 1


def test_a_name_that_diffusers_does_not_know_is_left_over(demo, tmp_path):
    adapters = flux_lora(demo)
    adapters["lora_unet_tripple_blocks_0_linear.lora_down.weight"] = torch.zeros(4, 8)
    save_file(adapters, tmp_path / "lora.safetensors")
    _, wrong = summary.check_lora_layers(tmp_path / "lora.safetensors", config_of(demo, "flux_train_network"))
    assert "tripple" in wrong[0]


def test_an_sdxl_lora_fits_diffusers(demo, tmp_path):
    adapters = {}
    for name, shape in weights.header(demo.models["sdxl"]["sdxl"]).items():
        if ".transformer_blocks." in name and name.endswith(".weight") and len(shape) == 2:
            key = "lora_unet_" + name.removeprefix("model.diffusion_model.").removesuffix(".weight").replace(".", "_")
            adapters[f"{key}.lora_down.weight"] = torch.randn(4, shape[1])
            adapters[f"{key}.lora_up.weight"] = torch.randn(shape[0], 4)
            adapters[f"{key}.alpha"] = torch.tensor(4.0)
    save_file(adapters, tmp_path / "lora.safetensors")
    matched, wrong = summary.check_lora_layers(tmp_path / "lora.safetensors", config_of(demo, "sdxl_train_network"))
    assert wrong == []
    assert matched == len(adapters) // 3


@pytest.mark.parametrize(
    ("devices", "flags", "compiled"),
    [("", [], False), ("", ["--compile"], True), ("0", [], True), ("0", ["--no-compile"], False)],
)
def test_cpu_trains_eagerly_by_default(tmp_path, monkeypatch, devices, flags, compiled):
    """The TOML files, which the page loads as well, and the trainings of the demo."""
    trained = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.setattr(
        "library.demo.train_headless", lambda toml, script, config, name, flags, steps: trained.append(flags[0])
    )
    monkeypatch.setattr(summary, "read_outcome", lambda folder: None)
    monkeypatch.setattr(summary, "summary_text", lambda model, outcomes, config, learns: " ".join(outcomes))
    monkeypatch.setattr("library.demo.summary.write_picture", lambda run: [])
    assert command(["--family", "sdxl", "--out", str(tmp_path / "demo"), *flags]) == 0
    assert trained == ["--no-compile", "--compile"][: 1 + compiled]
    for name in ("sdxl_train_network", "sdxl_train"):
        config = build_config(config_class(name), read_toml(tmp_path / "demo" / f"{name}.toml"), notes=(notes := []))
        assert config.compile.compile is compiled and notes == []
        assert bool(config.compile.compile_blocks) is compiled


def test_a_demo_without_a_family_trains_the_model_that_draws_best(tmp_path, capsys):
    assert command(["--no-train", "--out", str(tmp_path / "demo")]) == 0
    assert ": flux_train_network.toml, flux_train.toml" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(("code", "ends"), [(130, KeyboardInterrupt), (1, ConfigError), (-9, ConfigError)])
def test_a_training_that_ctrl_c_stopped_before_its_first_step_is_no_error(tmp_path, monkeypatch, code, ends):
    monkeypatch.setattr("library.runs.foreground.run_in_foreground", lambda arguments, variables: code)
    with pytest.raises(ends):
        command(["--out", str(tmp_path / "demo"), "--no-compile"])
