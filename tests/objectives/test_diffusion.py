"""The SDXL objective against upstream's numbers and against the formulas it implements."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from library.config.sections import Loss, Noise
from library.objectives import diffusion
from library.objectives.diffusion import Diffusion

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "sd_scripts_vectors.json").read_text(encoding="utf-8"))
T = torch.tensor(VECTORS["ddpm"]["t"])


def objective(noise=None, loss=None, v_prediction=False):
    return Diffusion(Noise(**(noise or {})), Loss(**(loss or {})), v_prediction)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def latents(shape=(4, 4, 16, 24), seed=7):
    return torch.randn(shape, generator=seeded(seed)) * 7.0


def plain_noise(like, seed=0):
    return torch.randn(like.shape, generator=seeded(seed))


def test_the_schedule_is_upstreams():
    alphas = diffusion.alphas()
    assert alphas[T].tolist() == pytest.approx(VECTORS["ddpm"]["alphas_cumprod"], rel=2e-6)
    assert (alphas / (1 - alphas))[T].tolist() == pytest.approx(VECTORS["ddpm"]["snr"], rel=1e-4)


def test_zero_terminal_snr_ends_in_pure_noise():
    from diffusers import EulerDiscreteScheduler

    alphas = diffusion.alphas(terminal_zero=True)
    assert alphas[-1] == 0 and alphas[0] == pytest.approx(diffusion.alphas()[0].item(), rel=1e-6)
    theirs = EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", rescale_betas_zero_snr=True
    )
    # diffusers puts 2^-24 at the end so that its sigmas are finite, and goes through betas and back in float32.
    assert torch.allclose(alphas[:-1], theirs.alphas_cumprod[:-1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("name", "v_prediction"), [("min_snr5_eps", False), ("min_snr5_v", True)])
def test_min_snr_is_upstreams(name, v_prediction):
    actual = diffusion.diffusion_loss_weights(Loss(min_snr_gamma=5.0), v_prediction)[T]
    assert actual.tolist() == pytest.approx(VECTORS["loss_weights"][name], rel=1e-4)


@pytest.mark.parametrize(
    ("options", "v_prediction", "expected"),
    [
        ({}, False, lambda s: 1.0),
        ({"scale_v_pred_loss_like_noise_pred": True}, True, lambda s: s / (s + 1)),
        ({"v_pred_like_loss": 0.5}, False, lambda s: 1 + 0.5 * (s + 1) / s),
        ({"debiased_estimation_loss": True}, False, lambda s: 1 / math.sqrt(s)),
        ({"debiased_estimation_loss": True}, True, lambda s: 1 / (s + 1)),
    ],
)
def test_loss_weights_follow_their_formulas(options, v_prediction, expected):
    actual = diffusion.diffusion_loss_weights(Loss(**options), v_prediction)[T]
    wanted = [expected(min(s, 1000.0)) for s in VECTORS["ddpm"]["snr"]]
    assert actual.tolist() == pytest.approx(wanted, rel=1e-4)


def test_weights_multiply():
    both = diffusion.diffusion_loss_weights(Loss(min_snr_gamma=5.0, debiased_estimation_loss=True), False)
    weights = diffusion.diffusion_loss_weights(Loss(min_snr_gamma=5.0), False)
    other = diffusion.diffusion_loss_weights(Loss(debiased_estimation_loss=True), False)
    assert torch.allclose(both, weights * other)


def test_weights_do_not_know_of_zero_terminal_snr():
    fixed = objective({"zero_terminal_snr": True}, {"min_snr_gamma": 5.0}).tables(torch.device("cpu"))
    plain = objective({}, {"min_snr_gamma": 5.0}).tables(torch.device("cpu"))
    assert torch.equal(fixed.weight, plain.weight)
    assert not torch.equal(fixed.signal, plain.signal)
    assert torch.isfinite(fixed.weight).all()


@pytest.mark.parametrize("kind", ["huber", "smooth_l1"])
def test_thresholds_by_schedule(kind):
    def thresholds(**options):
        return diffusion.huber_thresholds(Loss(loss_type=kind, **options), diffusion.alphas())

    constant = thresholds(huber_schedule="constant", huber_c=0.1)
    assert constant[T].tolist() == pytest.approx(VECTORS["huber_c"]["constant"])
    assert thresholds(huber_schedule="constant", huber_c=0.1, huber_scale=2.0)[0] == pytest.approx(0.2)
    exponential = thresholds(huber_schedule="exponential", huber_c=0.1, huber_scale=2.0)
    assert exponential[T].tolist() == pytest.approx([2.0 * 0.1 ** (t / 1000) for t in T.tolist()], rel=1e-5)
    by_snr = thresholds(huber_schedule="snr", huber_c=0.1, huber_scale=2.0)
    sigmas = [math.sqrt((1 - a) / a) for a in VECTORS["ddpm"]["alphas_cumprod"]]
    assert by_snr[T].tolist() == pytest.approx([0.9 / (1 + s) ** 2 + 0.1 for s in sigmas], rel=1e-4)


def test_snr_thresholds_are_finite_with_zero_terminal_snr():
    table = objective({"zero_terminal_snr": True}, {"loss_type": "huber", "huber_schedule": "snr"}).tables(
        torch.device("cpu")
    )
    assert table.huber_c[-1] == pytest.approx(0.1)
    assert torch.isfinite(table.huber_c).all()


def test_losses_without_threshold_have_none():
    assert objective().noised(latents(), seeded()).huber_c is None


@pytest.mark.parametrize("v_prediction", [False, True])
def test_what_is_seen_and_asked_for(v_prediction):
    raw, timesteps = latents(), torch.tensor([0, 250, 750, 999])
    noised = objective(v_prediction=v_prediction).noised(raw, seeded(), timesteps)
    clean, noise, alphas = raw * 0.13025, plain_noise(raw), diffusion.alphas()[timesteps].view(-1, 1, 1, 1)
    assert torch.allclose(noised.latents, alphas.sqrt() * clean + (1 - alphas).sqrt() * noise, atol=1e-6)
    target = alphas.sqrt() * noise - (1 - alphas).sqrt() * clean if v_prediction else noise
    assert torch.allclose(noised.target, target, atol=1e-6)
    assert noised.timesteps.dtype == torch.float32 and noised.timesteps.tolist() == [0, 250, 750, 999]
    assert noised.weight.tolist() == [1.0] * 4


def test_everything_is_float32():
    loss = {"min_snr_gamma": 5.0, "loss_type": "huber"}
    noised = objective({"noise_offset": 0.1}, loss).noised(latents().bfloat16(), seeded())
    for tensor in (noised.latents, noised.timesteps, noised.target, noised.weight, noised.huber_c):
        assert tensor.dtype == torch.float32


def test_weights_and_thresholds_belong_to_the_drawn_timesteps():
    loss = {"min_snr_gamma": 5.0, "loss_type": "huber", "huber_schedule": "exponential"}
    maker = objective({}, loss)
    noised = maker.noised(latents((64, 4, 2, 2)), seeded())
    index = noised.timesteps.long()
    table = maker.tables(torch.device("cpu"))
    assert torch.equal(noised.weight, table.weight[index])
    assert torch.equal(noised.huber_c, table.huber_c[index])


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(None, None, (0, 999)), (100, 103, (100, 102)), (500, 500, (500, 500)), (0, 1, (0, 0)), (900, 100, (100, 100))],
)
def test_timesteps_are_from_min_up_to_but_without_max(low, high, expected):
    timesteps = objective({"min_timestep": low, "max_timestep": high}).timesteps(20000, torch.device("cpu"), seeded())
    assert (timesteps.min().item(), timesteps.max().item()) == expected


def test_the_same_generator_gives_the_same_step_and_nothing_global_is_touched():
    options = {
        "noise_offset": 0.1,
        "noise_offset_random_strength": True,
        "adaptive_noise_scale": 0.1,
        "multires_noise_iterations": 6,
        "ip_noise_gamma": 0.1,
        "ip_noise_gamma_random_strength": True,
    }
    maker, before, python = objective(options), torch.get_rng_state(), random.getstate()
    first, two = maker.noised(latents(), seeded(3)), maker.noised(latents(), seeded(3))
    assert torch.equal(first.latents, two.latents) and torch.equal(first.target, two.target)
    assert torch.equal(before, torch.get_rng_state()) and python == random.getstate()
    assert not torch.equal(first.target, maker.noised(latents(), seeded(4)).target)


def test_offset_noise_shifts_whole_channels():
    raw = latents()
    difference = objective({"noise_offset": 0.5}).noised(raw, seeded()).target - plain_noise(raw)
    means = difference.mean(dim=(2, 3), keepdim=True)
    assert torch.allclose(difference, means.expand_as(difference), atol=1e-5)
    assert means.std() == pytest.approx(0.5, rel=0.6)
    many = latents((4000, 4, 1, 1))
    offsets = objective({"noise_offset": 0.5}).noised(many, seeded()).target - plain_noise(many)
    assert offsets.std() == pytest.approx(0.5, rel=0.05)


def test_random_strength_is_one_number_for_the_batch():
    maker = objective({"noise_offset": 0.5, "noise_offset_random_strength": True})
    strength = maker.offset(latents(), seeded())
    assert strength.shape == (1,) and 0 <= strength.item() < 0.5


def test_adaptive_offset_follows_the_scaled_latents():
    maker = objective({"noise_offset": 0.05, "adaptive_noise_scale": 2.0})
    clean = torch.full((1, 4, 8, 8), -0.25)
    assert maker.offset(clean, seeded()).flatten().tolist() == pytest.approx([0.55] * 4)
    maker = objective({"noise_offset": 0.05, "adaptive_noise_scale": -2.0})
    assert maker.offset(clean, seeded()).flatten().tolist() == [0.0] * 4


def test_pyramid_noise_has_a_deviation_of_one_and_more_low_frequencies():
    raw = latents((8, 4, 64, 64))
    noise_of_pyramid = (
        objective({"multires_noise_iterations": 6, "multires_noise_discount": 0.8}).noised(raw, seeded()).target
    )
    assert noise_of_pyramid.std().item() == pytest.approx(1.0, abs=1e-4)
    coarse = torch.nn.functional.avg_pool2d(noise_of_pyramid, 16).std()
    assert coarse > 3 * torch.nn.functional.avg_pool2d(plain_noise(raw), 16).std()


def test_the_finest_size_of_a_pyramid_has_its_full_weight():
    """The discount to the power of 0; of the coarser sizes a discount of 0 leaves nothing."""

    def noise(iterations, discount):
        options = {"multires_noise_iterations": iterations, "multires_noise_discount": discount}
        return objective(options).noised(latents(), seeded()).target

    assert torch.equal(noise(1, 0.2), noise(1, 0.9))
    torch.testing.assert_close(noise(6, 1e-9), noise(1, 0.9))
    assert not torch.equal(noise(6, 0.2), noise(6, 0.9))


def test_pyramid_stops_at_one_pixel():
    noisy = objective({"multires_noise_iterations": 50}).noised(latents((1, 4, 4, 4)), seeded()).target
    assert torch.isfinite(noisy).all()


def test_input_perturbation_leaves_the_target_clean():
    raw, timesteps = latents(), torch.full((4,), 999)
    noised = objective({"ip_noise_gamma": 0.5}).noised(raw, seeded(), timesteps)
    noise = plain_noise(raw)
    assert torch.equal(noised.target, noise)
    alpha = diffusion.alphas()[999]
    added = (noised.latents - alpha.sqrt() * raw * 0.13025) / (1 - alpha).sqrt() - noise
    assert added.std() == pytest.approx(0.5, rel=0.05)


def test_zero_terminal_snr_shows_only_noise_at_the_end():
    raw, timesteps = latents(), torch.full((4,), 999)
    noised = objective({"zero_terminal_snr": True}, v_prediction=True).noised(raw, seeded(), timesteps)
    assert torch.allclose(noised.latents, plain_noise(raw), atol=1e-6)
    assert torch.allclose(noised.target, -raw * 0.13025, atol=1e-5)
