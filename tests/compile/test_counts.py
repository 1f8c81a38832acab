"""The number of graphs is known beforehand, whatever sizes of image and of batch there are."""

import pytest
import torch

from library import families
from library.compiler.torch_settings import stance
from library.methods import targets
from tests.sampling.test_sampling import lora_file
from tests.training import ONE_ADAPTER, config_of, several_blocks

SDXL, FLUX = "sdxl_train_network", "flux_train_network"
ONE, MANY, BATCHES = ((2, 8, 8),), ((2, 8, 8), (2, 8, 16)), ((1, 8, 8), (3, 8, 16), (3, 8, 8))
SIDES = "8x8 8x10 10x8 6x12 12x6 8x12 12x8 6x10 10x6 10x10 6x14 14x6"
DOZEN = tuple((2, *map(int, side.split("x"))) for side in SIDES.split())
QUICK = {"compile_blocks": "single:all", "network_args": ONE_ADAPTER}
CASES = {
    # The tiny U-Net's last two levels are equally wide.
    "one size": (SDXL, ONE, {}, {"ResnetBlock2D": 9, "BasicTransformerBlock": 2, "GroupNorm": 2}),
    "a dozen sizes of SDXL": (SDXL, DOZEN, {}, {"ResnetBlock2D": 7, "BasicTransformerBlock": 1, "GroupNorm": 1}),
    "many sizes": (SDXL, MANY, {"compile_blocks": "transformer:all"}, {"BasicTransformerBlock": 1}),
    "each size": (
        SDXL,
        MANY,
        {"compile_dynamic": "false", "compile_blocks": "transformer:all"},
        {"BasicTransformerBlock": 4},
    ),
    # Blocks in front of what learns, those behind it, and what learns.
    "one learns": (
        SDXL,
        MANY,
        {
            "network_args": [f"block_dims={','.join(['0'] * 9 + ['4'] * 3 + ['0'] * 11)}"],
            "compile_blocks": "transformer:all",
        },
        {"BasicTransformerBlock": 3},
    ),
    # Smaller latents would leave a single token below three halvings.
    "sizes of SD 1.5": (
        "train_network",
        ((2, 16, 16), (2, 16, 24)),
        {"compile_blocks": "transformer:all"},
        {"BasicTransformerBlock": 2},
    ),
    "a dozen sizes": (FLUX, DOZEN, QUICK, {"SingleStreamBlock": 1}),
    "batches": (FLUX, BATCHES, QUICK, {"SingleStreamBlock": 2}),
    "any batch": (FLUX, BATCHES, {"compile_dynamic": "true", **QUICK}, {"SingleStreamBlock": 2}),
}


@pytest.fixture
def varying():
    """Whether sizes may vary, graph by graph."""
    found = []

    @torch._dynamo.register_backend(name="shown")
    def shown(graph, inputs):
        found.append(any(isinstance(model_inputs, torch.SymInt) for model_inputs in inputs))
        return graph.forward

    yield found
    torch._dynamo.backends.registry._BACKENDS.pop("shown")
    torch._dynamo.backends.registry._COMPILER_FNS.pop("shown")


@several_blocks
@pytest.mark.parametrize("case", CASES)
def test_graphs_are_as_many_as_predicted(model_of, varying, case):
    script, sizes, values, graphs = CASES[case]
    model = model_of(script, sizes, compile=True, compile_backend="shown", **values)
    assert model.log.predicted() == graphs
    model.gradients((*sizes, *sizes))
    model.log.drain()
    told = model.log.summary()
    assert told["graphs"] == graphs and not told["recompiles"], [event.reason for event in model.log.events]
    assert set(varying) == {case not in ("one size", "each size")}


@several_blocks
def test_an_assistant_adds_no_graph_and_images_leave_those_of_steps_alone(model_of, demo, varying, tmp_path):
    family = families.family_for(config_of(demo, FLUX))
    layers = targets.find_target_layers(family.load(torch.float32).denoiser, "denoiser", family.adapter_name, ())
    file = lora_file(tmp_path / "a.safetensors", {one.name: one.layer for one in layers if "_single_" in one.name})
    values = {"compile": True, "compile_backend": "shown", "assistant_lora": f"{file}:0.5", **QUICK}
    model = model_of(FLUX, MANY, **values)
    model.gradients((*MANY, *MANY))
    with model.method.assistant.off(), torch.no_grad(), stance("force_eager"):
        model.loss(MANY[0])
    model.gradients(MANY)
    model.log.drain()
    told = model.log.summary()
    assert told["graphs"] == model.log.predicted() == {"SingleStreamBlock": 1} and not told["recompiles"]


def test_no_norm_on_a_cpu_ends_the_process_where_what_is_in_front_of_it_does_not_learn(model_of):
    """PyTorch's own GroupNorm does, with channels last, where it is asked for the gradients of its weights alone."""
    values = {
        "compile_backend": "eager",
        "compile_blocks": "resnet:0",
        "block_lr": ",".join(["0"] * 11 + ["1e-4"] * 12),
    }
    model = model_of("sdxl_train", ONE, compile=True, **values)
    wrong = model.loss(ONE[0])
    assert not any(type(module) is torch.nn.GroupNorm for module in model.components.denoiser.modules())
    few = [p for p in model.method.parameters() if p.dim() < 2]
    assert any(gradient is not None for gradient in torch.autograd.grad(wrong, few, allow_unused=True))
