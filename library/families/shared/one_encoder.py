"""Families of a transformer, one text encoder and a VAE, in separate files or in one folder."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError, Problem
from library.families.base import DeferredNetwork, ModelComponents, TextCache, WeightPlacement
from library.families.capabilities import CaptionLimit
from library.families.facts import Shapes
from library.families.shared import denoiser_file, language_model, part_files, tokenizers, weights
from library.families.shared.part_files import Entries, PartFiles
from library.families.shared.transformer_family import TransformerFamily

ENCODER = "text_encoder"


@dataclass(frozen=True)
class Checkpoint:
    """How to load a family's files: "denoiser", "text_encoder", which may be unused, and "vae"."""

    files: PartFiles
    # Config, path, shapes by the network's own keys -> further problems of a valid denoiser.
    find_denoiser_problems: Callable[[Any, Path, Shapes], Iterator[Problem]]
    widths: Callable[[Shapes], Mapping[str, tuple[str, int]]]  # see PartFiles.fitting
    plain_shapes: Callable[[Entries, str], Shapes]  # of a part, by the network's own keys
    # Path, dtype, whether to keep 8 bits, mapping -> a network without weights, and its reader.
    open_denoiser: Callable[..., tuple[nn.Module, Callable[[WeightPlacement | None], object]]]
    readers: Mapping[str, Callable[..., nn.Module]]  # readers of the other two: path, dtype, mapping
    tokenizer: str  # on the hub
    encode: Callable[[Any, Any, Sequence[str]], tuple[Tensor, ...]]  # encoder, tokenizer, captions -> states and mask
    # Tokenizer, captions -> the length of a batch of them; None if all captions have the same length.
    longest: Callable[[Any, Collection[str]], int] | None
    max_tokens: int = 512  # limit of tokens of a caption, including `template_tokens`
    template_tokens: int = 0  # of the template around the caption

    def __deepcopy__(self, memo: object) -> "Checkpoint":
        return self  # immutable, so copies of a family share it

    def problems(self, config: Any) -> Iterator[Problem]:
        """Yield problems of the parts, from their headers, each with its option and the fix."""
        find = functools.partial(self.find_denoiser_problems, config)
        yield from self.files.fitting(config, self.plain_shapes, find, self.widths)


def part_widths(
    reads_text: str, reads_latents: str, vae: str, layers: int = 1, latents: int = 4
) -> Callable[[Shapes], dict[str, tuple[str, int]]]:
    """Return `widths` of `PartFiles.fitting`, from the denoiser's tensors that read the text and a token of latents,
    and a tensor of the VAE. The text is that of several `layers`, and a token has several `latents`.
    """
    readers = {
        "text_encoder": (language_model.EMBEDDING, reads_text, layers),
        "vae": (vae, reads_latents, latents),
    }
    return lambda shapes: {
        part: (tensor, shapes.get(reader, (0, 0))[1] // number) for part, (tensor, reader, number) in readers.items()
    }


class OneEncoderFamily(TransformerFamily):
    """Captions may have any length: each batch is padded, with a mask."""

    name: str
    checkpoint: Checkpoint  # of the class, or of each family object if its models differ
    swapped_class: ClassVar[str]  # of the blocks that blocks_to_swap counts
    text_cache: TextCache  # its keys are those of the states and of their mask

    # ---- files

    def problems(self) -> Iterator[Problem]:
        """Yield problems of the model's files, from their headers."""
        problems, files = list(self.file_problems()), self.checkpoint.files
        if not problems and (path := files.present(self.config, "denoiser")):
            option = files.parts["denoiser"].option
            problems = list(denoiser_file.find_denoiser_problems(path, option, self.checkpoint.open_denoiser))
        yield from problems
        options = {files.parts[part].option for part in ("denoiser", ENCODER) if part in files.parts}
        if (
            len(options) < 2
            or not files.named(self.config, ENCODER)
            or any(problem.option in options for problem in problems)
        ):
            return  # the tokenizer is searched beside the networks, so they come first
        try:
            self.tokenizer_folders()
        except ConfigError as e:
            yield from (problem.replaced(topic="model") for problem in e.problems)

    def file_problems(self) -> Iterator[Problem]:
        return self.checkpoint.problems(self.config)

    def notes(self) -> Iterator[Problem]:
        return iter(())

    def tokenizer_folders(self) -> dict[str, tuple[Path, str]]:
        """Return the folder and the hub name of each tokenizer. Raises ConfigError if one is unavailable."""
        name = self.checkpoint.tokenizer
        read = ENCODER in self.checkpoint.files.parts
        return {ENCODER: (self.tokenizer_folder(name, "tokenizer"), name)} if read else {}

    def tokenizer_folder(self, name: str, subfolder: str) -> Path:
        """Return the folder of a tokenizer: beside a network, in diffusers' sub-folder for it, or downloaded."""
        files = (self.config.model.text_encoder, self.config.model.vae)
        return tokenizers.tokenizer_beside(name, subfolder, self.config, files)

    def stored_shapes(self) -> dict[str, Shapes]:
        """Return the shapes of the parts whose files are on this machine."""
        shapes: dict[str, Shapes] = {}
        for part in self.checkpoint.files.parts:
            with contextlib.suppress(ConfigError):
                if path := self.checkpoint.files.present(self.config, part):
                    shapes[part] = self.checkpoint.plain_shapes(part_files.read_entries(path), part)
        return shapes

    def load(self, dtype: torch.dtype, frozen: torch.dtype | None = None, deferring: bool = False) -> ModelComponents:
        """Load all three networks on the CPU, in the sizes of their files. Raises ConfigError.

        The transformer is in `dtype`, the other two in `frozen`, if given. With `deferring` those two stay in
        `deferred`, and their files are not opened. A float16 VAE becomes float32, as its values exceed float16.
        """
        config, mmap = self.config, not self.config.model.disable_mmap_load_safetensors
        paths = {part: self.checkpoint.files.located(config, part) for part in self.checkpoint.files.parts}
        keep_8_bits = config.adapters and config.precision.few_bits
        denoiser, fill = self.checkpoint.open_denoiser(paths["denoiser"], dtype, keep_8_bits, mmap)
        frozen = frozen or dtype
        deferred = {}
        for part, read in self.checkpoint.readers.items():
            kind = self.frozen_type(part, frozen)
            files = tuple(weights.files(paths[part]))
            reader = functools.partial(read, paths[part], kind, mmap)
            deferred[part] = DeferredNetwork(reader, files, f"{self.name} {part} {kind}")
        words = self.tokenizers_of_captions()
        source = {part: str(path) for part, path in paths.items()}
        components = ModelComponents(denoiser, None, {}, words, source, deferred, fill_denoiser=fill)
        return components if deferring else components.read_all()

    def frozen_type(self, part: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if part == "vae" and dtype == torch.float16 else dtype

    def adapter_name(self, part: str, path: str) -> str:
        return f"{'lora_unet' if part == 'denoiser' else 'lora_te'}_{path.replace('.', '_')}"

    def swap_plan(self, number: int) -> dict[str, int]:
        return {self.swapped_class: number}

    # ---- captions

    @property
    def caption_limit(self) -> CaptionLimit:
        return CaptionLimit(ENCODER, self.checkpoint.max_tokens - self.checkpoint.template_tokens)

    @property
    def text_lengths(self) -> Mapping[str, int]:
        return dict.fromkeys(self.text_cache.keys, self.checkpoint.max_tokens)

    def tokenizers_of_captions(self) -> tokenizers.Tokenizers:
        return tokenizers.Tokenizers(self.tokenizer_folders())

    def train_text_length(self, components: ModelComponents, captions: Collection[str]) -> int | None:
        longest = self.checkpoint.longest if self.config.cache.text else None
        return longest(components.tokenizers[ENCODER], captions) if longest else None

    def text(
        self, components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Captions -> states [B, L, C], zero after each caption, and a mask [B, L] with ones on it, by the cache's
        keys.
        """
        if ENCODER not in (tuple(components.encoders) if encoders is None else encoders):
            return {}
        arrays = self.checkpoint.encode(components.encoders[ENCODER], components.tokenizers[ENCODER], list(captions))
        return dict(zip(self.text_cache.keys, arrays, strict=True))
