"""FLUX.2's networks against diffusers' and transformers', with the same weights."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from library.families.base import SampleRequest
from library.families.flux_2 import keys, random, sampler, text_encoder
from library.families.flux_2.model import Flux2Positions
from library.families.flux_2.random import diffusers_settings
from library.families.shared import autoencoder, packing, statistics_vae
from library.families.shared.double_stream import BlockLayers, DoubleStreamBlock, SingleStreamBlock
from library.families.shared.sampler import crop_to_tokens
from library.families.shared.transformer import rope
from tests import double_stream
from tests.families import alike, wide

CAPTIONS = ["a red circle", "a drawing of a blue square, simple, flat colors, on a wooden table, best quality"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CPU = torch.device("cpu")


def family(files, script="flux_2_train_network", **values):
    usual = {"cache_text_encoder_outputs_to_disk": True, "model_version": "klein-base-4b"}
    return alike.family_of(files, "flux_2", script, values, **usual)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("flux_2"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


def theirs_of(denoiser):
    """The transformer in diffusers with the same weights."""
    from diffusers import Flux2Transformer2DModel

    model = Flux2Transformer2DModel(**diffusers_settings(denoiser.sizes))
    model.load_state_dict(double_stream.flux_2_to_diffusers(denoiser.state_dict()), strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def theirs(own):
    return theirs_of(own[1].denoiser)


@pytest.mark.parametrize("kind", ["klein", "klein with references", "dev"])
def test_the_denoiser_and_its_gradients_equal_diffusers(own, theirs, tmp_path, kind):
    ours, other = own[1].denoiser, theirs
    guidance = None
    if kind == "dev":
        sizes = random.replace(random.TINY, guidance=True)
        files = random.write_random_model(tmp_path, dtype=torch.float32, sizes=sizes)
        ours = family(files, model_version="dev").load(torch.float32).denoiser
        other, guidance = theirs_of(ours), torch.tensor([1.0, 3.5])
    references = [(2, 4), (3, 2)] if kind == "klein with references" else []
    tokens = 4 * 6 + sum(height * width for height, width in references)
    generator = torch.Generator().manual_seed(0)
    img = torch.randn(2, tokens, 128, generator=generator).requires_grad_()
    txt, times = torch.randn(2, 40, 144, generator=generator), torch.tensor([0.3, 0.8])
    places = own[0].positions
    ids = places.image(4, 6, CPU, references), places.text(40, CPU)
    if references:
        assert ids[0][24:, 0].unique().tolist() == [10.0, 20.0] and ids[0][24].tolist() == [10, 0, 0, 0]
    actual, by_us = alike.output_and_gradients(
        ours, {"img": img}, lambda: ours(img, ids[0], txt, ids[1], times, guidance)
    )
    expected, by_them = alike.output_and_gradients(
        other, {"img": img}, lambda: other(img, txt, times, ids[0], ids[1], guidance, return_dict=False)[0]
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    by_us = {"img": by_us.pop("img"), **double_stream.flux_2_to_diffusers(by_us)}
    assert by_us.keys() == by_them.keys()
    alike.assert_gradients_close(by_us, by_them, 1e-6)


def test_blocks_of_full_width_equal_diffusers():
    from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock

    sizes = random.flux_2_shape(random.FULL)
    layers = BlockLayers(sizes.hidden, sizes.head, sizes.mlp, external_modulation=True, bias=False, gated=True)
    assert sizes.axes == (32, 32, 32, 32)
    torch.manual_seed(0)
    places = Flux2Positions()
    pe = rope(torch.cat((places.text(3, CPU), places.image(2, 3, CPU))), sizes.axes, 2000.0)
    angles = tuple(table.repeat_interleave(2, dim=-1) for table in pe)
    img, txt = torch.randn(1, 6, sizes.hidden), torch.randn(1, 3, sizes.hidden)
    mods = [torch.randn(1, 1, 3 * n * sizes.hidden) / 4 for n in (2, 2, 1)]
    for block, kind in ((DoubleStreamBlock, Flux2TransformerBlock), (SingleStreamBlock, Flux2SingleTransformerBlock)):
        double = block is DoubleStreamBlock
        with torch.device("meta"):
            ours, other = block(layers), kind(sizes.hidden, 24, 128)
        wide.filled(ours)
        before = f"{'double' if double else 'single'}_blocks.0."
        pairs = {name: sources for name, sources in keys.TREES.pairs(1, 1, False) if name.startswith(before)}
        state = {before + name: tensor for name, tensor in ours.state_dict().items()}
        named = double_stream.split_tensors(state, pairs.items(), double_stream.in_equal_pieces)
        other.load_state_dict({n.split(".", 2)[2]: t for n, t in named.items()}, strict=True, assign=True)
        with torch.no_grad():
            if double:
                vec = torch.cat(mods[:2], dim=-1).unflatten(-1, (12, -1))[:, 0]
                actual, expected = ours(img, txt, vec, pe), other(img, txt, *mods[:2], angles)[::-1]
            else:
                joint = torch.cat((txt, img), 1)
                vec = mods[2].unflatten(-1, (3, -1))[:, 0]
                actual, expected = ours(joint, vec, pe), other(joint, None, mods[2], angles)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "parameters", "layers"),
    [(random.FULL, 3_875_544_576, 80), (random.LARGE, 9_078_581_248, 112), (random.DEV, 32_223_281_152, 160)],
    ids=["klein 4B", "klein 9B", "dev"],
)
def test_full_models_have_the_parameters_of_diffusers(sizes, parameters, layers):
    from diffusers import Flux2Transformer2DModel

    from library.families.flux_2.keys import LORA_NAMES

    ours = random.make_networks(sizes).denoiser()
    with torch.device("meta"):
        other = Flux2Transformer2DModel(**diffusers_settings(ours.sizes))
    shapes = [
        {n: t.shape for n, t in state.items()}
        for state in (double_stream.flux_2_to_diffusers(ours.state_dict()), other.state_dict())
    ]
    assert shapes[0] == shapes[1] and sum(p.numel() for p in ours.parameters()) == parameters
    stored = {f"model.diffusion_model.{name}": tuple(t.shape) for name, t in ours.state_dict().items()}
    assert len([*LORA_NAMES.layers(stored, convolutions=False)]) == layers


def test_the_layers_that_are_read_are_those_of_the_published_encoders():
    assert [text_encoder.skipped(layers) for layers in (36, 40, 4)] == [9, 10, 1]  # 27, 30 and 3 are left


@pytest.fixture(scope="module")
def pipeline(files, own, theirs):
    """diffusers' pipeline with the same weights in its own networks."""
    from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline

    encoder = alike.qwen3_of(files["text_encoder"], 48, 4)
    other = AutoencoderKLFlux2(block_out_channels=random.TINY.vae_widths)
    other.load_state_dict(autoencoder.vae_to_diffusers(load_file(files["vae"])), strict=True)
    tokenizer = own[1].tokenizers["text_encoder"]
    tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, "right"
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipe = Flux2KleinPipeline(scheduler, other.eval(), encoder, tokenizer, theirs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def encoded(pipeline, captions):
    return pipeline.encode_prompt(list(captions), text_encoder_out_layers=(1, 2, 3))[0]


def test_captions_are_encoded_as_the_pipeline_does(own, pipeline):
    captions = [*CAPTIONS, "", "a red circle " * 300]
    with torch.no_grad():
        actual, expected = own[0].text(own[1], captions)["ctx_vec"], encoded(pipeline, captions)
    assert actual.shape == (4, 512, 144)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_latents_are_the_pipelines_squares(own, pipeline):
    pixels = torch.rand(1, 3, 64, 48) * 2 - 1
    with torch.no_grad():
        expected = pipeline._encode_vae_image(pixels, None)
        actual = own[0].latents(own[1], pixels)
    assert actual.shape == (1, 32, 8, 6)
    torch.testing.assert_close(packing.pack(actual), expected.flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-5)
    back = statistics_vae.denormalised(own[1].vae, actual)
    torch.testing.assert_close(back, pipeline.vae.encode(pixels).latent_dist.mode(), rtol=1e-5, atol=1e-5)


def test_what_is_trained_is_what_the_pipeline_steps_by(own, pipeline):
    """The answer in the terms of the target points from image to noise."""
    model_family, parts = own
    latents = torch.randn(1, 32, 8, 12, generator=torch.Generator().manual_seed(3))
    noised = model_family.noised(latents, torch.Generator().manual_seed(0), torch.tensor([0.7]))
    torch.testing.assert_close(noised.latents, 0.3 * latents + 0.7 * (noised.target + latents))
    with torch.no_grad():
        text = model_family.text(parts, CAPTIONS[:1])
        actual = model_family.predict(parts.denoiser, noised, text, torch.zeros(1, 6))
        ids = pipeline._prepare_latent_ids(torch.zeros(1, 128, 4, 6)), pipeline._prepare_text_ids(text["ctx_vec"])
        answer = pipeline.transformer(
            packing.pack(noised.latents), encoded(pipeline, CAPTIONS[:1]), torch.tensor([0.7]), *ids, return_dict=False
        )[0]
    torch.testing.assert_close(packing.pack(actual), answer, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scale", "steps", "size"), [(4.0, 3, None), (1.0, 2, (70, 100))])
def test_a_preview_equals_the_pipelines_image(own, pipeline, scale, steps, size):
    shown = [Image.effect_noise(size, 90).convert("RGB")] if size else []
    request = SampleRequest(
        CAPTIONS[1], " ", width=96, height=64, steps=steps, scale=scale, seed=5, controls=tuple(shown)
    )
    noise = torch.randn(1, 128, 4, 6, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        actual = own[0].sampler(own[1])(request)
        prompts = {"prompt_embeds": CAPTIONS[1:], "negative_prompt_embeds": [" "]}
        (expected,) = pipeline(
            shown or None,
            **{name: encoded(pipeline, text) for name, text in prompts.items()},
            height=64,
            width=96,
            num_inference_steps=steps,
            guidance_scale=scale,
            latents=noise,
        ).images
    assert np.abs(np.asarray(actual, np.int16) - np.asarray(expected, np.int16)).max() <= 1


def test_previews_of_large_images_are_shifted_by_the_pipelines_mu():
    from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu

    for tokens in (256, 4096, 4300, 4301, 9000):
        for steps in (4, 50):
            assert sampler.empirical_mu(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps))
    assert crop_to_tokens(Image.new("RGB", (2048, 1500))).size == (1184, 864)
