"""A folder may be given for a file: of several files the one that fits is taken, by its header, in every family."""

import shutil
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.config.problems import ConfigError
from library.families import recognition
from library.families.shared import chosen_file, folder_checkpoints, unet_checkpoint
from library.families.shared.weights import files as files_of
from tests.training import config_of

FAMILIES = sorted(families.FAMILIES)
UNETS = ["sd15", "sdxl"]


def options_of_files(config):
    """The options that name files of this model."""
    names = [field.name for field in fields(type(config.model))]
    values = {name: getattr(config.model, name) for name in names}
    return {name: value for name, value in values.items() if str(value).endswith(".safetensors")}


@pytest.fixture(scope="module")
def crowded(demo, tmp_path_factory):
    """A function: family -> its config whose options all name one folder, where its files, under names that say
    nothing, stand among a LoRA file, a damaged file and models of other families."""

    def make(name, **more):
        folder = tmp_path_factory.mktemp(name)
        config = config_of(demo, families.lora_script(name))
        files = options_of_files(config)
        for number, (option, path) in enumerate(files.items()):
            shutil.copy(path, folder / f"m{number}-{option}.safetensors")
        save_file({"lora_unet_a.lora_down.weight": torch.zeros(1, 2)}, folder / "a-lora.safetensors")
        (folder / "b-damaged.safetensors").write_bytes(b"\0" * 20)
        stranger = "sdxl" if name != "sdxl" else "sd15"
        shutil.copy(demo.models[stranger][stranger], folder / "c-stranger.safetensors")
        for tokenizer in next(iter(demo.models[name].values())).parent.iterdir():
            if tokenizer.is_dir():
                shutil.copytree(tokenizer, folder / tokenizer.name)
        return folder, files, config_of(demo, families.lora_script(name), **dict.fromkeys(files, folder), **more)

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_that_fits_is_taken_for_every_part(demo, crowded, name):
    _, files, config = crowded(name)
    family = families.family_for(config)
    assert [str(problem) for problem in family.problems()] == []
    expected = families.family_for(config_of(demo, families.lora_script(name), **files)).load(torch.float32)
    loaded = family.load(torch.float32)
    for ours, other in ((loaded.denoiser, expected.denoiser), (loaded.vae, expected.vae)):
        states = ours.state_dict(), other.state_dict()
        assert states[0].keys() == states[1].keys()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
    assert loaded.encoders.keys() == expected.encoders.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_several_that_fit_and_none_are_named_with_the_option(crowded, name):
    option = "pretrained_model_name_or_path"
    folder, files, config = crowded(name)
    (model,) = folder.glob(f"m*-{option}.safetensors")
    model.rename(folder / "one.safetensors")
    shutil.copy(folder / "one.safetensors", folder / "two.safetensors")
    (problem,) = [found for found in families.family_for(config).problems() if found.option == option]
    assert "more than one file" in str(problem) and "one.safetensors, two.safetensors; give one of them" in str(problem)
    (folder / "one.safetensors").unlink()
    (folder / "two.safetensors").unlink()
    (problem,) = [found for found in families.family_for(config).problems() if found.option == option]
    assert "none of the files in" in str(problem) and "a-lora.safetensors, b-damaged.safetensors" in str(problem)


def names(*suffixes):
    return [f"model{suffix}" for suffix in suffixes]


SHARDS = names("-00001-of-00002.safetensors", "-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (names(".safetensors"), names(".safetensors")),
        (names(".safetensors", ".fp16.safetensors", ".non_ema.safetensors"), names(".safetensors")),
        (names(".fp16.safetensors"), names(".fp16.safetensors")),
        ([*SHARDS, "model.safetensors.index.json"], ["model.safetensors.index.json"]),
        (SHARDS, SHARDS[:1]),
        ([*SHARDS, "other.safetensors", "._model.safetensors"], [SHARDS[0], "other.safetensors"]),
        (names(".safetensors.index.json", ".safetensors.index.fp16.json"), names(".safetensors.index.json")),
        (["a_fp16.safetensors", "a_fp8_e4m3fn.safetensors"], ["a_fp16.safetensors", "a_fp8_e4m3fn.safetensors"]),
        (["config.json", "model.bin"], []),
    ],
)
def test_files_of_one_checkpoint_count_once(tmp_path, files, expected):
    for name in files:
        (tmp_path / name).touch()
    assert [path.name for path in folder_checkpoints.checkpoints(tmp_path)] == expected


@pytest.mark.parametrize(
    ("names_in_it", "expected"),
    [
        (["a-lora.safetensors", "model.safetensors"], "model.safetensors"),
        (["a.safetensors", "diffusion_pytorch_model.fp16.safetensors"], "a.safetensors"),
        (["diffusion_pytorch_model.safetensors", "a.safetensors", "b.bin"], "diffusion_pytorch_model.safetensors"),
        (["b.safetensors", "a.safetensors"], "a.safetensors"),
    ],
)
def test_a_part_of_a_diffusers_folder_is_what_diffusers_reads(tmp_path, names_in_it, expected):
    for name in names_in_it:
        (tmp_path / name).touch()
    assert [path.name for path in files_of(tmp_path)] == [expected]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"my": True, "other": False}, "my"),
        ({"my": True, "model": True}, "model"),  # what transformers reads
        ({"my": True, "usual": True, "model": True}, "usual"),
        ({"my": True, "your": True}, "more than one file"),
        ({"my": False, "your": False}, "none of the files"),
        ({"my": False}, ""),  # alone: what it is is said where it is read
    ],
)
def test_usual_names_decide_between_several_that_fit(tmp_path, kinds, expected):
    for name, fits in kinds.items():
        save_file({"a.marker" if fits else "b": torch.zeros(1)}, tmp_path / f"{name}.safetensors")
    wanted = chosen_file.Wanted("vae", "a VAE", ("a VAE",), (".marker",), ("usual.safetensors",))
    if " " in expected:
        with pytest.raises(ConfigError, match=rf"--vae: .*{expected}.* my.safetensors, your.safetensors; give"):
            chosen_file.inside(tmp_path, wanted)
        return
    found = chosen_file.inside(tmp_path, wanted)
    assert found == (tmp_path / f"{expected}.safetensors" if expected else tmp_path)


def test_shards_of_a_transformer_are_read_beside_another_file(demo, tmp_path):
    config = config_of(demo, "flux_train_network")
    tensors = load_file(config.model.pretrained_model_name_or_path)
    halves = [dict([*tensors.items()][start::2]) for start in (0, 1)]
    for number, half in enumerate(halves, 1):
        save_file({k: v.clone() for k, v in half.items()}, tmp_path / f"tuned-0000{number}-of-00002.safetensors")
    shutil.copy(config.model.ae, tmp_path / "an-ae.safetensors")
    family = families.family_for(config_of(demo, "flux_train_network", pretrained_model_name_or_path=tmp_path))
    assert list(family.problems()) == []
    assert len(files_of(family.files.located(family.config, "denoiser"))) == 2


@pytest.mark.parametrize("name", UNETS)
def test_a_vae_of_other_latents_is_not_taken(demo, tmp_path, name):
    ae = config_of(demo, "flux_train_network").model.ae
    stored = load_file(demo.models[name][name])
    vae = {key.removeprefix("first_stage_model."): t for key, t in stored.items() if key.startswith("first_stage")}
    save_file({key: tensor.clone() for key, tensor in vae.items()}, tmp_path / "z.safetensors")
    shutil.copy(ae, tmp_path / "a.safetensors")
    found = unet_checkpoint.located_vae(tmp_path)
    assert found.name == "z.safetensors"
    config = config_of(demo, families.lora_script(name), vae=tmp_path)
    assert list(families.family_for(config).problems()) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_is_recognised_by_the_models_in_it(demo, crowded, tmp_path, name):
    folder, _, _ = crowded(name)
    assert recognition.recognise_file(folder).words == "a folder with models of several kinds"
    (folder / "c-stranger.safetensors").unlink()
    (model,) = folder.glob("m*-pretrained_model_name_or_path.safetensors")
    assert recognition.recognise_file(folder) == recognition.recognise_file(model)
    shutil.copy(model, folder / "z.safetensors")
    assert recognition.recognise_file(folder).family == name
    model.unlink()
    (folder / "z.safetensors").unlink()
    assert recognition.recognise_file(folder) == recognition.Recognised("", "a folder without a model")
