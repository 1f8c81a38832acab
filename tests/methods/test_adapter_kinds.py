"""The types of adapters that the page offers: what they are known by, that each one trains, and how large it is."""

import copy

import pytest
import torch

from library import methods
from library.check import adapter_size
from library.config.building import build_config
from library.config.schema import section_options
from library.config.values import Option
from library.families import FAMILIES, adapter_kinds, config_class, facts_of, lora_script, network_args
from library.families.network_args import LycorisArgs
from tests.families.expectations import expected

KINDS = {kind.id: kind for kind in adapter_kinds.kinds("flux")}
EVERY = [(family, kind) for family in FAMILIES for kind in adapter_kinds.kinds(family)]


def pairs(kind, *more):
    return [f"{name}={value}" for name, value in (kind.fixed | kind.start).items()] + list(more)


def config_of(family, kind, *more):
    options = {"network_module": kind.module, "network_args": pairs(kind, *more)}
    return build_config(config_class(lora_script(family)), options, notes=[])


@pytest.mark.parametrize(("family", "kind"), EVERY, ids=lambda one: getattr(one, "id", one))
def test_a_kind_is_known_by_what_makes_it(family, kind):
    kinds = adapter_kinds.kinds(family)
    assert adapter_kinds.kind_of(config_of(family, kind), kinds).id == kind.id
    for preset in kind.presets:
        config = config_of(family, kind, *(f"{name}={value}" for name, value in preset.arguments.items()))
        assert (
            list(network_args.find_network_args_problems(config)) == []
            and adapter_kinds.kind_of(config, kinds).id == kind.id
        )
    assert all(isinstance(option, Option) and option.help for option in kind.options)


def test_no_argument_is_forgotten():
    for family in FAMILIES:
        shown = {}
        for kind in adapter_kinds.kinds(family):
            shown.setdefault(kind.args, set(adapter_kinds.HIDDEN)).update(kind.names, kind.layer_names, kind.fixed)
        for args, names in shown.items():
            absent = set(section_options(args)) - names
            assert absent <= {"conv_dim", "conv_alpha", "use_tucker", "train_t5xxl"}, (family, args)
            if family == "sdxl":
                assert absent <= {"train_t5xxl"}


@pytest.mark.parametrize(
    ("args", "meant"),
    [
        (["algo=LoRA"], "locon"),
        (["algo=lora", "dora_wd=true"], "dora"),
        (["algo=LoKr", "dora_wd=True"], "lokr"),
        ([], "locon"),
        (["algo=tlora"], None),
    ],
)
def test_what_is_typed_is_the_same_kind(flux_config, args, meant):
    kind = adapter_kinds.kind_of(flux_config(network_module="lycoris.kohya", network_args=args), [*KINDS.values()])
    assert (kind and kind.id) == meant


def test_blocks_of_lycoris_are_read_by_group(flux_config):
    def chosen(text):
        args = network_args.read_network_args(
            flux_config(network_module="lycoris.kohya", network_args=[f"train_block_indices={text}"])
        )
        return [[at for at, factor in enumerate(row) if factor] for row in args.chosen_blocks([3, 4])]

    assert chosen("all") == [[0, 1, 2], [0, 1, 2, 3]] and chosen("none") == [[], []]
    assert chosen("none/1,3") == [[], [1, 3]] and chosen("0-1/all") == [[0, 1], [0, 1, 2, 3]]
    wrong = flux_config(network_module="lycoris.kohya", network_args=["train_block_indices=1", "factor=x"])
    assert [p.option for p in network_args.find_network_args_problems(wrong)] == ["factor", "train_block_indices"]


def test_switches_of_lycoris_reach_the_package_as_what_they_say(flux_config):
    args = ["decompose_both=off", "use_scalar=0", "dora_wd=yes", "factor=4", "train_block_indices=none/0"]
    settings = network_args.lycoris_settings(flux_config(network_module="lycoris.kohya", network_args=args))
    assert settings == {"decompose_both": False, "use_scalar": False, "dora_wd": True, "factor": "4"}


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.id)
def test_each_kind_trains_the_blocks_that_are_chosen_and_its_size_is_known(flux_like, flux_config, kind, monkeypatch):
    if kind.args is LycorisArgs:
        pytest.importorskip("lycoris")
    joint = kind.args is LycorisArgs
    blocks = (
        ["train_block_indices=none/1"] if joint else ["train_double_block_indices=none", "train_single_block_indices=1"]
    )
    config = flux_config(
        network_module=kind.module, network_args=pairs(kind, *blocks), network_dim=16, network_train_unet_only=True
    )
    family, parts = flux_like
    monkeypatch.setattr(adapter_size, "_load_components", lambda *given: (family, copy.deepcopy(parts)))
    told = adapter_size.adapter_size(config)
    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 4), torch.randn(2, 3, 6)
    method = methods.attach_method(parts, family, config)
    method.train()
    before = parts.denoiser(*inputs)
    optimizer = torch.optim.SGD(method.parameters(), lr=0.1)
    for _ in range(2):  # the first one moves what begins at zero
        optimizer.zero_grad()
        parts.denoiser(*inputs).square().mean().backward()
        optimizer.step()
    method.train(False)
    assert not torch.equal(parts.denoiser(*inputs), before)
    state = method.state_dict()
    layers = {name.partition(".")[0] for name in state}
    assert layers == {f"lora_unet_single_blocks_1_{name}" for name in ("linear1", "linear2", "modulation_lin")}
    assert told["layers"] == 3 and told["blocks"] == [[0, 0], [0, 3, 0]] and told["counts"] == [2, 3]
    assert told["parameters"] == sum(p.numel() for p in method.parameters())
    assert told["bytes"] == pytest.approx(sum(t.numel() for t in state.values()) * 4, abs=3 * 6 * adapter_size.HEADER)


def test_a_package_that_is_named_while_typing_is_not_run(flux_config):
    cls = config_class(lora_script("flux"))
    asked = {"script": cls.script, "values": {"network_module": "nowhere.net", "learning_rate": "0"}}
    assert adapter_size.answer(asked) == {"why": ""}
    asked["values"] = {"network_args": ["conf=1"]}
    assert adapter_size.answer(asked)["why"]["option"] == "conf"


@pytest.mark.parametrize("family", FAMILIES)
def test_groups_of_blocks_are_those_of_the_published_model(family):
    assert tuple(group.count for group in facts_of(family).blocks) == expected(family, "blocks")
