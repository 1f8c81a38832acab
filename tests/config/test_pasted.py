"""What people write and paste as paths, on Windows and elsewhere."""

import argparse
import contextlib
import importlib
from pathlib import Path

import pytest

from library import families
from library.cli.launch import file_or_word, with_config
from library.cli.train_script import config_path
from library.config import pasted
from library.config import values as config_values
from library.config.arguments import Arguments
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.config.values import quoted
from library.families import config_class

HOME = "C:\\Users\\Jörg Müller"
WRITTEN = {  # what is written -> the path, and the same on systems that are not Windows
    "%USERPROFILE%\\train": (f"{HOME}\\train", "%USERPROFILE%\\train"),
    "%userprofile%/train": (f"{HOME}/train", "%userprofile%/train"),
    '"%OneDrive%\\kohya"': (f"{HOME}\\OneDrive\\kohya", "%OneDrive%\\kohya"),
    '"D:\\images"': ("D:\\images", "D:\\images"),
    'D:\\images"': ("D:\\images", 'D:\\images"'),  # as a program reads "D:\images\" in a command
    "\u202aD:\\images ": ("D:\\images", "D:\\images"),
    "\\\\nas\\share\\images": ("\\\\nas\\share\\images", "\\\\nas\\share\\images"),
    "%SECRET%\\a": ("%SECRET%\\a", "%SECRET%\\a"),  # its value would stand in messages
    "100%\\a%b": ("100%\\a%b", "100%\\a%b"),
    "sets%public": ("sets%public", "sets%public"),
}
ONE_PATH = ("file", "folder")


@pytest.fixture(params=[True, False], ids=["Windows", "elsewhere"])
def on_windows(request, monkeypatch):
    for module in (pasted, config_values):
        monkeypatch.setattr(module, "WINDOWS", request.param)
    for name, folder in {"USERPROFILE": HOME, "ONEDRIVE": f"{HOME}\\OneDrive", "SECRET": "hidden"}.items():
        monkeypatch.setenv(name, folder)
    return request.param


@pytest.mark.parametrize("text", WRITTEN)
def test_a_path_is_read_as_it_was_meant(on_windows, text):
    expected = WRITTEN[text][not on_windows]
    for script in families.RUNS:
        options = [option for option in options_of(config_class(script)).values() if option.kind in ONE_PATH]
        assert len(options) > 5
        values = {str(option.read(text)) for option in options if not option.many}
        several = [option for option in options_of(config_class(script)).values() if option.kind == "files"]
        values |= {str(option.read([text, "b"])[0]) for option in several}
        assert {value.replace("/", "\\") for value in values} == {expected.replace("/", "\\")}, script


@pytest.mark.parametrize("text", ["D:images", "d:", "D:a\\b"])
def test_a_drive_without_its_backslash_is_a_mistake_on_windows(on_windows, text):
    """It means the current folder of that drive, which hardly anybody knows."""
    option = options_of(config_class(next(iter(families.RUNS))))["output_dir"]
    if on_windows:
        with pytest.raises(ConfigError) as error:
            option.read(text)
        assert str(error.value).endswith(f"write {text[:2]}\\{text[2:]}")
    else:
        assert str(option.read(text)) == text


def test_a_backslash_before_a_quote_is_explained(on_windows):
    r"""cmd and PowerShell hand over --a "D:\images\" --b as one word with a quote in it."""
    option = options_of(config_class(next(iter(families.RUNS))))["output_dir"]
    text = 'D:\\images" --output_name cat'
    with pytest.raises(ConfigError, match="has a quote in it") if on_windows else contextlib.nullcontext():
        option.read(text)


def test_words_in_place_of_a_strength_are_no_part_of_the_path(on_windows):
    """Else Windows' rule about colons hides the message about the strength."""
    option = options_of(config_class("sdxl_train_network"))["sample_lora"]
    for text in ("D:\\a.safetensors:strong", "D:/a.safetensors:", "D:\\a.safetensors:0.8:0.9", "D:\\a.safetensors"):
        assert option.read([text]) == (text,)
    with pytest.raises(ConfigError, match="Windows does not allow") if on_windows else contextlib.nullcontext():
        option.read(["D:\\a:b\\c.safetensors:0.8"])


def test_messages_show_the_paths_of_windows_as_they_are():
    assert quoted("D:\\a b") == quoted(Path("D:\\a b")) == "'D:\\a b'"
    assert quoted("D:\train") == "'D:\\train'"  # a tab stays visible


PARSERS = (
    "library.tools.shell:build_tools_parser",
    "library.captioning.shell:build_caption_parser",
    "library.masking.shell:build_mask_parser",
    "library.sampling.shell:build_sample_parser",
)


@pytest.mark.parametrize("parser", PARSERS)
def test_all_paths_of_commands_are_read_alike(parser):
    module, _, name = parser.partition(":")
    unread = [getattr(importlib.import_module(module), name)()]
    for one in unread:
        assert isinstance(one, Arguments)
        for action in one._actions:
            if isinstance(action, argparse._SubParsersAction):
                unread += action.choices.values()
    assert any(action.type is Path for one in unread for action in one._actions)


def test_a_command_takes_the_home_folder_and_quotes(on_windows):
    parser = Arguments()
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path)
    read = parser.parse_args(["~/a b.toml", "--out", '"~/b"'])
    assert (read.file, read.out) == (Path.home() / "a b.toml", Path.home() / "b")
    assert config_path('"~/cat"') == Path.home() / "cat.toml"
    if on_windows:
        assert str(parser.parse_args(["%USERPROFILE%\\a"]).file) == f"{HOME}\\a"


def test_a_leading_file_of_check_and_train_is_read_as_any_other(on_windows):
    file = f"{Path.home()}/cat.toml"
    expected = ["--config_file", str(Path(file)), "--seed", "3"]
    for text in ("~/cat.toml", '"~/cat.toml"', " ~/cat.toml ", file):
        first, path, *others = with_config([text, "--seed", "3"])
        assert [first, str(Path(path)), *others] == expected
    for word in ("sdxl_train_network", "--config_file", ""):
        assert file_or_word(word) == word and with_config([word]) == [word]
    assert with_config([]) == []


@pytest.mark.parametrize("name", ["base_weights", "sample_lora"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\n", " \n "])
def test_files_in_lines_are_the_same_in_a_form_a_flag_and_a_file(name, end):
    option = options_of(config_class("sdxl_train_network"))[name]
    files = ("a.safetensors", "b.safetensors:0.5", "c.safetensors")
    text = end.join(files)
    for value in (text, [text], [*files], [end.join(files[:2]), files[2]], end + text + end, [end + text + end]):
        assert option.read(value) == files, value
    assert option.read(f"my cat.safetensors{end}b.safetensors")[-1] == "b.safetensors"
