"""Model files that are replaced while a training reads them end it before a step is taken."""

import os
import shutil
from pathlib import Path

import pytest

from library.config.problems import ConfigError
from library.config.schema import option_values, options_of
from library.data import encoding
from library.families.shared import file_identity
from library.train.caching import make_caches
from tests.training import config_of, fresh, runs_in, short_captions, train  # noqa: F401

MODEL_OPTION = "pretrained_model_name_or_path"


def by_another(path):
    """A new file takes its place, as a download does."""
    other = shutil.copy(path, path.with_name("new"))
    os.replace(other, path)


def by_one_of_the_same_time(path):
    about = path.stat()
    by_another(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def in_place(path):
    with path.open("r+b") as file:
        file.write(file.read(1))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))


def model_files(config):
    """The options of a config that name a file of its model."""
    paths = {
        name: value
        for name, value in option_values(config).items()
        if options_of(type(config))[name].section == "model"
    }
    return {name: Path(value) for name, value in paths.items() if isinstance(value, str) and Path(value).is_file()}


def own_copy(demo, script, option, tmp_path, **given):
    """A config whose model file of one option is a copy, and that copy."""
    path = model_files(config_of(demo, script))[option]
    copy = Path(shutil.copytree(path.parent, tmp_path / "model")) / path.name  # with its tokenizers
    return config_of(demo, script, output_dir=tmp_path / "out", output_name="m", **{option: copy}, **given), copy


MAPPED = pytest.mark.skipif(os.name == "nt", reason="Windows replaces no file that is mapped")
CASES = [
    pytest.param(script, option, how, marks=MAPPED if option == MODEL_OPTION and how != in_place else ())
    for script, option, how in (
        ("sdxl_train_network", MODEL_OPTION, by_another),
        ("sdxl_train_network", MODEL_OPTION, in_place),
        ("flux_train_network", MODEL_OPTION, by_one_of_the_same_time),
        ("flux_train_network", "ae", by_another),
        ("flux_train_network", "t5xxl", by_another),
        ("qwen_image_train_network", "vae", in_place),
    )
]


@pytest.mark.parametrize(("script", "option", "replace"), CASES)
def test_a_file_that_is_replaced_while_caching_ends_the_training(
    demo, squares, tmp_path, monkeypatch, script, option, replace
):
    config, copy = own_copy(demo, script, option, tmp_path, train_data_dir=squares)
    encode = encoding.encode_missing_caches

    def encoding_while(*given):
        encode(*given)
        replace(copy)

    monkeypatch.setattr(encoding, "encode_missing_caches", encoding_while)
    with pytest.raises(ConfigError, match="was replaced or changed while it was read") as refused:
        train(config)
    assert str(refused.value).startswith(str(copy))
    (run,) = runs_in(tmp_path / "out")
    assert not (run / "progress.jsonl").read_text().count('"kind":"step"')


def test_caching_alone_ends_as_well(demo, squares, tmp_path, monkeypatch):
    config, copy = own_copy(demo, "flux_train_network", "ae", tmp_path, train_data_dir=squares)
    fresh()
    monkeypatch.setattr(encoding, "encode_missing_caches", lambda *given: copy.unlink())
    with pytest.raises(ConfigError, match="was replaced or changed"):
        make_caches(config, lambda *said: None)


def test_an_inode_alone_is_no_other_file(tmp_path, monkeypatch):
    """Network disks that number files anew at each look."""
    path = tmp_path / "a"
    path.write_bytes(b"1")
    about = path.stat()
    moved = os.stat_result(
        [*about[:1], about.st_ino + 1, *about[2:]],
        {"st_mtime_ns": about.st_mtime_ns, "st_ctime_ns": about.st_ctime_ns, "st_atime_ns": about.st_atime_ns},
    )
    assert not file_identity._differs(about, moved) and not file_identity._differs(about, path.stat())
