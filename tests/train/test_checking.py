"""The preflight report: each fault named, with a remedy that mends it; what a training needs; probing."""

import json
import math
import re
import sys
import time
from types import SimpleNamespace

import pytest
from PIL import Image

from benchmarks import preset_cases as presets
from library import data
from library.bench import probe
from library.check import estimate, preflight
from library.check import report as checking
from library.cli import main
from library.config.building import build_config, draft, find_missing, replace_options, working_fix
from library.config.formats import read_toml
from library.config.ineffective import ADAPTERS, SHARED, WHOLE_MODEL_RULES, ineffective_options
from library.config.problems import ConfigError
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.families import RUNS, config_class
from library.measuring import model_stats
from library.measuring.result import Measured
from library.runs import layout
from tests.training import command, config_of

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


def told(config, verdict="bad"):
    return [finding for finding in checking.make_report(config).findings if finding.verdict == verdict]


# ---- the report


def test_valid_config_reports_its_data(config):
    report = checking.make_report(config)
    assert report.problems == []
    texts = {finding.topic: finding.text for finding in report.findings}
    assert "12 images in 3 buckets, 18 batches per epoch:  60 steps are 3.3 epochs" in str(texts["images"])
    assert {"model", "captions", "caches", "training", "GPU", "compiling", "disk"} <= set(texts)
    assert json.loads(json.dumps(report.as_json()))["fit"]["peak"] > 0


FAULTS = {
    "the leaf folder": ({"train_data_dir": "LEAF"}, "images"),
    "no prompts": ({"sample_every_n_steps": 3}, "samples"),
    "a name that is taken": ({"output_name": "taken"}, "disk"),
    "fp16 without a GPU": ({"mixed_precision": "fp16"}, "GPU"),
    "an unknown backend": ({"compile": True, "compile_backend": "indutcor"}, "compiling"),
    "a schedule that needs more": ({"lr_scheduler": "cosine_with_min_lr"}, "training"),
    "an optimizer that is not installed": ({"optimizer_type": "AdamW8bit"}, "training"),
    "an adapter of the other family": ({"network_module": "networks.lora"}, "training"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_its_remedy_mends_it(fault, config, demo, tmp_path, monkeypatch):
    changes, topic = FAULTS[fault]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "taken.safetensors").touch()
    leaf = str(next(demo.images.iterdir()))
    if "installed" in fault:
        monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    broken = replace_options(config, **{name: leaf if value == "LEAF" else value for name, value in changes.items()})
    findings = told(broken)
    assert [finding.topic for finding in findings] == [topic] and findings[0].fix, findings
    assert told(replace_options(broken, **findings[0].fix)) == []


def test_captions_with_another_ending_are_a_hint_with_a_remedy(config):
    findings = [f for f in told(replace_options(config, caption_extension=".caption"), "hint") if f.topic == "captions"]
    assert findings and findings[0].fix == {"caption_extension": ".txt"}


def test_what_the_training_ends_before_is_reported(config, tmp_path):
    (tmp_path / "prompts.txt").write_text("a zorb toy")
    late = {
        "sample_every_n_steps": 61,
        "validate_every_n_epochs": 5,
        "save_every_n_steps": 61,
        "save_every_n_epochs": 5,
    }
    prompts = {"sample_prompts": str(tmp_path / "prompts.txt")}
    texts = {str(hint.text) for hint in told(replace_options(config, **prompts, **late, validation_split=0.2), "hint")}
    ends = {"steps": "60 steps", "epochs": "4 epochs"}
    assert {f"{name} has no effect here: the training ends after {ends[name.split('_')[-1]]}" for name in late} <= texts
    by_epochs = {"compile": True, "compile_backend": "eager", "compile_from_step": "55", "max_train_epochs": 3}
    (hint,) = (
        h for h in told(replace_options(config, **by_epochs), "hint") if str(h.text).startswith("compile_from_step")
    )
    assert "nothing is compiled, as the training ends with step 54 and compiling begins with step 55" in str(hint.text)
    alone = {hint.text for hint in told(replace_options(config, **prompts, save_every_n_steps=60), "hint")}
    assert not [text for text in alone if "ends after" in str(text)]
    (bad,) = told(replace_options(config, ema_decay=0.9, ema_every_n_steps=61))  # its file would be the untrained model
    assert "60 steps" in str(bad.text) and bad.fix == {"ema_every_n_steps": 1}
    assert not told(replace_options(config, ema_decay=0.9, ema_every_n_steps=60))
    falling = {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 40, "lr_decay_steps": "50%"}
    (bad,) = told(replace_options(config, **falling))
    assert "30 steps" in str(bad.text) and "all 60" in str(bad.text)
    assert any(str(text).startswith("sample_prompts: samples are generated only when") for text in alone - texts)


def test_a_prompt_that_is_sampled_at_another_size_is_reported(config, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat --w 100\na dog --l nan\n", encoding="utf-8")
    remarks = [str(problem) for problem in preflight.findings(replace_options(config, sample_prompts=str(path)))[1]]
    assert any("prompts.txt, line 1: --w 100 becomes 96" in problem for problem in remarks)
    assert any("prompts.txt, line 2: --l nan has no effect" in problem for problem in remarks)


def test_what_is_held_out_for_validation_is_reported_by_folder(config):
    said = [
        str(finding.text)
        for finding in told(replace_options(config, validation_split=0.25), "ok")
        if finding.topic == "images"
    ]
    wanted = r"\d+ of \d+ images held out for validation: \d+ of \d+ in .+"
    assert any(re.fullmatch(wanted, text) for text in said)
    assert not any("held out" in str(finding.text) for finding in told(config, "ok"))


def test_a_hint_with_a_remedy_is_gone_after_it(config):
    options = {
        "bucket_no_upscale": True,
        "ema_every_n_steps": 7,
        "max_bucket_reso": 512,
        "persistent_data_loader_workers": True,
    }
    for name, value in options.items():
        built = build_config(FLUX, {**option_values(config), name: value}, notes=[])
        for hint in (finding for finding in told(built, "hint") if finding.fix):
            mended = build_config(FLUX, {**option_values(built), **hint.fix}, notes=[])
            assert hint.text not in [finding.text for finding in checking.make_report(mended).findings], hint


def test_everything_is_examined_within_seconds(config, tmp_path):
    """10,000 images take less than 10 s; here 2,000 take less than 10, whatever else the machine does."""
    folder = tmp_path / "many" / "1_cat"
    folder.mkdir(parents=True)
    Image.new("RGB", (640, 480)).save(folder / "0.png")
    data = (folder / "0.png").read_bytes()
    for number in range(2000):
        (folder / f"{number}.png").write_bytes(data)
    begun = time.process_time()
    report = checking.make_report(replace_options(config, train_data_dir=str(tmp_path / "many")))
    assert report.problems == [] and time.process_time() - begun < 10


def test_check_without_compile_loads_no_compiler(config):
    config = replace_options(
        config, t5xxl_max_token_length=512
    )  # longer than any caption here, which need not be counted
    options = {name: str(value) for name, value in flatten_sections(changed(config)).items()}
    asked = json.dumps([{"script": config.script, "values": options, "problems": [], "wrong": []}])
    heavy = {"torch", "torch._dynamo", "torch._inductor", "transformers", "diffusers"}
    code = f"import sys\nfrom library.check import report\nreport.answer_requests()\nprint(*{heavy} & set(sys.modules))"
    done = command([sys.executable, "-c", code], input=asked)
    assert '"findings"' in done.stdout and done.stdout.splitlines()[-1] == "torch", done.stderr


def test_the_command_says_it_in_lines_or_as_json(demo, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main.main(["check", str(demo.configs["flux_train_network"]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"topic", "verdict", "text", "fix"} <= set(report["findings"][0])
    (tmp_path / "sdxl_train.toml").write_text("learning_rate = -1\n", encoding="utf-8")
    assert main.main(["check", "sdxl_train.toml"]) == 1
    assert "learning_rate must be at least 0" in capsys.readouterr().err


# ---- remedies of the options' own rules

RULES = [
    (LORA, {"cache_text_encoder_outputs": True}),
    (LORA, {"shuffle_caption": True, "cache_text_encoder_outputs": True, "network_train_unet_only": True}),
    (LORA, {"random_crop": True, "cache_latents": True}),
    (LORA, {"full_bf16": True}),
    (LORA, {"full_bf16": True, "full_fp16": True, "mixed_precision": "bf16"}),
    (LORA, {"fp8_base": True}),
    (LORA, {"int8_base": True, "fp8_base": True, "mixed_precision": "bf16"}),
    (LORA, {"fp8_compute": True, "mixed_precision": "bf16"}),
    (LORA, {"compile": True, "compile_mode": "reduce-overhead", "blocks_to_swap": 4}),
    (LORA, {"compile": True, "compile_activation_budget": 0.5, "gradient_checkpointing": True}),
    (LORA, {"enable_bucket": True, "resolution": "2048"}),
    (LORA, {"bucket_reso_steps": 40, "enable_bucket": True}),
    (LORA, {"lr_warmup_steps": 10, "lr_scheduler": "constant"}),
    (LORA, {"checkpoint_keep_attention": True, "cpu_offload_checkpointing": True}),
    (LORA, {"network_train_unet_only": True, "network_train_text_encoder_only": True}),
    (LORA, {"face_crop_aug_range": "2.0,4.0", "enable_bucket": True}),
    (LORA, {"scale_v_pred_loss_like_noise_pred": True}),
    (FLUX, {"loss_type": "huber"}),
    (WHOLE_SDXL, {"fused_backward_pass": True, "optimizer_type": "AdamW"}),
    (WHOLE_SDXL, {"train_text_encoder": True, "cache_text_encoder_outputs": True}),
]


@pytest.mark.parametrize(("cls", "given"), RULES, ids=lambda case: " ".join(case) if isinstance(case, dict) else "")
def test_a_broken_rule_has_a_remedy(cls, given):
    with pytest.raises(ConfigError) as error:
        build_config(cls, given)
    options = options_of(cls)
    broken = draft(cls, {name: options[name].read(value) for name, value in given.items()})
    for _ in range(3):  # one remedy may uncover the next problem
        problem = error.value.problems[0]
        mends = working_fix(problem, broken)
        assert mends, problem
        given = {**given, **mends}
        broken = draft(cls, {name: options[name].read(value) for name, value in given.items()})
        try:
            build_config(cls, given, notes=[])
        except ConfigError as wrong:
            error = type("E", (), {"value": wrong})
        else:
            return
    raise AssertionError(error.value)


def test_what_only_a_person_can_know_has_no_remedy():
    empty = build_config(LORA, {}, notes=[])
    by_name = {line.option: working_fix(line, empty) for line in find_missing(empty)}
    assert by_name == {
        "pretrained_model_name_or_path": {},
        "train_data_dir": {},
        "output_dir": {},
        "resolution": {"resolution": "1024"},
    }


# ---- options without effect


def test_the_check_says_what_this_machine_makes_of_options_as_the_start_does(config):
    asked = replace_options(
        config, ddp_timeout=5, cuda_graphs="true", fp8_base=True, fp8_compute=True, mixed_precision="bf16"
    )
    hints = [finding.text for finding in told(asked, "hint")]
    for name in ("ddp_timeout", "cuda_graphs", "fp8_compute"):
        assert [hint for hint in hints if str(hint).startswith(f"{name} has no effect here")], hints
    assert {*preflight.check_before_training(asked)} <= {*hints}


def test_rules_about_idle_options_name_options_and_can_wake_them():
    every = {name for script in RUNS for name in options_of(config_class(script))}
    own = [rule for script in RUNS for rule in config_class(script).ineffective_rules]
    for names, _, reason in (*SHARED, *ADAPTERS, *WHOLE_MODEL_RULES, *own):
        assert set(names.split()) <= every, names
        assert reason and str(reason)[0].islower()
    quiet = ineffective_options(build_config(LORA, {}, notes=[]))
    assert str(quiet["compile_mode"]) == "compile is off" and "noise_offset" not in quiet
    awake = ineffective_options(
        build_config(LORA, {"compile": True, "loss_type": "huber", "enable_bucket": True}, notes=[])
    )
    assert not {"compile_mode", "huber_c", "bucket_reso_steps"} & set(awake)


def test_an_option_that_has_to_be_changed_is_not_said_to_have_no_effect_besides():
    config = build_config(
        LORA, {"compile": True, "compile_backend": "eager", "compile_mode": "reduce-overhead"}, notes=[]
    )
    problems, remarks = preflight.evaluate(config, data.Check([], []))
    assert [problem.option for problem in problems if "inductor" in str(problem)] == ["compile_mode"]
    assert not [problem for problem in remarks if problem.option == "compile_mode"]


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
    *("flux/lora-24gb", "flux/lora-48gb", "flux/lora-80gb", "flux/lora-chroma-24gb", "flux/lora-chroma-48gb"),
    *("flux/lora-fill-24gb", "flux/lora-fill-48gb", "flux/lora-kontext-24gb", "sdxl/finetune-16gb", "sdxl/lora-6gb"),
]


@pytest.mark.parametrize("family", presets.known_models())
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
        peak = 10 + (0 if memory.gradient_checkpointing else 30) - 0.2 * (memory.blocks_to_swap or 0)
        self.asked.append(config)
        if peak > self.memory:
            return Measured({}, why="The GPU ran out of memory.")
        step = (
            1.0
            + 0.4 * memory.gradient_checkpointing
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


def test_a_probe_that_fails_otherwise_says_why():
    config = build_config(FLUX, READY, notes=[])
    broken = probe.Probe(config, (64, 64), 10, lambda made: Measured({}, why="no such file")).run()
    assert len(broken.tries) == 1 and "no such file" in str(broken.sentence())


def test_a_try_is_a_training_on_made_pictures(config, tmp_path):
    trial = probe.prepare_try(
        replace_options(config, max_train_epochs=3, lr_scheduler="cosine"), (128, 192), tmp_path / "try"
    )
    assert checking.make_report(trial).problems == []
    assert trial.steps.max_train_steps == probe.WARM + probe.TIMED and not trial.steps.max_train_epochs
    assert {Image.open(p).size for p in (tmp_path / "try").rglob("*.png")} == {(128, 192)}
    assert trial.memory == config.memory and trial.precision == config.precision


BESIDE = {"flux_train_network": {"model_type": "kontext", "guidance_scale": 1.0}, "sdxl_train_control_net_lllite": {}}


@pytest.mark.parametrize("script", BESIDE)
def test_a_try_has_pictures_beside_its_images_where_the_model_is_shown_some(script, demo, tmp_path):
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
    """The training itself goes on without them, and its process ends well."""

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
