"""Qwen-Image's networks against diffusers' and transformers', with the same weights."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from library.families.base import SampleRequest
from library.families.qwen_image import random, sampler, text_encoder
from library.families.qwen_image.model import QwenImage, QwenImageTransformerBlock, QwenShape, rope_table
from library.families.shared import packing, qwen_vae_names
from tests.families import alike, wide

CAPTIONS = ["a red circle", "a drawing of a blue square, simple, flat colors, on a wooden table, best quality"]


def family(files, script="qwen_image_train_network", **values):
    return alike.family_of(files, "qwen_image", script, values, cache_text_encoder_outputs=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("qwen"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


@pytest.fixture(scope="module")
def theirs(own):
    """The transformer in diffusers with the same weights."""
    from diffusers import QwenImageTransformer2DModel

    sizes = own[1].denoiser.sizes
    model = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=sizes.blocks,
        attention_head_dim=sizes.head,
        num_attention_heads=sizes.hidden // sizes.head,
        joint_attention_dim=sizes.text_channels,
        axes_dims_rope=sizes.axes,
    )
    model.load_state_dict(own[1].denoiser.state_dict(), strict=True)
    return model.eval()


@pytest.mark.parametrize("size", [(8, 12), (6, 10)])
def test_the_denoiser_and_its_gradients_equal_diffusers(own, theirs, size):
    ours, (height, width) = own[1].denoiser, (size[0] // 2, size[1] // 2)
    latents = torch.randn(2, 16, *size, generator=torch.Generator().manual_seed(0))
    text = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(2, 64, dtype=torch.long)
    mask[0, :17], mask[1, :33] = 1, 1
    tokens, times = packing.pack(latents).requires_grad_(), torch.tensor([0.3, 0.8])
    inputs = {"tokens": tokens}
    actual, by_us = alike.output_and_gradients(
        ours, inputs, lambda: ours(tokens, [(height, width)], text * mask[..., None], mask, times)
    )
    expected, by_them = alike.output_and_gradients(
        theirs,
        inputs,
        lambda: theirs(
            hidden_states=tokens,
            encoder_hidden_states=text * mask[..., None],
            encoder_hidden_states_mask=mask,
            timestep=times,
            img_shapes=[[(1, height, width)]] * 2,
            return_dict=False,
        )[0],
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
    unused = {name for name, gradient in by_us.items() if gradient is None}  # the last block's answer for the text
    assert all(by_them[name] is None and f".{ours.sizes.blocks - 1}." in name for name in unused)
    alike.assert_gradients_close({name: by_us[name] for name in by_us.keys() - unused}, by_them, 1e-6)


def test_a_caption_is_read_alike_behind_any_padding(own):
    model = own[1].denoiser
    tokens, text = torch.randn(1, 24, 64), torch.randn(1, 20, 128)
    ones, time = torch.ones(1, 20), torch.tensor([0.4])
    with torch.no_grad():
        plain = model(tokens, [(4, 6)], text, ones, time)
        longer = torch.cat((text, torch.zeros(1, 44, 128)), 1)
        padded = model(tokens, [(4, 6)], longer, torch.cat((ones, torch.zeros(1, 44)), 1), time)
    torch.testing.assert_close(plain, padded, rtol=1e-5, atol=1e-5)


def test_one_block_of_full_width_equals_diffusers():
    from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
    from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock as Theirs

    full = random.FULL
    torch.manual_seed(0)
    with torch.device("meta"):
        ours = QwenImageTransformerBlock(full.hidden, full.head, 4 * full.hidden)
        other = Theirs(full.hidden, full.hidden // full.head, full.head)
    other.load_state_dict(wide.filled(ours).state_dict(), strict=True, assign=True)
    img, txt, temb = torch.randn(1, 12, full.hidden), torch.randn(1, 5, full.hidden), torch.randn(1, full.hidden)
    axes = QwenShape(64, 64, 3584, full.hidden, full.head, 4 * full.hidden, 60).axes
    assert axes == (16, 56, 56)
    rope = QwenEmbedRope(10000, list(axes), scale_rope=True)([(1, 3, 4)], torch.device("cpu"), max_txt_seq_len=5)
    still = torch.arange(12) >= 8  # tokens of a reference image, as Qwen-Image-Edit-2511 modulates them
    times, mask = torch.cat((temb, temb.flip(1))), torch.ones(1, 17, dtype=torch.bool)
    with torch.no_grad():
        pe = rope_table([(3, 4)], 5, torch.device("cpu"), axes)
        for inputs, index in (((temb, pe, mask), None), ((times, pe, mask, still), still[None].int())):
            actual = ours(img, txt, *inputs)
            other.zero_cond_t = index is not None
            expected = other(img, txt, None, inputs[0], rope, modulate_index=index)
            torch.testing.assert_close(actual[0], expected[1], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(actual[1], expected[0], rtol=1e-4, atol=1e-4)


def test_tables_are_kept_by_sizes_and_bounded(own):
    model = QwenImage(own[1].denoiser.sizes)
    device = torch.device("cpu")
    first = model.positions(((4, 6),), 64, device)
    assert model.positions(((4, 6),), 64, device) is first
    for length in range(40):
        model.positions(((4, 6),), length, device)
    assert len(model._tables) == 32 and model.positions(((4, 6),), 64, device) is not first


def test_the_vae_equals_diffusers_in_both_layouts(files, own, tmp_path):
    from diffusers import AutoencoderKLQwenImage

    stored = load_file(files["vae"])
    assert stored["decoder.conv1.weight"].ndim == 5 and "conv1.weight" in stored
    named = {new: stored[old] for new, old in qwen_vae_names.plain_qwen_vae_names(stored).items()}
    assert qwen_vae_names.qwen_vae_to_single(named).keys() == stored.keys()
    model = AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    model.load_state_dict(named, strict=True)
    pixels = torch.rand(1, 3, 64, 48) * 2 - 1
    actual = own[0].latents(own[1], pixels)
    mean, std = (torch.tensor(v).view(1, 16, 1, 1) for v in (model.config.latents_mean, model.config.latents_std))
    assert (mean.sum().item(), std.sum().item()) == pytest.approx((-0.7332, 34.2747)), "those of the published model"
    with torch.no_grad():
        expected = (model.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0] - mean) / std
    assert actual.shape == (1, 16, 8, 6)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    save_file(named, tmp_path / "diffusers.safetensors")
    own_family = family(files | {"vae": tmp_path / "diffusers.safetensors"})
    assert not list(own_family.problems())
    assert torch.equal(own_family.latents(own_family.load(torch.float32), pixels), actual)


@pytest.fixture(scope="module")
def pipeline(files, own, theirs):
    """diffusers' pipeline with the same weights in its own networks."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tensors = load_file(files["text_encoder"])
    words = tensors["model.embed_tokens.weight"].shape[0]
    text = {
        "vocab_size": words,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 128}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    encoder = Qwen2_5_VLForConditionalGeneration(config).eval()
    named = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    missing, unexpected = encoder.load_state_dict(named, strict=False)
    assert not unexpected and not [name for name in missing if "language_model" in name]
    vae = AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    stored = load_file(files["vae"])
    vae.load_state_dict({new: stored[old] for new, old in qwen_vae_names.plain_qwen_vae_names(stored).items()})
    scheduler = FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        use_dynamic_shifting=True,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    tokenizer = own[1].tokenizers["text_encoder"]
    pipe = QwenImagePipeline(scheduler, vae, encoder, tokenizer, theirs)
    pipe.prompt_template_encode_start_idx = len(tokenizer(text_encoder.BEFORE).input_ids)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_captions_are_encoded_as_the_pipeline_does(own, pipeline):
    assert pipeline.prompt_template_encode == f"{text_encoder.BEFORE}{{}}{text_encoder.BEHIND}"
    with torch.no_grad():
        actual = own[0].text(own[1], CAPTIONS)
        expected, mask = pipeline.encode_prompt(CAPTIONS)
    length = expected.shape[1]
    assert actual["vl_embed"].shape[1] % 64 == 0 and torch.equal(actual["vl_mask"][:, :length], mask)
    assert not actual["vl_mask"][:, length:].any() and not actual["vl_embed"][:, length:].any()
    torch.testing.assert_close(actual["vl_embed"][:, :length], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "steps"), [(4.0, 3), (1.0, 2)])
def test_a_preview_equals_the_pipelines_image(own, pipeline, scale, steps):
    request = SampleRequest(CAPTIONS[0], " ", width=96, height=64, steps=steps, scale=scale, seed=5)
    with torch.no_grad():
        sampler = own[0].sampler(own[1])
        ours = sampler.decoded(sampler.latents(request))
        theirs = pipeline(
            prompt=CAPTIONS[0],
            negative_prompt=" ",
            true_cfg_scale=scale,
            height=64,
            width=96,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(5),
            output_type="pt",
        ).images[0]
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def test_the_schedule_ends_where_it_was_trained_to():
    sigmas = sampler.qwen_sigmas(20, 4096)
    assert sigmas[0] == 1.0 and sigmas[-2] == pytest.approx(0.02) and sigmas[-1] == 0.0
    assert math.isclose(math.exp(0.5 + (4096 - 256) * 0.4 / 7936), 2.0, rel_tol=1e-3)
