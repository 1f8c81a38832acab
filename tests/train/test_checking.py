"""The preflight report: each fault named, with a remedy that mends it."""

import json
import re
import sys
import time

import pytest
from PIL import Image

from library import data
from library.check import check_process, preflight
from library.check import report as checking
from library.cli import main
from library.config.building import Reading, build_config, draft, find_missing, replace_options, working_fix
from library.config.formats import read_toml
from library.config.ineffective import ADAPTERS, SHARED, WHOLE_MODEL_RULES, ineffective_options
from library.config.problems import ConfigError, Problem
from library.config.schema import changed, flatten_sections, option_values, options_of
from library.families import RUNS, config_class
from tests.training import command, problems_and_remarks

LORA, FLUX, WHOLE_SDXL = (config_class(s) for s in ("sdxl_train_network", "flux_train_network", "sdxl_train"))


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
    assert "12 images in 3 buckets, 18 batches per epoch: 60 steps are 3.3 epochs" in str(texts["images"])
    assert {"model", "captions", "caches", "training", "GPU", "compiling", "disk"} <= set(texts)
    assert json.loads(json.dumps(report.as_json()))["fit"]["peak"] > 0


def test_nothing_is_said_of_files_of_unknown_size_and_whole_epochs_have_no_fraction(config, monkeypatch):
    monkeypatch.setattr(checking, "saved_size", lambda config: 0.0)  # as of some models that cannot be read
    report = checking.make_report(replace_options(config, max_train_steps=36))
    texts = {finding.topic: str(finding.text) for finding in report.findings}
    assert texts["disk"].endswith(" free") and texts["images"].endswith("36 steps are 2 epochs")


@pytest.mark.parametrize(("other_fix", "times"), [({"seed": 1}, 1), ({"seed": 2}, 2), ({}, 2)])
def test_a_remark_that_asks_for_what_a_problem_asks_for_is_left_out(config, other_fix, times):
    problem, note = Problem("seed", "is wrong", fix={"seed": 1}), Problem("seed", "is odd", fix=other_fix)
    report = checking.make_report(config, Reading(config, [problem], [note]))
    assert sum(isinstance(f.text, Problem) and f.text.option == "seed" for f in report.findings) == times


@pytest.mark.parametrize(
    ("script", "option"),
    [("train_textual_inversion", "token_string"), ("sdxl_train_control_net_lllite", "cond_emb_dim")],
)
def test_what_is_wrong_with_what_is_trained_is_about_the_training(script, option):
    assert checking.topic(Problem(option, "is not set"), draft(config_class(script), {})) == "training"


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
    assert any(str(text).startswith("sample_prompts: samples are generated only on request") for text in alone - texts)


def test_a_prompt_that_is_sampled_at_another_size_is_reported(config, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("a cat --w 100\na dog --l nan\n", encoding="utf-8")
    remarks = [str(problem) for problem in problems_and_remarks(replace_options(config, sample_prompts=str(path)))[1]]
    assert any("prompts.txt, line 1: --w 100 becomes 96" in problem for problem in remarks)
    assert any("prompts.txt, line 2: --l nan is ignored: write a number" in problem for problem in remarks)


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
    asked = check_process.question_of([{"script": config.script, "values": options, "problems": [], "wrong": []}], {})
    heavy = {"torch", "torch._dynamo", "torch._inductor", "transformers", "diffusers"}
    code = "import sys\nfrom library.check import answering\nanswering.answer_requests()\n"
    code += f"print(*{heavy} & set(sys.modules))"
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
    (LORA, {"compile": True, "compile_activation_budget": 0.5, "cpu_offload_checkpointing": True}),
    (
        LORA,
        {
            "compile": True,
            "compile_activation_budget": 0.5,
            "gradient_checkpointing": True,
            "compile_scope": "inner",
        },
    ),
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
