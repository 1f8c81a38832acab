"""Presets and config files: complete, truthful, and never overwritten by accident."""

import html
import json
import re

import pytest

from kohya_gui.form import loading, presets, start_preset
from kohya_gui.form.api import FormApi
from kohya_gui.form.form import SettingsForm, Submission
from kohya_gui.form.tab import TrainingTab
from kohya_gui.form.tabs import FAMILY_TITLES, TABS
from kohya_gui.form.text_editor import TextEditor
from kohya_gui.server.json_api import ApiRequest
from library import importers
from library.config.building import build_config
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.config.schema import changed, flatten_sections, options_of
from library.families import RUNS, config_class
from library.files import write_atomic
from library.importers import adapter_file
from library.recipes import preset_files

CONFIGS = {tab.kind: tab.configs for tab in TABS}
EVERY_SCRIPT = {script: config_class(script) for script in RUNS}
EVERY = preset_files.all_presets()
ALL = [preset for preset in EVERY if not preset.is_profile]  # profiles: tests/compile/test_profiles.py


def test_every_file_is_a_preset_of_some_tab():
    recipes = set(preset_files.PRESETS_FOLDER.glob("recipes/*.toml"))
    assert {p.path for p in EVERY} == set(preset_files.PRESETS_FOLDER.rglob("*.toml")) - recipes
    assert {path.stem for path in recipes} == {*FAMILY_TITLES}, "write presets/recipes/<family>.toml"
    assert {p.family for p in ALL} == {*FAMILY_TITLES}, "write a preset in presets/<family>, measured or not"
    assert {p.kind for p in ALL} == set(CONFIGS)


@pytest.mark.parametrize("preset", ALL, ids=lambda p: p.id)
def test_a_preset_builds_without_remarks_and_holds_no_default(preset):
    notes = []
    config = build_config(CONFIGS[preset.kind][preset.family], read_toml(preset.path), notes=notes)
    assert notes == []
    assert set(read_toml(preset.path)) == set(flatten_sections(changed(config)))


@pytest.mark.parametrize("preset", ALL, ids=lambda p: p.id)
def test_a_preset_says_in_one_line_what_it_is_for(preset):
    text = preset.path.read_text(encoding="utf-8")
    assert preset.sentence.endswith(".") and text.count("#") == 1 and len(str(preset.title)) < 45
    assert preset.title.arguments  # numbers are no part of what is translated
    assert re.search(r"; (not measured\.|[\d.]+ s per step and .* on an )", preset.sentence)


@pytest.mark.parametrize("preset", ALL, ids=lambda p: p.id)
def test_a_preset_replaces_all_but_paths_and_names(preset):
    config_class = CONFIGS[preset.kind][preset.family]
    now = {"output_dir": "/o", "output_name": "cat", "train_data_dir": "/i", "seed": "7", "metadata_author": "me"}
    config = presets.apply(preset, config_class, {**now, "unknown": "x"})
    assert config.save.output_dir == "/o" and config.save.output_name == "cat" and config.data.train_data_dir == "/i"
    assert config.metadata.metadata_author == "me"
    assert config.steps.seed is None  # the previous preset's seed is gone


def load(tmp_path, text, family="sdxl", kind="lora"):
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    return presets.import_fitting(path, CONFIGS[kind], family, []).config


def test_a_file_finds_its_family_and_else_keeps_the_one_on_screen(tmp_path):
    assert load(tmp_path, 'clip_l = "x"', "sdxl").family == "flux"
    assert load(tmp_path, "network_dim = 8", "flux").family == "flux"
    assert load(tmp_path, "network_dim = 8", "sdxl").family == "sdxl"


def test_a_file_that_says_what_it_is_for_is_taken_for_nothing_else(tmp_path):
    whole = build_config(CONFIGS["finetune"]["sdxl"], {"learning_rate": 1e-5})  # a LoRA has all of its options, too
    presets.save_config(tmp_path / "a.toml", whole, "")
    with pytest.raises(ConfigError, match="a.toml is for SDXL fine-tune"):
        presets.import_fitting(tmp_path / "a.toml", CONFIGS["lora"], "flux", [])
    assert presets.import_fitting(tmp_path / "a.toml", CONFIGS["finetune"], "flux", []).config == whole
    (tmp_path / "sdxl_train_network-cat.toml").write_text("seed = 1")
    named = presets.import_fitting(tmp_path / "sdxl_train_network-cat.toml", CONFIGS["lora"], "flux", [])
    assert named.config.family == "sdxl"


def test_a_file_with_mistakes_is_loaded_and_all_of_them_are_named(tmp_path):
    """As in `kohya import`, which uses the same reader."""
    path = tmp_path / "a.toml"
    path.write_text('lerning_rate = 1\nmax_train_steps = "many"\nseed = 7\nfull_bf16 = true', encoding="utf-8")
    imported = presets.import_fitting(path, CONFIGS["lora"], "flux", [])
    config = imported.config
    assert (config.family, config.steps.seed, config.precision.full_bf16) == ("flux", 7, True)
    notes = [str(note) for note in presets.import_notes(imported)]
    assert "lerning_rate is not an option (did you mean learning_rate?)" in notes
    assert any("max_train_steps" in note and "whole number" in note for note in notes)
    assert any(note.startswith("to fix: full_bf16") for note in notes)
    shell = importers.import_file(path, EVERY_SCRIPT, "flux_train_network")
    assert shell.config == config and [str(problem) for problem in shell.problems] == [
        note.removeprefix("to fix: ") for note in notes if note.startswith("to fix: ")
    ]
    assert [outcome.fix for outcome in shell.unknown()] == [{"learning_rate": 1.0}]


def loaded(path, tab=TABS[0]):
    form = SettingsForm(tab.id, FAMILY_TITLES, tab.configs, tab.basics)
    return loading.load_into_form(form, path, Submission(next(iter(tab.configs)), {}, {}), [path.parent])


def test_an_option_without_effect_is_a_note_and_no_problem(tmp_path):
    """kohya_ss writes clip_skip into every file, also for SDXL."""
    path = tmp_path / "kohya.json"
    path.write_text(json.dumps({"LoRA_type": "Standard", "sdxl": True, "clip_skip": 1, "max_train_steps": 40}))
    message = html.unescape(loaded(path)["message"])
    assert "to fix" not in message and "ignored: clip_skip: without effect: SDXL always uses" in message


def test_what_an_importer_leaves_out_on_purpose_is_a_note_and_a_missing_file_a_problem(tmp_path):
    path = tmp_path / "config.json"
    keys = {"model_family": "sdxl", "model_type": "lora", "data_backend_config": "gone.json", "max_grad_norm": 0.01}
    path.write_text(json.dumps({**keys, "max_train_steps": 40}), encoding="utf-8")
    problems, notes = (part.rpartition("<ul>")[2] for part in html.unescape(loaded(path)["message"]).split("</ul>")[:2])
    assert "data_backend_config: this file was not found" in problems and "max_grad_norm" not in problems
    assert "data_backend_config" not in notes and "ignored: max_grad_norm: it cuts each value" in notes


def test_a_file_that_cannot_be_loaded_is_named_without_its_folder(tmp_path):
    for name, text in (("a.json", "[1]"), ("b.json", '[{"id": "x"}]'), ("c.json", "{"), ("d.json", '{"a": 1}')):
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError) as refusal:
            loaded(tmp_path / name)
        assert str(refusal.value).startswith(name)


WRONG_PATHS = ("pretrained_model_name_or_path", "train_data_dir", "reg_data_dir", "vae", "output_dir")
WRONG_FILES = {
    ".json": lambda facts: json.dumps({"LoRA_type": "Standard", "sdxl": True, **facts}),
    ".toml": lambda facts: "\n".join(f"{name} = {json.dumps(value)}" for name, value in facts.items()),
}
WAYS_TO_LOAD = {
    "path": lambda tab, path, sent: tab.on_load(sent, str(path)),
    "drop": lambda tab, path, sent: tab.on_upload(sent, path.name, path.read_text(encoding="utf-8")),
    "text": lambda tab, path, sent: TextEditor({tab.tab.id: tab}, tab.roots).take(
        ApiRequest({"tab": tab.tab.id, "sent": sent, "text": path.read_text(encoding="utf-8")})
    ),
}


@pytest.mark.parametrize("way", WAYS_TO_LOAD)
@pytest.mark.parametrize("suffix", WRONG_FILES)
def test_a_message_about_a_file_counts_all_that_the_form_shows_in_red(tmp_path, suffix, way):
    if way == "text" and suffix != ".toml":
        pytest.skip("the text of a form is TOML")
    facts = {name: "/nowhere/x.safetensors" for name in WRONG_PATHS} | {"caption_dropout_rate": 3, "network_dim": 16}
    path = tmp_path / f"wrong{suffix}"
    path.write_text(WRONG_FILES[suffix](facts), encoding="utf-8")
    tab, sent = TrainingTab(TABS[0], [tmp_path]), json.dumps({"family": "sdxl", "values": {}, "launch": {}})
    answer = WAYS_TO_LOAD[way](tab, path, sent)
    filled = json.loads(answer["fill"])
    form = json.dumps({"family": filled["family"], "values": filled["values"], "launch": filled["launch"]})
    api = FormApi({"lora": tab.form}, {"lora": "lora"}, tab.roots)
    red = set(api.judge(ApiRequest({"tab": "lora", "sent": form, "typing": ""}))["wrong"])
    assert red >= {f"lora-{name}" for name in WRONG_PATHS} - {"lora-vae"}
    message = html.unescape(answer["message"])
    assert red <= set(re.findall(r'data-field="([\w-]+)"', message))
    assert f"{len(red) + 1} problems to fix" in message  # and the share that is no share


def test_files_whose_tables_share_keys_are_loaded(tmp_path):
    """In the header of a LoRA each tensor has a shape and a type; other programs have a type for each part."""
    tensor = {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}
    facts = {
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "24",
        "ss_network_args": "{}",
    }
    header = {"__metadata__": facts, "lora_unet_a.alpha": tensor, "lora_unet_b.alpha": tensor}
    (tmp_path / "cat.safetensors").write_bytes(adapter_file.with_header(json.dumps(header)))
    text = 'pipeline_stages = 1\n[model]\ntype = "sdxl"\ndtype = "bfloat16"\n[adapter]\ntype = "lora"\nrank = 24\n'
    (tmp_path / "pipe.toml").write_text(text + 'dtype = "bfloat16"\n', encoding="utf-8")
    for name in ("cat.safetensors", "pipe.toml"):
        answer = loaded(tmp_path / name)
        assert json.loads(answer["fill"])["values"]["network_dim"] == "24" and name in answer["message"]
        assert "ss_network_args" not in answer["message"]  # it is empty, so nothing is reported


def test_a_value_that_cannot_be_read_has_that_of_the_preset_as_its_fix(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text("learning_rate = -1\nnetwork_dim = 0\nkeep_tokens = 'x'", encoding="utf-8")
    begun = start_preset.starts("lora", {"sdxl": CONFIGS["lora"]["sdxl"]})["sdxl"]["values"]
    message = html.unescape(loaded(path)["message"])
    assert re.findall('data-fix="({.*?})"', message) == [
        json.dumps({name: begun[name]})
        for name in ("network_dim", "learning_rate")  # in the order of the form
    ]


def test_what_cannot_be_read_is_refused_without_its_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"^a\.toml is not valid TOML") as error:
        load(tmp_path, "seed = = 7")
    assert str(tmp_path) not in str(error.value)


def test_saving_writes_over_nothing_but_the_file_that_was_opened(tmp_path):
    config = build_config(CONFIGS["lora"]["flux"], {"network_dim": 8})
    path = tmp_path / "sub" / "cat.toml"
    assert presets.save_config(path, config, "") == 1
    with pytest.raises(ConfigError, match="exists already"):
        presets.save_config(path, config, "")
    opened = presets.config_file_state(path)
    assert presets.save_config(path, build_config(CONFIGS["lora"]["flux"], {"network_dim": 9}), opened) == 1
    with pytest.raises(ConfigError, match="changed elsewhere"):  # as by a second browser
        presets.save_config(path, config, opened)
    assert read_toml(path) == {"network_dim": 9}


def test_a_saved_config_is_the_same_when_it_is_loaded(tmp_path):
    for chosen in (c for configs in CONFIGS.values() for c in configs.values()):
        values = {"optimizer_args": ["betas=0.9,0.99", "a b"], "output_dir": "C:\\x\\o", "max_grad_norm": 0}
        config = build_config(chosen, values, notes=[])
        path = tmp_path / f"{config.script}.toml"
        presets.save_config(path, config, "")
        assert presets.import_fitting(path, CONFIGS[config.kind], config.family, []).config == config


def test_tokens_never_reach_a_file(tmp_path):
    name = next(n for n, o in options_of(CONFIGS["lora"]["sdxl"]).items() if o.kind == "secret")
    presets.save_config(tmp_path / "a.toml", build_config(CONFIGS["lora"]["sdxl"], {name: "canary"}), "")
    assert "canary" not in (tmp_path / "a.toml").read_text(encoding="utf-8")


def test_what_is_no_text_is_refused_in_words(tmp_path):
    write_atomic(tmp_path / "a.toml", b"\x80\x81")
    with pytest.raises(ConfigError, match="not a text file"):
        presets.import_fitting(tmp_path / "a.toml", CONFIGS["lora"], "sdxl", [])


KOHYA = {"sdxl": True, "LoRA_type": "Standard", "network_dim": "16", "lowvram": True, "wandb_api_key": "canary"}


def test_a_file_of_kohya_ss_is_imported_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "cat.json"
    path.write_text(json.dumps(KOHYA | {"sample_prompts": "a cat"}), encoding="utf-8")
    imported = presets.import_fitting(path, CONFIGS["lora"], "flux", [])
    config = imported.config
    assert config.script == "sdxl_train_network" and flatten_sections(changed(config))["network_dim"] == 16
    notes = "\n".join(map(str, presets.import_notes(imported)))
    assert "Imported from kohya_ss" in notes and "lowvram" in notes and imported.texts == {"sample_prompts": "a cat\n"}
    assert "canary" not in notes


def test_what_does_not_go_together_can_be_mended_in_the_form(tmp_path):
    path = tmp_path / "cat.json"
    path.write_text(json.dumps(KOHYA | {"full_bf16": True, "mixed_precision": "fp16"}), encoding="utf-8")
    imported = presets.import_fitting(path, CONFIGS["lora"], "sdxl", [])
    assert imported.config.precision.full_bf16 and [problem.option for problem in imported.problems] == ["full_bf16"]


def test_a_foreign_file_for_another_tab_or_model_is_refused(tmp_path):
    path = tmp_path / "cat.json"
    path.write_text(json.dumps(KOHYA), encoding="utf-8")
    with pytest.raises(ConfigError, match="SDXL LoRA"):
        presets.import_fitting(path, CONFIGS["finetune"], "sdxl", [])
    path.write_text(json.dumps({"LoRA_type": "Standard", "v2": True}), encoding="utf-8")
    with pytest.raises(ConfigError, match="Stable Diffusion 2"):
        presets.import_fitting(path, CONFIGS["lora"], "sdxl", [])


def test_files_that_a_config_names_are_read_where_the_page_may_look_alone(tmp_path):
    """The shell reads them anywhere, but a config from a browser must not make the page do so."""
    home, outside = tmp_path / "home", tmp_path / "outside"
    for folder in (home, outside):
        folder.mkdir()
        data = [{"id": "cats", "type": "local", "instance_data_dir": f"/{folder.name}/cats"}]
        (folder / "data.json").write_text(json.dumps(data), encoding="utf-8")
    settings = {"model_family": "sdxl", "model_type": "lora", "max_train_steps": 1}
    for folder, is_read in ((home, True), (outside, False)):
        path = home / "config.json"
        path.write_text(json.dumps({**settings, "data_backend_config": str(folder / "data.json")}), encoding="utf-8")
        imported = presets.import_config(path, CONFIGS["lora"], "sdxl", [home.resolve()])
        assert ("/cats" in imported.texts.get("dataset_config", "")) == is_read
        assert "cats" in importers.import_file(path, EVERY_SCRIPT).texts["dataset_config"]


def test_a_command_fills_in_how_it_is_launched(tmp_path):
    path = tmp_path / "train.sh"
    path.write_text("accelerate launch --num_processes 2 --gpu_ids 0,2 sdxl_train_network.py --network_dim 4")
    assert json.loads(loaded(path)["fill"])["launch"] == {"num_processes": "2", "gpu_ids": "0,2"}
    path.write_text("accelerate launch sdxl_train_network.py --network_dim 4")
    assert json.loads(loaded(path)["fill"])["launch"] == {}


def test_a_relative_path_beside_the_config_is_offered(tmp_path):
    (tmp_path / "images").mkdir()
    path = tmp_path / "a.toml"
    path.write_text('train_data_dir = "images"\noutput_dir = "out"\nreg_data_dir = "../elsewhere"\n')
    message = html.unescape(loaded(path)["message"])
    assert f"beside the config there is {tmp_path / 'images'}" in message
    assert f'data-fix="{json.dumps({"train_data_dir": str(tmp_path / "images")})}"' in message
    assert "../elsewhere is relative to" in message and "beside the config there is" not in message.split("Regul")[-1]
