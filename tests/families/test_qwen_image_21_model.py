"""Qwen-Image-2.1's networks against diffusers' and transformers', with the same weights."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from library.families.base import SampleRequest
from library.families.qwen_image_21 import random, text_encoder
from library.families.qwen_image_21.family import EMBED, MASK
from library.families.qwen_image_21.model import BLOCK, JointTransformerBlock
from library.families.shared import vae_tiles
from library.families.shared.packing import pack
from tests.families import alike, wide

CAPTIONS = ["a red circle", "a drawing of a blue square, simple, flat colors, on a wooden table, best quality", ""]
CAPTIONS += ["一只红色的猫", "a red circle " * 600]


def family(files, script="qwen_image_21_train_network", **values):
    return alike.family_of(
        files, "qwen_image_21", script, values, cache_text_encoder_outputs=True, model_version="base"
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("qwen_image_21"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


@pytest.fixture(scope="module")
def theirs(own):
    """The transformer in diffusers with the same weights."""
    from diffusers import QwenImage21Transformer2DModel

    model = QwenImage21Transformer2DModel(**random.diffusers_settings(own[1].denoiser.sizes))
    model.load_state_dict(own[1].denoiser.state_dict(), strict=True)
    return model.eval()


def said_by(theirs, tokens, sizes, text, times, leads):
    """What diffusers' transformer says of one image; in the text, four rows stand for an image's tokens."""
    img, *references = tokens.split([math.prod(size) for size in sizes], dim=1)
    pieces = text.split([*leads, text.shape[1] - sum(leads)], dim=1)
    parts, marks = [pieces[0]], [False] * pieces[0].shape[1]
    for size, piece in zip(sizes[1:], pieces[1:], strict=True):
        slots = math.prod(size) // 4
        parts += [text.new_ones(1, slots, text.shape[2]), piece]
        marks += [True] * slots + [False] * piece.shape[1]
    marks += [True] * (math.prod(sizes[0]) // 4)
    joint, shapes = torch.cat(parts, dim=1), [[(1, *size) for size in (*sizes[1:], sizes[0])]]
    latents = torch.cat((*references, img), dim=1)
    output = theirs(latents, joint, times, shapes, torch.tensor([marks]), return_dict=False)[0]
    return output[:, -img.shape[1] :]


@pytest.mark.parametrize(
    ("sizes", "leads"),
    [(((4, 7),), ()), (((3, 4), (2, 6)), (5,)), (((5, 4), (4, 3), (2, 2), (6, 2)), (5, 4, 4))],
)
def test_the_denoiser_and_its_gradients_equal_diffusers(own, theirs, sizes, leads):
    """In a batch of two lengths of caption with 0, 1 and 3 references, each image as alone and without padding."""
    ours, lengths, generator = own[1].denoiser, (17, 40), torch.Generator().manual_seed(0)
    count = sum(math.prod(size) for size in sizes)
    tokens = torch.randn(2, count, 64, generator=generator).requires_grad_()
    text = torch.randn(2, 64, 64, generator=generator).requires_grad_()
    mask, times = torch.arange(64) < torch.tensor(lengths)[:, None], torch.tensor([0.3, 0.8])

    inputs = {"tokens": tokens, "text": text}

    def alone():
        rows = range(2)
        cut = [text[row : row + 1, : lengths[row]] for row in rows]
        return torch.cat([said_by(theirs, tokens[r : r + 1], sizes, cut[r], times[r : r + 1], leads) for r in rows])

    actual, by_us = alike.output_and_gradients(ours, inputs, lambda: ours(tokens, sizes, text, mask, times, leads))
    expected, by_them = alike.output_and_gradients(theirs, inputs, alone)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert by_us.keys() == by_them.keys() and all(gradient.any() for gradient in by_us.values())
    alike.assert_gradients_close(by_us, by_them)


def test_the_condition_sees_neither_the_image_nor_the_time(own):
    """What the last block says of the condition is the same for another image at another time."""
    model, seen = own[1].denoiser, []
    hook = model.transformer_blocks[-1].register_forward_hook(lambda _m, _i, output: seen.append(output[1]))
    text, mask = torch.randn(1, 64, 64), (torch.arange(64) < 30)[None]
    reference = torch.randn(1, 12, 64)
    with torch.no_grad():
        for time in (0.2, 0.9):
            img = torch.cat((torch.randn(1, 20, 64), reference), dim=1)
            model(img, ((5, 4), (3, 4)), text, mask, torch.tensor([time]), (6,))
    hook.remove()
    assert torch.equal(*seen) and seen[0].shape == (1, 76, 64)


def test_one_block_of_full_width_equals_diffusers():
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21TransformerBlock as Theirs

    sizes = random.qwen_21_shape(random.FULL)
    torch.manual_seed(0)
    with torch.device("meta"):
        ours, other = JointTransformerBlock(4096, 128, 12288), Theirs(4096, 32, 128)
    wide.filled(ours)
    other.load_state_dict(ours.state_dict(), assign=True)
    img, cond, modulation = torch.randn(1, 8, 4096), torch.randn(1, 6, 4096), torch.randn(2, 4 * 4096)
    angles = torch.randn(14, 64)
    pe, rotary = torch.stack((angles.cos(), angles.sin())), torch.polar(torch.ones_like(angles), angles)
    mask, is_image = torch.ones(1, 14, dtype=torch.bool), torch.arange(14) >= 6
    with torch.no_grad():
        actual = ours(img, cond, modulation[:1], modulation[1:], pe[:, None, None, 6:], pe[:, :6], mask)
        arguments = {"target_token_mask": is_image, "segments": [(0, 6, True)]}
        expected = other(torch.cat((cond, img), dim=1), modulation, rotary, **arguments)
    assert sizes.axes == (16, 56, 56)
    torch.testing.assert_close(torch.cat((actual[1], actual[0]), dim=1), expected, rtol=1e-4, atol=1e-4)


def test_a_full_model_has_the_parameters_of_diffusers_and_transformers():
    from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
    from transformers.models.qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel

    networks = random.make_networks(random.FULL)
    ours, vae, encoder = networks.denoiser(), networks.vae().network, networks.encoders["text_encoder"]()
    with torch.device("meta"):
        others = [QwenImage21Transformer2DModel(), AutoencoderKLQwenImage21()]
        others.append(Qwen3VLVisionModel(Qwen3VLVisionConfig(out_hidden_size=4096)))
    for own_network, other in zip((ours, vae, encoder.visual), others, strict=True):
        shapes = [{n: t.shape for n, t in network.state_dict().items()} for network in (own_network, other)]
        assert shapes[0] == shapes[1]
    assert sum(type(module).__name__ == BLOCK for module in ours.modules()) == 32
    # Those of the published model, which are read from diffusers.
    assert (sum(vae.config.latents_mean), sum(vae.config.latents_std)) == pytest.approx((7.721, 240.5952))
    assert encoder.visual.deepstack_visual_indexes == [8, 16, 24] and encoder.visual.config.num_heads == 16


class Processor:
    """Qwen3-VL's processor, which needs torchvision: its chat, and the images by transformers' own class."""

    def __init__(self, tokenizer, images):
        self.tokenizer, self.images = tokenizer, images

    def apply_chat_template(self, messages, **_):
        return [self.tokenizer(f"<|im_start|>system\n{messages[0]['content'][0]['text']}<|im_end|>\n").input_ids]

    def __call__(self, text, images=None, padding_side="left", **_):
        from transformers import BatchFeature

        seen = self.images(images=images, return_tensors="pt") if images else {}
        counts = [int(grid.prod()) // 4 for grid in seen.get("image_grid_thw", ())]
        rows = []
        for row in text:
            first, *pieces = row.split(text_encoder.PICTURE)
            rows.append(first + "".join(f"{text_encoder.PICTURE * counts.pop(0)}{piece}" for piece in pieces))
        found = dict(self.tokenizer(rows, padding=True, padding_side=padding_side, return_tensors="pt"))
        kinds = (found["input_ids"] == self.tokenizer.convert_tokens_to_ids(text_encoder.PICTURE)).long()
        return BatchFeature({**found, **seen, "mm_token_type_ids": kinds})


@pytest.fixture(scope="module")
def pipeline(own, theirs):
    """diffusers' pipeline with the same weights in its own networks."""
    from diffusers import FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ours, tokenizer = own[1].encoders["text_encoder"], own[1].tokenizers["text_encoder"]
    settings = {"text_config": ours.language.config.to_dict(), "vision_config": ours.visual.config.to_dict()}
    config = Qwen3VLConfig(**settings)
    config.image_token_id = tokenizer.convert_tokens_to_ids(text_encoder.PICTURE)
    encoder = Qwen3VLForConditionalGeneration(config).eval()
    state = {n.replace("language.", "language_model."): tensor for n, tensor in ours.state_dict().items()}
    missing, unexpected = encoder.model.load_state_dict(state, strict=False)
    assert missing == ["language_model.norm.weight"] and not unexpected
    limits = {"min_pixels": text_encoder.MIN_SEEN_PIXELS, "max_pixels": text_encoder.MAX_SEEN_PIXELS}
    eyes = Qwen2VLImageProcessorPil(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3, **limits)
    shifts = {"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192}
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, shift_terminal=0.02, **shifts)
    pipe = QwenImage21Pipeline(scheduler, own[1].vae.network, encoder, Processor(tokenizer, eyes), theirs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(width, height):
    rows, columns = np.mgrid[:height, :width]
    colours = np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=-1)
    return Image.fromarray(colours.astype("uint8"))


def test_captions_are_encoded_as_the_pipeline_does(own, pipeline):
    """Among them none at all, Chinese, and one that is cut before the end of the chat."""
    with torch.no_grad():
        actual = own[0].text(own[1], CAPTIONS)
        expected, mask, _ = pipeline.encode_prompt(CAPTIONS[:4])
    states, own_mask = actual[EMBED], actual[MASK]
    longest = own[0].checkpoint.longest(own[1].tokenizers["text_encoder"], CAPTIONS)
    assert states.shape == (5, 1024, 64) and longest == 1024 and int(own_mask[4].sum()) == 1024
    for row, seen in enumerate(mask.bool()):
        count = int(seen.sum())
        assert int(own_mask[row].sum()) == count and not states[row, count:].any()
        torch.testing.assert_close(states[row, :count], expected[row, seen], rtol=1e-4, atol=1e-5)


def test_captions_with_references_are_encoded_as_the_pipeline_does(own, pipeline):
    """The words alone; their places among the pictures are the pipeline's."""
    pictures = [picture(256, 256), picture(320, 256)]
    with torch.no_grad():
        actual = own[0].text_with_pictures(own[1], CAPTIONS[1:2], [pictures])
        expected, _, is_picture = pipeline.encode_prompt(CAPTIONS[1:2], [image.convert("RGBA") for image in pictures])
    words = expected[0][~is_picture[0]]
    count = int(actual[MASK].sum())
    torch.testing.assert_close(actual[EMBED][0, :count], words, rtol=1e-3, atol=1e-4)
    starts = (~is_picture[0]).cumsum(0)[is_picture[0]].unique().tolist()
    leads = own[0].leads
    assert starts == [leads[0], leads[0] + leads[1]] and len(leads) == 10
    assert own[0].picture_tokens(own[1], [(256, 256), (320, 256)]) >= sum(leads[:2])


def test_latents_are_the_pipelines_also_in_tiles(own, pipeline, monkeypatch):
    pixels = torch.rand(1, 3, 128, 96) * 2 - 1
    with torch.no_grad():
        expected = pipeline._encode_vae_image(torch.cat((pixels, torch.ones(1, 1, 128, 96)), 1)[:, :, None], None)
        actual = own[0].latents(own[1], pixels)
        torch.testing.assert_close(pack(actual), expected.flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-5)
        monkeypatch.setattr(vae_tiles, "TILE_VALUES", 96 * 32)
        means = own[1].vae.encode(pixels)
        torch.testing.assert_close(vae_tiles.encode_in_tiles(own[1].vae, pixels), means, rtol=1e-4, atol=1e-4)
        decoded = own[1].vae.decode(means)[0]
        torch.testing.assert_close(vae_tiles.decode_in_tiles(own[1].vae, means), decoded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("version", "scale", "references"), [("base", 1.0, 0), ("base", 3.0, 2), ("turbo", 1.0, 0)])
def test_a_preview_equals_the_pipelines_image(files, own, pipeline, version, scale, references):
    turbo = [1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568]
    shown = tuple(picture(300 + 90 * n, 260) for n in range(references))
    size = {"width": 288, "height": 256, "steps": len(turbo) if version == "turbo" else 2}
    request = SampleRequest(CAPTIONS[1], "blurry", scale=scale, seed=5, controls=shown, **size)
    sampler = family(files, model_version=version).sampler(own[1])
    if version == "turbo":
        pipeline.scheduler.register_to_config(use_dynamic_shifting=False, shift_terminal=None)
    with torch.no_grad():
        ours = sampler.latents(request)
        theirs = pipeline(
            prompt=CAPTIONS[1],
            image=list(shown) or None,
            negative_prompt="blurry" if scale > 1 else None,
            true_cfg_scale=scale,
            height=256,
            width=288,
            num_inference_steps=request.steps,
            sigmas=turbo if version == "turbo" else None,
            generator=torch.Generator().manual_seed(5),
            output_type="latent",
            output_resolution=math.sqrt(288 * 256),
        ).images
    torch.testing.assert_close(pack(ours), theirs, rtol=1e-3, atol=1e-3)
    assert sampler.decoded(ours).std() > 0.01


@pytest.mark.parametrize(("scale", "references", "one_by_one"), [(1.0, 0, False), (3.0, 2, False), (3.0, 1, True)])
def test_the_condition_is_computed_once_for_all_steps_of_an_image(
    files, own, monkeypatch, scale, references, one_by_one
):
    """Captions of two lengths, with and without references: bit for bit the picture of steps that compute it again."""
    shown = tuple(picture(300 + 90 * n, 260) for n in range(references))
    request = SampleRequest(CAPTIONS[1], "", 288, 256, 3, scale, seed=5, controls=shown)
    made, condition = [], JointTransformerBlock.condition_in_block
    monkeypatch.setattr(JointTransformerBlock, "condition_in_block", lambda *args: made.append(1) or condition(*args))
    sampler = family(files).sampler(own[1])
    sampler.one_by_one = one_by_one
    blocks, batches = len(own[1].denoiser.transformer_blocks), 1 + one_by_one

    def latents():
        made.clear()
        with torch.no_grad():
            return sampler.latents(request), len(made)

    once, number = latents()
    assert number == blocks * batches
    sampler.room_to_keep = lambda: 1000
    again, number = latents()
    assert number == blocks * batches * 3 and torch.equal(once, again)


def test_a_saved_model_has_the_names_of_its_file(files, own):
    stored, saved = load_file(files["qwen_image_21"]), own[0].export(own[1])
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in stored)
    assert {"transformer_blocks.0.img_mlp.gate_up.weight", "txt_in.text_norm.weight"} <= stored.keys()
    assert saved["txt_in.text_norm.weight"].abs().max() < 0.5
