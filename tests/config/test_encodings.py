"""Files of settings in encodings of Windows: read as far as their letters are certain, else refused in one sentence."""

import pytest

from library.config.outside_files import load_json, load_toml, load_yaml
from library.config.problems import ConfigError
from library.importers import import_file
from tests.config.arriving import CONFIGS

LINE = "accelerate launch sdxl_train_network.py --pretrained_model_name_or_path=m.safetensors --output_name={name}\n"
# A comment that every encoding of the table can hold, and a value; what stands in ASCII is always certain.
FILES = {
    "a.toml": "# {comment}\noutput_name = '{name}' # {comment}\n",
    "a.yaml": "# {comment}\noutput_name: '{name}' # {comment}\n",
    "a.json": '{{"output_name": "{name}"}}',
    "a.bat": "@echo off\nrem {comment}\n:: {comment}\n" + LINE,
    "a.sh": "# {comment}\n" + LINE,
    "a.ps1": "# {comment}\n" + LINE,
}
WHOLE = ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be")
CODE_PAGES = {
    "cp1252": "é€",
    "shift-jis": "表示ソ",
    "gbk": "数据乗",
    "big5": "功能許",
    "cp949": "한글",
    "cp1251": "Привет",
}
LOADERS = {".toml": load_toml, ".yaml": load_yaml, ".json": load_json}


def read_name(path):
    if load := LOADERS.get(path.suffix):
        return load(path)["output_name"]
    return import_file(path, CONFIGS).config.save.output_name


@pytest.mark.parametrize("file", FILES)
def test_settings_are_read_in_every_encoding_with_all_letters(tmp_path, file):
    for encoding in WHOLE:
        path = tmp_path / file
        path.write_bytes(FILES[file].format(comment="é表", name="café").replace("\n", "\r\n").encode(encoding))
        assert read_name(path) == "café", encoding


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("encoding", CODE_PAGES)
def test_of_a_code_page_comments_are_left_open_and_values_are_refused(tmp_path, file, encoding):
    path, letters = tmp_path / file, CODE_PAGES[encoding]
    path.write_bytes(FILES[file].format(comment=letters, name="cat").encode(encoding))
    assert read_name(path) == "cat"
    path.write_bytes(FILES[file].format(comment=letters, name=f"cat{letters}").encode(encoding))
    with pytest.raises(ConfigError) as refused:
        read_name(path)
    assert "is not a text file in UTF-8" in str(refused.value) or "is not in UTF-8" in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(("number", "encoding"), [(932, "shift-jis"), (936, "gbk"), (1252, "cp1252"), (65001, "utf-8")])
def test_a_batch_file_that_chooses_its_code_page_is_read_in_it(tmp_path, number, encoding):
    letters = CODE_PAGES.get(encoding, "é")
    path = tmp_path / "a.bat"
    path.write_bytes(f"@chcp {number} > nul\n{LINE.format(name=f'cat{letters}')}".encode(encoding))
    assert read_name(path) == f"cat{letters}"


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"a = 1\x00\xe9", b"\xe9\x00\x00\x01", b"\xff\xfea\xd8b\x00"])
def test_bytes_that_are_no_text_are_refused(tmp_path, data):
    for file in FILES:
        (tmp_path / file).write_bytes(data)
        with pytest.raises(ConfigError):
            read_name(tmp_path / file)
