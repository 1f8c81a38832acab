"""Words in prompts that look like misspelt words of LoRA and embedding files. Loads no torch."""

import contextlib
import difflib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Message
from library.families.shared.raw_header import header_metadata
from library.sampling.prompts import Prompt

PHRASE, FREQUENCY = "modelspec.trigger_phrase", "ss_tag_frequency"  # in the metadata of a file
MIN_LETTERS = 4  # of a word: shorter ones are like too many others
MIN_LIKENESS = 0.75  # of difflib: "zrob" is 0.75 like "zorb"
MAX_TAGS = 3  # of a folder that are its most frequent ones; more are no names
MIN_IMAGES = 2  # with the same tag
MAX_WORDS = 8  # of a file, as each is compared with every word of the prompts
MAX_LENGTH = 4  # words of a tag; a longer one is a sentence about an image
DIGITS = "0123456789"  # count something in tags: 1girl


def misspelt(files: Iterable[Path], prompts: Iterable[Prompt]) -> Iterator[Message]:
    """Yield each word of the prompts that resembles a word that a file was trained with, where that one is missing."""
    paths = [*dict.fromkeys(files)]
    words = {word: path for path in paths for word in words_of(path)}
    known_words = words.keys() | {word for path in paths for word in _caption_words(path)}
    pairs: dict[tuple[str, str], None] = {}
    for prompt in prompts:
        text = prompt.prompt.casefold()
        written = [word for word in dict.fromkeys(_long_words(text)) if word not in known_words]
        for word in words:
            if word.strip(DIGITS) not in text:
                close = difflib.get_close_matches(word, written, n=1, cutoff=MIN_LIKENESS)
                pairs.update({(spelling, word): None for spelling in close})
    for spelling, word in pairs:
        template = 'prompt: "{written}" is none of the words that {file} was trained with: did you mean "{word}"?'
        yield Message(template, written=spelling, file=words[word].name, word=word)


def words_of(path: Path) -> list[str]:
    """Return the words by which a file is called: of its trigger phrase, else of the tags that most of its captions
    have; none for a file without metadata.
    """
    metadata = _metadata(path)
    phrase = str(metadata.get(PHRASE) or "")
    return list(dict.fromkeys(_long_words(phrase or " ".join(_common_tags(metadata)))))[:MAX_WORDS]


def _caption_words(path: Path) -> Iterator[str]:
    """Yield every word of the captions that a file was trained with, also a rare one."""
    for counts in _tag_counts(_metadata(path)):
        yield from _long_words(" ".join(counts))


def _metadata(path: Path) -> JsonMapping:
    if path.suffix.lower() != ".safetensors":
        return {}
    try:
        return header_metadata(path)
    except ConfigError:
        return {}  # which is reported elsewhere


def _tag_counts(metadata: JsonMapping) -> Iterator[dict[str, int]]:
    """Yield how many captions of each folder have which tag."""
    folders: object = None
    with contextlib.suppress(ValueError, RecursionError):
        folders = json.loads(str(metadata.get(FREQUENCY) or ""))
    for tags in folders.values() if isinstance(folders, dict) else ():
        if isinstance(tags, dict):
            yield {tag: n for tag, n in tags.items() if isinstance(n, int)}


def _common_tags(metadata: JsonMapping) -> Iterator[str]:
    for counts in _tag_counts(metadata):
        most = max(counts.values(), default=0)
        common = [tag for tag, n in counts.items() if n == most]
        if most >= MIN_IMAGES and len(common) <= MAX_TAGS:
            yield from (tag for tag in common if len(tag.split()) <= MAX_LENGTH)


def _long_words(text: str) -> list[str]:
    return [word for word in re.findall(r"\w+", text.casefold()) if len(word) >= MIN_LETTERS]
