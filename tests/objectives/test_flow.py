"""Flow matching against the reference numbers of kohya-ss/sd-scripts (tests/golden/sd_scripts_vectors.json)."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from library import families
from library.config.building import build_config
from library.config.ineffective import ineffective_options
from library.config.problems import ConfigError
from library.config.schema import options_of
from library.families.flux.options import FluxFlow
from library.objectives import flow
from tests.families.expectations import expected as expected_of

VECTORS = Path(__file__).parent.parent / "golden" / "sd_scripts_vectors.json"
GOLDEN = json.loads(VECTORS.read_text(encoding="utf-8"))


class AlwaysWeighted(FluxFlow):
    always_weighted = True


def noise(kind=FluxFlow, **changes):
    defaults = {
        "timestep_sampling": "sigma",
        "weighting_scheme": "uniform",
        "logit_mean": 0.0,
        "logit_std": 1.0,
        "mode_scale": 1.29,
        "sigmoid_scale": 1.0,
        "discrete_flow_shift": 3.0,
        "model_prediction_type": "sigma_scaled",
        "ip_noise_gamma": None,
        "ip_noise_gamma_random_strength": False,
    }
    return kind(**{**defaults, **changes})


def loss(**changes):
    return SimpleNamespace(
        **{"loss_type": "l2", "huber_schedule": "snr", "huber_c": 0.1, "huber_scale": 1.0, **changes}
    )


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("size", [64, 96])
def test_flux_shift_equals_the_reference(size):
    expected = GOLDEN["flux_shift"][f"latent{size}x{size}"]
    mu = flow.shift_of_size(size, size)
    assert mu == pytest.approx(expected["mu"])
    shifted = flow.shifted(torch.tensor(GOLDEN["shift_input"]), math.exp(mu))
    torch.testing.assert_close(shifted, torch.tensor(expected["s"]), rtol=1e-5, atol=1e-6)


def test_shift_equals_the_reference():
    shifted = flow.shifted(torch.tensor(GOLDEN["shift_input"]), 3.1582)
    torch.testing.assert_close(shifted, torch.tensor(GOLDEN["shift_3.1582"]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("steps", "tokens"), [(20, 4096), (4, 1024)])
def test_sampling_schedule_equals_the_reference(steps, tokens):
    expected = GOLDEN[f"flux_schedule_{steps}_seq{tokens}"]
    torch.testing.assert_close(
        torch.tensor(flow.flow_sigmas(steps, tokens)), torch.tensor(expected), rtol=1e-5, atol=1e-6
    )


def test_table_equals_the_reference():
    expected = GOLDEN["flowmatch_sched_shift3"]
    everything = flow.from_table(torch.arange(1000) / 1000 + 1e-5, 3.0)
    first, last = torch.tensor(expected["timesteps_first3"]), torch.tensor(expected["timesteps_last3"])
    torch.testing.assert_close(everything[:3] * 1000, first, rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(everything[-3:] * 1000, last, rtol=1e-5, atol=1e-3)
    assert everything[500].item() == pytest.approx(expected["sigmas_500"])


def test_positions_at_both_ends_stay_inside_the_table():
    ends = flow.from_table(torch.tensor([-0.1, 0.0, 1.0, 1.1]), 3.0)
    assert ends.tolist() == pytest.approx([1.0, 1.0, 3 * 0.001 / 1.002, 3 * 0.001 / 1.002])


@pytest.mark.parametrize("sampling", ["sigma", "uniform", "sigmoid", "shift", "flux_shift"])
@pytest.mark.parametrize("scheme", ["uniform", "logit_normal", "mode", "cosmap", "sigma_sqrt", "none"])
def test_mixture_and_target_obey_their_formulas(sampling, scheme):
    latents = torch.randn(6, 16, 8, 12, generator=generator(1))
    noised = flow.noised(latents, noise(timestep_sampling=sampling, weighting_scheme=scheme), loss(), generator())
    sigmas = noised.sigmas
    assert sigmas.shape == (6,) and ((sigmas >= 0) & (sigmas <= 1)).all() and len(sigmas.unique()) == 6
    assert torch.equal(noised.timesteps, sigmas)
    eps = noised.target + latents
    share = sigmas.view(-1, 1, 1, 1)
    torch.testing.assert_close(noised.latents, (1 - share) * latents + share * eps)
    assert abs(eps.mean()) < 0.05 and abs(eps.std() - 1) < 0.05
    assert all(t is None or t.dtype == torch.float32 for t in vars(noised).values())


def test_sampled_sigmas_follow_their_distribution():
    latents = torch.zeros(20000, 1, 2, 2)
    q = torch.tensor([0.25, 0.5, 0.75])
    quartiles = torch.sigmoid(torch.tensor([-0.67449, 0.0, 0.67449]))
    cases = {
        "uniform": q,
        "sigmoid": quartiles,
        "shift": flow.shifted(quartiles, 3.0),
        "sigma": flow.shifted(q, 3.0),
    }
    for sampling, expected in cases.items():
        drawn = flow.sampled(latents, noise(timestep_sampling=sampling), generator())
        torch.testing.assert_close(drawn.quantile(q), expected, atol=0.015, rtol=0, msg=sampling)
    wide = flow.sampled(latents, noise(timestep_sampling="sigmoid", sigmoid_scale=2.0), generator())
    torch.testing.assert_close(wide.quantile(q), torch.sigmoid(2 * quartiles.logit()), atol=0.015, rtol=0)
    normal = flow.sampled(latents, noise(weighting_scheme="logit_normal", discrete_flow_shift=1.0), generator())
    torch.testing.assert_close(normal.quantile(q), quartiles, atol=0.015, rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"weighting_scheme": "mode", "mode_scale": 0.8},
        {"weighting_scheme": "logit_normal", "logit_mean": 0.6, "logit_std": 1.4},
        {"weighting_scheme": "none"},
    ],
    ids=lambda options: options["weighting_scheme"],
)
def test_schemes_draw_positions_as_diffusers_does(options):
    from diffusers.training_utils import compute_density_for_timestep_sampling

    theirs = compute_density_for_timestep_sampling(batch_size=9, **options, generator=generator())
    drawing = generator()
    ours = flow.density(
        noise(**options), lambda: torch.rand(9, generator=drawing), lambda: torch.randn(9, generator=drawing)
    )
    torch.testing.assert_close(ours, theirs)


def test_weights_apply_to_scaled_predictions_and_to_models_that_always_weigh():
    sigmas = torch.tensor([0.1, 0.5, 1.0])
    sqrt = flow.flow_loss_weights(sigmas, noise(weighting_scheme="sigma_sqrt"))
    torch.testing.assert_close(sqrt, torch.tensor([100.0, 4.0, 1.0]))
    cosmap = flow.flow_loss_weights(sigmas, noise(weighting_scheme="cosmap"))
    torch.testing.assert_close(cosmap, 2 / (math.pi * torch.tensor([0.82, 0.5, 1.0])))
    for changes in (
        {"weighting_scheme": "logit_normal"},
        {"weighting_scheme": "cosmap", "model_prediction_type": "raw"},
    ):
        assert flow.flow_loss_weights(sigmas, noise(**changes)).tolist() == [1, 1, 1]
    always = noise(AlwaysWeighted, weighting_scheme="cosmap", model_prediction_type="raw")
    assert torch.equal(flow.flow_loss_weights(sigmas, always), cosmap)


def test_prediction_types():
    output, noisy, sigmas = (
        torch.tensor([2.0]).view(1, 1, 1, 1),
        torch.tensor([3.0]).view(1, 1, 1, 1),
        torch.tensor([0.5]),
    )
    answers = {
        kind: flow.prediction(output, noisy, sigmas, kind).item() for kind in ("raw", "additive", "sigma_scaled")
    }
    assert answers == {"raw": 2.0, "additive": 5.0, "sigma_scaled": 2.0}


def test_perturbation_is_seen_by_the_model_and_not_by_the_target():
    latents = torch.randn(2, 16, 8, 8, generator=generator(1))
    plain = flow.noised(latents, noise(timestep_sampling="uniform"), loss(), generator())
    shaken = flow.noised(latents, noise(timestep_sampling="uniform", ip_noise_gamma=0.5), loss(), generator())
    assert torch.equal(plain.target, shaken.target)
    added = (shaken.latents - plain.latents) / plain.sigmas.view(-1, 1, 1, 1)
    assert added.std().item() == pytest.approx(0.5, rel=0.05)
    random = noise(timestep_sampling="uniform", ip_noise_gamma=0.5, ip_noise_gamma_random_strength=True)
    weaker = (flow.noised(latents, random, loss(), generator()).latents - plain.latents).std()
    assert 0 < weaker < (shaken.latents - plain.latents).std()


def test_huber_thresholds():
    sigmas = torch.tensor([0.0, 0.5, 1.0])
    assert flow.huber_threshold(sigmas, loss()) is None
    constant = flow.huber_threshold(sigmas, loss(loss_type="huber", huber_schedule="constant", huber_scale=2.0))
    torch.testing.assert_close(constant, torch.full((3,), 0.2))
    exponential = flow.huber_threshold(sigmas, loss(loss_type="smooth_l1", huber_schedule="exponential"))
    torch.testing.assert_close(exponential, torch.tensor([1.0, 0.1**0.5, 0.1]))


def test_snr_schedule_is_refused_only_where_it_would_be_used():
    assert flow.huber_threshold(torch.ones(1), loss()) is None
    with pytest.raises(ConfigError, match="huber_schedule: snr needs .* set it to constant"):
        flow.huber_threshold(torch.ones(1), loss(loss_type="huber"))


def test_given_timesteps_are_used():
    sigmas = torch.tensor([0.2, 0.8])
    noised = flow.noised(torch.zeros(2, 1, 2, 2), noise(), loss(), generator(), sigmas)
    assert torch.equal(noised.sigmas, sigmas)
    torch.testing.assert_close(noised.latents, sigmas.view(-1, 1, 1, 1) * noised.target)


LORAS = {name: families.config_class(families.lora_script(name)) for name in families.FAMILIES}
FLOWS = [name for name, cls in LORAS.items() if "timestep_sampling" in options_of(cls)]


@pytest.mark.parametrize("name", FLOWS)
def test_where_nothing_is_set_timesteps_are_those_of_the_usual_recipe(name):
    for script in families.facts_of(name).scripts:
        options = families.config_class(script)().noise
        assert (options.timestep_sampling, options.discrete_flow_shift) == expected_of(name, "timesteps"), script


def test_same_seed_same_noise_and_global_random_state_untouched():
    latents = torch.zeros(2, 16, 8, 8)
    before = torch.get_rng_state()
    first = flow.noised(latents, noise(ip_noise_gamma=0.1), loss(), generator(7))
    again = flow.noised(latents, noise(ip_noise_gamma=0.1), loss(), generator(7))
    assert torch.equal(first.latents, again.latents) and torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("sampling", ["sigma", "uniform", "sigmoid", "shift", "flux_shift"])
def test_nothing_makes_the_host_wait_for_the_device(sampling):
    """Fake tensors have no values: reading one (.item(), nonzero, a branch) would raise."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    noise_options = {"timestep_sampling": sampling, "ip_noise_gamma": 0.1, "ip_noise_gamma_random_strength": True}
    for scheme in ("logit_normal", "mode", "sigma_sqrt", "cosmap"):
        options = noise(weighting_scheme=scheme, **noise_options)
        with FakeTensorMode():
            noised = flow.noised(
                torch.zeros(2, 16, 8, 8), options, loss(loss_type="huber", huber_schedule="exponential"), None
            )
            flow.prediction(noised.latents, noised.latents, noised.sigmas, "sigma_scaled")


@pytest.mark.parametrize(
    "script", [run for run in families.RUNS if "weighting_scheme" in options_of(families.config_class(run))]
)
def test_a_weighting_scheme_that_changes_nothing_is_reported_to(script):
    sigmas, third, cls = torch.tensor([0.2, 0.7]), torch.tensor(1 / 3), families.config_class(script)
    kinds = options_of(cls)["model_prediction_type"].choices
    for scheme in ("sigma_sqrt", "logit_normal", "mode", "cosmap"):
        for sampling in ("sigma", "shift"):
            for kind in kinds:
                options = {"weighting_scheme": scheme, "timestep_sampling": sampling, "model_prediction_type": kind}
                config = build_config(cls, options, notes=[])
                drawn = flow.density(config.noise, lambda: third, lambda: third)
                chooses = sampling == "sigma" and bool(drawn != third)
                weighs = bool((flow.flow_loss_weights(sigmas, config.noise) != 1).any())
                assert ("weighting_scheme" in ineffective_options(config)) == (not chooses and not weighs), options
