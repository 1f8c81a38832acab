"""Changes of a caption at load time: pure functions of text, options, moment and a random generator.

Steps and random draws have kohya's order, so the same seed gives the same captions.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from library.config.dataset import SubsetConfig
from library.config.run_config import UNCHANGED, CaptionChange

TRIGGER = "[trigger]"  # placeholder of ai-toolkit for the trigger word
_CHOICE = re.compile(r"\{([^}]+)\}")
_OPEN, _CLOSE = "\ue000", "\ue001"  # private-use characters that replace {{ and }} while choices are drawn


@dataclass(frozen=True, slots=True)
class Moment:
    """When a caption is loaded: optimizer step (from 0), epoch (from 1), and total steps of the training."""

    step: int = 0
    epoch: int = 1
    total_steps: int = 0


def process(
    caption: str,
    options: SubsetConfig,
    random: Random,
    moment: Moment = Moment(),
    change: CaptionChange = UNCHANGED,
) -> str:
    """Return the caption to encode: prefix, dropout, wildcards, then warm-up, shuffling and dropout of tags; last the
    trained words of an embedding.
    """
    caption = with_affixes(caption, options)
    if _is_dropped(options, random, moment):
        return ""
    caption = _expanded(caption, random) if options.enable_wildcard else caption.split("\n", 1)[0]
    if options.shuffle_caption or options.token_warmup_step > 0 or options.caption_tag_dropout_rate > 0:
        caption = join_tags(_tags(caption, options, random, moment), options.caption_separator)
    caption = _without_marks(caption, options)
    return random.choice(change.sentences) if change.sentences else change.of_prompt(caption)


def encoded_once(caption: str, options: SubsetConfig, name: str) -> str:
    """Return the caption to encode once for the whole training: as `process`, without what varies by step. One wildcard
    variant is drawn, always the same for an image of this name.
    """
    caption = with_affixes(caption, options)
    if options.enable_wildcard:
        caption = _expanded(caption, Random(f"{name} {caption}"))
    return _without_marks(caption.split("\n", 1)[0], options)


def variant(caption: str, options: SubsetConfig, name: str, number: int) -> str:
    """Return one of several variants of a caption that are encoded once: 0 is that of `encoded_once`.

    The others are shuffled, lose tags and draw wildcards, always alike for an image of this name.
    """
    if number == 0:
        return encoded_once(caption, options, name)
    without_dropout = replace(options, caption_dropout_rate=0.0, caption_dropout_every_n_epochs=0)
    return process(caption, without_dropout, Random(f"{name} {caption} {number}"))


def may_be_dropped(options: SubsetConfig) -> bool:
    return options.caption_dropout_rate > 0 or options.caption_dropout_every_n_epochs > 0


def drawn_number(options: SubsetConfig, random: Random, moment: Moment, count: int) -> int | None:
    return None if _is_dropped(options, random, moment) else random.randrange(count)  # None: no caption at all


def with_affixes(caption: str, options: SubsetConfig) -> str:
    """Replace [trigger] by the trigger phrase, and join the caption with its prefix and suffix.

    A prefix equal to the trigger phrase is dropped if the caption has [trigger]. With wildcards, which draw one line,
    every line gets prefix and suffix; otherwise only the first line is read.
    """
    lines = caption.split("\n") if options.enable_wildcard else caption.split("\n", 1)[:1]
    return "\n".join(_line_with_affixes(line, options) for line in lines)


def _line_with_affixes(caption: str, options: SubsetConfig) -> str:
    prefix = options.caption_prefix or ""
    if TRIGGER in caption and (word := options.trigger_phrase):
        caption = caption.replace(TRIGGER, word)
        prefix = "" if prefix.strip(" ,") == word.strip(" ,") else prefix
    if prefix:  # exactly one space, even if the prefix ends with one
        caption = f"{prefix.rstrip()} {caption.lstrip()}" if caption.strip() else prefix.rstrip()
    return f"{caption} {options.caption_suffix}" if options.caption_suffix else caption


def join_tags(tags: Sequence[str], separator: str) -> str:
    return (separator if separator[-1:].isspace() else f"{separator} ").join(tags)


def first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0].strip()


def caption_lines(text: str) -> str:
    return "\n".join(line for line in map(str.strip, text.split("\n")) if line)


def with_tags(caption: str, tags: str, options: SubsetConfig) -> str:
    """Join the caption and the tags of a metadata file; with wildcards the tags follow every line."""
    separator = options.caption_separator
    if not options.enable_wildcard:
        return f"{caption}{separator}{tags}" if caption and tags else caption or tags
    tags = tags.replace("\n", separator)
    if not caption:
        return tags
    return "\n".join(f"{line}{separator}{tags}" if tags else line for line in caption_lines(caption).split("\n"))


def _without_marks(caption: str, options: SubsetConfig) -> str:
    """Remove the marks of kept or joined tags, which no model should learn."""
    mark = options.keep_tokens_separator
    if mark and mark in caption:
        caption = join_tags(
            [tag for part in _split_fixed_tags(caption, options) for tag in part], options.caption_separator
        )
    if options.secondary_separator:
        caption = caption.replace(options.secondary_separator, options.caption_separator)
    return caption


def _is_dropped(options: SubsetConfig, random: Random, moment: Moment) -> bool:
    if options.caption_dropout_rate > 0 and random.random() < options.caption_dropout_rate:
        return True
    period = options.caption_dropout_every_n_epochs
    return period > 0 and moment.epoch % period == 0


def _expanded(caption: str, random: Random) -> str:
    """Draw one line, then one alternative of every {a|b}; {{ and }} are escaped braces."""
    if "\n" in caption:
        caption = random.choice(caption.split("\n"))
    caption = caption.replace("{{", _OPEN).replace("}}", _CLOSE)
    caption = _CHOICE.sub(lambda match: random.choice(match[1].split("|")), caption)
    return caption.replace(_OPEN, "{").replace(_CLOSE, "}")


def _tags(caption: str, options: SubsetConfig, random: Random, moment: Moment) -> list[str]:
    fixed, flexible, suffix = _split_fixed_tags(caption, options)
    flexible = flexible[: _warmed_up(len(flexible), options, moment)]
    if options.shuffle_caption:
        random.shuffle(flexible)
    if (rate := options.caption_tag_dropout_rate) > 0:
        flexible = [tag for tag in flexible if random.random() >= rate]
    return fixed + flexible + suffix


def _split_fixed_tags(caption: str, options: SubsetConfig) -> tuple[list[str], list[str], list[str]]:
    """Split a caption into tags kept in front, tags that are shuffled, and tags kept at the end."""
    mark = options.keep_tokens_separator
    if mark and mark in caption:
        sections = (caption.split(mark, 2) + [""])[:3]
        fixed, flexible, suffix = ([tag for tag in _split_caption(part, options) if tag] for part in sections)
        return fixed, flexible, suffix
    # Empty tags are kept here and removed above, as upstream does: the count of kept tokens depends on it.
    tags = _split_caption(caption.strip(), options)
    keep = max(options.keep_tokens, 0)
    return tags[:keep], tags[keep:], []


def _split_caption(text: str, options: SubsetConfig) -> list[str]:
    return [tag.strip() for tag in text.split(options.caption_separator)]


def _warmed_up(count: int, options: SubsetConfig, moment: Moment) -> int:
    """Return the number of tags in use at this step: from token_warmup_min at step 0 to all at token_warmup_step."""
    steps = options.token_warmup_step
    if 0 < steps < 1:
        steps = math.floor(steps * moment.total_steps)
    if steps <= 0 or moment.step >= steps:
        return count
    return math.floor(moment.step * ((count - options.token_warmup_min) / steps)) + options.token_warmup_min
