"""Changes to a data folder that can be undone, one by one, also after a restart or a crash.

A change is a folder `.trash/<date>/<time>-<mark>/` with a journal. Each line of the journal describes the next step
and holds the previous content; it is flushed to disk before anything is changed. Undoing goes through the journal from
its end, and skips whatever was altered since.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from library.config.json_types import JsonMapping, JsonObject
from library.config.outside_files import LIST, read_regular
from library.config.places import real_place
from library.config.problems import ConfigError, Message, Report
from library.data.threads import spread
from library.files import clean_up, clear_errors, move, need_space, remove, write_atomic
from library.runs import layout, process

FOLDER, ABOUT, JOURNAL, KEPT_FILES_FOLDER = ".trash", "operation.json", "journal.jsonl", "files"
OPEN, DONE, UNDONE = "open", "done", "undone"
MAX_CHANGES_SHOWN = 50

_locks: dict[str, threading.Lock] = {}


# The journal is on disk before anything changes, so that a change can be undone even after kill -9.
# Why: docs/decisions/2026-11-20-journal-before-each-change.md
@dataclass(frozen=True, slots=True)
class PastChange:
    """A completed change."""

    folder: Path  # its own, in the trash
    title: str
    when: float
    state: str
    count: int

    @property
    def id(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True, slots=True)
class TextChange:
    """A change of a text file: its content before and after (None: no file), and now."""

    path: Path
    before: str | None
    after: str
    now: str | None


@dataclass(frozen=True, slots=True)
class Undone:
    """The result of undoing a change."""

    title: str
    count: int
    left: tuple[str, ...]  # files that were altered since, and were skipped


class Change:
    """A change to a data folder, as a context manager. A failed change is undone, unless `keep` is set."""

    def __init__(self, root: str | Path, title: str, keep: bool = False) -> None:
        self.root, self.title, self.keep, self.count = Path(root).resolve(), title, keep, 0
        now = time.time_ns()
        day, clock = time.strftime("%Y-%m-%d %H%M%S", time.localtime(now / 1e9)).split()
        self.folder = _trash(self.root) / day / f"{clock}-{now % 10**9:09d}-{secrets.token_hex(2)}"
        self.when = now / 1e9

    def __enter__(self) -> "Change":
        with clear_errors(self.folder):
            self.folder.mkdir(parents=True)
        self._note(OPEN)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        if kind is not None and not self.keep:
            _undo_journal(self.root, self.folder)
            self._note(UNDONE)
        elif self.count:
            self._note(DONE)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)  # nothing was changed, so nothing has to be kept

    def write(self, texts: Mapping[Path, str], report: Report | None = None) -> int:
        """Write text files, each atomically. Returns how many differ from their previous content."""
        texts = {_inside(self.root, path): text for path, text in texts.items()}
        before = {path: _read_text_of(path) for path in texts}
        changed = {path: text for path, text in texts.items() if before[path] != text}
        self._journal({"write": self._name(p), "before": before[p], "after": text} for p, text in changed.items())
        encoded = [(path, text.encode("utf-8", "surrogateescape")) for path, text in changed.items()]
        spread(lambda item: write_atomic(*item), encoded, report, Message("writing captions"))
        self.count += len(changed)
        return len(changed)

    def move(self, moves: Iterable[tuple[Path, Path]]) -> None:
        """Move files or folders to new paths in the data folder, which must not exist yet."""
        pairs = [(_inside(self.root, old), _inside(self.root, new)) for old, new in moves]
        for old, new in pairs:
            if os.path.lexists(new) and not _is_itself(old, new):
                raise ConfigError("{new} is there already: nothing was moved", new=new)
            if not os.path.lexists(old):
                raise ConfigError("{old} is gone: open the folder again", old=old)
        if len({real_place(new) for _, new in pairs}) < len(pairs):
            raise ConfigError("two files would get the same name: nothing was moved")
        self._journal({"move": self._name(old), "to": self._name(new)} for old, new in pairs)
        for old, new in pairs:
            with clear_errors(new):
                new.parent.mkdir(parents=True, exist_ok=True)
                move(old, new)
        self.count += len(pairs)

    def remove(self, paths: Iterable[Path]) -> None:
        """Move files into the trash."""
        names = [self._name(_inside(self.root, path)) for path in paths]
        place = self.folder.relative_to(self.root).as_posix()
        self._journal({"move": name, "to": f"{place}/{KEPT_FILES_FOLDER}/{name}"} for name in names)
        for name in names:
            target = self.folder / KEPT_FILES_FOLDER / name
            with clear_errors(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                move(self.root / name, target)
        self.count += len(names)

    def put(self, contents: Mapping[Path, bytes]) -> None:
        """Write files of any kind; existing files are moved into the trash."""
        targets = {_inside(self.root, path): content for path, content in contents.items()}
        self.remove([path for path in targets if os.path.lexists(path)])
        self._journal({"copy": self._name(path), "sum": _checksum(content)} for path, content in targets.items())
        for path, content in targets.items():
            write_atomic(path, content)
        self.count += len(targets)

    def copy(self, pairs: Iterable[tuple[Path, Path]], report: Report | None = None) -> None:
        """Copy files from anywhere to new paths in the data folder, which must not exist yet."""
        pairs = [(source, _inside(self.root, target)) for source, target in pairs]
        for _, target in pairs:
            if os.path.lexists(target):
                raise ConfigError("{target} is there already: nothing was copied", target=target)
        need_space(self.root, sum(source.stat().st_size for source, _ in pairs))
        self._journal({"copy": self._name(target)} for _, target in pairs)
        spread(lambda pair: write_atomic(pair[1], partial(shutil.copyfile, pair[0])), pairs, report, Message("copying"))
        self.count += len(pairs)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()

    def _journal(self, lines: Iterable[JsonMapping]) -> None:
        """Append the next steps to the journal, and flush it to disk."""
        path = self.folder / JOURNAL
        with clear_errors(path), path.open("a", encoding="ascii") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())

    def _note(self, state: str) -> None:
        facts = {"title": self.title, "when": self.when, "state": state, "count": self.count, **process.identity()}
        write_atomic(self.folder / ABOUT, json.dumps(facts, indent=1))


def history(root: str | Path) -> list[PastChange]:
    return [past for past in _past_changes(Path(root).resolve()) if past.state != UNDONE][:MAX_CHANGES_SHOWN]


def undo(root: str | Path, report: Report | None = None) -> Undone:
    """Undo the last change. Raises ConfigError when there is none, or when it is still in progress."""
    root = Path(root).resolve()
    with lock(root):
        last = next((past for past in _past_changes(root) if past.state != UNDONE), None)
        if last is None:
            raise ConfigError("there is nothing to undo")
        facts = _read_change_facts(last.folder)
        if last.state == OPEN and process.alive(facts):
            raise ConfigError("{title} is still running: stop it, or wait until it has ended", title=repr(last.title))
        count, altered = _undo_journal(root, last.folder, report)
        write_atomic(last.folder / ABOUT, json.dumps({**facts, "state": UNDONE}, indent=1))
        return Undone(last.title, count, tuple(altered))


def changed_texts(root: str | Path, change: str) -> list[TextChange]:
    """Return the text files that a change wrote, by its id. Raises ConfigError when there is no such change."""
    root = Path(root).resolve()
    past = next((past for past in _past_changes(root) if past.id == change), None)
    if past is None:
        raise ConfigError("this change no longer exists: open the folder again")
    changes: dict[Path, tuple[str | None, str]] = {}
    for line in _journal_lines(past.folder):
        before, after = line.get("before"), line.get("after")
        if isinstance(after, str) and (before is None or isinstance(before, str)):
            with contextlib.suppress(ConfigError):
                path = _inside(root, _validated_path(root, line.get("write")))
                changes[path] = changes.get(path, (before, ""))[0], after
    return [TextChange(path, before, after, _read_text_of(path)) for path, (before, after) in changes.items()]


def lock(root: Path) -> threading.Lock:
    return _locks.setdefault(str(root), threading.Lock())


# ---- reading the journals


def _trash(root: Path) -> Path:
    trash = root / FOLDER
    if trash.is_symlink():
        raise ConfigError("{trash} is a link: remove it, so that changes can be kept in this folder", trash=trash)
    return trash


def _past_changes(root: Path) -> Iterator[PastChange]:
    """Yield all changes, the last one first."""
    for day in sorted(_folders_below(_trash(root)), reverse=True):
        for folder in sorted(_folders_below(day), reverse=True):
            if facts := _read_change_facts(folder):
                count = facts.get("count") if isinstance(facts.get("count"), int) else 0
                count = count or sum(1 for _ in _journal_lines(folder))
                yield PastChange(folder, str(facts.get("title")), float(facts["when"]), str(facts.get("state")), count)


def _folders_below(place: Path) -> list[Path]:
    try:
        return [path for path in place.iterdir() if path.is_dir() and not path.is_symlink()]
    except OSError:
        return []


def _read_change_facts(folder: Path) -> JsonObject:
    try:
        facts = layout.parse_facts(read_regular(folder / ABOUT, layout.MAX_RECORD))
    except (OSError, ValueError):
        return {}
    return facts if layout.finite_number(facts.get("when")) is not None else {}


def _journal_lines(folder: Path) -> Iterator[JsonObject]:
    """Yield the lines of the journal. An incomplete last line is skipped: its step was not started."""
    try:
        content = read_regular(folder / JOURNAL, LIST)
    except OSError:
        return
    for line in content.decode("ascii", "replace").splitlines():
        try:
            if step := layout.parse_facts(line):
                yield step
        except ValueError:
            return


# ---- undoing


def _undo_journal(root: Path, folder: Path, report: Report | None = None) -> tuple[int, list[str]]:
    """Undo a journal from its end. Return the number of undone steps, and the files altered since. Idempotent, so that
    it can continue after a crash."""
    lines = list(_journal_lines(folder))[::-1]
    step = partial(_undo_step, root, folder)
    only_texts = all("write" in line for line in lines) and len({str(line["write"]) for line in lines}) == len(lines)
    # Texts of different files do not depend on each other; moves do.
    outcomes = spread(step, lines, report, Message("undoing")) if only_texts else list(map(step, lines))
    altered = [
        str(next(iter(line.values()), "")) for line, outcome in zip(lines, outcomes, strict=True) if outcome is None
    ]
    _remove_empty(root, lines)
    _remove_temporary_files(root, lines)
    return sum(map(bool, outcomes)), altered


# The journal is written before its steps, so after a crash some of them were never done.
def _undo_step(root: Path, folder: Path, line: JsonObject) -> bool | None:
    """Undo one step. True: undone; False: it had not been done; None: the file was altered since."""
    kind = next(iter(line), "")
    try:
        path = _inside(root, _validated_path(root, line.get(kind)))
        return {"write": _unwrite, "move": _unmove, "copy": _uncopy}[kind](root, folder, path, line)
    except (KeyError, ConfigError, OSError):
        return None


def _unwrite(root: Path, folder: Path, path: Path, line: JsonObject) -> bool | None:
    before, now = line.get("before"), _read_text_of(path)
    if not (before is None or isinstance(before, str)):
        return None
    if now == before:
        return False
    if now != line.get("after"):
        return None
    if before is None:
        remove(path)  # its content is in the journal
    else:
        write_atomic(path, before.encode("utf-8", "surrogateescape"))
    return True


def _unmove(root: Path, folder: Path, path: Path, line: JsonObject) -> bool | None:
    kept_file = _inside(root, _validated_path(root, line.get("to")), trash_folder=folder)
    if not os.path.lexists(kept_file):
        return False if os.path.lexists(path) else None
    if os.path.lexists(path) and not _is_itself(kept_file, path):
        return None
    path.parent.mkdir(parents=True, exist_ok=True)
    move(kept_file, path)
    return True


def _is_itself(old: Path, new: Path) -> bool:
    """Return whether a name differs from another of the same file in its case only, which Windows and macOS ignore."""
    alike = str(old).casefold() == str(new).casefold()
    is_link = os.path.islink(old) or os.path.islink(new)  # a link to the other one is a second file
    return alike and not is_link and os.path.lexists(old) and os.path.samefile(old, new)


def _uncopy(root: Path, folder: Path, path: Path, line: JsonObject) -> bool | None:
    if not os.path.lexists(path):
        return False
    if "sum" in line and (not path.is_file() or _checksum(path.read_bytes()) != line["sum"]):
        return None
    target = folder / "undone" / path.relative_to(root)
    target.parent.mkdir(parents=True, exist_ok=True)
    move(path, target)
    return True


def _checksum(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _remove_empty(root: Path, lines: Iterable[JsonMapping]) -> None:
    """Remove the folders that moves and copies created, if they are empty."""
    for name in {str(line.get("to", line.get("copy", ""))) for line in lines} - {""}:
        place = PurePosixPath(name).parent
        while place.parts and FOLDER not in place.parts:
            try:
                _inside(root, _validated_path(root, str(place))).rmdir()
            except (ConfigError, OSError):
                break
            place = place.parent


def _remove_temporary_files(root: Path, lines: Iterable[JsonMapping]) -> None:
    """Remove temporary files that a killed process has left beside the files of a change."""
    names: dict[Path, set[str]] = {}
    for line in lines:
        try:
            path = _inside(root, _validated_path(root, line.get("write", line.get("copy"))))
            names.setdefault(path.parent, set()).add(path.name)
        except ConfigError:
            continue
    for folder, file_names in names.items():
        clean_up(folder, file_names.__contains__)


def _validated_path(root: Path, name: Any) -> Path:
    """Return a path of a journal after checks: a data folder from elsewhere may contain a malicious journal."""
    pure = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    foreign = "\0" in str(name) or os.name == "nt" and any(sign in str(name) for sign in "\\:")
    if pure.is_absolute() or ".." in pure.parts or foreign or not pure.parts:
        raise ConfigError("{name} is not a path inside {root}", name=name, root=root)
    return root / pure


def _inside(root: Path, path: Path, trash_folder: Path | None = None) -> Path:
    """Return a path whose folder, with links resolved, is in the data folder, and in the trash only below
    `trash_folder`.

    Raises ConfigError for others."""
    real = path.parent.resolve() / path.name
    outside = not real.is_relative_to(root) or real == root or path.name == ".."
    if outside or (FOLDER in real.relative_to(root).parts and not (trash_folder and real.is_relative_to(trash_folder))):
        raise ConfigError("{path} is not inside {root}: nothing was changed", path=path, root=root)
    return real


def _read_text_of(path: Path) -> str | None:
    """Return the text of a file, with bytes that are not UTF-8 as surrogate escapes. None: there is no file."""
    try:
        return read_regular(path, LIST).decode("utf-8", "surrogateescape")
    except FileNotFoundError:
        return None
