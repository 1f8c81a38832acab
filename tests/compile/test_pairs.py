"""Everything together: eager and compiled losses and gradients agree, and graphs are as many as predicted.

Each row is a training with several things switched on at once, so that few rows hold all pairs of them; the last test
counts the pairs, those that are refused included.
"""

import itertools

import pytest
import torch

from library import families
from library.config.building import build_config
from library.config.problems import ConfigError
from library.memory.quantization import fp8_matmul
from tests.training import PLAIN_CODE

VARYING, ONE = ((8, 8), (8, 16)), ((8, 8),)  # images of many sizes, whose graphs take longer to make, and of one

FEATURES = {
    "checkpointing": {"gradient_checkpointing": True},
    "attention": {"gradient_checkpointing": True, "checkpoint_keep_attention": True},  # and so with checkpointing
    "offload": {"cpu_offload_checkpointing": True},
    "swap": {"blocks_to_swap": 3},
    "budget": {"compile_activation_budget": 0.5},
    "fp8": {"fp8_base": True, "mixed_precision": "bf16"},
    "bf16": {"mixed_precision": "bf16"},
    "dropout": {"network_dropout": 0.2},
    "lycoris": {"network_module": "lycoris.kohya", "network_args": ("algo=lokr", "factor=4")},
    "some": {"compile_blocks": None},  # set by family
}
SOME = {
    "flux": "single:1-2",
    "sdxl": "transformer:0,resnet:0",
    "krea": "block:1-2",
    "qwen": "block:1-2",
    "zimage": "block:1-2",
    "anima": "block:1-2",
}  # graphs cost the time of these tests
HALF = {"mixed_precision": "bf16", "full_bf16": True}

LORA = {  # and the sizes; those that vary do so together with each feature
    ("attention", "swap", "fp8", "bf16", "dropout"): ONE,  # every block
    ("checkpointing", "swap", "some", "dropout"): ONE,
    ("lycoris", "attention", "swap", "fp8", "bf16", "dropout", "some"): VARYING,
    ("lycoris", "checkpointing", "offload", "swap", "fp8", "bf16", "some", "dropout"): ONE,
    ("lycoris", "attention", "budget", "fp8", "bf16", "some"): VARYING,
}
SDXL = {("lycoris", "attention", "swap", "some", "dropout"): ONE}
WHOLE = {("attention", "some"): ONE, ("offload", "half", "some"): VARYING}


def values(script, features):
    found = {}
    for feature in features:
        found |= HALF if feature == "half" else FEATURES[feature]
    if "some" in features:
        found["compile_blocks"] = SOME[script.split("_")[0]]
    if {"lycoris", "fp8"} <= set(features):
        found["network_args"] = (*found["network_args"], "bypass_mode=True")
    return found


def agree(model_of, script, features, sizes, always=None, **compiled):
    if "lycoris" in features:
        pytest.importorskip("lycoris")
    how = values(script, features) | (always or {})
    only = {name: how.pop(name) for name in ("compile_blocks", "compile_activation_budget") if name in how}
    losses, expected = model_of(script, sizes, **how).gradients(sizes)
    torch._dynamo.reset()
    model = model_of(script, sizes, compile=True, **how, **only | compiled)
    actual = model.gradients(sizes)
    model.log.drain()
    told = model.log.summary()
    assert told["graphs"] == told["predicted"] and told["recompiles"] == 0, [e.reason for e in model.log.events]
    half = how.get("mixed_precision") == "bf16"
    close = {"rtol": 0.02, "atol": 1e-3} if half else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(actual[0], losses, **close)
    assert actual[1].shape == expected.shape and expected.norm() > 0
    # In bf16 eager gradients of these models are 5 % away from those of float32 themselves, compiled ones as much.
    assert (actual[1] - expected).norm() < (0.06 if half else 1e-4) * expected.norm()


@pytest.mark.parametrize("features", LORA, ids="+".join)
def test_adapters_of_flux(model_of, features):
    agree(model_of, "flux_train_network", features, LORA[features])


def test_what_is_computed_again_eagerly_draws_the_same_dropout(model_of):
    how = {"network_args": ("single_dim=0",), "network_dropout": 0.3}
    only = {"compile_backend": "eager", "compile_blocks": "double:all"}
    agree(model_of, "flux_train_network", ("checkpointing",), ONE, how, **only)


@pytest.mark.parametrize("features", SDXL, ids="+".join)
def test_adapters_of_sdxl(model_of, features):
    agree(model_of, "sdxl_train_network", features, SDXL[features])


@pytest.mark.parametrize("features", WHOLE, ids="+".join)
def test_a_whole_flux(model_of, features):
    agree(model_of, "flux_train", features, WHOLE[features])


def test_a_whole_sdxl(model_of):
    agree(model_of, "sdxl_train", ("attention", "some"), ONE)


def test_generated_code_agrees_too(model_of, monkeypatch):
    for name, value in PLAIN_CODE.items():
        monkeypatch.setenv(name, value)
    only = {"compile_backend": "inductor", "compile_blocks": "single:all"}
    fewer = {"network_args": ("single_dim=0",)}  # an adapter less is several pieces of code less
    agree(model_of, "flux_train_network", ("attention", "swap"), ONE, fewer, **only)


@pytest.mark.parametrize("name", ["fp8_base", "fp8_base_unet"])
def test_lycoris_goes_around_weights_in_8_bits(name):
    """In its usual mode it multiplies in the type of the weights, for which 8 bits have no kernel."""
    options = {name: True, "mixed_precision": "bf16", **FEATURES["lycoris"]}
    with pytest.raises(ConfigError, match=f"{name} cannot be used with .*bypass_mode=True"):
        build_config(families.config_class("sdxl_train_network"), options)
    with pytest.raises(ConfigError, match=f"{name} cannot be used with algo=full, .*: use algo=lokr"):
        build_config(
            families.config_class("sdxl_train_network"), options | {"network_args": ("algo=full", "bypass_mode=True")}
        )


@pytest.mark.parametrize("few", [{"int8_base": True}, {"fp8_base": True, "fp8_compute": True}], ids=str)
def test_lycoris_asks_its_layers_as_they_are_kept(model_of, monkeypatch, few):
    pytest.importorskip("lycoris")
    monkeypatch.setattr(fp8_matmul, "supports_fp8", lambda _: True)
    how = values("flux_train_network", ("lycoris", "fp8")) | {"fp8_base": False}
    exact, kept = (model_of("flux_train_network", **how | more).loss((8, 8)).item() for more in ({}, few))
    assert kept == pytest.approx(exact, rel=0.01)


def test_every_pair_is_tried_or_refused_with_a_sentence():
    tried = {frozenset(pair) for row in LORA for pair in itertools.combinations(row, 2)}
    config = families.config_class("flux_train_network")
    left, same = set(), {frozenset(("attention", "checkpointing")), frozenset(("budget", "checkpointing"))}
    for pair in map(frozenset, itertools.combinations(FEATURES, 2)):
        try:
            build_config(config, {"compile": True, **values("flux_train_network", sorted(pair))}, notes=[])
        except ConfigError as refused:
            assert all(len(line) > 40 for line in str(refused).splitlines())
            continue
        left |= {pair} - tried
    assert left == same, "attention checkpoints, too"


def test_norms_learn_in_front_of_everything_else_that_learns(model_of):
    """The first of SDXL's norms is called with images that need no gradient, which PyTorch cannot do on a CPU."""
    pytest.importorskip("lycoris")
    how = {"network_module": "lycoris.kohya", "network_args": ("algo=lora", "train_norm=True")}
    assert model_of("sdxl_train_network", **how).gradients(((8, 8),))[1].norm() > 0
