"""Names of the layers that a LoRA changes in transformers of two streams and then one."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from library.config.problems import ConfigError
from library.families.shared import tensor_names
from library.families.shared.double_stream_keys import SWAPPED, DoubleStreamKeys, joined
from library.families.shared.lora_names import LoraNames, Shapes, matrices

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS = ("double_blocks.", "single_blocks.")
DIFFUSERS = ("transformer_blocks.", "single_transformer_blocks.")


class DoubleStreamLoraNames(LoraNames):
    """A layer of BFL's tree is made of one or several of diffusers'."""

    title: ClassVar[str]  # what people call the model
    trees: ClassVar[tuple[str, ...]] = (*BLOCKS, *DIFFUSERS)
    elsewhere: ClassVar[str] = r"^lora_unet_(single_)?transformer_blocks_"

    layouts: ClassVar[DoubleStreamKeys]  # its two trees
    # Diffusers keys -> {BFL key: the diffusers keys that it is made of}. KeyError names a missing one.
    sources: ClassVar[Callable[[Shapes], Mapping[str, tuple[str, ...]]]]

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A diffusers path -> (BFL path, which of its pieces, of how many). A BFL path is the one piece of itself."""
        found = self.layouts.canonical(path)
        if found is None:
            raise ConfigError("{path} is no layer of {title} that can carry a LoRA", path=path, title=self.title)
        return found

    def pieces(self, path: str) -> tuple[str, ...]:
        """A BFL path -> the diffusers modules that it is made of, in the order of its rows."""
        return self.layouts.pieces(path)

    def has_swapped_halves(self, path: str) -> bool:
        """The last modulation has."""
        return path == SWAPPED

    def tensors_of(self, path: str, shapes: Shapes) -> dict[str, tuple[str, ...]]:
        """A file in the diffusers layout has the rows of fused layers apart."""
        if not self.layouts.is_diffusers(shapes):
            return LoraNames.tensors_of(self, path, shapes)
        try:
            return dict(type(self).sources(shapes))
        except KeyError as e:
            raise ConfigError("{path} is not a complete {title} transformer, {missing} is missing",
                path=path, title=self.title, missing=e.args[0]) from e  # fmt: skip

    def joined(self, name: str, rows: "list[Tensor]") -> "Tensor":
        """The diffusers tensors of one BFL name -> its tensor."""
        return joined(name, rows)

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Attention, MLP and modulation of all blocks."""
        for path in matrices(shapes, tensor_names.prefix_of(shapes)):
            if path.startswith(BLOCKS):
                yield "denoiser", path
