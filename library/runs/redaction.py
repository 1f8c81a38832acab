"""Remove private data from texts: names, paths, captions, prompts, tokens."""

import getpass
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonObject, JsonValue
from library.config.outside_files import load_toml, open_outside
from library.config.problems import ConfigError, Message
from library.runs import keys, layout, reader
from library.runs.refusal import ENVIRONMENT, Secrets

PROJECT_ROOT = Path(__file__).resolve().parents[2]
SHORT = 4  # minimum characters; shorter texts occur everywhere and reveal nothing
MAX_CAPTION_FILES, MAX_CAPTION_BYTES = 5000, 20_000  # limits: caption files to read, and bytes of each
PRIVATE_SUFFIXES = (".txt", ".caption", ".json", ".jsonl", ".csv", ".tsv", ".toml")
IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl")
# Options with folders of masks and references.
SECOND_PICTURES = ("conditioning_data_dir", "control_directory", "more_control_directories")
PLAIN_VALUE = re.compile(r"[\w.,:=+ -]{0,60}")  # values that are words from a list, not paths or sentences

# Options whose values are this program's own names; other text options are only shown as set or not.
NAMED_CHOICES = frozenset(
    (
        "network_module",
        "network_args",
        "optimizer_type",
        "optimizer_args",
        "lr_scheduler",
        "lr_scheduler_type",
        "lr_scheduler_args",
        "mixed_precision",
        "save_precision",
        "save_model_as",
        "compile_backend",
        "compile_mode",
        "compile_dynamic",
        "compile_profile",
        "dynamo_backend",
        "attn_mode",
        "split_mode",
        "loss_type",
        "huber_schedule",
        "timestep_sampling",
        "model_prediction_type",
        "model_type",
        "weighting_scheme",
        "resolution",
        "resize_interpolation",
        "sample_sampler",
        "sample_compile",
        "sample_attention",
        "caption_extension",
        "log_with",
        "console_log_level",
        "full_precision",
        "fp8_format",
        "text_encoder_lr",
        "block_lr",
    )
)
TOKENS = re.compile(r"hf_\w{8,}|\b[0-9a-f]{40}\b|sk-[\w-]{16,}|gh[pousr]_\w{16,}|(?<=\btoken=)[\w-]+")
# An absolute path: POSIX, Windows, a network share, or one in the home folder.
PATH = re.compile(
    r"(?:(?<![\w<>./])(?:~|/(?=[^\s/]))|\b[A-Za-z]:[\\/]|\\\\(?=\w)|file://|<(?!program|python)\w+>[\\/])"
)


# Unlike a list of forbidden values, a list of permitted ones cannot leak unforeseen data.
# Why: docs/decisions/2026-11-20-support-bundle-allows-by-name.md
@dataclass(frozen=True)
class Redactor:
    """Removes the private data of one run from texts."""

    secrets: Secrets
    names: tuple[tuple[re.Pattern[str], str], ...]  # patterns and their replacements, the longest first
    quoted: frozenset[str]  # captions and prompts: a line that contains one is removed

    def text(self, text: str) -> str:
        return "\n".join(self._line(line) for line in text.splitlines()) + ("\n" if text.endswith("\n") else "")

    def inside(self, value: JsonValue) -> Any:
        """Redact all texts and keys of a JSON value."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Message):
            return value.changed(self.text)
        if isinstance(value, Mapping):
            return {self.text(str(name)): self.inside(inner) for name, inner in value.items()}
        return [self.inside(inner) for inner in value] if isinstance(value, list | tuple) else value

    def _line(self, line: str) -> str:
        if any(words in line for words in self.quoted):
            return "<a line with a caption or a prompt>"
        line = TOKENS.sub("<token>", self.secrets.redact(line))
        for name, shown in self.names:
            line = name.sub(lambda _, shown=shown: shown, line)
        # Paths may contain spaces, so their end is unknown and the rest of the line is removed.
        match = PATH.search(line)
        return f"{line[: match.start()]}<path>" if match else line


def redactor_for(run: reader.RecordedRun) -> Redactor:
    """Return the Redactor of a run: for its own texts, its data set's, and this user's."""
    config = run.facts.get("config") or {}
    private = {value: f"<{name}>" for name, value in _config_texts(config) if name not in NAMED_CHOICES}
    private |= {Path(value).name: shown for value, shown in private.items() if "/" in value or "\\" in value}
    for name in ("output_name", "id", "output_dir", "folder"):
        if len(value := str(run.facts.get(name) or "")) >= SHORT:
            private[value] = f"<{name}>"
    private |= dict(_people())
    private[keys.stored_webhook()] = "<webhook>"
    quoted: set[str] = set()
    for file in _data(config):
        if len(file.stem) >= SHORT and not file.stem.isdigit():
            private.setdefault(file.stem, "<file>")
        private.setdefault(file.parent.name, "<folder>")
        if file.suffix.lower() in PRIVATE_SUFFIXES:
            quoted |= set(_private_lines(file))
    for event, _ in reader.new_events(run.folder):
        if event.get("kind") == "sample":
            quoted.add(str(event.get("prompt") or ""))
    quoted = {words for words in quoted if len(words) > SHORT}
    named = [*_installation(), *((name, shown) for name, shown in private.items() if len(name) >= SHORT)]
    longest = sorted(named, key=lambda pair: -len(pair[0]))
    patterns = tuple((_pattern(name), shown) for name, shown in longest)
    return Redactor(Secrets({**config, **keys.stored_keys()}), patterns, frozenset(quoted))


def _installation() -> Iterator[tuple[str, str]]:
    """Return the folders of the program and of Python, whose own names are hidden, but not the paths inside."""
    yield str(PROJECT_ROOT), "<program>"
    for folder in dict.fromkeys((sys.prefix, sys.base_prefix)):
        if len(folder) >= SHORT:
            yield folder, "<python>"


def _pattern(name: str) -> re.Pattern[str]:
    # A word matches anywhere, a path only at a path boundary: /data/cat, shown as <home>, is no prefix of /data/cats,
    # which would become <home>s.
    return re.compile(re.escape(name) + (r"(?![\w.~-]*\w)" if PATH.match(name) else ""))


def redacted_settings(config: JsonMapping) -> JsonObject:
    """Return the settings of a run by name; only numbers, switches and this program's names are kept."""
    plain = layout.without_secrets(config)
    return {
        name: redacted_settings(v) if isinstance(v, Mapping) else _redact_value(name, v) for name, v in plain.items()
    }


def _redact_value(name: str, value: JsonValue) -> Any:
    if isinstance(value, list | tuple):
        return [_redact_value(name, inner) for inner in value]
    if not isinstance(value, str):
        return value
    return value if name in NAMED_CHOICES and PLAIN_VALUE.fullmatch(value) else "<set>"


def _config_texts(config: JsonMapping) -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _config_texts(value)
        for text in value if isinstance(value, list | tuple) else [value]:
            if isinstance(text, str):
                yield name, text


def _people() -> Iterator[tuple[str, str]]:
    """Return the names of the user, the home folder and the computer."""
    yield str(Path.home()), "<home>"
    yield socket.gethostname(), "<computer>"
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    if user not in ("", "root", "user"):
        yield user, "<user>"
    for name in ENVIRONMENT:
        if os.environ.get(name):
            yield os.environ[name], "<token>"


def _data(config: JsonMapping) -> Iterator[Path]:
    """Return the files of the data set, and those with captions or prompts."""
    folders = [text for _, text in _texts_of(config, ("train_data_dir", "reg_data_dir", *SECOND_PICTURES))]
    for name, text in _texts_of(config, ("dataset_config", "in_json", "sample_prompts", "validation_prompts")):
        file = Path(os.path.expanduser(text))
        yield file
        if name == "dataset_config":
            folders += _folders_in(file)
    remaining = MAX_CAPTION_FILES
    for folder in folders:
        for where, _, names in os.walk(Path(os.path.expanduser(folder))):
            for name in names:
                if Path(name).suffix.lower() in (*PRIVATE_SUFFIXES, *IMAGES) and remaining > 0:
                    remaining -= 1
                    yield Path(where) / name


def _texts_of(config: JsonMapping, names: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(name, text) for name, text in _config_texts(config) if name in names]


def _folders_in(file: Path) -> list[str]:
    """Return folders and files named by a data set's own config."""
    try:
        tables = load_toml(file)
    except ConfigError:
        return []
    subsets = [s for d in tables.get("datasets") or [] if isinstance(d, dict) for s in d.get("subsets") or [d]]
    keys = ("image_dir", "image_directory", *SECOND_PICTURES)
    named = [s[key] for s in subsets if isinstance(s, dict) for key in keys if s.get(key)]
    return [str(folder) for value in named for folder in (value if isinstance(value, list) else [value])]


def _private_lines(file: Path) -> Iterator[str]:
    """Return the lines of a caption or prompt file; of JSON and TOML also the quoted texts."""
    try:
        with open_outside(file) as source:
            content = source.read(MAX_CAPTION_BYTES).decode("utf-8", "replace")
    except (ConfigError, OSError):
        return
    for line in content.splitlines():
        words = line.strip()
        yield words
        yield words.partition(" --")[0]
        yield from re.findall(r'"((?:[^"\\]|\\.){8,})"', words)
