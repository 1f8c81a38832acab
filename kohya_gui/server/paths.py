"""The one guard for each path that a browser sends: files are listed, read, written, deleted in chosen folders only."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kohya_gui.server.allowed_folders import RESERVED, question
from library.config.schema import ConfigError, Reading, draft, options, values
from library.config.values import pasted

LONGEST = 2000
LARGEST = 1_000_000  # bytes of a config; a real one has a few thousand
CONFIGS = (".toml",)
LISTS = ("base_weights",)  # options of several files
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
WEB = re.compile(r"([a-z][a-z0-9+.-]+):/+([^/].*)", re.I | re.S)  # https://x, and https:/x as a path has it
HUB_PAGE = re.compile(r"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/(?!datasets/|spaces/)([\w.-]+/[\w.-]+)", re.I)
MODEL = "pretrained_model_name_or_path"  # which may be an id of the hub


# Where people keep models and pictures besides their home: other disks, and what rented machines mount.
PLACES = ("/workspace", "/data", "/mnt", "/media", "/run/media", "/storage", "/srv", "/Volumes",
          *(f"{letter}:\\" for letter in "DEFGHIJKLMNOPQRSTUVWXYZ"))  # fmt: skip


def roots(given: Sequence[str | Path] = ()) -> tuple[Path, ...]:
    """The folders below which files may lie: the user's home, the current folder, those given at the start (or in
    KOHYA_ROOTS), the cache of Hugging Face, and other disks."""
    named = [*given, *filter(None, os.environ.get("KOHYA_ROOTS", "").split(os.pathsep))]
    wanted = [Path.home(), Path.cwd(), *(Path(folder).expanduser() for folder in named), *_others()]
    return tuple(dict.fromkeys(folder.resolve() for folder in wanted))


def _others() -> Iterator[Path]:
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    for place in (Path(os.environ.get("HF_HUB_CACHE", home / "hub")), *map(Path, PLACES)):
        with contextlib.suppress(OSError):
            if place.is_dir() and any(place.iterdir()):
                yield place


def inside(text: Any, allowed: Sequence[Path], what: str = "path") -> Path:
    """A path from a browser -> the place that it really means, with symbolic links followed, or ConfigError.

    It is one of `allowed` or below one, and not in a hidden folder: those hold other programs' settings and keys.
    What lies there is not looked at. `what` names the field in the messages.
    """
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{what}: write where it is")
    text = pasted(text)
    if address := web_address(text, what):
        raise ConfigError(f"{what}: {address}")
    if len(text) > LONGEST or not text.isprintable() or _is_network(text) or _is_of_windows(text):
        raise ConfigError(f"{what}: this is not a path on this computer")
    try:
        path = Path(text).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):
        raise ConfigError(f"{what}: this is not a path on this computer") from None
    # Of several the innermost: a root that was named may lie in a hidden folder of another.
    below = min((path.relative_to(root) for root in allowed if path.is_relative_to(root)), key=_depth, default=None)
    if below is None:
        raise ConfigError(f"{what}: {path}{question(path, allowed)}")
    if any(len(os.fsencode(part)) > 255 for part in below.parts):
        raise ConfigError(f"{what}: a name in this path is longer than file systems allow")
    if any(part.startswith(".") or RESERVED.fullmatch(part) or ":" in part for part in below.parts):
        raise ConfigError(f"{what}: {below} is hidden or reserved; choose another place")
    return path


def folder(text: Any, allowed: Sequence[Path], what: str = "folder") -> Path:
    """Like `inside`, for a folder that must be there."""
    path = inside(text, allowed, what)
    if not os.path.isdir(path):
        raise ConfigError(f"{what}: {path} {'is not a folder' if os.path.exists(path) else 'does not exist'}")
    return path


def file(text: Any, allowed: Sequence[Path], endings: Iterable[str], what: str = "file") -> Path:
    """Like `inside`, for a file with one of `endings` (lower case, such as ".safetensors"), there or still to be."""
    path, endings = inside(text, allowed, what), tuple(endings)
    if path.suffix.lower() not in endings:
        raise ConfigError(f"{what}: {path.name or text} must end in {' or '.join(endings)}")
    return path


def present(text: Any, allowed: Sequence[Path], endings: Iterable[str], what: str = "file") -> Path:
    """Like `file`, for one that must be there."""
    path = file(text, allowed, endings, what)
    if not os.path.isfile(path):
        raise ConfigError(f"{what}: {path} {'is not a file' if os.path.exists(path) else 'does not exist'}")
    return path


def config_file(text: Any, allowed: Sequence[Path], endings: Sequence[str] = CONFIGS) -> Path:
    """Like `file`, for a config."""
    if not isinstance(text, str) or not text.strip():
        raise ConfigError("config file: write where it is, such as ~/kohya/cat.toml")
    return file(text, allowed, endings, "config file")


def readable(text: Any, allowed: Sequence[Path], endings: Sequence[str] = CONFIGS) -> Path:
    """Like `config_file`, for a file that must be there and be of a config's size."""
    config_file(text, allowed, endings)
    path = present(text, allowed, endings, "config file")
    if path.stat().st_size > LARGEST:
        raise ConfigError(f"config file: {path} is far too large to be a config")
    return path


def allow(config: Any, allowed: Sequence[Path]) -> None:
    """Raise ConfigError, with a line for each, unless all files and folders that a training names may be used.

    Ids of models on the hub are no paths and pass.
    """
    if problems := _outside(config, allowed):
        raise ConfigError("\n".join(line for _, line in problems))


def allowed(reading: Reading[Any], roots: Sequence[Path]) -> Reading[Any]:
    """A reading without the files and folders that may not be used, which nobody shall look at; it says which."""
    outside = _outside(reading.config, roots)
    kept = {name: value for name, value in values(reading.config).items() if name not in dict(outside)}
    return replace(
        reading,
        config=draft(type(reading.config), kept) if outside else reading.config,
        problems=[*reading.problems, *(line for _, line in outside)],
        wrong=reading.wrong | dict(outside).keys(),
    )


def _outside(config: Any, allowed: Sequence[Path]) -> list[tuple[str, str]]:
    """The options that name files and folders which may not be used, each with why."""
    problems = []
    known = options(type(config))
    for name, value in values(config).items():
        given = [value] if isinstance(value, str | Path) else value or ()
        for text in given if known[name].kind in ("file", "folder") or name in LISTS else ():
            if not str(text) or (HUB_ID.fullmatch(str(text)) and not os.path.exists(text)):
                continue
            try:
                inside(str(text), allowed, name)
            except ConfigError as error:
                problems.append((name, str(error)))
    return problems


def web_address(text: str, what: str = "") -> str:
    """What to give in the place of a web address, in a sentence; "" where it is none. `what` is the option."""
    found = WEB.match(pasted(text))
    if not found:
        return ""
    shown = pasted(text)[:120]
    if found[1].lower() == "file":
        return f"{shown} is an address of a browser; write the path alone: /{found[2]}"
    page = HUB_PAGE.match(pasted(text))
    if what == MODEL and page and not re.search(r"/(?:resolve|blob)/", text):
        return f"{shown} is a web address; write {page[1]} instead, and the model is fetched from Hugging Face"
    return f"{shown} is a web address, not a path; download it and give the path of the file or folder on this computer"


def _depth(path: Path) -> int:
    return len(path.parts)


def _is_of_windows(text: str) -> bool:
    """Whether this was pasted on a computer with Windows, and the page runs on another."""
    return os.name != "nt" and re.match(r"[A-Za-z]:[\\/]", text) is not None


def _is_network(text: str) -> bool:
    """Whether merely looking at this path would make Windows log in somewhere."""
    return os.name == "nt" and text.replace("/", "\\").startswith("\\\\")
