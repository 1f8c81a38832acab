"""Which images are held out for validation: whole images, so that nothing that is measured has been trained on."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from library.config.dataset import DatasetConfig, SubsetConfig
from library.config.outside_files import load_json
from library.config.problems import ConfigError, Message, Problem, counted, listed
from library.config.run_config import RunConfig
from library.data.folders import about_images, some
from library.data.threads import spread
from library.files import STATE_FACTS

if TYPE_CHECKING:
    from library.data.images import Image, ImageSet

IN_STATE = "held_out"  # the key of a state's facts
LARGEST = 1 << 26  # bytes of a state's facts, which have the losses of an epoch
PIECE = 1 << 14  # bytes
MOST_SHOWN = 20  # folders


@dataclass(slots=True)
class Split:
    """The images of a training by data set, those for training apart from those for validation.

    `copies` are files of neither part: a data set without validation, or a regularisation folder, has the same file or
    an identical copy of a held-out image. `marks` identify the held-out images by content; None: the split is that of
    an earlier version, whose rounding put some images into both parts.
    """

    learned: "list[list[Image]]" = field(default_factory=list)
    held_out: "list[list[Image]]" = field(default_factory=list)
    regular: "list[list[Image]]" = field(default_factory=list)
    copies: "list[Image]" = field(default_factory=list)
    marks: tuple[str, ...] | None = ()
    fresh: int = 0  # images that a new training would hold out


@dataclass(frozen=True, slots=True)
class Earlier:
    """The split of the state that is resumed: its marks, or None where an earlier version made it."""

    marks: frozenset[str] | None


def earlier(config: RunConfig) -> Earlier | None:
    """The split of the state that a config resumes; None without one that can be read."""
    if not config.steps.resume:
        return None
    try:
        facts = load_json(Path(config.steps.resume) / STATE_FACTS, LARGEST)
    except ConfigError:
        return None  # whoever resumes it reports that
    if not isinstance(facts, dict) or "version" not in facts:
        return None
    marks = facts.get(IN_STATE)
    return Earlier(frozenset(map(str, marks)) if isinstance(marks, list) else None)


def apart(
    datasets: Sequence[DatasetConfig],
    learned: "Sequence[list[Image]]",
    regular: "Sequence[list[Image]]",
    seed: int,
    began: Earlier | None = None,
) -> Split:
    """Hold the share `validation_split` of each data set's images out of all of them.

    Which images these are depends on the seed and on their contents alone, and not on names, folders or their order.
    Copies of one image stay together, in all data sets. `began` is the split of a state, which is kept.
    """
    shares = [dataset.validation_split for dataset in datasets]
    if not any(shares):
        return Split([*learned], [[] for _ in datasets], [*regular])
    if began is not None and began.marks is None:
        return _as_earlier_versions(datasets, learned, regular, seed)
    marks = _marks([image for images in (*learned, *regular) for image in images])
    before = began.marks or frozenset() if began is not None else frozenset()
    seeds = [seed if dataset.validation_seed is None else dataset.validation_seed for dataset in datasets]
    contents = [[marks[image.path] for image in images] for images in learned]
    fresh = _chosen(contents, shares, seeds)
    chosen = before if before & set(marks.values()) else fresh
    made = Split(marks=tuple(sorted(chosen | before)))  # also of images that are gone, and may come back
    made.fresh = sum(one in fresh for share, own in zip(shares, contents, strict=True) if share for one in own)
    for share, images, beside in zip(shares, learned, regular, strict=True):
        held = [image for image in images if marks[image.path] in chosen]
        made.learned.append([image for image in images if marks[image.path] not in chosen])
        made.held_out.append(held if share else [])
        made.regular.append([image for image in beside if marks[image.path] not in chosen])
        made.copies += [*([] if share else held), *(image for image in beside if marks[image.path] in chosen)]
    return made


def _chosen(contents: Sequence[Sequence[str]], shares: Sequence[float], seeds: Sequence[int]) -> set[str]:
    """The marks to hold out of data sets with these marks.

    What one data set holds out counts for the others, too. A data set prefers images that no earlier one has, so that
    the shares of those stay as they are.
    """
    chosen: set[str] = set()
    seen: set[str] = set()
    for marks, share, seed in zip(contents, shares, seeds, strict=True):
        if not share:
            continue
        copies = Counter(marks)
        most = len(marks) - (share < 1)  # one is left to train on
        missing = min(round(share * len(marks)), most) - sum(copies[mark] for mark in chosen)
        for mark in sorted(copies.keys() - chosen, key=lambda mark: (mark in seen, _rank(mark, seed))):
            if copies[mark] < 2 * missing:  # else the share would be further off with it
                chosen.add(mark)
                missing -= copies[mark]
        seen |= copies.keys()
    return chosen


def _rank(mark: str, seed: int) -> str:
    return hashlib.blake2b(f"{seed} {mark}".encode(), digest_size=8).hexdigest()


def _marks(images: "Iterable[Image]") -> dict[str, str]:
    """The mark of each image, by path."""
    paths = [*dict.fromkeys(image.path for image in images)]
    return dict(zip(paths, spread(mark, paths), strict=True))


def mark(path: str) -> str:
    """A digest of an image's content: its length and three pieces of it, as reading all of 100,000 photos takes long.

    Of an image of which only the latents are left it is one of its name.
    """
    try:
        about = os.stat(path)
        return _of_content(path, about.st_mtime_ns, about.st_size)
    except OSError:
        return _digest(os.path.basename(path).encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=1 << 18)
def _of_content(path: str, modified: int, num_bytes: int) -> str:
    del modified
    with open(path, "rb") as f:
        pieces = [num_bytes.to_bytes(8)]
        for place in (0, num_bytes // 2, max(0, num_bytes - PIECE)):
            f.seek(place)
            pieces.append(f.read(PIECE))
    return _digest(b"".join(pieces))


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# Why: docs/decisions/2026-11-27-validation-is-held-out.md
def _as_earlier_versions(
    datasets: Sequence[DatasetConfig],
    learned: "Sequence[list[Image]]",
    regular: "Sequence[list[Image]]",
    seed: int,
) -> Split:
    """The split of states of 0.3.0 and before: folder by folder, both parts rounded up, as sd-scripts does."""
    made = Split(regular=[*regular], marks=None)
    for dataset, images in zip(datasets, learned, strict=True):
        folders: dict[int, list[Image]] = {}
        for image in images:
            folders.setdefault(id(image.subset), []).append(image)
        kept: list[Image] = []
        held: list[Image] = []
        for members in folders.values():
            mixed, share = list(members), dataset.validation_split
            if share:
                Random(seed if dataset.validation_seed is None else dataset.validation_seed).shuffle(mixed)
                count = round(len(mixed) * share)
                held += sorted(mixed[len(mixed) - count :], key=_path)
                mixed = sorted(mixed[: math.ceil(len(mixed) * (1 - share))], key=_path)
            kept += mixed
        made.learned.append(kept)
        made.held_out.append(held)
    return made


def _path(image: "Image") -> str:
    return image.path


def plain_options(subset: SubsetConfig) -> SubsetConfig:
    """The subset's options for validation images: no augmentation and no dropout of captions."""
    return replace(
        subset,
        flip_aug=False,
        color_aug=False,
        random_crop=False,
        face_crop_aug_range=None,
        caption_dropout_rate=0.0,
        caption_dropout_every_n_epochs=0,
        caption_tag_dropout_rate=0.0,
        token_warmup_step=0.0,
    )


# ---- what is said about it


def by_folder(images: "ImageSet") -> Message | None:
    """How many images are held out of which folder; None where none are."""
    if not images.validation:
        return None
    held, every = _folders(images.validation.items), _folders([*images.items, *images.validation.items])
    names = Counter(os.path.basename(os.path.normpath(place)) for place in every)
    rows = [
        Message(
            "{held} of {count} in {folder}",
            held=len(paths),
            count=len(every[place]),
            folder=name if names[name := os.path.basename(os.path.normpath(place))] == 1 else place,
        )
        for place, paths in held.items()
    ]
    shown = listed(rows[:MOST_SHOWN])
    if len(rows) > MOST_SHOWN:
        shown = Message("{shown} and {more} more", shown=shown, more=len(rows) - MOST_SHOWN)
    counts = {"held": sum(map(len, held.values())), "count": sum(map(len, every.values()))}
    return Message("{held} of {count} images held out for validation: {folders}", **counts, folders=shown)


def warnings(split: Split, began: Earlier | None) -> Iterator[Problem]:
    """Images that are in neither part or in both, and what the split of a resumed state changes."""
    if split.copies:
        paths = sorted({image.path for image in split.copies})
        yield about_images(
            "{count} not trained on, since the same file or a copy of it is held out for validation: {names}",
            count=counted(len(paths), "image"),
            names=some(paths),
        )
    held = {image.path for images in split.held_out for image in images}
    if both := sorted(held & {image.path for images in split.learned for image in images}):
        yield Problem(
            "validation_split",
            ": the training of this state began with {count} that are trained on and validated, and goes on with them, "
            "as the losses would not be comparable otherwise; a new training holds them out: {names}",
            count=counted(len(both), "image"),
            names=some(both),
            topic="images",
        )
    if held and began is not None and began.marks is not None:
        yield from _of_state(split, began.marks, held)


def _of_state(split: Split, before: frozenset[str], held: set[str]) -> Iterator[Problem]:
    """What differs from a new training, where one is resumed that held out images with the marks `before`."""
    there = sum(map(len, split.held_out))
    if not before:
        yield Problem(
            "validation_split",
            ": the training of this state began without validation, so what is held out from now on has been trained "
            "on",
            topic="images",
        )
    elif not any(mark(path) in before for path in held):
        yield Problem(
            "validation_split",
            ": the images that the training of this state held out are gone, so those held out from now on have been "
            "trained on; put the old ones back to go on validating with them",
            topic="images",
        )
    elif there != split.fresh:
        yield Problem(
            "validation_split",
            ": a resumed training keeps the images that its state held out, {there} instead of {fresh}, since it has "
            "been trained on the others",
            there=there,
            fresh=split.fresh,
            topic="images",
        )


def _folders(images: "Iterable[Image]") -> Mapping[str, set[str]]:
    found: dict[str, set[str]] = {}
    for image in images:
        if not image.is_reg:
            place = image.subset.image_dir or image.subset.metadata_file or ""
            found.setdefault(place, set()).add(image.path)
    return found
