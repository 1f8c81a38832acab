"""What users get wrong: a clear sentence each, all of them at once, an exit code, and nothing written or touched."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from library.cli.train_script import main
from library.families import config_class
from tests import fork_server
from tests.source import ROOT
from tests.training import config_of, fresh, pictures, runs_in, train, untouched

FLUX, SDXL = "flux_train_network", "sdxl_train_network"


@pytest.fixture(scope="module")
def extras(demo, squares, tmp_path_factory):
    """Files and folders that are wrong in some way."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "empty").mkdir()
    (folder / "broken.toml").write_text("learning_rate = = 1\n")
    (folder / "typo.toml").write_text("lerning_rate = 1\n\n[optim]\nlearning_rate = 'fast'\n")
    (folder / "text.safetensors").write_text("not a model")
    torn, odd = pictures(folder / "torn"), pictures(folder / "odd")
    for first, *_ in (sorted(torn.rglob("*.png")), sorted(odd.rglob("*.png"))):
        first.write_bytes(first.read_bytes()[:100] if torn in first.parents else b"no image")
    for family, part in (("sdxl", "sdxl"), ("flux", "flux")):  # a model without its tokenizers
        (folder / family).mkdir()
        for file in {Path(path) for path in demo.models[family].values()} | {demo.models[family][part]}:
            if file.is_file():
                shutil.copy(file, folder / family / file.name)
    save_file({"lora_unet_nowhere.lora_down.weight": torch.ones(4, 8)}, folder / "stranger.safetensors")
    state = config_of(
        demo,
        FLUX,
        train_data_dir=squares,
        output_dir=folder / "state",
        output_name="s",
        max_train_steps=1,
        save_state=True,
        network_dim=4,
    )
    train(state)
    (folder / "half-state").mkdir()
    shutil.copy(folder / "state" / "s-state" / "model.safetensors", folder / "half-state")
    return folder


@pytest.fixture
def refused(demo, squares, extras, tmp_path, capsys):
    """Start a training as its script does and have it refused; the sentences on stderr."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "taken.safetensors").write_bytes(b"someone's work")

    def start(name, *flags, toml=None):
        fresh()
        argv = arguments(toml or demo.configs[name], squares, out, "--logging_dir", tmp_path / "logs", *flags)
        capsys.readouterr()
        with untouched(out, tmp_path / "logs", extras, demo.folder, squares), pytest.raises(SystemExit) as ended:
            main(config_class(name), argv)
        assert ended.value.code in (1, 2)
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return [line.removeprefix("error: ") for line in said.splitlines() if line.startswith("error: ")]

    start.out, start.wrong, start.demo = out, extras, demo
    return start


def arguments(config, data, output, *flags):
    """A short eager training of a config file, with more flags."""
    quick = ["--no-compile", "--resolution", 64, "--max_train_steps", 2, "--logging_dir", ""]
    places = ["--config_file", config, "--train_data_dir", data, "--output_dir", output]
    return [str(part) for part in (*places, *quick, *flags)]


def given(text, refused):
    """A flag's value with the places of this test in it."""
    places = {"WRONG": refused.wrong, "OUT": refused.out, "DEMO": refused.demo.folder}
    places |= {"SDXL": refused.demo.models["sdxl"]["sdxl"]}
    places |= {key.upper(): refused.demo.models["flux"][key] for key in ("flux", "clip_l", "t5xxl", "ae")}
    for word, place in places.items():
        text = text.replace(word, str(place))
    return text


MODEL = "--pretrained_model_name_or_path"
CASES = {
    # the command line and its file
    "a misspelt flag": (FLUX, ["--lerning_rate", "1"], ["--lerning_rate", "did you mean learning_rate"]),
    "text for a number": (FLUX, ["--learning_rate", "fast"], ["--learning_rate", "a number", "'fast'"]),
    "a flag without its value": (FLUX, ["--learning_rate"], ["--learning_rate", "needs a value"]),
    "a word of no flag": (SDXL, ["--seed", "1", "2"], ["--seed", "one value"]),
    "an unknown choice": (SDXL, ["--lr_scheduler", "cosin"], ["lr_scheduler", "cosin", "cosine"]),
    "no config": (FLUX, ["--config_file", "WRONG/none.toml"], ["none.toml does not exist"]),
    "a broken config": (FLUX, ["--config_file", "WRONG/broken.toml"], ["broken.toml", "TOML"]),
    # models
    "no model": (SDXL, [MODEL, "WRONG/none.safetensors"], ["pretrained_model_name_or_path", "none.safetensors"]),
    "text for a model": (SDXL, [MODEL, "WRONG/text.safetensors"], ["text.safetensors"]),
    "a FLUX.1 file for SDXL": (SDXL, [MODEL, "FLUX"], ["pretrained_model_name_or_path", "FLUX", "SDXL"]),
    "an SDXL file for FLUX.1": (FLUX, [MODEL, "SDXL"], ["pretrained_model_name_or_path", "FLUX"]),
    "a text encoder for a model": (FLUX, [MODEL, "CLIP_L"], ["pretrained_model_name_or_path"]),
    "a text encoder for SDXL": (SDXL, [MODEL, "T5XXL"], ["pretrained_model_name_or_path"]),
    "a model for a text encoder": (FLUX, ["--clip_l", "FLUX"], ["clip_l"]),
    "one encoder for the other": (FLUX, ["--t5xxl", "CLIP_L"], ["t5xxl"]),
    "an encoder for the autoencoder": (FLUX, ["--ae", "CLIP_L"], ["ae"]),
    "no clip_l": (FLUX, ["--clip_l", "WRONG/none"], ["clip_l", "none"]),
    "no ae set": (FLUX, ["--ae", ""], ["ae is not set: choose the FLUX.1 autoencoder"]),
    "no tokenizer": (SDXL, [MODEL, "WRONG/sdxl/tiny_sdxl.safetensors"], ["tokenizer"]),
    "no VAE": (SDXL, ["--vae", "WRONG/none"], ["vae", "none"]),
    # data
    "no data": (FLUX, ["--train_data_dir", "WRONG/none"], ["train_data_dir", "none"]),
    "an empty folder": (FLUX, ["--train_data_dir", "WRONG/empty"], ["empty"]),
    "the leaf folder": (
        FLUX,
        ["--train_data_dir", "WRONG/torn/2_zorb toy"],
        ["2_zorb toy", "give the folder above it"],
    ),
    "a picture cut off": (SDXL, ["--train_data_dir", "WRONG/torn"], ["0.png", "decoded", "truncated"]),
    "no picture at all": (SDXL, ["--train_data_dir", "WRONG/odd"], ["0.png", "cannot be read"]),
    "no prompts": (SDXL, ["--sample_at_first", "--sample_prompts", "WRONG/none.txt"], ["sample_prompts", "none.txt"]),
    # what learns, and how
    "an unknown optimizer": (FLUX, ["--optimizer_type", "AdamX"], ["optimizer_type", "AdamX"]),
    "a package that is missing": (SDXL, ["--optimizer_type", "nowhere.Best"], ["nowhere.Best", "package nowhere"]),
    "an argument it has not": (SDXL, ["--optimizer_args", "weight_dekay=1"], ["weight_dekay", "weight_decay"]),
    "no LoRA to continue with": (FLUX, ["--network_weights", "WRONG/none"], ["network_weights", "none"]),
    "no state": (FLUX, ["--resume", "WRONG/none"], ["resume", "none"]),
    "no state in a folder": (FLUX, ["--resume", "WRONG/empty"], ["resume", "empty"]),
    "half a state": (FLUX, ["--resume", "WRONG/half-state"], ["resume", "optimizer.bin"]),
    # the machine
    "fp16 without a GPU": (FLUX, ["--mixed_precision", "fp16"], ["fp16 needs a GPU"]),
    "an unknown backend": (FLUX, ["--compile", "--compile_backend", "inducter"], ["compile_backend", "inducter"]),
    # where the results go
    "a name that is taken": (FLUX, ["--output_name", "taken"], ["taken.safetensors", "overwritten"]),
    "a file for a folder": (FLUX, ["--output_dir", "OUT/taken.safetensors"], ["output_dir", "is a file"]),
    "a name with folders": (FLUX, ["--output_name", "a/b"], ["output_name", "a/b"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_mistake_is_one_sentence(refused, case):
    name, flags, words = CASES[case]
    said = refused(name, *[given(flag, refused) for flag in flags])
    assert len(said) == 1, said
    missing = [word for word in words if given(word, refused) not in said[0] and word not in said[0]]
    assert not missing, said[0]


def test_all_mistakes_of_the_command_line_at_once(refused):
    said = refused(FLUX, "--lerning_rate", "1", "--seed", "x", "--network_dim", "-3", toml=refused.wrong / "typo.toml")
    assert all("is not set" in line for line in said[5:]), said  # which the file should have set
    for words in (
        ["--lerning_rate"],
        ["typo.toml", "lerning_rate"],
        ["typo.toml", "learning_rate", "'fast'"],
        ["--seed"],
        ["--network_dim"],
    ):
        assert sum(all(word in line for word in words) for line in said[:5]) == 1, (words, said)


def test_all_mistakes_of_the_files_at_once(refused):
    wrong = refused.wrong
    said = refused(
        FLUX,
        MODEL,
        given("SDXL", refused),
        "--clip_l",
        wrong / "none",
        "--train_data_dir",
        wrong / "torn",
        "--resume",
        wrong / "empty",
        "--optimizer_type",
        "nowhere.Best",
        "--mixed_precision",
        "fp16",
        "--network_weights",
        wrong / "gone",
        "--sample_at_first",
    )
    for word in ("pretrained_model", "clip_l", "decoded", "resume", "installed", "fp16", "gone", "sample_prompts"):
        assert sum(word in line for line in said) == 1, (word, said)
    assert len(said) == 8, said


def test_nothing_is_given_at_all(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(config_class(FLUX), [])
    assert ended.value.code
    said = capsys.readouterr().err.splitlines()
    assert list(tmp_path.iterdir()) == []
    for option in (MODEL[2:], "clip_l", "t5xxl", "ae", "output_dir"):
        assert sum(line.startswith(f"error: {option}") for line in said) == 1, said
    assert any("train_data_dir" in line for line in said)


def disk(monkeypatch, free):
    """Let the disk have `free()` bytes left."""
    import library.files

    usage = shutil.disk_usage("/")
    monkeypatch.setattr(library.files.shutil, "disk_usage", lambda path: usage._replace(free=free()))


def test_a_full_disk_is_seen_before_anything_begins(refused, monkeypatch):
    disk(monkeypatch, lambda: 5 * 2**20)
    (said,) = refused(FLUX)
    assert "full" in said and "5 MB" in said


def test_a_disk_that_fills_up_on_the_way_spoils_no_file(demo, squares, tmp_path, capsys, monkeypatch):
    """The first file is whole; the others do not fit any more, here or elsewhere, and there is no trace of them."""
    fresh()
    out, first = tmp_path / "out", tmp_path / "out" / "m-step00000001.safetensors"
    disk(monkeypatch, lambda: 0 if first.exists() else 10**12)
    flags = ["--output_name", "m", "--save_every_n_steps", 1]
    with pytest.raises(SystemExit) as ended:
        main(config_class(FLUX), arguments(demo.configs[FLUX], squares, out, *flags))
    assert ended.value.code == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and "not enough disk space" in said[0] and "m.safetensors" in said[0]
    assert {path.name for path in out.iterdir()} == {"runs", first.name}
    from library.runs import reader

    facts = reader.run_at(runs_in(out).pop()).facts
    assert facts["state"] == "failed" and "disk space" in str(facts["error"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume", "WRONG/state/s-state"], ["resume", "network"]),
        (["--network_weights", "WRONG/stranger.safetensors"], ["network_weights", "stranger"]),
    ],
)
def test_what_does_not_fit_the_model_is_a_sentence_before_it_is_loaded(
    refused, demo, squares, tmp_path, capsys, flags, words
):
    """So nothing has begun, and nothing is left behind."""
    fresh()
    flags = [given(flag, refused) for flag in flags]
    with pytest.raises(SystemExit) as ended:
        main(config_class(FLUX), arguments(demo.configs[FLUX], squares, tmp_path / "late", *flags))
    assert ended.value.code == 1
    err = capsys.readouterr().err
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1 and all(word in said[0] for word in words) and "Traceback" not in err, err
    assert not (tmp_path / "late").exists()


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--lerning_rate", "1"], 2, ["--lerning_rate", "learning_rate"]),
        ([MODEL, "SDXL", "--train_data_dir", "WRONG/torn"], 1, [MODEL[2:], "1 image cannot be decoded"]),
    ],
)
def test_the_script_itself_ends_with_a_code_and_without_a_traceback(refused, demo, squares, flags, code, words):
    flags = [given(flag, refused) for flag in flags]
    with untouched(refused.out, demo.folder, squares, refused.wrong):
        done = fork_server.start(
            [str(ROOT / "sd-scripts" / f"{FLUX}.py"), *arguments(demo.configs[FLUX], squares, refused.out, *flags)]
        )
        said = done.communicate()[0]
    assert done.returncode == code and "Traceback" not in said
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert all(sum(word in line for line in lines) == 1 for word in words), said


def test_a_mistake_in_a_process_of_several_is_reported_once(refused, demo, squares, tmp_path):
    """By the first process alone, whatever the launcher adds; its file cannot be read, so that none loads PyTorch."""
    from library.config.command import training_command

    (tmp_path / "torn.toml").write_text("a = [", encoding="utf-8")
    _, *launcher = training_command(tmp_path / "torn.toml", FLUX, num_processes=2)
    flags = ["--train_data_dir", str(squares), "--output_dir", str(refused.out), "--lerning", "1"]
    with untouched(refused.out, demo.folder, squares):
        started = fork_server.start([*launcher, *flags], **{fork_server.WHOLE: "1"})  # its processes are not forked
        said = started.communicate()[0]
    assert started.returncode
    assert said.count("error: --lerning is not an option") == said.count("torn.toml is not") == 1, said
