import inspect
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from library.config.building import build_config
from library.config.ineffective import ineffective_options
from library.config.problems import ConfigError
from library.families.flux.options import FluxLora
from library.optim import averaging, classes, lr_schedule, optimizers
from tests.packages import hide


def config(**values):
    return build_config(FluxLora, {"learning_rate": 0.5, **values}, notes=[])


def method(*rates):
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": rate, "name": f"part{i}"} for i, rate in enumerate(rates)]
    return SimpleNamespace(groups=lambda _optim=None: [dict(g) for g in groups], factor_caches=())


def curve(total=10, **values):
    chosen = config(**values)
    optimizer = optimizers.make_optimizer(method(0.5), chosen)
    schedule = lr_schedule.make_schedule(optimizer, chosen, total)
    rates = []
    for _ in range(total):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def test_adamw_is_the_default_with_rates_by_group():
    optimizer = optimizers.make_optimizer(method(0.1, 0.2), config())
    assert type(optimizer) is torch.optim.AdamW and [(g["name"], g["lr"]) for g in optimizer.param_groups] == [
        ("part0", 0.1),
        ("part1", 0.2),
    ]
    assert not optimizer.defaults["fused"]  # on the CPU


def test_arguments_reach_the_optimizer():
    optimizer = optimizers.make_optimizer(
        method(0.1), config(optimizer_args=["betas=0.8,0.9", "weight_decay=0.3", "amsgrad=True"])
    )
    assert (
        optimizer.defaults["betas"] == (0.8, 0.9)
        and optimizer.defaults["weight_decay"] == 0.3
        and optimizer.defaults["amsgrad"]
    )
    optimizer = optimizers.make_optimizer(method(0.1), config(optimizer_type="sgdnesterov"))
    assert optimizer.defaults["nesterov"] and optimizer.defaults["momentum"] == 0.9
    assert type(optimizers.make_optimizer(method(0.1), config(optimizer_type="RAdam"))) is torch.optim.RAdam
    optimizer = optimizers.make_optimizer(method(0.1), config(optimizer_type="torch.optim.NAdam"))
    assert type(optimizer) is torch.optim.NAdam


def test_every_name_has_a_line_in_the_table():
    from typing import get_args

    from library.config.sections.learning import OptimizerName, SchedulerName
    from library.optim.lr_schedule import FUNCTIONS

    assert {n.lower() for n in get_args(OptimizerName)} == set(classes.SPECS)
    assert set(get_args(SchedulerName)) == set(FUNCTIONS)


def test_all_that_is_wrong_is_reported_at_once(monkeypatch):
    hide(monkeypatch, "prodigyopt")
    wrong = config(
        optimizer_type="Prodigy",
        optimizer_args=["weight_decay", "betas=(0.9", "d_coef=abc"],
        lr_scheduler="cosin",
        lr_scheduler_args=["x"],
    )
    said = list(optimizers.find_optimizer_problems(wrong))
    assert len(said) == 6
    assert sum("key=value" in str(s) for s in said) == 4
    assert any("pip install prodigyopt" in str(s) for s in said) and any("did you mean cosine" in str(s) for s in said)
    with pytest.raises(ConfigError, match="prodigyopt"):
        optimizers.make_optimizer(method(0.1), wrong)


@pytest.mark.parametrize(
    "values, sentence",
    [
        ({"optimizer_args": ["weight_dekay=0.1"]}, "AdamW has no argument weight_dekay (did you mean weight_decay?)"),
        ({"optimizer_type": "Adamw2"}, "torch.optim has no Adamw2 (did you mean AdamW"),
        ({"optimizer_type": "AdamW8bits"}, "torch.optim has no AdamW8bits (did you mean AdamW8bit?)"),
        ({"optimizer_type": "Adafactr"}, "torch.optim has no Adafactr (did you mean Adafactor?)"),
        ({"optimizer_type": "nowhere.Best"}, "names the package nowhere, which is not installed here"),
        ({"optimizer_type": "AdamW8bit"}, "pip install bitsandbytes"),
        ({"lr_scheduler": "cosine", "lr_scheduler_args": ["power=2"]}, "cosine has no argument power"),
        ({"lr_scheduler": "cosine_with_min_lr"}, "needs lr_scheduler_min_lr_ratio"),
        ({"lr_scheduler": "piecewise_constant"}, "step_rules"),
        ({"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ["step_rules='5:1,9:0.5,0.1'"]}, "step_rules"),
        ({"lr_scheduler": "adafactor"}, "goes with optimizer_type Adafactor"),
        ({"lr_scheduler_type": "OneCycel"}, "has no OneCycel (did you mean OneCycleLR?)"),
        ({"optimizer_type": "Adafactor", "optimizer_args": ["warmup_init=True", "relative_step=False"]}, ""),
    ],
)
def test_an_optimizer_that_does_not_fit_is_refused(values, sentence, monkeypatch):
    hide(monkeypatch, "bitsandbytes")
    said = list(optimizers.find_optimizer_problems(config(**values)))
    assert any(sentence in str(s) for s in said) if sentence else not said


@pytest.mark.parametrize(
    "values, expected",
    [
        ({}, [0.5] * 10),
        ({"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": 4}, [0, 0.125, 0.25, 0.375, *[0.5] * 6]),
        ({"lr_scheduler": "constant_with_warmup", "lr_warmup_steps": "20%"}, [0, 0.25, *[0.5] * 8]),
        ({"lr_scheduler": "linear", "lr_warmup_steps": 0.5}, [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ({"lr_scheduler": "polynomial", "lr_scheduler_power": 2}, [0.5 * (1 - i / 10) ** 2 for i in range(10)]),
        (
            {"lr_scheduler": "cosine"},
            [0.25 * (1 + math.cos(i * math.pi / 10)) for i in range(10)],
        ),
        ({"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ["step_rules='1:3,0.1'"]}, [0.5] * 3 + [0.05] * 7),
        (
            {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 2, "lr_decay_steps": 0.4},
            [0, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5, None, 0.25, None],
        ),
        ({"lr_scheduler_type": "StepLR", "lr_scheduler_args": ["step_size=5", "gamma=0.1"]}, [0.5] * 5 + [0.05] * 5),
    ],
)
def test_curves(values, expected):
    actual = curve(**values)
    assert all(e is None or g == pytest.approx(e, abs=1e-4) for g, e in zip(actual, expected, strict=True)), actual


def test_other_curves_end_where_they_should():
    actual = curve(total=100, lr_scheduler="cosine_with_min_lr", lr_scheduler_min_lr_ratio=0.1)
    assert actual[0] == 0.5 and actual[-1] == pytest.approx(0.05, abs=0.001)
    actual = curve(total=100, lr_scheduler="cosine_with_restarts", lr_scheduler_num_cycles=2)
    assert actual[50] == 0.5 and actual[49] < 0.01
    assert curve(lr_scheduler="inverse_sqrt", lr_scheduler_timescale=4)[5] == pytest.approx(0.5 * (4 / 9) ** 0.5)


@pytest.mark.parametrize(
    "name", ["constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial", "warmup_stable_decay"]
)
def test_more_warmup_than_steps_trains_on_the_way_up_as_in_sd_scripts(name):
    """A hint before the training, and no error in it."""
    options = {"lr_scheduler": name, "lr_warmup_steps": 20, "lr_decay_steps": 5 if "decay" in name else 0}
    assert curve(**options) == pytest.approx([0.5 * step / 20 for step in range(10)])
    said = list(optimizers.optimizer_notes(config(**options, max_train_steps=10)))
    assert any("lr_warmup_steps 20 is not below max_train_steps" in str(line) for line in said)
    if name not in ("polynomial", "warmup_stable_decay"):
        assert curve(lr_scheduler=name, lr_warmup_steps="100%") == pytest.approx([0.05 * step for step in range(10)])


def test_decay_overlapping_the_warmup_is_rejected_and_one_that_never_begins_is_reported():
    options = {"lr_scheduler": "warmup_stable_decay", "lr_warmup_steps": 6}
    for total, decay in ((10, 5), (20, "75%")):
        (wrong,) = lr_schedule.too_long(config(**options, lr_decay_steps=decay), total)
        assert "would jump" in str(wrong) and wrong.options == {"lr_decay_steps", "lr_warmup_steps"}
        with pytest.raises(ConfigError, match="would jump"):
            curve(total=total, **options, lr_decay_steps=decay)
    fits = curve(total=10, **options, lr_decay_steps=4)
    assert max(abs(after - before) for before, after in itertools.pairwise(fits)) < 0.25
    told = [note for note in optimizers.optimizer_notes(config(**options)) if note.option == "lr_decay_steps"]
    assert len(told) == 1 and told[0].fix == {"lr_decay_steps": 0.1}
    assert not [*lr_schedule.schedule_notes(config(**options, lr_decay_steps=4))]
    others = {"lr_scheduler_args": ["num_decay_steps=9"], "lr_decay_steps": 9}
    assert not [*lr_schedule.too_long(config(**options, **others), 10)]


WARMUPS = [  # optimizer, its arguments, and those that keep a warm-up of 10 steps
    ("AdamWScheduleFree", [], ("warmup_steps=10",)),
    ("schedulefree.AdamWScheduleFree", ["weight_decay=0.1"], ("weight_decay=0.1", "warmup_steps=10")),
    ("SGDScheduleFree", [], ("warmup_steps=10",)),
    ("AdamWScheduleFree", ["warmup_steps=5"], ("warmup_steps=5",)),
    ("RAdamScheduleFree", [], ()),
    ("ProdigyPlusScheduleFree", [], ()),
    ("Adafactor", [], ("warmup_init=True",)),
    ("AdaFactor", ["relative_step=True", "warmup_init=False"], ("relative_step=True", "warmup_init=True")),
]


@pytest.mark.parametrize(("optimizer", "arguments", "kept"), WARMUPS)
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_the_warmup_of_an_optimizer_without_a_schedule_becomes_an_argument_of_its_own(
    optimizer, arguments, kept, schedule
):
    values = {"optimizer_type": optimizer, "optimizer_args": arguments, "lr_scheduler": schedule, "lr_warmup_steps": 10}
    if schedule == "constant":  # refused, as for any optimizer
        with pytest.raises(ConfigError) as refused:
            config(**values)
        problems = refused.value.problems
    else:
        problems = [*lr_schedule.schedule_notes(config(**values))]
    (said,) = [problem for problem in problems if problem.option == "lr_warmup_steps"]
    mended = config(**values | dict(said.fix))
    assert (mended.optim.optimizer_args, mended.optim.lr_warmup_steps) == (kept, 0)
    assert not [*lr_schedule.schedule_notes(mended)] and mended.optim.lr_scheduler == schedule
    assert "lr_warmup_steps" in ineffective_options(config(**values | {"lr_scheduler": "cosine"}))


def test_other_optimizers_keep_their_warmup():
    for optimizer, options in (
        ("AdamW", []),
        ("Adafactor", ["relative_step=False"]),
        ("ProdigyPlusScheduleFree", ["use_schedulefree=False"]),
    ):
        chosen = config(optimizer_type=optimizer, optimizer_args=options, lr_scheduler="cosine", lr_warmup_steps=4)
        assert not chosen.optim.without_schedule and not [*lr_schedule.schedule_notes(chosen)]
    share = {"optimizer_type": "AdamWScheduleFree", "lr_scheduler": "cosine", "lr_warmup_steps": 0.05}
    (said,) = lr_schedule.schedule_notes(config(**share, max_train_steps=200))
    assert said.fix == {"lr_warmup_steps": 0, "optimizer_args": ("warmup_steps=10",)}
    (said,) = lr_schedule.schedule_notes(
        config(**share, max_train_epochs=2)
    )  # how many steps that is, only the images say
    assert not said.fix and "warmup_steps=N" in str(said)


def test_adafactor_sets_its_own_rate_by_default():
    chosen = config(optimizer_type="AdaFactor", learning_rate=1e-3, lr_scheduler="cosine")
    optimizer = optimizers.make_optimizer(method(1e-4), chosen)
    schedule = lr_schedule.make_schedule(optimizer, chosen, 10)
    assert type(schedule).__name__ == "AdafactorSchedule" and optimizer.defaults["relative_step"]
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    schedule.step()
    assert any("Adafactor sets its own" in str(note) for note in optimizers.optimizer_notes(chosen))
    args = ["scale_parameter=False", "relative_step=False", "warmup_init=False"]
    chosen = config(optimizer_type="Adafactor", optimizer_args=args, lr_scheduler="constant_with_warmup")
    optimizer = optimizers.make_optimizer(method(1e-4), chosen)
    assert (
        optimizer.param_groups[0]["lr"] == 1e-4
        and type(lr_schedule.make_schedule(optimizer, chosen, 10)).__name__ == "LambdaLR"
    )


def test_description_is_that_of_the_metadata():
    assert optimizers.describe_optimizer(config()) == "torch.optim.adamw.AdamW"
    said = optimizers.describe_optimizer(config(optimizer_args=["betas=0.9,0.99", "weight_decay=0.1"]))
    assert said == "torch.optim.adamw.AdamW(betas=(0.9, 0.99),weight_decay=0.1)"
    adafactor = optimizers.describe_optimizer(config(optimizer_type="adafactor"))
    assert adafactor == "transformers.optimization.Adafactor(relative_step=True)"


def test_notes_on_what_is_seldom_meant():
    assert any(
        "about 1.0" in str(n) for n in optimizers.optimizer_notes(config(optimizer_type="prodigy", learning_rate=1e-4))
    )
    assert any(
        "no schedule" in str(n)
        for n in optimizers.optimizer_notes(config(optimizer_type="AdamWScheduleFree", lr_scheduler="cosine"))
    )


def test_schedule_free_weights_are_averaged_only_inside():
    calls = []
    modes = {"train": lambda: calls.append("train"), "eval": lambda: calls.append("eval")}
    optimizer = SimpleNamespace(param_groups=[], **modes)
    averaging.train_mode(optimizer)
    with pytest.raises(RuntimeError), averaging.averaged(optimizer):
        calls.append("save")
        raise RuntimeError
    assert calls == ["train", "eval", "save", "train"]
    with averaging.averaged(optimizers.make_optimizer(method(0.1), config())):
        pass


BAD = ("-1", "0", "'x'", "None", "[]", "(1,)", "1e999", "{}")
NEEDED = {
    "StepLR": ["step_size=5"],
    "MultiStepLR": ["milestones=[3]"],
    "ExponentialLR": ["gamma=0.9"],
    "CosineAnnealingLR": ["T_max=10"],
    "CyclicLR": ["base_lr=0.1", "max_lr=0.2"],
    "CosineAnnealingWarmRestarts": ["T_0=5"],
    "OneCycleLR": ["max_lr=0.1", "total_steps=20"],
}
CLASSES = [
    name
    for name, cls in vars(torch.optim.lr_scheduler).items()
    if isinstance(cls, type) and issubclass(cls, torch.optim.lr_scheduler.LRScheduler)
]


def checked(total=20, **values):
    chosen = config(**values)
    return [*optimizers.find_optimizer_problems(chosen), *lr_schedule.too_long(chosen, total)]


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.endswith("LRScheduler")])
def test_what_the_check_lets_through_a_schedule_takes_for_all_steps(name):
    """With every argument of every class of PyTorch, and values of every wrong kind."""
    needed = NEEDED.get(name, [])
    parameters = [*inspect.signature(getattr(torch.optim.lr_scheduler, name)).parameters]
    others = [pair for pair in needed if pair.partition("=")[0] not in parameters]
    for arg, value in itertools.product(parameters, BAD):
        own = [*(pair for pair in needed if not pair.startswith(f"{arg}=")), *others, f"{arg}={value}"]
        values = {"lr_scheduler_type": name, "lr_scheduler_args": own}
        said = checked(**values)
        assert all(problem.option.startswith("lr_scheduler") and "\n" not in str(problem) for problem in said)
        if not said:
            assert all(-1e-6 <= rate < math.inf for rate in curve(20, **values))


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("ChainedScheduler", [], "needs schedulers, which cannot be written as a value"),
        ("SequentialLR", ["milestones=[3]"], "needs schedulers, which cannot be written as a value"),
        ("LambdaLR", ["lr_lambda=1"], "needs lr_lambda, which cannot be written as a value"),
        ("ReduceLROnPlateau", [], "needs metrics, which cannot be written as a value"),
        ("StepLR", [], "lr_scheduler_args: StepLR needs step_size; add step_size=VALUE"),
        ("CyclicLR", ["base_lr=1"], "lr_scheduler_args: CyclicLR needs max_lr; add max_lr=VALUE"),
        ("StepLR", ["step_size='5'"], "lr_scheduler_args: StepLR does not take these values (TypeError"),
        ("ExponentialLR", ["gamma=-1"], "(its learning rate is -0.5 at step 1)"),
        ("OneCycleLR", ["max_lr=0.1", "total_steps=10"], "OneCycleLR cannot be followed for the 20 steps"),
        ("MultiStepLR", ["milestones=[9]", "gamma='x'"], "MultiStepLR cannot be followed for the 20 steps"),
    ],
)
def test_a_schedule_by_class_is_tried_before_a_model_is_loaded(name, args, words):
    said = checked(lr_scheduler_type=name, lr_scheduler_args=args)
    assert len(said) == 1 and words in str(said[0]), said


def test_a_named_schedule_is_tried_too():
    (said,) = checked(lr_scheduler="cosine", lr_scheduler_args=["num_cycles='x'"])
    assert "lr_scheduler_args: cosine does not take these values (ValueError" in str(said)
    (said,) = checked(lr_scheduler="polynomial", learning_rate=1e-9)
    assert said.option == "lr_scheduler" and "lr_end (1e-07) must be smaller than initial lr" in str(said)
    (said,) = checked(lr_scheduler="polynomial", lr_warmup_steps=20)  # which divides by the steps after the warm-up
    assert "lr_scheduler: polynomial cannot be followed for the 20 steps of this training (ZeroDivision" in str(said)
    assert not checked(lr_scheduler="polynomial", lr_warmup_steps=21)


def test_an_argument_that_cannot_be_read_is_not_called_missing_besides():
    (said,) = checked(lr_scheduler_type="OneCycleLR", lr_scheduler_args=["max_lr=high"])
    assert "'max_lr=high' must be written key=value" in str(said)
    said = checked(lr_scheduler_type="OneCycleLR", lr_scheduler_args=["max_lr=high", "foo=1"])
    assert ["must be written" in str(problem) for problem in said] == [True, False] and "no argument foo" in str(
        said[1]
    )
    (said,) = checked(lr_scheduler="cosine_with_min_lr", lr_scheduler_args=["min_lr=low"])
    assert "'min_lr=low' must be written key=value" in str(said)


def test_lists_of_a_schedule_are_tried_with_the_groups_of_the_model():
    chosen = config(lr_scheduler_type="OneCycleLR", lr_scheduler_args=["max_lr=[0.1, 0.2]", "total_steps=20"])
    assert not [*optimizers.find_optimizer_problems(chosen)] and not [*lr_schedule.for_groups(chosen, [0.1, 0.2])]
    (said,) = lr_schedule.for_groups(chosen, [0.1])
    assert "max_lr must have the same length as optimizer.param_groups" in str(said)


@pytest.mark.parametrize(
    ("name", "original", "arguments"),
    [
        ("constant", "get_constant_schedule", {}),
        ("constant_with_warmup", "get_constant_schedule_with_warmup", {"num_warmup_steps": 5}),
        ("linear", "get_linear_schedule_with_warmup", {"num_warmup_steps": 3, "num_training_steps": 17}),
        ("cosine", "get_cosine_schedule_with_warmup", {"num_warmup_steps": 0, "num_training_steps": 17}),
        ("cosine", "get_cosine_schedule_with_warmup", {"num_warmup_steps": 30, "num_training_steps": 17}),
        (
            "cosine_with_restarts",
            "get_cosine_with_hard_restarts_schedule_with_warmup",
            {"num_warmup_steps": 4, "num_training_steps": 17, "num_cycles": 3},
        ),
    ],
)
def test_a_plain_schedule_is_that_of_transformers(name, original, arguments):
    """Every rate to the last bit, and what a state stores."""
    import inspect

    from transformers import optimization

    from library.optim import plain_schedules

    ours, theirs = getattr(plain_schedules, name), getattr(optimization, original)
    assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters]
    ran = []
    for make in (ours, theirs):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        schedule = make(optimizer, **arguments)
        rates = []
        for _ in range(20):
            rates += schedule.get_last_lr()
            optimizer.step()
            schedule.step()
        ran.append((rates, schedule.state_dict()))
    assert ran[0] == ran[1]
