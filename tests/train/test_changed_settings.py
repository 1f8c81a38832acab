"""A resume with another config: every rate, schedule and argument applies, and what the optimizer gathered stays."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from library.config.building import build_config
from library.config.problems import ConfigError
from library.config.sections.learning import SchedulerName
from library.families.flux.options import FluxLora, FluxTrain
from library.optim import averaging, classes, lr_schedule, optimizers, resuming
from library.optim.names import optimizer_spec
from library.train.saving import deciding_options
from tests.train.test_optimizers import NAMES, copied

pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
STOP, TOTAL = 6, 12
FIXED = {"Adafactor": ["relative_step=False", "scale_parameter=False"]}
# Schedules that need an argument of their own.
NEEDS = {
    "cosine_with_min_lr": {"lr_scheduler_min_lr_ratio": 0.1},
    "adafactor": {"optimizer_type": "Adafactor"},
    "piecewise_constant": {"lr_scheduler_args": ["step_rules='1:3,0.5:8,0.1'"]},
    "warmup_stable_decay": {"lr_decay_steps": 4},
}


def config_of(name="AdamW", cls=FluxLora, **options):
    rate = 1.0 if optimizer_spec(name).finds_rate else 5e-3
    base = {"optimizer_type": name, "learning_rate": rate, "optimizer_args": FIXED.get(name, [])}
    return build_config(cls, base | options, notes=[])


@pytest.mark.parametrize("option", ["lr_warmup_steps", "lr_decay_steps"])
def test_all_steps_and_one_step_are_different_settings(option):
    one, all_steps, half = (
        deciding_options.deciding_options(config_of(lr_scheduler="cosine", **{option: value}), TOTAL)
        for value in (1, "100%", "50%")
    )
    assert [str(line) for line in deciding_options.compare_settings(one, all_steps)] == [f"{option} was 1 and is 1.0"]
    for other in (all_steps, half):
        assert deciding_options.is_rescheduled(one, other) and not deciding_options.is_rescheduled(other, other)


class Run:
    """An optimizer and its schedule over a matrix and a vector, in two groups of different rates."""

    def __init__(self, config, dtype=torch.float32, shares=(1.0, 0.5)):
        torch.manual_seed(0)
        self.config, one = config, optimizer_spec(config.optim.optimizer).one_rate
        self.weights = [nn.Parameter(torch.randn(64, 128).to(dtype)), nn.Parameter(torch.randn(128).to(dtype))]
        groups = [
            {"params": [weight], "lr": config.optim.learning_rate * (1.0 if one else share), "name": name}
            for weight, share, name in zip(self.weights, shares, ("unet", "text_encoder"), strict=True)
        ]
        self.made = optimizers.make_optimizer(SimpleNamespace(groups=lambda _=None: groups, factor_caches=()), config)
        self.schedule = lr_schedule.make_schedule(self.made, config, TOTAL)
        self.described = resuming.describe_groups(self.made)
        averaging.train_mode(self.made)

    def steps(self, number):
        rates = []
        for at in range(number):
            generator = torch.Generator().manual_seed(at)
            for weight in self.weights:
                weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype) * 0.1
            rates.append(self.made.param_groups[0]["lr"])
            self.made.step()
            self.made.zero_grad()
            self.schedule.step()
        return rates

    def resumed(self, config, known=True, rescheduled=False, **how):
        """Another run of `config` that continues from here."""
        other = Run(config, **how)
        with torch.no_grad():
            for weight, own in zip(other.weights, self.weights, strict=True):
                weight.copy_(own)
        settings = {"optimizer_args": list(self.config.optim.optimizer_args)}
        described = self.described if known else None
        state, schedule = copied(self.made.state_dict()), copied(self.schedule.state_dict())
        saved = resuming.Saved(state, schedule, described, settings, rescheduled)
        resuming.take_over(other.made, other.schedule, saved, config, other.made.load_state_dict)
        return other

    @property
    def groups(self):
        return resuming._all_groups(self.made)

    def memory(self):
        """All tensors that the optimizer keeps, and its estimate."""
        parts = [bundle.optimizer for bundle in getattr(self.made, "bundles", ())] or [self.made]
        tensors = [value for part in parts for state in part.state.values() for value in state.values()]
        estimates = [group.get(name) for group in self.groups for name in ("d", "k")]
        return [value.clone() for value in tensors if isinstance(value, torch.Tensor)], estimates


def same(first, other):
    return first[1] == other[1] and all(torch.equal(a, b) for a, b in zip(first[0], other[0], strict=True))


def changed_arguments(name):
    """optimizer_args that change whatever of these the optimizer has, and which."""
    config = config_of(name)
    group = Run(config).groups[0]
    arguments = (
        {"weight_decay": 0.37, "eps": 1e-5} if not isinstance(group.get("eps"), tuple) else {"weight_decay": 0.37}
    )
    if isinstance(group.get("betas"), tuple) and len(group["betas"]) == 2:
        arguments["betas"] = (0.5, 0.7)
    cls = classes.import_class(optimizer_spec(name))
    taken = [key for key in arguments if not list(classes.unknown_arguments(cls, [key], "optimizer_args", name))]
    arguments = {key: arguments[key] for key in taken if key in group}
    args = [*config.optim.optimizer_args, *(f"{key}={value}" for key, value in arguments.items())]
    return arguments, args


@pytest.mark.parametrize("known", [True, False], ids=["new state", "old state"])
@pytest.mark.parametrize("name", NAMES)
def test_rates_and_arguments_of_the_config_apply_and_moments_stay(name, known):
    began = Run(config_of(name))
    began.steps(STOP)
    arguments, args = changed_arguments(name)
    assert arguments or name in ("SGDNesterov",), name
    rate = began.config.optim.learning_rate / 500
    now = config_of(name, learning_rate=rate, optimizer_args=args)
    before = began.memory()
    other = began.resumed(now, known)
    assert same(before, other.memory())
    fresh = Run(now)
    assert [g["lr"] for g in other.groups] == [g["lr"] for g in fresh.groups]
    assert [g.get("initial_lr") for g in other.groups] == [g.get("initial_lr") for g in fresh.groups]
    assert other.schedule.base_lrs == fresh.schedule.base_lrs
    for group, own in zip(other.groups, fresh.groups, strict=True):
        assert {key: group[key] for key in arguments} == {key: own[key] for key in arguments}
    assert other.groups[0].get("weight_decay") == arguments.get("weight_decay", other.groups[0].get("weight_decay"))
    assert other.steps(1) == [rate]


@pytest.mark.parametrize("name", NAMES)
def test_without_changes_everything_is_as_it_was_saved(name):
    config = config_of(name)
    began = Run(config)
    began.steps(STOP)
    other = began.resumed(config, rescheduled=False)
    plain = [[{k: v for k, v in g.items() if k != "params"} for g in run.groups] for run in (began, other)]
    assert str(plain[0]) == str(plain[1])
    assert began.steps(3) == other.steps(3)
    assert all(torch.equal(a, b) for a, b in zip(began.weights, other.weights, strict=True))


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "CAME", "Lion"])
def test_weights_in_bundles_follow_as_well(name):
    precision = {"full_bf16": True, "mixed_precision": "bf16"}
    began = Run(config_of(name, FluxTrain, **precision), torch.bfloat16)
    began.steps(STOP)
    args = [*FIXED.get(name, []), "weight_decay=0.37"]
    now = config_of(name, FluxTrain, learning_rate=1e-5, optimizer_args=args, **precision)
    other = began.resumed(now, dtype=torch.bfloat16)
    assert same(began.memory(), other.memory())
    assert [g["weight_decay"] for g in other.groups if "weight_decay" in g] == [0.37] * 2
    other.steps(1)
    assert [g["lr"] for g in other.groups] == [1e-5, 5e-6] * 2


def test_a_small_rate_moves_weights_by_as_little():
    began = Run(config_of(learning_rate=5e-3))
    began.steps(STOP)
    other = began.resumed(config_of(learning_rate=1e-5, optimizer_args=["weight_decay=0"]))
    before = [weight.detach().clone() for weight in other.weights]
    other.steps(1)
    moved = max(float((a - b).detach().abs().max()) for a, b in zip(before, other.weights, strict=True))
    assert 0 < moved <= 1.1e-5


@pytest.mark.parametrize("shares", [(2.0, 0.5), (1.0, 0.1)], ids=["unet_lr", "text_encoder_lr"])
def test_the_rate_of_one_part_applies_to_its_group(shares):
    began = Run(config_of(lr_scheduler="cosine"))
    began.steps(STOP)
    other, straight = began.resumed(began.config, shares=shares), Run(began.config, shares=shares)
    straight.steps(STOP)
    assert [g["lr"] for g in other.groups] == pytest.approx([g["lr"] for g in straight.groups], rel=1e-12)


@pytest.mark.parametrize("after", SchedulerName.__args__)
@pytest.mark.parametrize("before", ["cosine", "constant"])
def test_another_schedule_goes_on_where_it_would_be(before, after):
    began = Run(config_of("Adafactor" if after == "adafactor" else "AdamW", lr_scheduler=before))
    began.steps(STOP)
    options = {"optimizer_type": began.config.optim.optimizer, "lr_scheduler": after}
    options |= {} if after in ("constant", "piecewise_constant", "adafactor") else {"lr_warmup_steps": 2}
    now = config_of(**{"name": began.config.optim.optimizer, **options, **NEEDS.get(after, {})})
    other, straight = began.resumed(now, rescheduled=True), Run(now)
    whole = straight.steps(TOTAL)
    if after != "adafactor":  # which computes its own from what the optimizer has gathered
        assert other.steps(TOTAL - STOP) == whole[STOP:]
    assert set(lr_schedule.FUNCTIONS) == set(SchedulerName.__args__)


@pytest.mark.parametrize("name", ["cosine", "cosine_with_restarts", "linear", "polynomial", "inverse_sqrt"])
def test_an_unchanged_schedule_goes_on_where_it_stood(name):
    config = config_of(lr_scheduler=name, lr_warmup_steps=2)
    began, whole = Run(config), Run(config).steps(TOTAL)
    began.steps(STOP)
    assert began.resumed(config).steps(TOTAL - STOP) == whole[STOP:] and len(set(whole[STOP:])) > 1


def test_a_constant_rate_after_a_finished_cosine_trains_at_once():
    began = Run(config_of(lr_scheduler="cosine"))
    began.steps(TOTAL)
    assert began.made.param_groups[0]["lr"] == 0
    assert began.resumed(config_of(), rescheduled=True).steps(2) == [5e-3, 5e-3]


@pytest.mark.parametrize("kind", ["StepLR", "CosineAnnealingLR", "OneCycleLR"])
def test_schedules_by_class_are_followed_to_their_place(kind):
    args = {
        "StepLR": ["step_size=2"],
        "CosineAnnealingLR": ["T_max=12"],
        "OneCycleLR": ["max_lr=0.01", "total_steps=14"],
    }[kind]
    began = Run(config_of())
    began.steps(STOP)
    now = config_of(lr_scheduler_type=kind, lr_scheduler_args=args)
    straight = Run(now)
    assert began.resumed(now, rescheduled=True).steps(4) == pytest.approx(straight.steps(STOP + 4)[STOP:], rel=1e-12)
    short = config_of(lr_scheduler_type="OneCycleLR", lr_scheduler_args=["max_lr=0.01", "total_steps=4"])
    with pytest.raises(ConfigError, match="OneCycleLR cannot be followed for the 12 steps of this training"):
        began.resumed(short, rescheduled=True)


@pytest.mark.parametrize("name", ["AdamWScheduleFree", "RAdamScheduleFree"])
def test_the_average_of_a_schedule_free_optimizer_survives_other_betas(name):
    began = Run(config_of(name))
    began.steps(STOP)
    other = began.resumed(config_of(name, optimizer_args=["betas=0.6,0.99"]))
    with averaging.averaged(began.made), averaging.averaged(other.made):
        for first, again in zip(began.weights, other.weights, strict=True):
            assert torch.allclose(first, again, atol=1e-6)


def test_an_estimate_stays_and_where_it_starts_no_longer_counts():
    began = Run(config_of("Prodigy", optimizer_args=["d0=1e-4"]))
    began.steps(STOP)
    now = config_of("Prodigy", optimizer_args=["d0=1e-2", "d_coef=2.0"])
    other = began.resumed(now)
    group, estimate = other.groups[0], began.groups[0]
    assert (group["d"], group["d0"], group["d_coef"]) == (estimate["d"], 1e-4, 2.0)
    assert resuming.only_for_starts({"optimizer_args": ["d0=1e-4"]}, now) == ["d0"]


@pytest.mark.parametrize(
    "name, before, now, other",
    [
        ("AdamW", [], ["amsgrad=True"], True),
        ("AdamW", ["amsgrad=True"], [], False),
        ("AdamW", [], ["weight_decay=0.1", "betas=0.8,0.9"], False),
        ("Adafactor", FIXED["Adafactor"], [*FIXED["Adafactor"], "beta1=0.9"], True),
        ("Prodigy", [], ["slice_p=3"], True),
        ("Prodigy", [], ["d_coef=2.0"], False),
    ],
)
def test_arguments_that_need_moments_which_a_state_lacks_are_known(name, before, now, other):
    assert resuming.needs_other_memory({"optimizer_args": before}, config_of(name, optimizer_args=now)) is other
    assert not resuming.needs_other_memory({}, config_of(name, optimizer_args=now))  # a state that does not tell
