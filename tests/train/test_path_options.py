"""Every option that names a file or folder: what cannot be used is named with its option, before anything is loaded."""

import logging
import os

import pytest

from library.check import preflight
from library.cli.train import listen
from library.config import building
from library.config.formats import read_toml
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.config.sections import Log
from library.families import all_families, config_class
from library.outputs.metadata import Hashes

SCRIPTS = [script for facts in all_families() for script in facts.scripts]
# option -> the first script that has it
PATHS = {
    option.name: script
    for script in reversed(SCRIPTS)
    for option in options_of(config_class(script)).values()
    if option.kind in ("file", "files", "folder")
}
# Options that have an effect only with others.
NEEDED = {
    "sample_lora": {"sample_prompts": "HERE/prompts.txt"},
    "compile_cache_dir": {"compile": True},
    "log_tracker_config": {"log_with": "wandb"},
    "validation_prompts": {"validation_split": 0.5},
}
WRITTEN = ("output_dir", "logging_dir", "tokenizer_cache_dir", "console_log_file")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paths")
    (folder / "folder").mkdir()
    (folder / "text").write_text("[")
    (folder / "prompts.txt").write_text("a cat")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
    return folder


def sentences(demo, script, values):
    """Return all problems and remarks of a demo config with these values."""
    cls = config_class(script)
    reading = building.read_layers(cls, [building.Layer({**read_toml(demo.configs[script]), **values}, "--")])
    problems, remarks = preflight.evaluate(reading.config, preflight.scan_images(reading), reading)
    return [*reading.problems, *problems], [*reading.notes, *remarks]


def bad_values(name, kind, world):
    """Return the values that this option cannot have."""
    below = str(world / "text" / "below")
    if kind == "folder":
        bad = [below, str(world / "text"), str(world / "pipe")]
    elif name == "console_log_file":
        bad = [below, str(world / "folder"), str(world / "pipe")]
    else:
        bad = [below, str(world / "nowhere" / "file.safetensors"), str(world / "pipe")]
    return bad if os.name != "nt" else bad[:2]


@pytest.mark.parametrize("name", sorted(PATHS))
def test_unusable_path_is_named_with_its_option(demo, world, name, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # it comes before compile_cache_dir
    script = PATHS[name]
    kind = options_of(config_class(script))[name].kind
    needed = {
        key: value.replace("HERE", str(world)) if isinstance(value, str) else value
        for key, value in NEEDED.get(name, {}).items()
    }
    for bad in bad_values(name, kind, world):
        values = {**needed, name: [bad] if kind == "files" else bad}
        problems, remarks = sentences(demo, script, values)
        assert name in {problem.option for problem in (*problems, *remarks)}, (bad, problems, remarks)
        if name in WRITTEN:
            assert [problem.option for problem in problems] == [name], (bad, problems)


@pytest.mark.parametrize("name", WRITTEN[:-1])
def test_missing_folder_to_write_to_is_no_problem(demo, tmp_path, name):
    problems, _ = sentences(demo, PATHS[name], {**NEEDED.get(name, {}), name: str(tmp_path / "new" / "folder")})
    assert name not in {problem.option for problem in problems}


def test_log_file_gets_its_folder(tmp_path):
    file = tmp_path / "new" / "folder" / "log.txt"
    try:
        listen(Log(console_log_file=str(file)))
        logging.getLogger("kohya.test").warning("a line")
    finally:
        listen(Log())
    assert "a line" in file.read_text(encoding="utf-8")


def test_log_file_that_cannot_be_written_is_refused_with_its_option(world):
    for bad in bad_values("console_log_file", "file", world):
        with pytest.raises(ConfigError, match="^console_log_file: "):
            listen(Log(console_log_file=bad))


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")
def test_hash_of_what_is_no_file_waits_for_nothing(world):
    for name, hashed in (("pipe", "NOFILE"), ("folder", "IsADirectory")):
        assert Hashes({"vae": str(world / name)}).result()["vae_hash"] == hashed


@pytest.mark.parametrize(
    "values",
    [
        {"initial_epoch": 10, "max_train_steps": 2},
        {"initial_epoch": 3, "max_train_epochs": 1},
        {"initial_step": 500, "max_train_epochs": 1},
    ],
    ids=str,
)
def test_beginning_after_the_end_is_a_problem_of_the_check(demo, values):
    problems, _ = sentences(demo, "flux_train_network", values)
    assert [*values][0] in {problem.option for problem in problems}
