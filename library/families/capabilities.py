"""Protocols of optional capabilities of a `Family`, checked with isinstance. Needs no torch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from library.families.base import BlockChain, ModelComponents

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor, nn

    from library.families.shared.tokenizers import Tokenizers


# Why: docs/decisions/2026-11-27-protocols-with-several-implementers.md
@runtime_checkable
class TakesControls(Protocol):
    """A family whose denoiser is conditioned on images besides text (`RunConfig.control_images`)."""

    def control_latents(self, components: ModelComponents, pixels: "Tensor") -> "Tensor":
        """Pixels [B, 3, H, W] in [-1, 1] of control images -> latents [B, C, h, w], float32 and deterministic."""


@runtime_checkable
class HasControlledLayers(Protocol):
    """A family for whose denoiser a ControlNet-LLLite can be trained."""

    def controlled_layers(self, denoiser: "nn.Module") -> Iterator[tuple[str, int]]:
        """Yield the paths of the linear layers that LLLite modules are attached to, each with log2 of the downsampling
        of the latents there.
        """

    def control_name(self, path: str) -> str:
        """Return the name in files of the LLLite module on such a layer."""


@runtime_checkable
class ReadsPictures(Protocol):
    """A family whose text encoder reads reference images together with the caption, at least for some of its models."""

    @property
    def picture_template(self) -> str:
        """The name of the template that inserts them, which caches store; "" if this model reads none."""

    def text_with_pictures(
        self, components: ModelComponents, captions: Sequence[str], pictures: "Sequence[Sequence[Image.Image]]"
    ) -> "dict[str, Tensor]":
        """Encode captions like `Family.text`, each with its reference images, possibly none."""

    def picture_tokens(self, components: ModelComponents, sizes: Sequence[tuple[int, int]]) -> int:
        """Return how many tokens images of these (width, height) add to `Family.train_text_length`."""


@runtime_checkable
class WritesFolders(Protocol):
    """A family that supports save_model_as = diffusers or diffusers_safetensors."""

    def write_folder(
        self, components: ModelComponents, place: Path, put: "Callable[[Path, Mapping[str, Tensor]], None]"
    ) -> None:
        """Write the whole model as a diffusers folder; `put(path, tensors)` writes a file of weights."""


@runtime_checkable
class HasBlockChain(Protocol):
    """A family whose samples may skip blocks (`sample_cache`)."""

    block_chain: BlockChain


# Kinds of device on which layers that read one input are computed as one product. On a CPU larger products would change
# the last bits of losses.
JOINED_ON = {"cuda"}


@dataclass(frozen=True)
class BlockModulation:
    """The layers of a block that read nothing but its conditioning vector (of the time, and of pooled text)."""

    layers: tuple[str, ...]  # their paths in the block; each reads the vector by `from_condition`
    argument: int  # the position of the vector [B, C] among the block's arguments


@runtime_checkable
class HasModulation(Protocol):
    """A family whose blocks have large layers of their own that compute shifts, scales and gates."""

    modulation: Mapping[str, BlockModulation]  # by class of block; empty if a variant has none


@runtime_checkable
class HasImageTransformers(Protocol):
    """A family with modules that make images tokens for the blocks in them, and images again.

    Each has a GroupNorm `norm` in front of its blocks, which is compiled as well if all blocks are.
    """

    image_transformers: tuple[str, ...]  # their classes


@runtime_checkable
class HasFrozenParts(Protocol):
    """A family whose denoiser may have parameters that are never trained."""

    def is_frozen(self, path: str) -> bool:
        """Return whether a parameter of the denoiser is never trained."""


@runtime_checkable
class HasBlockRates(Protocol):
    """A family with learning rates by blocks (`block_lrs`)."""

    rate_names: tuple[str, ...]  # of the groups of `block_lrs`, in logs

    def learning_rate_block(self, path: str) -> int:
        """Return a parameter's index in `block_lrs`."""


@runtime_checkable
class ReadsLayers(Protocol):
    """A family that reads only some layers of a text encoder."""

    def is_read(self, part: str, path: str, layers: int) -> bool:
        """Return whether a parameter of a text encoder with so many layers affects its output; `path` is like
        `encoder.layers.0.mlp.fc1.weight`.
        """


def count_caption_tokens(tokenizer: Any, caption: str) -> int:
    return len(tokenizer(caption, add_special_tokens=False, truncation=False).input_ids)


@dataclass(frozen=True)
class CaptionLimit:
    """The limit of the text encoder with the largest one."""

    encoder: str  # short name of encoder and tokenizer
    tokens: int  # of the caption alone
    more: str = ""  # an option and value that raise the limit, "" if there is none
    count: Callable[[Any, str], int] = count_caption_tokens  # by tokenizer and caption


@runtime_checkable
class LimitsCaptions(Protocol):
    """A family that truncates long captions."""

    @property
    def caption_limit(self) -> CaptionLimit:
        """The limit with the options of this run."""

    def tokenizers_of_captions(self) -> "Tokenizers":
        """Return the tokenizers by encoder, without loading encoders. Raises ConfigError if one is unavailable."""
