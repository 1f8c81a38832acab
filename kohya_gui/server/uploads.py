"""Uploads of images and captions into a folder inside the roots: in pieces, and resumable.

A browser sends the names and lengths of its files, and gets for each the offset to send from. An unfinished file has a
hidden name; it gets its own name once it is complete and verified. An existing file is not sent again, and none is
overwritten.
"""

import hashlib
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kohya_gui.server import paths
from kohya_gui.server.json_api import NOT_OF_THE_PAGE, ApiRequest, Handler, PieceHandler
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.curation import incoming_files
from library.files import clear_errors, need_space

MAX_FILES, MAX_UNFINISHED = 2000, 20_000  # files in a request, and unfinished uploads
PART = re.compile(r"\.[0-9a-f]{24}\.part")
KEEP_SECONDS = 7 * 86400.0  # seconds that unfinished files are kept
MAX_ALIKE = 4  # unfinished files of the same name and length in a folder


@dataclass
class Upload:
    """An unfinished upload."""

    part: Path  # the bytes received so far
    name: str  # its final name
    num_bytes: int
    busy: threading.Lock = field(default_factory=threading.Lock)


class ImageUploads:
    """Unfinished uploads, by the paths of their partial files."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.known: dict[str, Upload] = {}
        self.busy = threading.Lock()

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {"upload": self.begin, "upload_folder": self.suggest}

    @property
    def piece_handlers(self) -> dict[str, PieceHandler]:
        """Handlers of pieces of files."""
        return {"upload": self.take}

    def suggest(self, sent: ApiRequest) -> JsonObject:
        """Suggest a folder for new images that does not exist yet."""
        home = next((root for root in self.roots if root.is_dir()), self.roots[0])
        named = incoming_files.safe_name(f"{sent.text('name') or 'images'}.png").removesuffix(".png")
        above = paths.inside(str(home / "kohya" / "images"), self.roots, "folder")
        return {
            "folder": next(str(above / one) for one in incoming_files.numbered(named) if not (above / one).exists())
        }

    def begin(self, sent: ApiRequest) -> JsonObject:
        """What to do with each file: send it from an offset, send its checksum first, or nothing.

        A file is {name, size, modified, sums}; `sums` are CRC-32 of its first so many bytes, which the browser computes
        on request ("check"), and by which the server recognises a file that it has, wholly or in part.
        """
        folder = paths.inside(sent.text("folder"), self.roots, "folder", is_new=True)
        files = sent.fields.get("files")
        if not isinstance(files, list) or len(files) > MAX_FILES or not all(map(_is_file, files)):
            raise ConfigError(NOT_OF_THE_PAGE)
        try:
            with clear_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                there = {name.lower(): name for name in os.listdir(folder)}
        except OSError as error:  # such as characters that Windows does not allow in names
            raise ConfigError("{folder} cannot be used: {why}", folder=folder, why=error.strerror or error) from None
        _clear_old(folder, there)
        names = [incoming_files.safe_name(one["name"]) for one in files]
        said = [_of_existing(folder, there, name, one) for name, one in zip(names, files, strict=True)]
        with self.busy:
            wanted = [at for at, answer in enumerate(said) if not answer]
            need_space(folder, sum(files[at]["size"] for at in wanted))
            parts = {at: self._part(folder, names[at], files[at]) for at in wanted}
            going = {part.name for part, _ in parts.values()}
            on_way = {
                one.name.lower()
                for key, one in self.known.items()
                if one.part.parent == folder and one.part.name not in going
            }
            # Two of the same name in one request are two files: the second gets a number, as if the first existed.
            final = _final([names[at] for at in wanted], {*there, *on_way})
            for at, name in zip(wanted, final, strict=True):
                said[at] = self._wait_for(*parts[at], name, files[at])
        return {"folder": str(folder), "files": said}

    def _wait_for(self, part: Path, asked: int, name: str, one: JsonMapping) -> JsonObject:
        """Expect the pieces of a file, or request the checksum of the part that is here already."""
        if asked:
            return {"state": "check", "bytes": asked}
        upload = self.known.setdefault(part.name, Upload(part, name, one["size"]))
        while len(self.known) > MAX_UNFINISHED:  # a browser that sends a forgotten one has to ask again
            del self.known[next(iter(self.known))]
        return {"state": "send", "id": part.name, "offset": _length(part), "name": upload.name}

    def _part(self, folder: Path, name: str, one: JsonMapping) -> tuple[Path, int]:
        """The partial file of an upload, and how many of its bytes have to be compared first."""
        said = f"{folder}|{name}|{one['size']}|{one['modified']}"
        for number in range(MAX_ALIKE):
            key = hashlib.blake2b(f"{said}|{number}".encode(), digest_size=12).hexdigest()
            part = folder / f".{key}.part"
            if part.is_symlink():
                continue
            length = _length(part)
            if not length:
                return part, 0
            if (given := one["sums"].get(str(length))) is None:
                return part, length
            if length <= one["size"] and given == incoming_files.checksum(part, length):
                return part, 0
        raise ConfigError("{name}: other files of this name are being sent; try again later", name=name)

    def take(self, query: Mapping[str, str], body: bytes) -> JsonObject:
        """Append a piece to a file; the last one comes with the CRC-32 of the whole file (`sum`).

        A piece that does not fit there changes nothing, and the browser sends a new request.
        """
        upload = self.known.get(query.get("id", ""))
        if upload is None:
            return {"again": True}
        with upload.busy:
            begin = _length(upload.part)
            if query.get("offset") != str(begin) or begin + len(body) > upload.num_bytes:
                return {"again": True}
            try:
                with clear_errors(upload.part), open(upload.part, "ab") as file:
                    file.write(body)
                    file.flush()
                    if begin + len(body) == upload.num_bytes:
                        os.fsync(file.fileno())
            except ConfigError:
                self._drop(upload)  # do not take up space on a full disk
                raise
            if begin + len(body) < upload.num_bytes:
                return {"offset": begin + len(body)}
            return self._finish(upload, query.get("sum", ""))

    def _finish(self, upload: Upload, expected: str) -> JsonObject:
        try:
            if str(incoming_files.checksum(upload.part, upload.num_bytes)) != expected:
                raise ConfigError("{name} was changed on its way: send it again", name=upload.name)
            incoming_files.check_content(upload.part, upload.name)
            paths.inside(str(upload.part.parent), self.roots, "folder")  # the folder may have been replaced since
            return {"done": incoming_files.put(upload.part, upload.part.parent, upload.name).name}
        finally:
            self._drop(upload)

    def _drop(self, upload: Upload) -> None:
        self.known.pop(upload.part.name, None)
        upload.part.unlink(missing_ok=True)


def _is_file(one: object) -> bool:
    if not isinstance(one, dict) or not {"name", "size", "modified", "sums"} <= one.keys():
        return False
    name, sums = one["name"], one["sums"]
    return (
        isinstance(name, str)
        and len(name) <= paths.MAX_PATH_LENGTH
        and all(isinstance(one[key], int) and 0 <= one[key] < 2**53 for key in ("size", "modified"))
        and isinstance(sums, dict)
        and all(isinstance(value, int) for value in sums.values())
    )


def _of_existing(folder: Path, there: Mapping[str, str], name: str, one: JsonMapping) -> JsonObject:
    """The reply for a file that need not be sent: it is refused, or exists already."""
    if why := incoming_files.refusal(name, one["size"]):
        return {"state": "refused", "name": name, "why": why}
    same = folder / there.get(name.lower(), name)
    if name.lower() not in there or same.is_symlink() or _length(same) != one["size"]:
        return {}
    if (given := one["sums"].get(str(one["size"]))) is None:
        return {"state": "check", "bytes": one["size"]}
    is_same = given == incoming_files.checksum(same, one["size"])
    return {"state": "there", "name": same.name} if is_same else {}


def _final(names: Sequence[str], taken: set[str]) -> list[str]:
    """The final names of files, in order; repeated names get a number."""
    found: list[str] = [""] * len(names)
    left = list(range(len(names)))
    while left:
        first: dict[str, int] = {}
        for at in left:
            first.setdefault(names[at].lower(), at)
        free = incoming_files.free_names([names[at] for at in first.values()], taken)
        for at in first.values():
            found[at] = free[names[at]]
        taken = taken | {one.lower() for one in free.values()}
        left = [at for at in left if not found[at]]
    return found


def _length(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _clear_old(folder: Path, there: Mapping[str, str]) -> None:
    for name in there.values():
        if PART.fullmatch(name) and time.time() - (folder / name).lstat().st_mtime > KEEP_SECONDS:
            (folder / name).unlink(missing_ok=True)
