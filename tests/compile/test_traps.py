"""What PyTorch does silently wrong, or leaves out, in compiled code: each has a guard."""

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from library import families
from library.bench import subjects
from library.compiler import blocks
from library.compiler.log import CompileLog
from library.compiler.torch_settings import wanted_settings
from library.config.problems import ConfigError
from library.memory import checkpointing
from tests.compile.test_compile_utils import INPUTS, Denoiser, gradients, options


@pytest.mark.parametrize(
    "register",
    [
        lambda layer, hook: layer.register_forward_hook(hook),
        lambda layer, hook: layer.register_forward_pre_hook(hook),
        lambda layer, hook: layer.register_full_backward_hook(hook),
        lambda layer, hook: layer.register_full_backward_pre_hook(hook),
    ],
)
def test_a_hook_inside_a_block_is_refused_by_name(forget, register):
    model = Denoiser()
    register(model.blocks[2].up, lambda *_: None)
    with pytest.raises(ConfigError, match=r"blocks\.2\.up has a hook") as refused:
        blocks.compile_model(options(), model, [list(model.blocks)])
    assert len(str(refused.value).splitlines()) == 1
    assert not any(block._compiled_call_impl for block in model.blocks)


def test_hooks_of_the_blocks_themselves_run(forget):
    called = []
    model = Denoiser()
    for block in model.blocks:
        block.register_forward_hook(lambda *_: called.append(1))
    blocks.compile_model(options(compile_fullgraph=False), model, [list(model.blocks)], inputs=INPUTS)
    with torch.no_grad():
        model(torch.randn(2, 6, 4), torch.randn(2, 6, 8))
    assert len(called) == len(model.blocks)


def test_random_masks_on_cuda_are_those_of_eager():
    """Masks fused by inductor repeat, and differ between forward and recompute (pytorch#198333)."""
    import torch._inductor.config as inductor

    wanted = {name: value for _, name, value in wanted_settings(options(), torch.device("cuda"))}
    assert wanted.get("align_random_eager") or wanted.get("fallback_random")
    assert any(hasattr(inductor, name) for name in ("align_random_eager", "fallback_random"))
    on_cpu = {name for _, name, _ in wanted_settings(options(), torch.device("cpu"))}
    assert not on_cpu & {"align_random_eager", "fallback_random"}


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs", "default"])
def test_kernels_that_were_tried_are_not_listed_in_the_log_unless_that_is_requested(mode, monkeypatch):
    def quiet():
        wanted = wanted_settings(options(compile_mode=mode), torch.device("cpu"))
        return {name: value for _, name, value in wanted if "autotune" in name}

    tried = mode != "default"
    names = {"autotune_num_choices_displayed": 0, "max_autotune_report_choices_stats": False}
    assert quiet() == (names if tried else {})
    monkeypatch.setenv("TORCHINDUCTOR_AUTOTUNE_NUM_CHOICES_DISPLAYED", "10")
    assert quiet().keys() == ({"max_autotune_report_choices_stats"} if tried else set())


def test_no_number_of_tokens_is_a_guard_on_cuda():
    """inductor joins gradients of norms to other kernels from 4096 rows on, which fewer rows recompiled for."""
    wanted = {name: value for _, name, value in wanted_settings(options(), torch.device("cuda"))}
    assert wanted.get("triton.mix_order_reduction") is False


def test_rows_are_kept_in_registers_on_cuda_alone():
    devices = {torch.device(name) for name in ("cuda", "cpu")}
    wanted = {device.type: {name for _, name, _ in wanted_settings(options(), device)} for device in devices}
    assert "inductor_choices_class" in wanted["cuda"] - wanted["cpu"]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_no_block_is_given_one_tensor_twice(family):
    """It would be a guard of its graph, which would be made again whenever it is two, as while a pass is recorded."""
    subject = subjects.FamilySubject(families.lora_script(family), {"mixed_precision": "no"}, "tiny")
    trainable = subject.make(subject.config({}), torch.device("cpu"))
    inputs = []
    for module in trainable.components.denoiser.modules():
        if type(module).__name__ in trainable.family.block_classes:
            module.register_forward_pre_hook(lambda *call: inputs.append(call[1:]), with_kwargs=True)
    with torch.no_grad():
        subject.predict(trainable, 64, torch.device("cpu"))(trainable.components.denoiser)
    tensors = [[id(leaf) for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)] for call in inputs]
    assert tensors and all(len(set(call)) == len(call) for call in tensors)


class Drops(nn.Module):
    """A block with dropout behind a transposed copy, which is where masks went wrong."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return x + nn.functional.dropout(self.up(x).transpose(1, 2).contiguous(), 0.5).transpose(1, 2)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_dropout_has_one_mask_for_forward_and_backward(forget, checkpoint):
    torch.manual_seed(0)
    block = Drops()
    with torch.no_grad():
        block.up.weight.zero_()
        block.up.bias.fill_(1.0)
    if checkpoint:
        checkpointing.checkpoint_blocks([[block]])
    blocks.compile_model(options(), block, [[block]])
    x = torch.zeros(2, 16, 8, requires_grad=True)
    out = block(x)
    out.sum().backward()
    assert 0 < (out == 0).sum() < out.numel()
    torch.testing.assert_close(block.up.bias.grad, out.sum((0, 1)))  # what was let through counts twice, both ways


def test_a_block_that_is_computed_again_finds_the_graph_of_its_forward_pass(forget):
    """A graph for one size and one for all sizes both do; the one used last would be asked first (pytorch#166926)."""
    ran, graphs = [], []

    def backend(graph, _):
        graphs.append(graph)
        number = len(graphs)
        return lambda *inputs: ran.append(number) or graph.forward(*inputs)

    torch._C._dynamo.eval_frame._set_lru_cache(True)
    checkpointing.checkpoint_blocks([[nn.Identity()]], around=True)
    compiled = torch.compile(lambda x: x.sin(), backend=backend)
    for size in (4, 5, 4, 6, 4):
        compiled(torch.zeros(size))
    assert ran == [1, 2, 1, 2, 1]


def test_the_limit_of_graphs_is_handed_over_where_every_thread_sees_it():
    assert blocks.torch_compile_options(options(compile_cache_size_limit=16))["recompile_limit"] == 16


def test_switching_between_training_and_evaluation_costs_no_graph(forget):
    model = Denoiser()
    log = CompileLog()
    blocks.compile_model(options(), model, [list(model.blocks), list(model.others)], inputs=INPUTS, log=log)
    gradients(model)
    for mode in (False, True):
        model.train(mode)
        gradients(model)
    log.drain()
    assert log.summary()["recompiles"] == 0


class Branches(nn.Module):
    """A block that looks at a number while it computes, which no graph can."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        return self.up(x) if x.sum() > 0 else x


def test_a_block_that_runs_eagerly_although_a_graph_was_made_is_reported(forget):
    for block, told in ((Drops(), []), (Branches(), ["forward"])):
        with CompileLog() as log:
            blocks.compile_model(options(compile_fullgraph=False), block, [[block]], log=log)
            block(torch.randn(2, 4, 8, requires_grad=True)).sum().backward()
            log.drain()
            assert [line.split()[-1] for line in log.graph_breaks()] == told
