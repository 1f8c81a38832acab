"""Hugging Face Hub: upload a training's files, and download a state to resume from."""

import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import huggingface_hub

from library.config.building import replace_options
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem, first_line
from library.config.run_config import RunConfig
from library.outputs.paths import saved_kind

REPOSITORY_PREFIXES = {"dataset": "datasets/", "space": "spaces/"}  # kinds of repositories -> prefix of their address


# A wrong token must fail before hours of training, a broken network must not end them.
# Why: docs/decisions/2026-11-22-uploads-end-no-training.md
class Uploads:
    """Uploads files to a repository of the user. A failed upload causes a warning and does not end the training."""

    def __init__(self, config: RunConfig, run: Any) -> None:
        """`run` receives lines, warnings, events and phases (say, warn, event, phase)."""
        self._options, self._run = config.hub, run
        self._wanted = bool(config.hub.huggingface_repo_id)
        self._threads = ThreadPoolExecutor(1, "upload") if self._wanted and config.hub.async_upload else None
        self._waiting: dict[Path, Future[None]] = {}
        self._api: Any = None

    def begin(self) -> None:
        """Create the repository if it is missing. Raises ConfigError if it can be neither found nor created."""
        # Before the model is loaded, so that a wrong token is known before hours of training.
        options = self._options
        if not options.huggingface_repo_id:
            return
        self._api = huggingface_hub.HfApi(token=options.huggingface_token)
        private = (options.huggingface_repo_visibility or "").lower() != "public"
        try:
            self._api.create_repo(options.huggingface_repo_id, repo_type=self._kind, private=private, exist_ok=True)
        except Exception as e:  # three libraries raise errors of the network, the hub or the token
            raise ConfigError(
                Problem(
                    "huggingface_repo_id",
                    ": {repo} can be neither found nor made ({reason}); check the name, "
                    "the token's right to write and the network, or leave it out",
                    repo=options.huggingface_repo_id,
                    reason=_failure(e),
                )
            ) from e
        address = f"https://huggingface.co/{REPOSITORY_PREFIXES.get(self._kind or '', '')}{options.huggingface_repo_id}"
        self._run.say(f"Saved files are uploaded to {address}")

    def add(self, path: Path) -> None:
        """Upload a file or a folder under its own name; states only with save_state_to_huggingface."""
        if not self._wanted or (saved_kind(path) == "state" and not self._options.save_state_to_huggingface):
            return
        if self._threads:
            self._waiting[path] = self._threads.submit(self._send, path)
        else:
            self._run.phase(Message("uploading"))
            self._send(path)

    def wait_for(self, path: Path | None) -> None:
        if path in self._waiting:
            self._waiting.pop(path).result()

    def finish(self) -> None:
        """Wait for all uploads."""
        if self._waiting:
            self._run.say("waiting for uploads")
        for path in list(self._waiting):
            self.wait_for(path)
        if self._threads:
            self._threads.shutdown()

    def _send(self, path: Path) -> None:
        options = self._options
        name = "/".join(part for part in ((options.huggingface_path_in_repo or "").strip("/"), path.name) if part)
        where = {"repo_id": options.huggingface_repo_id, "repo_type": self._kind, "path_in_repo": name}
        try:
            if path.is_dir():
                self._api.upload_folder(folder_path=str(path), **where)
            else:
                self._api.upload_file(path_or_fileobj=str(path), **where)
        except Exception as e:
            self._run.warn(
                Message(
                    "{file} could not be uploaded ({reason}); it is in {folder}",
                    file=path.name,
                    reason=_failure(e),
                    folder=path.parent,
                )
            )
            return
        self._run.event("uploaded", file=str(path), repository=options.huggingface_repo_id, place=name)

    @property
    def _kind(self) -> str | None:
        return self._options.huggingface_repo_type or None


def find_upload_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield reasons why uploads would fail, as far as can be checked offline."""
    if not config.hub.huggingface_repo_id or config.hub.huggingface_token:
        return
    if not huggingface_hub.get_token():
        yield Problem(
            "huggingface_repo_id",
            ": uploading needs a token that may write; set HF_TOKEN, log in with `hf auth "
            "login`, or give huggingface_token",
        )


def fetched(config: RunConfig) -> Any:
    """Return the config with a local state; a state on the hub is downloaded.

    Raises ConfigError if the download fails.
    """
    if not config.steps.resume_from_huggingface or not config.steps.resume:
        return config
    repo, folder_in_repo, revision, kind = address(config.steps.resume)
    where: JsonObject = {"revision": revision, "repo_type": kind, "token": config.hub.huggingface_token}
    try:
        files = [
            file
            for file in huggingface_hub.HfApi().list_repo_files(repo, **where)
            if file.startswith(f"{folder_in_repo}/")
        ]
        snapshot = huggingface_hub.snapshot_download(repo, allow_patterns=files, **where) if files else None
    except Exception as e:
        raise ConfigError(
            Problem(
                "resume",
                ": {state} could not be downloaded ({reason}); check the name and the network, and "
                "set HF_TOKEN when it is private",
                state=config.steps.resume,
                reason=_failure(e),
            )
        ) from e
    if snapshot is None:
        raise ConfigError(
            Problem(
                "resume",
                ": the repository {repo} has no folder {where}; name one that ends in -state",
                repo=repo,
                where=folder_in_repo,
            )
        )
    return replace_options(config, resume=os.fspath(Path(snapshot) / folder_in_repo), resume_from_huggingface=False)


def address(text: str) -> tuple[str, str, str | None, str | None]:
    """Split owner/name/folder[:revision[:kind]] into repository, folder, revision and kind."""
    path, revision, kind = [*text.split(":"), "", ""][:3]
    owner, name, place = path.split("/", 2)
    return f"{owner}/{name}", place.strip("/"), revision or None, kind or None


def _failure(error: Exception) -> str:
    return re.sub(r"\s*\(Request ID:[^)]*\)", "", first_line(error)).rstrip(" .") or type(error).__name__
