"""Qwen-Image-Edit's networks against those of diffusers and transformers, with the same weights."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from library import families
from library.config.building import build_config
from library.families.base import SampleRequest
from library.families.qwen_image import pictures, random, text_encoder
from library.families.shared import packing, qwen_vae_names

CAPTION = "make the circle red"
SIZES = [(8, 12), (6, 10), (12, 6), (4, 4)]  # latents of an image and three reference images


def family(files, version, **values):
    options = {"pretrained_model_name_or_path": str(files["qwen_image"]), "text_encoder": str(files["text_encoder"])}
    options |= {"vae": str(files["vae"]), "cache_text_encoder_outputs": True, "model_version": version, **values}
    return families.family_for(build_config(families.config_class("qwen_image_train_network"), options))


def picture(size, seed=0):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(
        tmp_path_factory.mktemp("edit"), dtype=torch.float32, sizes=random.VARIANTS["qwen_image_edit"]
    )


@pytest.fixture(scope="module")
def own(files):
    """Families by version, with the same networks; the mark of 2511 is only in the file."""
    newest = family(files, "edit-2511")
    parts = newest.load(torch.float32)
    by_version = {version: family(files, version) for version in ("edit", "edit-2509")}
    return {"edit-2511": newest, **by_version}, parts


def diffusers_model(parts, still):
    from diffusers import QwenImageTransformer2DModel

    sizes = parts.denoiser.sizes
    model = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=sizes.blocks,
        attention_head_dim=sizes.head,
        num_attention_heads=sizes.hidden // sizes.head,
        joint_attention_dim=sizes.text_channels,
        axes_dims_rope=sizes.axes,
        zero_cond_t=still,
    )
    model.load_state_dict(parts.denoiser.state_dict(), strict=True)
    return model.eval()


def denoiser(parts, still):
    """Our denoiser with or without the modulation of 2511."""
    from dataclasses import replace

    parts.denoiser.sizes = replace(parts.denoiser.sizes, still_references=still)
    return parts.denoiser


@pytest.mark.parametrize("still", [True, False], ids=["2511", "older"])
@pytest.mark.parametrize("number", [1, 3])
def test_the_denoiser_and_its_gradients_equal_diffusers(own, still, number):
    ours, theirs = denoiser(own[1], still), diffusers_model(own[1], still)
    latents = [torch.randn(2, 16, *size, generator=torch.Generator().manual_seed(i)) for i, size in enumerate(SIZES)]
    tokens, sizes = packing.pack_with_references(latents[0], latents[1 : 1 + number])
    text = torch.randn(2, 64, 128, generator=torch.Generator().manual_seed(9))
    mask = torch.zeros(2, 64, dtype=torch.long)
    mask[0, :17], mask[1, :33] = 1, 1
    times = torch.tensor([0.3, 0.8])
    ours.requires_grad_(True)
    actual = ours(tokens, sizes, text * mask[..., None], mask, times)
    actual.square().mean().backward()
    by_us = {name: p.grad for name, p in ours.named_parameters()}
    ours.zero_grad(set_to_none=True)
    ours.requires_grad_(False)
    expected = theirs(
        hidden_states=tokens,
        encoder_hidden_states=text * mask[..., None],
        encoder_hidden_states_mask=mask,
        timestep=times,
        img_shapes=[[(1, *size) for size in sizes]] * 2,
        return_dict=False,
    )[0][:, :24]
    expected.square().mean().backward()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)
    by_them = {name: p.grad for name, p in theirs.named_parameters()}
    for name, gradient in by_us.items():
        if gradient is not None:
            torch.testing.assert_close(gradient, by_them[name], rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    if still:
        changed = tokens.clone()
        changed[:, 24:] += 1
        assert not torch.allclose(ours(changed, sizes, text, mask, times), actual), "references are seen"


@pytest.fixture(scope="module")
def encoder(files, own):
    """The text encoder in transformers with the same weights, told which tokens are pictures as its processor says.

    diffusers does not tell it, and with transformers 5 it then counts pictures like words.
    """
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
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    }
    vision = {"depth": 2, "hidden_size": 80, "num_heads": 1, "intermediate_size": 96, "out_hidden_size": 128}
    tokenizer = own[1].tokenizers["text_encoder"]
    picture = tokenizer.convert_tokens_to_ids(text_encoder.PICTURE)
    model: Any = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(text_config=text, vision_config=vision, image_token_id=picture)
    ).eval()
    inside = {"model.": "model.language_model.", "visual.": "model.visual."}
    named = {
        f"{inside[name.partition('.')[0] + '.']}{name.partition('.')[2]}": tensor for name, tensor in tensors.items()
    }
    missing, unexpected = model.load_state_dict(named, strict=False)
    assert not unexpected and missing == ["lm_head.weight"]
    plain = model.forward
    model.forward = lambda input_ids, **given: plain(
        input_ids=input_ids, mm_token_type_ids=(input_ids == picture).int(), **given
    )
    return model


@pytest.fixture(scope="module")
def pipelines(files, own, encoder):
    """diffusers' pipelines with the same weights in their own networks."""
    import diffusers
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    vae = diffusers.AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    stored = load_file(files["vae"])
    vae.load_state_dict({new: stored[old] for new, old in qwen_vae_names.plain_qwen_vae_names(stored).items()})
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        base_image_seq_len=256,
        max_image_seq_len=8192,
        base_shift=0.5,
        max_shift=0.9,
        use_dynamic_shifting=True,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )
    tokenizer = own[1].tokenizers["text_encoder"]
    eyes = Qwen2VLImageProcessorPil(min_pixels=pictures.MIN_PIXELS, max_pixels=pictures.MAX_PIXELS)
    processor = Qwen2VLProcessor.__new__(Qwen2VLProcessor)
    processor.image_processor, processor.tokenizer = eyes, tokenizer
    processor.image_token, processor.video_token = text_encoder.PICTURE, "<|video_pad|>"
    processor.image_token_id, processor.video_token_id = tokenizer.convert_tokens_to_ids(text_encoder.PICTURE), -1
    processor.chat_template = processor.video_processor = None

    def make(kind, still):
        model = diffusers_model(own[1], still)
        pipe = getattr(diffusers, kind)(scheduler, vae, encoder, tokenizer, processor, model)
        pipe.prompt_template_encode_start_idx = len(tokenizer(text_encoder.BEFORE_EDIT).input_ids)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    return make


KINDS = {
    "edit": "QwenImageEditPipeline",
    "edit-2509": "QwenImageEditPlusPipeline",
    "edit-2511": "QwenImageEditPlusPipeline",
}


def test_images_are_cut_and_counted_as_the_processor_does(own, pipelines):
    pipe = pipelines("QwenImageEditPlusPipeline", False)
    for size in ((392, 392), (600, 260), (40, 50)):
        ours = pictures.cut_into_patches(picture(size), 384 * 384)
        scaled = picture(size).resize(pictures.scaled_size(size, 384 * 384), Image.Resampling.LANCZOS)
        theirs = pipe.processor.image_processor(images=[scaled], return_tensors="pt")
        assert theirs["image_grid_thw"].tolist() == [[1, ours.rows, ours.columns]]
        torch.testing.assert_close(ours.patches, theirs["pixel_values"], rtol=1e-5, atol=1e-5)
    assert pictures.seen_size((1024, 1024), 384 * 384) == (392, 392)
    assert pictures.seen_size((1024, 1024), 1024 * 1024) == (1036, 1036)


@pytest.mark.parametrize(("version", "sizes"), [("edit-2509", [(64, 96), (90, 50)]), ("edit-2509", [])])
def test_captions_with_images_are_encoded_as_transformers_does(own, pipelines, version, sizes):
    pipe = pipelines(KINDS[version], False)
    shown = [picture(size, i) for i, size in enumerate(sizes)]
    scaled = [image.resize(pictures.scaled_size(image.size, 384 * 384), Image.Resampling.LANCZOS) for image in shown]
    with torch.no_grad():
        actual = own[0][version].text_with_pictures(own[1], [CAPTION], [shown])
        if not shown:
            assert torch.equal(own[0][version].text(own[1], [CAPTION])["vl_embed"], actual["vl_embed"])
            return
        expected, _ = pipe.encode_prompt(CAPTION, scaled)
    length = expected.shape[1]
    assert int(actual["vl_mask"].sum()) == length and actual["vl_embed"].shape[1] % 64 == 0
    torch.testing.assert_close(actual["vl_embed"][:, :length], expected, rtol=1e-4, atol=2e-5)
    more = own[0][version].train_text_length(own[1], [CAPTION])
    assert more + own[0][version].picture_tokens(own[1], sizes) >= length


def test_the_templates_are_the_pipelines(pipelines):
    plus, first = pipelines("QwenImageEditPlusPipeline", False), pipelines("QwenImageEditPipeline", False)
    assert plus.prompt_template_encode == f"{text_encoder.BEFORE_EDIT}{{}}{text_encoder.BEHIND}"
    one = text_encoder.picture_words(1, 1, numbered=False)
    assert first.prompt_template_encode == f"{text_encoder.BEFORE_EDIT}{one}{{}}{text_encoder.BEHIND}"
    assert text_encoder.picture_words(2, 1, numbered=True) == f"Picture 2: {one}"


@pytest.mark.parametrize(("version", "number"), [("edit", 1), ("edit-2511", 2)])
def test_a_preview_equals_the_pipelines_image(own, pipelines, monkeypatch, version, number):
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as first
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    of, parts = own[0][version], own[1]
    denoiser(parts, version == "edit-2511")
    shown = [picture((64, 96), 1), picture((90, 50), 2)][:number]
    # Theirs are of a megapixel whatever they generate, ours of as many pixels as the preview.
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", 96 * 64)
    if version == "edit":  # whose text encoder is shown the same scaled picture
        monkeypatch.setattr(
            first, "calculate_dimensions", lambda area, ratio: (*plus.calculate_dimensions(96 * 64, ratio), None)
        )
        of.variant = type(of.variant)(**{**vars(of.variant), "condition_area": 96 * 64})
    request = SampleRequest(CAPTION, " ", width=96, height=64, steps=2, scale=4.0, seed=5, controls=tuple(shown))
    with torch.no_grad():
        sampler = of.sampler(parts)
        ours = sampler.decoded(sampler.latents(request))
        theirs = pipelines(KINDS[version], version == "edit-2511")(
            image=shown if number > 1 else shown[0],
            prompt=CAPTION,
            negative_prompt=" ",
            true_cfg_scale=4.0,
            height=64,
            width=96,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(5),
            output_type="pt",
        ).images[0]
    assert ours.std() > 0.01
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-4)


def test_a_preview_remembers_its_prompt_with_its_images(own):
    of, parts = own[0]["edit-2511"], own[1]
    denoiser(parts, True)
    sampler = of.sampler(parts)
    request = SampleRequest(CAPTION, " ", 64, 64, 1, 4.0, None, 7, controls=(picture((50, 30)),))
    other = SampleRequest(CAPTION, " ", 64, 64, 1, 4.0, None, 7, controls=(picture((50, 30), 1),))
    expected = sampler(request).tobytes()
    sampler.remember([request])
    assert sampler.unknown([request, other]) == [other]
    encoders = dict(parts.encoders)
    parts.encoders.clear()
    try:
        assert sampler(request).tobytes() == expected
    finally:
        parts.encoders.update(encoders)
    assert sampler(other).tobytes() != expected


def test_what_is_trained_is_the_path_to_the_image_alone(own):
    of, parts = own[0]["edit-2511"], own[1]
    model = denoiser(parts, True)
    latents, shown = torch.randn(2, 16, 8, 12), torch.randn(2, 16, 6, 10)
    text = {"vl_embed": torch.randn(2, 64, 128), "vl_mask": torch.ones(2, 64, dtype=torch.long)}
    noised = of.noised(latents, torch.Generator().manual_seed(0), torch.tensor([0.5, 0.5]))
    with torch.no_grad():
        actual = of.predict(model, noised, text, torch.ones(2, 6), [shown])
        tokens = torch.cat((packing.pack(noised.latents), packing.pack(shown)), dim=1)
        direct = model(tokens, [(4, 6), (3, 5)], text["vl_embed"], text["vl_mask"], noised.timesteps)
    assert actual.shape == latents.shape
    torch.testing.assert_close(packing.pack(actual), direct)
    torch.testing.assert_close(noised.target + latents, (noised.latents - 0.5 * latents) / 0.5)
