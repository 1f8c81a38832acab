"""Print command: the printed command trains what is on screen, and no existing file is changed."""

import html
import json
import re
import shlex
import sys

import pytest

from kohya_gui.form import presets, print_command
from kohya_gui.form.print_command import CommandPrinter
from kohya_gui.server.json_api import ApiRequest
from library.cli.train_script import read_command_line
from library.config.building import build_config, replace_options
from library.config.command import quote_command
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.config.schema import option_values
from library.families import RUNS, config_class

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the printed line is taken apart as a POSIX shell does")


@pytest.fixture
def config(tmp_path):
    values = {
        "pretrained_model_name_or_path": str(tmp_path / "a.safetensors"),
        "output_dir": str(tmp_path / "my out"),
        "train_data_dir": str(tmp_path / 'it\'s "here"'),
        "resolution": "1024",
        "output_name": "cat",
    }
    return build_config(config_class("sdxl_train_network"), values, notes=[])


@pytest.fixture
def root(tmp_path):
    return tmp_path.resolve()


def shown(config, where, root):
    """The printed command's words, its TOML, and the file that the page offers to write."""
    message = print_command.printed(config, str(where), {}, [], [root])
    line, toml = (html.unescape(text) for text in re.findall("<pre>(.*?)</pre>", message, re.S))
    offered = re.search('class="keep" data-path="(.*?)" data-script="(.*?)"', message)
    return shlex.split(line), toml, offered and [html.unescape(text) for text in offered.groups()]


def trained(config, where, root):
    """Save the file that the printed command needs, and check that the command trains the form; returns the file."""
    words, toml, offered = shown(config, where, root)
    path = root / words[words.index("--config_file") + 1]
    script = re.search(r"(\w+)\.py$", words[words.index("--config_file") - 1])[1]
    assert bool(offered) is not path.exists()
    if offered:
        assert offered == [str(path), script]
        CommandPrinter([root]).keep(ApiRequest({"path": offered[0], "script": script, "toml": toml}))
        assert shown(config, where, root) == (words, toml, None)  # the file exists now
    from_file = read_command_line(config_class(script), ["--config_file", str(path)]).config
    assert option_values(from_file) == option_values(config) and script == config.script
    return path


def test_nothing_saved_yet_is_offered_beside_the_result(config, root):
    assert trained(config, "", root) == root / "my out" / "cat-sdxl-lora.toml"


def test_a_loaded_file_is_named_as_long_as_it_says_the_same(config, root):
    (root / "cat.toml").write_text(to_toml(config) + "\n# mine\n")
    before = (root / "cat.toml").read_bytes()
    assert trained(config, root / "cat.toml", root) == root / "cat.toml"
    edited = replace_options(config, learning_rate=0.5)
    assert trained(edited, root / "cat.toml", root) == root / "cat-2.toml"
    assert trained(replace_options(config, learning_rate=0.25), root / "cat.toml", root) == root / "cat-3.toml"
    assert trained(edited, root / "cat.toml", root) == root / "cat-2.toml"  # the file with this config exists already
    assert (root / "cat.toml").read_bytes() == before


def test_a_file_that_was_changed_or_deleted_meanwhile_is_noticed(config, root):
    place = root / "cat.toml"
    presets.save_config(place, config, "")
    assert trained(config, place, root) == place
    place.write_text(to_toml(replace_options(config, network_dim=77)))
    assert trained(config, place, root) == root / "cat-2.toml"
    place.unlink()
    assert trained(config, place, root) == place
    place.unlink()
    place.mkdir()
    assert trained(config, place, root) == root / "cat-2.toml"


@pytest.mark.parametrize("content", ["", "no toml", "[x", "learning_rate = 'fast'", "guidance_scale = 3.5"])
def test_a_file_that_is_something_else_is_never_named(config, root, content):
    (root / "cat.toml").write_text(content)
    assert trained(config, root / "cat.toml", root) == root / "cat-2.toml"
    assert (root / "cat.toml").read_text() == content


def test_a_file_of_the_other_family_is_not_taken_for_this_one(root):
    values = {
        "pretrained_model_name_or_path": "/m.safetensors",
        "output_dir": str(root),
        "resolution": "1024",
        "train_data_dir": "/images",
        "output_name": "x",
    }
    for script in RUNS:
        other = build_config(
            config_class(script),
            {**values, "ae": "/ae", "clip_l": "/c", "t5xxl": "/t"} if script.startswith("flux_train") else values,
            notes=[],
        )
        presets.save_config(root / f"{script}.toml", other, "")
    sdxl = build_config(config_class("sdxl_train_network"), values, notes=[])
    assert trained(sdxl, root / "sdxl_train_network.toml", root) == root / "sdxl_train_network.toml"
    assert trained(sdxl, root / "flux_train_network.toml", root) == root / "flux_train_network-2.toml"


def test_what_a_shell_lacks_is_reported_and_tokens_are_not_printed(config, monkeypatch, tmp_path):
    monkeypatch.setenv("KOHYA_HOME", str(tmp_path / "home"))
    secret = replace_options(config, wandb_api_key="a-secret-key", log_with="wandb", train_data_dir="images")
    message = print_command.printed(secret, "", {}, ["a note"], [tmp_path.resolve()])
    assert "a-secret-key" not in message and "Set WANDB_API_KEY in that shell" in message and "a note" in message
    assert "the path of train_data_dir is relative to it" in message
    assert "relative to it" not in print_command.printed(config, "", {}, [], [tmp_path.resolve()])


def test_the_button_writes_configs_only_and_only_new_files_below_the_roots(config, root, tmp_path):
    (root / "mine.toml").write_text("mine")
    good = {"path": str(root / "new.toml"), "script": config.script, "toml": to_toml(config)}
    for wrong in (
        {"path": str(root / "mine.toml")},
        {"path": "/etc/new.toml"},
        {"path": str(root / "new.py")},
        {"toml": "[["},
        {"toml": "evil = 1"},
        {"script": "os"},
        {"path": 7},
        {"toml": None},
    ):
        with pytest.raises(ConfigError):
            CommandPrinter([root]).keep(ApiRequest({**good, **wrong}))
    assert (root / "mine.toml").read_text() == "mine" and not (root / "new.toml").exists()


def test_file_without_read_permission_counts_as_missing(config, root):
    elsewhere = root / "allowed"
    words, _, offered = shown(config, "", elsewhere)
    assert offered[0] == words[-1] == str(root / "my out" / "cat-sdxl-lora.toml")
    with pytest.raises(ConfigError, match="outside"):
        print_command.printed(config, "/etc/cat.toml", {}, [], [elsewhere])


def test_quotes_of_windows_keep_a_path_in_one_piece(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert (
        quote_command(["python", "--config_file", r"C:\my out\cat.toml"])
        == r'python --config_file "C:\my out\cat.toml"'
    )


# ---- in a browser


def on_screen(visitor):
    return build_config(config_class("sdxl_train_network"), visitor.held()["values"], notes=[])


def printed_for(visitor):
    before = visitor.page.locator(".message:visible").get_attribute("data-said")
    visitor.click("Print command")
    visitor.until("Train runs this command", f".message:not([data-said='{before}'])")
    return shlex.split(visitor.page.locator(".message:visible pre").first.inner_text())[-1]


@pytest.mark.browser
def test_what_is_loaded_imported_uploaded_or_edited_is_what_the_command_trains(visit, served, tmp_path):
    visitor, root = visit(), served[1]
    visitor.fill(
        pretrained_model_name_or_path="/models/base.safetensors",
        train_data_dir="/images",
        resolution="1024",
        output_name="dog",
        max_train_steps="40",
        output_dir=root / "results",
    )
    place = visitor.page.get_by_placeholder("Config file").locator("visible=true")

    def check(name):
        path = printed_for(visitor)
        if visitor.page.locator(".message button.keep:visible").count():
            visitor.click("Save the file")
            visitor.until("Saved")
        assert path == str(root / name)
        from_file = read_command_line(config_class("sdxl_train_network"), ["--config_file", path]).config
        assert option_values(from_file) == option_values(on_screen(visitor))

    place.fill(str(root / "dog.toml"))
    visitor.click("Save config")
    visitor.until("Saved")
    check("dog.toml")
    visitor.fill(max_train_steps="41")
    check("dog-2.toml")
    visitor.click("Load config")
    visitor.until("Loaded dog.toml")
    visitor.fill(max_train_steps="42")
    check("dog-3.toml")
    foreign = {
        "sdxl": True,
        "LoRA_type": "Standard",
        "network_dim": "24",
        "output_dir": str(root / "theirs"),
        "output_name": "fox",
        "pretrained_model_name_or_path": "/m.safetensors",
        "train_data_dir": "/images",
        "max_resolution": "1024,1024",
    }
    (root / "fox.json").write_text(json.dumps(foreign), encoding="utf-8")
    place.fill(str(root / "fox.json"))
    visitor.click("Load config")
    visitor.until("Loaded fox.json")
    check("theirs/fox-sdxl-lora.toml")
    (tmp_path / "up.toml").write_text((root / "dog.toml").read_text(encoding="utf-8"), encoding="utf-16")
    visitor.page.locator("input[type=file]").locator("nth=0").set_input_files(tmp_path / "up.toml")
    visitor.until("Loaded up.toml")
    check("results/dog-sdxl-lora.toml")
