"""LoRA layer names of a family: in files of kohya, of diffusers and PEFT, and in ComfyUI's own tree.

A layer is (part, path): the part of the model, and the module path as in the single file, or in transformers for text
encoders.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from library.config.problems import ConfigError
from library.families.shared.tensor_names import denoiser_prefix, without_prefix

if TYPE_CHECKING:
    from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
CLIP_LAYERS = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "out")) + ("mlp.fc1", "mlp.fc2")


@dataclass(frozen=True)
class WeightSlice:
    """The location of a module's weight: a tensor, or one of `parts` equal row blocks of it."""

    key: str
    part: int = 0
    parts: int = 1

    def of(self, tensor: "Tensor") -> "Tensor":
        return tensor.chunk(self.parts)[self.part] if self.parts > 1 else tensor


@dataclass(frozen=True)
class SharedForm:
    """The form of a plain LoRA file that both ComfyUI and diffusers load completely."""

    names: str = "comfy"  # the format whose names these are
    is_peft: bool = True  # lora_A and lora_B, not lora_down and lora_up
    has_alphas: bool = True  # if not, the strength is multiplied into lora_B
    has_lokr: bool = False  # whether diffusers loads LoKr under these names as well


class LoraNames:
    """The names of one family. The defaults are for a model with one tree of names in all formats."""

    # Format -> part -> prefix of its names.
    prefixes: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "kohya": {"denoiser": "lora_unet_"},
        "diffusers": {"denoiser": "transformer."},
        "comfy": {"denoiser": "diffusion_model."},
    }
    other_prefixes: ClassVar[Mapping[str, str]] = {  # of other files in use -> part
        "lora_transformer_": "denoiser",
        "lycoris_": "denoiser",
        "base_model.model.": "denoiser",
    }
    trees: ClassVar[tuple[str, ...]]  # prefixes of the denoiser's paths in any format, which identify the family
    marks: ClassVar[str] = ""  # a pattern of paths that no other family with the same tree has; "" if none shares it
    absent: ClassVar[str] = ""  # a pattern of paths that it has not, but others with some of its marks
    # Suffixes of paths -> ratio of outputs to inputs, in which families with the same tree differ.
    ratios: ClassVar[Mapping[str, int]] = {}
    needs_evidence: ClassVar[bool] = False  # files that tell nothing belong to another family with the same tree
    cross_attention: ClassVar[int] = 0  # channels of text in cross-attention; 0 if its model has none by that name
    encoder_names: ClassVar[tuple[str, ...]] = ()  # prefixes of names that only its text encoders have
    version_word: ClassVar[str]  # contained in ss_base_model_version and modelspec.architecture
    other_version: ClassVar[str] = ""  # a word there that tells another family, whose version holds the word above
    words: ClassVar[tuple[str, ...]] = ()  # parts of paths that contain underscores; all other underscores replace dots
    adapted: ClassVar[str]  # a pattern of paths in our tree: the layers that a LoRA adapts
    mergeable: ClassVar[tuple[str, ...]]  # descriptions by `recognise` of files that a LoRA can be merged into
    saved: ClassVar[str] = "kohya"  # the format of written files, which ComfyUI and diffusers load completely
    shared: ClassVar[SharedForm] = SharedForm()
    elsewhere: ClassVar[str] = ""  # a pattern of kohya's names for layers of another tree of the model

    @property
    def part_of(self) -> dict[str, str]:
        parts_by_prefix = {prefix: part for table in self.prefixes.values() for part, prefix in table.items()}
        return parts_by_prefix | dict(self.other_prefixes)

    def canonical(self, path: str) -> tuple[str, int, int]:
        """A denoiser path in any format -> (path in the single file, index of the row slice, number of slices)."""
        return path, 0, 1

    def apart(self, path: str) -> tuple[str, ...]:
        """A path of `canonical` -> the equally large layers that it is in our model, in the order of its rows."""
        return (path,)

    def file_name(self, part: str, path: str, kohya: str) -> str:
        return kohya if self.saved == "kohya" else f"{self.prefixes[self.saved][part]}{path}"

    def shared_prefix(self, part: str) -> str:
        return self.prefixes[self.shared.names][part]

    def pieces(self, path: str) -> tuple[str, ...]:
        """A path of the denoiser -> its diffusers modules, in the order of its rows; () without an equivalent."""
        return (path,)

    def is_large_conv(self, path: str) -> bool:
        return False

    def has_swapped_halves(self, path: str) -> bool:
        return False

    def tensors_of(self, path: str, shapes: Shapes) -> dict[str, tuple[str, ...]]:
        """Return {name in the single file's layout: its tensors in the file}. Raises ConfigError for a missing one."""
        return {name: (name,) for name in shapes}

    def joined(self, name: str, rows: "list[Tensor]") -> "Tensor":
        """Join the tensors of `tensors_of` for one name to the tensor in the single file's layout."""
        if len(rows) != 1:
            raise ConfigError(
                "{name} is made of {count} tensors, and this model has no such layers", name=name, count=len(rows)
            )
        return rows[0]

    def rows(self, names: Iterable[str]) -> Mapping[str, tuple[str, int, int]]:
        """Plain keys of a file -> {our key: key in the file, index of the row slice, number of slices}, where they
        differ.
        """
        return {}

    def slice_of(self, part: str, path: str, shapes: Shapes) -> WeightSlice | None:
        """Locate a weight in a file, which is the transformer alone, in either layout."""
        if part != "denoiser":
            return None
        plain, name = without_prefix(shapes), f"{path}.weight"
        key, piece, pieces = self.rows(plain).get(name, (name, 0, 1))
        return WeightSlice(plain.get(key) or f"{denoiser_prefix(shapes)}{key}", piece, pieces)

    def layers(self, shapes: Shapes, convolutions: bool) -> Iterator[tuple[str, str]]:
        """Yield the layers that a LoRA adapts; with `convolutions` also those of 3x3."""
        for path in matrices(shapes, denoiser_prefix(shapes)):
            for layer in self.apart(self.canonical(path)[0]):
                if re.match(self.adapted, layer):
                    yield "denoiser", layer


def matrices(shapes: Shapes, prefix: str) -> Iterable[str]:
    """Yield the paths under a prefix that have a matrix."""
    for name, shape in shapes.items():
        if len(shape) > 1 and name.startswith(prefix) and name.endswith(".weight"):
            yield name.removeprefix(prefix).removesuffix(".weight")
