"""Check before loading a model whether `compile_cache_size_limit` allows the graphs that a data set needs."""

from collections.abc import Iterator

import torch

from library.check import meta_model
from library.config.problems import Message, Problem
from library.config.run_config import RunConfig
from library.data.images import ImageSet
from library.data.loading import Batches
from library.memory.compile_targets import graphs_per_block


def find_graph_limit_problems(config: RunConfig, images: ImageSet | None, device: torch.device) -> Iterator[Problem]:
    """Yield the problem of a limit below the needed graphs: beyond it blocks run eagerly, or with compile_fullgraph
    PyTorch raises."""
    options = config.compile
    limit = options.compile_cache_size_limit
    if not (limit and options.compile and images and images.items and meta_model.has_model_files(config)):
        return
    sizes = Batches(images, config, 0).kinds()
    if limit >= len(sizes):  # no block needs more graphs than there are sizes
        return
    family, components = meta_model.empty_components(config, encoders=False)
    needed = graphs_per_block(components.denoiser, family, config, device, sizes)
    if limit < needed:
        other = Message(", or compile_dynamic = auto") if options.dynamic is False else ""
        yield Problem(
            "compile_cache_size_limit",
            "= {limit}: blocks need {needed} graphs for the image sizes of this data set, and run eagerly beyond "
            "the limit; use {needed} or more, or 0 for no limit{other}",
            limit=limit,
            needed=needed,
            other=other,
            fix={"compile_cache_size_limit": 0},
        )
