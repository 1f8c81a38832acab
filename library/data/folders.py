"""List the folders of a data set in one pass over each; no file is opened."""

import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from library.config.problems import Message, MessageLike, Problem, one_line
from library.data.pixels import ALWAYS, PLUGINS, extensions

# Formats that sd-scripts does not read either: a warning names these files.
OTHER_FORMATS = {".gif", ".tif", ".tiff", ".heic", ".heif", ".jfif"}
UPRIGHT = "_upright"  # in names of caches of images that are turned by their EXIF orientation
CACHED_SIZE = re.compile(rf"(.+)_(\d{{2,}})x(\d{{2,}})({UPRIGHT})?_\w+\.(?:npz|safetensors)")
MASK_LABEL = "-masklabel"
FILE_LABELS = (MASK_LABEL, "-condlabel")  # of equal length
MAX_MESSAGES_PER_KIND = 20  # messages of one kind; the rest is counted
MANY_REPEATS = 500  # a folder called 2024_holiday is a year, not a number of repeats


class File(NamedTuple):
    """Metadata of an image file: times in ns (`changed` is the later of modified and moved), length in bytes."""

    modified: int
    changed: int
    num_bytes: int


@dataclass(slots=True)
class Listing:
    """The files of one folder: images by name and without extensions, all names, sub-folders, and image sizes from the
    names of caches: by the image's stem, and whether its EXIF orientation turned it."""

    folder: str
    images: dict[str, File] = field(default_factory=dict)
    stems: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    folders: list[str] = field(default_factory=list)
    undecodable: list[str] = field(default_factory=list)
    sizes: dict[tuple[str, bool], tuple[tuple[int, int], int]] = field(default_factory=dict)
    unreadable: str = ""  # why the folder could not be listed
    alike: dict[str, str] = field(default_factory=dict)  # names by their plain form, once one is looked for
    labels: dict[str, File] = field(default_factory=dict)  # OneTrainer's masks and conditioning images beside images

    def find(self, name: str) -> str:
        """Return a file's name as it is written in this folder, or "".

        Composed and decomposed letters (of macOS) are the same, and so are upper and lower case in the extension.
        """
        if name in self.names:
            return name
        if not self.alike:
            # Of several names with one plain form the first in order wins, as the last entry of a dict stays.
            self.alike = {_plain_form(written): written for written in sorted(self.names, reverse=True)}
        return self.alike.get(_plain_form(name), "")

    def image_named(self, stem: str) -> str:
        suffixes = (*ALWAYS, *sorted(extensions().difference(ALWAYS)))
        return next((name for suffix in suffixes if (name := self.find(stem + suffix)) in self.images), "")

    def known_size(self, name: str, turned: bool = False) -> tuple[int, int] | None:
        """(width, height) of an image whose latents were cached after its last change; `turned`: by its EXIF
        orientation."""
        cached = self.sizes.get((os.path.splitext(name)[0], turned)) if self.sizes else None
        if cached is None or (name in self.images and cached[1] < self.images[name].changed):
            return None
        return cached[0]

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)  # the root of a drive ends with a separator


class Concept(NamedTuple):
    """A folder named <repeats>_<words>, or, without words, one that holds images directly."""

    folder: Path
    repeats: int
    words: str


def list_folder(folder: str | Path) -> Listing:
    """List a folder. Hidden files, such as the ._ twins that macOS leaves, and __MACOSX are not there.

    A broken link to an image counts as an image of no bytes, so that it is reported like others that cannot be read.
    """
    listing = Listing(os.fspath(folder))
    suffixes = extensions()
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name
            if name.startswith("."):
                continue
            if entry.is_dir():
                if name != "__MACOSX":
                    listing.folders.append(name)
                continue
            listing.names.add(name)
            suffix = name[name.rfind(".") :].lower()
            if suffix in suffixes:
                listing.images[name] = _file(entry)
            elif suffix in PLUGINS or suffix in OTHER_FORMATS:
                listing.undecodable.append(name)
            elif suffix in (".npz", ".safetensors") and (cached := CACHED_SIZE.fullmatch(name)):
                _remember(listing, cached, _file(entry).modified)
    stems = {os.path.splitext(name)[0] for name in listing.images}
    for stem in stems:
        if stem.endswith(FILE_LABELS) and stem[: -len(MASK_LABEL)] in stems:
            listing.labels |= {
                name: listing.images.pop(name) for name in [*listing.images] if name.startswith(f"{stem}.")
            }
    listing.images = dict(sorted(listing.images.items()))
    listing.stems = {os.path.splitext(name)[0] for name in listing.images}
    listing.folders.sort()
    listing.undecodable.sort()
    return listing


def _plain_form(name: str) -> str:
    stem, suffix = os.path.splitext(name)
    return (stem if stem.isascii() else unicodedata.normalize("NFC", stem)) + suffix.lower()


def looked_into(folder: str | Path) -> Listing:
    """List a folder, or set `unreadable`: some folders of a drive are closed even to its owner."""
    try:
        return list_folder(folder)
    except OSError as e:
        return Listing(os.fspath(folder), unreadable=e.strerror or str(e))


def _file(entry: os.DirEntry[str]) -> File:
    try:
        status = entry.stat()
    except OSError:
        return File(0, 0, 0)
    if not stat.S_ISREG(status.st_mode):  # a pipe or a device, which would be waited for
        return File(0, 0, 0)
    return File(status.st_mtime_ns, max(status.st_mtime_ns, status.st_ctime_ns), status.st_size)


def _remember(listing: Listing, cached: re.Match, modified: int) -> None:
    stem, width, height, turned = cached.groups()
    key = stem, bool(turned)
    if key not in listing.sizes or listing.sizes[key][1] < modified:
        listing.sizes[key] = ((int(width), int(height)), modified)


def concept(folder: Path) -> Concept | None:
    """Parse a folder's name as <repeats>_<words>; None when it is not one.

    Repeats are whatever Python reads as a whole number, as in sd-scripts, so digits of any width.
    """
    repeats, _, words = folder.name.partition("_")
    words = words.encode("utf-8", "replace").decode()  # they are captions, and tokenizers take nothing but UTF-8
    try:
        count = int(repeats)
    except ValueError:
        return None
    return Concept(folder, count, words) if count >= 0 else None


def concepts(parent: Path) -> list[Concept]:
    entries = (concept(parent / name) for name in looked_into(parent).folders)
    return [entry for entry in entries if entry is not None and entry.repeats > 0]


def has_flat_images(parent: Path) -> bool:
    """Return whether the training images are directly in this folder, as in other trainers.

    Folders named <repeats>_<words> take precedence: with them, or in one that is named so, sd-scripts' rule holds.
    """
    parent_concept = concept(parent.absolute())
    if parent_concept is not None and parent_concept.repeats < MANY_REPEATS:
        return False
    listing = looked_into(parent)
    inner = (concept(parent / name) for name in listing.folders)
    return bool(listing.images) and not any(entry.repeats for entry in inner if entry)


def folders_to_train(parent: Path, repeats: int) -> list[Concept]:
    return [Concept(parent, repeats, "")] if has_flat_images(parent) else concepts(parent)


def some(names: Sequence[Any], max_names: int = 5) -> MessageLike:
    """Return the first names for a message: a, b, c and 7 more."""
    shown = ", ".join(one_line(name) for name in names[:max_names])
    more = len(names) - max_names
    return Message("{shown} and {more} more", shown=shown, more=more) if more > 0 else shown


def some_files(paths: Sequence[str], details: Mapping[str, str] = {}, max_names: int = 5) -> MessageLike:
    """Return the first files for a message, with the folder that holds all of them named once: a.png, b.png in /cats.
    `details` are put behind the names of some.
    """
    folder = _shared_folder(paths) if len(paths) > 1 else ""
    names = [(os.path.relpath(path, folder) if folder else path) + details.get(path, "") for path in paths[:max_names]]
    shown = some([*names, *paths[max_names:]], max_names)
    return Message("{names} in {folder}", names=shown, folder=folder) if folder else shown


def _shared_folder(paths: Iterable[str]) -> str:
    try:
        folder = os.path.commonpath({os.path.dirname(path) for path in paths})
    except ValueError:  # on several disks, or whole and relative paths
        return ""
    return "" if folder == os.path.dirname(folder) else folder


def about_images(template: str, **facts: Any) -> Problem:
    details: dict[str, Any] = {"topic": "images", **facts}
    return Problem("", template, **details)


def cap_problems(problems: list[Problem]) -> Iterator[Problem]:
    """Yield the first MAX_MESSAGES_PER_KIND problems of one kind, then the number of the others."""
    yield from problems[:MAX_MESSAGES_PER_KIND]
    if len(problems) > MAX_MESSAGES_PER_KIND:
        yield about_images("and {count} more like these", count=len(problems) - MAX_MESSAGES_PER_KIND)


def capped_by_kind(problems: Iterable[Problem]) -> Iterator[Problem]:
    """`capped` for problems of several kinds; each problem once."""
    kinds: dict[str, list[Problem]] = {}
    for problem in dict.fromkeys(problems):
        kinds.setdefault(problem.template, []).append(problem)
    for alike in kinds.values():
        yield from cap_problems(alike)
