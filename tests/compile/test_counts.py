"""The number of graphs is known beforehand, whatever sizes of image and of batch there are."""

import pytest
import torch

from library.compile_ledger import LEDGER

SDXL, FLUX = "sdxl_train_network", "flux_train_network"
ONE, MANY, BATCHES = ((2, 8, 8),), ((2, 8, 8), (2, 8, 16)), ((1, 8, 8), (3, 8, 16), (3, 8, 8))
CASES = {
    # The tiny U-Net's last two levels are equally wide.
    "one size": (SDXL, ONE, {}, {"ResnetBlock2D": 9, "BasicTransformerBlock": 2}),
    "many sizes": (SDXL, MANY, {"compile_blocks": "transformer:all"}, {"BasicTransformerBlock": 1}),
    "each size": (
        SDXL, MANY, {"compile_dynamic": "false", "compile_blocks": "transformer:all"}, {"BasicTransformerBlock": 4}
    ),
    "batches": (FLUX, BATCHES, {}, {"DoubleStreamBlock": 2, "SingleStreamBlock": 2}),
    "any batch": (FLUX, BATCHES, {"compile_dynamic": "true", "compile_blocks": "single:all"}, {"SingleStreamBlock": 2}),
}  # fmt: skip


@pytest.fixture
def varying():
    """Whether sizes may vary, graph by graph."""
    found = []

    @torch._dynamo.register_backend(name="shown")
    def shown(graph, inputs):
        found.append(any(isinstance(given, torch.SymInt) for given in inputs))
        return graph.forward

    yield found
    torch._dynamo.backends.registry._BACKENDS.pop("shown")
    torch._dynamo.backends.registry._COMPILER_FNS.pop("shown")


@pytest.mark.parametrize("case", CASES)
def test_graphs_are_as_many_as_predicted(made, varying, case):
    script, sizes, values, graphs = CASES[case]
    model = made(script, sizes, compile=True, compile_backend="shown", **values)
    assert LEDGER.predicted() == graphs
    model.gradients((*sizes, *sizes))
    LEDGER.drain()
    told = LEDGER.summary()
    assert told["graphs"] == graphs and not told["recompiles"], [event.reason for event in LEDGER.events]
    assert set(varying) == {case not in ("one size", "each size")}
