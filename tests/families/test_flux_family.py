"""FLUX.1 as a family: names, conditions, a training step and previews, with a tiny model in the real formats."""

import csv
from pathlib import Path

import pytest
import torch

from library.families.base import SampleRequest
from library.families.flux.model import Flux, Sizes
from library.families.shared import clip, packing
from library.objectives.base import NoisedBatch
from tests import double_stream, flux_files, links
from tests.families.flux import family, step

GOLDEN = Path(__file__).parent.parent / "golden"


# ---- what the family is


def test_the_protocol_is_answered(dev):
    from library.families.base import Family

    assert all(hasattr(dev, name) for name in Family.__annotations__)
    assert dev.grid == 16 and type(dev).block_classes == ("DoubleStreamBlock", "SingleStreamBlock")


def test_dev_and_schnell_are_told_apart_by_their_tensors(files, schnell):
    for paths, architecture, length in ((files, "flux-1-dev", 512), (schnell, "flux-1-schnell", 256)):
        of = family(paths)
        assert (of.architecture, of.text_length) == (architecture, length)
        assert (of.load(torch.float32).denoiser.guidance_in is None) == (architecture == "flux-1-schnell")
    assert family(files, t5xxl_max_token_length=77).text_length == 77


def test_a_lora_of_schnell_is_proposed_its_assistant_unless_the_file_is_undistilled(files, schnell, tmp_path):
    assert not [*family(files).notes()]
    (note,) = family(schnell).notes()
    assert "forgets how to generate in few steps" in str(note)
    assert note.fix["assistant_lora"].startswith("ostris/FLUX.1-schnell")
    assert not [*family(schnell, **note.fix).notes()]
    (note,) = family(schnell, "flux_train").notes()
    assert not note.fix
    other = tmp_path / "OpenFLUX.1.safetensors"
    links.link_or_copy(other, schnell["flux"])
    assert not [*family({**schnell, "flux": other}).notes()]
    (note,) = family({**schnell, "flux": other}, assistant_lora="a.safetensors").notes()
    assert "for distilled models, and OpenFLUX.1.safetensors is not one" in str(note)


def test_adapter_names_and_sizes_are_the_reference_at_full_size(dev):
    rows = [r for r in csv.reader((GOLDEN / "sd_scripts_lora_keys.tsv").open(encoding="utf-8"), delimiter="\t")]
    names = [row[0] for row in rows]
    start = next(i for i, name in enumerate(names) if name.startswith("# FLUX.1"))
    expected = {row[0]: (int(row[1]), int(row[2])) for row in rows[start + 1 :] if not row[0].startswith("#")}
    assert len(expected) == 376

    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        denoiser = Flux(Sizes(64, 64, 768, 4096, 3072, 128, 12288, 19, 38, True))
        encoder = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_attention_heads=12))
    blocks = [("denoiser", path, m) for path, m in denoiser.named_modules() if "_blocks." in path]
    layers = [("clip_l", path, m) for path, m in encoder.named_modules() if "layers." in path]
    sizes = {
        dev.adapter_name(part, path): (m.in_features, m.out_features)
        for part, path, m in (*blocks, *layers)
        if isinstance(m, torch.nn.Linear)
    }
    assert sizes == expected


def test_names_of_t5_and_embedder_adapters(dev, parts):
    linear = [path for path, m in parts.encoders["t5xxl"].named_modules() if isinstance(m, torch.nn.Linear)]
    assert dev.adapter_name("t5xxl", linear[0]) == "lora_te3_encoder_block_0_layer_0_SelfAttention_q"
    assert dev.adapter_name("denoiser", "time_in.in_layer") == "lora_unet_time_in_in_layer"


@pytest.mark.parametrize(("number", "expected"), [(1, (0, 2)), (2, (1, 2)), (3, (1, 4)), (9, (2, 4))])
def test_blocks_to_swap_counts_a_double_block_as_two_single_ones(dev, parts, number, expected):
    assert tuple(dev.swap_plan(number).values()) == expected


# ---- captions and images


def test_text_has_the_shapes_and_names_of_the_cache(dev, parts):
    with torch.no_grad():
        text = dev.text(parts, ["a red circle", "a blue square, " * 40])
    assert tuple(text) == dev.text_cache.keys
    assert text["l_pooled"].shape == (2, 64) and text["t5_out"].shape == (2, 16, 64)
    assert text["txt_ids"].shape == (2, 16, 3) and not text["txt_ids"].any()
    assert text["t5_attn_mask"].shape == (2, 16)
    assert text["t5_attn_mask"][1].all() and not text["t5_attn_mask"][0].all()


def test_text_of_some_encoders_only(dev, parts):
    with torch.no_grad():
        whole = dev.text(parts, ["a red circle"])
        assert tuple(dev.text(parts, ["a red circle"], ("clip_l",))) == ("l_pooled",)
        t5_alone = dev.text(parts, ["a red circle"], ("t5xxl",))
    assert tuple(t5_alone) == ("t5_out", "txt_ids", "t5_attn_mask")
    assert torch.equal(t5_alone["t5_out"], whole["t5_out"])


def test_pooled_text_is_the_state_at_the_first_end_mark(dev, parts):
    tokenizer, encoder = parts.tokenizers["clip_l"], parts.encoders["clip_l"]
    ids = clip.clip_tokens(tokenizer, ["a red circle on a white background"])[:, 0]
    end = ids[0].tolist().index(tokenizer.eos_token_id)
    with torch.no_grad():
        states = encoder(input_ids=ids).last_hidden_state
        pooled = dev.text(parts, ["a red circle on a white background"], ("clip_l",))["l_pooled"]
    assert 1 < end < 76
    torch.testing.assert_close(pooled[0], states[0, end])


def test_the_mask_keeps_padding_out_of_t5_and_of_the_denoiser(files, dev, parts):
    masked = family(files, t5xxl_max_token_length=16, apply_t5_attn_mask=True)
    noised, text = step(dev, parts)
    _, seen = step(masked, parts)
    assert not torch.allclose(text["t5_out"], seen["t5_out"])
    sizes = torch.zeros(2, 6)
    before = masked.predict(parts.denoiser, noised, seen, sizes)
    changed = {**seen, "t5_out": torch.where(seen["t5_attn_mask"][..., None] > 0, seen["t5_out"], 7.0)}
    torch.testing.assert_close(masked.predict(parts.denoiser, noised, changed, sizes), before)
    assert not torch.allclose(dev.predict(parts.denoiser, noised, changed, sizes), before)


def test_gradients_reach_the_text_encoders(files):
    of = family(files, t5xxl_max_token_length=16)
    parts = of.load(torch.float32)
    noised, _ = step(of, parts)
    for encoder in parts.encoders.values():
        encoder.requires_grad_(True)
    text = of.text(parts, ["a red circle", "a blue square"])
    of.predict(parts.denoiser, noised, text, None).sum().backward()
    assert parts.encoders["clip_l"].get_submodule("encoder.layers.0.mlp.fc1").weight.grad.abs().sum() > 0
    assert parts.encoders["t5xxl"].shared.weight.grad.abs().sum() > 0


def test_latents_are_scaled_and_shifted_samples(dev, parts):
    pixels = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = dev.latents(parts, pixels, torch.Generator().manual_seed(5))
    with torch.no_grad():
        sample = parts.vae.encode(pixels).latent_dist.sample(torch.Generator().manual_seed(5))
    assert latents.shape == (2, 16, 8, 12) and latents.dtype == torch.float32
    torch.testing.assert_close(latents, (sample - 0.1159) * 0.3611)
    one_by_one = dev.latents(parts, pixels, [torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)])
    again = dev.latents(parts, pixels[1:], [torch.Generator().manual_seed(6)])
    torch.testing.assert_close(one_by_one[1:], again, rtol=1e-4, atol=1e-4)


# ---- a step


def test_packing_equals_the_reference():
    import json

    golden = json.loads((GOLDEN / "sd_scripts_vectors.json").read_text(encoding="utf-8"))
    latents = torch.arange(32.0).view(1, 2, 4, 4)
    assert packing.pack(latents).tolist() == golden["pack"]
    assert packing.image_positions(2, 3, torch.device("cpu"))[None].tolist() == golden["img_ids_2x3"]


def test_packing_and_unpacking_cancel():
    latents = torch.randn(2, 16, 6, 10)
    assert torch.equal(packing.unpack(packing.pack(latents), 3, 5), latents)


@pytest.mark.parametrize("kind", ["raw", "additive", "sigma_scaled"])
def test_prediction_is_the_models_answer_by_its_type(files, parts, kind):
    of = family(files, t5xxl_max_token_length=16, model_prediction_type=kind, guidance_scale=2.0)
    noised, text = step(of, parts)
    answer = parts.denoiser(
        packing.pack(noised.latents),
        packing.image_positions(4, 6, torch.device("cpu")),
        text["t5_out"],
        torch.zeros(16, 3),
        noised.sigmas,
        text["l_pooled"],
        torch.full((2,), 2.0),
    )
    raw = packing.unpack(answer, 4, 6)
    sigmas = noised.sigmas.view(-1, 1, 1, 1)
    expected = {"raw": raw, "additive": raw + noised.latents, "sigma_scaled": noised.latents - sigmas * raw}[kind]
    prediction = of.predict(parts.denoiser, noised, text, None)
    assert prediction.dtype == torch.float32 and prediction.shape == noised.target.shape
    torch.testing.assert_close(prediction, expected)


def test_guidance_matters_to_dev_and_not_to_schnell(files, schnell, parts):
    low, high = (family(files, t5xxl_max_token_length=16, guidance_scale=scale) for scale in (1.0, 8.0))
    noised, text = step(low, parts)
    first, second = (of.predict(parts.denoiser, noised, text, None) for of in (low, high))
    assert not torch.allclose(first, second)
    low, high = (family(schnell, t5xxl_max_token_length=16, guidance_scale=scale) for scale in (1.0, 8.0))
    other = low.load(torch.float32)
    assert torch.equal(*(of.predict(other.denoiser, noised, text, None) for of in (low, high)))


def test_position_tensors_are_made_once_for_each_size(dev, parts):
    noised, text = step(dev, parts)
    dev.predict(parts.denoiser, noised, text, None)
    tables = len(parts.denoiser._tables)
    dev.predict(parts.denoiser, noised, text, None)
    assert len(parts.denoiser._tables) == tables
    device = torch.device("cpu")
    with torch.inference_mode():
        positions = dev.positions.image(9, 9, device)
    assert not positions.is_inference() and dev.positions.image(9, 9, device) is positions


def test_a_step_does_not_make_the_host_wait(files):
    """Fake tensors have no values: reading one (.item(), nonzero, a branch) would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    of = family(files, timestep_sampling="flux_shift", apply_t5_attn_mask=True)
    denoiser = of.load(torch.float32).denoiser.requires_grad_(True)
    with FakeTensorMode(allow_non_fake_inputs=True):
        text = {"l_pooled": torch.zeros(2, 64), "t5_out": torch.zeros(2, 16, 64), "t5_attn_mask": torch.ones(2, 16)}
        noised = of.noised(torch.zeros(2, 16, 8, 12), None)
        wrong = (of.predict(denoiser, noised, text, torch.zeros(2, 6)) - noised.target).square().mean()
        wrong.backward()


def test_a_tiny_model_learns(files):
    of = family(files, t5xxl_max_token_length=16, timestep_sampling="sigmoid")
    parts = of.load(torch.float32)
    noised, text = step(of, parts)
    parts.denoiser.requires_grad_(True)
    optimizer = torch.optim.AdamW(parts.denoiser.parameters(), lr=2e-3)
    losses = []
    for _ in range(15):
        loss = (of.predict(parts.denoiser, noised, text, None) - noised.target).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] < 10 and losses[-1] < 0.7 * losses[0]


# ---- previews


def test_previews_repeat_and_leave_random_state_alone(dev, parts):
    sampler = dev.sampler(parts)
    before = torch.get_rng_state()
    first = sampler(SampleRequest("a red circle", "blurry", 130, 96, 3, 2.0, 3.5, 7, "euler"))
    assert first.size == (128, 96) and torch.equal(before, torch.get_rng_state())
    assert sampler(SampleRequest("a red circle", "blurry", 128, 96, 3, 2.0, 3.5, 7)).tobytes() == first.tobytes()
    assert sampler(SampleRequest("a red circle", "blurry", 128, 96, 3, 2.0, 3.5, 8)).tobytes() != first.tobytes()
    assert sampler(SampleRequest("a red circle", "blurry", 128, 96, 3, 1.0, 3.5, 7)).tobytes() != first.tobytes()
    assert sampler(SampleRequest("a red circle", "sharp", 128, 96, 3, 2.0, 3.5, 7)).tobytes() != first.tobytes()


def test_previews_work_after_the_encoders_have_left(dev, parts):
    sampler = dev.sampler(parts)
    expected = sampler(SampleRequest("a red circle", "blurry", 64, 64, 2, 2.0, 3.5, 1)).tobytes()
    sampler.remember([SampleRequest("a red circle", "blurry")])
    encoders = dict(parts.encoders)
    parts.encoders.clear()
    try:
        assert sampler(SampleRequest("a red circle", "blurry", 64, 64, 2, 2.0, 3.5, 1)).tobytes() == expected
    finally:
        parts.encoders.update(encoders)


def test_previews_equal_the_diffusers_pipeline(dev, parts):
    import diffusers

    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, base_image_seq_len=256, max_image_seq_len=4096
    )
    config = flux_files.diffusers_config(parts.denoiser.state_dict())
    config.pop("_class_name")
    transformer = diffusers.FluxTransformer2DModel(**config)
    transformer.load_state_dict(double_stream.flux_to_diffusers(parts.denoiser.state_dict()))
    pipeline = diffusers.FluxPipeline(scheduler, parts.vae, None, None, None, None, transformer)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        text = dev.text(parts, ["a red circle"])
        request = SampleRequest("", steps=4, scale=1.0, guidance=3.5, seed=3)
        ours = dev.sampler(parts).denoised([request], text, (4, 6))
        theirs = pipeline(
            prompt_embeds=text["t5_out"],
            pooled_prompt_embeds=text["l_pooled"],
            latents=torch.randn(1, 24, 64, generator=torch.Generator().manual_seed(3)),
            height=64,
            width=96,
            num_inference_steps=4,
            guidance_scale=3.5,
            output_type="latent",
        ).images
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_noised_is_what_the_protocol_says(dev, parts):
    noised, _ = step(dev, parts, timesteps=torch.tensor([0.25, 0.75]))
    assert isinstance(noised, NoisedBatch) and noised.timesteps.tolist() == [0.25, 0.75]
