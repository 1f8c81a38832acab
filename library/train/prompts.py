"""Prompt files for sample images: .txt with options after two dashes, .toml, .json."""

import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from library.config.schema import ConfigError

MAX_STEPS = 1000


@dataclass(frozen=True)
class Prompt:
    """One image to draw. What is None takes the family's own default."""

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    sample_steps: int | None = None
    scale: float | None = None
    guidance_scale: float | None = None
    sample_sampler: str | None = None


# The letters of a prompt line, as sd-scripts has them.
LETTERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "w": ("width", int),
    "h": ("height", int),
    "d": ("seed", int),
    "s": ("sample_steps", int),
    "l": ("scale", float),
    "g": ("guidance_scale", float),
    "n": ("negative_prompt", str),
    "ss": ("sample_sampler", str),
}
OTHER_MODELS = {
    "cn": "control images",
    "ctr": "trimmed guidance",
    "rcfg": "renormalised guidance",
    "fs": "a flow shift",
}
IGNORED = {"controlnet_image", "cfg_trunc_ratio", "renorm_cfg", "flow_shift", "enum"}
KINDS = {name: kind for name, kind in LETTERS.values()} | {"prompt": str}


def read(path: str | Path) -> list[Prompt]:
    """All prompts of a file, in order. ConfigError names every line or entry that makes no sense."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(
            f"sample_prompts: {path} cannot be read as text ({type(e).__name__}); give a prompt file"
        ) from e
    readers = {".toml": _from_toml, ".json": _from_json}
    try:
        found = list(readers.get(path.suffix.lower(), _from_lines)(text))
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as e:
        raise ConfigError(f"sample_prompts: {path.name} is no valid {path.suffix[1:].upper()}: {e}") from e
    wrong = [f"sample_prompts: {path.name}, {problem}" for _, problem in found if problem]
    if wrong:
        raise ConfigError("\n".join(wrong))
    if not found:
        raise ConfigError(f"sample_prompts: {path.name} holds no prompt; write one per line")
    return [prompt for prompt, _ in found]


def parse_line(line: str, strict: bool = False) -> Prompt:
    """`a cat --w 640 --h 960 --d 42 --n blurry` -> Prompt.

    Options that make no sense are left out, as sd-scripts does it; with `strict` a wrong value raises ValueError.
    """
    text, *options = re.split(r"\s--(?=[a-zA-Z]{1,4}\s)", " " + line.strip())
    values: dict[str, Any] = {}
    for option in options:
        letter, _, value = option.partition(" ")
        if letter.lower() in LETTERS:
            name, kind = LETTERS[letter.lower()]
            try:
                values[name] = _number(name, value.strip(), kind)
            except ValueError:
                if strict:
                    raise
    return Prompt(text.strip(), **values)


def _from_lines(text: str) -> Iterator[tuple[Prompt, str]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            prompt = parse_line(line, strict=True)
            yield prompt, _problem(prompt, f"line {number}")
        except ValueError as e:
            yield Prompt(""), f"line {number}: {e}"


def _from_toml(text: str) -> Iterator[tuple[Prompt, str]]:
    common = tomllib.loads(text).get("prompt", {})
    entries = common.pop("subset", []) if isinstance(common, dict) else []
    for number, entry in enumerate(entries, start=1):
        if both := sorted(common.keys() & entry.keys()):
            yield Prompt(""), f"subset {number}: {', '.join(both)} stands in [prompt] too; keep one of the two"
        else:
            yield _from_mapping({**common, **entry}, f"subset {number}")


def _from_json(text: str) -> Iterator[tuple[Prompt, str]]:
    entries = json.loads(text)
    if not isinstance(entries, list):
        raise ConfigError("sample_prompts: a JSON prompt file is a list of texts or of objects")
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, str):
            yield from _from_lines(entry)
        elif isinstance(entry, dict):
            yield _from_mapping(entry, f"entry {number}")
        else:
            yield Prompt(""), f"entry {number} is neither a text nor an object"


def _from_mapping(values: Mapping[str, Any], where: str) -> tuple[Prompt, str]:
    known = {k: v for k, v in values.items() if k in KINDS and v is not None}
    if unknown := sorted(values.keys() - KINDS.keys() - IGNORED):
        return Prompt(""), f"{where}: there is no option {', '.join(unknown)}; known are {', '.join(KINDS)}"
    if not str(known.get("prompt", "")).strip():
        return Prompt(""), f"{where} has no prompt"
    try:
        prompt = Prompt(**{name: _number(name, value, KINDS[name]) for name, value in known.items()})
    except ValueError as e:
        return Prompt(""), f"{where}: {e}"
    return prompt, _problem(prompt, where)


def _number(name: str, value: Any, kind: Callable[[Any], Any]) -> Any:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} should be {'text' if kind is str else 'a number'}, not {value!r}") from None


def _problem(prompt: Prompt, where: str) -> str:
    if prompt.sample_steps is not None and not 1 <= prompt.sample_steps <= MAX_STEPS:
        return f"{where}: sample_steps {prompt.sample_steps} is not between 1 and {MAX_STEPS}"
    for name in ("width", "height"):
        size = getattr(prompt, name)
        if size is not None and not 64 <= size <= 8192:
            return f"{where}: {name} {size} is not between 64 and 8192"
    return ""


def with_defaults(prompt: Prompt, defaults: Mapping[str, Any], multiple: int) -> Prompt:
    """Fill in what the prompt leaves open, and round its size down to what the model can draw."""
    filled = replace(prompt, **{k: v for k, v in defaults.items() if getattr(prompt, k) is None})
    sides = {side: max(getattr(filled, side) // multiple * multiple, multiple) for side in ("width", "height")}
    return replace(filled, **sides)
