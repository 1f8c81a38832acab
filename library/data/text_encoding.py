"""Encode captions once, before training, and keep the results beside the images or in memory."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from library.config import phases
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem, counted
from library.config.run_config import RunConfig
from library.config.sections import TextBatchCache
from library.data import cache_files, caches, control_pixels, identity, stamps
from library.data.buckets import Size
from library.data.captions import may_be_dropped
from library.data.encoding_job import Arrays, EncodingJob, clean_up_after, finish, refuse_other_references, share
from library.data.folders import some
from library.data.not_finite import NotFiniteError
from library.data.threads import spread
from library.families.base import Family, ModelComponents, TextCache
from library.families.capabilities import LimitsCaptions, ReadsPictures

if TYPE_CHECKING:
    from library.data.images import ControlImage, Image, ImageSet

NO_CAPTION = -1  # variant number of the empty caption
PRESERVED = -2  # and of prompts that are preserved


class Phrase(NamedTuple):
    """A caption with the reference images that the text encoder reads with it."""

    words: str
    shown: "tuple[ControlImage, ...]" = ()
    interpolation: str | None = None


class Entry(NamedTuple):
    """A file of text outputs: an image with one of its captions that are encoded once."""

    image: "Image"
    words: str


def phrase_of(image: "Image", words: str, template: str) -> Phrase:
    # `template` is that of `template_of`; without one the encoder reads no pictures.
    return Phrase(words, image.controls, image.interpolation) if template else Phrase(words)


def template_of(family: Family) -> str:
    return family.picture_template if isinstance(family, ReadsPictures) else ""


def lengths(
    family: Family, components: ModelComponents
) -> tuple[Callable[[Collection[str]], int | None], Callable[[Sequence[Size]], int]]:
    """Return the number of caption tokens that a step uses, and the number that reference images of given sizes add."""
    length = functools.partial(family.train_text_length, components)
    if isinstance(family, ReadsPictures) and family.picture_template:
        return length, functools.partial(family.picture_tokens, components)
    return length, lambda sizes: 0


def cut_captions(images: Sequence["Image"], family: Family, variants: int = 1) -> Iterator[Problem]:
    """Warn of captions longer than the text encoder's limit. Raises ConfigError without its tokenizer."""
    if not isinstance(family, LimitsCaptions):
        return
    limit = family.caption_limit
    captions = {
        image.path: max([image.encoded_caption, *(image.variant(n) for n in range(1, variants))], key=len)
        for image in images
    }
    # A token has at least one byte, so shorter captions need no tokenizer.
    long = [image for image in images if len(captions[image.path].encode()) > limit.tokens]
    tokenizers = family.tokenizers_of_captions() if long else None
    if not tokenizers or limit.encoder not in tokenizers:
        return
    tokenizer = tokenizers.to_count(limit.encoder)
    counts = {words: limit.count(tokenizer, words) for words in {captions[i.path] for i in long}}
    cut = [image for image in long if counts[captions[image.path]] > limit.tokens]
    if not cut:
        return
    facts = {"count": counted(len(cut), "caption"), "tokens": limit.tokens, "path": cut[0].path, "topic": "captions"}
    if limit.more:
        template = "{count} cut after {tokens} tokens, the first is that of {path}: {more} reads more"
        yield Problem("", template, more=limit.more, **facts)
    else:
        yield Problem("", "{count} cut after {tokens} tokens, the first is that of {path}: nothing reads more", **facts)


@dataclass(slots=True)
class Texts:
    """The encoded captions of a training, on disk by image and caption or in memory by phrase."""

    cache: TextCache
    template: str = ""
    memory: dict[Phrase, Arrays] | None = None
    files: dict[tuple[str, str], str] = field(default_factory=dict)  # path of an image, caption -> file

    def load(self, image: "Image", words: str | None = None) -> Arrays:
        """Return the text encoders' outputs for a caption of an image by the names of the cache's keys; without `words`
        for the first caption.
        """
        words = image.encoded_caption if words is None else words
        if not words and self.cache.without_caption:
            return self.cache.without_caption(self._stored(image, image.encoded_caption))
        return self._stored(image, words)

    def preserved(self, image: "Image", words: str) -> Arrays:
        """Return the outputs for a preserved prompt. An empty one is encoded as such, where a caption is dropped in
        another way.
        """
        return self._stored(image, words)

    def _stored(self, image: "Image", words: str) -> Arrays:
        """Return the outputs for a caption, or for the image's first caption if it is not encoded."""
        if self.memory is not None:
            outputs = self.memory.get(phrase_of(image, words, self.template))
            return outputs or self.memory[phrase_of(image, image.encoded_caption, self.template)]
        file = self.files.get((image.path, words)) or self.files[image.path, image.encoded_caption]
        try:
            text_cache = caches.read_text_cache(file, self.cache.stored, self.cache.names)
        except caches.BROKEN as e:
            raise caches.unreadable_cache(file, e) from e
        if self.cache.mask:
            text_cache[self.cache.mask] = np.ones(len(text_cache[self.cache.stored[0]]), np.int64)
        return text_cache


def encode_captions(images: "ImageSet", job: EncodingJob) -> Texts:
    """Encode the uncached captions of these images and those for validation. Returns the cache."""
    cache, template = job.family.text_cache, template_of(job.family)
    captions = list(_captions_to_encode(images, job.config, cache))
    if job.config.cache.cache_text_encoder_outputs_to_disk:
        return _encode_to_disk(captions, job, cache, template)
    memory: dict[Phrase, Arrays] = {}
    phrases = dict.fromkeys(phrase_of(image, words, template) for _, image, words in captions)
    _encode_phrases([(phrase, [phrase]) for phrase in phrases], job, memory.__setitem__)
    return Texts(cache, template, memory)


def _encode_to_disk(
    captions: "Sequence[tuple[int, Image, str]]", job: EncodingJob, cache: TextCache, template: str
) -> Texts:
    """Encode the captions whose files are missing or invalid: this process' share of them, each phrase once."""
    names = sorted({*job.components.encoders, *job.components.deferred} - {"vae"})
    encoders = identity.fingerprint_components(job.components, names) if names else None
    lengths = {**dict.fromkeys(cache.stored), **({} if cache.mask else job.family.text_lengths)}
    options = {name: getattr(job.config.model, name, None) for name in cache.options}
    entries = _entries_by_file(captions, cache.suffix, bool(template))
    if template:
        refuse_other_references([image for _, image, _ in captions])

    def stamp(entry: Entry) -> JsonObject:
        return caches.text_stamp(entry.words, encoders, options, template)

    def is_valid(item: tuple[str, Entry]) -> bool:
        file, (image, words) = item
        sources = [image.caption_file] if image.caption_file and words else []
        trust, shown = job.config.cache.skip_cache_check, phrase_of(image, words, template).shown
        if words != image.caption and not trust and not _has_stamp(file):
            return False  # sd-scripts encodes captions as written
        return caches.text_is_good(file, lengths, sources, stamp(item[1]), trust, cache.names, shown)

    def write(file: str, arrays: Arrays) -> None:
        image, words = entries[file]
        stored = {name: arrays[name] for name in cache.stored}
        if cache.rate:
            stored[cache.rate] = np.array(image.subset.caption_dropout_rate, np.float32)
        shown = phrase_of(image, words, template).shown
        made_of = stamp(entries[file]) | ({"controls": stamps.control_stamps(shown)} if shown else {})
        caches.write_text(file, stored, made_of, cache, words)

    own_entries = share(list(entries.items()), lambda item: item[0], job.world)
    todo: dict[Phrase, list[str]] = {}
    checked = spread(is_valid, own_entries, job.report, Message("checking cached captions"))
    for (file, (image, words)), is_good in zip(own_entries, checked, strict=True):
        if not is_good:
            todo.setdefault(phrase_of(image, words, template), []).append(file)
    clean_up_after([file for files in todo.values() for file in files])
    _encode_phrases(list(todo.items()), job, write)
    store = Texts(cache, template)
    store.files = {
        (image.path, words): file for file, image, words in _caption_caches(captions, cache.suffix, bool(template))
    }
    return store


def _captions_to_encode(images: "ImageSet", config: RunConfig, cache: TextCache) -> "Iterator[tuple[int, Image, str]]":
    """Yield all captions to encode: the number of a variant, NO_CAPTION or PRESERVED, the image, and the words."""
    for image in images.items:
        variants_of_image = [image.variant(number) for number in range(config.cache.cached_caption_variants)]
        if config.preservation:
            preserved = image.preserved_captions(variants_of_image, config.preservation)
            yield from ((PRESERVED, image, words) for words in preserved)
        yield from ((variants_of_image.index(words), image, words) for words in dict.fromkeys(variants_of_image))
        if may_be_dropped(image.subset) and not cache.without_caption and "" not in variants_of_image:
            yield NO_CAPTION, image, ""
    for image in images.validation.items if images.validation else ():
        yield 0, image, image.encoded_caption


def _caption_caches(
    captions: "Iterable[tuple[int, Image, str]]", suffix: str, with_pictures: bool
) -> "Iterator[tuple[str, Image, str]]":
    """Return the file of each caption, with its image and its words."""
    for number, image, words in captions:
        if number == NO_CAPTION:  # with reference images each image has its own
            yield caches.empty_text_file(image.path, suffix, is_shared=not with_pictures), image, words
        elif number == PRESERVED:
            yield caches.preserved_text_file(image.path, suffix, words, is_shared=not with_pictures), image, words
        else:
            yield caches.text_file(image.path, suffix, number or None), image, words


def _has_stamp(file: str) -> bool:
    """Return whether a cache stores its provenance; those of sd-scripts do not."""
    try:
        with cache_files.open_cache_file(file) as cache_file:
            return cache_file.fact(caches.MADE_FROM) is not None
    except caches.BROKEN:
        return False


def _entries_by_file(
    captions: "Iterable[tuple[int, Image, str]]", suffix: str, with_pictures: bool
) -> dict[str, Entry]:
    """Return the entry of each cache file. Raises ConfigError for an image with two captions or sizes of reference
    images.
    """
    # A file has room for one caption, encoded with references of one size.
    entries: dict[str, Entry] = {}
    for file, image, words in _caption_caches(captions, suffix, with_pictures):
        entry = entries.setdefault(file, Entry(image, words))
        if with_pictures and [control.fit for control in entry.image.controls] != [
            control.fit for control in image.controls
        ]:
            raise ConfigError(
                "{path} is trained at several sizes, and its reference images with it, but there is one "
                "cache file for its caption, which is encoded with them: set control_resolution in the dataset_config, "
                "or use "
                "cache_text_encoder_outputs without _to_disk",
                path=image.path,
            )
        if entry.words != words:
            raise ConfigError(
                "{path} is used with two captions, but there is one cache file for it: "
                "use cache_text_encoder_outputs without _to_disk",
                path=image.path,
            )
    return entries


def _encode_phrases(
    todo: Sequence[tuple[Phrase, Sequence[Any]]], job: EncodingJob, keep: Callable[[Any, Arrays], None]
) -> None:
    """Encode each phrase once and store it under each of its names."""
    if not todo:
        return
    job.components.read_encoders()
    encoders = job.components.encoders.values()
    if not encoders:
        raise ConfigError(
            "there is no text encoder for {captions} not cached yet: name its file",
            captions=counted(len(todo), "caption"),
        )
    for encoder in encoders:
        encoder.to(job.world.device)
    cache = job.config.cache
    own_size = cache.text_encoder_batch_size if isinstance(cache, TextBatchCache) else None
    size = own_size or job.config.data.train_batch_size

    def encoded() -> Iterator[list[tuple[Sequence[Any], Arrays]]]:
        for start in range(0, len(todo), size):
            yield _encoded_phrases(todo[start : start + size], job)

    def write_batch(batch: list[tuple[Sequence[Any], Arrays]]) -> int:
        for names, arrays in batch:
            for name in names:
                keep(name, arrays)
        return len(batch)

    finish(write_batch, encoded(), phases.CACHING_CAPTIONS, len(todo), job.report)
    for encoder in encoders:
        encoder.to("cpu")


def _encoded_phrases(
    batch: Sequence[tuple[Phrase, Sequence[Any]]], job: EncodingJob
) -> list[tuple[Sequence[Any], Arrays]]:
    with torch.no_grad():
        outputs = _encoder_outputs([phrase for phrase, _ in batch], job)
    # numpy has no bfloat16, which becomes float32 as upstream; float16 stays.
    arrays = {k: (v.float() if v.dtype == torch.bfloat16 else v).cpu().numpy() for k, v in outputs.items()}
    for i, (phrase, names) in enumerate(batch):
        if any(value.dtype.kind == "f" and not np.isfinite(value[i]).all() for value in arrays.values()):
            where = [name if isinstance(name, str) else phrase.words for name in names]
            raise NotFiniteError(
                "encoding the caption {caption} of {some} gave NaN: use bf16 or fp32",
                caption=repr(phrase.words),
                some=some(where),
            )
    rows = [{key: value[i] for key, value in arrays.items()} for i in range(len(batch))]
    if mask := job.family.text_cache.mask:  # drop padding, which each batch adds anew
        rows = [{key: value[: int(row[mask].sum())] for key, value in row.items()} for row in rows]
    return [(names, row) for (_, names), row in zip(batch, rows, strict=True)]


def _encoder_outputs(phrases: list[Phrase], job: EncodingJob) -> dict[str, torch.Tensor]:
    words = [phrase.words for phrase in phrases]
    if not (isinstance(job.family, ReadsPictures) and job.family.picture_template):
        return job.family.text(job.components, words)
    pictures = [
        [control_pixels.reference(control, phrase.interpolation) for control in phrase.shown] for phrase in phrases
    ]
    return job.family.text_with_pictures(job.components, words, pictures)
