"""The form's requests while it is filled in, without a browser: every request gets an answer."""

import json
import os

import numpy
import pytest
from safetensors.numpy import save_file

from kohya_gui.form import api, compile_summary, messages, presets
from kohya_gui.form.form import SettingsForm
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.server import named_paths
from kohya_gui.server.json_api import ApiRequest
from library import families
from library.check import check_process
from library.config.building import build_config
from library.config.problems import ConfigError, Problem
from library.config.schema import option_values, options_of
from library.families import config_class
from library.jobs import jobs
from library.recipes import preset_files
from library.runs import keys, layout, registry
from library.runs.record import Record

FORMS = {tab.id: SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics) for tab in TABS}
FLUX = config_class("flux_train_network")


@pytest.fixture
def helper(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    for variable in keys.ENVIRONMENT.values():
        monkeypatch.delenv(variable, raising=False)
    return api.FormApi(FORMS, {tab.id: tab.kind for tab in TABS}, [tmp_path])


def question(tab="lora", family="sdxl", more=None, **values):
    return ApiRequest(
        {"tab": tab, "sent": json.dumps({"family": family, "values": values, "launch": {}}), **(more or {})}
    )


def test_mistakes_are_put_to_their_fields_and_what_sleeps_says_why(helper):
    judgement = helper.judge(question(max_train_steps="-5", full_bf16=True, compile=True, huber_c="x"))
    assert {name: str(text) for name, text in judgement["wrong"].items()} == {
        "lora-max_train_steps": "Must be at least 1, got -5",
        "lora-full_bf16": "Needs mixed_precision = bf16, which is no",
        "lora-huber_c": "Must be a number, got 'x'",
    }
    assert "lora-compile_mode" not in judgement["ineffective"]
    assert str(judgement["ineffective"]["lora-keep_tokens"]) == "shuffle_caption and caption_tag_dropout_rate are off"
    assert helper.judge(question())["wrong"] == {}  # empty fields are no mistakes


def test_web_address_in_a_path_field_is_reported_while_typing(helper):
    judgement = helper.judge(question(train_data_dir="https://x.org/images", pretrained_model_name_or_path="org/model"))
    assert list(judgement["wrong"]) == ["lora-train_data_dir"]
    assert "is a web address, not a path" in str(judgement["wrong"]["lora-train_data_dir"])


def test_invalid_base_model_is_reported_while_typing(helper, tmp_path):
    def wrong(path, typing=""):
        request = question(more={"typing": typing}, pretrained_model_name_or_path=str(path))
        return str(helper.judge(request)["wrong"].get("lora-pretrained_model_name_or_path", ""))

    save_file({"x.lora_down.weight": numpy.zeros(1)}, tmp_path / "cat.safetensors")
    assert "is a LoRA file, not a model" in wrong(tmp_path / "cat.safetensors")
    assert "does not exist" in wrong(tmp_path / "dog.safetensors") and "must end in" in wrong(tmp_path / "dog.png")
    assert wrong("org/model-v1.safe") == "" and "does not exist" in wrong(tmp_path / "ca")
    assert (
        wrong(tmp_path / "ca", api.MODEL_OPTION) == "" and wrong(tmp_path.parent, api.MODEL_OPTION) == ""
    )  # beginnings of existing paths, still being typed
    assert "outside" in wrong(tmp_path.parent / "x.safetensors", api.MODEL_OPTION)
    assert os.name == "nt" or "is a path of Windows" in wrong('"C:\\dog.safetensors"')


@pytest.mark.parametrize("tab", FORMS)
def test_every_path_is_checked_while_typing(helper, tmp_path, tab):
    """For all options that name paths: missing ones, ones outside of the roots, and files in place of folders."""
    (tmp_path / "file").touch()
    form = FORMS[tab]
    for family, config in form.configs.items():
        names = [name for name, option in options_of(config).items() if option.kind in ("file", "folder")]
        created = [name for name in names if name in named_paths.CREATED_BY_TRAINING]
        cases = (
            ("/nowhere/x", names, "outside"),
            (tmp_path / "none" / "x", {*names} - {*created}, "does not exist"),
            (tmp_path / "file" / "x", created, "is a file; choose a folder"),
        )
        for path, expected, words in cases:
            mistakes = helper.judge(question(tab, family, **dict.fromkeys(names, str(path))))["wrong"]
            places = form.places(family)
            texts = {name: str(mistakes.get(places[name][1], "")) for name in expected}
            texts.pop("control_directory", "")  # a rule of the model is reported first
            assert all(words in text for text in texts.values()), (family, texts)
        here = helper.judge(question(tab, family, **dict.fromkeys(created, str(tmp_path / "new" / "x"))))["wrong"]
        assert not here


def test_the_beginning_of_a_path_is_no_mistake_in_the_field_that_one_is_in(helper, tmp_path):
    (tmp_path / "images").mkdir()
    for typing, expected in (("train_data_dir", []), ("", ["lora-train_data_dir"])):
        request = question(more={"typing": typing}, train_data_dir=str(tmp_path / "ima"))
        assert list(helper.judge(request)["wrong"]) == expected


@pytest.mark.parametrize("name", ["../../x", "a/b", "con", "x" * 201, " x"])
def test_invalid_output_name_is_reported_while_typing(helper, name):
    assert list(helper.judge(question(output_name=name))["wrong"]) == ["lora-output_name"]


def test_a_profile_is_chosen_only_while_the_form_compiles_by_it(helper):
    profiles = preset_files.profiles()
    assert helper.judge(question())["profile"] == ""
    now = {}
    for profile in profiles:
        config = presets.apply(profile, FORMS["lora"].configs["sdxl"], now)
        now = option_values(config)
        assert helper.judge(question(**FORMS["lora"].shown("sdxl", now)))["profile"] == profile.id
        changed = FORMS["lora"].shown("sdxl", {**now, "compile_cache_size_limit": 7})
        assert helper.judge(question(**changed))["profile"] == ""
        off = FORMS["lora"].shown("sdxl", {**now, "compile": False, "compile_autotune": False})
        assert helper.judge(question(**off))["profile"] == ""


@pytest.mark.parametrize(
    ("pipeline", "family", "needed"),
    [
        ("FluxPipeline", "flux", {}),
        ("FluxKontextPipeline", "flux", {"model_type": "kontext"}),
        ("ChromaPipeline", "flux", {"model_type": "chroma", "apply_t5_attn_mask": True}),
        ("StableDiffusionXLPipeline", "sdxl", {}),
        ("QwenImagePipeline", "qwen_image", {}),
    ],
)
def test_a_diffusers_folder_tells_its_family_and_what_it_needs(helper, tmp_path, pipeline, family, needed):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), encoding="utf-8")
    name = str(tmp_path / "model")
    recognised = helper.judge(question(pretrained_model_name_or_path=name))["model"]
    words = f"a diffusers model ({pipeline})"
    expected = {"path": name, "family": family, "words": words, "options": needed, "proposed": needed}
    assert recognised | {"words": str(recognised["words"])} == expected
    assert helper.judge(question(pretrained_model_name_or_path="/etc"))["model"] == {}


def test_model_of_another_family_is_reported_while_typing(helper, tmp_path):
    model = tmp_path / "model"
    for pipeline, words in (
        ("FluxPipeline", "a diffusers model (FluxPipeline); this tab trains SDXL."),
        ("Other", "a diffusers model (Other), not a model that is trained here."),
    ):
        model.mkdir(exist_ok=True)
        (model / "model_index.json").write_text(json.dumps({"_class_name": pipeline}), encoding="utf-8")
        judgement = helper.judge(question("lllite", pretrained_model_name_or_path=str(model)))
        assert str(judgement["wrong"]["lllite-pretrained_model_name_or_path"]) == f"The file is {words}"
        assert judgement["model"] == {} and judgement["chosen"] == ""


def test_a_base_model_is_chosen_when_it_is_one_of_the_tab_with_all_of_its_files(helper, tmp_path):
    def chosen(path, family="flux", **parts):
        return helper.judge(question(family=family, pretrained_model_name_or_path=str(path), **parts))["chosen"]

    encoder, model = tmp_path / "clip_l.safetensors", tmp_path / "flux.safetensors"
    save_file({"text_model.embeddings.token_embedding.weight": numpy.zeros((2, 2))}, encoder)
    save_file({"double_blocks.0.img_attn.qkv.weight": numpy.zeros((2, 2))}, model)
    assert [chosen(path) for path in ("", "/nowhere", tmp_path, encoder, tmp_path / "none.safetensors")] == [""] * 5
    assert chosen("org/model", "sdxl") == "org/model"
    parts = {"clip_l": str(encoder), "t5xxl": "org/t5", "ae": str(model)}
    assert chosen(model) == "" and chosen(model, **parts) == str(model)
    assert chosen(model, **parts | {"ae": str(tmp_path / "none.safetensors")}) == ""


def test_the_outlook_knows_what_an_earlier_run_took(helper, tmp_path):
    config = build_config(FLUX, {"compile": True}, notes=[])
    assert str(compile_summary.outlook(config)) == "2 graphs, about 20 s once, kept for next time (an estimate)."
    folder = tmp_path / "out" / "runs" / "cat-20260101-000000-abcd"
    folder.mkdir(parents=True)
    facts = {"script": "flux_train_network", "state": "finished", "compile": {"num_graphs": 2, "seconds": 71.6}}
    layout.store(folder / layout.RUN, facts)
    (folder / layout.TOML).write_text("[compile]\ncompile = true\n", encoding="utf-8")
    registry.add_pointer(folder)
    assert (
        str(compile_summary.outlook(config)) == f"2 graphs, about 72 s once, kept for next time (as in {folder.name})."
    )
    assert helper.compile_log(ApiRequest({})) == {"text": ""}  # no training is running
    with Record.start({}, "flux_train_network", tmp_path / "out", "fox", "FLUX.1 LoRA") as run:
        run.event("compile", block="DoubleStreamBlock", forward=True, seconds=1.5, total=1.5, reason="", failed="")
        assert str(helper.compile_log(ApiRequest({}))["text"]) == "fox now: 1 graph in 2 s"
    other = build_config(FLUX, {"compile": True, "compile_mode": "max-autotune-no-cudagraphs"}, notes=[])
    assert "3 min" in str(compile_summary.outlook(other))


@pytest.mark.parametrize(
    ("values", "begins"),
    [
        ({}, "16 graphs, about 77 s"),
        ({"compile_blocks": "transformer:all"}, "2 graphs, about 10 s"),
        ({"compile_blocks": "transformer:0,resnet:0-2,resnet:4"}, "5 graphs, about 24 s"),
        ({"compile_scope": "model"}, "One graph of the whole model"),
    ],
)
def test_the_outlook_is_for_the_blocks_that_are_chosen(values, begins):
    config = build_config(config_class("sdxl_train_network"), {"compile": True, **values}, notes=[])
    assert str(compile_summary.outlook(config)).startswith(begins)


def test_every_family_says_how_many_graphs_its_blocks_need():
    for family in families.all_families():
        for script in family.scripts:
            blocks = {*config_class(script)().compile.kinds.values()}
            assert family.graphs.keys() - {"GroupNorm"} == blocks  # norms between blocks are no choice of their own


def test_a_probe_reads_and_writes_where_the_page_may_only(helper, tmp_path):
    ready = {
        "pretrained_model_name_or_path": "/etc/x.safetensors",
        "train_data_dir": str(tmp_path),
        "output_dir": str(tmp_path / "out"),
        "resolution": "64",
    }
    with pytest.raises(ConfigError, match="outside"):
        helper.probe(question(**ready))
    assert not list(tmp_path.glob("**/probe*"))


@pytest.mark.parametrize("name", ["judge", "preset", "choices", "compare", "probe", "probing", "unprobe"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tab": "../x"},
        {"tab": "lora"},
        {"tab": "lora", "sent": "[" * 9999},
        {"tab": "lora", "sent": "{}"},
        {"tab": 3},
        {"tab": "lora", "sent": '{"family":"sdxl","values":{},"launch":{}}', "id": "../../etc"},
        {
            "tab": "lora",
            "sent": '{"family":"sdxl","values":{"pretrained_model_name_or_path":"/etc/passwd"},"launch":{}}',
            "first": "run:../..",
            "second": "/etc/passwd",
            "id": "\x00",
        },
    ],
)
def test_whatever_is_sent_is_answered_or_refused_in_words(helper, name, fields):
    try:
        answer = helper.handlers[name](ApiRequest(fields))
    except ConfigError as refused:
        assert str(refused)
    else:
        assert "root:" not in json.dumps(answer, default=str)


def test_a_run_of_a_shell_can_be_compared_by_its_record(helper, tmp_path):
    with Record.start(
        {"network": {"network_dim": 8}}, "sdxl_train_network", tmp_path / "out", "fox", "SDXL LoRA"
    ) as run:
        run.step({"step": 1, "loss": 0.5})
    key = next(key for name, key in helper.choices(question())["choices"] if str(name).startswith("fox"))
    comparison = helper.compare(question(more={"first": "form", "second": key}, network_dim="16"))
    assert comparison["rows"] == [["network_dim", "Rank", "16", "8"]] and str(comparison["second"]).startswith("fox · ")


def test_tokens_are_kept_for_their_owner_only_and_can_be_forgotten(helper, monkeypatch):
    assert keys.store_keys({"huggingface_token": "hf_secret", "wandb_api_key": "", "other": "x"}) == [
        "huggingface_token"
    ]
    assert keys.store_keys({"huggingface_token": "hf_secret"}) == []
    if os.name != "nt":
        assert keys.keys_file().stat().st_mode & 0o777 == 0o600
    assert keys.key_environment() == {"HF_TOKEN": "hf_secret"}
    assert check_process.environment_for_check({})["HF_TOKEN"] == "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "of the environment")
    assert keys.key_environment() == {}
    helper.forget(ApiRequest({"name": "huggingface_token"}))
    assert keys.stored_keys() == {}


def test_a_probe_whose_process_is_gone_has_failed_with_its_last_words(helper):
    folder = jobs.new(api.PROBE_KIND)
    (folder / layout.LOG).write_text("loading\nKilled\n", encoding="utf-8")
    layout.store(folder / jobs.JOB, {"state": "running", "pid": 2**22 - 1, "process_start": 1.0})
    progress = helper.probing(question(more={"id": folder.name}))
    assert progress["state"] == "failed" and progress["text"] == "Killed" and progress["fix"] == {}


def test_what_a_report_says_is_text_and_its_remedies_are_values_of_fields():
    report = {
        "findings": [
            {
                **Problem("train_data_dir", ": <b>x</b> is empty").as_json(),
                "topic": "images",
                "verdict": "bad",
                "fix": {"caption_extension": ".txt"},
            },
            {**Problem("", "9 GB free").as_json(), "topic": "disk", "verdict": "ok"},
        ],
        "fit": None,
    }
    form = FORMS["lora"]
    shown = messages.report_html(report, form.places("sdxl"), lambda finding: form.shown("sdxl", finding["fix"]))
    assert "&lt;b&gt;" in shown and "<b>x" not in shown and "1 problem to fix" in shown
    assert 'data-fix="{&quot;caption_extension&quot;: &quot;.txt&quot;}"' in shown and "#lora-train_data_dir" in shown
    assert "find-models" not in shown
    offered = messages.report_html(report, {}, lambda finding: finding["fix"], {"train_data_dir"})
    assert offered.index("1 problem to fix") < offered.index("find-models") < offered.index("9 GB free")
    assert "probe" not in shown and "probe" in messages.report_html(
        {**report, "findings": []}, {}, lambda finding: finding["fix"]
    )


def test_problems_stand_in_the_order_of_the_form_with_the_models_offered_below_theirs():
    places, model = FORMS["lora"].places("flux"), "pretrained_model_name_or_path"
    names = ["learning_rate", "", "output_name", "train_data_dir", "clip_l", model]
    problems = [Problem(name, ": write {name}", name=f"a value of {name or 'nothing'}") for name in names]
    in_order = [model, "clip_l", "train_data_dir", "output_name", "learning_rate", "nothing"]
    findings = [{**problem.as_json(), "topic": "settings", "verdict": "bad", "fix": {}} for problem in problems]
    report = messages.report_html({"findings": findings}, places, lambda finding: {}, (model, "clip_l"))
    for shown in (messages.list_problems(problems, places), report):
        at = [shown.index(f"a value of {name}<") for name in in_order]
        assert at == sorted(at)
    assert report.index("value of clip_l<") < report.index("find-models") < report.index("value of train_data_dir<")
