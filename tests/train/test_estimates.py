"""What a training needs: the estimate of memory and time beside what was measured, and the probe that tries it."""

import json
import math
from types import SimpleNamespace

import pytest
from PIL import Image

from benchmarks import preset_cases as presets
from library import data
from library.bench import probe
from library.check import estimate
from library.check import report as checking
from library.config.building import build_config, replace_options
from library.config.formats import read_toml
from library.config.schema import flatten_sections, options_of
from library.families import config_class
from library.measuring import model_stats
from library.measuring.result import Measured
from library.runs import layout
from tests.training import config_of

LORA, FLUX, WHOLE_SDXL = (config_class(s) for s in ("sdxl_train_network", "flux_train_network", "sdxl_train"))
READY = {
    "mixed_precision": "bf16",
    "cache_latents": True,
    "cache_text_encoder_outputs": True,
    "network_dim": 16,
    "network_train_unet_only": True,
}


@pytest.fixture
def config(demo, tmp_path):
    built = build_config(FLUX, read_toml(demo.configs["flux_train_network"]), notes=[])
    return replace_options(built, output_dir=str(tmp_path / "out"), compile=False)


# ---- what a training needs


def needs(cls, size=(1024, 1024), **options):
    declared = options_of(cls)
    config = build_config(
        cls, {name: value for name, value in {**READY, **options}.items() if name in declared}, notes=[]
    )
    return estimate.estimate(config, size, "NVIDIA H200", 139.8)


def test_the_estimate_follows_what_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path))
    plain, memory = needs(FLUX, gradient_checkpointing=True), needs(FLUX)
    assert 24 < plain.peak < 34 < memory.peak  # 22 GB of weights, and what 57 blocks keep
    assert needs(FLUX, gradient_checkpointing=True, fp8_base=True).peak < plain.peak - 9
    assert needs(FLUX, gradient_checkpointing=True, blocks_to_swap=20).peak < plain.peak - 7
    assert needs(FLUX, train_batch_size=4).parts["activations"] == pytest.approx(
        4 * memory.parts["activations"], rel=0.01
    )
    assert needs(FLUX, (512, 512)).parts["activations"] < memory.parts["activations"] / 2
    assert memory.step < plain.step and "published model" in str(plain.basis) and plain.fits
    assert 5 < needs(LORA, gradient_checkpointing=True).peak < 12
    whole = needs(WHOLE_SDXL, gradient_checkpointing=True)
    assert whole.parts["optimizer"] == pytest.approx(2 * whole.parts["gradients"], rel=0.01)


def test_operations_are_those_that_are_published():
    """A forward pass over an image of 1024 x 1024: 74 TFLOP for FLUX.1, 6 for SDXL."""
    for cls, expected in ((FLUX, 74.3e12), (LORA, 6.0e12)):
        config = build_config(cls, {name: READY[name] for name in READY}, notes=[])
        assert estimate.operations(config, model_stats.published(cls()), (1024, 1024)) / 2 == pytest.approx(
            expected, rel=0.1
        )


# Peaks in GiB and seconds of a step measured on an H200: LoRA of rank 16, 1024 x 1024.
CKPT, COMPILED = {"gradient_checkpointing": True}, {"compile": True}
MEASURED = [
    (FLUX, 1, CKPT, 25.6, 0.741),
    (FLUX, 1, {}, 63.4, 0.527),
    (FLUX, 1, COMPILED, 52.4, 0.368),
    (FLUX, 1, {**COMPILED, **CKPT, "blocks_to_swap": 20}, 15.7, 0.665),
    (FLUX, 1, {**COMPILED, **CKPT, "checkpoint_keep_attention": True}, 27.1, 0.485),
    (FLUX, 4, {**COMPILED, **CKPT}, 32.5, 1.969),
    (FLUX, 4, {**COMPILED, "compile_activation_budget": 0.5}, 83.6, 1.521),
    (LORA, 4, CKPT, 8.4, 0.634),
    (LORA, 4, {**COMPILED, "cuda_graphs": "false"}, 27.7, 0.26),
]


@pytest.mark.parametrize(("cls", "batch", "options", "peak", "step"), MEASURED)
def test_the_estimate_is_near_to_what_was_measured(cls, batch, options, peak, step, monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path))
    needed = needs(cls, train_batch_size=batch, **options)
    tensors = sum(size for part, size in needed.parts.items() if part != "driver")
    assert tensors == pytest.approx(peak, rel=0.08) and needed.step == pytest.approx(step, rel=0.12)


ROWS = {
    row["preset"]: row
    for path in sorted((presets.PROJECT_ROOT / "docs/measured").glob("*.json"))
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    if row["preset"]
}


# Measured when these presets did not record their steps.
UNRECORDED = [
    *("flux/finetune-80gb", "flux/finetune-chroma-80gb", "flux/finetune-fill-80gb", "flux/finetune-kontext-32gb"),
    *("flux/lora-48gb", "flux/lora-80gb", "flux/lora-chroma-24gb", "flux/lora-chroma-48gb"),
    *("flux/lora-fill-24gb", "flux/lora-fill-48gb", "flux/lora-kontext-24gb", "sdxl/finetune-16gb", "sdxl/lora-6gb"),
]


@pytest.mark.parametrize(
    "family", [m for m in presets.known_models() if m != "sd15" and presets.preset_cases(m, None, "full")]
)
def test_the_estimate_is_near_to_what_every_preset_took(family, monkeypatch, tmp_path):
    """CUDA graphs, reference images and what a full fine-tune keeps included; a preset is held to its memory."""
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path))
    folder = presets.preset_folder(family)
    cases = [
        case for case in presets.preset_cases(family, None, "full") if case.cap and f"{folder}/{case.name}" in ROWS
    ]
    for case in cases:
        preset = f"{folder}/{case.name}"
        as_measured = {"cuda_graphs": "false"} if preset in UNRECORDED else {}
        config = build_config(config_class(case.script), case.values | as_measured, notes=[])
        needs = estimate.estimate(config, checking.largest_bucket(None, config), "NVIDIA H200", case.cap)
        row = ROWS[preset]
        assert 0.74 < needs.peak / row["gpu_gib"] < 1.16 and needs.fits, (case.name, needs)
        assert 0.72 < needs.step / (row["gpu_busy_s"] or row["s_it"]) < 2, (case.name, needs)
    assert cases


def test_parameters_are_counted_in_headers(demo):
    from library.families.shared.weights import header

    for script in ("flux_train_network", "sdxl_train_network"):
        config = build_config(config_class(script), read_toml(demo.configs[script]), notes=[])
        stats = model_stats.model_stats(config)
        every = header(config.model.pretrained_model_name_or_path)
        own = {n: s for n, s in every.items() if config.family == "flux" or n.startswith("model.diffusion_model.")}
        assert stats.counted and stats.denoiser == sum(math.prod(shape) for shape in own.values())
    assert {b.kind for b in stats.blocks} == {"BasicTransformerBlock", "Conv2d"}
    assert max(b.downsampling for b in stats.blocks) > 1


# ---- probing


class Machine:
    """A machine on which what fits is known: peak memory and speed follow from the settings."""

    def __init__(self, memory):
        self.memory, self.asked = memory, []

    def attempt(self, config):
        memory = config.memory
        share = config.compile.compile_activation_budget if config.compile.keeps_by_budget else 0
        kept = 30 * share if config.compile.keeps_by_budget or memory.checkpointing else 30
        peak = 10 + kept - 0.2 * (memory.blocks_to_swap or 0)
        self.asked.append(config)
        if peak > self.memory:
            return Measured({}, why="The GPU ran out of memory.")
        step = (
            1.0
            + 0.4 * memory.checkpointing * (1 - share)
            + 0.02 * (memory.blocks_to_swap or 0)
            - 0.3 * config.compile.compile
        )
        return Measured({}, step, peak=peak)


def probed(memory, **options):
    config = build_config(FLUX, {**READY, **options}, notes=[])
    machine = Machine(memory)
    return probe.Probe(config, (1024, 1024), memory, machine.attempt).run()


def test_a_probe_makes_it_fit_and_then_fast():
    small = probed(12)
    assert small.best.changes["gradient_checkpointing"] and small.tries[0].why
    assert "compile = true" in str(small.sentence())
    large = probed(100, gradient_checkpointing=True, blocks_to_swap=10)
    assert large.best.changes["blocks_to_swap"] == 0 and large.best.seconds < 1.4
    assert len(large.tries) <= probe.TRIES and "A batch of" in str(large.sentence())
    assert probed(1).best is None and "lower the resolution" in str(probed(1).sentence())


def test_a_probe_gives_a_share_of_activations_up_for_swapped_blocks_and_for_all_activations():
    share = {"compile": True, "gradient_checkpointing": True, "compile_activation_budget": 0.5}
    assert probed(12, **share).best.changes == {"compile_activation_budget": 0.0}
    small = probed(9, **share).best.changes
    assert (small["blocks_to_swap"], small["compile_activation_budget"]) == (8, 1.0)
    large = probed(100, **share).best.changes
    assert (large["gradient_checkpointing"], large["compile_activation_budget"]) == (False, 1.0)


def test_a_probe_that_fails_otherwise_says_why():
    config = build_config(FLUX, READY, notes=[])
    broken = probe.Probe(config, (64, 64), 10, lambda made: Measured({}, why="no such file")).run()
    assert len(broken.tries) == 1 and "no such file" in str(broken.sentence())


def test_a_try_is_a_training_on_made_images(config, tmp_path):
    trial = probe.prepare_try(
        replace_options(config, max_train_epochs=3, lr_scheduler="cosine"), (128, 192), tmp_path / "try"
    )
    assert checking.make_report(trial).problems == []
    assert trial.steps.max_train_steps == probe.WARM + probe.TIMED and not trial.steps.max_train_epochs
    assert {Image.open(p).size for p in (tmp_path / "try").rglob("*.png")} == {(128, 192)}
    assert trial.memory == config.memory and trial.precision == config.precision


BESIDE = {"flux_train_network": {"model_type": "kontext", "guidance_scale": 1.0}, "sdxl_train_control_net_lllite": {}}


@pytest.mark.parametrize("script", BESIDE)
def test_a_try_has_images_beside_its_images_where_the_model_is_shown_some(script, demo, tmp_path):
    options = {**flatten_sections(read_toml(demo.configs[script])), **BESIDE[script]}
    trial = probe.prepare_try(build_config(config_class(script), options, notes=[]), (128, 256), tmp_path / "try")
    check = data.check_data(trial, trial.grid)
    assert not check.problems and {image.size_with_controls for image in check.images.items} == {(128, 256)}


def test_the_pace_of_a_gpu_is_that_of_its_own_clock(tmp_path):
    def line(step, compute):
        where = {"data_s": 0.01, "transfer_s": 0.01, "compute_s": compute}
        return json.dumps({"kind": "step", "step": step, "s_it": 0.2, **where})

    (tmp_path / layout.PROGRESS).write_text("".join(f"{line(n, [9, 1, 2][n])}\n" for n in range(3)), encoding="utf-8")
    assert probe._pace(tmp_path, {"peak_memory_gb": 3.0}) == pytest.approx(1.52)
    assert probe._pace(tmp_path, {"peak_ram_gb": 3.0}) == 0.2


def test_the_check_counts_what_sample_images_take(config, demo, tmp_path):
    from library.check import preview_memory
    from library.check.estimate import MemoryEstimate

    prompts = tmp_path / "p.txt"
    prompts.write_text("a cat --w 512 --h 512\na dog --w 1024 --h 1536\n", encoding="utf-8")
    asked = replace_options(config, sample_prompts=str(prompts), sample_every_n_steps=2)
    lasting, taken = [finding for finding in checking.make_report(asked).findings if finding.topic == "samples"]
    assert taken.verdict == "ok" and "1024x1536" in str(taken.text)
    assert lasting.verdict == "hint" and "2 sample images" in str(lasting.text) and "sample less" in str(lasting.text)
    parts = {"model": 4.0, "optimizer": 0.5, "activations": 9.0}
    (tight,) = preview_memory.sentences(MemoryEstimate(6, parts, memory=6.0), asked)
    assert tight[0] == "hint" and "in tiles" in str(tight[1]) and "--w" in str(tight[1])
    (wide,) = preview_memory.sentences(MemoryEstimate(6, parts, memory=24.0), asked)
    assert wide[0] == "ok" and not [*preview_memory.sentences(MemoryEstimate(6, parts), config)]
    peaks = {
        script: preview_memory.peak_of(MemoryEstimate(6, parts), config_of(demo, script), (1024, 1024))
        for script in ("flux_train_network", "qwen_image_train_network")
    }
    assert peaks["qwen_image_train_network"] - peaks["flux_train_network"] > 2 * 1.9


def test_a_probe_whose_samples_were_left_out_does_not_fit(config, tmp_path, monkeypatch):
    """The training itself continues without them, and its process ends well."""

    def process(arguments, **_):
        run = next(tmp_path.glob("*/out")) / "runs" / "one"
        run.mkdir(parents=True)
        (run / layout.RUN).write_text(json.dumps({"state": "finished", "peak_memory_gb": 5.0}), encoding="utf-8")
        event = {"t": 0, "kind": "sample_failed", "step": 5, "text": "the GPU ran out of memory"}
        (run / layout.PROGRESS).write_text(json.dumps(event) + "\n", encoding="utf-8")
        return SimpleNamespace(returncode=0)

    def made(config, size, folder):
        (folder / "out").mkdir(parents=True)
        return config

    monkeypatch.setattr(probe.subprocess, "run", process)
    monkeypatch.setattr(probe, "prepare_try", made)
    result = probe.measure_in_own_process(config, (64, 64), tmp_path, {"mixed_precision": "no"})
    assert result.lacks_memory
