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
from library.config.problems import ConfigError, counted
from library.curation import incoming_files
from library.files import clear_errors, need_space, remove

UPLOAD_FOLDER_LABEL = "Folder"  # of images, reference images or masks
MAX_FILES, MAX_UNFINISHED = 2000, 20_000  # files in a request, and unfinished uploads
PART = re.compile(r"\.[0-9a-f]{24}\.part")
MAX_DROPPED_FOLDERS = 2000
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
        return {"upload": self.begin, "upload_folder": self.suggest, "upload_names": self.name_folders}

    @property
    def piece_handlers(self) -> dict[str, PieceHandler]:
        return {"upload": self.take}

    def suggest(self, request: ApiRequest) -> JsonObject:
        """Suggest a folder for new images that does not exist yet."""
        home = next((root for root in self.roots if root.is_dir()), self.roots[0])
        safe_name = incoming_files.safe_stem(request.text("name") or "images")
        above = paths.allowed_path(str(home / "kohya" / "images"), self.roots, UPLOAD_FOLDER_LABEL)
        return {
            "folder": next(
                str(above / stem) for stem in incoming_files.numbered_stems(safe_name) if not (above / stem).exists()
            )
        }

    def name_folders(self, request: ApiRequest) -> JsonObject:
        """Return the names of the folders for images that come from folders with these names."""
        names = request.texts("names")
        if len(names) > MAX_DROPPED_FOLDERS:
            count = counted(len(names), "folder")
            raise ConfigError(
                "Dropped: {folders}, and at most {most} are sent", folders=count, most=MAX_DROPPED_FOLDERS
            )
        return {"names": incoming_files.folder_names(names)}

    def begin(self, request: ApiRequest) -> JsonObject:
        """Return the next action for each file: send it from an offset, send its checksum first, or nothing.

        A file is {name, size, modified, sums}; `sums` are CRC-32 of its first so many bytes, which the browser computes
        on request ("check"), and by which the server recognises a file that it has, wholly or in part.
        """
        folder = paths.allowed_path(request.text("folder"), self.roots, UPLOAD_FOLDER_LABEL, is_new=True)
        files = request.fields.get("files")
        if not isinstance(files, list) or len(files) > MAX_FILES or not all(map(_is_file, files)):
            raise ConfigError(NOT_OF_THE_PAGE)
        try:
            with clear_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
                existing = {name.lower(): name for name in os.listdir(folder)}
        except OSError as error:  # such as characters that Windows does not allow in names
            raise ConfigError("{folder} cannot be used: {why}", folder=folder, why=error.strerror or error) from None
        _clear_old(folder, existing)
        names = [incoming_files.safe_name(file["name"]) for file in files]
        answers = [_answer_for_existing(folder, existing, name, file) for name, file in zip(names, files, strict=True)]
        with self.busy:  # no other request may choose the same final names meanwhile
            to_send = [at for at, answer in enumerate(answers) if not answer]
            need_space(folder, sum(files[at]["size"] for at in to_send))
            parts = {at: self._part(folder, names[at], files[at]) for at in to_send}
            parts_to_send = {part.name for part, _ in parts.values()}
            names_on_way = {
                upload.name.lower()
                for upload in self.known.values()
                if upload.part.parent == folder and upload.part.name not in parts_to_send
            }
            # Two of the same name in one request are two files: the second gets a number, as if the first existed.
            final = _final([names[at] for at in to_send], {*existing, *names_on_way})
            for at, name in zip(to_send, final, strict=True):
                answers[at] = self._wait_for(*parts[at], name, files[at])
        return {"folder": str(folder), "files": answers}

    def _wait_for(self, part: Path, bytes_to_check: int, name: str, file: JsonMapping) -> JsonObject:
        """Expect the pieces of a file, or request the checksum of the part that has arrived before."""
        if bytes_to_check:
            return {"state": "check", "bytes": bytes_to_check}
        upload = self.known.setdefault(part.name, Upload(part, name, file["size"]))
        while len(self.known) > MAX_UNFINISHED:  # a browser that sends a forgotten file has to request it again
            del self.known[next(iter(self.known))]
        return {"state": "send", "id": part.name, "offset": _received_bytes(part), "name": upload.name}

    def _part(self, folder: Path, name: str, file: JsonMapping) -> tuple[Path, int]:
        """Return the partial file of an upload, and how many of its bytes have to be compared first."""
        identity = f"{folder}|{name}|{file['size']}|{file['modified']}"
        for number in range(MAX_ALIKE):
            key = hashlib.blake2b(f"{identity}|{number}".encode(), digest_size=12).hexdigest()
            part = folder / f".{key}.part"
            if part.is_symlink():
                continue
            length = _received_bytes(part)
            if not length:
                return part, 0
            if (checksum := file["sums"].get(str(length))) is None:
                return part, length
            if length <= file["size"] and checksum == incoming_files.checksum(part, length):
                return part, 0
        raise ConfigError("{name}: other files of this name are being sent; try again later", name=name)

    def take(self, query: Mapping[str, str], body: bytes) -> JsonObject:
        """Append a piece to a file; the last piece has the CRC-32 of the whole file (`sum`).

        A piece that does not fit there changes nothing, and the browser sends a new request.
        """
        upload = self.known.get(query.get("id", ""))
        if upload is None:
            return {"again": True}
        with upload.busy:
            begin = _received_bytes(upload.part)
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
            # The folder may have been replaced since.
            paths.allowed_path(str(upload.part.parent), self.roots, UPLOAD_FOLDER_LABEL)
            return {"done": incoming_files.put(upload.part, upload.part.parent, upload.name).name}
        finally:
            self._drop(upload)

    def _drop(self, upload: Upload) -> None:
        self.known.pop(upload.part.name, None)
        remove(upload.part)


def _is_file(file: object) -> bool:
    if not isinstance(file, dict) or not {"name", "size", "modified", "sums"} <= file.keys():
        return False
    name, sums = file["name"], file["sums"]
    return (
        isinstance(name, str)
        and len(name) <= paths.MAX_PATH_LENGTH
        and all(isinstance(file[key], int) and 0 <= file[key] < 2**53 for key in ("size", "modified"))
        and isinstance(sums, dict)
        and all(isinstance(value, int) for value in sums.values())
    )


def _answer_for_existing(folder: Path, existing: Mapping[str, str], name: str, file: JsonMapping) -> JsonObject:
    """Return the reply for a file that need not be sent: it is refused, or exists already."""
    if why := incoming_files.refuse_file(name, file["size"]):
        return {"state": "refused", "name": name, "why": why}
    same = folder / existing.get(name.lower(), name)
    if name.lower() not in existing or same.is_symlink() or _received_bytes(same) != file["size"]:
        return {}
    if (checksum := file["sums"].get(str(file["size"]))) is None:
        return {"state": "check", "bytes": file["size"]}
    is_same = checksum == incoming_files.checksum(same, file["size"])
    return {"state": "there", "name": same.name} if is_same else {}


def _final(names: Sequence[str], taken: set[str]) -> list[str]:
    """Return the final names of files, in order; repeated names get a number."""
    final_names: list[str] = [""] * len(names)
    unnamed = list(range(len(names)))
    while unnamed:  # each pass names one file of each group that shares a name
        first: dict[str, int] = {}
        for at in unnamed:
            first.setdefault(names[at].lower(), at)
        free = incoming_files.free_names([names[at] for at in first.values()], taken)
        for at in first.values():
            final_names[at] = free[names[at]]
        taken = taken | {name.lower() for name in free.values()}
        unnamed = [at for at in unnamed if not final_names[at]]
    return final_names


def _received_bytes(part: Path) -> int:
    return part.stat().st_size if part.is_file() else 0


def _clear_old(folder: Path, existing: Mapping[str, str]) -> None:
    for name in existing.values():
        if PART.fullmatch(name) and time.time() - (folder / name).lstat().st_mtime > KEEP_SECONDS:
            remove(folder / name)
