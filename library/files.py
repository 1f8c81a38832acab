"""Files that are never half written: everything goes to a temporary name, is flushed, and is renamed into place."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs

from library.config.problems import SURROGATES, ConfigError

WINDOWS = os.name == "nt"
FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
FULL_ON_WINDOWS = {39, 112}  # ERROR_HANDLE_DISK_FULL, ERROR_DISK_FULL
HERE = hashlib.blake2b(socket.gethostname().encode(), digest_size=2).hexdigest()
UNFINISHED = re.compile(
    r"\.(?P<stem>.+)\.(?P<pid>\d+)-(?P<here>[0-9a-f]{4})[0-9a-f]{8}\.(?P<kind>tmp|old)(?P<suffix>\.\w+)?"
)
DAY = 86400.0
STATE_FACTS = "train_state.json"  # the file of a state folder that says where its training stood
LONGEST_NAME = 255  # bytes of a file's name on the usual disks; Windows and macOS count letters, and allow more
RESERVED = re.compile(
    r"(con|prn|aux|nul|com[\d¹²³]|lpt[\d¹²³])(\..*)?", re.I
)  # devices that Windows has in every folder


def cache_folder() -> Path:
    """Where the user keeps what can be made again: inside KOHYA_HOME, where that is set."""
    home = os.environ.get("KOHYA_HOME")
    return Path(home).expanduser() / "cache" if home else platformdirs.user_cache_path("kohya", appauthor=False)


def write_atomic(path: str | Path, content: bytes | str | Callable[[Path], object]) -> Path:
    """Write a file so that `path` holds either what it held before or all of `content`, also after a power cut.

    `content` is bytes, text (UTF-8, line ends as they are), or a function that writes a file at the path it is given.
    That temporary path is in the same folder and has the same suffix (np.savez and image writers look at it). The
    folder is made if needed. Raises ConfigError when the disk is full or the place is not writable.
    """
    path = Path(path)
    mark = f".{_mark()}.tmp{path.suffix}"
    stem = path.stem.encode("utf-8", "surrogatepass")[-(LONGEST_NAME - 1 - len(mark.encode())) :].decode(
        errors="ignore"
    )  # a long one's end
    temporary = path.with_name(f".{stem}{mark}")
    try:
        with clear_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _fill(temporary, content)
            _replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return path


def write_folder_atomic(path: str | Path, fill: Callable[[Path], object]) -> Path:
    """Write a folder that is there under its name only when it is complete; one of that name gives way to it.

    `fill` writes the files into the folder that it is given. Raises ConfigError as `write_atomic` does.
    """
    path = Path(path)
    mark = _mark()
    unfinished, old = (path.with_name(f".{path.name}.{mark}.{what}") for what in ("tmp", "old"))
    try:
        with clear_errors(path):
            unfinished.mkdir(parents=True)
            fill(unfinished)
            for file in (f for f in unfinished.rglob("*") if f.is_file()):
                _sync(file)
            _sync_folder(unfinished)
            if path.exists():
                _replace(path, old)
            _replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)
    return path


def remove_folder(path: Path) -> None:
    """Delete a folder so that it is never there in part: it loses its name first."""
    doomed = path.with_name(f".{path.name}.{_mark()}.tmp")
    try:
        _replace(path, doomed)
    except OSError:  # on Windows somebody reads in it
        doomed = path
    shutil.rmtree(doomed, ignore_errors=True)


def json_text(value: Any, **how: Any) -> str:
    """JSON as people read it; where a file name in it is not UTF-8, escaped, as UTF-8 has no letters for it."""
    text = json.dumps(value, ensure_ascii=False, **how)
    return json.dumps(value, **how) if SURROGATES.search(text) else text


def clean_up(folder: str | Path, ours: Callable[[str], object]) -> None:
    """Remove what writers that died on the way have left in a folder; `ours` says of which names.

    A folder whose exchange was cut off between the two renames gets its name, as its new content was complete.
    """
    with contextlib.suppress(OSError):
        found = [(path, UNFINISHED.fullmatch(path.name)) for path in Path(folder).iterdir() if path.name[0] == "."]
        left = [(path, m) for path, m in found if m and ours(m["stem"] + (m["suffix"] or "")) and _is_left(path, m)]
        for path, m in left:
            final = path.with_name(m["stem"])
            if m["kind"] == "old" and not final.exists():
                new = path.with_name(path.name.removesuffix("old") + "tmp")
                _replace(new if new.exists() else path, final)
        for path, _ in left:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _mark() -> str:
    """Who writes: process, computer, and a number by chance."""
    return f"{os.getpid()}-{HERE}{secrets.token_hex(4)}"


def _is_left(path: Path, mark: re.Match[str]) -> bool:
    """Whether the process that writes this is gone. Of other computers we only know how old it is."""
    import psutil

    try:
        written = path.stat().st_mtime
        if mark["here"] != HERE:
            return time.time() - written > DAY
        writer = psutil.Process(int(mark["pid"]))
        return writer.create_time() > written + 2 or writer.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (OSError, psutil.Error):
        return False


def free_space(path: str | Path) -> int:
    """Bytes free where `path` is or will be; the nearest folder that exists answers."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def need_space(path: str | Path, size: int) -> None:
    """Raise ConfigError unless `size` bytes (and a little) fit where `path` will be."""
    free = free_space(path)
    if free < size + 2**20:
        raise ConfigError(
            "not enough disk space for {path}: {bytes} needed, {free} free",
            path=path,
            bytes=size_text(size),
            free=size_text(free),
        )


@contextlib.contextmanager
def clear_errors(path: str | Path) -> Iterator[None]:
    """Turn "no space left", "permission denied" and the like into one sentence about `path`."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL or getattr(e, "winerror", None) in FULL_ON_WINDOWS:
            raise ConfigError(
                "the disk is full: cannot write {path} ({free} free)", path=path, free=size_text(free_space(path))
            ) from e
        if e.errno == errno.ENAMETOOLONG:
            raise ConfigError("cannot write {path}: the name is too long for this disk; shorten it", path=path) from e
        if isinstance(e, PermissionError) or e.errno == errno.EROFS:
            raise ConfigError(
                "cannot write {path}: no permission; choose another folder or change its rights", path=path
            ) from e
        if isinstance(e, FileExistsError | NotADirectoryError):
            raise ConfigError("cannot write {path}: a file has the name of its folder", path=path) from e
        if isinstance(e, FileNotFoundError):  # a drive that is gone, or a place where there are no folders
            raise ConfigError("cannot write {path}: its folder cannot be made", path=path) from e
        raise


def _fill(temporary: Path, content: bytes | str | Callable[[Path], object]) -> None:
    if callable(content):
        content(temporary)
        _sync(temporary)
        return
    with open(temporary, "xb") as f:
        f.write(content.encode("utf-8") if isinstance(content, str) else content)
        f.flush()
        os.fsync(f.fileno())


def _sync(file: Path) -> None:
    with open(file, "r+b") as f:
        os.fsync(f.fileno())


def _replace(temporary: Path, path: Path) -> None:
    """Rename over `path`. On Windows a reader or a virus scanner may hold the old file for a moment, so try again."""
    for pause in (0.05, 0.1, 0.2, 0.4, 0.8) if WINDOWS else ():
        try:
            os.replace(temporary, path)
            return
        except PermissionError:
            time.sleep(pause)
    os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last. Windows has no such call, and some network folders refuse it."""
    if WINDOWS:
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def size_text(size: float) -> str:
    """A number of bytes as disks, browsers and the page's panel count them: 81.7 GB, 335 MB."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"
