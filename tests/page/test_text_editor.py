"""The form as text, without a browser: written, checked and taken back."""

import json

import pytest

from kohya_gui.form.tab import TrainingTab
from kohya_gui.form.tabs import TABS
from kohya_gui.form.text_editor import TextEditor
from kohya_gui.server.json_api import ApiRequest
from library.check import isolated
from library.config.problems import ConfigError


@pytest.fixture
def editor(tmp_path, monkeypatch):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    known = lambda reading, launch: {"findings": isolated.findings_of_reading(reading), "fit": None}  # noqa: E731
    monkeypatch.setattr(isolated, "check_reading", known)
    return TextEditor({tab.id: TrainingTab(tab, [tmp_path]) for tab in TABS}, [tmp_path])


def request(text="", family="sdxl", tab="lora", more=None, **values):
    sent = json.dumps({"family": family, "values": values, "launch": {}})
    return ApiRequest({"tab": tab, "sent": sent, "text": text, **(more or {})})


def found(answer):
    return [(finding["line"], finding["verdict"], str(finding["text"])) for finding in answer["findings"]]


def test_the_text_is_what_save_would_write_with_its_comments(editor):
    source = "# mine\n[optim]\nlearning_rate = 1e-4 # low\n"
    answer = editor.write(request(learning_rate="2e-4", seed="x", more={"source": source}))
    assert answer["text"].splitlines()[1:] == ["# mine", "[optim]", "learning_rate = 0.0002 # low"]
    assert "sdxl_train_network" in answer["text"] and str(answer["note"]).endswith("seed")


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("seed = 1\nlerning_rate = 3\n", 2, "is not an option"),
        ("[a]\nseed = 1\n[b]\nseed = 2\n", 2, "keep one of the two"),
        ("\n\nseed = = 3", 3, "is not valid TOML"),
        ('seed = """', 1, "is not valid TOML"),
        ("seed = 'x'", 1, "whole number"),
        ('[optim]\n"max_train_steps" = -4', 2, "at least"),
        ("output_dir = '/etc'", 1, "outside"),
        ("a." * 80 + "b = 1", 0, "levels deep"),
        ("x = '" + "a" * 1_100_000 + "'", 0, "bytes"),
        ("compile_backend = 'os.system'", 1, ""),
    ],
)
def test_what_is_wrong_has_its_line(editor, text, line, words):
    answer = editor.look(request(text))
    assert [(at, words in said) for at, _, said in found(answer)][:1] == [(line, True)] or not words
    assert all("sdxl_train_network.toml" not in said and "Traceback" not in said for _, _, said in found(answer))


def test_a_text_for_another_family_is_for_that_family_and_else_for_that_of_the_form(editor):
    flux = "# sd-scripts/flux_train_network.py\nseed = 1\n"
    assert json.loads(editor.take(request(flux))["fill"])["family"] == "flux"
    filled = json.loads(editor.take(request("seed = 1 # luck\n", family="zimage"))["fill"])
    assert (filled["family"], filled["start"]["title"], filled["source"]) == (
        "zimage",
        "Edited text",
        "seed = 1 # luck\n",
    )
    assert "guess" not in str(editor.take(request("seed = 1\n", family="zimage"))["message"])


def test_a_pasted_command_is_loaded_like_a_config(editor):
    text = "accelerate launch sdxl_train_network.py \\\n  --network_dim 8 ^\n  --optimizer_args a=1 b=2 --sed 1\n"
    assert [said for _, _, said in found(editor.look(request(text, family="zimage")))] == [
        "sed is not an option (did you mean seed?)"
    ]
    filled = json.loads(editor.take(request(text, family="zimage"))["fill"])
    assert (filled["family"], filled["source"]) == ("sdxl", "")


def test_check_says_what_check_of_a_form_says(editor):
    lines = found(editor.check(request("# a comment\nmax_train_epochs = 2\ntrain_data_dir = 'nowhere'\n")))
    assert all(verdict in ("ok", "hint", "bad") for _, verdict, _ in lines)
    assert [line for line, _, said in lines if said.startswith("train_data_dir")] == [3]
    assert any(said.startswith("pretrained_model_name_or_path") and line == 0 for line, _, said in lines)


@pytest.mark.parametrize("name", ["write", "look", "check", "take"])
def test_nonsense_is_refused_in_words(editor, name):
    for wrong in (request(tab="nowhere"), ApiRequest({"tab": "lora", "sent": "[]", "text": ""})):
        with pytest.raises(ConfigError, match="load the page again"):
            getattr(editor, name)(wrong)
    if name in ("check", "take"):
        with pytest.raises(ConfigError, match="not valid TOML"):
            getattr(editor, name)(request("seed = ["))
