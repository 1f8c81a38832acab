"""What lies in the folders of a data set, found in one pass over each; nothing is opened."""

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from library.data.pixels import PLUGINS, extensions

CACHED_SIZE = re.compile(r"(.+)_(\d{2,})x(\d{2,})_\w+\.npz")
MOST_REPEATS = 100_000  # as in a data set file
MANY_REPEATS = 500  # a folder called 2024_holiday is a year, not a number of repeats
DEEPEST, MOST_FOLDERS = 6, 2000  # how far down, and in how many folders, misplaced images are looked for


class File(NamedTuple):
    """What the file system says of an image: dates in ns (`changed` is the later of modified and moved), length."""

    modified: int
    changed: int
    num_bytes: int


@dataclass(slots=True)
class Listing:
    """The files of one folder: images by name, all names, sub-folders, and image sizes that cache names tell."""

    folder: str
    images: dict[str, File] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    folders: list[str] = field(default_factory=list)
    undecodable: list[str] = field(default_factory=list)
    sizes: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)

    def known_size(self, name: str) -> tuple[int, int] | None:
        """(width, height) of an image whose latents were cached after it was last touched."""
        found = self.sizes.get(os.path.splitext(name)[0]) if self.sizes else None
        if found is None or (name in self.images and found[1] < self.images[name].changed):
            return None
        return found[0]

    def path(self, name: str) -> str:
        """The path of a file in this folder."""
        return f"{self.folder}{os.sep}{name}"


class Concept(NamedTuple):
    """A folder named <repeats>_<words>, or, without words, one that holds images directly."""

    folder: Path
    repeats: int
    words: str


def listing(folder: str | Path) -> Listing:
    """List a folder. Hidden files, such as the ._ twins that macOS leaves, and __MACOSX are not there."""
    found = Listing(os.fspath(folder))
    known = extensions()
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if entry.is_dir():
                if name != "__MACOSX":
                    found.folders.append(name)
                continue
            found.names.add(name)
            suffix = name[name.rfind(".") :].lower()
            if suffix in known:
                about = entry.stat()
                changed = max(about.st_mtime_ns, about.st_ctime_ns)
                found.images[name] = File(about.st_mtime_ns, changed, about.st_size)
            elif suffix in PLUGINS:
                found.undecodable.append(name)
            elif suffix == ".npz" and (cached := CACHED_SIZE.fullmatch(name)):
                _remember(found, cached, entry.stat().st_mtime_ns)
    found.images = dict(sorted(found.images.items()))
    found.folders.sort()
    return found


def _remember(found: Listing, cached: re.Match, modified: int) -> None:
    stem, width, height = cached.groups()
    if stem not in found.sizes or found.sizes[stem][1] < modified:
        found.sizes[stem] = ((int(width), int(height)), modified)


def concept(folder: Path) -> Concept | None:
    """Read a folder's name as <repeats>_<words>, or None when it is not one."""
    repeats, _, words = folder.name.partition("_")
    return Concept(folder, int(repeats), words) if repeats.isascii() and repeats.isdigit() else None


def concepts(parent: Path) -> list[Concept]:
    """The folders named <repeats>_<words> directly inside `parent`, by name; those with 0 repeats are left out."""
    found = (concept(parent / name) for name in listing(parent).folders)
    return [one for one in found if one is not None and one.repeats > 0]


def is_flat(parent: Path) -> bool:
    """Whether the images that are trained on lie directly in this folder, as other trainers have it.

    Folders named <repeats>_<words> come first: beside them, and in one that is named so itself, sd-scripts' rule holds.
    """
    own = concept(parent.absolute())
    if own is not None and own.repeats < MANY_REPEATS:
        return False
    here = listing(parent)
    inner = (concept(parent / name) for name in here.folders)
    return bool(here.images) and not any(one.repeats for one in inner if one)


def trained(parent: Path, repeats: int) -> list[Concept]:
    """The folders that a training takes its images from: those inside `parent`, or `parent` with these repeats."""
    return [Concept(parent, repeats, "")] if is_flat(parent) else concepts(parent)


def _too_often(option: str, one: Concept) -> str:
    return f"{option}: {one.folder} asks for {one.repeats:,} repeats, which is no training; rename it to 1_{one.words}"


def problems_of_parent(option: str, parent: str | Path) -> Iterator[str]:
    """Say why a folder cannot be used as the images of a training, and what to do instead."""
    parent = Path(parent)
    if not parent.exists():
        yield f"{option}: {parent} does not exist"
        return
    if not parent.is_dir():
        yield f"{option}: {parent} is a file; give the folder that holds your images"
        return
    found = concepts(parent)
    yield from (_too_often(option, one) for one in found if one.repeats > MOST_REPEATS)
    if found or is_flat(parent):
        return
    here = listing(parent)
    with_images = [name for name in here.folders if listing(parent / name).images]
    if here.images:
        yield f"{option}: {parent} holds the images themselves; give the folder above it: {parent.absolute().parent}"
    elif with_images and (idle := [name for name in with_images if concept(parent / name)]):
        yield f"{option}: {parent / idle[0]} has 0 repeats, and there is no other folder; rename it to begin with 1_"
    elif len(with_images) == 1:
        name = with_images[0]
        yield (
            f"{option}: no folder in {parent} is named <repeats>_<words>; rename '{name}' to '1_{name}', "
            f"or give that folder: {(parent / name).absolute()}"
        )
    elif with_images:
        name = with_images[0]
        yield (
            f"{option}: no folder in {parent} is named <repeats>_<words>; rename '{name}' to '1_{name}' and so on, "
            "or give one of them"
        )
    elif here.undecodable:
        yield f"{option}: {some(here.undecodable)} in {parent} cannot be decoded here; convert them to PNG or WebP"
    elif deeper := next(_with_images(parent), None):
        yield (
            f"{option}: {parent} holds images only further down, and folders inside folders are not read; "
            f"give the folder that holds them: {deeper.absolute()}"
        )
    elif here.folders:
        yield f"{option}: neither {parent} nor a folder in it holds images (png, jpg, webp, bmp)"
    else:
        yield f"{option}: {parent} is empty; it should hold images, or folders named 10_words with images"


def _with_images(parent: Path) -> Iterator[Path]:
    """Folders below `parent` that hold images, the nearest first; links are not followed."""
    level, looked = [parent], 0
    for _ in range(DEEPEST):
        below = [folder / name for folder in level for name in listing(folder).folders]
        level = [folder for folder in below if not folder.is_symlink()][: MOST_FOLDERS - looked]
        looked += len(level)
        yield from (folder for folder in level if listing(folder).images)


def warnings_of_parent(option: str, parent: Path, repeats: int = 1) -> Iterator[str]:
    """Say what in a folder of images is not used, or perhaps not meant; `repeats` are those of a flat folder."""
    here, flat = listing(parent), is_flat(parent)
    skipped = [name for name in here.folders if concept(parent / name) is None and listing(parent / name).images]
    if skipped and not flat:
        yield (
            f"{option}: images in {some(skipped)} are not used, since the names do not start with a number of repeats; "
            f"rename them like '1_{skipped[0]}' to use them"
        )
    count = number(len(here.images), "image")
    if flat and option == "train_data_dir" and repeats > 1:
        yield f"{option}: {count} directly in {parent}, each seen {repeats} times per epoch"
    elif flat and option == "train_data_dir":
        yield (
            f"{option}: {count} directly in {parent}, each seen once per epoch; "
            "set dataset_repeats to see them more often"
        )
    elif here.images and not flat:
        yield f"{option}: images directly in {parent} are not used ({len(here.images)}); move them one folder deeper"
    for found in map(concept, (parent / name for name in here.folders)):
        if found and found.repeats == 0:
            yield f"{found.folder} has 0 repeats and is not used"
        elif found and found.repeats >= MANY_REPEATS:
            yield f"{found.folder} is read as {found.repeats} repeats of '{found.words}'; rename it if not meant so"


def some(names: Sequence[Any], most: int = 5) -> str:
    """A few of many, for a message: a, b, c and 7 more."""
    shown = ", ".join(str(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def number(count: int, noun: str) -> str:
    """Count things in words: 1 image, 2 images."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
