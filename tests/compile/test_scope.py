"""What is compiled as one: the whole model, each block, or a block's computation alone; and with which backend."""

import pytest
import torch

from library import families
from library.compiler.checks import find_compile_problems
from library.config.building import build_config, draft
from library.config.problems import ConfigError

SIZES, ONE = ((8, 8), (8, 16), (16, 8)), ((8, 8),)
FLUX = "flux_train_network"
EACH = {"DoubleStreamBlock": 1, "SingleStreamBlock": 1}
ONE_LEARNS = {"network_args": ["train_single_block_indices=2", "train_double_block_indices=none"]}
LAST_LEARNS = ["train_single_block_indices=1", "train_double_block_indices=none"]
WHOLE = {"compile_scope": "model", "compile_backend": "eager"}
SHARE = {"compile_backend": "aot_eager", "compile_activation_budget": 0.5, "gradient_checkpointing": True}
INNER = {"compile_scope": "inner", "gradient_checkpointing": True}


@pytest.mark.parametrize(
    ("demo", "values", "sizes", "graphs"),
    [
        # Adapters are a good part of a graph, so that one block has them.
        ("shallow", {**WHOLE, "network_args": LAST_LEARNS}, SIZES, {"Flux": 1}),
        ("shallow", {**WHOLE, "network_args": LAST_LEARNS, "compile_dynamic": "false"}, SIZES[:2], {"Flux": 2}),
        # Only eager passes are checkpointed then, which no graph of a whole model could be.
        ("shallow", {**WHOLE, **SHARE, "network_args": LAST_LEARNS}, ONE, {"Flux": 1}),
        # Of the quicker kind: what is compiled of a block, and how it is swapped, is the same for both.
        ("deep", {**INNER, "blocks_to_swap": 3, "compile_blocks": "single:all"}, SIZES, {"SingleStreamBlock": 1}),
        (
            "deep",
            {"compile_blocks": "double:all=eager,single:all,single:1=eager"},
            ONE,
            {**EACH, "SingleStreamBlock": 2},
        ),
        ("deep", {**ONE_LEARNS, "gradient_checkpointing": True}, ONE, {**EACH, "SingleStreamBlock": 3}),
    ],
    indirect=["demo"],
    ids=("model", "model by size", "model with a share", "inner", "backends", "one learns"),
)
def test_numbers_are_those_of_eager_and_graphs_as_many_as_predicted(model_of, values, sizes, graphs):
    chosen = {name: value for name, value in values.items() if name == "network_args"}
    losses, expected = model_of(FLUX, sizes, **chosen).gradients(sizes)
    torch._dynamo.reset()
    model = model_of(FLUX, sizes, compile=True, compile_fullgraph=True, **values)
    actual = model.gradients(sizes)
    model.log.drain()
    told = model.log.summary()
    assert told["graphs"] == told["predicted"] == graphs and not told["recompiles"], [
        e.reason for e in model.log.events
    ]
    torch.testing.assert_close(actual[0], losses)
    torch.testing.assert_close(actual[1], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"compile_scope": "model", "blocks_to_swap": 2}, "compile_scope = model .*blocks_to_swap"),
        ({"compile_scope": "model", "gradient_checkpointing": True}, "compile_activation_budget"),
        ({"compile_scope": "model", "compile_blocks": "double:all"}, "compile_blocks has nothing to choose"),
        ({**INNER, "checkpoint_keep_attention": True}, "checkpoint_keep_attention"),
        ({"compile_blocks": " ,"}, "names no blocks; write double:all, or nothing"),
        ({"compile_blocks": "single"}, "single is not a range of blocks; write single:all or single:0-9"),
        ({"compile_blocks": "double:0-9="}, "double:0-9=aot_eager"),
        ({"compile_blocks": "double:all=cudagraphs", "blocks_to_swap": 2}, "cudagraphs .*blocks_to_swap"),
    ],
)
def test_what_cannot_be_compiled_together_is_one_sentence(values, words):
    with pytest.raises(ConfigError, match=words) as refused:
        build_config(families.config_class(FLUX), {"compile": True} | values, notes=[])
    assert len(str(refused.value).splitlines()) == 1


def test_each_block_has_the_backend_named_last_and_unknown_ones_are_reported():
    values = {"compile": True, "compile_blocks": "double:all=eager,double:1-2=aot_eager,single:3"}
    options = build_config(families.config_class(FLUX), values, notes=[]).compile
    backends = [options.backend_of("DoubleStreamBlock", n) for n in range(4)]
    assert backends == ["eager", "aot_eager", "aot_eager", "eager"]
    assert options.backend_of("SingleStreamBlock", 3) == "inductor"
    assert options.ranges() == {"DoubleStreamBlock": None, "SingleStreamBlock": ((3, 3),)}
    wrong = build_config(
        families.config_class(FLUX), {"compile": True, "compile_blocks": "double:all=eagle"}, notes=[]
    ).compile
    (sentence,) = find_compile_problems(wrong, torch.device("cpu"))
    assert str(sentence).startswith("compile_blocks: PyTorch has no backend called 'eagle'")


def test_blocks_that_there_are_not_are_reported_once_and_unknown_backends_beside_them():
    values = {"compile": True, "compile_blocks": "singel:all", "compile_backend": "eagle"}
    options = draft(families.config_class(FLUX), values).compile  # whose own check has told of the blocks
    (sentence,) = find_compile_problems(options, torch.device("cpu"))
    assert str(sentence).startswith("compile_backend: PyTorch has no backend called 'eagle'")
    assert not [*options.beyond({"SingleStreamBlock": 2})]
