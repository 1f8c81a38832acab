"""Resolve a path or a Hugging Face id to a local path, downloading the model if it is missing."""

import os
import re
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import huggingface_hub  # its modules load a network library, so they are imported where they are used

from library.config.hub_names import FOLDER, about_address
from library.config.problems import FLAG, ConfigError, Message, MessageLike, Problem, first_line

HUB_TIMEOUT = 5.0  # seconds for the hub to answer
ID = re.compile(r"[\w.-]+/[\w.-]+")
Answer = TypeVar("Answer")


def is_hub_id(name: str) -> bool:
    path = Path(name)
    return bool(ID.fullmatch(name)) and not path.parent.exists() and path.suffix not in (".safetensors", ".ckpt")


def _hub_problem(option: str, template: str, **facts: Any) -> Problem:
    place = "--" if option.startswith("--") else ""
    return Problem(option.removeprefix("--"), template, place=place, **facts)


def missing_model(option: str, name: str | None, expected: MessageLike) -> Problem | None:
    """Return the problem of a missing model; None if `name` is a file, a folder or possibly a Hugging Face id."""
    wanted = Message(expected) if isinstance(expected, str) else expected
    if not name:
        return _hub_problem(option, ": give {wanted}", wanted=wanted)
    if Path(name).exists() or is_hub_id(name):
        return None
    if problem := about_address(option.removeprefix("--"), name, FOLDER):
        return problem.replaced(place=FLAG if option.startswith(FLAG) else "")
    return _hub_problem(option, ": {name} does not exist: give {wanted}", name=name, wanted=wanted)


def local(name: str, option: str, choose: Callable[[Iterable[str]], list[str]], token: str | None) -> Path:
    """Return the local file or folder of a model; `choose` selects the files to download from a repository's list.

    Interrupted downloads are resumed. Without a network only the hub's cache is used. Raises ConfigError naming
    `option` if the model is not available.
    """
    if not is_hub_id(name):
        if problem := missing_model(option, name, "a file, a folder or a Hugging Face id (owner/name)"):
            raise ConfigError(problem)
        return Path(name)
    token = token or os.environ.get("HF_TOKEN")
    try:
        return Path(
            huggingface_hub.snapshot_download(name, allow_patterns=choose(list_repository(name, token)), token=token)
        )
    except Exception as e:
        if cached := cached_folder(name):
            return cached
        raise ConfigError(unavailable_repository(option, name, e)) from e


def unreachable_model(
    option: str, name: str, choose: Callable[[Iterable[str]], list[str]], token: str | None
) -> Problem | None:
    """Return why a model on the hub cannot be downloaded, within seconds and without a download; None if it can."""
    cached = cached_folder(name)
    if cached and _repository_has((file.relative_to(cached).as_posix() for file in cached.rglob("*")), choose):
        return None
    try:
        files = list_repository(name, token or os.environ.get("HF_TOKEN"))
        choose(files)  # may raise its own error about missing files
    except Exception as e:
        return unavailable_repository(option, name, e)
    if _repository_has(files, choose):
        return None
    return _hub_problem(option, ": {name} does not hold what is needed: choose another repository", name=name)


def _repository_has(names: Iterable[str], choose: Callable[[Iterable[str]], list[str]]) -> bool:
    try:
        return any(name.endswith(".safetensors") for name in choose(names))
    except ConfigError:
        return False


def cached_folder(name: str) -> Path | None:
    """Return the folder of a repository in the hub's cache, which may be incomplete; None if it is not there."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(huggingface_hub.snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def list_repository(name: str, token: str | None) -> list[str]:
    model_info = answered(lambda: huggingface_hub.HfApi().model_info(name, token=token, timeout=HUB_TIMEOUT))
    return [file.rfilename for file in model_info.siblings or ()]


def answered(question: Callable[[], Answer]) -> Answer:
    """Return the result of a hub request with a short timeout and no retry, to report a missing network soon."""
    answer: list[Answer | Exception] = []

    def ask() -> None:
        try:
            answer.append(question())
        except Exception as e:
            answer.append(e)

    # A name server that does not respond blocks for longer than any timeout of a request.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_TIMEOUT + 1)
    answer_or_error = answer[0] if answer else TimeoutError(f"no answer within {HUB_TIMEOUT:.0f} s")
    if isinstance(answer_or_error, Exception):
        raise answer_or_error
    return answer_or_error


def unavailable_repository(option: str, name: str, error: Exception) -> Problem:
    """Return the problem of a repository that is not available."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if isinstance(error, ConfigError):  # it exists, with other content
        return error.problems[0]
    if isinstance(error, GatedRepoError):
        steps = "accept its licence on https://huggingface.co/{name}, then set HF_TOKEN or --huggingface_token"
        template = ": {name} asks for a licence to be accepted: {advice}"
        return _hub_problem(option, template, name=name, advice=Message(steps, name=name))
    if isinstance(error, RepositoryNotFoundError):
        advice = Message("check the spelling, or set HF_TOKEN when it is private")
        return _hub_problem(option, ": there is no Hugging Face repository {name}: {advice}", name=name, advice=advice)
    template = (
        ": {name} is not in the Hugging Face cache and could not be downloaded ({reason}): "
        "go online, or give a file or folder"
    )
    return _hub_problem(option, template, name=name, reason=first_line(error))
