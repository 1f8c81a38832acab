"""Atomic writing of files: everything goes to a temporary name, is flushed, and is renamed into place."""

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from library.config.problems import SURROGATES, ConfigError
from library.config.values import RESERVED, WINDOWS, name_length

T = TypeVar("T")
PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds between the attempts of `patiently`
PAUSES_OF_READERS = (0.01, 0.02, 0.04, 0.08)  # a file is replaced in less
DISK_FULL_ERRORS = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
FULL_ON_WINDOWS = {39, 112}  # ERROR_HANDLE_DISK_FULL, ERROR_DISK_FULL
HELD_ON_WINDOWS = {32, 33, 1224}  # ERROR_SHARING_VIOLATION, ERROR_LOCK_VIOLATION, ERROR_USER_MAPPED_FILE
# The same, and ERROR_DIR_NOT_EMPTY: files that another program still holds leave their folder when it lets go of them.
PASSING_ON_WINDOWS = {*HELD_ON_WINDOWS, 145}
DENIED_ON_WINDOWS = 5  # ERROR_ACCESS_DENIED: also for replacing or deleting a file that a program has mapped
NO_NAME_ON_WINDOWS = 123  # ERROR_INVALID_NAME
PROTECTED_ON_WINDOWS = 2  # ERROR_FILE_NOT_FOUND, also for a new file in a folder that Windows Security protects
NOT_FOUND_ON_WINDOWS = {2, 3, 206}  # ERROR_FILE_NOT_FOUND, ERROR_PATH_NOT_FOUND, ERROR_FILENAME_EXCED_RANGE
LONGEST_ON_WINDOWS = 259  # characters of a path, unless an administrator has allowed more
EXTRA_IN_TEMPORARY = 40  # characters by which a temporary name may exceed the file's own
# safetensors reports errors of the disk as its own exception, with the system's number in the text.
SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")
NO_SPACE = 2**16  # bytes; a disk with less is full
TORCH_WRITER = "inline_container.cc"  # where PyTorch finds that a file was not written whole
# On a shared disk, process ids say something only about files of the same computer.
HOST_MARK = hashlib.blake2b(socket.gethostname().encode(), digest_size=2).hexdigest()
UNFINISHED = re.compile(
    r"\.(?P<stem>.+)\.(?P<pid>\d+)-(?P<here>[0-9a-f]{4})[0-9a-f]{8}\.(?P<kind>tmp|old)(?P<suffix>\.\w+)?"
)
DAY = 86400.0  # seconds
STATE_FACTS = "train_state.json"  # the file of a state folder that says where its training stood
TOO_LONG = "cannot write {path}: the name is too long for this disk; shorten it"
NO_FOLDER = "cannot write {path}: its folder cannot be made"
PROTECTED = (
    "cannot write {path}: Windows Security seems to protect its folder (controlled folder access); allow python.exe "
    "there, or choose another folder"
)
LONGEST_NAME = 255  # maximum bytes of a file name; Windows and macOS count characters, and allow more


def cache_folder() -> Path:
    home = os.environ.get("KOHYA_HOME")
    return Path(os.path.expanduser(home)) / "cache" if home else platformdirs.user_cache_path("kohya", appauthor=False)


def write_atomic(path: str | Path, content: bytes | str | Callable[[Path], object]) -> Path:
    """Write a file so that `path` holds either its old content or all of `content`, even after a power failure.

    `content` is bytes, text (UTF-8, line ends unchanged), or a function that writes a file at a given temporary path,
    which has the same folder and suffix (np.savez and image writers depend on it). Creates the folder if needed. Raises
    ConfigError if the disk is full or not writable.
    """
    path = Path(path)
    temporary = _temporary_beside(path)
    try:
        with clear_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _write_content(temporary, content)
            replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)
    return path


def write_folder_atomic(path: str | Path, fill: Callable[[Path], object]) -> Path:
    """Write a folder that appears under its name only when complete, replacing an existing one.

    `fill` writes the files into the given folder. Raises ConfigError like `write_atomic`.
    """
    path = Path(path)
    mark = _mark()
    unfinished, old = (path.with_name(f".{path.name}.{mark}.{kind}") for kind in ("tmp", "old"))
    try:
        with clear_errors(path):
            unfinished.mkdir(parents=True)
            fill(unfinished)
            for file in (f for f in unfinished.rglob("*") if f.is_file()):
                _sync(file)
            _sync_folder(unfinished)
            if path.exists():
                replace(path, old)
            replace(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        if old.exists() and not path.exists():  # the second rename failed
            replace(old, path)
        raise
    _sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)
    return path


def patiently(action: Callable[[], T], pauses: Sequence[float] = PAUSES) -> T:
    """Return what `action` on a file returns. On Windows it gets several attempts."""
    # There a reader or a virus scanner that holds the file for a moment forbids replacing, deleting or opening it.
    for pause in pauses if WINDOWS else ():
        try:
            return action()
        except OSError as error:
            if not (isinstance(error, PermissionError) or getattr(error, "winerror", 0) in PASSING_ON_WINDOWS):
                raise
            time.sleep(pause)
    return action()


def replace(old: Path, new: Path) -> None:
    """Rename over `new`."""
    patiently(lambda: os.replace(old, new))


def move(old: Path, new: Path) -> None:
    """Rename to `new`, which must not exist."""
    patiently(lambda: os.rename(old, new))


def remove(path: Path) -> None:
    """Delete a file; a missing one is no error."""
    patiently(partial(path.unlink, missing_ok=True))


def remove_folder(path: Path) -> None:
    """Delete a folder so that it never exists in part. Raises OSError, and deletes nothing, if Windows does not rename
    it because a program has one of its files open.
    """
    doomed = path.with_name(f".{path.name}.{_mark()}.tmp")
    replace(path, doomed)  # so that it loses its name at once
    shutil.rmtree(doomed, ignore_errors=True)


def json_text(value: Any, **options: Any) -> str:
    """Return readable JSON; file names that are not UTF-8 are escaped."""
    text = json.dumps(value, ensure_ascii=False, **options)
    return json.dumps(value, **options) if SURROGATES.search(text) else text


def clean_up(folder: str | Path, is_ours: Callable[[str], object], least_age: float = 0) -> None:
    """Delete the leftovers of killed writers in a folder that are at least `least_age` seconds old; `is_ours` selects
    names.
    """
    # If a writer was killed between the two renames of a folder, give the folder its name: its new content is complete.
    with contextlib.suppress(OSError):
        candidates = [(path, UNFINISHED.fullmatch(path.name)) for path in Path(folder).iterdir() if path.name[0] == "."]
        leftovers = [
            (path, match)
            for path, match in candidates
            if match and is_ours(match["stem"] + (match["suffix"] or "")) and _is_left(path, match, least_age)
        ]
        for path, match in leftovers:
            final = path.with_name(match["stem"])
            if match["kind"] == "old" and not final.exists():
                new = path.with_name(path.name.removesuffix("old") + "tmp")
                replace(new if new.exists() else path, final)
        for path, _ in leftovers:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def _temporary_beside(path: Path) -> Path:
    mark = f".{_mark()}.tmp{path.suffix}"
    room = LONGEST_NAME - 1 - len(mark.encode())
    if WINDOWS:  # else a path of nearly 260 characters, which most of them allow, could not be written
        room = max(min(room, LONGEST_ON_WINDOWS - len(str(path.parent.absolute())) - len(mark) - 2), 1)
    end_of_name = path.stem.encode("utf-8", "surrogatepass")[-room:].decode(errors="ignore") or "_"
    return path.with_name(f".{end_of_name}{mark}")


def _mark() -> str:
    # UNFINISHED reads it back, to tell whether the writer is still running.
    return f"{os.getpid()}-{HOST_MARK}{secrets.token_hex(4)}"


def _is_left(path: Path, mark: re.Match[str], least_age: float) -> bool:
    """Return whether the writing process is gone. Files of other computers count by their age."""
    import psutil

    try:
        written = path.stat().st_mtime
        age = time.time() - written
        if age < least_age or mark["here"] != HOST_MARK:
            return age > max(least_age, DAY)
        writer = psutil.Process(int(mark["pid"]))
        # A writer that began after its file was written has got the id of another process; clocks differ by up to 2 s.
        return writer.create_time() > written + 2 or writer.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (OSError, psutil.Error):
        return False


def blocking_path(folder: Path) -> Path | None:
    """Return what prevents files in a folder that may not exist yet: its nearest existing part, if nothing can be
    written into that. None if nothing does.
    """
    nearest = nearest_existing(folder)
    if nearest is None:
        return Path(folder.absolute().anchor)
    return None if nearest.is_dir() and os.access(nearest, os.W_OK) else nearest


def nearest_existing(path: str | Path) -> Path | None:
    """Return the innermost part that exists of a path that may not exist yet; None on a drive that is not there."""
    path = Path(path).absolute()
    # `Path.exists` raises for what is in a folder that may not be entered.
    return next((part for part in (path, *path.parents) if os.path.exists(part)), None)


def free_space(path: str | Path) -> int:
    """Return the free bytes on the disk where `path` is or will be. Raises UnwritableError if there is no such disk."""
    if (place := nearest_existing(path)) is None:
        raise UnwritableError(NO_FOLDER, path=path)
    return shutil.disk_usage(place).free


def need_space(path: str | Path, size: int) -> None:
    """Raise ConfigError unless `size` bytes (and a little more) fit where `path` will be."""
    free = free_space(path)
    if free < size + 2**20:
        raise UnwritableError(
            "not enough disk space for {path}: {bytes} needed, {free} free",
            path=path,
            bytes=size_text(size),
            free=size_text(free),
        )


def make_space(path: Path, size: int) -> None:
    """Delete the leftovers of killed writers of `path`, and those of files like it after a day; then `need_space`."""
    clean_up(path.parent, path.name.__eq__)
    # A container of the same host name may be writing the others right now.
    clean_up(path.parent, lambda name: name.endswith(path.suffix), least_age=DAY)
    need_space(path, size)


class UnwritableError(ConfigError):
    """A file that cannot be written where it should be: the disk is full, away or read-only."""


@contextlib.contextmanager
def clear_errors(path: str | Path) -> Iterator[None]:
    """Convert "no space left", "permission denied" and the like into one sentence about `path`."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as e:
        if not (template := _disk_problem(e, path)):
            raise
        free = {"free": size_text(free_space(path))} if "{free}" in template else {}
        raise UnwritableError(template, path=path, **free) from e


def _disk_problem(error: Exception, path: str | Path) -> str:
    """Return a template about the disk's error, "" if the error has another cause."""
    number, on_windows = getattr(error, "errno", None), getattr(error, "winerror", None)
    if match := SYSTEM_ERROR.search(str(error)):
        number, on_windows = int(match[1]), int(match[1]) if WINDOWS else None
    if number in DISK_FULL_ERRORS or on_windows in FULL_ON_WINDOWS:
        return "the disk is full: cannot write {path} ({free} free)"
    if on_windows is not None and (template := _problem_on_windows(on_windows, Path(path))):
        return template
    if number == errno.ENAMETOOLONG:
        return TOO_LONG
    if number == errno.EFBIG:
        return "cannot write {path}: the file is too large for this disk; choose a folder on another disk"
    denied = number in (errno.EROFS, errno.EACCES, errno.EPERM) or on_windows == DENIED_ON_WINDOWS
    if isinstance(error, PermissionError) or denied:
        return "cannot write {path}: no permission; choose another folder or change its rights"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "cannot write {path}: a file has the name of its folder"
    if isinstance(error, FileNotFoundError):  # a missing drive, or a parent that is no folder
        return NO_FOLDER
    return _unexplained_problem(error, path) if number is None else ""


def _problem_on_windows(number: int, path: Path) -> str:
    """Return the same for what only Windows refuses, by its own number of the error."""
    # A file with the attribute "read-only" is denied to all programs.
    is_mapped = number == DENIED_ON_WINDOWS and path.is_file() and os.access(path, os.W_OK)
    if number in HELD_ON_WINDOWS or is_mapped:
        return "cannot write {path}: another program has it open; close that, or choose another name"
    if RESERVED.fullmatch(path.name):
        return "cannot write {path}: Windows reserves this name for a device; choose another one"
    if name_length(path.name) > LONGEST_NAME and number in {NO_NAME_ON_WINDOWS, *NOT_FOUND_ON_WINDOWS}:
        return TOO_LONG
    if number == NO_NAME_ON_WINDOWS:
        return 'cannot write {path}: Windows allows none of <>:"|?* in a name; choose another one'
    if number in NOT_FOUND_ON_WINDOWS and len(str(path.absolute())) > LONGEST_ON_WINDOWS - EXTRA_IN_TEMPORARY:
        return "cannot write {path}: Windows cuts paths at 260 characters; choose a shorter name or folder"
    if number == PROTECTED_ON_WINDOWS and path.parent.is_dir():
        return PROTECTED
    return ""


def _unexplained_problem(error: Exception, path: str | Path) -> str:
    """Return the same for an error of NumPy, Pillow or PyTorch, which do not say why a file could not be written."""
    if isinstance(error, OSError | RuntimeError):
        with contextlib.suppress(OSError):
            if free_space(path) < NO_SPACE:
                return "the disk is full: cannot write {path} ({free} free)"
    if TORCH_WRITER in str(error):
        return "cannot write {path}: the disk did not take all of it; make room, or choose a folder on another disk"
    return ""


def _write_content(temporary: Path, content: bytes | str | Callable[[Path], object]) -> None:
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


def _sync_folder(folder: Path) -> None:
    """Flush a folder to disk, which makes a rename in it durable."""
    # Windows has no such call, and some network folders reject it.
    if WINDOWS:
        return
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def size_text(size: float) -> str:
    """Return a number of bytes as disks, browsers and the page's panel show it: 81.7 GB, 335 MB."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "bytes" or size >= 100 else f"{size:.1f} {unit}"


def names_apart(paths: Sequence[Path]) -> list[str]:
    """Return the name of each path as a list shows it; those of one name get the folders that tell them apart."""
    names = []
    for path in paths:
        others, count = [other.parts for other in paths if other != path], 1
        while count < len(path.parts) and any(other[-count:] == path.parts[-count:] for other in others):
            count += 1
        names.append("/".join(path.parts[-count:]) if count < len(path.parts) else str(path))
    return names
