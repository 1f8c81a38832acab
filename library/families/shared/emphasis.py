"""Emphasis in captions and prompts: (more), [less], (as much as:1.3). Escapes are \\( \\) \\[ \\] and \\\\."""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from library.families.shared import clip

BRACKET_FACTOR = 1.1  # the factor of one pair of brackets
SIGN = re.compile(r"\\[()\[\]\\]|:\s*([+-]?\d*\.?\d+)\s*\)|[()\[\]]")


def parse_emphasis(text: str) -> list[tuple[str, float]]:
    """Split a text into weighted pieces; unclosed brackets extend to the end, unopened ones are plain text.

    Round and square brackets know nothing of each other, so `[sad :( ]` is read as in sd-scripts.
    """
    pieces: list[list] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}  # the first piece inside each

    def close(bracket: str, factor: float) -> None:
        for piece in pieces[opened[bracket].pop() :]:
            piece[1] *= factor

    at = 0
    for sign in SIGN.finditer(text):
        pieces.append([text[at : sign.start()], 1.0])
        at, bracket = sign.end(), sign.group()
        if bracket in "([":
            opened[bracket].append(len(pieces))
        elif sign.group(1) is not None and opened["("]:
            close("(", float(sign.group(1)))
        elif bracket == ")" and opened["("]:
            close("(", BRACKET_FACTOR)
        elif bracket == "]" and opened["["]:
            close("[", 1.0 / BRACKET_FACTOR)
        else:
            pieces.append([bracket.removeprefix("\\") if len(bracket) == 2 else bracket, 1.0])
    pieces.append([text[at:], 1.0])
    for bracket, factor in (("(", BRACKET_FACTOR), ("[", 1.0 / BRACKET_FACTOR)):
        while opened[bracket]:
            close(bracket, factor)
    return _joined(pieces)


def _joined(pieces: list[list]) -> list[tuple[str, float]]:
    """Join neighbours of equal weight."""
    # The tokenizer must see a word with an escaped bracket as one word.
    out: list[tuple[str, float]] = []
    for text, weight in pieces:
        if text and out and out[-1][1] == weight:
            out[-1] = (out[-1][0] + text, weight)
        elif text:
            out.append((text, weight))
    return out


def weighted_tokens(tokenizer: Any, texts: Sequence[str], chunks: int, pad: int | None) -> tuple[Tensor, Tensor]:
    """Return token ids [B, chunks, 77] like `clip_tokens`, and a weight [B, 75 * chunks + 2] per merged token."""
    inner, rows, emphasis = chunks * (clip.LENGTH - 2), [], []
    for text in texts:
        ids: list[int] = []
        factors: list[float] = []
        for piece, weight in parse_emphasis(text):
            piece_ids = tokenizer(piece, add_special_tokens=False, truncation=False).input_ids
            ids += piece_ids
            factors += [weight] * len(piece_ids)
        rows.append(ids[:inner])
        emphasis.append([1.0, *factors[:inner], *[1.0] * (inner - len(factors)), 1.0])
    return clip.split_into_chunks(rows, tokenizer, chunks, pad), torch.tensor(emphasis, dtype=torch.float32)


def count_weighted_tokens(tokenizer: Any, text: str) -> int:
    """Return the number of tokens of a text, with its brackets read as emphasis."""
    return sum(
        len(tokenizer(piece, add_special_tokens=False, truncation=False).input_ids) for piece, _ in parse_emphasis(text)
    )
