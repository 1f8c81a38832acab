"""Uploaded images and captions: names that are valid on every system, contents that match their names."""

import os
import re
import unicodedata
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from PIL import Image

from library.config.outside_files import open_regular
from library.config.outside_text import NO_TEXT
from library.config.problems import ConfigError, Message
from library.config.values import RESERVED
from library.data.caption_files import read_caption
from library.data.pixels import check_file, extensions
from library.files import clear_errors, remove, replace

CAPTION_SUFFIXES = (".txt", ".caption")
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "AVIF", "JXL")  # that may be decoded, whatever the extension
ARCHIVE_SUFFIXES = (".zip", ".7z", ".rar", ".tar", ".gz")
MAX_IMAGE_BYTES, MAX_CAPTION_BYTES = 256_000_000, 1_000_000  # bytes
MAX_PIXELS = 120_000_000
MAX_STEM_BYTES = 120  # bytes of a name: caches and temporary files append to it


def safe_name(sent: str) -> str:
    """Return an uploaded name in a form valid on every file system: without folders, special characters or devices."""
    stem, suffix = os.path.splitext(_plain(sent))
    return safe_stem(stem) + suffix.lower()


def safe_stem(sent: str) -> str:
    """Return the name of an uploaded folder, or of a file without its ending, as `safe_name`."""
    stem = _plain(sent).strip(" .").encode()[:MAX_STEM_BYTES].decode(errors="ignore").rstrip(" .") or "image"
    return ("_" if RESERVED.fullmatch(stem) else "") + stem


def _plain(sent: str) -> str:
    # Names from macOS may have decomposed letters (NFD), which other systems take for another name.
    last = re.split(r"[\\/]", unicodedata.normalize("NFC", sent))[-1]
    plain = "".join("_" if sign in '<>:"|?*' else sign for sign in last if unicodedata.category(sign)[0] != "C")
    return " ".join(plain.split())


def folder_names(sent: Sequence[str]) -> list[str]:
    """Return safe names of folders, all of them different on every system."""
    names: dict[str, str] = {}  # by the name in lower case
    for stem in map(safe_stem, sent):
        name = next(name for name in numbered_stems(stem) if name.lower() not in names)
        names[name.lower()] = name
    return [*names.values()]


def refuse_file(name: str, num_bytes: int) -> Message | None:
    """Return why a file of this name and length is rejected, or None."""
    suffix = os.path.splitext(name)[1]
    image_endings = sorted(extensions())
    if suffix in ARCHIVE_SUFFIXES:
        return Message("is an archive: unpack it, and send the images in it")
    if suffix not in image_endings and suffix not in CAPTION_SUFFIXES:
        return Message("is neither an image ({known}) nor a caption (.txt)", known=", ".join(image_endings))
    max_bytes = MAX_CAPTION_BYTES if suffix in CAPTION_SUFFIXES else MAX_IMAGE_BYTES
    if not 0 < num_bytes <= max_bytes:
        return (
            Message("is empty") if num_bytes <= 0 else Message("has more than {most} MB", most=max_bytes // 1_000_000)
        )
    return None


def check_content(path: Path, name: str) -> None:
    """Raise ConfigError unless the content of a file matches its name: an image that can be decoded safely, or text."""
    if os.path.splitext(name)[1] in CAPTION_SUFFIXES:
        try:
            text = read_caption(path)
        except UnicodeError:
            raise ConfigError(NO_TEXT, path=name) from None
        if any(unicodedata.category(sign) == "Cc" and sign not in "\t\r\n" for sign in text):
            raise ConfigError("{name} is not a caption: it holds control characters", name=name)
        return
    try:
        Image.init()  # fills Image.OPEN, which lists the decoders of this installation
        with Image.open(
            path, formats=[image_format for image_format in FORMATS if image_format in Image.OPEN]
        ) as image:
            pixels = image.width * image.height
    except Exception:  # decoders raise anything
        raise ConfigError("{name} is not an image that can be read", name=name) from None
    if pixels > MAX_PIXELS:
        raise ConfigError(
            "{name} has {pixels} megapixels: make it smaller, {most} are enough",
            name=name,
            pixels=pixels // 1_000_000,
            most=MAX_PIXELS // 1_000_000,
        )
    if why := check_file(str(path)):
        raise ConfigError("{name} is not an image that can be read: {why}", name=name, why=why)


def checksum(path: Path, num_bytes: int) -> int:
    """Return the CRC-32 of the first `num_bytes` bytes of a file, to tell files apart; not secure against forgery."""
    crc = 0
    with open_regular(path) as file:
        while num_bytes > 0 and (piece := file.read(min(num_bytes, 1 << 20))):
            crc, num_bytes = zlib.crc32(piece, crc), num_bytes - len(piece)
    return crc


def free_names(names: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Map names to unused names: cat.png and cat.txt stay a pair, and become cat_2.png and cat_2.txt.

    An image gets no name under which it would share another image's caption. `taken` is in lower case.
    """
    image_endings, used, new_names = extensions(), set(taken), {}
    pairs: dict[str, list[str]] = {}
    for name in names:
        pairs.setdefault(os.path.splitext(name)[0].lower(), []).append(name)
    for members in pairs.values():
        suffixes = [os.path.splitext(name)[1] for name in members]
        reserved = {*suffixes, *(image_endings if not image_endings.isdisjoint(suffixes) else ())}
        stems = numbered_stems(os.path.splitext(members[0])[0])
        stem = next(
            candidate for candidate in stems if used.isdisjoint(f"{candidate}{suffix}".lower() for suffix in reserved)
        )
        used |= {f"{stem}{suffix}".lower() for suffix in suffixes}
        new_names |= {name: stem + suffix for name, suffix in zip(members, suffixes, strict=True)}
    return new_names


def numbered_stems(stem: str) -> Iterator[str]:
    """Yield a stem, then the stem with the suffixes 2, 3, ..."""
    yield stem
    for number in range(2, 1_000_000):
        yield f"{stem}_{number}"


def put(source: Path, folder: Path, name: str) -> Path:
    """Move a complete file to its name in a folder, or to a numbered name if that has been taken meanwhile.

    Nothing is overwritten: the system creates the name atomically, and refuses an existing one.
    """
    stem, suffix = os.path.splitext(name)
    for candidate in numbered_stems(stem):
        path = folder / f"{candidate}{suffix}"
        with clear_errors(path):
            if _takes_name(source, path):
                return path
    raise ConfigError("{name}: no name is free in {folder}", name=name, folder=folder)


def _takes_name(source: Path, path: Path) -> bool:
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links: an empty file reserves the name
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        replace(source, path)
        return True
    remove(source)
    return True
