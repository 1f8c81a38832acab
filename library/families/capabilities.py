"""What some families can do and others cannot: protocols beside `Family`, asked for with isinstance. Needs no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from library.families.base import ModelComponents

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn


@runtime_checkable
class TakesControls(Protocol):
    """A family whose model is shown pictures besides noise and words (`RunConfig.control_images`)."""

    def control_latents(self, components: ModelComponents, pixels: "Tensor") -> "Tensor":
        """Pixels [B, 3, H, W] in [-1, 1] of such pictures -> latents [B, C, h, w], float32 and deterministic."""
        ...


@runtime_checkable
class HasControlledLayers(Protocol):
    """A family whose denoiser can be taught to follow a control image (ControlNet-LLLite)."""

    def controlled_layers(self, denoiser: "nn.Module") -> Iterator[tuple[str, int]]:
        """Paths of the linear layers that get small networks, and how often the latents were halved there."""
        ...

    def control_name(self, path: str) -> str:
        """What such a layer is called in files."""
        ...


@runtime_checkable
class ReadsPictures(Protocol):
    """A family whose text encoder may be shown the reference images together with the words, as its model asks."""

    @property
    def picture_template(self) -> str:
        """How they are shown to it, in a word that caches remember; "" where it is shown none."""
        ...

    def text_with_pictures(
        self, components: ModelComponents, captions: Sequence[str], pictures: "Sequence[Sequence[Image.Image]]"
    ) -> "dict[str, Tensor]":
        """`Family.text` of captions with the pictures of each, which may be none."""
        ...

    def picture_tokens(self, components: ModelComponents, sizes: Sequence[tuple[int, int]]) -> int:
        """How many tokens more than `Family.train_text_length` says pictures of these widths and heights make it."""
        ...


@runtime_checkable
class WritesFolders(Protocol):
    """A family where save_model_as may be diffusers or diffusers_safetensors."""

    def write_folder(
        self, components: ModelComponents, place: Path, put: "Callable[[Path, Mapping[str, Tensor]], None]"
    ) -> None:
        """The whole model as a diffusers folder; `put(path, tensors)` writes a file of weights."""
        ...


@runtime_checkable
class HasFrozenParts(Protocol):
    """A family whose denoiser may have parts that no training changes."""

    def is_frozen(self, path: str) -> bool:
        """Whether a parameter of the denoiser never learns."""
        ...


@runtime_checkable
class HasBlockRates(Protocol):
    """A family with learning rates by blocks (`block_lrs`)."""

    rate_names: tuple[str, ...]  # of the groups of `block_lrs`, in logs

    def learning_rate_block(self, path: str) -> int:
        """Which of the `block_lrs` a parameter of the denoiser has."""
        ...
