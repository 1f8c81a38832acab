"""Files from outside are hostile: whatever they hold, their reader ends soon, in one sentence that names the file."""

import os

import pytest

from library.config import outside_files
from library.config.outside_files import load_json, load_toml, load_yaml, read_text
from library.config.problems import ConfigError
from library.data import metadata
from library.importers import files as importers
from library.outputs import prompts

MANY = 100_000
ALIASES = "a0: &a0 [1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))
HOSTILE = {
    "aliases.yaml": (ALIASES, "has the alias *a0"),
    "deep.yaml": ("[" * 5000, "levels deep"),
    "digits.yaml": ("a: " + "1" * 5000, "a number of 5000 digits"),
    "sixty.yaml": ("a: 1" + ":10" * 5000, "digits"),
    "large.yaml": ("#" * (outside_files.YAML + 1), "at most 100,000 are read"),
    "twice.yaml": ("a: 1\na: 2\n", "a twice in one table"),
    "dots.toml": (".".join("a" * MANY) + " = 1", "levels deep"),
    "quoted.toml": (".".join(['"a"'] * MANY) + " = 1", "levels deep"),
    "header.toml": (f"[{'.'.join('a' * MANY)}]", "levels deep"),
    "name.toml": ("a" * MANY + " = 1", "a name of more than 5000 characters"),
    "deep.toml": ("a = " + "[" * MANY, "levels deep"),
    "deeper.toml": ("a = " + "[" * 60 + "]" * 60, "levels deep"),
    "digits.toml": ("a = " + "1" * 5000, "is not valid TOML"),
    "hexadecimal.toml": ("a = 0x" + "1" * MANY, "digits"),
    "date.toml": ("a = 2026-13-45", "is not valid TOML"),
    "large.toml": ("#" * (outside_files.SETTINGS + 1), "1,000,001 bytes"),
    "quotes.toml": ('"\\' * MANY, "is not valid TOML"),
    "deep.json": ("[" * MANY, "levels deep"),
    "deeper.json": ('{"a":' * 60 + "1" + "}" * 60, "levels deep"),
    "digits.json": ('{"a": ' + "1" * 5000 + "}", "is not valid JSON"),
    "fewer.json": ('{"a": ' + "1" * 50 + "}", "a number of 50 digits"),
    "twice.json": ('{"a": 1, "a": 2}', "a twice in one table"),
}
LOADERS = {".toml": load_toml, ".json": load_json, ".yaml": load_yaml}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence(tmp_path, name):
    text, said = HOSTILE[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    for load in (LOADERS[path.suffix], importers.parse):
        with pytest.raises(ConfigError) as refused:
            load(path)
        assert said in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_prompts_and_image_lists_come_through_the_same_door(tmp_path, suffix):
    path = tmp_path / f"deep{suffix}"
    path.write_text(HOSTILE[f"deep{suffix}"][0], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sample_prompts: .*levels deep"):
        prompts.read(path)
    if suffix == ".json":
        with pytest.raises(ConfigError, match="levels deep"):
            metadata.read(path, None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_a_device_and_a_folder_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    for name, said in (("pipe", "pipe or a device"), ("zero", "pipe or a device"), ("folder", "is a folder"),
                       ("none", "does not exist")):  # fmt: skip
        for read in (read_text, load_toml, importers.parse, prompts.read):
            with pytest.raises(ConfigError, match=said):
                read(tmp_path / f"{name}.toml")


def test_what_people_really_write_is_read(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b'\xef\xbb\xbf[a.b.c]\r\n"d.e" = [0.1, 0.25, 1e-5]\r\nf = """x.y.z.\r\n"""\r\n')
    assert load_toml(path) == {"a": {"b": {"c": {"d.e": [0.1, 0.25, 1e-5], "f": "x.y.z.\n"}}}}
    path.write_bytes("a = 'é'\n".encode("utf-16"))
    assert load_toml(path) == {"a": "é"}
