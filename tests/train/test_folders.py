"""Whole models saved as diffusers folders: what diffusers and this trainer read from them is what was saved."""

import json

import pytest
import torch
from safetensors.torch import load_file

from library import families
from library.check import preflight
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families.sdxl import random
from library.families.sdxl.options import SdxlTrain
from library.methods import full
from library.outputs import paths
from tests.training import problems_and_remarks


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A single-file checkpoint in float32."""
    return random.write_random_model(tmp_path_factory.mktemp("model"), dtype=torch.float32)


def learner_of(model, output, learn=0.25, **values):
    """A model of which a little has been learned, and the config."""
    options = {"pretrained_model_name_or_path": str(model), "output_dir": str(output), "output_name": "m"}
    config = build_config(SdxlTrain, {**options, "save_model_as": "diffusers", **values}, notes=[])
    family = families.family_for(config)
    method = full.unfreeze_model(family.load(torch.float32), family, config)
    with torch.no_grad():
        method.components.denoiser.conv_in.weight += learn
    return method, config


@pytest.fixture(scope="module")
def saved(single, tmp_path_factory):
    method, config = learner_of(single, tmp_path_factory.mktemp("output"))
    path = paths.write_result(paths.output_names(config).last, method, config, {}, (1, 1))
    return method, path


def assert_equal_weights(ours, theirs):
    """Whatever a version of transformers calls them."""
    a, b = ({n.removeprefix("text_model."): t for n, t in net.state_dict().items()} for net in (ours, theirs))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_diffusers_reads_a_saved_folder(saved):
    from diffusers import StableDiffusionXLPipeline

    method, path = saved
    pipe = StableDiffusionXLPipeline.from_pretrained(path, dtype=torch.float32)
    parts = method.components
    for ours, theirs in (
        (parts.denoiser, pipe.unet),
        (parts.vae, pipe.vae),
        (parts.encoders["clip_l"], pipe.text_encoder),
        (parts.encoders["clip_g"], pipe.text_encoder_2),
    ):
        assert_equal_weights(ours, theirs)
    assert type(pipe.scheduler).__name__ == "EulerDiscreteScheduler"
    words = "a red circle"
    assert pipe.tokenizer.model_max_length == pipe.tokenizer_2.model_max_length == 77
    sampled = pipe(words, num_inference_steps=1, height=64, width=64, output_type="latent").images
    assert sampled.shape == (1, 4, 8, 8) and sampled.isfinite().all()
    assert pipe.tokenizer(words).input_ids == parts.tokenizers["clip_l"](words).input_ids
    assert pipe.tokenizer_2.pad_token_id == parts.tokenizers["clip_g"].pad_token_id
    ids = pipe.tokenizer_2(words, padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = parts.encoders["clip_g"](ids, output_hidden_states=True)
        output = pipe.text_encoder_2(ids, output_hidden_states=True)
        torch.testing.assert_close(output.text_embeds, expected.text_embeds)
        torch.testing.assert_close(output.hidden_states[-2], expected.hidden_states[-2])
        x, context = torch.randn(1, 4, 8, 8), torch.randn(1, 77, 192)
        added = {"text_embeds": torch.randn(1, 128), "time_ids": torch.ones(1, 6)}
        first, other = (
            net(x, 7, context, added_cond_kwargs=added).sample for net in (pipe.unet.eval(), parts.denoiser)
        )
        torch.testing.assert_close(first, other)
        latents = torch.randn(1, 4, 8, 8)
        torch.testing.assert_close(pipe.vae.decode(latents).sample, parts.vae.decode(latents).sample)
    assert pipe.vae.config.force_upcast and pipe.vae.config.scaling_factor == 0.13025


def test_a_saved_folder_is_read_back_here(saved, single, tmp_path):
    method, path = saved
    again, _ = learner_of(path, tmp_path, learn=0)
    for part in ("denoiser", "vae"):
        assert_equal_weights(getattr(method.components, part), getattr(again.components, part))
    first, other = method.state_dict(), again.state_dict()
    assert first.keys() == other.keys() == load_file(single).keys()
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert not list(again.family.problems())


def test_the_source_decides_when_nothing_is_reported(saved, tmp_path):
    method, config = learner_of(saved[1], tmp_path, save_model_as=None, v_parameterization=True)
    path = paths.write_result(paths.output_names(config).epoch(2), method, config, {}, (2, 1))
    assert path.is_dir() and path.name == "m-000002"
    scheduler = json.loads((path / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction" and scheduler["timestep_spacing"] == "leading"


def test_save_precision_holds_for_all_parts(single, tmp_path):
    method, config = learner_of(single, tmp_path, save_precision="fp16", save_model_as="diffusers_safetensors")
    path = paths.write_result(paths.output_names(config).last, method, config, {}, (1, 1))
    files = sorted(path.rglob("*.safetensors"))
    assert [file.parent.name for file in files] == ["text_encoder", "text_encoder_2", "unet", "vae"]
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {torch.float16}
    assert method.components.denoiser.conv_in.weight.dtype == torch.float32


def test_a_folder_is_there_whole_or_not_at_all(single, tmp_path, monkeypatch):
    method, config = learner_of(single, tmp_path)
    path = paths.output_names(config).last
    path.mkdir()
    (path / "good").touch()
    monkeypatch.setattr("library.files.free_space", lambda _: 10)
    with pytest.raises(ConfigError, match="disk space"):
        paths.write_result(path, method, config, {}, (1, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["m"] and (path / "good").exists()
    monkeypatch.undo()
    paths.write_result(path, method, config, {}, (1, 1))
    assert [p.name for p in tmp_path.iterdir()] == ["m"] and not (path / "good").exists()
    paths.remove_outdated(path)
    assert not path.exists()


def test_a_full_disk_says_how_much_must_be_free(single, tmp_path, monkeypatch):
    _, config = learner_of(single, tmp_path)
    for free, is_enough in ((40, False), (63, False), (64, True)):
        monkeypatch.setattr(preflight, "free_space", lambda _, free=free: free << 20)
        said = " ".join(str(problem) for problem in problems_and_remarks(config)[0])
        assert (f"full: {free} MB left, 64 MB needed" in said) != is_enough
