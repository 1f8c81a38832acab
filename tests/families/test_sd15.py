"""SD 1.5: its files and outputs beside diffusers, its names, and how long its text encoder learns."""

from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from library import methods
from library.config.building import build_config
from library.config.problems import ConfigError
from library.families import facts_of, family_for
from library.families.base import ModelComponents, SampleRequest
from library.families.facts import block_of_adapter
from library.families.sd15 import keys, model, random
from library.families.sd15.network_args import Sd15Args
from library.families.sd15.options import Sd15DreamBooth, Sd15Finetune, Sd15Lora
from library.families.shared import unet_sampler
from library.objectives.base import NoisedBatch
from library.train.step import updates

CAPTIONS = ["a photo of a cat, " * 9, "red"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("sd15"), dtype=torch.float32)


@pytest.fixture(scope="module")
def parts(tiny):
    return family(tiny).load(torch.float32)


@pytest.fixture(scope="module")
def pipeline(tiny, parts, tmp_path_factory):
    """diffusers' pipeline of the single file, which reads its settings from the folder that a training writes."""
    from diffusers import StableDiffusionPipeline

    folder = tmp_path_factory.mktemp("sd15_folder")
    family(tiny).write_folder(
        parts, folder, lambda path, tensors: save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    )
    loaded = StableDiffusionPipeline.from_single_file(str(tiny), config=str(folder), local_files_only=True)
    loaded.set_progress_bar_config(disable=True)
    loaded.folder = folder
    return loaded


def family(path, config=Sd15Lora, **options):
    return family_for(build_config(config, {"pretrained_model_name_or_path": str(path), **options}))


def same(first, other):
    return first.keys() == other.keys() and all(torch.equal(first[name], other[name]) for name in first)


def test_a_single_file_and_a_folder_load_as_in_diffusers_and_are_exported_bit_for_bit(tiny, parts, pipeline):
    assert list(family(tiny).problems()) == [] and same(family(tiny).export(parts), load_file(tiny))
    ours = (parts.denoiser, parts.vae, parts.encoders["clip_l"])
    for their, our in zip((pipeline.unet, pipeline.vae, pipeline.text_encoder), ours, strict=True):
        assert same(their.state_dict(), our.state_dict())
    assert parts.vae.config.scaling_factor == pipeline.vae.config.scaling_factor == 0.18215
    folder = family(pipeline.folder)
    assert list(folder.problems()) == [] and same(folder.export(folder.load(torch.float32)), load_file(tiny))


def test_outputs_and_gradients_are_those_of_diffusers(tiny, parts, pipeline):
    """Of latents with odd sides, and captions of unequal lengths over three chunks."""
    loaded, generator = family(tiny, max_token_length=225), torch.Generator().manual_seed(0)
    with torch.no_grad():
        text = loaded.text(parts, CAPTIONS)
    latents = torch.randn(2, 4, 9, 13, generator=generator).requires_grad_(True)
    states = text["hidden_state"].clone().requires_grad_(True)
    times = torch.tensor([3.0, 900.0])
    noised = NoisedBatch(latents, times, latents, torch.ones(2))
    parts.denoiser.requires_grad_(True)
    watched = [parts.denoiser.down_blocks[0].attentions[0].proj_in.weight, latents, states]
    theirs = [pipeline.unet.down_blocks[0].attentions[0].proj_in.weight, *watched[1:]]
    answer = loaded.predict(parts.denoiser, noised, {"hidden_state": states}, torch.zeros(2, 6))
    expected = pipeline.unet(latents, times, states).sample
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=1e-5)
    gradients = torch.autograd.grad(answer.square().sum(), watched)
    for ours, other in zip(gradients, torch.autograd.grad(expected.square().sum(), theirs), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-5)
    parts.denoiser.requires_grad_(False)


@pytest.mark.parametrize("skip", [None, 1, 2])
def test_the_text_is_that_of_transformers(skip, tiny, parts, pipeline):
    encoder, tokenizer = pipeline.text_encoder, pipeline.tokenizer
    ids = tokenizer(CAPTIONS, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
    with torch.no_grad():
        states = encoder(ids, output_hidden_states=True)
        inner = getattr(encoder, "text_model", encoder)
        expected = inner.final_layer_norm(states.hidden_states[-skip]) if skip == 2 else states.last_hidden_state
        text = family(tiny, clip_skip=skip).text(parts, CAPTIONS)
        heavy = family(tiny, clip_skip=skip, weighted_captions=True).text(parts, ["(red:1.5)"])
    assert torch.equal(text["hidden_state"], expected)
    torch.testing.assert_close(heavy["hidden_state"][0, 1], 1.5 * expected[1, 1])


def test_a_preview_is_what_diffusers_generates(tiny, parts, pipeline):
    pipeline.scheduler = unet_sampler.scheduler("euler_a", False)
    shared = {"height": 64, "width": 72, "num_inference_steps": 4, "guidance_scale": 5.0}
    theirs = pipeline("a cat", negative_prompt="bad", generator=torch.Generator().manual_seed(5), **shared).images[0]
    ours = family(tiny).sampler(parts)(SampleRequest("a cat", "bad", 72, 64, 4, 5.0, None, 5, "euler_a"))
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


def test_names_at_full_size_are_those_of_sd_scripts():
    """264 modules: 192 of the U-Net under diffusers' names, and 72 of the text encoder under lora_te_."""
    networks = random.make_networks(random.FULL)
    config = build_config(Sd15Lora, {"pretrained_model_name_or_path": "x.safetensors", "network_dim": 1})
    components = ModelComponents(networks.denoiser(), None, {"clip_l": networks.encoders["clip_l"]()}, {})
    names = list(methods.attach_method(components, family_for(config), config).adapters)
    assert len(names) == 264 and sum(name.startswith("lora_te_text_model_encoder_layers_") for name in names) == 72
    assert {
        "lora_unet_down_blocks_0_attentions_0_proj_in",
        "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_out_0",
        "lora_unet_up_blocks_3_attentions_2_transformer_blocks_0_ff_net_0_proj",
    } <= {*names}
    blocks = Counter(block_of_adapter(name, facts_of("sd15").blocks) for name in names if "unet" in name)
    assert set(blocks.values()) == {12} and len(blocks) == 16
    single = keys.SD15_FILE.to_single("denoiser", networks.denoiser().state_dict())
    assert len(single) == 686 and single["model.diffusion_model.output_blocks.8.2.conv.weight"].shape[0] == 640
    assert single["model.diffusion_model.input_blocks.1.1.proj_in.weight"].shape == (320, 320, 1, 1)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("lora_unet_down_blocks_0_attentions_0_proj_in", 1),
        ("lora_unet_down_blocks_2_downsamplers_0_conv", 9),
        ("lora_unet_down_blocks_3_resnets_1_conv1", 11),
        ("lora_unet_mid_block_attentions_0_proj_in", 12),
        ("lora_unet_up_blocks_0_resnets_0_conv1", 13),
        ("lora_unet_up_blocks_2_upsamplers_0_conv", 21),
        ("lora_unet_up_blocks_3_attentions_2_proj_out", 24),
    ],
)
def test_blocks_are_counted_as_in_sd_scripts(name, number):
    assert Sd15Args().num_blocks == 25 and Sd15Args().block_of(name) == number


def test_files_that_are_something_else_are_refused_with_the_fix(tiny, tmp_path):
    stored, some = load_file(tiny), torch.zeros(1)
    first = "model.diffusion_model.input_blocks.0.0.weight"
    cases = {
        "inpainting": (stored | {first: torch.zeros(32, 9, 3, 3)}, "takes 9 channels instead of 4"),
        "xl": ({first: some, "conditioner.embedders.1.x": some.clone()}, "is an SDXL checkpoint: train it with sdxl_"),
        "v2": ({first: some, "cond_stage_model.model.x": some.clone()}, "is an SD 2 checkpoint, not an SD 1.5"),
        "half": ({n: t for n, t in stored.items() if "cond_stage" not in n}, "has no text encoders"),
        "cut": ({n: t for n, t in stored.items() if "output_blocks.11.0.out_layers.3" not in n}, "not complete"),
    }
    for name, (tensors, words) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path)
        (problem,) = family(path, tokenizer_cache_dir=str(tiny.parent)).problems()
        assert words in str(problem), name
    with pytest.raises(ConfigError, match="Stable Diffusion 2.x is not trained here"):
        family(tiny, v2=True)


def test_the_text_encoder_learns_up_to_its_step(tiny):
    config = build_config(
        Sd15DreamBooth,
        {"pretrained_model_name_or_path": str(tiny), "stop_text_encoder_training": 1, "learning_rate": 1e-3},
    )
    loaded = family_for(config)
    components = loaded.load(torch.float32)
    method = methods.attach_method(components, loaded, config)
    assert [group["name"] for group in method.groups()] == ["unet", "text_encoder"]
    stepped = updates.Updates.__new__(updates.Updates)
    stepped._method, stepped._encoder_steps, stepped._limit = method, config.encoder_steps, 0
    stepped._swap, stepped._early = None, False
    for done, learns in ((0, True), (1, False)):
        for parameter in method.parameters():
            parameter.grad = torch.ones_like(parameter)
        stepped.clip(done)
        assert all((p.grad is not None) == learns for p in components.encoders["clip_l"].parameters())
        assert all(p.grad is not None for p in components.denoiser.parameters())
    never = build_config(Sd15DreamBooth, {"stop_text_encoder_training": -1})
    assert not never.trains_whole_encoders and build_config(Sd15DreamBooth, {}).trains_whole_encoders
    assert not build_config(Sd15Finetune, {}).trains_whole_encoders


def test_skipped_layers_of_the_text_encoder_are_not_trained(tiny):
    loaded = family(tiny, Sd15DreamBooth, clip_skip=2)
    components = loaded.load(torch.float32)
    methods.attach_method(components, loaded, loaded.config)
    frozen = {name for name, p in components.encoders["clip_l"].named_parameters() if not p.requires_grad}
    assert frozen and all("encoder.layers.2." in name for name in frozen)


def test_the_published_size_has_eight_heads():
    unet = random.make_networks(random.FULL).denoiser()
    assert model.CHECKPOINTS.heads == 8 == unet.config.attention_head_dim


def test_clip_skip_beyond_the_layers_of_the_text_encoder_is_one_sentence(tiny, pipeline):
    for path in (tiny, pipeline.folder):
        (problem,) = family(path, clip_skip=12).problems()
        assert problem.option == "clip_skip" and "has no more layers" in str(problem)
        assert list(family(path, clip_skip=problem.fix["clip_skip"]).problems()) == []
