"""Sample images in batches: which prompts are denoised together, and how many fit into memory."""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from PIL import Image

from library.compiler import gpu_memory
from library.config.sections.sampling import AUTO, BatchSize
from library.families.base import SampleRequest
from library.families.shared.sampler import Sampler
from library.families.shared.vae_memory import is_out_of_memory

LARGEST_AUTO_BATCH = 8  # of `auto`: larger ones save little time
USED_SHARE = 0.8  # of the free memory: not all of it can be allocated in the sizes that are needed

Numbered = tuple[int, SampleRequest]
GenerateBatch = Callable[[Sequence[SampleRequest]], list[Image.Image]]


class BatchSizer:
    """How many images are denoised at once: as many as the option says, or as fit into the memory of a GPU.

    `auto` measures the memory of the first image of each kind, alone.
    """

    def __init__(self, size: BatchSize, device: torch.device) -> None:
        self._size, self._device = size, device
        self._is_measured = size == AUTO and device.type == "cuda"  # a processor gains nothing from batches
        self._limits: dict[Hashable, int] = {}  # by `Sampler.batch_key`, after batches that did not fit
        self._bytes: dict[Hashable, int] = {}  # that an image takes while it is generated

    def limit(self, key: Hashable) -> int:
        """Return how many images of this kind the next batch may have."""
        if key is None:
            return 1
        if self._size != AUTO:
            return self._limits.get(key, self._size)
        if key not in self._bytes:
            return 1
        room = gpu_memory.memory_for_tensors(self._device) * USED_SHARE  # within gpu_memory_limit
        return max(1, min(int(room / self._bytes[key]), self._limits.get(key, LARGEST_AUTO_BATCH)))

    def generate(self, key: Hashable, batch: Sequence[SampleRequest], make: GenerateBatch) -> list[Image.Image]:
        """Return the images of `make`, and remember the memory that the first one of a kind took."""
        if not self._is_measured or key in self._bytes or len(batch) > 1:
            return make(batch)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        images = make(batch)
        self._bytes[key] = max(torch.cuda.max_memory_allocated(self._device) - before, 1)
        return images

    def halve(self, key: Hashable, number: int) -> None:
        self._limits[key] = max(number // 2, 1)


def in_batches(
    sampler: Sampler,
    requests: Sequence[Numbered],
    sizer: BatchSizer,
    make: GenerateBatch,
    passing: tuple[type[Exception], ...] = (),
) -> Iterator[tuple[int, Image.Image | Exception]]:
    """Yield the image of each numbered request, or the error with which it fails alone.

    `make` generates a batch. A batch that fails is repeated in halves, so that no request costs another its image;
    errors of the types `passing` are raised.
    """
    for key, group in _by_key(sampler, requests):
        while group:
            size = min(sizer.limit(key), len(group))
            batch, group = group[:size], group[size:]
            yield from _generate(key, batch, sizer, make, passing)


def _generate(
    key: Hashable,
    batch: Sequence[Numbered],
    sizer: BatchSizer,
    make: GenerateBatch,
    passing: tuple[type[Exception], ...],
) -> Iterator[tuple[int, Image.Image | Exception]]:
    numbers = [number for number, _ in batch]
    try:
        images = sizer.generate(key, [request for _, request in batch], make)
    except passing:
        raise
    except Exception as error:
        if len(batch) == 1:
            yield numbers[0], error
            return
        if is_out_of_memory(error):
            sizer.halve(key, len(batch))
        error.__traceback__ = None  # it keeps the tensors of the batch alive
    else:
        yield from zip(numbers, images, strict=True)
        return
    gc.collect()
    half = -(-len(batch) // 2)
    while batch:
        size = min(half, sizer.limit(key))  # which a part without room lowers further
        part, batch = batch[:size], batch[size:]
        yield from _generate(key, part, sizer, make, passing)


def _by_key(sampler: Sampler, requests: Sequence[Numbered]) -> list[tuple[Hashable, Sequence[Numbered]]]:
    """Return the requests by what they have in common; those that are denoised alone stay alone."""
    groups: dict[Hashable, list[Numbered]] = {}
    for number, request in requests:
        key = sampler.batch_key(request)
        groups.setdefault((number,) if key is None else key, []).append((number, request))
    return [(sampler.batch_key(group[0][1]), group) for group in groups.values()]
