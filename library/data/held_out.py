"""Which images are held out for validation: whole images, so that no measured image is trained on."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from library.config.dataset import DatasetConfig, SubsetConfig
from library.config.outside_files import load_json, open_regular
from library.config.problems import ConfigError, Message, Problem, counted, join_messages
from library.config.run_config import RunConfig
from library.data.folders import about_images, some_files
from library.data.threads import spread
from library.files import STATE_FACTS

if TYPE_CHECKING:
    from library.data.images import Image, ImageSet

IN_STATE = "held_out"  # the key of a state's facts
MAX_STATE_FACTS_BYTES = 1 << 26  # limit of a state's facts in bytes; they contain the losses of an epoch
PIECE_BYTES = 1 << 14  # bytes of each hashed piece
MAX_FOLDERS_SHOWN = 20  # folders listed


@dataclass(slots=True)
class Split:
    """The images of a training by data set, separated into training and validation.

    `copies` are files in neither part: a data set without validation, or a regularisation folder, contains the same
    file or an identical copy of a held-out image. `marks` identify the held-out images by content; None: the split of
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
    """The split of the resumed state: its marks, or None if an earlier version made it."""

    marks: frozenset[str] | None


def resumed_split(config: RunConfig) -> Earlier | None:
    """Return the split of the state that a config resumes; None without a readable one."""
    if not config.steps.resume:
        return None
    try:
        facts = load_json(Path(config.steps.resume) / STATE_FACTS, MAX_STATE_FACTS_BYTES)
    except ConfigError:
        return None  # resuming reports an unreadable state
    if not isinstance(facts, dict) or "version" not in facts:
        return None
    marks = facts.get(IN_STATE)
    return Earlier(frozenset(map(str, marks)) if isinstance(marks, list) else None)


def hold_out(
    datasets: Sequence[DatasetConfig],
    learned: "Sequence[list[Image]]",
    regular: "Sequence[list[Image]]",
    seed: int,
    resumed: Earlier | None = None,
) -> Split:
    """Hold the share `validation_split` of each data set's images out of all of them.

    The choice depends only on the seed and the images' contents, not on names, folders or their order. Copies of an
    image stay together in all data sets. `resumed` is the split of a state, which is kept.
    """
    shares = [dataset.validation_split for dataset in datasets]
    if not any(shares):
        return Split([*learned], [[] for _ in datasets], [*regular])
    if resumed is not None and resumed.marks is None:
        return _as_earlier_versions(datasets, learned, regular, seed)
    marks = _marks(chain(*learned, *regular))
    state_marks = (resumed.marks if resumed is not None else None) or frozenset()
    seeds = [seed if dataset.validation_seed is None else dataset.validation_seed for dataset in datasets]
    contents = [[marks[image.path] for image in images] for images in learned]
    fresh = _choose_marks(contents, shares, seeds)
    chosen = state_marks if state_marks & set(marks.values()) else fresh
    split = Split(marks=tuple(sorted(chosen | state_marks)))  # including images that are gone and may come back
    for share, own_marks, images, regular_images in zip(shares, contents, learned, regular, strict=True):
        remaining, held = _divide(images, marks, chosen)
        regular_remaining, regular_copies = _divide(regular_images, marks, chosen)
        split.learned.append(remaining)
        split.regular.append(regular_remaining)
        split.held_out.append(held if share else [])
        split.copies += regular_copies if share else [*held, *regular_copies]
        split.fresh += sum(mark in fresh for mark in own_marks) if share else 0
    return split


def _divide(
    images: "Sequence[Image]", marks: Mapping[str, str], chosen: Collection[str]
) -> "tuple[list[Image], list[Image]]":
    """Return the images whose marks are not chosen, and those whose marks are."""
    remaining = [image for image in images if marks[image.path] not in chosen]
    return remaining, [image for image in images if marks[image.path] in chosen]


def _choose_marks(contents: Sequence[Sequence[str]], shares: Sequence[float], seeds: Sequence[int]) -> set[str]:
    """Return the marks to hold out of data sets with these marks.

    An image held out of one data set counts for the others, too. A data set prefers images that no earlier one has, so
    that the shares of those stay.
    """
    chosen: set[str] = set()
    earlier_marks: set[str] = set()
    for marks, share, seed in zip(contents, shares, seeds, strict=True):
        if not share:
            continue
        copies = Counter(marks)
        max_held = len(marks) - (share < 1)  # leave at least one to train on
        missing = min(round(share * len(marks)), max_held) - sum(copies[mark] for mark in chosen)
        for mark in sorted(copies.keys() - chosen, key=lambda mark: (mark in earlier_marks, _rank(mark, seed))):
            if copies[mark] < 2 * missing:  # otherwise adding it would miss the share by more
                chosen.add(mark)
                missing -= copies[mark]
        earlier_marks |= copies.keys()
    return chosen


def _rank(mark: str, seed: int) -> str:
    return hashlib.blake2b(f"{seed} {mark}".encode(), digest_size=8).hexdigest()


def _marks(images: "Iterable[Image]") -> dict[str, str]:
    paths = [*dict.fromkeys(image.path for image in images)]
    return dict(zip(paths, spread(digest_image, paths), strict=True))


def digest_image(path: str) -> str:
    """Return a digest of an image's content: its length and three pieces of it; of its name if only latents
    are left.
    """
    # Reading all of 100,000 photos would take long.
    try:
        status = os.stat(path)
        return _digest_pieces(path, status.st_mtime_ns, status.st_size)
    except OSError:
        return _digest_content(os.path.basename(path).encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=1 << 18)
def _digest_pieces(path: str, modified: int, num_bytes: int) -> str:
    del modified  # it is only part of the cache key
    with open_regular(path) as f:
        pieces = [num_bytes.to_bytes(8)]
        for offset in (0, num_bytes // 2, max(0, num_bytes - PIECE_BYTES)):
            f.seek(offset)
            pieces.append(f.read(PIECE_BYTES))
    return _digest_content(b"".join(pieces))


def _digest_content(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


# Why: docs/decisions/2026-11-27-validation-is-held-out.md
def _as_earlier_versions(
    datasets: Sequence[DatasetConfig],
    learned: "Sequence[list[Image]]",
    regular: "Sequence[list[Image]]",
    seed: int,
) -> Split:
    """Return the split of states of 0.3.0 and before: folder by folder, both parts rounded up, as in sd-scripts."""
    split = Split(regular=[*regular], marks=None)
    for dataset, images in zip(datasets, learned, strict=True):
        folders: dict[int, list[Image]] = {}
        for image in images:
            folders.setdefault(id(image.subset), []).append(image)
        remaining: list[Image] = []
        held: list[Image] = []
        for members in folders.values():
            mixed, share = list(members), dataset.validation_split
            if share:
                Random(seed if dataset.validation_seed is None else dataset.validation_seed).shuffle(mixed)
                count = round(len(mixed) * share)
                held += sorted(mixed[len(mixed) - count :], key=_path)
                mixed = sorted(mixed[: math.ceil(len(mixed) * (1 - share))], key=_path)
            remaining += mixed
        split.learned.append(remaining)
        split.held_out.append(held)
    return split


def _path(image: "Image") -> str:
    return image.path


def plain_options(subset: SubsetConfig) -> SubsetConfig:
    """Return the subset's options for validation images: no augmentation and no dropout of captions."""
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


# ---- reports


def held_out_by_folder(images: "ImageSet") -> Message | None:
    """Return how many images are held out of which folder; None if none are."""
    if not images.validation:
        return None
    held_paths = _paths_by_folder(images.validation.items)
    all_paths = _paths_by_folder([*images.items, *images.validation.items])
    names_by_folder = {folder: os.path.basename(os.path.normpath(folder)) for folder in all_paths}
    names = Counter(names_by_folder.values())
    rows = [
        Message(
            "{held} of {count} in {folder}",
            held=len(paths),
            count=len(all_paths[folder]),
            # The root of a drive has no name.
            folder=name if (name := names_by_folder[folder]) and names[name] == 1 else folder,
        )
        for folder, paths in held_paths.items()
    ]
    shown = join_messages(rows[:MAX_FOLDERS_SHOWN])
    if len(rows) > MAX_FOLDERS_SHOWN:
        shown = Message("{shown} and {more} more", shown=shown, more=len(rows) - MAX_FOLDERS_SHOWN)
    counts = {"held": sum(map(len, held_paths.values())), "count": sum(map(len, all_paths.values()))}
    return Message("{held} of {count} images held out for validation: {folders}", **counts, folders=shown)


def split_warnings(split: Split, resumed: Earlier | None) -> Iterator[Problem]:
    """Return images in neither part or in both, and what the split of a resumed state changes."""
    if split.copies:
        paths = sorted({image.path for image in split.copies})
        yield about_images(
            "{count} not trained on, since the same file or a copy of it is held out for validation: {names}",
            count=counted(len(paths), "image"),
            names=some_files(paths),
        )
    held = {image.path for images in split.held_out for image in images}
    if in_both := sorted(held & {image.path for images in split.learned for image in images}):
        yield Problem(
            "validation_split",
            ": the training of this state began with {count} that are trained on and validated, and continues with "
            "them, as the losses would not be comparable otherwise; a new training holds them out: {names}",
            count=counted(len(in_both), "image"),
            names=some_files(in_both),
            topic="images",
        )
    if held and resumed is not None and resumed.marks is not None:
        yield from _resume_warnings(split, resumed.marks, held)


def _resume_warnings(split: Split, state_marks: frozenset[str], held: set[str]) -> Iterator[Problem]:
    """Return how a resumed state with the marks `state_marks` differs from a new training."""
    num_held = sum(map(len, split.held_out))
    if not state_marks:
        yield Problem(
            "validation_split",
            ": the training of this state began without validation, so what is held out from now on has been trained "
            "on",
            topic="images",
        )
    elif not any(digest_image(path) in state_marks for path in held):
        yield Problem(
            "validation_split",
            ": the images that the training of this state held out are gone, so those held out from now on have been "
            "trained on; put the old ones back to continue validating with them",
            topic="images",
        )
    elif num_held != split.fresh:
        yield Problem(
            "validation_split",
            ": a resumed training keeps the images that its state held out, {there} instead of {fresh}, since it has "
            "been trained on the others",
            there=num_held,
            fresh=split.fresh,
            topic="images",
        )


def _paths_by_folder(images: "Iterable[Image]") -> Mapping[str, set[str]]:
    paths: dict[str, set[str]] = {}
    for image in images:
        if not image.is_reg:
            folder = image.subset.image_dir or image.subset.metadata_file or ""
            paths.setdefault(folder, set()).add(image.path)
    return paths
