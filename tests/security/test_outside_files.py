"""Files from outside are hostile: whatever they hold, their reader ends soon, in one sentence that names the file."""

import datetime
import errno
import json
import os
import struct

import pytest

from library.config import outside_files
from library.config.outside_files import load_json, load_toml, load_yaml, read_outside_text
from library.config.problems import ConfigError
from library.data import folders, metadata
from library.families.shared import weights
from library.families.shared.raw_header import header_metadata
from library.importers import files as importers
from library.sampling import prompts

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
    "digits.toml": ("a = " + "1" * 5000, "a number of 5000 digits"),
    "hexadecimal.toml": ("a = 0x" + "1" * MANY, "digits"),
    **{  # the word before the text says what it is, and it is nothing of the kind
        f"{tag}-{at}.yaml": (f"{before}!!{tag} '{text}'\n", f"line 1: '{text}' is not valid as {tag}")
        for tag, texts in {"int": ("", "-", "x"), "float": ("", "x"), "bool": ("", "x"), "timestamp": ("", "x")}.items()
        for at, (text, before) in enumerate((text, before) for text in texts for before in ("a: ", "- ", "? "))
    },
    "date.toml": ("a = 2026-13-45", "is not valid TOML"),
    "large.toml": ("#" * (outside_files.MAX_SETTINGS_BYTES + 1), "1,000,001 bytes"),
    "quotes.toml": ('"\\' * MANY, "is not valid TOML"),
    "deep.json": ("[" * MANY, "levels deep"),
    "deeper.json": ('{"a":' * 60 + "1" + "}" * 60, "levels deep"),
    "digits.json": ('{"a": ' + "1" * 5000 + "}", "a number of 5000 digits"),
    "fewer.json": ('{"a": ' + "1" * 50 + "}", "a number of 50 digits"),
    "twice.json": ('{"a": 1, "a": 2}', "a twice in one table"),
}
LOADERS = {".toml": load_toml, ".json": load_json, ".yaml": load_yaml}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_sentence(tmp_path, name):
    text, said = HOSTILE[name]
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    for load in (LOADERS[path.suffix], importers.parse_file):
        with pytest.raises(ConfigError) as refused:
            load(path)
        assert said in str(refused.value) and str(path) in str(refused.value)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_prompts_and_image_lists_come_through_the_same_door(tmp_path, suffix):
    path = tmp_path / f"deep{suffix}"
    path.write_text(HOSTILE[f"deep{suffix}"][0], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"sample_prompts: .*levels deep"):
        prompts.read_prompts(path)
    if suffix == ".json":
        with pytest.raises(ConfigError, match="levels deep"):
            metadata.read_metadata_file(path, None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_a_device_and_a_folder_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "zero.toml").symlink_to("/dev/zero")
    (tmp_path / "folder.toml").mkdir()
    for name, said in (
        ("pipe", "pipe or a device"),
        ("zero", "pipe or a device"),
        ("folder", "is a folder"),
        ("none", "does not exist"),
    ):
        for read in (read_outside_text, load_toml, importers.parse_file, prompts.read_prompts):
            with pytest.raises(ConfigError, match=said):
                read(tmp_path / f"{name}.toml")


def test_what_people_really_write_is_read(tmp_path):
    path = tmp_path / "a.toml"
    path.write_bytes(b'\xef\xbb\xbf[a.b.c]\r\n"d.e" = [0.1, 0.25, 1e-5]\r\nf = """x.y.z.\r\n"""\r\n')
    assert load_toml(path) == {"a": {"b": {"c": {"d.e": [0.1, 0.25, 1e-5], "f": "x.y.z.\n"}}}}
    path.write_bytes("a = 'é'\n".encode("utf-16"))
    assert load_toml(path) == {"a": "é"}


def header(path, table):
    text = table if isinstance(table, str) else json.dumps(table)
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode())
    return path


def test_headers_of_weights_come_through_the_same_door(tmp_path):
    for text in ("[" * MANY, '{"a":' * 60 + "1" + "}" * 60, '{"a": ' + "1" * 5000 + "}", '{"a": 1, "a": 1}', "\x00"):
        with pytest.raises(ConfigError, match="is not a safetensors file"):
            weights.header_entries(header(tmp_path / "a.safetensors", text))


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/x.safetensors", "..", "C:x", "a\\b"])
def test_an_index_of_weights_names_files_beside_it_alone(tmp_path, name):
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match="names no files of weights"):
        weights._shards(tmp_path / "m.safetensors.index.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("read", [load_toml, load_json, read_outside_text, weights.header, header_metadata])
def test_a_file_on_a_failing_disk_or_share_is_named(tmp_path, monkeypatch, read):
    path = tmp_path / "file"
    path.write_bytes(bytes(16))

    def fail(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(outside_files, "open", fail, raising=False)
    with pytest.raises(ConfigError, match="file cannot be read: "):
        read(path)


def test_an_image_that_is_a_pipe_or_a_device_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "b.png").symlink_to("/dev/zero")
    listing = folders.list_folder(tmp_path)
    assert {name: path.num_bytes for name, path in listing.images.items()} == {"a.png": 0, "b.png": 0}


def test_captions_have_a_limit_too(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x" * (outside_files.CAPTION + 1))
    with pytest.raises(ConfigError, match="at most 100,000 are read"):
        outside_files.read_bytes(tmp_path / "a.txt", outside_files.CAPTION)


@pytest.mark.parametrize("text", ['{"a": "x\\ud800"}', '{"\\udfff": 1}', '[["a\\ud83d b"]]', '["\\udc80"]'])
def test_half_of_a_character_is_a_sentence(text):
    with pytest.raises(ConfigError, match=r"x\.json holds half of a character \(\\u"):
        outside_files.parse_json(text, "x.json")


def test_whole_characters_and_names_that_are_not_utf_8_stay():
    for text in ("\U0001f600", "é"):
        assert outside_files.parse_json(json.dumps([text]), "x.json") == [text]
    named = {"\udc80.png": {"caption": "x"}}  # a byte of a file's name
    assert outside_files.parse_json(json.dumps(named), "x.json") == named


def test_yaml_has_the_values_of_json_and_dates():
    values = outside_files.parse_yaml("3: a\non: {2: b}\nx: !!set {c}\ny: !!binary aGk=\nz: 2020-01-02\n", "x.yaml")
    assert values == {"3": "a", "True": {"2": "b"}, "x": ["c"], "y": "b'hi'", "z": datetime.date(2020, 1, 2)}
