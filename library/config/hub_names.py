"""Names of files on the Hugging Face Hub as option values; makes no request."""

import re
from pathlib import Path

from library.config.problems import Problem

PART = re.compile(r"(?![.-])[\w .()+-]{1,150}(?<![. ])", re.ASCII)  # of the name of a file in a repository
REPOSITORY = re.compile(r"(?![.-])[\w.-]+(?<![.-])/(?![.-])[\w.-]+(?<![.-])", re.ASCII)
DRIVE = re.compile(r"[A-Za-z]:/")  # of Windows: file:///C:/cat.png
WEB = re.compile(r"([a-z][a-z0-9+.-]+):/+([^/].*)", re.I | re.S)  # https://x, and https:/x as a path has it
# The same as people mistype it: https:x, https:\\x; and //name:password@x, which else is a path.
ADDRESS = re.compile(
    r"[a-z][a-z0-9+.-]+:[\\/]+|(?:https?|ftps?|sftp|ssh|git|hf|s3|gs|smb|webdavs?):|"
    r"[\\/]{2,}(?=[^\\/?#:@]*:[^\\/?#]*@)",
    re.I,
)
# https://name:password@host, in the same forms.
NAME_AND_PASSWORD = re.compile(r"^([a-z][a-z0-9+.-]+:(?:[\\/]|%2f)*|[\\/]{2,})[^\\/?#]*@", re.I)
BEHIND_THE_PATH = re.compile(r"[?#;]")
# Addresses of pages, of downloads and of huggingface_hub's own file system: the repository, and the path in it.
ON_THE_HUB = re.compile(
    r"(?:https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/+)(?:models/)?(?!datasets/|spaces/)([\w.-]+/[\w.-]+)"
    r"(?:@[^/]+)?(?:/(?:resolve|blob|raw|tree)/[^/?#]+)?((?:/[^/?#]+)*)/?(?:[?#].*)?",
    re.ASCII | re.IGNORECASE,
)
MAX_ADDRESS_SHOWN = 120  # characters of an address in a message
# What options may name on the hub, and how: their other values are paths.
FILE, FOLDER = "file", "repository"
NAMES_ON_THE_HUB = {
    **dict.fromkeys(("base_weights", "assistant_lora", "sample_lora"), FILE),
    "pretrained_model_name_or_path": FOLDER,
}


def is_file_id(name: str) -> bool:
    """Return whether a name has the form owner/name/file.safetensors, possibly with folders, and is no local path."""
    parts = name.split("/")
    is_plain = all(PART.fullmatch(part) for part in parts) and "--" not in "/".join(parts[:2])
    return len(parts) > 2 and is_plain and name.endswith(".safetensors") and not Path(parts[0]).exists()


def repository_of(address: str) -> str:
    match = ON_THE_HUB.fullmatch(address)
    return match[1] if match else ""


def without_secrets(address: str) -> str:
    """Return the beginning of a web address without a password or what follows the path, which may be a token."""
    return _public_part(address)[:MAX_ADDRESS_SHOWN]


def _public_part(address: str) -> str:
    return BEHIND_THE_PATH.split(NAME_AND_PASSWORD.sub(r"\1", address, count=1), maxsplit=1)[0]


def about_secret(option: str, text: str) -> Problem | None:
    """Return the problem of a web address with a password or a token in place of a path, without that; None for
    anything else.
    """
    return about_address(option, text) if ADDRESS.match(text) and _public_part(text) != text else None


def about_address(option: str, text: str, takes: str | None = None) -> Problem | None:
    """Return the problem of a web address in place of a path, with what to write instead; None for anything else.

    `takes` is what the option may name on the hub: FILE, FOLDER, or "" for nothing; None: as NAMES_ON_THE_HUB says.
    """
    match = WEB.match(text)
    if not match and not ADDRESS.match(text):
        return None
    takes, shown_address = NAMES_ON_THE_HUB.get(option, "") if takes is None else takes, without_secrets(text)
    if match and match[1].lower() == "file":
        template = ": {address} is a browser address; write only the path: {path}"
        place = NAME_AND_PASSWORD.sub(r"\1", text).partition(":")[2].lstrip("/")
        path = place if DRIVE.match(place) else f"/{place}"
        return Problem(option, template, address=shown_address, path=path)
    hub_match = ON_THE_HUB.fullmatch(text)
    repository, file = (hub_match[1], (hub_match[2] or "").strip("/")) if hub_match else ("", "")
    name = f"{repository}/{file}" if file else repository
    if repository and not file and takes == FOLDER:
        template = ": {address} is a web address; write {id} instead, and it is fetched from Hugging Face"
        return Problem(option, template, address=shown_address, id=name, fix={option: name})
    if repository and not file and takes == FILE:
        return _about_repository(option, shown_address, repository)
    if is_file_id(name) and takes == FILE:
        template = ": {address} is a web address; write {id} instead, and it is fetched from Hugging Face"
        return Problem(option, template, address=shown_address, id=name)
    if is_file_id(name):
        template = ": {address} is a web address, not a path; fetch it with {command}, and give the path of the file"
        return Problem(option, template, address=shown_address, command=f"kohya models get {name}")
    template = (
        ": {address} is a web address, not a path; download it and give the path of the file or folder on this computer"
    )
    return Problem(option, template, address=shown_address)


def about_absent(option: str, path: str, takes: str | None = None) -> Problem:
    """Return the problem of a file that is not on this computer, with the way to get it from the hub, if it looks like
    a name there."""
    if problem := about_address(option, path, takes):
        return problem
    takes = NAMES_ON_THE_HUB.get(option, "") if takes is None else takes
    if takes == FILE and REPOSITORY.fullmatch(path) and not Path(path).parent.exists():
        return _about_repository(option, path, path)
    if takes != FILE and is_file_id(path):
        template = ": {path} does not exist here; fetch it with {command}, and give the path of the file"
        return Problem(option, template, path=path, command=f"kohya models get {path}")
    return Problem(option, ": {path} does not exist", path=path)


def _about_repository(option: str, shown: str, repository: str) -> Problem:
    template = ": {name} is a whole repository on Hugging Face; name one file in it: {example}"
    return Problem(option, template, name=shown, example=f"{repository}/<name>.safetensors")
