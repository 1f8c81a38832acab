"""Caption images in batches and write the files. Changes can be undone (library.curation.trash)."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from PIL import Image

from library.config.problems import ConfigError, Report, Text, counted
from library.curation import thumbs, trash
from library.curation.tags import split
from library.data import folders
from library.data.orientation import upright

SKIP, ADD, REPLACE = EXISTING = ("skip", "add", "replace")
Shown = Callable[[Path, str], object]


class Captioner(Protocol):
    """A model that captions images."""

    name: str
    batch_size: int

    def __call__(self, pictures: list[Image.Image]) -> list[str]:
        """A caption for each of these RGB images."""
        ...


@dataclass(frozen=True)
class CaptioningOptions:
    """How captions are written."""

    extension: str = ".txt"
    existing: str = SKIP  # how images that have a caption are treated
    prefix: str = ""
    suffix: str = ""
    depth: int | None = 1  # folders inside the folder: 0 none, 1 those directly in it, None all

    def __post_init__(self) -> None:
        if not self.extension.startswith(".") or not self.extension[1:].isalnum():
            raise ConfigError(
                "extension is {extension}: it begins with a dot, such as .txt", extension=repr(self.extension)
            )
        if self.existing not in EXISTING:
            raise ConfigError(
                "existing is {existing}: use {known}", existing=repr(self.existing), known=", ".join(EXISTING)
            )

    def words(self, made: str, old: str) -> str:
        """The new text of a caption file, from a generated and the existing caption."""
        wanted = ", ".join(part.strip(" ,") for part in (self.prefix, made, self.suffix) if part.strip(" ,"))
        if self.existing != ADD or not old.strip():
            return wanted
        there = {tag.casefold() for tag in split(old)}
        return ", ".join([old.strip(), *(tag for tag in split(wanted) if tag.casefold() not in there)])


@dataclass
class Written:
    """The result of captioning a folder."""

    written: int = 0
    skipped: int = 0
    unreadable: list[str] = field(default_factory=list)


def to_do(folder: Path, choices: CaptioningOptions) -> tuple[list[tuple[Path, Path]], int]:
    """The images of a folder and its sub-folders, with their caption files, and how many are skipped.

    Raises ConfigError when there are no images.
    """
    if not folder.is_dir():
        raise ConfigError("{folder} is no folder", folder=folder)
    found = [
        (Path(listing.path(name)), Path(listing.path(os.path.splitext(name)[0] + choices.extension)))
        for listing in listings(folder, choices.depth)
        for name in listing.images
    ]
    if not found and choices.depth == 0:
        raise ConfigError("there are no images in {folder}; --recursive takes those in the folders inside it, too",
            folder=folder)  # fmt: skip
    if not found:
        raise ConfigError("there are no images in {folder}, nor in the folders inside it", folder=folder)
    wanted = found if choices.existing != SKIP else [(image, file) for image, file in found if not _read(file)]
    return wanted, len(found) - len(wanted)


def caption(
    folder: Path,
    captioner: Captioner,
    choices: CaptioningOptions,
    report: Report,
    shown: Shown = lambda file, text: None,
) -> Written:
    """Caption a folder; `shown` is called with each file and its caption. After an interruption the written captions
    are kept, and can be undone as one change."""
    wanted, skipped = to_do(folder, choices)
    done = Written(skipped=skipped)
    with trash.Change(folder, f"Captions by {captioner.name}", keep=True) as change:
        at = 0
        report(Text("captioning"), 0, len(wanted))
        for batch in _batches(wanted, captioner.batch_size, done.unreadable):
            at += len(batch)
            pictures = [(file, picture) for file, picture in batch if picture is not None]
            if pictures:
                made = captioner([picture for _, picture in pictures])
                texts = {file: choices.words(text, _read(file)) for (file, _), text in zip(pictures, made, strict=True)}
                done.written += change.write({file: text for file, text in texts.items() if text})
                for file, text in texts.items():
                    shown(file, text)
            report(Text("captioning"), at, len(wanted))
    return done


def summary(folder: Path, done: Written) -> str:
    """The result as a sentence."""
    lines = [f"{folder}: {counted(done.written, 'caption')} written"]
    if done.skipped:
        lines.append(
            f"{counted(done.skipped, 'image')} had words already and {'was' if done.skipped == 1 else 'were'} left"
        )
    if done.unreadable:
        lines.append(f"{counted(len(done.unreadable), 'image')} cannot be read: {folders.some(done.unreadable)}")
    return "\n".join(lines)


def listings(folder: Path, depth: int | None) -> Iterator[folders.Listing]:
    """The folder and its sub-folders, down to `depth` levels; links to folders are not followed."""
    here = folders.listing(folder)
    yield here
    for name in here.folders if depth != 0 else ():
        if not os.path.islink(folder / name):
            yield from listings(folder / name, depth and depth - 1)


def _batches(
    wanted: Sequence[tuple[Path, Path]], size: int, unreadable: list[str]
) -> Iterator[list[tuple[Path, Image.Image | None]]]:
    for start in range(0, len(wanted), size):
        yield [(file, rgb(image, unreadable)) for image, file in wanted[start : start + size]]


def rgb(path: Path, unreadable: list[str]) -> Image.Image | None:
    """An image as people see it: upright by its EXIF orientation, and on white where transparent; None, and listed in
    `unreadable`, when damaged."""
    try:
        with thumbs.opened(path) as stored:
            image = upright(stored)
            if "A" not in image.getbands() and "transparency" not in image.info:
                return image.convert("RGB")
            shown = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", shown.size, "white"), shown).convert("RGB")
    except Exception:  # decoders' exceptions have no common class
        unreadable.append(path.name)
        return None


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig", "replace").strip()
    except OSError:
        return ""
