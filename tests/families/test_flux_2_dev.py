"""FLUX.2 dev with its text encoder, Mistral: against diffusers' pipeline, and in the layouts that it comes in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from library import families
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families.base import SampleRequest
from library.families.flux_2 import random, text_encoder
from library.families.flux_2.random import diffusers_settings
from library.families.shared import autoencoder, packing
from tests import double_stream
from tests.training import config_of, pictures, train

SCRIPT = "flux_2_train_network"
CAPTIONS = ["a red circle", "a drawing of a blue square, simple, flat colors", "", "a [IMG]red circle " * 300]
# What the published processor makes of a system message and a user's, as text.
CONVERSATION = "<s>[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT][INST]{user}[/INST]"


def family(files, **values):
    options = {
        "pretrained_model_name_or_path": files["flux_2"],
        "text_encoder": files["text_encoder"],
        "vae": files["vae"],
        "model_version": "dev",
        **values,
    }
    options = {name: str(value) for name, value in options.items() if value is not None}
    return families.family_for(build_config(families.config_class(SCRIPT), options))


def said(files, **values):
    return [str(problem) for problem in family(files, **values).problems()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    sizes = random.replace(random.TINY, guidance=True)
    return random.write_random_model(tmp_path_factory.mktemp("dev"), dtype=torch.float32, sizes=sizes)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


@pytest.fixture(scope="module")
def pipeline(files, own):
    """diffusers' pipeline with the same weights in its own networks."""
    from diffusers import (
        AutoencoderKLFlux2,
        FlowMatchEulerDiscreteScheduler,
        Flux2Pipeline,
        Flux2Transformer2DModel,
    )
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    tensors = load_file(files["text_encoder"])
    config = Mistral3Config(
        text_config={
            "model_type": "mistral",
            "vocab_size": len(tensors["model.embed_tokens.weight"]),
            "hidden_size": 48,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e9},
        },
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 32,
            "image_size": 28,
            "patch_size": 14,
        },
    )
    encoder = Mistral3ForConditionalGeneration(config).eval()
    words = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    encoder.model.language_model.load_state_dict(words, strict=True)
    tokenizer = own[1].tokenizers["text_encoder"]

    def processor(conversations, **how):
        texts = [
            CONVERSATION.format(system=system["content"][0]["text"], user=user["content"][0]["text"])
            for system, user in conversations
        ]
        arguments = {name: how[name] for name in ("padding", "truncation", "max_length", "return_tensors")}
        return tokenizer(texts, add_special_tokens=False, padding_side="left", **arguments)

    denoiser = Flux2Transformer2DModel(**diffusers_settings(own[1].denoiser.sizes)).eval()
    denoiser.load_state_dict(double_stream.flux_2_to_diffusers(own[1].denoiser.state_dict()), strict=True)
    other = AutoencoderKLFlux2(block_out_channels=random.TINY.vae_widths).eval()
    other.load_state_dict(autoencoder.vae_to_diffusers(load_file(files["vae"])), strict=True)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = Flux2Pipeline(scheduler, other, None, None, denoiser)
    pipe.register_modules(text_encoder=encoder)
    pipe.tokenizer = SimpleNamespace(apply_chat_template=processor)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_captions_are_encoded_as_the_pipeline_does(own, pipeline):
    with torch.no_grad():
        actual = own[0].text(own[1], CAPTIONS)["ctx_vec"]
        expected = pipeline.encode_prompt(CAPTIONS, text_encoder_out_layers=(1, 2, 3))[0]
    assert actual.shape == (4, 512, 144)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_a_preview_equals_the_pipelines_image(own, pipeline):
    request = SampleRequest(CAPTIONS[1], "", width=96, height=64, steps=2, scale=1.0, guidance=3.0, seed=5)
    noise = torch.randn(1, 128, 4, 6, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        actual = own[0].sampler(own[1])(request)
        (expected,) = pipeline(
            prompt=CAPTIONS[1],
            height=64,
            width=96,
            num_inference_steps=2,
            guidance_scale=3.0,
            latents=noise,
            text_encoder_out_layers=(1, 2, 3),
        ).images
    assert np.abs(np.asarray(actual, np.int16) - np.asarray(expected, np.int16)).max() <= 1


@pytest.mark.parametrize("scale", [1.0, 3.5])
def test_a_training_gives_the_model_the_guidance_of_its_option(files, own, pipeline, scale):
    from diffusers import Flux2Pipeline

    model_family = family(files, guidance_scale=scale)
    noised = model_family.noised(torch.randn(1, 32, 8, 12), torch.Generator().manual_seed(0))
    with torch.no_grad():
        text = own[0].text(own[1], CAPTIONS[:1])
        actual = model_family.predict(own[1].denoiser, noised, text, torch.ones(1, 6))
        expected = pipeline.transformer(
            packing.pack(noised.latents),
            text["ctx_vec"],
            noised.timesteps,
            Flux2Pipeline._prepare_latent_ids(torch.zeros(1, 128, 4, 6)),
            Flux2Pipeline._prepare_text_ids(text["ctx_vec"]),
            torch.tensor([scale]),
            return_dict=False,
        )[0]
    torch.testing.assert_close(actual, packing.unpack(expected, 4, 6), rtol=1e-4, atol=1e-5)


def test_the_layouts_of_its_text_encoder_are_the_same_network(files, own, tmp_path):
    """ComfyUI's file has the layers that are needed and no norm behind them; others see pictures, too."""
    stored = load_file(files["text_encoder"])
    seeing = {"vision_tower.transformer.layers.0.attention.q_proj.weight": torch.zeros(2, 2)}
    needed = {name: tensor for name, tensor in stored.items() if not name.startswith(("model.layers.3.", "model.norm"))}
    layouts = {
        "whole": {name.replace("model.", "language_model.model.", 1): value for name, value in stored.items()} | seeing,
        "newer": {name.replace("model.", "model.language_model.", 1): value for name, value in stored.items()},
        "comfyui": needed | seeing | {"tekken_model": torch.zeros(9, dtype=torch.uint8)},
    }
    expected = own[1].encoders["text_encoder"].state_dict()
    for name, tensors in layouts.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        assert said(files, text_encoder=tmp_path / f"{name}.safetensors") == []
        encoder = text_encoder.load_short_mistral(tmp_path / f"{name}.safetensors", torch.float32).state_dict()
        assert encoder.keys() == expected.keys() and all(torch.equal(encoder[key], expected[key]) for key in encoder)


def test_what_does_not_fit_is_reported_before_anything_is_loaded(files, tmp_path):
    klein = random.write_random_model(tmp_path / "klein")
    (problem,) = said(files, text_encoder=klein["text_encoder"])
    assert "is a Qwen3 text encoder; expected the Mistral text encoder of FLUX.2 dev" in problem
    (problem,) = said(klein, model_version="klein-base-4b", text_encoder=files["text_encoder"])
    assert "is a Mistral text encoder; expected the Qwen3-4B" in problem
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle", encoding="utf-8")
    without = said(files, text_encoder=None, sample_prompts=prompts, cache_text_encoder_outputs_to_disk=False)
    assert ["is needed: give the Mistral" in without[0], "cannot be sampled" in without[1]] == [True, True]
    assert said(files, text_encoder=None, cache_text_encoder_outputs_to_disk=True) == []


def test_dev_trains_from_nothing_and_again_from_its_caches_alone(files, demo, tmp_path):
    data = pictures(tmp_path / "data", ((64, 64),), repeats=1)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --s 1", encoding="utf-8")
    options = {
        "pretrained_model_name_or_path": str(files["flux_2"]),
        "text_encoder": str(files["text_encoder"]),
        "vae": str(files["vae"]),
        "model_version": "dev",
        "train_data_dir": data,
        "max_train_steps": 2,
        "resolution": "64",
        "cache_text_encoder_outputs_to_disk": True,
    }
    previews = {"sample_prompts": str(prompts), "sample_every_n_steps": 2}
    first = train(config_of(demo, SCRIPT, **options, **previews, output_dir=tmp_path / "first"))
    assert len(first.events("sample")) == 1
    (cached,) = data.rglob("*_f2d_te.safetensors")
    assert [tuple(tensor.shape) for tensor in load_file(cached).values()] == [(512, 144)]
    options |= {"text_encoder": None, "sample_prompts": None}
    assert train(config_of(demo, SCRIPT, **options, output_dir=tmp_path / "again")).losses == first.losses
    cached.unlink()
    with pytest.raises(ConfigError, match="there is no text encoder for . captions? not cached yet"):
        train(config_of(demo, SCRIPT, **options, output_dir=tmp_path / "lost"))
