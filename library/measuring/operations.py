"""How many floating point operations a training step has, by rules of thumb over what a model consists of."""

from library import families
from library.config.run_config import RunConfig
from library.measuring.model_stats import BlockStats, ModelStats


def tokens(config: RunConfig, block: BlockStats, size: tuple[int, int]) -> int:
    """Places of a picture of `size` (width, height in pixels) in a block, and the words beside them where it reads both
    in one stream."""
    places = (size[0] // 8 // block.downsampling) * (size[1] // 8 // block.downsampling)
    if block.is_convolution or not (words := families.facts(config.family).text_tokens):
        return places
    return places + (getattr(config.model, "text_tokens", None) or words)


def operations_of_image(config: RunConfig, model: ModelStats, size: tuple[int, int]) -> float:
    """Operations of the forward and backward pass of one image: a product of n x k and k x m has 2 n k m."""
    forward = 0.0
    for block in model.blocks:
        places = tokens(config, block, size)
        attention = 4 * places**2 * block.width if not block.is_convolution else 0
        forward += 2 * block.parameters * places * block.cost.used + attention
    memory = config.memory  # what is computed a second time in the backward pass, as a share of a forward pass
    again = 0.75 if memory.checkpointing and memory.checkpoint_keep_attention else float(memory.checkpointing)
    return forward * ((2 if config.adapters else 3) + again)
