"""Qwen3-VL as a text encoder of several denoisers: its files, and the outputs of several of its layers for captions.

For text alone it equals a Qwen3 with another base of its rotary embedding, as all three axes of a position count alike;
the vision encoder is not read.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.families.shared import expected_tensors, language_model, weights
from library.families.shared.part_files import Part, complete
from library.families.shared.weights import assign

QWEN3_VL = "a Qwen3-VL text encoder"  # the description by `recognise`
VISION_MARK = "visual.deepstack_merger_list.0.norm.weight"  # a tensor that neither Qwen3 nor Qwen2.5-VL has
QWEN3_VL_THETA = 5e6


@dataclass(frozen=True)
class TappedText:
    """What a denoiser reads of a Qwen3-VL, and the chat that its captions are put into."""

    first: int  # the number of layers whose output is the first one to be read
    step: int  # between those numbers
    before: str  # of the chat, before a caption: its tokens are read, and their outputs dropped
    behind: str  # after a caption, also of one that is cut
    max_tokens: int  # of a caption with `behind`
    multiple: int  # a batch of captions is padded to a multiple of this many tokens

    def taps(self, layers: int) -> tuple[int, ...]:
        """Return the layers that are read of a whole encoder: the last of all is not."""
        return tuple(range(self.first, layers, self.step))

    def skipped(self, layers: int) -> int:
        """Return how many of the last layers are not read."""
        return layers - max(self.taps(layers), default=layers)

    def token_ids(self, tokenizer: Any, captions: Collection[str]) -> tuple[list[list[int]], int]:
        """Return token ids of each caption in its chat, and the number of tokens before a caption."""
        behind, dropped = tokenizer(self.behind).input_ids, len(tokenizer(self.before).input_ids)
        if not captions:
            return [], dropped
        limit = dropped + self.max_tokens - len(behind)
        texts = [f"{self.before}{caption}" for caption in captions]
        ids = tokenizer(texts, max_length=limit, truncation=True).input_ids
        return [[*tokens, *behind] for tokens in ids], dropped

    def longest(self, tokenizer: Any, captions: Collection[str]) -> int:
        """Return the length of a batch of these captions."""
        ids, dropped = self.token_ids(tokenizer, captions)
        return language_model.padded_length(ids, self.multiple, dropped)

    def encode(self, model: Any, tokenizer: Any, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Captions -> the outputs of the tapped layers [B, L, T, C], zero after each caption, and a mask [B, L] of the
        tokens of each caption and of what is behind it. L is a multiple of `multiple`.
        """
        # The model lacks the layers behind the last one that is read, whose number is therefore that of its layers.
        ids, dropped = self.token_ids(tokenizer, captions)
        return language_model.encode_layers(model, ids, self.multiple, dropped, self.taps(len(model.layers) + 1))


def part(what: str) -> Part:
    return Part("text_encoder", what, ("text_encoder", "qwen3vl_4b*.safetensors"), (VISION_MARK,), qwen3_vl_tensors)


def plain_qwen3_vl_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a file -> {key of the language model: key in the file}, and the tensor that tells it from a Qwen3."""
    names = list(names)
    marks = [name for name in names if name.endswith(VISION_MARK)]
    return language_model.plain_language_names(names) | ({VISION_MARK: marks[0]} if marks else {})


def qwen3_vl_tensors(names: Collection[str]) -> list[str]:
    """Return the tensors that are read of a file, and the mark of its vision encoder."""
    return [*expected_tensors.language_model([name for name in names if name != VISION_MARK]), VISION_MARK]


def empty_qwen3_vl(skipped: int = 0, **settings: Any) -> nn.Module:
    """Build a language model on the meta device, without its last `skipped` layers."""
    return language_model.empty_language_model(
        "Qwen3",
        skipped,
        theta=QWEN3_VL_THETA,
        head_dim=language_model.HEAD_WIDTH,
        max_position_embeddings=262144,
        **settings,
    )


def load_qwen3_vl(skipped: Callable[[int], int], path: Path, dtype: torch.dtype, mmap: bool = True) -> nn.Module:
    """Read the language model, from a file or a folder; `skipped` returns how many of its layers to leave out at the
    end. Raises ConfigError.
    """
    file = weights.open_weights(path, mmap)
    with complete(path, QWEN3_VL):
        named, stored = language_model.plain_language_names(file), file.shapes()
        settings = language_model.settings_of({plain: stored[name] for plain, name in named.items()})
        model = empty_qwen3_vl(skipped(settings["num_hidden_layers"]), **settings)
        return assign(model, {plain: weights.cast_floating(file[named[plain]], dtype) for plain in model.state_dict()})


def reader(text: TappedText) -> Callable[..., nn.Module]:
    """Return the function that reads the layers which a denoiser reads: path, dtype, whether to map the file."""
    return functools.partial(load_qwen3_vl, text.skipped)
