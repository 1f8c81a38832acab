"""Every optimizer that is offered by name: it steps and learns here, and continues exactly from its state."""

import inspect
import io
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import nn

from library.check import estimate
from library.config.building import build_config, draft, working_fix
from library.config.fixes import carried_arguments
from library.config.problems import ConfigError
from library.config.sections.learning import OptimizerName
from library.families.flux.options import FluxLora, FluxTrain
from library.optim import averaging, optimizers, trial
from library.optim.classes import import_class, package_class
from library.optim.names import SPECS, optimizer_spec
from library.optim.streams import step_on_default_stream
from tests.packages import hide
from tests.training import config_of, train

NAMES = get_args(OptimizerName)
PAGED = [name for name in NAMES if name.startswith("Paged")]
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")


RATES = {"CAME": 3e-4, "RAdamScheduleFree": 0.05, "SGDScheduleFree": 0.5}


def config(name, cls=FluxLora, **values):
    options = {
        "optimizer_type": name,
        "learning_rate": 1.0 if optimizer_spec(name).finds_rate else RATES.get(name, 1e-3),
    }
    if name == "Adafactor":
        options["optimizer_args"] = ["relative_step=False", "scale_parameter=False"]
    if optimizer_spec(name).finds_rate:
        # They begin at 1e-6, and take long to find their rate.
        options["optimizer_args"] = ["d0=0.1" if name == "DAdaptAdaGrad" else "d0=1e-4"]
    return build_config(cls, options | values, notes=[])


class Toy(nn.Sequential):
    """Matrices, kernels and vectors, some large enough for 8-bit states, in two groups of different rates."""

    def __init__(self, dtype=torch.float32):
        torch.manual_seed(0)
        super().__init__(nn.Linear(64, 128), nn.LayerNorm(128), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(128, 8))
        self.to(dtype)

    def made(self, chosen):
        rate, other = chosen.optim.learning_rate, 1 if optimizer_spec(chosen.optim.optimizer).one_rate else 0.5
        groups = [
            {"params": [p for layer in layers for p in layer.parameters()], "lr": share * rate, "name": name}
            for layers, share, name in ((list(self)[:1], 1, "unet"), (list(self)[1:], other, "text_encoder"))
        ]
        optimizer = optimizers.make_optimizer(SimpleNamespace(groups=lambda _=None: groups, factor_caches=()), chosen)
        averaging.train_mode(optimizer)
        return optimizer

    def steps(self, optimizer, first, last):
        """Losses of some steps, all with the same images."""
        found = []
        for _ in range(first, last):
            images = torch.randn(4, 4, 64, generator=torch.Generator().manual_seed(1)).to(self[0].weight.dtype)
            loss = (self(images) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found


def copied(state):
    """A state as it comes back from a file, without unpickling anything."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equal(first, other):
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_each_steps_learns_and_resumes_exactly(name):
    chosen = config(name)
    assert list(optimizers.find_optimizer_problems(chosen)) == []
    toy, began = Toy(), Toy()
    optimizer = toy.made(chosen)
    losses = toy.steps(optimizer, 0, 30)
    assert min(losses) < 0.95 * losses[0], losses
    assert all(not torch.equal(a, b) for a, b in zip(toy.parameters(), began.parameters(), strict=True))
    state = copied(optimizer.state_dict())
    other = Toy()
    other.load_state_dict(toy.state_dict())
    again = other.made(chosen)
    again.load_state_dict(state)
    assert toy.steps(optimizer, 30, 33) == other.steps(again, 30, 33) and equal(toy, other)


@pytest.mark.parametrize("name", [name for name in NAMES if "ScheduleFree" in name])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_is_shown_for_saving_and_what_learns_is_put_back_bit_for_bit(name, dtype):
    toy = Toy(dtype)
    optimizer = toy.made(config(name))
    toy.steps(optimizer, 0, 10)
    before = [p.detach().clone() for p in toy.parameters()]
    with pytest.raises(RuntimeError), averaging.averaged(optimizer):
        assert not all(torch.equal(a, b) for a, b in zip(before, toy.parameters(), strict=True))
        raise RuntimeError
    assert all(torch.equal(a, b) for a, b in zip(before, toy.parameters(), strict=True))


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "CAME", "AdamMini", "Muon", "Lion"])
def test_half_precision_is_stepped_wide_and_resumes_exactly(name):
    chosen = config(name, FluxTrain, full_bf16=True, mixed_precision="bf16")
    assert not [note for note in optimizers.optimizer_notes(chosen) if "nearest" in str(note)]
    toy = Toy(torch.bfloat16)
    optimizer = toy.made(chosen)
    assert type(optimizer).__name__ == "PartitionedOptimizer"
    losses = toy.steps(optimizer, 0, 20)
    assert min(losses[-5:]) < 0.95 * losses[0], losses
    state, other = copied(optimizer.state_dict()), Toy(torch.bfloat16)
    other.load_state_dict(toy.state_dict())
    again = other.made(chosen)
    again.load_state_dict(state)
    assert toy.steps(optimizer, 20, 23) == other.steps(again, 20, 23) and equal(toy, other)


@pytest.mark.parametrize("name", ["AdamMini", "Muon"])
def test_a_schedule_reaches_all_weights_of_a_bundle(name):
    toy = Toy(torch.bfloat16)
    optimizer = toy.made(config(name, FluxTrain, full_bf16=True, mixed_precision="bf16"))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in toy.parameters()]
    toy.steps(optimizer, 0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before, toy.parameters(), strict=True))


def test_muon_turns_matrices_and_leaves_the_rest_to_adamw():
    toy = Toy()
    optimizer = toy.made(config("muon"))
    sorted_by = {
        (group["name"], group["use_muon"]): [p.dim() for p in group["params"]] for group in optimizer.param_groups
    }
    assert sorted_by == {
        ("unet", True): [2],
        ("unet", False): [1],
        ("text_encoder", True): [3, 2],
        ("text_encoder", False): [1, 1, 1, 1],
    }
    assert {(g["name"], g["lr"]) for g in optimizer.param_groups} == {("unet", 1e-3), ("text_encoder", 5e-4)}
    assert all(group["use_adjusted_lr"] for group in optimizer.param_groups if group["use_muon"])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in PAGED])
def test_the_memory_of_an_estimate_is_what_it_takes(name):
    weight = nn.Parameter(torch.randn(256, 512) * 0.02)
    chosen = config(name)
    groups = [{"params": [weight], "lr": chosen.optim.learning_rate, "name": "unet"}]
    optimizer = optimizers.make_optimizer(SimpleNamespace(groups=lambda _=None: groups, factor_caches=()), chosen)
    averaging.train_mode(optimizer)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    taken = sum(v.numel() * v.element_size() for v in optimizer.state[weight].values() if isinstance(v, torch.Tensor))
    taken += sum(
        v.numel() * v.element_size()
        for held in optimizer.state[weight].values()
        if isinstance(held, dict)
        for v in held.values()
        if isinstance(v, torch.Tensor)
    )
    assert estimate.STATES.get(name.lower(), estimate.USUAL_STATES) == pytest.approx(
        taken / weight.numel(), rel=0.15, abs=0.1
    )


@pytest.mark.parametrize(
    "written, name",
    [
        ("ADAMW8BIT", "AdamW8bit"),
        ("came", "CAME"),
        ("pytorch_optimizer.CAME", "CAME"),
        ("pytorch_optimizer.AdamMini", "AdamMini"),
        ("prodigyplus.ProdigyPlusScheduleFree", "ProdigyPlusScheduleFree"),
        ("bitsandbytes.optim.AdamW8bit", "AdamW8bit"),
        ("bitsandbytes.optim.adamw.PagedAdamW8bit", "PagedAdamW8bit"),
        ("muon", "Muon"),
    ],
)
def test_a_name_is_read_as_people_write_it(written, name):
    assert (
        optimizer_spec(build_config(FluxLora, {"optimizer_type": written}, notes=[]).optim.optimizer)
        is SPECS[name.lower()]
    )


@pytest.mark.parametrize(
    "written",
    [
        "radam",
        "torch.optim.NADAM",
        "bitsandbytes.optim.AdEMAMix8bit",
        "torch.optim.Adafactor",
        "pytorch_optimizer.ScheduleFreeAdamW",
    ],
)
def test_others_are_found_in_their_packages(written):
    chosen = build_config(FluxLora, {"optimizer_type": written, "learning_rate": 1e-3}, notes=[])
    assert list(optimizers.find_optimizer_problems(chosen)) == []
    toy = Toy()
    optimizer = toy.made(chosen)
    assert type(optimizer).__name__.lower() == written.rpartition(".")[2].lower()
    assert len(toy.steps(optimizer, 0, 2)) == 2


def test_optimizer_for_matrices_only_is_reported():
    with pytest.raises(ConfigError, match="optimizer_type torch.optim.Muon does not take these weights"):
        Toy().made(build_config(FluxLora, {"optimizer_type": "torch.optim.Muon", "learning_rate": 1e-3}, notes=[]))


@pytest.mark.parametrize(
    "name, args, words",
    [
        ("CAME", ["betaz=1"], ["has no argument betaz", "betas"]),
        ("Muon", ["momentun=0.9"], ["has no argument momentun", "momentum"]),
        ("AdamMini", ["eps=-1"], ["optimizer_args: AdamMini does not take these values"]),
        ("Prodigy", ["betas=(2,3)"], ["optimizer_args: Prodigy does not take these values", "beta"]),
        ("AdamW", ["betas=(0.9,)"], ["optimizer_args: AdamW does not take these values (IndexError"]),
        ("AdamW", ["foreach='x'", "eps=[1]"], ["optimizer_args: AdamW does not take these values (TypeError"]),
        ("SGDNesterov", ["momentum=1e999"], ["optimizer_args", "its first steps end in NaN"]),
        ("SGDNesterov", ["nesterov=True"], ["optimizer_args: SGDNesterov sets nesterov itself; leave it out"]),
        ("Muon", ["adamw_wd=None"], ["optimizer_args: Muon does not take these values (TypeError"]),
        ("LBFGS", [], ["optimizer_type: LBFGS cannot be used", "closure"]),
        ("AdamW", ["weight_decay=-1"], ["optimizer_args: AdamW does not take these values", "weight_decay"]),
    ],
)
def test_arguments_are_tried_before_a_model_is_loaded(name, args, words):
    (said,) = optimizers.find_optimizer_problems(config(name, optimizer_args=args))
    assert all(word in str(said) for word in words), said


@pytest.mark.parametrize("name", NAMES)
def test_values_of_a_wrong_kind_are_a_sentence_for_every_argument(name):
    cls = package_class(import_class(optimizer_spec(name)))
    for arg in inspect.signature(cls).parameters.keys() - {"params", "lr", "kwargs", "self"}:
        for value in ("'x'", "(1,)", "{}"):
            said = [*optimizers.find_optimizer_problems(config(name, optimizer_args=[f"{arg}={value}"]))]
            assert all(str(problem).startswith("optimizer_args: ") for problem in said), said
            if not said:
                toy = Toy()
                assert len(toy.steps(toy.made(config(name, optimizer_args=[f"{arg}={value}"])), 0, 2)) == 2


@pytest.mark.parametrize("name", [name for name in NAMES if optimizer_spec(name).finds_rate])
def test_several_rates_are_refused_by_those_that_have_one(name):
    chosen = config(name, unet_lr=1.0, text_encoder_lr=[0.5])
    said = [problem for problem in optimizers.find_optimizer_problems(chosen) if "one learning rate" in str(problem)]
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "lr": lr, "name": str(lr)} for lr in (1.0, 0.5)]
    method = SimpleNamespace(groups=lambda _=None: groups, factor_caches=())
    if not optimizer_spec(name).one_rate:
        optimizer = optimizers.make_optimizer(method, chosen)
        averaging.train_mode(optimizer)
        for group in groups:
            group["params"][0].grad = torch.ones(2, 2)
        optimizer.step()
        return
    mends = working_fix(said[0], chosen)
    assert mends == {"unet_lr": None, "text_encoder_lr": (), "learning_rate": 1.0}
    with pytest.raises(ConfigError, match="has one learning rate for all that learns"):
        optimizers.make_optimizer(method, chosen)


@pytest.mark.parametrize("written", ["Automagic", "automagic", "toolkit.optimizers.automagic.Automagic"])
def test_automagic_is_refused_by_name_and_mended(written):
    options = {"optimizer_type": written, "learning_rate": 1e-6, "optimizer_args": ["min_lr=1e-7", "weight_decay=0.1"]}
    with pytest.raises(ConfigError, match="Automagic is part of ai-toolkit and not available as a package") as refused:
        build_config(FluxLora, options)
    mends = working_fix(
        refused.value.problems[0], draft(FluxLora, {**options, "optimizer_args": tuple(options["optimizer_args"])})
    )
    assert mends == {
        "optimizer_type": "ProdigyPlusScheduleFree",
        "learning_rate": 1.0,
        "optimizer_args": ("weight_decay=0.1",),
    }
    assert list(optimizers.find_optimizer_problems(build_config(FluxLora, {**options, **mends}, notes=[]))) == []
    rough = draft(FluxLora, {"optimizer_type": written, "learning_rate": 1e-6})
    assert not [
        problem for problem in optimizers.find_optimizer_problems(rough) if "Automagic" in str(problem)
    ]  # it is said once


def test_those_that_find_their_rate_want_one_and_do_without_clipping():
    for name in ("Prodigy", "ProdigyPlusScheduleFree", "DAdaptAdam", "DAdaptLion"):
        notes = list(optimizers.optimizer_notes(config(name, learning_rate=1e-4)))
        assert any(f"learning_rate 0.0001 is small for {name}" in str(note) for note in notes)
    chosen = config("ProdigyPlusScheduleFree", lr_scheduler="cosine")
    notes = list(optimizers.optimizer_notes(chosen))
    clipping = next(note for note in notes if str(note).startswith("max_grad_norm hinders"))
    assert working_fix(clipping, chosen) == {"max_grad_norm": 0.0}
    assert any(str(note).startswith("lr_scheduler has no effect") for note in notes)
    scheduled = config("ProdigyPlusScheduleFree", lr_scheduler="cosine", optimizer_args=["use_schedulefree=False"])
    assert not any("lr_scheduler" in str(note) for note in optimizers.optimizer_notes(scheduled))


def test_metadata_names_the_package_s_own_class():
    assert (
        optimizers.describe_optimizer(config("Muon"))
        == "pytorch_optimizer.optimizer.muon.muon.Muon(use_adjusted_lr=True)"
    )
    assert optimizers.describe_optimizer(config("AdamMini")) == "pytorch_optimizer.optimizer.adam_mini.AdamMini"


def test_arguments_that_mean_the_same_are_carried_over():
    assert carried_arguments(["weight_decay=0.1", "d_coef=2", "betas=0.9,0.99"]) == (
        "weight_decay=0.1",
        "betas=0.9,0.99",
    )


@pytest.mark.parametrize(
    "name, package, fix",
    [
        ("AdamW8bit", "bitsandbytes", {"optimizer_type": "AdamW"}),
        ("PagedLion8bit", "bitsandbytes", {"optimizer_type": "Lion"}),
        ("SGDNesterov8bit", "bitsandbytes", {"optimizer_type": "SGDNesterov"}),
        ("Prodigy", "prodigyopt", {"optimizer_type": "ProdigyPlusScheduleFree", "optimizer_args": ()}),
        ("RAdamScheduleFree", "schedulefree", {"optimizer_type": "RAdam"}),
        ("Muon", "pytorch_optimizer", {"optimizer_type": "AdamW"}),
    ],
)
def test_without_its_package_the_nearest_is_offered(name, package, fix, monkeypatch):
    hide(monkeypatch, package)
    chosen = config(name)
    (said,) = optimizers.find_optimizer_problems(chosen)
    assert str(said).startswith(f"optimizer_type {name} needs a package that is not installed: ")
    assert working_fix(said, chosen) == fix
    mended = {"optimizer_args": (), **fix, "learning_rate": chosen.optim.learning_rate}
    assert list(optimizers.find_optimizer_problems(build_config(FluxLora, mended, notes=[]))) == []


def test_a_rate_of_one_does_not_stay_with_adamw(monkeypatch):
    hide(monkeypatch, "prodigyopt", "prodigyplus", "dadaptation")
    chosen = config("Prodigy", unet_lr=1.0, text_encoder_lr=[1.0])
    (said,) = optimizers.find_optimizer_problems(chosen)
    assert working_fix(said, chosen) == {
        "optimizer_type": "AdamW",
        "optimizer_args": (),
        "learning_rate": 1e-4,
        "unet_lr": None,
        "text_encoder_lr": (),
    }


@pytest.mark.parametrize("name", ["AdamW8bit", "ProdigyPlusScheduleFree", "Muon"])
def test_a_whole_training_resumes_exactly(name, demo, squares, tmp_path):
    def run(folder, **values):
        options = {
            "train_data_dir": squares,
            "output_dir": tmp_path / folder,
            "output_name": "m",
            "max_train_steps": 4,
            "optimizer_type": name,
            "learning_rate": 1.0 if optimizer_spec(name).finds_rate else 1e-3,
            "max_grad_norm": 0.0,
            "seed": 3,
            "save_every_n_steps": 2,
            "save_state": True,
        }
        return train(config_of(demo, "flux_train_network", **options | values))

    whole = run("whole")
    state = next((tmp_path / "whole").glob("m-step*2-state"))
    resumed = run("rest", resume=state)
    assert resumed.losses == whole.losses[2:] and len(whole.losses) == 4
    ours, theirs = whole.tensors(), resumed.tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


class FakeStream:
    """A CUDA stream that remembers which others it waited for."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


def step_of_a_training(optimizer_class):
    optimizer = optimizer_class([nn.Parameter(torch.ones(2))], lr=0.1)
    step_on_default_stream(optimizer)
    optimizer.step()


@pytest.mark.parametrize(
    "take_step",
    [
        step_of_a_training,
        lambda _: trial.try_optimizer(SPECS["adamw8bit"]),
        lambda _: trial.optimizer_state_shapes(SPECS["adamw8bit"], {}),
        lambda _: trial.try_arguments(SPECS["adamw8bit"], {"is_paged": False}),
    ],
    ids=["training", "trial", "shapes", "arguments"],
)
def test_8_bit_steps_run_on_the_default_stream_between_what_another_computes(monkeypatch, take_step):
    default, recorded = FakeStream(), FakeStream()
    current, streams = [recorded], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))

    class Watched(torch.optim.SGD):
        def __init__(self, params, lr, **_):
            super().__init__(params, lr)

        def step(self, closure=None):
            streams.append((current[0], default.waited_for[:1], list(recorded.waited_for)))

    monkeypatch.setattr(trial, "import_class", lambda spec: Watched)
    take_step(Watched)
    assert streams and all(each == (default, [recorded], []) for each in streams)
    assert current == [recorded] and recorded.waited_for == [default]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "Lion8bit"])
def test_8_bit_steps_on_another_stream_wait_for_their_gradients(name):
    def trained(stream):
        with torch.cuda.stream(stream):
            method = Learner8bit()
            optimizer = optimizers.make_optimizer(method, config(name, mixed_precision="bf16"))
            for _ in range(20):
                busy = torch.randn(4096, 4096, device="cuda")
                for _ in range(8):
                    busy = busy @ busy / 64  # so that the gradients come late
                method.weight.grad = torch.sin(method.weight.detach() * 3) + busy[:256, :256] * 0
                optimizer.step()
        torch.cuda.synchronize()
        return method.weight.detach().clone()

    expected, actual = trained(torch.cuda.default_stream()), trained(torch.cuda.Stream())
    assert expected.isfinite().all() and torch.equal(actual, expected)


class Learner8bit:
    """One trained matrix on the GPU, large enough for 8-bit states."""

    denoiser, block_classes, factor_caches = None, (), ()

    def __init__(self):
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(256, 256, device="cuda"))

    def groups(self):
        return [{"params": [self.weight], "lr": 1e-3, "name": "unet"}]
