"""Caption files: which one belongs to an image, its content, and files that only look like captions."""

import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from library.config.dataset import SubsetConfig
from library.config.outside_files import CAPTION, read_bytes
from library.config.outside_text import decode_text
from library.config.problems import Message, Problem, counted, ngettext
from library.config.sections.captions import UNREAD_CAPTIONS
from library.data.folders import Listing, about_images, some
from library.data.metadata import AUTOMATIC

CAPTION_SUFFIXES = (".txt", ".caption")
BARE_FOLDER = "bare_folder"  # the code of the remark about images of one folder
TEXTS = (*CAPTION_SUFFIXES, ".text", ".cap", ".tags", ".json", ".md")  # other programs write these beside images


class Missing(NamedTuple):
    """Remarks on images without captions; `whole_folder`: all captions have another extension."""

    whole_folder: Problem | None
    problems: list[Problem]


# The only reader of captions, so that trainings and editors see the same text.
def read_caption(path: str | Path) -> str:
    """Return the text of a caption file as written, with its line ends.

    Raises FileNotFoundError; ConfigError if it is no regular file, too long or not readable; UnicodeDecodeError if it
    is neither UTF-8 nor marked UTF-16.
    """
    os.stat(path)
    return decode_text(read_bytes(path, CAPTION))


def caption_file(listing: Listing, image: str, extension: str) -> str:
    """Return the caption file of an image, or "": with the same name, or the name without the numbers of a face."""
    stem = os.path.splitext(image)[0]
    parts = stem.split("_")
    names = [stem + extension] + (["_".join(parts[:-4]) + extension] if len(parts) >= 5 else [])
    return next((listing.path(name_in_folder) for name in names if (name_in_folder := listing.find(name))), "")


def odd_files(listing: Listing, images: Collection[str]) -> list[str]:
    """Return text files that seem to belong to these images but are not named like captions: a.png.txt,
    A.txt, a.json.
    """
    image_names = {_fold_name(name) for name in images} | {_fold_name(os.path.splitext(name)[0]) for name in images}
    parts = ((name, *os.path.splitext(name)) for name in listing.names)
    return sorted(name for name, stem, suffix in parts if suffix.lower() in TEXTS and _fold_name(stem) in image_names)


def about_odd_files(listing: Listing, files: Collection[str], extension: str) -> Iterator[Problem]:
    """Report that these files are not read as captions."""
    if files:
        yield about_images(
            "{folder}: not read as captions: {names}; to use them, save each as text with the name of its image and "
            "the ending {extension}",
            folder=listing.folder,
            names=some(sorted(files)),
            extension=extension,
            topic="captions",
        )


def about_missing(subset: SubsetConfig, listing: Listing, images: list[str], files: list[str]) -> Missing:
    """Report the images of a folder whose caption file, in the order of the images, is ""."""
    bare = [name for name, file in zip(images, files, strict=True) if not file]
    if not bare:
        return Missing(None, [])
    fallback = Message("trained without a caption")
    if subset.class_tokens:
        fallback = Message("trained with '{words}'", words=subset.class_tokens)
    ending = subset.caption_extension
    stems = {os.path.splitext(name)[0] for name in images}
    endings = Counter(os.path.splitext(name)[1] for name in listing.names if os.path.splitext(name)[0] in stems)
    other = next((e for e in (*CAPTION_SUFFIXES, ".TXT") if e != ending and endings[e]), None)
    if other and len(bare) == len(files):
        template = (
            "{folder}: {files} not used, since caption_extension is '{extension}'; "
            'set caption_extension = "{other}" to use them; now every image is {fallback}'
        )
        count = endings[other]
        files_there = ngettext("{count} {ending} file", "{count} {ending} files", count, ending=other)
        facts = {
            "folder": listing.folder,
            "files": files_there,
            "other": other,
            "extension": ending,
            "fallback": fallback,
        }
        fix = {"caption_extension": other}
        code = "" if subset.is_reg else UNREAD_CAPTIONS
        return Missing(about_images(template, topic="captions", fix=fix, code=code, **facts), [])
    remarks = list(about_odd_files(listing, odd_files(listing, bare), ending))
    remarks += [
        about_images(
            "{folder}: {name} is read only if in_json, or metadata_file in a dataset_config, names it",
            folder=listing.folder,
            name=name,
            topic="captions",
        )
        for name in AUTOMATIC
        if name in listing.names
    ]
    if len(bare) < len(files) or not subset.class_tokens:
        remarks.append(
            about_images(
                "{folder}: {count} without a {caption_extension} file, {fallback}: {bare}",
                folder=listing.folder,
                count=counted(len(bare), "image"),
                caption_extension=ending,
                fallback=fallback,
                bare=some(bare),
                topic="captions",
                code=BARE_FOLDER,
            )
        )
    return Missing(None, remarks)


def _fold_name(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()
