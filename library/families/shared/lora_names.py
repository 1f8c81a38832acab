"""Names of the layers that a family's LoRA changes: in kohya's files, in diffusers' and PEFT's, in ComfyUI's own tree.

A layer is (part, path): the part of the model, and the path in the tree of the single file, or of transformers for text
encoders.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from library.config.problems import ConfigError
from library.families.shared.tensor_names import prefix_of

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
CLIP_LAYERS = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")) + ("mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class WeightSlice:
    """Where a module's weight is: a tensor, or one of `parts` equal row blocks of it."""

    key: str
    part: int = 0
    parts: int = 1

    def of(self, tensor: "Tensor") -> "Tensor":
        """The module's own rows of the tensor."""
        return tensor.chunk(self.parts)[self.part] if self.parts > 1 else tensor


class LoraNames:
    """The names of one family. What is here suits a model whose file has one tree of names, also in diffusers."""

    # Format -> part -> what its names begin with.
    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_"},
        "diffusers": {"denoiser": "transformer."},
        "comfy": {"denoiser": "diffusion_model."},
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {  # of files that people have -> part
        "lora_transformer_": "denoiser",
        "lycoris_": "denoiser",
        "base_model.model.": "denoiser",
    }
    trees: ClassVar[tuple[str, ...]]  # beginnings of the denoiser's paths in any format, by which the family is told
    marks: ClassVar[str] = ""  # a pattern in paths that no family has which shares the tree; "" where none does
    # Endings of paths -> how many outputs such a layer has for each input, where families that share the tree differ.
    ratios: ClassVar[Mapping[str, int]] = {}
    encoder_names: ClassVar[tuple[str, ...]] = ()  # beginnings of names that only its text encoders have
    version_word: ClassVar[str]  # what ss_base_model_version and modelspec.architecture contain
    words: ClassVar[tuple[str, ...]] = ()  # parts of paths with underscores of their own; elsewhere each was a dot
    mergeable: ClassVar[tuple[str, ...]]  # what `recognise` calls the files that a LoRA can be merged into
    saved: ClassVar[str] = "kohya"  # the format of files that are written: one that ComfyUI and diffusers load whole
    elsewhere: ClassVar[str] = ""  # a pattern in kohya's names of layers that another tree of the model has

    @property
    def part_of(self) -> dict[str, str]:
        """What names begin with in any file -> the part."""
        known = {prefix: part for table in self.prefixes.values() for part, prefix in table.items()}
        return known | dict(self.other_prefixes)

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A path of the denoiser in any format -> (the single file's, which of its row pieces, of how many)."""
        return path, 0, 1

    def apart(self, path: str) -> tuple[str, ...]:
        """A path as `canonical` gives it -> the layers of equal size that it is here, in the order of its rows."""
        return (path,)

    def file_name(self, part: str, path: str, kohya: str) -> str:
        """What a layer is called in a file that is written; `kohya` is its name in kohya's format."""
        return kohya if self.saved == "kohya" else f"{self.prefixes[self.saved][part]}{path}"

    def pieces(self, path: str) -> tuple[str, ...]:
        """A path of the denoiser -> diffusers' modules that it is made of, in the order of its rows; () where it has no
        name there."""
        return (path,)

    def has_swapped_halves(self, path: str) -> bool:
        """Whether diffusers keeps the halves of a layer's rows the other way round."""
        return False

    def tensors_of(self, path: str, shapes: Shapes) -> dict[str, tuple[str, ...]]:
        """{name in the single file's layout: the tensors of the file that it is made of}. ConfigError names what is
        missing."""
        return {name: (name,) for name in shapes}

    def joined(self, name: str, rows: "list[Tensor]") -> "Tensor":
        """The tensors that one of the single file's is made of -> it."""
        if len(rows) != 1:
            raise ConfigError(
                "{name} is made of {count} tensors, and this model has no such layers", name=name, count=len(rows)
            )
        return rows[0]

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """Where a layer's weight is in a file with these shapes; None for parts that a file never holds."""
        return WeightSlice(f"{prefix_of(shapes)}{path}.weight") if part == "denoiser" else None

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """The layers that a LoRA adapts; with `convolutions` those of 3x3 as well."""
        for path in matrices(shapes, ""):
            if path.startswith(self.trees):
                yield "denoiser", path


def matrices(shapes: Shapes, prefix: str) -> Iterable[str]:
    """Paths behind a prefix that have a matrix."""
    for name, shape in shapes.items():
        if len(shape) > 1 and name.startswith(prefix) and name.endswith(".weight"):
            yield name.removeprefix(prefix).removesuffix(".weight")
