"""A model named by a path or by its Hugging Face id -> a path on this machine, fetched when it is not there yet."""

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from library.config.schema import ConfigError

ID = re.compile(r"[\w.-]+/[\w.-]+")


def is_id(name: str) -> bool:
    """Whether a name reads as owner/name and is no path here, not even one whose last part is misspelt."""
    path = Path(name)
    return bool(ID.fullmatch(name)) and not path.parent.exists() and path.suffix not in (".safetensors", ".ckpt")


def missing(option: str, name: str | None, wanted: str) -> str | None:
    """The sentence for a model that is nowhere, or None when `name` is a file, a folder or can be a Hugging Face id."""
    if not name:
        return f"{option}: give {wanted}"
    if Path(name).exists() or is_id(name):
        return None
    return f"{option}: {name} does not exist: give {wanted}"


def local(name: str, option: str, wanted: Callable[[Iterable[str]], list[str]], token: str | None = None) -> Path:
    """The file or folder of a model; `wanted` picks the files to fetch from the list of those that a repository has.

    A download goes on where an earlier one stopped. Without a network the hub's cache is used as it is.
    Raises ConfigError naming `option` when the model cannot be had.
    """
    if not is_id(name):
        if problem := missing(option, name, "a file, a folder or a Hugging Face id (owner/name)"):
            raise ConfigError(problem)
        return Path(name)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    token = token or os.environ.get("HF_TOKEN")
    try:
        files = wanted(HfApi().list_repo_files(name, token=token))
        return Path(snapshot_download(name, allow_patterns=files, token=token))
    except GatedRepoError as e:
        advice = f"accept its licence on https://huggingface.co/{name}, then set HF_TOKEN or --huggingface_token"
        raise ConfigError(f"{option}: {name} asks for a licence to be accepted: {advice}") from e
    except RepositoryNotFoundError as e:
        advice = "check the spelling, or set HF_TOKEN when it is private"
        raise ConfigError(f"{option}: there is no Hugging Face repository {name}: {advice}") from e
    except Exception as e:  # no network, in the words of whichever library noticed it
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except LocalEntryNotFoundError:
            reason = (str(e).strip().splitlines() or [type(e).__name__])[0]
        raise ConfigError(
            f"{option}: {name} is not in the Hugging Face cache and could not be downloaded ({reason}): "
            "go online, or give a file or folder"
        ) from e
