"""What a compiled U-Net computes between its blocks: nothing that only changes the order of images in memory."""

import contextlib
import copy
from collections import Counter
from unittest import mock

import pytest
import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from library import families
from library.compiler.entry import graph_shape
from library.config.building import build_config
from library.memory import channels_last
from library.memory.compile_targets import blocks_by_class, compile_targets, image_transformers
from tests import training
from tests.training import several_blocks

SCRIPTS = {"sdxl": "sdxl_train_network", "sd15": "train_network"}
CPU, SIZES = torch.device("cpu"), ((2, 16, 16), (2, 16, 24))


def both(linear):
    """diffusers' own module, and a copy that keeps the order of images in memory, with a norm to be compiled."""
    torch.manual_seed(0)
    own = Transformer2DModel(2, 16, 64, cross_attention_dim=24, use_linear_projection=linear)
    own = own.to(memory_format=torch.channels_last)
    nn.init.normal_(own.norm.weight), nn.init.normal_(own.norm.bias)
    ours = copy.deepcopy(own)
    channels_last.compile_on_its_own(ours.norm)
    ours.__class__ = channels_last.with_images_last(type(ours))
    return own, ours


def run(module, height, width):
    torch.manual_seed(height)
    x = torch.randn(2, 64, height, width).to(memory_format=torch.channels_last).requires_grad_()
    answer = module(x, torch.randn(2, 7, 24), return_dict=False)[0]
    answer.float().square().sum().backward()
    gradients = [x.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return answer, gradients


@pytest.mark.parametrize("linear", [True, False])
def test_images_become_tokens_and_images_again_as_in_diffusers(forget, linear):
    own, ours = both(linear)
    assert [*ours.state_dict()] == [*own.state_dict()]
    assert [(n, type(m).__name__) for n, m in ours.named_modules()] == [
        (n, type(m).__name__) for n, m in own.named_modules()
    ]
    for compiled in (False, True):
        if compiled:
            ours.norm.compile(backend="aot_eager", dynamic=True)
        for height, width in ((5, 7), (6, 3)):
            (wanted, gradients), (actual, others) = run(own, height, width), run(ours, height, width)
            torch.testing.assert_close(actual, wanted)
            torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-3)
            assert actual.is_contiguous(memory_format=torch.channels_last)
            assert compiled or torch.equal(actual, wanted)


def test_in_half_precision_tokens_are_in_the_dtype_of_the_next_layer(forget):
    own, ours = both(True)
    ours.norm.compile(backend="aot_eager")
    x = torch.randn(2, 64, 5, 7).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        normed = ours.norm(x)
        assert normed.dtype == torch.bfloat16 and normed.is_contiguous(memory_format=torch.channels_last)
        rows, wanted = (images.flatten(2).mT for images in (normed, own.norm(x)))
        torch.testing.assert_close(ours.proj_in(rows), own.proj_in(wanted))


class Between(TorchDispatchMode):
    """Counts the operations that make images, by name and whether the image has its channels last."""

    def __init__(self):
        super().__init__()
        self.images = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        answer = func(*args, **(kwargs or {}))
        if isinstance(answer, torch.Tensor) and answer.dim() == 4 and not func.is_view:
            self.images[func.__name__, answer.is_contiguous(memory_format=torch.channels_last)] += 1
        return answer


@contextlib.contextmanager
def counted_between_blocks(log):
    """Count outside of compiled blocks, which would run eagerly under a mode that sees their operations."""
    enter = log.inside

    @contextlib.contextmanager
    def inside(kind):
        with enter(kind), _disable_current_modes():
            yield

    with mock.patch.object(log, "inside", inside), Between() as between:
        yield between.images


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_images_keep_their_order_between_compiled_blocks(model_of, script):
    model = model_of(script, SIZES, compile=True, compile_backend="eager", mixed_precision="bf16")
    model.gradients(SIZES)
    with counted_between_blocks(model.log) as images:
        model.loss(SIZES[0])
    transformers = image_transformers(model.components.denoiser, model.family)
    resnets = blocks_by_class(model.components.denoiser, ("ResnetBlock2D",))[0]
    skips = sum(block.conv_shortcut is not None for block in resnets if block.in_channels > block.out_channels)
    assert not any(name in ("clone.default", "native_group_norm.default") for name, _ in images)
    assert sum(number for (name, _), number in images.items() if name == "rsqrt.default") == 1  # of the last norm
    assert images["cat.default", True] == skips > 0 and not images["cat.default", False]
    assert images["add.Tensor", True] >= len(transformers)


@several_blocks
def test_where_only_some_blocks_are_compiled_nothing_changes_around_them(model_of):
    model = model_of(SCRIPTS["sdxl"], SIZES, compile=True, compile_blocks="transformer:all")
    modules = image_transformers(model.components.denoiser, model.family)
    assert modules and {type(module) for module in modules} == {Transformer2DModel}
    assert "GroupNorm" not in model.log.predicted()


@several_blocks
def test_norms_that_an_adapter_changes_run_as_before(model_of):
    how = {"network_module": "lycoris.kohya", "network_args": ("algo=lora", "train_norm=True")}
    model = model_of(SCRIPTS["sdxl"], SIZES, compile=True, compile_backend="eager", **how)
    modules = image_transformers(model.components.denoiser, model.family)
    assert modules and {type(module) for module in modules} == {Transformer2DModel}
    assert "GroupNorm" not in model.log.predicted()


@pytest.mark.parametrize("family", SCRIPTS)
def test_the_published_sizes_have_the_graphs_that_are_predicted(family):
    module, config = families.random_module(family), build_config(families.config_class(SCRIPTS[family]), {}, notes=[])
    unet, loaded = module.make_networks(module.FULL).denoiser(), families.family_for(config)
    groups = blocks_by_class(unet, loaded.block_classes)
    groups, _, _ = compile_targets(unet, groups, loaded, config, CPU, ((64, 64), (64, 72)))
    shapes = {type(group[0]).__name__: {graph_shape(block) for block in group} for group in groups}
    assert {kind: len(found) for kind, found in shapes.items()} == dict(families.facts_of(family).graphs)


def test_norms_that_a_process_does_not_have_are_not_compiled_there(demo):
    """A process that compiles beside a training has only the blocks with graphs of their own."""
    values = training.config_of(demo, SCRIPTS["sdxl"], compile=True, compile_backend="eager")
    unet = families.family_for(values).load(torch.float32).denoiser
    family = families.family_for(values)
    first, *others = image_transformers(unet, family)
    del first.norm
    groups, _, _ = compile_targets(unet, blocks_by_class(unet, family.block_classes), family, values, CPU, SIZES)
    assert [*groups[-1]] == [module.norm for module in others]
