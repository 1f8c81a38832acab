"""Private parts of PyTorch are used in few files, and its switches are as they were when a training is over."""

import ast
from collections.abc import Collection

import pytest
import torch

from library.compiler import torch_private
from tests import source
from tests.training import config_of, demo, squares, train  # noqa: F401

ALLOWED = [
    source.ROOT / f"library/compiler/{name}.py" for name in ("torch_private", "attention_kernels", "row_kernels")
]


def private(dotted: str) -> bool:
    names = dotted.split(".")
    hidden = any(name.startswith("_") and not name.endswith("__") for name in names)
    return names[0] == "torch" and hidden and all(name.isidentifier() for name in names)


def private_uses(nodes: Collection[ast.AST]) -> list[str]:
    """What the nodes of a file import or read of PyTorch by a name with an underscore, whatever it calls the module."""
    found, known = [], {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        known |= {short: name for name, short in names if short}
        found += [name for name, _ in names if private(name)]
    for node in nodes:
        rest: list[str] = []
        while isinstance(node, ast.Attribute):
            rest, node = [node.attr, *rest], node.value
        if rest and isinstance(node, ast.Name):
            found += [name for name in [".".join([known.get(node.id, node.id), *rest])] if private(name)]
    return found


def test_private_parts_of_pytorch_are_used_in_three_files():
    files = [*source.files(), *sorted((source.ROOT / "benchmarks").glob("*.py"))]
    uses = {str(path): private_uses(source.nodes(path)) for path in files if path not in ALLOWED}
    assert not {path: names for path, names in uses.items() if names}
    assert all(private_uses(source.nodes(path)) for path in ALLOWED)


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch import _C",
        "import torch as t\nt._foreach_mul(1)",
        "from torch import nn\nnn.functional._x",
        "torch.ops.aten._unsafe_view(x)",
    ],
)
def test_every_way_to_a_private_part_is_seen(code):
    harmless = "import torch\ntorch.__version__, torch.nn.Linear, self._torch"
    assert private_uses([*ast.walk(ast.parse(code))]) and not private_uses([*ast.walk(ast.parse(harmless))])


def switches() -> dict[str, object]:
    """Everything that a training sets for the whole process."""
    modules = {name: torch_private.config_module(name) for name in ("dynamo", "functorch", "inductor", "shapes")}
    options = {name: module.get_config_copy() for name, module in modules.items()}
    kernels = [getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ("flash", "math", "mem_efficient")]
    return {
        **options,
        "compiler": torch.compiler.config.get_config_copy(),
        "kernels": (kernels, torch_private.sdp_priority_order()),
        "precision": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "stance": torch._dynamo.eval_frame._stance.stance,
    }


def test_a_training_leaves_pytorchs_switches_as_it_found_them(demo, squares, tmp_path, monkeypatch):  # noqa: F811
    def fails(graph, inputs):
        raise RuntimeError("no code for this today")

    torch._dynamo.register_backend(fails, name="fails")
    before, inside = switches(), []
    monkeypatch.setattr("library.train.step_log.StepLog.push", lambda *_: inside.append(switches()))
    config = config_of(
        demo,
        "flux_train_network",
        train_data_dir=squares,
        output_dir=tmp_path,
        max_train_steps=1,
        compile=True,
        compile_backend="fails",
        compile_fallback=True,
        attention_kernel="math",
        cuda_allow_tf32=True,
        cuda_cudnn_benchmark=True,
    )
    try:
        train(config)
        changed = {name for name, value in inside[0].items() if value != before[name]}
        assert changed | {"dynamo"} == {*before}  # of dynamo's one is set before PyTorch 2.13
        assert switches() == before
    finally:
        for known in (torch._dynamo.backends.registry._COMPILER_FNS, torch._dynamo.backends.registry._BACKENDS):
            known.pop("fails", None)
