"""Z-Image's networks against diffusers' and transformers', with the same weights."""

import pytest
import torch
from safetensors.torch import load_file

from library.families.base import SampleRequest
from library.families.shared import autoencoder
from library.families.shared.packing import pack_channels_last, unpack_channels_last
from library.families.zimage import checkpoint, keys, random
from library.families.zimage.model import ZImage, ZImageTransformerBlock, rope_tables
from tests.families import alike, wide

CAPTIONS = ["a red circle", "a drawing of a blue square, simple, flat colors, on a wooden table, best quality"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def family(files, script="zimage_train_network", **values):
    return alike.family_of(files, "zimage", script, values, cache_text_encoder_outputs=True, model_version="base")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("zimage"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


@pytest.fixture(scope="module")
def theirs(own):
    """The transformer in diffusers with the same weights."""
    from diffusers import ZImageTransformer2DModel

    sizes = own[1].denoiser.sizes
    heads = sizes.hidden // sizes.head
    model = ZImageTransformer2DModel(
        dim=sizes.hidden,
        n_layers=sizes.layers,
        n_refiner_layers=sizes.noise_refiners,
        n_heads=heads,
        n_kv_heads=heads,
        cap_feat_dim=sizes.text_channels,
        axes_dims=list(sizes.axes),
        axes_lens=[600, 64, 64],
    )
    model.load_state_dict(own[1].denoiser.state_dict(), strict=True)
    return model.eval()


@pytest.mark.parametrize("size", [(8, 12), (6, 10), (16, 16)])
def test_the_denoiser_and_its_gradients_equal_diffusers(own, theirs, size):
    """In a batch of two lengths of caption, at sizes with and without padding of the image."""
    ours, (height, width), lengths = own[1].denoiser, (size[0] // 2, size[1] // 2), (17, 40)
    latents = torch.randn(2, 16, *size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    texts = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in lengths]
    text, mask = torch.zeros(2, 64, 64), torch.zeros(2, 64, dtype=torch.long)
    for row, tokens in enumerate(texts):
        text[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    times = torch.tensor([0.3, 0.8])
    inputs = {"latents": latents}
    actual, by_us = alike.output_and_gradients(
        ours,
        inputs,
        lambda: unpack_channels_last(
            ours(pack_channels_last(latents), (height, width), text, mask, times), height, width
        ),
    )
    expected, by_them = alike.output_and_gradients(
        theirs,
        inputs,
        lambda: torch.stack(theirs(list(latents[:, :, None]), times, texts, return_dict=False)[0])[:, :, 0],
    )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert by_us.keys() == by_them.keys()
    alike.assert_gradients_close(by_us, by_them)


def test_a_caption_is_read_alike_behind_any_padding(own):
    model = own[1].denoiser
    tokens, text = torch.randn(1, 24, 64), torch.randn(1, 32, 64)
    mask, time = (torch.arange(32) < 20)[None], torch.tensor([0.4])
    with torch.no_grad():
        plain = model(tokens, (4, 6), text, mask, time)
        longer = torch.cat((text, torch.randn(1, 96, 64)), 1)
        padded = model(tokens, (4, 6), longer, torch.cat((mask, mask.new_zeros(1, 96)), 1), time)
        bare = model(tokens, (4, 6), text[:, :20], mask[:, :20], time)
    torch.testing.assert_close(plain, padded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, bare, rtol=1e-5, atol=1e-5)


def test_one_block_of_full_width_equals_diffusers():
    from diffusers.models.transformers.transformer_z_image import RopeEmbedder
    from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock as Theirs

    sizes = random.zimage_shape(random.FULL)
    torch.manual_seed(0)
    with torch.device("meta"):
        ours = ZImageTransformerBlock(sizes)
        other = Theirs(0, sizes.hidden, 30, 30, 1e-5, True)
    other.load_state_dict(wide.filled(ours).state_dict(), strict=True, assign=True)
    x, temb = torch.randn(1, 32, sizes.hidden), torch.randn(1, 256)
    assert sizes.axes == (32, 48, 48)
    positions = rope_tables(4, 8, 32, torch.device("cpu"), sizes.axes)
    ids = torch.stack(torch.meshgrid(torch.tensor([33]), torch.arange(4), torch.arange(8), indexing="ij"), -1)
    rope = RopeEmbedder(256.0, list(sizes.axes), [64, 16, 16])(ids.reshape(-1, 3))[None]
    with torch.no_grad():
        actual = ours(x, temb, positions.of_images(torch.tensor([33])), torch.ones(1, 32, dtype=torch.bool))
        expected = other(x, None, rope, temb)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_full_model_has_the_parameters_of_diffusers():
    from diffusers import ZImageTransformer2DModel

    ours = random.make_networks(random.FULL).denoiser()
    with torch.device("meta"):
        other = ZImageTransformer2DModel()
    shapes = [{name: t.shape for name, t in model.state_dict().items()} for model in (ours, other)]
    assert shapes[0] == shapes[1] and sum(p.numel() for p in ours.parameters()) == 6_154_908_736


def test_tables_are_kept_by_sizes_and_bounded(own):
    model = ZImage(own[1].denoiser.sizes)
    device = torch.device("cpu")
    first = model.positions(4, 6, 64, device)
    assert model.positions(4, 6, 64, device) is first
    for length in range(40):
        model.positions(4, 6, length, device)
    assert len(model._tables) == 32 and model.positions(4, 6, 64, device) is not first


@pytest.fixture(scope="module")
def pipeline(files, own, theirs):
    """diffusers' pipeline with the same weights in its own networks."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline

    encoder = alike.qwen3_of(files["text_encoder"], 64, 3)
    scale, shift = autoencoder.FLUX
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=random.TINY.vae_widths,
        layers_per_block=2,
        latent_channels=16,
        scaling_factor=scale,
        shift_factor=shift,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    vae.load_state_dict(autoencoder.vae_to_diffusers(load_file(files["vae"])), strict=True)
    tokenizer = own[1].tokenizers["text_encoder"]
    tokenizer.chat_template = TEMPLATE
    pipe = ZImagePipeline(FlowMatchEulerDiscreteScheduler(shift=3.0), vae.eval(), encoder, tokenizer, theirs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_captions_are_encoded_as_the_pipeline_does(own, pipeline):
    captions = [*CAPTIONS, "", "a red circle " * 300]
    with torch.no_grad():
        actual = own[0].text(own[1], captions)
        expected, _ = pipeline.encode_prompt(list(captions), do_classifier_free_guidance=False)
    longest = checkpoint.longest_zimage_caption(own[1].tokenizers["text_encoder"], captions)
    assert actual["llm_embed"].shape[1] == 512 == longest
    for row, states in enumerate(expected):
        assert int(actual["llm_mask"][row].sum()) == len(states) and not actual["llm_embed"][row, len(states) :].any()
        torch.testing.assert_close(actual["llm_embed"][row, : len(states)], states, rtol=1e-4, atol=1e-5)


def test_latents_are_the_pipelines_before_they_are_scaled(own, pipeline):
    pixels = torch.rand(1, 3, 64, 48) * 2 - 1
    with torch.no_grad():
        mode = pipeline.vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(own[0].latents(own[1], pixels), mode, rtol=1e-5, atol=1e-5)
    noised = own[0].noised(mode, torch.Generator().manual_seed(0), torch.tensor([0.25]))
    clean = (mode - pipeline.vae.config.shift_factor) * pipeline.vae.config.scaling_factor
    noise = noised.target + clean
    torch.testing.assert_close(noised.latents, 0.75 * clean + 0.25 * noise)


def test_what_is_trained_is_what_the_pipeline_steps_by(own, pipeline):
    """The answer in the terms of the target points from image to noise, at a time that runs the other way."""
    zimage, parts = own
    latents = torch.randn(1, 16, 8, 12, generator=torch.Generator().manual_seed(3))
    noised = zimage.noised(latents, torch.Generator().manual_seed(0), torch.tensor([0.7]))
    with torch.no_grad():
        text = zimage.text(parts, CAPTIONS[:1])
        actual = zimage.predict(parts.denoiser, noised, text, torch.zeros(1, 6))
        embeds, _ = pipeline.encode_prompt(CAPTIONS[:1], do_classifier_free_guidance=False)
        (answer,) = pipeline.transformer([noised.latents[0][:, None]], torch.tensor([0.3]), embeds, return_dict=False)[
            0
        ]
    torch.testing.assert_close(actual[0], -answer[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("scale", "steps"), [(4.0, 3), (0.0, 2)])
def test_a_preview_equals_the_pipelines_image(own, pipeline, scale, steps):
    request = SampleRequest(CAPTIONS[1], "blurry", width=96, height=64, steps=steps, scale=scale, seed=5)
    with torch.no_grad():
        sampler = own[0].sampler(own[1])
        ours = sampler.decoded(sampler.latents(request))
        theirs = pipeline(
            prompt=CAPTIONS[1],
            negative_prompt="blurry",
            guidance_scale=scale,
            height=64,
            width=96,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(5),
            output_type="pt",
        ).images[0]
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_turbo_samples_in_few_steps_without_guidance(files):
    assert dict(family(files).sample_defaults)["sample_steps"] == 25
    turbo = dict(family(files, model_version="turbo").sample_defaults)
    assert (turbo["sample_steps"], turbo["scale"]) == (9, 0.0)


def test_a_saved_model_has_the_names_of_its_file(files, own):
    stored = load_file(files["zimage"])
    saved = own[0].export(own[1])
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in stored)
    assert "layers.0.attention.qkv.weight" in stored and "final_layer.linear.weight" in stored
    assert keys.zimage_sources(stored).keys() == own[1].denoiser.state_dict().keys()
