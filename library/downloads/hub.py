"""The Hugging Face Hub: list a repository, check access to it, and download and verify files.

huggingface_hub does the requests and retries. This module adds: interrupted downloads are resumed, requests to other
hosts are refused, and a file gets its final name only after its hash is verified.
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

import huggingface_hub  # its modules load a network library, so they are imported where they are used
from huggingface_hub import constants

from library.config.problems import ConfigError, Message, Report, first_line
from library.config.values import RESERVED
from library.families.shared import hub, weights
from library.files import clear_errors, need_space, remove, replace, write_atomic
from library.runs import keys, locking, registry

WEIGHTS_SUFFIX = ".safetensors"
HOSTS = ("huggingface.co", "hf.co")  # and their sub-domains: the hub redirects downloads to these
SAFE_NAME = re.compile(r"(?!\.)[\w .()+-]{1,150}(?<![. ])", re.ASCII)  # of a file or folder that is created
REPOSITORY = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
HASH_BLOCK_BYTES = 2**22  # bytes of one block of hashing
_guarded = threading.Lock()


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: its size in bytes, and the SHA-256 of its content where the hub has one."""

    repository: str
    path: str
    size: int
    sha256: str
    commit: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Repository:
    """A repository on the hub."""

    name: str
    files: Mapping[str, RemoteFile]  # those with the requested extensions, by path
    closed: bool  # gated: its licence was not accepted with this token


def is_repository(name: str) -> bool:
    return bool(REPOSITORY.fullmatch(name)) and ".." not in name and "--" not in name


def token() -> str | None:
    return os.environ.get("HF_TOKEN") or keys.stored_keys().get("huggingface_token")


def repository(name: str, endings: Sequence[str] = (WEIGHTS_SUFFIX,)) -> Repository:
    """Get a repository from the hub, with its files of these extensions. Raises ConfigError with the reason when that
    fails."""
    if not is_repository(name):
        raise ConfigError("{name} is not the name of a repository: write owner/name", name=name[:120])
    _restrict_hosts()
    # False: send no token; with None, huggingface_hub would look for one in its own files.
    api, hub_token = huggingface_hub.HfApi(endpoint=constants.ENDPOINT), token() or False
    try:
        info = hub.answered(lambda: api.model_info(name, token=hub_token, timeout=hub.HUB_TIMEOUT, files_metadata=True))
        closed = bool(info.gated) and hub.answered(lambda: _is_closed(api, name, hub_token))
    except Exception as e:  # of the network or the hub, from several libraries
        raise ConfigError(request_failure(name, e)) from e
    files = {}
    for file in info.siblings or ():
        sha256 = file.lfs.sha256 if file.lfs else ""
        # Without a size and a commit the download could neither be checked nor resumed.
        if file.rfilename.endswith(tuple(endings)) and isinstance(file.size, int) and info.sha:
            files[file.rfilename] = RemoteFile(name, file.rfilename, file.size, sha256, info.sha)
    return Repository(name, files, closed)


def _is_closed(api: "huggingface_hub.HfApi", name: str, hub_token: str | bool) -> bool:
    from huggingface_hub.errors import GatedRepoError

    try:
        api.auth_check(name, token=hub_token)
    except GatedRepoError:
        return True
    return False


def request_failure(name: str, error: Exception) -> Message:
    """Return the message for a failed request about a repository."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, ConfigError):
        return error.problems[0]
    if isinstance(error, GatedRepoError):
        return licence(name)
    if isinstance(error, RepositoryNotFoundError):
        return Message("There is no Hugging Face repository {name}, or it is private: check the spelling.", name=name)
    return Message(
        "The Hugging Face Hub cannot be reached for {name} ({reason}): go online, and try again.",
        name=name,
        reason=first_line(error),
    )


def licence(name: str) -> Message:
    template = "{name} is gated: accept its licence at https://huggingface.co/{name}, then set a token as HF_TOKEN"
    return Message(template, name=name)


def target_path(folder: Path, file: RemoteFile, endings: Sequence[str] = (WEIGHTS_SUFFIX,)) -> Path:
    """Return the target of a file: FOLDER/REPOSITORY/NAME. Raises ConfigError for unsafe names."""
    parts = (file.repository.rpartition("/")[2], file.name)
    for part in parts:
        if not SAFE_NAME.fullmatch(part) or RESERVED.fullmatch(part):
            raise ConfigError(
                "{path} of {repository} has a name that cannot be used for a file",
                path=file.path[:200],
                repository=file.repository,
            )
    if not file.name.endswith(tuple(endings)):
        raise ConfigError(
            "{path} may hold code and is not downloaded: choose a .safetensors file", path=file.path[:200]
        )
    return folder.joinpath(*parts)


def unfinished(path: Path, file: RemoteFile) -> Path:
    # The hash is part of the name, so that a newer version of the file never continues an older download.
    return path.with_name(f".{path.stem}.{(file.sha256 or file.commit)[:12]}.part")


def still_needed(path: Path, file: RemoteFile) -> int:
    """Return the remaining bytes of a download."""
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size == file.size:
            return 0
        return max(0, file.size - unfinished(path, file).stat().st_size)
    return file.size


def download_file(file: RemoteFile, path: Path, report: Report) -> Path:
    """Download a file, or resume its download, to a path from `target_path`. Returns the path.

    Raises ConfigError when the download fails, the disk is full, another process downloads the same file, its size or
    hash is wrong, or another file has its name. A partial download is kept for resuming, unless it is wrong.
    """
    _restrict_hosts()
    lock = registry.data_folder() / "downloads" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.lock"
    with locking.hold_lock(lock, 0.5) as mine:
        if not mine:
            raise ConfigError("{path} is being downloaded already: wait until that has ended, or stop it", path=path)
        if path.exists():
            return _existing_file(path, file, report)
        part = unfinished(path, file)
        with clear_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _download_rest(part, file, report)
            try:
                _verify_download(part, path, file, report)
            except ConfigError:
                remove(part)
                raise
            # This flushes the renamed file before it gets its final name.
            return write_atomic(path, lambda temporary: replace(part, temporary))


def _download_rest(part: Path, file: RemoteFile, report: Report) -> None:
    """Download the remaining bytes of a file."""
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get

    done = part.stat().st_size if part.exists() else 0
    if done > file.size:  # not a part of this file
        remove(part)
        done = 0
    need_space(part, file.size - done)
    address = f"{constants.ENDPOINT}/{file.repository}/resolve/{file.commit}/{quote(file.path)}"
    hub_token = token()

    class ByteCount:
        """Reports the progress of huggingface_hub, in place of its progress bar."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.done = done
            report(Message("{file}", file=file.name), done, file.size)

        def update(self, more: float = 1) -> None:
            self.done += int(more)
            report(Message("{file}", file=file.name), self.done, file.size)

        def __enter__(self) -> "ByteCount":
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            """Nothing to close."""

    bar: Any = ByteCount
    headers = {"authorization": f"Bearer {hub_token}"} if hub_token else {}
    with part.open("ab") as out:
        try:
            http_get(address, out, resume_size=done, headers=headers, expected_size=file.size, tqdm_class=bar)
        except (ConfigError, KeyboardInterrupt):
            raise
        except HfHubHTTPError as e:
            raise ConfigError(request_failure(file.repository, e)) from e
        except Exception as e:  # of the network
            if isinstance(e, OSError) and e.errno is not None:  # of the disk
                raise
            template = (
                "The download of {name} was interrupted ({reason}): start it again; it continues where it stopped."
            )
            raise ConfigError(template, name=file.name, reason=first_line(e)) from e


def _verify_download(part: Path, path: Path, file: RemoteFile, report: Report) -> None:
    """Raise ConfigError unless a file has the stated size and hash, and can be read without executing code."""
    size = part.stat().st_size
    if size != file.size or (file.sha256 and _sha256(part, file, report) != file.sha256):
        raise ConfigError(
            "{name} is not the file that the hub describes, as its {what} differs: it was removed, download it again",
            name=path.name,
            what="size" if size != file.size else "SHA-256",
        )
    if file.name.endswith(WEIGHTS_SUFFIX):
        weights.header_entries(part)


def _existing_file(path: Path, file: RemoteFile, report: Report) -> Path:
    """Return the path of an existing file. Raises ConfigError if it is another file."""
    if path.stat().st_size != file.size or (file.sha256 and _sha256(path, file, report) != file.sha256):
        raise ConfigError("{path} exists and is another file: choose another folder, or move it away", path=path)
    return path


def _sha256(path: Path, file: RemoteFile, report: Report) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as content:
        while block := content.read(HASH_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            report(Message("checking {file}", file=file.name), done, file.size)
    return digest.hexdigest()


def _restrict_hosts() -> None:
    """Refuse requests of this process to other hosts than the hub's, including redirects."""
    with _guarded:
        session = huggingface_hub.get_session()
        if _refuse_other_host in session.event_hooks["request"]:
            return
        kind, existing_hooks = type(session), session.event_hooks["request"]

        def make_client() -> Any:
            hooks = {"request": [*existing_hooks, _refuse_other_host]}
            return kind(event_hooks=hooks, follow_redirects=True, timeout=None)

        huggingface_hub.set_client_factory(make_client)


def _refuse_other_host(request: Any) -> None:
    """Raise ConfigError for a request to another host than the hub's. Plain HTTP is allowed only to its own address."""
    endpoint = urlsplit(constants.ENDPOINT)
    host, scheme = request.url.host, request.url.scheme
    if (scheme, host, request.url.port) == (endpoint.scheme, endpoint.hostname, endpoint.port):
        return
    if scheme != "https" or not any(host == domain or host.endswith(f".{domain}") for domain in HOSTS):
        raise ConfigError(
            "The hub redirects to {host}, which is not an address of Hugging Face, so that was not followed.", host=host
        )


def remote_files(names: Iterable[str]) -> list[RemoteFile]:
    """Look up files by `owner/name/path`, in their current versions. Raises ConfigError, also for gated
    repositories."""
    requested = [(f"{owner}/{name}", path) for owner, name, path in (f"{text}//".split("/", 2) for text in names)]
    repositories = {name: repository(name) for name in dict.fromkeys(name for name, _ in requested)}
    files = []
    for name, path in ((name, path.rstrip("/")) for name, path in requested):
        if repositories[name].closed:
            raise ConfigError(licence(name))
        if path not in repositories[name].files:
            available = ", ".join(sorted(repositories[name].files)[:8]) or "no .safetensors file"
            raise ConfigError(
                "{repository} has no file {path}; it has {there}", repository=name, path=path, there=available
            )
        files.append(repositories[name].files[path])
    return files
