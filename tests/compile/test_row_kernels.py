"""Which rows inductor's kernels keep in registers, by their length and by the order in which they are read."""

from types import SimpleNamespace

import pytest
import sympy

from library.compiler import torch_private
from library.compiler.row_kernels import LONGEST_ROW, make_row_choices


@pytest.fixture(scope="module")
def inductor():
    """Inductor's hints, in a context that knows the sizes of a graph."""
    torch_private.import_inductor()
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):
        yield ReductionHint


@pytest.mark.parametrize(
    ("length", "order", "kept"),
    [
        (LONGEST_ROW, "INNER", True),  # a norm of tokens
        (128, "DEFAULT", True),  # a norm of heads, whose channels are read in pairs
        (LONGEST_ROW + 1, "INNER", False),
        (10_240, "INNER", False),  # an MLP's width
        (LONGEST_ROW, "OUTER", False),  # a sum over tokens
        (sympy.Symbol("s0", integer=True, positive=True), "INNER", False),  # a number of tokens
    ],
)
def test_rows_that_fit_are_kept(inductor, length, order, kept):
    features = SimpleNamespace(
        get_reduction_hint=lambda: inductor[order], reduction_numel=sympy.sympify(length), numel=sympy.Integer(4224)
    )
    assert make_row_choices().should_use_persistent_reduction(features, False) is kept


def test_graphs_of_other_heuristics_are_told_apart():
    torch_private.import_inductor()
    assert str(LONGEST_ROW) in make_row_choices().uuid()
