"""What rounds to 8 bits is one kernel with what makes the numbers: nothing is written and read again between them.

Shown by the plan that inductor makes of kernels, before any is compiled.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from library.memory.quantization import fp8_matmul, int8_matmul


def planned(computation, *given: Tensor) -> list[str]:
    """The kinds of kernels that a computation becomes, in their order; "extern" are those that are called as they
    are."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import ExternKernelSchedulerNode
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(x) for x in given]
        graph = GraphLowering(
            make_fx(computation, decomposition_table=select_decomp_table())(*inputs), example_inputs=inputs
        )
        with V.set_graph_handler(graph), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            graph._update_scheduler()
            return [
                "extern" if isinstance(node, ExternKernelSchedulerNode) else "generated"
                for node in graph.scheduler.nodes
            ]


@pytest.mark.parametrize("rounded", [int8_matmul.quantize_rows_int8, fp8_matmul.quantize_rows_fp8])
def test_rounding_is_one_kernel_with_the_norm_in_front_of_it(rounded):
    """And with the shift by a block's modulation. What follows exp or tanh is stored first on a CPU, and only there."""

    def normed(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return rounded(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift)

    assert planned(normed, torch.randn(64, 128).bfloat16(), *torch.randn(2, 1, 128).bfloat16()) == ["generated"]


def test_a_product_in_int8_is_called_with_what_one_kernel_made():
    """One scale for the whole matrix would need all of it first, and another kernel for that."""
    x, weight, scale = torch.randn(64, 128).bfloat16(), torch.ones(96, 128, dtype=torch.int8), torch.rand(96)

    def one_scale(x: Tensor) -> Tensor:
        hidden = F.gelu(x)
        return (hidden.float() / hidden.abs().amax()).to(torch.int8)

    kinds = planned(lambda x, *w: int8_matmul.Int8Product.apply(F.gelu(x), *w), x, weight, scale)
    assert kinds[:2] == ["generated", "extern"] and kinds.count("generated") == 1
    assert len(planned(one_scale, x)) > 1
