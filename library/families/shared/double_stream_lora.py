"""LoRA layer names of transformers with double-stream and single-stream blocks."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from library.config.problems import ConfigError
from library.families.shared import tensor_names
from library.families.shared.double_stream_keys import SWAPPED, DoubleStreamKeys, join_tensors
from library.families.shared.lora_names import LoraNames, Shapes, matrices

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_PREFIXES = ("double_blocks.", "single_blocks.")
DIFFUSERS = ("transformer_blocks.", "single_transformer_blocks.")


class DoubleStreamLoraNames(LoraNames):
    """A layer of BFL's tree is one or several layers of diffusers' tree."""

    title: ClassVar[str]  # of the model
    trees: ClassVar[tuple[str, ...]] = (*BLOCK_PREFIXES, *DIFFUSERS)
    elsewhere: ClassVar[str] = r"^lora_unet_(single_)?transformer_blocks_"

    layouts: ClassVar[DoubleStreamKeys]  # the two trees of names
    # Diffusers keys -> {BFL key: its diffusers keys}. KeyError names a missing one.
    sources: ClassVar[Callable[[Shapes], Mapping[str, tuple[str, ...]]]]

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A diffusers path -> (BFL path, index of the slice, number of slices). A BFL path is its own single slice."""
        location = self.layouts.canonical(path)
        if location is None:
            raise ConfigError("{path} is not a layer of {title} that can carry a LoRA", path=path, title=self.title)
        return location

    def pieces(self, path: str) -> tuple[str, ...]:
        return self.layouts.pieces(path)

    def has_swapped_halves(self, path: str) -> bool:
        return path == SWAPPED

    def tensors_of(self, path: str, shapes: Shapes) -> dict[str, tuple[str, ...]]:
        """Return each tensor's parts in the file: several for fused layers in the diffusers layout."""
        if not self.layouts.is_diffusers(shapes):
            return LoraNames.tensors_of(self, path, shapes)
        try:
            return dict(type(self).sources(shapes))
        except KeyError as e:
            raise ConfigError(
                "{path} is not a complete {title} transformer, {missing} is missing",
                path=path,
                title=self.title,
                missing=e.args[0],
            ) from e

    def joined(self, name: str, rows: "list[Tensor]") -> "Tensor":
        return join_tensors(name, rows)

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Yield attention, MLP and modulation of all blocks."""
        for path in matrices(shapes, tensor_names.denoiser_prefix(shapes)):
            if path.startswith(BLOCK_PREFIXES):
                yield "denoiser", path
