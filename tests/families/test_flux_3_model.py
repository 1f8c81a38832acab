"""FLUX.3's networks against diffusers' and transformers', with the same weights."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from library.families.base import SampleRequest
from library.families.flux_3 import keys, random, sampler, text_encoder
from library.families.flux_3.model import CONTAINERS, Flux3, Flux3ImageBlock, Flux3Layers, MMSingleStreamBlock
from library.families.shared import autoencoder, packing, qwen3_vl, statistics_vae
from tests.families import alike, wide

CAPTIONS = ["a red circle", "", "一只红色的猫", "a drawing of a blue square, simple, flat colors, best quality " * 4]
CPU = torch.device("cpu")
REFERENCES = [(2, 3), (3, 1), (1, 1)]  # in tokens


def family(files, script="flux_3_train_network", **values):
    return alike.family_of(files, "flux_3", script, values, cache_text_encoder_outputs=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("flux_3"), dtype=torch.float32)


@pytest.fixture(scope="module")
def own(files):
    own_family = family(files)
    return own_family, own_family.load(torch.float32)


@pytest.fixture(scope="module")
def distilled(tmp_path_factory):
    sizes = replace(random.TINY, distilled=True)
    made = random.write_random_model(tmp_path_factory.mktemp("distilled"), dtype=torch.float32, sizes=sizes)
    own_family = family(made)
    return own_family, own_family.load(torch.float32)


def for_diffusers(tensors):
    """Our tensors under diffusers' names and with its order of the last modulation's halves."""
    named = {}
    for name, tensor in tensors.items():
        swapped = name.startswith(keys.LAST_MODULATION) and tensor.dim() > 1
        named[keys.diffusers_flux_3_path(name)] = torch.cat(tensor.chunk(2)[::-1]) if swapped else tensor
    return named


def theirs_of(denoiser):
    """The transformer in diffusers with the same weights."""
    from diffusers import Flux3Transformer2DModel

    model = Flux3Transformer2DModel(**random.diffusers_settings(denoiser.sizes))
    model.load_state_dict(for_diffusers(denoiser.state_dict()), strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def theirs(own):
    return theirs_of(own[1].denoiser)


def places(size, scale=0.5, number=0):
    """The positions of an image in diffusers."""
    from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids

    return _prepare_image_ids(*size, scale, l_coord=-number)


def said_by(model, img, sizes, txt, times, targets):
    count = sizes[0][0] * sizes[0][1]
    words = torch.zeros(txt.shape[1], 4)
    words[:, 3] = torch.arange(txt.shape[1])
    shown = {}
    if len(sizes) > 1:
        ids = torch.cat([places(size, number=number) for number, size in enumerate(sizes[1:], 1)])
        shown = {"image_cond_hidden_states": img[:, count:], "image_cond_ids": ids}
    if model.config.flow_map:
        shown["target_timestep"] = targets
    return model(img[:, :count], txt, times, places(sizes[0]), words, return_dict=False, **shown)[0]


@pytest.mark.parametrize(("kind", "references"), [("base", 0), ("base", 1), ("base", 3), ("distilled", 2)])
def test_the_denoiser_and_its_gradients_equal_diffusers(own, distilled, theirs, kind, references):
    """In a batch of captions of two lengths, which diffusers reads one by one, at an odd number of tokens."""
    if (kind, references) in (("distilled", 0), ("distilled", 1)):
        pytest.skip("the second time is the same with every number of references")
    ours, other = (
        (own[1].denoiser, theirs) if kind == "base" else (distilled[1].denoiser, theirs_of(distilled[1].denoiser))
    )
    sizes, lengths = ((3, 5), *REFERENCES[:references]), (16, 40)
    generator = torch.Generator().manual_seed(0)
    count = sum(height * width for height, width in sizes)
    img = torch.randn(2, count, 128, generator=generator).requires_grad_()
    txt = torch.randn(2, 40, 320, generator=generator).requires_grad_()
    mask = (torch.arange(40) < torch.tensor(lengths)[:, None]).long()
    times, targets = torch.tensor([0.3, 0.8]), torch.tensor([0.1, 0.7])

    inputs = {"img": img, "txt": txt}

    def one_by_one():
        rows = (slice(row, row + 1) for row in range(2))
        return torch.cat(
            [
                said_by(other, img[row], sizes, txt[row, :length], times[row], targets[row])
                for row, length in zip(rows, lengths, strict=True)
            ]
        )

    actual, by_us = alike.output_and_gradients(ours, inputs, lambda: ours(img, sizes, txt, mask, times, targets))
    expected, by_them = alike.output_and_gradients(other, inputs, one_by_one)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    by_us, by_them = ({n: t for n, t in found.items() if t is not None} for found in (by_us, by_them))
    by_us = for_diffusers({n: t for n, t in by_us.items() if "." in n}) | {n: by_us[n] for n in ("img", "txt")}
    assert by_us.keys() == by_them.keys() and all(gradient.any() for gradient in by_us.values())
    assert any("image_cond" in name for name in by_us) == bool(references)
    alike.assert_gradients_close(by_us, by_them)


def test_without_a_target_a_distilled_model_is_asked_for_the_velocity_at_the_time(distilled):
    model, time = distilled[1].denoiser, torch.tensor([0.4])
    inputs = torch.randn(1, 6, 128), ((2, 3),), torch.randn(1, 16, 320), torch.ones(1, 16)
    with torch.no_grad():
        assert torch.equal(model(*inputs, time), model(*inputs, time, time))
        assert not torch.allclose(model(*inputs, time), model(*inputs, time, torch.tensor([0.1])))


def test_one_block_of_full_width_of_each_kind_equals_diffusers():
    from diffusers.models.transformers import transformer_flux3

    sizes = random.flux_3_shape(random.FULL)
    assert sizes.axes == (32, 32, 32, 32)
    with torch.device("meta"):
        small, single, mode = (
            Flux3(random.flux_3_shape(random.TINY)),
            MMSingleStreamBlock(sizes),
            Flux3ImageBlock(sizes),
        )
        others = (
            transformer_flux3.Flux3SingleTransformerBlock(3072, 24, 128),
            transformer_flux3.Flux3ModeTransformerBlock(3072, 24, 128),
        )
    small.axes = sizes.axes
    words, image, _ = small.positions(((2, 3),), 3, CPU)
    torch.manual_seed(0)
    txt, img = torch.randn(1, 3, 3072), torch.randn(1, 6, 3072)
    mods = [torch.randn(1, count, 3 * 3072) / 4 for count in (3, 6)]
    pe, mask = torch.cat((words, image), dim=1), torch.ones(1, 9, dtype=torch.bool)
    wide.filled(single)
    mode.load_state_dict(single.state_dict(), assign=True)
    state = {keys.IN_A_BLOCK[b]: b for b in keys.IN_A_BLOCK}
    for other in others:
        named = {}
        for name, tensor in single.state_dict().items():
            path = name if name in state else name.removesuffix(".weight")
            named[f"{state[path]}{'' if name in state else '.weight'}"] = tensor
        other.load_state_dict(named, strict=True, assign=True)
    tables = [tuple(part.repeat_interleave(2, dim=-1) for part in table) for table in (pe, image)]
    with torch.no_grad():
        actual = single(torch.cat((txt, img), 1), torch.cat(mods, 1), pe, mask)
        expected = torch.cat(others[0](img, txt, mods[1], mods[0], tables[0]), 1)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(
            mode(img, mods[1][:, :1], image), others[1](img, mods[1][:, :1], tables[1]), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("is_distilled", [False, True])
def test_full_models_have_the_parameters_of_diffusers(is_distilled):
    from diffusers import Flux3Transformer2DModel

    ours = random.make_networks(replace(random.FULL, distilled=is_distilled)).denoiser()
    with torch.device("meta"):
        other = Flux3Transformer2DModel(flow_map=is_distilled)
    shapes = [
        {n: t.shape for n, t in named.items()} for named in (for_diffusers(ours.state_dict()), other.state_dict())
    ]
    assert shapes[0] == shapes[1]
    assert sum(p.numel() for p in ours.parameters()) == 5_538_458_368 + is_distilled * 10_223_616
    count = {kind: sum(type(m).__name__ == kind for m in ours.modules()) for kind in CONTAINERS}
    assert [*count.values()] == [5, 5, 5, 28]
    assert text_encoder.unread_layers(36) == 4 and text_encoder.taps(32) == (4, 8, 12, 16, 20, 24, 28, 32)


# ---- the pipeline


class Processor:
    """What the pipeline asks of Qwen3-VL's processor, whose template for one message of a user this is."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        (message,) = messages
        assert not tokenize and add_generation_prompt
        return f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def pipeline_of(files, own):
    """diffusers' modular pipeline with the same weights in its own networks, for a transformer of ours."""
    from diffusers import AutoencoderKLFlux2
    from diffusers.modular_pipelines import flux3
    from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
    from transformers import Qwen3VLTextConfig, Qwen3VLTextModel

    stored = load_file(files["text_encoder"])
    tensors = {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    del tensors[qwen3_vl.VISION_MARK]
    config = Qwen3VLTextConfig(
        vocab_size=tensors["embed_tokens.weight"].shape[0],
        hidden_size=40,
        intermediate_size=128,
        num_hidden_layers=9,
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
    vae = AutoencoderKLFlux2(block_out_channels=random.TINY.vae_widths)
    vae.load_state_dict(autoencoder.vae_to_diffusers(load_file(files["vae"])), strict=True)
    tokenizer = own[1].tokenizers["text_encoder"]
    components = {
        "text_encoder": encoder,
        "tokenizer": Processor(tokenizer),
        "vae": vae.eval(),
        "image_processor": Flux3ImageProcessor(),
    }

    def made(denoiser):
        blocks = (flux3.Flux3DistilledAutoBlocks if denoiser.sizes.distilled else flux3.Flux3AutoBlocks)()
        blocks.sub_blocks.pop("prompt_upsampler")
        pipe = blocks.init_pipeline()
        pipe.update_components(transformer=theirs_of(denoiser), **components)
        return pipe

    return made


@pytest.fixture(scope="module")
def pipeline(own, pipeline_of):
    return pipeline_of(own[1].denoiser)


def test_captions_are_encoded_as_the_pipeline_does(own, pipeline):
    """Among them none at all, Chinese, and one that fills more than a window."""
    from diffusers.modular_pipelines.flux3.encoders import Flux3TextEncoderStep

    with torch.no_grad():
        actual = own[0].text(own[1], CAPTIONS)
    states, mask = actual["ctx_vec"], actual["ctx_mask"]
    lengths = []
    for row, caption in enumerate(CAPTIONS):
        with torch.no_grad():
            (expected,) = Flux3TextEncoderStep._get_qwen3_vl_prompt_embeds(
                pipeline.text_encoder, pipeline.tokenizer, caption, hidden_states_layers=tuple(range(1, 9))
            )
        lengths.append(len(expected))
        assert int(mask[row].sum()) == len(expected) and not states[row, len(expected) :].any()
        torch.testing.assert_close(states[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)
    assert lengths[:3] == [80] * 3 and lengths[3] > 80 and states.shape[1:] == (lengths[3], 320)
    assert own[0].checkpoint.longest(own[1].tokenizers["text_encoder"], CAPTIONS) == lengths[3]


def test_latents_are_the_pipelines_squares(own, pipeline):
    from diffusers.modular_pipelines.flux3.encoders import Flux3VaeEncoderStep

    pixels = torch.rand(1, 3, 64, 48) * 2 - 1
    step, block = Flux3VaeEncoderStep(), SimpleNamespace(condition_images=[pixels])
    with torch.no_grad():
        step.get_block_state, step.set_block_state = lambda _state: block, lambda *_: None
        step(pipeline, SimpleNamespace())
        actual = own[0].latents(own[1], pixels)
    assert actual.shape == (1, 32, 8, 6)
    (expected,) = block.image_cond_latents
    torch.testing.assert_close(packing.pack(actual), expected.flatten(2).transpose(1, 2), rtol=1e-5, atol=1e-5)
    back = statistics_vae.denormalised(own[1].vae, actual)
    torch.testing.assert_close(back, pipeline.vae.encode(pixels).latent_dist.mode(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "scale", "shown"),
    [("base", 4.0, ()), ("base", 1.0, ((70, 100),)), ("distilled", 1.0, ((70, 100), (40, 33)))],
)
def test_a_preview_equals_the_pipelines_image(own, distilled, pipeline_of, pipeline, kind, scale, shown):
    from diffusers import ClassifierFreeGuidance

    model_family, parts = own if kind == "base" else (distilled[0], own[1])
    pipe = pipeline
    if kind == "distilled":
        parts = replace(own[1], denoiser=distilled[1].denoiser)
        pipe = pipeline_of(parts.denoiser)
    else:
        pipe.update_components(guider=ClassifierFreeGuidance(guidance_scale=scale, enabled=scale > 1))
    pictures = [Image.effect_noise(size, 90).convert("RGB") for size in shown]
    request = SampleRequest(
        CAPTIONS[3], "blurry", width=96, height=64, steps=3, scale=scale, seed=5, controls=tuple(pictures)
    )
    options = {"image": pictures} if pictures else {}
    if scale > 1:
        options["negative_prompt"] = "blurry"
    with torch.no_grad():
        ours = model_family.sampler(parts)
        actual = ours.decoded(ours.latents(request))
        expected = pipe(
            prompt=CAPTIONS[3],
            height=64,
            width=96,
            num_inference_steps=3,
            text_encoder_out_layers=tuple(range(1, 9)),
            latents=torch.randn(1, 128, 4, 6, generator=torch.Generator().manual_seed(5)),
            output_type="pt",
            output="images",
            **options,
        )[0]
    assert actual.std() > 0.01
    torch.testing.assert_close(actual, expected.squeeze(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kind", "scale", "references", "one_by_one"),
    [("base", 1.0, 0, False), ("base", 3.0, 2, False), ("base", 3.0, 1, True), ("distilled", 1.0, 1, False)],
)
def test_text_and_references_are_computed_once_for_all_steps_of_an_image(
    own, distilled, monkeypatch, kind, scale, references, one_by_one
):
    """Bit for bit the picture of steps that compute them again; those of a distilled model depend on the step."""
    model_family, parts = own if kind == "base" else (distilled[0], replace(own[1], denoiser=distilled[1].denoiser))
    shown = tuple(Image.effect_noise((70 + 30 * n, 100), 90).convert("RGB") for n in range(references))
    request = SampleRequest(CAPTIONS[0], "blurry", 96, 64, 3, scale, seed=5, controls=shown)
    computed, updated = [], Flux3Layers.updated
    monkeypatch.setattr(Flux3Layers, "updated", lambda *args: computed.append(type(args[0]).__name__) or updated(*args))
    sampler_of = model_family.sampler(parts)
    sampler_of.one_by_one = one_by_one

    def latents():
        computed.clear()
        with torch.no_grad():
            return sampler_of.latents(request), [computed.count(f"Flux3{kind}Block") for kind in ("Text", "Reference")]

    blocks, batches = len(parts.denoiser.txt_mode_blocks), 1 + one_by_one
    in_every_step = [blocks * batches * 3, blocks * batches * 3 * bool(references)]
    once, numbers = latents()
    assert numbers == ([number // 3 for number in in_every_step] if kind == "base" else in_every_step)
    sampler_of.room_to_keep = lambda: 0
    again, numbers = latents()
    assert numbers == in_every_step and torch.equal(once, again)


@pytest.mark.parametrize("size", [(100, 70), (10, 200), (2500, 2000), (17, 64)])
def test_reference_images_are_prepared_as_in_the_pipeline(size):
    from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor

    picture = Image.effect_noise(size, 90).convert("RGB")
    for alone, mode in ((True, "fill"), (False, "crop")):
        if not alone and min(size) < 16:
            continue
        expected, _ = Flux3ImageProcessor().preprocess(picture, resize_mode=mode)
        actual = sampler.pixels_of(picture, alone)
        assert actual.shape == expected.shape and (actual - expected).abs().max() < 1e-5


def test_a_saved_model_has_the_names_of_its_file(files, own):
    stored = load_file(files["flux_3"])
    saved = own[0].export(own[1])
    assert saved.keys() == stored.keys() and all(torch.equal(saved[name], stored[name]) for name in stored)
    assert {"content_mode_blocks.image_cond.0.mlp_in.weight", "final_layer.image.linear.weight"} <= stored.keys()
