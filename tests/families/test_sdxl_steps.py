"""SDXL at work: conditions from captions, a training step, previews."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from library.config.building import build_config
from library.config.problems import ConfigError
from library.families import family_for
from library.families.base import SampleRequest
from library.families.sdxl import conditions
from library.families.sdxl.options import SdxlLora
from library.families.shared import clip, emphasis
from library.families.shared import unet_sampler as preview
from library.objectives import diffusion
from library.objectives.base import NoisedBatch

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "sd_scripts_vectors.json").read_text(encoding="utf-8"))
SIZES = torch.tensor([[64.0, 64, 0, 0, 64, 64]])
TEXT = {
    "hidden_state1": torch.zeros(1, 77, 64),
    "hidden_state2": torch.zeros(1, 77, 128),
    "pool2": torch.ones(1, 128),
}


@pytest.fixture(scope="module")
def parts(tiny_sdxl):
    return family(tiny_sdxl).load(torch.float32)


def family(path, **options):
    return family_for(build_config(SdxlLora, {"pretrained_model_name_or_path": str(path), **options}))


class Letters:
    """A tokenizer of one token per letter: a is 101, b is 102."""

    bos_token_id, eos_token_id = 1, 2

    def __call__(self, texts, **_):
        rows = [[ord(letter) + 4 for letter in text] for text in ([texts] if isinstance(texts, str) else texts)]
        return type("Encoding", (), {"input_ids": rows[0] if isinstance(texts, str) else rows})


def test_a_short_caption_is_one_chunk():
    (ids,) = clip.clip_tokens(Letters(), ["ab"])
    assert ids.tolist() == [[1, 101, 102, *[2] * 74]]
    (ids,) = clip.clip_tokens(Letters(), ["ab"], pad=0)
    assert ids.tolist() == [[1, 101, 102, 2, *[0] * 73]]
    (ids,) = clip.clip_tokens(Letters(), ["a" * 100], pad=0)
    assert ids.tolist() == [[1, *[101] * 75, 2]]


def test_long_captions_are_cut_in_chunks_of_75():
    first, second = clip.clip_tokens(Letters(), ["a" * 80 + "b"], chunks=2)[0].tolist()
    assert first == [1, *[101] * 75, 2]
    assert second == [1, *[101] * 5, 102, *[2] * 70]


def test_chunks_padded_with_zero_follow_kohyas_rule():
    # Full chunk, then the rest: a chunk that is full ends with EOS although the sequence ends with padding.
    first, second = clip.clip_tokens(Letters(), ["a" * 80], chunks=2, pad=0)[0].tolist()
    assert first == [1, *[101] * 75, 2]
    assert second == [1, *[101] * 5, 2, *[0] * 70]
    # EOS is the chunk's last place but one: the last one stays padding.
    first, second = clip.clip_tokens(Letters(), ["a" * 74], chunks=2, pad=0)[0].tolist()
    assert first == [1, *[101] * 74, 2, 0]
    assert second == [1, 2, *[0] * 75]
    # EOS falls into the second chunk.
    first, second = clip.clip_tokens(Letters(), ["a" * 75], chunks=2, pad=0)[0].tolist()
    assert first == [1, *[101] * 75, 2]
    assert second == [1, 2, *[0] * 75]


@pytest.mark.parametrize(("length", "tokens"), [(None, 77), (150, 152), (225, 227)])
def test_lengths_of_conditions(parts, tiny_sdxl, length, tokens):
    with torch.no_grad():
        text = family(tiny_sdxl, max_token_length=length).text(parts, ["a photo, " * 40, "a cat"])
    shapes = {name: tuple(tensor.shape) for name, tensor in text.items()}
    assert shapes == {"hidden_state1": (2, tokens, 64), "hidden_state2": (2, tokens, 128), "pool2": (2, 128)}


def test_chunks_are_encoded_apart_and_put_together_again(parts, tiny_sdxl):
    caption = "red circle on the sea, " * 12
    with torch.no_grad():
        text = family(tiny_sdxl, max_token_length=150).text(parts, [caption])
        ids = clip.clip_tokens(parts.tokenizers["clip_g"], [caption], 2, 0)[0]
        first, second = (parts.encoders["clip_g"](chunk[None], output_hidden_states=True) for chunk in ids)
    one, two = first.hidden_states[-2][0], second.hidden_states[-2][0]
    assert torch.allclose(text["hidden_state2"][0], torch.cat([one[:76], two[1:76], two[76:]]), atol=1e-6)
    assert torch.allclose(text["pool2"], first.text_embeds, atol=1e-6)


def test_pooled_is_the_first_end_of_the_caption(parts):
    encoder = parts.encoders["clip_g"]
    with torch.no_grad():
        said = conditions.encode_with_clips(parts, ["a cat"], ("clip_g",), 1, False)
        ids = clip.clip_tokens(parts.tokenizers["clip_g"], ["a cat"], 1, 0)[0]
        last = encoder(ids).last_hidden_state  # with the final norm
    end = ids[0].tolist().index(parts.tokenizers["clip_g"].eos_token_id)
    assert torch.allclose(said["pool2"][0], last[0, end] @ encoder.text_projection.weight.T, atol=1e-6)
    assert set(said) == {"hidden_state2", "pool2"}


def test_one_encoder_alone(parts, tiny_sdxl):
    with torch.no_grad():
        assert set(family(tiny_sdxl).text(parts, ["a"], ("clip_l",))) == {"hidden_state1"}


def test_encoders_can_learn(tiny_sdxl):
    loaded = family(tiny_sdxl)
    parts = loaded.load(torch.float32)
    weight = parts.encoders["clip_l"].get_parameter("encoder.layers.0.mlp.fc1.weight").requires_grad_(True)
    loaded.text(parts, ["a cat"])["hidden_state1"].square().sum().backward()
    assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", [("plain", 1.0)]),
        ("a (b) c", [("a ", 1.0), ("b", 1.1), (" c", 1.0)]),
        ("[b]", [("b", 1 / 1.1)]),
        ("((b))", [("b", 1.1 * 1.1)]),
        ("(a:1.5)", [("a", 1.5)]),
        ("(a (b:2) c)", [("a ", 1.1), ("b", 2 * 1.1), (" c", 1.1)]),
        (r"a \(b\)", [("a (b)", 1.0)]),
        ("(open", [("open", 1.1)]),
        ("shut)", [("shut)", 1.0)]),
        ("12:30, a: b", [("12:30, a: b", 1.0)]),
        ("(a:0.5), (b:-1)", [("a", 0.5), (", ", 1.0), ("b", -1.0)]),
        ("[a:1.5]", [("a:1.5", 1 / 1.1)]),
        ("[sad :( ] b", [("sad :", 1 / 1.1), (" ", 1.0), (" b", 1.1)]),  # as sd-scripts reads crossed brackets
        ("(a [b) c", [("a ", 1.1), ("b", 1.0), (" c", 1 / 1.1)]),
        (r"\o/ (a: 1.2 )", [(r"\o/ ", 1.0), ("a", 1.2)]),
        ("", []),
    ],
)
def test_parentheses_set_the_weights_of_words(text, expected):
    parts = emphasis.parse_emphasis(text)
    assert [piece for piece, _ in parts] == [piece for piece, _ in expected]
    assert [weight for _, weight in parts] == pytest.approx([weight for _, weight in expected])


def test_weights_multiply_hidden_states_only(parts, tiny_sdxl):
    with torch.no_grad():
        plain = family(tiny_sdxl).text(parts, ["a red cat"])
        heavy = family(tiny_sdxl, weighted_captions=True).text(parts, ["a (red:1.5) cat"])
    end = len(parts.tokenizers["clip_l"]("a", add_special_tokens=False).input_ids) + 1
    stop = len(parts.tokenizers["clip_l"]("a red", add_special_tokens=False).input_ids) + 1
    factors = torch.ones(77)
    factors[end:stop] = 1.5
    for name in ("hidden_state1", "hidden_state2"):
        assert torch.allclose(heavy[name], plain[name] * factors[None, :, None], atol=1e-5)
    assert torch.allclose(heavy["pool2"], plain["pool2"], atol=1e-6)


def test_sizes_are_embedded_as_upstream_does(parts):
    golden = VECTORS["size_embedding"]
    numbers = [*golden["orig_hw"], *golden["crop_tl"], *golden["target_hw"]]
    seen = {}
    hook = parts.denoiser.add_embedding.register_forward_pre_hook(lambda _, args: seen.update(vector=args[0]))
    noised = NoisedBatch(torch.zeros(1, 4, 8, 8), torch.zeros(1), torch.zeros(1), torch.ones(1))
    with torch.no_grad():
        family("x").predict(parts.denoiser, noised, TEXT, torch.tensor([numbers], dtype=torch.float32))
    hook.remove()
    assert torch.equal(seen["vector"][0, :128], torch.ones(128))
    embedded = seen["vector"][0, 128:]
    assert list(embedded.shape) == golden["shape"][1:]
    assert embedded[:8].tolist() == pytest.approx(golden["first8"], abs=1e-5)
    assert embedded[128:132].tolist() == pytest.approx(golden["idx128"], abs=1e-5)
    assert embedded[-4:].tolist() == pytest.approx(golden["last4"], abs=1e-5)
    assert embedded.sum().item() == pytest.approx(golden["sum"], abs=1e-2)


class Waits(TorchDispatchMode):
    """Counts the operations for which a host would wait for its device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if any(word in name for word in ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_a_step_learns_and_never_waits_for_the_device(tiny_sdxl):
    options = {"noise_offset": 0.05, "noise_offset_random_strength": True, "multires_noise_iterations": 4}
    loaded = family(tiny_sdxl, **options, ip_noise_gamma=0.1, min_snr_gamma=5, loss_type="huber", huber_schedule="snr")
    parts = loaded.load(torch.float32)
    parts.denoiser.requires_grad_(True)
    optimizer = torch.optim.AdamW(parts.denoiser.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 8, 8, generator=generator) * 5
    with torch.no_grad():
        text = loaded.text(parts, ["a cat", "a red circle"])
    losses = []
    for _ in range(20):
        with Waits() as waits:
            noised = loaded.noised(latents, generator)
            answer = loaded.predict(parts.denoiser, noised, text, SIZES.expand(2, -1))
            loss = ((answer - noised.target) ** 2).mean(dim=(1, 2, 3)).mean()
        assert waits.found == []
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


@pytest.mark.parametrize("autocast", [False, True])
def test_answers_are_float32_and_timesteps_are_not_rounded(tiny_sdxl, autocast):
    loaded = family(tiny_sdxl)
    parts = loaded.load(torch.float32 if autocast else torch.bfloat16)
    seen = {}
    parts.denoiser.time_proj.register_forward_pre_hook(lambda _, args: seen.update(t=args[0]))
    noised = NoisedBatch(torch.zeros(1, 4, 8, 8), torch.tensor([751.0]), torch.zeros(1), torch.ones(1))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        answer = loaded.predict(parts.denoiser, noised, TEXT, SIZES)
    assert answer.dtype == torch.float32
    assert seen["t"].tolist() == [751.0] and seen["t"].dtype == torch.float32


def test_latents_are_raw_samples(parts, tiny_sdxl):
    loaded, pixels = family(tiny_sdxl), torch.rand(2, 3, 64, 96) * 2 - 1
    first = loaded.latents(parts, pixels, torch.Generator().manual_seed(0))
    assert first.shape == (2, 4, 8, 12) and first.dtype == torch.float32
    assert torch.equal(first, loaded.latents(parts, pixels, torch.Generator().manual_seed(0)))
    assert not torch.equal(first, loaded.latents(parts, pixels, torch.Generator().manual_seed(1)))
    with torch.no_grad():
        posterior = parts.vae.encode(pixels).latent_dist
    noise = torch.randn(first.shape, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(first, posterior.mean + posterior.std * noise, atol=1e-5)  # not times 0.13025
    alone = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    both = loaded.latents(parts, pixels, alone)
    assert torch.allclose(both[1:], loaded.latents(parts, pixels[1:], torch.Generator().manual_seed(4)), atol=1e-5)


def test_a_preview_is_what_diffusers_generates(parts, tiny_sdxl, tiny_sdxl_folder):
    from diffusers import StableDiffusionXLPipeline

    pipeline = StableDiffusionXLPipeline.from_pretrained(tiny_sdxl_folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.scheduler = preview.scheduler("euler_a", False)
    shared = {"height": 64, "width": 128, "num_inference_steps": 4, "guidance_scale": 5.0}
    theirs = pipeline("a cat", negative_prompt="bad", generator=torch.Generator().manual_seed(5), **shared).images[0]
    before = torch.get_rng_state()
    ours = family(tiny_sdxl).sampler(parts)(SampleRequest("a cat", "bad", 128, 64, 4, 5.0, None, 5, "euler_a"))
    assert torch.equal(before, torch.get_rng_state())
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


@pytest.mark.parametrize("name", sorted(preview.SAMPLERS))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_sampler_generates(parts, tiny_sdxl, name):
    sampler = family(tiny_sdxl).sampler(parts)
    first, two = (
        sampler(SampleRequest("a cat", width=64, height=72, steps=3, seed=1, sampler_name=name)) for _ in range(2)
    )
    assert first.size == (64, 72)
    assert np.array_equal(np.asarray(first), np.asarray(two))
    assert np.asarray(first).std() > 1


def test_every_choice_of_the_flag_has_a_sampler():
    from library.config.schema import options_of

    assert set(options_of(SdxlLora)["sample_sampler"].choices) == set(preview.SAMPLERS)
    with pytest.raises(ConfigError, match="sample_sampler"):
        preview.scheduler("nonsense", False)


def test_lms_coefficients_are_the_integrals():
    steps = preview.scheduler("lms", False)
    steps.set_timesteps(10)
    sigmas = steps.sigmas.double()
    tau = torch.linspace(sigmas[5], sigmas[6], 20001, dtype=torch.float64)
    product = torch.ones_like(tau)
    for k in (0, 2, 3):
        product *= (tau - sigmas[5 - k]) / (sigmas[4] - sigmas[5 - k])
    assert steps.get_lms_coefficient(4, 5, 1) == pytest.approx(torch.trapezoid(product, tau).item(), rel=1e-4)


def test_prompts_of_different_length_share_a_batch(parts, tiny_sdxl):
    sampler = family(tiny_sdxl).sampler(parts)
    request = SampleRequest("a (red:1.3) circle over the sea, " * 30, "bad", 64, 64, 2, seed=1)
    text = sampler.text([request], torch.device("cpu"))
    assert text["hidden_state1"].shape[:2] == (2, 227)
    assert len(sampler.text([SampleRequest("a cat", scale=1.0)], torch.device("cpu"))["pool2"]) == 1


def test_remembered_prompts_need_no_encoders(tiny_sdxl):
    loaded = family(tiny_sdxl)
    parts = loaded.load(torch.float32)
    sampler = loaded.sampler(parts)
    request = SampleRequest("a cat", "bad", 64, 64, 2, 5.0, None, 5)
    before = np.asarray(sampler(request))
    sampler.remember([SampleRequest("a cat", "bad")])
    parts.encoders.clear()
    assert np.array_equal(before, np.asarray(sampler(request)))


def test_v_prediction_is_sampled_as_such(parts, tiny_sdxl):
    request = SampleRequest("a cat", width=64, height=64, steps=2, seed=1)
    plain = family(tiny_sdxl).sampler(parts)(request)
    velocity = family(tiny_sdxl, v_parameterization=True).sampler(parts)(request)
    assert not np.array_equal(np.asarray(plain), np.asarray(velocity))
    assert preview.scheduler("euler", True).config.prediction_type == "v_prediction"


@pytest.mark.parametrize("name", [name for name in preview.SAMPLERS if not name.startswith("k_")])
def test_previews_of_a_schedule_without_signal_at_its_end_begin_with_pure_noise(name):
    """An oracle that knows the image is led to it from noise, on the schedule that is trained."""
    steps = preview.scheduler(name, True, terminal_zero=True)
    torch.testing.assert_close(steps.alphas_cumprod, diffusion.alphas(terminal_zero=True), atol=1e-6, rtol=1e-4)
    steps.set_timesteps(6)
    assert steps.timesteps[0] == diffusion.STEPS - 1
    image, generator = torch.full((1, 4, 4, 4), 0.7), torch.Generator().manual_seed(0)
    sample = torch.randn(image.shape, generator=generator) * steps.init_noise_sigma
    extra = {"generator": generator} if "generator" in inspect.signature(steps.step).parameters else {}
    for t in steps.timesteps:
        scaled = steps.scale_model_input(sample, t)
        at = float(t) if steps.init_noise_sigma == 1 else None
        signal = steps.alphas_cumprod[int(at)] if at is not None else 1 / (1 + steps.sigmas[steps.step_index] ** 2)
        noise = (scaled - signal.sqrt() * image) / (1 - signal).sqrt()
        velocity = signal.sqrt() * noise - (1 - signal).sqrt() * image
        sample = steps.step(velocity, t, sample, **extra, return_dict=False)[0]
    torch.testing.assert_close(sample, image, atol=0.25, rtol=0)  # pndm and dpmsolver are coarse in six steps


def test_the_previews_of_a_training_use_its_own_schedule(parts, tiny_sdxl, monkeypatch):
    request = SampleRequest("a cat", width=64, height=64, steps=2, seed=1)
    schedulers, real = [], preview.scheduler

    def noted(*given):
        schedulers.append(given)
        return real(*given)

    monkeypatch.setattr(preview, "scheduler", noted)
    images = [
        np.asarray(family(tiny_sdxl, v_parameterization=True, zero_terminal_snr=on).sampler(parts)(request))
        for on in (False, True)
    ]
    assert [scheduler[2] for scheduler in schedulers] == [False, True] and not np.array_equal(*images)
