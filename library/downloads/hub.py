"""The Hugging Face Hub: what a repository holds, whether its files may be had, and one of them downloaded and checked.

huggingface_hub does the requests, with their retries. Here is what it leaves open: a download that was interrupted goes
on where it stopped, no request leaves the hub's own hosts, and a file gets its name once its hash is the stated one.
"""

import contextlib
import hashlib
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote, urlsplit

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.file_download import http_get

from library.config.problems import ConfigError, Report, Text
from library.families.shared import hub, weights
from library.files import clear_errors, need_space, write_atomic
from library.runs import keys, locking, registry

ENDING = ".safetensors"
HOSTS = ("huggingface.co", "hf.co")  # and all below them: that of a file's bytes is chosen by the hub
NAME = re.compile(r"(?!\.)[\w .()+-]{1,150}(?<![. ])", re.ASCII)  # of a file or folder that is made
RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.I)  # on Windows
REPOSITORY = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
BLOCK = 2**22  # bytes that are hashed at once
_guarded = threading.Lock()


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its size, and the SHA-256 of its content where the hub has one."""

    repository: str
    path: str
    size: int
    sha256: str
    commit: str

    @property
    def name(self) -> str:
        """Its name without folders."""
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Repository:
    """What the hub says of a repository."""

    name: str
    files: Mapping[str, RemoteFile]  # those that can be used, by path
    closed: bool  # its licence has to be accepted, and was not with this token


def is_repository(name: str) -> bool:
    """Whether a repository may have this name, owner/name."""
    return bool(REPOSITORY.fullmatch(name)) and ".." not in name and "--" not in name


def token() -> str | None:
    """The token of this user, from the environment or as it was kept."""
    return os.environ.get("HF_TOKEN") or keys.kept().get("huggingface_token")


def repository(name: str, endings: Sequence[str] = (ENDING,)) -> Repository:
    """Ask the hub for a repository, with its files of these endings. Raises ConfigError with the reason when it cannot
    be had."""
    if not is_repository(name):
        raise ConfigError("{name} is not the name of a repository: write owner/name", name=name[:120])
    _guard()
    api, own = huggingface_hub.HfApi(endpoint=constants.ENDPOINT), token() or False
    try:
        about = hub.answered(lambda: api.model_info(name, token=own, timeout=hub.PATIENCE, files_metadata=True))
        closed = bool(about.gated) and hub.answered(lambda: _is_closed(api, name, own))
    except Exception as e:  # of the network or the hub, in the words of several libraries
        raise ConfigError(failure(name, e)) from e
    found = {}
    for file in about.siblings or ():
        sha256 = file.lfs.sha256 if file.lfs else ""
        if file.rfilename.endswith(tuple(endings)) and isinstance(file.size, int) and about.sha:
            found[file.rfilename] = RemoteFile(name, file.rfilename, file.size, sha256, about.sha)
    return Repository(name, found, closed)


def _is_closed(api: huggingface_hub.HfApi, name: str, own: str | bool) -> bool:
    try:
        api.auth_check(name, token=own)
    except errors.GatedRepoError:
        return True
    return False


def failure(name: str, error: Exception) -> str:
    """The sentence of what went wrong with a repository."""
    if isinstance(error, ConfigError):
        return error.problems[0]
    if isinstance(error, errors.GatedRepoError):
        return licence(name)
    if isinstance(error, errors.RepositoryNotFoundError):
        return Text("There is no Hugging Face repository {name}, or it is private: check the spelling", name=name)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return Text("The Hugging Face Hub cannot be reached for {name} ({reason}): go online, and try again",
        name=name, reason=reason)  # fmt: skip


def licence(name: str) -> Text:
    """What to do about a repository whose licence has to be accepted."""
    template = "{name} is gated: accept its licence at https://huggingface.co/{name}, then set a token as HF_TOKEN"
    return Text(template, name=name)


def place(folder: Path, file: RemoteFile, endings: Sequence[str] = (ENDING,)) -> Path:
    """Where a file goes: FOLDER/REPOSITORY/NAME. Raises ConfigError for names that could lead elsewhere."""
    parts = (file.repository.rpartition("/")[2], file.name)
    for part in parts:
        if not NAME.fullmatch(part) or RESERVED.fullmatch(part):
            raise ConfigError("{path} of {repository} has a name that cannot be used for a file", path=file.path[:200],
                repository=file.repository)  # fmt: skip
    if not file.name.endswith(tuple(endings)):
        raise ConfigError(
            "{path} may hold code and is not downloaded: choose a .safetensors file", path=file.path[:200]
        )
    return folder.joinpath(*parts)


def unfinished(path: Path, file: RemoteFile) -> Path:
    """What was downloaded of a file so far. Another version of the file has another one."""
    return path.with_name(f".{path.stem}.{(file.sha256 or file.commit)[:12]}.part")


def still_needed(path: Path, file: RemoteFile) -> int:
    """Bytes of a file that are still to be downloaded."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size == file.size:
            return 0
        return max(0, file.size - unfinished(path, file).stat().st_size)
    return file.size


def download(file: RemoteFile, path: Path, report: Report) -> Path:
    """Download a file, or go on with that, to a path that `place` has made. Returns it.

    Raises ConfigError when it cannot be had, does not fit, is being downloaded by another process, is not what the hub
    says that it is, or when another file has its name. What was downloaded is kept for the next time, unless it is
    wrong.
    """
    _guard()
    lock = registry.data_folder() / "downloads" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.lock"
    with locking.held(lock, 0.5) as mine:
        if not mine:
            raise ConfigError("{path} is being downloaded already: wait until that has ended, or stop it", path=path)
        if path.exists():
            return _same(path, file, report)
        part = unfinished(path, file)
        with clear_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _fill(part, file, report)
            try:
                _check(part, path, file, report)
            except ConfigError:
                part.unlink(missing_ok=True)
                raise
            return write_atomic(path, part.replace)


def _fill(part: Path, file: RemoteFile, report: Report) -> None:
    """Download what is missing of a file."""
    done = part.stat().st_size if part.exists() else 0
    if done > file.size:
        part.unlink()
        done = 0
    need_space(part, file.size - done)
    address = f"{constants.ENDPOINT}/{file.repository}/resolve/{file.commit}/{quote(file.path)}"
    own = token()

    class ByteCount:
        """What huggingface_hub tells of each block; it stands in for its progress bar."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.done = done
            report(Text("{file}", file=file.name), done, file.size)

        def update(self, more: float = 1) -> None:
            """So many bytes more, or less where it has to begin again."""
            self.done += int(more)
            report(Text("{file}", file=file.name), self.done, file.size)

        def __enter__(self) -> "ByteCount":
            return self

        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                     trace: TracebackType | None) -> None:  # fmt: skip
            """There is nothing to close."""

    bar: Any = ByteCount
    headers = {"authorization": f"Bearer {own}"} if own else {}
    with part.open("ab") as out:
        try:
            http_get(address, out, resume_size=done, headers=headers, expected_size=file.size, tqdm_class=bar)
        except (ConfigError, KeyboardInterrupt):
            raise
        except errors.HfHubHTTPError as e:
            raise ConfigError(failure(file.repository, e)) from e
        except Exception as e:  # of the network
            if isinstance(e, OSError) and e.errno is not None:  # of the disk
                raise
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
            template = "The download of {name} was interrupted ({reason}): start it again, it goes on where it stopped"
            raise ConfigError(template, name=file.name, reason=reason) from e


def _check(part: Path, path: Path, file: RemoteFile, report: Report) -> None:
    """Raise ConfigError unless a file is what the hub says, and can be read without running code."""
    size = part.stat().st_size
    if size != file.size or (file.sha256 and _sha256(part, file, report) != file.sha256):
        raise ConfigError("{name} is not the file that the hub describes, as its {what} differs: it was removed, "
            "download it again", name=path.name, what="size" if size != file.size else "SHA-256")  # fmt: skip
    if file.name.endswith(ENDING):
        weights.entries(part)


def _same(path: Path, file: RemoteFile, report: Report) -> Path:
    """The file that is there already, if it is this one."""
    if path.stat().st_size != file.size or (file.sha256 and _sha256(path, file, report) != file.sha256):
        raise ConfigError("{path} exists and is another file: choose another folder, or move it away", path=path)
    return path


def _sha256(path: Path, file: RemoteFile, report: Report) -> str:
    found, done = hashlib.sha256(), 0
    with path.open("rb") as content:
        while block := content.read(BLOCK):
            found.update(block)
            done += len(block)
            report(Text("checking {file}", file=file.name), done, file.size)
    return found.hexdigest()


def _guard() -> None:
    """Let no request of this process leave the hub's hosts, wherever an answer redirects it."""
    with _guarded:
        session = huggingface_hub.get_session()
        if _refuse in session.event_hooks["request"]:
            return
        kind, usual = type(session), session.event_hooks["request"]
        make = lambda: kind(event_hooks={"request": [*usual, _refuse]}, follow_redirects=True, timeout=None)  # noqa: E731
        huggingface_hub.set_client_factory(make)


def _refuse(request: Any) -> None:
    """Raise ConfigError for a request to a host that is not the hub's. Unencrypted ones go to its own address only."""
    own = urlsplit(constants.ENDPOINT)
    host, scheme = request.url.host, request.url.scheme
    if (scheme, host, request.url.port) == (own.scheme, own.hostname, own.port):
        return
    if scheme != "https" or not any(host == known or host.endswith(f".{known}") for known in HOSTS):
        raise ConfigError("The hub has redirected to {host}, which is no address of Hugging Face: it was not followed",
            host=host)  # fmt: skip


def files_of(names: Iterable[str]) -> list[RemoteFile]:
    """Files by `owner/name/path`, as the hub has them now. Raises ConfigError, also for a licence to be accepted."""
    wanted = [(f"{owner}/{name}", path) for owner, name, path in (f"{text}//".split("/", 2) for text in names)]
    known = {name: repository(name) for name in dict.fromkeys(name for name, _ in wanted)}
    found = []
    for name, path in ((name, path.rstrip("/")) for name, path in wanted):
        if known[name].closed:
            raise ConfigError(licence(name))
        if path not in known[name].files:
            there = ", ".join(sorted(known[name].files)[:8]) or "no .safetensors file"
            raise ConfigError(
                "{repository} has no file {path}; it has {there}", repository=name, path=path, there=there
            )
        found.append(known[name].files[path])
    return found
