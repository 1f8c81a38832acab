"""Krea 2's networks against diffusers' and transformers', with the same weights."""

import pytest
import torch
from safetensors.torch import load_file

from library.families.base import SampleRequest
from library.families.krea_2 import keys, random
from library.families.krea_2.checkpoint import TEXT
from library.families.krea_2.model import BLOCK, LAYERWISE, REFINER, Krea2, SingleDiTBlock
from library.families.shared import qwen3_vl, qwen_vae_names
from library.families.shared.packing import image_positions, pack, unpack
from tests.families import alike, wide

CAPTIONS = ["a red circle", "a drawing of a blue square, simple, flat colors, on a wooden table, best quality", ""]
CAPTIONS += ["一只红色的猫", "a red circle " * 300]


def family(files, script="krea_2_train_network", **values):
    return alike.family_of(files, "krea_2", script, values, cache_text_encoder_outputs=True, model_version="raw")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("krea_2"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


def for_diffusers(tensors):
    """Our tensors under diffusers' names and in its shapes."""
    named = {keys.diffusers_krea_2_path(name): tensor for name, tensor in tensors.items()}
    tables = {name for name in named if name.startswith("transformer_blocks.") and name.endswith("_table")}
    return {name: tensor.view(6, -1) if name in tables else tensor for name, tensor in named.items()}


@pytest.fixture(scope="module")
def theirs(own):
    """The transformer in diffusers with the same weights."""
    from diffusers import Krea2Transformer2DModel

    model = Krea2Transformer2DModel(**random.diffusers_settings(own[1].denoiser.sizes))
    model.load_state_dict(for_diffusers(own[1].denoiser.state_dict()), strict=True)
    return model.eval()


def said_by(theirs, latents, text, mask, times):
    from diffusers import Krea2Pipeline

    height, width = latents.shape[-2] // 2, latents.shape[-1] // 2
    places = Krea2Pipeline.prepare_position_ids(text.shape[1], height, width, latents.device)
    return unpack(theirs(pack(latents), text, times, places, mask.bool(), return_dict=False)[0], height, width)


@pytest.mark.parametrize("size", [(8, 12), (6, 10)])
def test_the_denoiser_and_its_gradients_equal_diffusers(own, theirs, size):
    """In a batch of two lengths of caption, at sizes with odd numbers of tokens."""
    ours, (height, width), lengths = own[1].denoiser, (size[0] // 2, size[1] // 2), (17, 40)
    latents = torch.randn(2, 16, *size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    text = torch.randn(2, 64, 2, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mask, times = torch.arange(64) < torch.tensor(lengths)[:, None], torch.tensor([0.3, 0.8])

    inputs = {"latents": latents, "text": text}
    actual, by_us = alike.output_and_gradients(
        ours, inputs, lambda: unpack(ours(pack(latents), (height, width), text, mask, times), height, width)
    )
    expected, by_them = alike.output_and_gradients(theirs, inputs, lambda: said_by(theirs, latents, text, mask, times))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    by_us = for_diffusers({n: t for n, t in by_us.items() if "." in n}) | {n: by_us[n] for n in ("latents", "text")}
    assert by_us.keys() == by_them.keys() and all(gradient.any() for gradient in by_us.values())
    alike.assert_gradients_close(by_us, by_them)


def test_a_caption_is_read_alike_behind_any_padding(own):
    model = own[1].denoiser
    tokens, text = torch.randn(1, 24, 64), torch.randn(1, 32, 2, 48)
    mask, time = (torch.arange(32) < 20)[None], torch.tensor([0.4])
    with torch.no_grad():
        plain = model(tokens, (4, 6), text, mask, time)
        longer = torch.cat((text, torch.randn(1, 96, 2, 48)), 1)
        padded = model(tokens, (4, 6), longer, torch.cat((mask, mask.new_zeros(1, 96)), 1), time)
        bare = model(tokens, (4, 6), text[:, :20], mask[:, :20], time)
    torch.testing.assert_close(plain, padded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(plain, bare, rtol=1e-5, atol=1e-5)


def test_one_block_of_full_width_equals_diffusers():
    from diffusers.models.transformers.transformer_krea2 import Krea2RotaryPosEmbed
    from diffusers.models.transformers.transformer_krea2 import Krea2TransformerBlock as Theirs

    sizes = random.krea_2_shape(random.FULL)
    torch.manual_seed(0)
    with torch.device("meta"):
        ours = SingleDiTBlock(sizes.image)
        other = Theirs(6144, 16384, 48, 12, 1e-5)
        small = Krea2(random.krea_2_shape(random.TINY))
    wide.filled(ours)
    named = for_diffusers({f"blocks.0.{name}": tensor for name, tensor in ours.state_dict().items()})
    other.load_state_dict({name.removeprefix("transformer_blocks.0."): t for name, t in named.items()}, assign=True)
    x, modulation = torch.randn(1, 16, 6144), torch.randn(1, 6 * 6144)
    assert sizes.axes == (32, 48, 48)
    small.axes = sizes.axes
    places = torch.cat((image_positions(2, 4, torch.device("cpu")), torch.zeros(8, 3)))
    rope = Krea2RotaryPosEmbed(1000.0, list(sizes.axes))(places)
    pe, mask = small.positions(2, 4, 8, torch.device("cpu")), (torch.arange(16) < 12)[None]
    with torch.no_grad():
        actual = ours(x, modulation, pe, mask)
        expected = other(x, modulation[:, None], rope, mask[:, None, None])
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_full_model_has_the_parameters_of_diffusers():
    from diffusers import Krea2Transformer2DModel

    ours = random.make_networks(random.FULL).denoiser()
    with torch.device("meta"):
        other = Krea2Transformer2DModel()
    shapes = [
        {n: t.shape for n, t in named.items()} for named in (for_diffusers(ours.state_dict()), other.state_dict())
    ]
    assert shapes[0] == shapes[1] and sum(p.numel() for p in ours.parameters()) == 12_820_073_036
    count = {kind: sum(type(m).__name__ == kind for m in ours.modules()) for kind in (BLOCK, LAYERWISE, REFINER)}
    assert [*count.values()] == [28, 2, 2]
    assert TEXT.taps(36) == (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35) and TEXT.skipped(36) == 1


@pytest.fixture(scope="module")
def pipeline(files, own, theirs):
    """diffusers' pipeline with the same weights in its own networks."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, Krea2Pipeline
    from transformers import Qwen3VLTextConfig, Qwen3VLTextModel

    stored = load_file(files["text_encoder"])
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    del tensors[qwen3_vl.VISION_MARK]
    sizes = random.TINY
    config = Qwen3VLTextConfig(
        vocab_size=tensors["embed_tokens.weight"].shape[0],
        hidden_size=sizes.text,
        intermediate_size=sizes.text_mlp,
        num_hidden_layers=sizes.text_layers,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    )
    encoder = Qwen3VLTextModel(config).eval()
    encoder.load_state_dict(tensors, strict=True)
    vae = AutoencoderKLQwenImage(
        base_dim=sizes.vae, z_dim=16, dim_mult=list(sizes.vae_widths), num_res_blocks=sizes.vae_resnets
    )
    stored = load_file(files["vae"])
    vae.load_state_dict({plain: stored[name] for plain, name in qwen_vae_names.plain_qwen_vae_names(stored).items()})
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=6400
    )
    tokenizer = own[1].tokenizers["text_encoder"]
    pipe = Krea2Pipeline(
        scheduler, vae.eval(), encoder, tokenizer, theirs, text_encoder_select_layers=TEXT.taps(sizes.text_layers)
    )
    pipe.prompt_template_encode_start_idx = len(tokenizer(TEXT.before).input_ids)  # 34 with the real tokenizer
    pipe.prompt_template_encode_num_suffix_tokens = len(tokenizer(TEXT.behind).input_ids)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_captions_are_encoded_as_the_pipeline_does(own, pipeline):
    """Among them none at all, Chinese, and one that is cut before the end of the chat."""
    with torch.no_grad():
        actual = own[0].text(own[1], CAPTIONS)
        expected, mask = pipeline.encode_prompt(CAPTIONS)
    states, own_mask = actual["krea2_vl_embed"], actual["krea2_vl_mask"]
    longest = own[0].checkpoint.longest(own[1].tokenizers["text_encoder"], CAPTIONS)
    assert states.shape == (5, 512, 2, 48) and longest == 512
    for row, seen in enumerate(mask):
        count = int(seen.sum())
        assert int(own_mask[row].sum()) == count and not states[row, count:].any()
        torch.testing.assert_close(states[row, :count], expected[row, seen], rtol=1e-4, atol=1e-5)


def test_latents_are_the_pipelines(own, pipeline):
    pixels = torch.rand(1, 3, 64, 48) * 2 - 1
    with torch.no_grad():
        mode = pipeline.vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
    settings = pipeline.vae.config
    mean, std = (torch.tensor(values).view(1, 16, 1, 1) for values in (settings.latents_mean, settings.latents_std))
    torch.testing.assert_close(own[0].latents(own[1], pixels), (mode - mean) / std, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("version", "scale"), [("raw", 4.5), ("turbo", 0.0)])
def test_a_preview_equals_the_pipelines_image(files, own, pipeline, version, scale):
    """The scale of the pipeline is one less than ours, and Turbo has a shift of its own."""
    request = SampleRequest(CAPTIONS[1], "blurry", width=96, height=64, steps=2, scale=scale + 1, seed=5)
    sampler = family(files, model_version=version).sampler(own[1])
    pipeline.register_to_config(is_distilled=version == "turbo")
    with torch.no_grad():
        ours = sampler.decoded(sampler.latents(request))
        theirs = pipeline(
            prompt=CAPTIONS[1],
            negative_prompt="blurry" if scale else None,
            guidance_scale=scale,
            height=64,
            width=96,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(5),
            output_type="pt",
        ).images[0]
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_saved_model_has_the_names_of_its_file(files, own):
    stored = load_file(files["krea_2"])
    saved = own[0].export(own[1])
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in stored)
    assert {"blocks.0.mod.lin", "last.modulation.lin", "txtfusion.projector.weight"} <= stored.keys()
