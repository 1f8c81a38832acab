"""Whether `compile_cache_size_limit` allows the graphs that a data set needs, known before the model is read."""

from collections.abc import Iterator

import torch

from library.check import meta_model
from library.config.problems import Message, Problem
from library.config.run_config import RunConfig
from library.data.images import ImageSet
from library.data.loading import Batches
from library.memory.compile_targets import graphs_per_block


def problems(config: RunConfig, images: ImageSet | None, device: torch.device) -> Iterator[Problem]:
    """Beyond the limit blocks run eagerly; with compile_fullgraph PyTorch stops there instead.

    The blocks are those of the model in the config's files, built without memory, which takes seconds: only where the
    limit is below the number of sizes, which no block needs more graphs than.
    """
    options = config.compile
    limit = options.compile_cache_size_limit
    if not (limit and options.compile and images and images.items and meta_model.is_here(config)):
        return
    sizes = Batches(images, config, 0).kinds()
    if limit >= len(sizes):
        return
    family, components = meta_model.empty_components(config, encoders=False)
    needed = graphs_per_block(components.denoiser, family, config, device, sizes)
    if limit < needed:
        other = Message(", or compile_dynamic = auto") if options.dynamic is False else ""
        yield Problem(
            "compile_cache_size_limit",
            "= {limit}: blocks need {needed} graphs for the sizes of this data set, and run eagerly beyond the limit; "
            "use {needed} or more, 0 for as many as it takes{other}",
            limit=limit,
            needed=needed,
            other=other,
            fix={"compile_cache_size_limit": 0},
        )
