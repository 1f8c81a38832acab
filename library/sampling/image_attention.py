"""The attention kernel of generated images (`sample_attention`); that of a training around them stays as it is."""

import contextlib
import functools
import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from library.compiler.subclass import wanted_type
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.sections.sampling import SAGE
from library.families.shared.attention import Attention, replaced_for_images
from library.memory import attention

logger = logging.getLogger(__name__)

NOT_USED = (
    "sample_attention = sage had no effect: SageAttention computes neither masked text, nor float32, nor heads of over "
    "%d channels"
)
SAGE_CALLS = [0]  # of this process
LARGEST_SAGE_HEAD = 128  # channels of a head; SageAttention pads smaller ones


@contextlib.contextmanager
def image_attention(config: RunConfig, device: torch.device, in_training: bool = False) -> Iterator[None]:
    """Use the kernel of `sample_attention` within this context.

    If this machine lacks it, a training's samples use the training's kernel, with a warning; else it raises
    ConfigError.
    """
    kernel = config.sample.sample_attention
    if kernel != "auto":
        kernel = _prefer(kernel, config, device, in_training)
    if kernel == "auto":
        yield
        return
    if kernel == SAGE:
        with replaced_for_images(sage()):
            yield
        if not SAGE_CALLS[0]:  # ever: replayed passes call nothing
            logger.warning(NOT_USED, LARGEST_SAGE_HEAD)
        return
    try:
        yield
    finally:
        attention.prefer(device, config.memory.attention_kernel)


def _prefer(kernel: str, config: RunConfig, device: torch.device, in_training: bool) -> str:
    """Put the kernel first and return it, or "auto" if it does not work and the training continues without it."""
    try:
        if kernel == SAGE:
            _try_sage(device)
        else:
            attention.prefer(device, kernel, option="sample_attention")
    except ConfigError as error:
        attention.prefer(device, config.memory.attention_kernel)
        if not in_training:
            raise
        logger.warning("Samples use the kernel of the training: %s", error)
        return "auto"
    return kernel


def _try_sage(device: torch.device) -> None:
    """Import SageAttention and call it once on a GPU. Raises ConfigError if that fails."""
    calls = SAGE_CALLS[0]
    try:
        attend = sage()
        if device.type == "cuda":
            attend(*torch.zeros(3, 1, 1, 128, LARGEST_SAGE_HEAD, dtype=torch.bfloat16, device=device))
    except Exception as error:  # built for another GPU or PyTorch, or without a compiler, it may raise anything
        raise ConfigError(
            Problem("sample_attention", ": {kernel} cannot be used here ({error}); use auto", kernel=SAGE, error=error)
        ) from error
    SAGE_CALLS[0] = calls


@functools.cache
def sage() -> Attention:
    """Return SageAttention as one operation of PyTorch, which torch.compile does not look into."""
    from sageattention import sageattn

    @torch.library.custom_op("kohya::sage_attention", mutates_args=())
    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        SAGE_CALLS[0] += 1
        return sageattn(q, k, v, tensor_layout="HND", is_causal=False)

    compute.register_fake(lambda q, k, v: torch.empty_like(q))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype = wanted_type(q)
        if dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] > LARGEST_SAGE_HEAD:
            return F.scaled_dot_product_attention(q, k, v)  # SageAttention computes neither
        return compute(*(x.to(dtype).contiguous() for x in (q, k, v)))

    return attend
