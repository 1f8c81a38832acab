"""Caching alone: `kohya cache latents` and `kohya cache text` make what a training finds, in any number of shares."""

import runpy
import sys

import pytest

from library.cli import cache, cache_data
from library.config.formats import to_toml
from library.config.problems import ConfigError
from library.distributed.world import World
from library.jobs import jobs
from library.jobs.work import join_work
from library.runs import foreground
from library.train import caching
from tests.source import ROOT
from tests.training import LORAS, config_of, fresh, pictures, ranks, train, untouched

NEITHER = {
    "cache_latents": False,
    "cache_latents_to_disk": False,
    "cache_text_encoder_outputs": False,
    "cache_text_encoder_outputs_to_disk": False,
    "max_train_steps": 1,
}
DISK = {**dict.fromkeys(NEITHER, True), "max_train_steps": 1}


@pytest.fixture
def toml(shallow, tmp_path):
    """A function that writes a TOML of a script, over four pictures of its own."""
    folder = pictures(tmp_path / "pictures")

    def write(script, **more):
        config = config_of(shallow, script, train_data_dir=folder, output_dir=tmp_path / "out", **{**NEITHER, **more})
        path = tmp_path / f"{script}.toml"
        path.write_text(to_toml(config), encoding="utf-8")
        return path

    return folder, write


def made(folder):
    """The caches, with when each was written."""
    paths = (path for path in folder.rglob("*") if path.suffix in (".npz", ".safetensors"))
    return {path.name: path.stat().st_mtime_ns for path in paths}


def cached(kind, *argv):
    fresh()
    return cache_data.main(kind, [*map(str, argv)])


@pytest.mark.parametrize("script", LORAS)
def test_two_shares_have_nothing_in_common_and_are_all_together(toml, script, monkeypatch, tmp_path, shallow):
    folder, write = toml
    path = write(script)

    class Share(World):
        number = 0

        def __init__(self, config):
            super().__init__(config)
            self.rank, self.ranks, self.main = self.number, 2, self.number == 0

    files = {}
    for kind in ("latents", "text"):
        with monkeypatch.context() as patched:
            patched.setattr(caching, "World", Share)
            assert cached(kind, "--config_file", path) == 0
            first = {name: at for name, at in made(folder).items() if name not in files}
            patched.setattr(Share, "number", 1)
            assert cached(kind, "--config_file", path) == 0
        both = made(folder)
        assert len(first) == 2 and len(both) == len(files) + 4 and both.items() >= first.items()
        files = both
    others = [path for path in folder.rglob("*") if path.suffix in (".npz", ".safetensors")]
    others[0].unlink()  # as after an interruption
    for kind in ("latents", "text"):
        assert cached(kind, "--config_file", path) == 0
    now = made(folder)
    assert now.keys() == files.keys() and len(now.items() & files.items()) == 7
    fresh()
    with untouched(folder):  # and a training finds all of them
        train(config_of(shallow, script, train_data_dir=folder, output_dir=tmp_path / "run", **DISK))


def test_two_processes_on_one_machine(toml):
    folder, write = toml
    path = write("sdxl_train_network")
    told = []
    for process in ranks([ROOT / "sd-scripts/tools/cache_latents.py", "--config_file", path, "--skip_existing"]):
        told.append(process.communicate()[0])
        assert process.returncode == 0, told
    assert len(made(folder)) == 4 and sorted("latents of 4 images are cached" in text for text in told) == [False, True]
    before = made(folder)
    assert cached("latents", "--config_file", path) == 0 and made(folder) == before


def test_the_command_starts_the_script_on_the_gpus_that_are_named(toml, monkeypatch, tmp_path):
    _, write = toml
    path = write("flux_train_network")
    begun = []
    monkeypatch.setattr(foreground, "run_in_foreground", lambda arguments, variables: begun.append(arguments) or 0)
    monkeypatch.setattr(cache_data.gpu_slots, "find_launch_problems", lambda how: [])
    assert cache.main(["text", str(path), "--num_processes", "2", "--gpu_ids", "0,1", "--train_batch_size", "2"]) == 0
    (arguments,) = begun
    script = str(ROOT / "sd-scripts/tools/cache_text_encoder_outputs.py")
    assert arguments[arguments.index("--gpu_ids") + 1] == "0,1" and "--multi_gpu" in arguments
    assert arguments[arguments.index(script) :] == [script, "--config_file", str(path), "--train_batch_size", "2"]
    assert cache.main(["latents", "--sdxl", "--train_data_dir", str(tmp_path)]) == 0
    assert begun[1][-3:] == ["--sdxl", "--train_data_dir", str(tmp_path)]


def test_a_job_is_ended_by_the_process_that_caches_and_not_by_the_one_that_waited(toml, monkeypatch, tmp_path):
    _, write = toml
    place = jobs.new("cache")
    monkeypatch.setenv(jobs.JOB_FOLDER_VARIABLE, str(place))
    states = []

    def cached_elsewhere(arguments, variables):
        with join_work("cache") as work:
            states.append(jobs.find_job(place.name).state)
            work.fail()
        return 1

    monkeypatch.setattr(foreground, "run_in_foreground", cached_elsewhere)
    assert cache.main(["latents", str(write("flux_train_network"))]) == 1
    assert states == ["running"] and jobs.find_job(place.name).state == "failed"


def test_what_cannot_be_cached_is_reported_in_a_sentence(toml, tmp_path, capsys, monkeypatch):
    _, write = toml
    shuffled = write("sdxl_train_network", shuffle_caption=True)
    with pytest.raises(SystemExit) as ended:
        cache.main(["text", str(shuffled)])
    assert ended.value.code == 2 and "cannot be used with cache_text_encoder_outputs" in capsys.readouterr().err
    assert cached("latents", "--config_file", shuffled) == 0  # which shuffling does not matter to
    for argv, says in (([], "kohya cache latents RUN.toml"), (["--help"], "--gpu_ids 0,1 uses two GPUs")):
        cache.main(["latents", *argv])
        assert says in capsys.readouterr().out
    for argv, says in (
        (["--train_data_dir", "x"], "write for which family"),
        (["--sdxl", "--flux"], "choose one family"),
    ):
        with pytest.raises(ConfigError, match=says):
            cache.main(["latents", *argv])
    script = ROOT / "sd-scripts/tools/cache_latents.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--flux", "--train_data_dir", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith("error: ") and "Traceback" not in said, said
