"""Floating point operations of a training step, estimated from a model's blocks, and rates from GPUs' data sheets."""

from library import families
from library.config.run_config import RunConfig
from library.measuring.model_stats import BlockStats, ModelStats

# Dense bf16 matrix products in TFLOP/s by part of the GPU's name; the first match counts.
DATA_SHEETS = {
    "B200": 2250,
    "H200": 989,
    "H100": 989,
    "H800": 989,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "RTX 6000 Ada": 364,
    "RTX PRO 6000": 500,
    "A6000": 155,
    "A40": 150,
    "L4": 121,
    "A10": 125,
    "T4": 65,
    "V100": 112,
    "5090": 210,
    "5080": 113,
    "5070 Ti": 88,
    "5070": 62,
    "5060": 48,
    "4090": 165,
    "4080": 98,
    "4070 Ti": 80,
    "4070": 58,
    "4060": 30,
    "3090": 71,
    "3080": 60,
    "3070": 41,
    "3060": 26,
}


def data_sheet_rate(gpu: str) -> float:
    return next((rate for part, rate in DATA_SHEETS.items() if part in gpu), 0)  # 0 for an unknown GPU


def count_block_tokens(config: RunConfig, block: BlockStats, size: tuple[int, int]) -> int:
    """Return the tokens of an image of `size` (width, height in pixels) in a block, plus the text's if it
    reads both.
    """
    image_tokens = (size[0] // 8 // block.downsampling) * (size[1] // 8 // block.downsampling)
    if block.is_convolution or not (text_tokens := families.facts_of(config.family).text_tokens):
        return image_tokens
    return image_tokens + (config.model.text_tokens or text_tokens)


def forward_operations(config: RunConfig, model: ModelStats, size: tuple[int, int]) -> float:
    """Return the operations of one image's forward pass; a product of n x k and k x m has 2 n k m."""
    forward = 0.0
    for block in model.blocks:
        count = count_block_tokens(config, block, size)
        # Two products, of queries with keys and of their weights with values.
        attention = 4 * count**2 * block.width if not block.is_convolution else 0
        forward += 2 * block.parameters * count * block.cost.used + attention
    return forward


def operations_of_image(config: RunConfig, model: ModelStats, size: tuple[int, int]) -> float:
    """Return the operations of one image in a step: its forward and backward passes."""
    memory = config.memory  # what the backward pass recomputes, as a share of a forward pass
    recomputed = 0.75 if memory.checkpointing and memory.checkpoint_keep_attention else float(memory.checkpointing)
    if config.compile.keeps_by_budget:  # half of the rest, as what takes longest is kept first
        recomputed = (1 - config.compile.compile_activation_budget) / 2
    # Besides the forward pass: gradients of inputs, and without adapters those of all weights.
    passes = (2 if config.adapters else 3) + recomputed
    # Preserving another prompt takes the same again, and a forward pass of the base model.
    passes = 2 * passes + 1 if config.preservation else passes
    return forward_operations(config, model, size) * passes
