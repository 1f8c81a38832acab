"""What a denoiser's blocks do after preparing is logged in one line, as their classes and the tree do not show it."""

import pytest
import torch

from library import families, methods
from library.compiler.log import CompileLog
from library.compiler.subclass import CHECKPOINTED, COMPILED, INSIDE_OUT, SWAPPED, behaviours_of
from library.compiler.torch_settings import keep_torch_settings
from library.memory import attention, checkpointing
from library.memory.compile_targets import blocks_by_class
from library.memory.prepare import describe_blocks, prepare_denoiser, restored_after
from library.memory.quantization import fp8_storage
from tests import training

FEATURES = {
    "compile": True,
    "compile_backend": "eager",
    "compile_blocks": "single:0-1",
    "gradient_checkpointing": True,
    "blocks_to_swap": 2,
    "mixed_precision": "bf16",
}


@pytest.mark.parametrize("base", ["int8_base", "fp8_base"])
def test_the_blocks_are_described_by_what_was_added_to_them_and_restored_after_a_trial(demo, base):
    config = training.config_of(demo, "flux_train_network", **FEATURES, **{base: True})
    family = families.family_for(config)
    parts = family.load(fp8_storage.storage_type(config))
    methods.attach_method(parts, family, config)
    denoiser, sizes, classes = parts.denoiser, ((1, 8, 8), (1, 8, 16)), family.block_classes
    with (
        keep_torch_settings(),
        attention.keep_attention_settings(),
        CompileLog() as log,
        restored_after(denoiser, family),
    ):
        said = prepare_denoiser(denoiser, family, config, torch.device("cpu"), sizes, log=log).blocks
    double, single = said.removeprefix("Blocks: ").split("; ")
    assert double.endswith("DoubleStreamBlock (8-bit weights, checkpointed, 1 swapped)"), said
    assert single.endswith("SingleStreamBlock (8-bit weights, checkpointed, 2 compiled, 2 swapped)"), said
    assert describe_blocks(denoiser, classes).count("8-bit weights") == 2
    assert "checkpointed" not in describe_blocks(denoiser, classes)


def test_classes_are_put_around_a_block_in_one_order_only(demo):
    """A checkpoint around a block that is compiled already would recompute outside its graph."""
    config = training.config_of(demo, "flux_train_network", **FEATURES)
    family = families.family_for(config)
    parts = family.load(fp8_storage.storage_type(config))
    methods.attach_method(parts, family, config)
    denoiser, sizes, classes = parts.denoiser, ((1, 8, 8), (1, 8, 16)), family.block_classes
    with (
        keep_torch_settings(),
        attention.keep_attention_settings(),
        CompileLog() as log,
        restored_after(denoiser, family),
    ):
        prepare_denoiser(denoiser, family, config, torch.device("cpu"), sizes, log=log)
        blocks = [block for group in blocks_by_class(denoiser, classes) for block in group]
        order = [behaviour for behaviour in INSIDE_OUT if any(behaviour in behaviours_of(block) for block in blocks)]
        assert order == [CHECKPOINTED, COMPILED, SWAPPED]
        with pytest.raises(AssertionError, match="is compiled, swapped already and cannot be checkpointed"):
            checkpointing.checkpoint_blocks([[block for block in blocks if COMPILED in behaviours_of(block)]])
