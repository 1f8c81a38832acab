"""Caption images in batches and write the files. Changes can be undone (library.curation.trash)."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from PIL import Image

from library.config.problems import ConfigError, Message, Report, counted, option_name, require_choice
from library.curation import thumbs, trash
from library.curation.tags import split_tags, tag_key
from library.data import folders
from library.data.caption_files import read_caption
from library.data.orientation import upright

SKIP, ADD, REPLACE = EXISTING = ("skip", "add", "replace")
Shown = Callable[[Path, str], object]


class Captioner(Protocol):
    """A model that captions images."""

    name: str
    batch_size: int
    makes_tags: bool  # separated by commas, instead of sentences

    def __call__(self, pictures: list[Image.Image]) -> list[str]: ...  # a caption for each of these RGB images


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
                "{name} is {extension}: it begins with a dot, such as .txt",
                name=option_name("extension"),
                extension=repr(self.extension),
            )
        require_choice(option_name("existing"), self.existing, EXISTING)

    def words(self, generated: str, old: str, is_tags: bool = True) -> str:
        """Return the new text of a caption file, from a generated and the existing caption.

        With `add`, the first line, which is the one that is trained, is extended by what it lacks: tags one by one, a
        sentence as a whole.
        """
        parts = [part.strip(" ,") for part in (self.prefix, generated, self.suffix)]
        if self.existing != ADD or not old.strip():
            return ", ".join(filter(None, parts))
        lines = old.splitlines(keepends=True)
        index = next(number for number, line in enumerate(lines) if line.strip())
        line_text = lines[index].rstrip()
        present = set(map(tag_key, split_tags(line_text)))
        additions: list[str] = []
        for part in parts:
            if part is parts[1] and not is_tags:
                additions += [part] if part and tag_key(part) not in tag_key(line_text) else []
            else:
                additions += [tag for tag in split_tags(part) if tag_key(tag) not in present]
        if additions:
            first = line_text.rstrip(" ,")
            lines[index] = (
                first
                + (" " if first.endswith((".", "!", "?")) else ", ")
                + ", ".join(additions)
                + lines[index][len(line_text) :]
            )
        return "".join(lines)


@dataclass
class Written:
    """The result of captioning a folder."""

    written: int = 0
    skipped: int = 0
    unreadable: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # caption files that are not text, left unchanged


class ToDo(NamedTuple):
    """The images to caption, with their caption files, how many are skipped, and caption files that are not text."""

    files: list[tuple[Path, Path]]
    skipped: int
    foreign: list[str]


def list_images_to_caption(folder: Path, choices: CaptioningOptions) -> ToDo:
    """List what there is to caption in a folder and its sub-folders.

    Raises ConfigError when there are no images.
    """
    if not folder.is_dir():
        raise ConfigError("{folder} is not a folder", folder=folder)
    files = [
        (Path(listing.path(name)), Path(listing.path(listing.find(caption_name) or caption_name)))
        for listing in listings(folder, choices.depth)
        for name in listing.images
        if (caption_name := os.path.splitext(name)[0] + choices.extension)
    ]
    if not files and choices.depth == 0:
        raise ConfigError(
            "there are no images in {folder}; --recursive takes those in the folders inside it, too", folder=folder
        )
    if not files:
        raise ConfigError("there are no images in {folder}, nor in the folders inside it", folder=folder)
    if choices.existing == REPLACE:
        return ToDo(files, 0, [])
    texts = {file: _read_caption(file) for _, file in files}
    foreign = [file.name for file, text in texts.items() if text is None]
    to_caption = [
        (image, file)
        for image, file in files
        if (text := texts[file]) is not None and (choices.existing == ADD or not text.strip())
    ]
    return ToDo(to_caption, len(files) - len(to_caption) - len(foreign), foreign)


def write_captions(
    folder: Path,
    captioner: Captioner,
    choices: CaptioningOptions,
    report: Report,
    shown: Shown = lambda file, text: None,
) -> Written:
    """Caption a folder, and call `shown` with each file and its caption. After an interruption the written captions are
    kept, and can be undone as one change."""
    files, skipped, foreign = list_images_to_caption(folder, choices)
    done = Written(skipped=skipped, foreign=foreign)
    with trash.Change(folder, f"Captions by {captioner.name}", keep=True) as change:
        finished = 0
        report(Message("captioning"), 0, len(files))
        for batch in _image_batches(files, captioner.batch_size, done.unreadable):
            finished += len(batch)
            pictures = [(file, picture) for file, picture in batch if picture is not None]
            if pictures:
                captions = captioner([picture for _, picture in pictures])
                texts = {
                    file: choices.words(text, _read_caption(file) or "", captioner.makes_tags)
                    for (file, _), text in zip(pictures, captions, strict=True)
                }
                done.written += change.write({file: text for file, text in texts.items() if text})
                for file, text in texts.items():
                    shown(file, text)
            report(Message("captioning"), finished, len(files))
    return done


def summarise_captioning(folder: Path, done: Written) -> str:
    """Return the result in words."""
    lines = [f"{folder}: {counted(done.written, 'caption')} written"]
    if done.skipped:
        lines.append(
            f"{counted(done.skipped, 'image')} had words already and {'was' if done.skipped == 1 else 'were'} left"
        )
    if done.foreign:
        lines.append(describe_foreign_captions(done.foreign))
    if done.unreadable:
        lines.append(f"{counted(len(done.unreadable), 'image')} cannot be read: {folders.some(done.unreadable)}")
    return "\n".join(lines)


def describe_foreign_captions(foreign: Sequence[str]) -> str:
    """Return a sentence about caption files that are not text."""
    return (
        f"{counted(len(foreign), 'caption')} left, since not text in UTF-8: save with that encoding, or choose to "
        f"replace captions: {folders.some(foreign)}"
    )


def listings(folder: Path, depth: int | None) -> Iterator[folders.Listing]:
    """List a folder and its sub-folders, down to `depth` levels (None: all); links to folders are not followed."""
    listing = folders.list_folder(folder)
    yield listing
    for name in listing.folders if depth != 0 else ():
        if not os.path.islink(folder / name):
            yield from listings(folder / name, depth and depth - 1)  # None stays None


def _image_batches(
    files: Sequence[tuple[Path, Path]], size: int, unreadable: list[str]
) -> Iterator[list[tuple[Path, Image.Image | None]]]:
    for start in range(0, len(files), size):
        yield [(file, rgb(image, unreadable)) for image, file in files[start : start + size]]


def rgb(path: Path, unreadable: list[str]) -> Image.Image | None:
    """Return an image as people see it: upright by its EXIF orientation, and on white where transparent. A damaged one
    is added to `unreadable`, and None returned."""
    try:
        with thumbs.open_image(path) as stored:
            image = upright(stored)
            if "A" not in image.getbands() and "transparency" not in image.info:
                return image.convert("RGB")
            rgba = image.convert("RGBA")
            return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    except Exception:  # decoders' exceptions have no common class
        unreadable.append(path.name)
        return None


def _read_caption(file: Path) -> str | None:
    """Return the text of a caption file, "" if it is missing; None if it is no text."""
    try:
        return read_caption(file)
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeError, ConfigError):
        return None
