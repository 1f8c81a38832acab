"""List the folders of a data set in one pass over each; no file is opened."""

import os
import re
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from library.config.problems import SURROGATES, Message, MessageLike, Problem, counted
from library.data.pixels import ALWAYS, PLUGINS, extensions

# Formats that sd-scripts does not read either: a warning names these files.
OTHER_FORMATS = {".gif", ".tif", ".tiff", ".heic", ".heif", ".jfif"}
UPRIGHT = "_upright"  # in names of caches of images that are turned by their EXIF orientation
CACHED_SIZE = re.compile(rf"(.+)_(\d{{2,}})x(\d{{2,}})({UPRIGHT})?_\w+\.(?:npz|safetensors)")
FILE_LABELS = MASK_LABEL, CONDITION_LABEL = ("-masklabel", "-condlabel")  # of equal length
MAX_MESSAGES_PER_KIND = 20  # messages of one kind; the rest is counted
USUAL_REPEATS = 10  # of a folder whose name has none, as in guides for sd-scripts
MOST_REPEATS = 100_000  # as in a data set file
MANY_REPEATS = 500  # a folder called 2024_holiday is a year, not a number of repeats
DEEPEST, MOST_FOLDERS = 6, 2000  # how far down, and in how many folders, misplaced images are looked for


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
        """A file's name as it is written in this folder, or "".

        Composed and decomposed letters (of macOS) are the same, and so are upper and lower case in the extension.
        """
        if name in self.names:
            return name
        if not self.alike:
            self.alike = {_plain_form(one): one for one in sorted(self.names, reverse=True)}
        return self.alike.get(_plain_form(name), "")

    def image_named(self, stem: str) -> str:
        """The name of the image with this stem, in any format that is read and in any case of its extension, or ""."""
        suffixes = (*ALWAYS, *sorted(extensions().difference(ALWAYS)))
        return next((name for suffix in suffixes if (name := self.find(stem + suffix)) in self.images), "")

    def known_size(self, name: str, turned: bool = False) -> tuple[int, int] | None:
        """(width, height) of an image whose latents were cached after its last change; `turned`: by its EXIF
        orientation."""
        size = self.sizes.get((os.path.splitext(name)[0], turned)) if self.sizes else None
        if size is None or (name in self.images and size[1] < self.images[name].changed):
            return None
        return size[0]

    def path(self, name: str) -> str:
        """The path of a file in this folder."""
        return f"{self.folder}{os.sep}{name}"


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
    known = extensions()
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
            if suffix in known:
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
        about = entry.stat()
    except OSError:
        return File(0, 0, 0)
    if not stat.S_ISREG(about.st_mode):  # a pipe or a device, which would be waited for
        return File(0, 0, 0)
    return File(about.st_mtime_ns, max(about.st_mtime_ns, about.st_ctime_ns), about.st_size)


def _remember(listing: Listing, cached: re.Match, modified: int) -> None:
    stem, width, height, turned = cached.groups()
    key = stem, bool(turned)
    if key not in listing.sizes or listing.sizes[key][1] < modified:
        listing.sizes[key] = ((int(width), int(height)), modified)


def concept(folder: Path) -> Concept | None:
    """Parse a folder's name as <repeats>_<words>; None when it is not one."""
    repeats, _, words = folder.name.partition("_")
    words = words.encode("utf-8", "replace").decode()  # they are captions, and tokenizers take nothing but UTF-8
    return Concept(folder, int(repeats), words) if repeats.isascii() and repeats.isdigit() else None


def concepts(parent: Path) -> list[Concept]:
    """The folders named <repeats>_<words> directly inside `parent`, by name; those with 0 repeats are left out."""
    found = (concept(parent / name) for name in looked_into(parent).folders)
    return [one for one in found if one is not None and one.repeats > 0]


def has_flat_images(parent: Path) -> bool:
    """Whether the training images are directly in this folder, as in other trainers.

    Folders named <repeats>_<words> take precedence: with them, or in one that is named so, sd-scripts' rule holds.
    """
    own = concept(parent.absolute())
    if own is not None and own.repeats < MANY_REPEATS:
        return False
    here = looked_into(parent)
    inner = (concept(parent / name) for name in here.folders)
    return bool(here.images) and not any(one.repeats for one in inner if one)


def trained(parent: Path, repeats: int) -> list[Concept]:
    """The folders of a training's images: those inside `parent`, or `parent` itself with these repeats."""
    return [Concept(parent, repeats, "")] if has_flat_images(parent) else concepts(parent)


def about_labels(here: Listing, is_masked: bool) -> Iterator[Problem]:
    """What becomes of OneTrainer's masks and conditioning images, which are no training images."""
    masks = sorted(name for name in here.labels if MASK_LABEL in name)
    if masks and not is_masked:
        yield about_images(
            "{folder}: masks of OneTrainer, which are not trained on: {names}; set masked_loss to use them as masks",
            folder=here.folder, names=some(masks), fix={"masked_loss": True})  # fmt: skip
    if others := sorted(name for name in here.labels if MASK_LABEL not in name):
        yield about_images("{folder}: conditioning images of OneTrainer, which are not used: {names}",
            folder=here.folder, names=some(others))  # fmt: skip


def same_place(one: str | Path, other: str | Path) -> bool:
    """Whether two paths lead to the same file or folder."""
    return real_place(one) == real_place(other)


def real_place(path: str | Path) -> str:
    """Where a path leads, the same for all ways to write it."""
    return os.path.normcase(os.path.realpath(path))


def _too_often(option: str, one: Concept) -> Problem:
    facts = {"folder": one.folder, "repeats": f"{one.repeats:,}", "words": one.words}
    template = ": {folder} asks for {repeats} repeats, which is no training; rename it to 1_{words}"
    return Problem(option, template, **facts)


def _unusable_folder(option: str, parent: Path) -> Problem | None:
    if SURROGATES.search(str(parent)):
        return Problem(option, ": {parent} is no name in UTF-8, which a config needs; rename the folder", parent=parent)
    if not parent.exists():
        return Problem(option, ": {parent} does not exist", parent=parent)
    if not parent.is_dir():
        return Problem(option, ": {parent} is a file; give the folder that holds your images", parent=parent)
    if why := looked_into(parent).unreadable:
        return Problem(option, ": {path} cannot be read: {why}", path=parent, why=why)
    return None


def problems_of_parent(option: str, parent: str | Path) -> Iterator[Problem]:
    """Why a folder cannot be used as the images of a training, and the fix."""
    parent = Path(parent)
    if why_not := _unusable_folder(option, parent):
        yield why_not
        return
    found = concepts(parent)
    yield from (_too_often(option, one) for one in found if one.repeats > MOST_REPEATS)
    if found or has_flat_images(parent):
        return
    here = looked_into(parent)
    with_images = [name for name in here.folders if looked_into(parent / name).images]
    if here.images:
        yield Problem(option, ": {parent} holds the images themselves; give the folder above it: {above}",
            parent=parent, above=parent.absolute().parent, fix={option: str(parent.absolute().parent)})  # fmt: skip
    elif with_images and (idle := [name for name in with_images if concept(parent / name)]):
        yield Problem(option,
            ": {parent} has 0 repeats, and there is no other folder; rename it to begin with 1_",
            parent=parent / idle[0])  # fmt: skip
    elif len(with_images) == 1:
        name = with_images[0]
        yield Problem(option,
            ": no folder in {parent} is named <repeats>_<words>; rename '{name}' to '1_{name}', "
            "or give that folder: {folder}", parent=parent, name=name, folder=(parent / name).absolute(),
            fix={option: str((parent / name).absolute())})  # fmt: skip
    elif with_images:
        name = with_images[0]
        yield Problem(option,
            ": no folder in {parent} is named <repeats>_<words>; rename '{name}' to '1_{name}' "
            "and so on, or give one of them", parent=parent, name=name)  # fmt: skip
    elif here.undecodable:
        yield Problem(option,
            ": {undecodable} in {parent} are in formats that are not read here; convert them to PNG or WebP",
            undecodable=some(here.undecodable), parent=parent)  # fmt: skip
    elif deeper := next(_with_images(parent), None):
        yield Problem(option,
            ": {parent} holds images only further down, and folders inside folders are not read; "
            "give the folder that holds them: {folder}", parent=parent, folder=deeper.absolute(),
            fix={option: str(deeper.absolute())})  # fmt: skip
    elif here.folders:
        yield Problem(option, ": neither {parent} nor a folder in it holds images (png, jpg, webp, bmp)", parent=parent)
    else:
        yield Problem(
            option, ": {parent} is empty; it should hold images, or folders named 10_words with images", parent=parent
        )


def _with_images(parent: Path) -> Iterator[Path]:
    """Folders below `parent` that hold images, the nearest first; links are not followed."""
    level, looked = [parent], 0
    for _ in range(DEEPEST):
        below = [folder / name for folder in level for name in looked_into(folder).folders]
        level = [folder for folder in below if not folder.is_symlink()][: MOST_FOLDERS - looked]
        looked += len(level)
        yield from (folder for folder in level if looked_into(folder).images)


def warnings_of_parent(option: str, parent: Path, repeats: int = 1) -> Iterator[Problem]:
    """What in a folder of images is not used, or likely a mistake; `repeats` are those of a flat folder."""
    here, flat = looked_into(parent), has_flat_images(parent)
    skipped = [name for name in here.folders if concept(parent / name) is None and looked_into(parent / name).images]
    if skipped and not flat:
        yield Problem(option,
            ": images in {skipped} are not used, since the names do not start with a number of "
            "repeats; rename them like '1_{first}' to use them", skipped=some(skipped), first=skipped[0])  # fmt: skip
    count = counted(len(here.images), "image")
    if flat and option == "train_data_dir" and repeats > 1:
        yield Problem(option, ": {count} directly in {parent}, each seen {repeats} times per epoch",
            count=count, parent=parent, repeats=repeats)  # fmt: skip
    elif flat and option == "train_data_dir":
        yield Problem(option,
            ": {count} directly in {parent}, each seen once per epoch; set dataset_repeats to see them more often",
            count=count, parent=parent, fix={"dataset_repeats": USUAL_REPEATS})  # fmt: skip
    elif here.images and not flat:
        yield Problem(option,
            ": images directly in {parent} are not used ({count}); move them one folder deeper",
            parent=parent, count=len(here.images))  # fmt: skip
    for folder_name in map(concept, (parent / name for name in here.folders)):
        if folder_name and folder_name.repeats == 0:
            yield about_images("{folder} has 0 repeats and is not used", folder=folder_name.folder)
        elif folder_name and folder_name.repeats >= MANY_REPEATS:
            yield about_images(
                "{folder} is read as {repeats} repeats of '{words}'; rename it if not meant so",
                folder=folder_name.folder, repeats=folder_name.repeats, words=folder_name.words)  # fmt: skip


def why_empty(folder: Path, here: Listing, list_folder: Callable[[Path], Listing]) -> Problem:
    """Why a folder of images holds none."""
    if here.unreadable:
        return about_images("{path} cannot be read: {why}", path=folder, why=here.unreadable)
    if here.undecodable:
        template = "image folder {folder}: {files} are in formats that are not read here; convert them to PNG or WebP"
        return about_images(template, folder=folder, files=some(here.undecodable))
    deeper = [name for name in here.folders if list_folder(folder / name).images]
    if deeper:
        template = "image folder {folder} holds no images, but its folder {inner} does; name that one"
        return about_images(template, folder=folder, inner=folder / deeper[0])
    return about_images("image folder {folder} holds no images (png, jpg, webp, bmp)", folder=folder)


def some(names: Sequence[Any], most: int = 5) -> MessageLike:
    """The first names for a message: a, b, c and 7 more."""
    shown = ", ".join(str(name) for name in names[:most])
    more = len(names) - most
    return Message("{shown} and {more} more", shown=shown, more=more) if more > 0 else shown


def about_images(template: str, **facts: Any) -> Problem:
    """A problem of images or captions that belongs to no option."""
    given: dict[str, Any] = {"topic": "images", **facts}
    return Problem("", template, **given)


def capped(problems: list[Problem]) -> Iterator[Problem]:
    """The first SHOWN problems of one kind, then the number of the others."""
    yield from problems[:MAX_MESSAGES_PER_KIND]
    if len(problems) > MAX_MESSAGES_PER_KIND:
        yield about_images("and {count} more like these", count=len(problems) - MAX_MESSAGES_PER_KIND)


def capped_by_kind(problems: Iterable[Problem]) -> Iterator[Problem]:
    """`capped` for problems of several kinds; each problem once."""
    kinds: dict[str, list[Problem]] = {}
    for problem in dict.fromkeys(problems):
        kinds.setdefault(problem.template, []).append(problem)
    for alike in kinds.values():
        yield from capped(alike)
