"""The input of a training step: the samples of several images, stacked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from library.data.caches import LATENT

if TYPE_CHECKING:
    from library.data.images import Image


@dataclass(slots=True)
class Batch:
    """One batch of a step. All images have one size; it has latents or pixels, not both."""

    captions: list[str]
    sizes: Tensor  # float32 [B,6]: original height, width; crop top, left; target height, width
    weights: Tensor  # float32 [B]
    paths: list[str]
    latents: Tensor | None = None  # float32 [B,C,h,w], in the convention of the family's cache
    pixels: Tensor | None = None  # float32 [B,3,H,W] in -1..1
    text: dict[str, Tensor] | None = None  # by the names in the family's cache; None unless captions are cached
    mask: Tensor | None = None  # float32 [B,1,h,w]; the loss is multiplied by it
    # Control and reference images, as latents or pixels like the images: the first of each image, the second, ...
    controls: tuple[Tensor, ...] = ()
    is_guided: bool = False  # whether `controls` is a control image, which is always pixels
    paint: Tensor | None = None  # float32 [B,1,H,W], 1 in the region to inpaint
    keep_base: Tensor | None = None  # bool [B]: diff_output_preservation, the target is the base model's prediction
    preserved_captions: list[str] | None = None  # the prompts for which the base model's predictions are kept
    preserved_text: dict[str, Tensor] | None = None  # like `text`, of these prompts
    text_length: int | None = None  # caption tokens that a step uses; None: all
    full: int = 0  # size of a full batch of this data set; the last batch of a bucket may be smaller

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the latents."""
        if self.latents is not None:
            return self.latents.shape[-2], self.latents.shape[-1]
        return int(self.sizes[0, 4]) // LATENT, int(self.sizes[0, 5]) // LATENT

    @property
    def bucket(self) -> str:
        """Width and height of the images in pixels, such as "1024x768"."""
        # From shapes alone, as reading values would wait for the GPU.
        scale = 1 if self.latents is None else LATENT
        main = self.pixels if self.latents is None else self.latents
        references = () if self.paint is not None or self.is_guided else self.controls
        tensors = (main, *references)
        return "+".join(
            f"{tensor.shape[-1] * scale}x{tensor.shape[-2] * scale}" for tensor in tensors if tensor is not None
        )

    def to(self, device: torch.device | str) -> "Batch":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))  # asynchronous only from pinned memory

    def pinned(self) -> "Batch":
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, Tensor)}
        for field_name in ("text", "preserved_text"):
            if (text := getattr(self, field_name)) is not None:
                moved[field_name] = {name: change(value) for name, value in text.items()}
        return replace(self, **moved, controls=tuple(map(change, self.controls)))


@dataclass(frozen=True, slots=True)
class PreservedPrompt:
    """The prompt of an image for which the base model's prediction is kept."""

    caption: str
    text: dict[str, np.ndarray] | None  # its outputs of text encoders, if they are cached


@dataclass(slots=True)
class BatchSample:
    """The tensors of one image of a batch."""

    caption: str
    size: list[int]
    weight: float
    latents: Tensor | None
    pixels: Tensor | None
    text: dict[str, np.ndarray] | None
    mask: Tensor | None  # [H,W], as large as the pixels
    controls: list[Tensor]  # control and reference images as latents or pixels
    paint: Tensor | None  # [H,W], 1 in the region to inpaint
    preserved: PreservedPrompt | None = None


def batch_of(samples: Sequence[BatchSample], images: Sequence["Image"]) -> Batch:
    """Stack samples, each of one image, into a batch."""
    batch = Batch(
        captions=[sample.caption for sample in samples],
        sizes=torch.tensor([sample.size for sample in samples], dtype=torch.float32),
        weights=torch.tensor([sample.weight for sample in samples], dtype=torch.float32),
        paths=[image.path for image in images],
        latents=_stacked([sample.latents for sample in samples]),
        pixels=_stacked([sample.pixels for sample in samples]),
        text=padded([sample.text for sample in samples if sample.text is not None]),
    )
    batch.mask = _masks([sample.mask for sample in samples], batch.shape)
    batch.controls = tuple(torch.stack(row) for row in zip(*(sample.controls for sample in samples), strict=True))
    if (paint := _stacked([sample.paint for sample in samples])) is not None:
        batch.paint = paint[:, None]
    if preserved := [sample.preserved for sample in samples if sample.preserved]:
        batch.preserved_captions = [prompt.caption for prompt in preserved]
        batch.preserved_text = padded([prompt.text for prompt in preserved if prompt.text is not None])
    preserves_base = [image.subset.preserves_base for image in images]
    batch.keep_base = torch.tensor(preserves_base) if any(preserves_base) else None
    return batch


def _stacked(tensors: list[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in tensors if tensor is not None]
    return torch.stack(present) if present else None


def padded(texts: list[dict[str, np.ndarray]]) -> dict[str, Tensor] | None:
    """Stack the outputs of text encoders, padding shorter ones with zeros."""
    if not texts:
        return None
    return {name: torch.from_numpy(_padded_rows([text[name] for text in texts])) for name in texts[0]}


def _padded_rows(arrays: list[np.ndarray]) -> np.ndarray:
    """[L, ...] each -> [B, longest L, ...], with zeros behind shorter ones; scalars -> [B, 1]."""
    shape = arrays[0].shape or (1,)
    if len({array.shape for array in arrays}) == 1:  # one call, as calls for many small arrays take longer than copies
        return np.concatenate(arrays, None).reshape(len(arrays), *shape)
    rows = np.zeros((len(arrays), max(map(len, arrays)), *shape[1:]), arrays[0].dtype)
    for row, array in zip(rows, arrays, strict=True):
        row[: len(array)] = array
    return rows


def _masks(masks: list[Tensor | None], shape: tuple[int, int]) -> Tensor | None:
    """Resize masks to the latents' size; an image without a mask gets ones."""
    if all(mask is None for mask in masks):
        return None
    full = torch.ones(shape)
    small = [
        full if mask is None else functional.interpolate(mask[None, None], shape, mode="area")[0, 0] for mask in masks
    ]
    return torch.stack(small)[:, None]
