"""Prompt files for sample images: .txt with options after two dashes, .toml, .json."""

import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping, JsonValue
from library.config.outside_files import name_option, parse_json, parse_toml, read_outside_text
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted, raise_if_any
from library.config.run_config import ControlUse
from library.config.schema import section_options
from library.config.sections.sampling import MAX_STEPS, Sampling


@dataclass(frozen=True)
class Prompt:
    """One image to generate. What is None takes the family's own default."""

    prompt: str
    negative_prompt: str | None = None
    width: int | None = None
    height: int | None = None
    seed: int | None = None
    sample_steps: int | None = None
    scale: float | None = None
    guidance_scale: float | None = None
    sample_sampler: str | None = None
    control_image_path: tuple[str, ...] | None = None  # reference images, or the image in which something is painted
    control_image_mask_path: str | None = None  # where it is: bright
    training_mask: str | None = None  # in place of a mask's file, never in a prompt file: see `masks`
    controlnet_image: str | None = None  # the control image of a network that follows one
    flow_shift: float | None = None  # of the sigmas, in place of the model's own
    sample_sigmas: tuple[float, ...] | None = None  # of the steps; never in a prompt file, see `with_defaults`
    # For other models of sd-scripts: read, and without effect here.
    cfg_trunc_ratio: float | None = None
    renorm_cfg: float | None = None


Parsed = tuple[Prompt, list[MessageLike]]  # a prompt of a file, and what makes no sense in it


def _limit_steps(digits: str) -> int:
    return min(MAX_STEPS, int(digits))  # as upstream; 0 is refused


def _paths(value: JsonValue) -> tuple[str, ...]:
    if isinstance(value, list):
        if not all(isinstance(path, str) for path in value):
            raise TypeError(value)
        return tuple(map(str, value))
    return (str(value),)


WHOLE, DECIMAL, TEXT = (re.compile(p) for p in (r"\d+", r"[\d.]+", r".+"))
RANDOM_SEED = -1  # as other programs have it: no seed
SEED = re.compile(rf"{RANDOM_SEED}(?!\d)|\d+")
# The letters of a prompt line: option, what its value begins with (the rest is not read), and how that is read.
LETTERS: dict[str, tuple[str, re.Pattern[str], Callable[[str], Any]]] = {
    "w": ("width", WHOLE, int),
    "h": ("height", WHOLE, int),
    "d": ("seed", SEED, int),
    "s": ("sample_steps", WHOLE, _limit_steps),
    "l": ("scale", DECIMAL, float),
    "g": ("guidance_scale", DECIMAL, float),
    "n": ("negative_prompt", TEXT, str),
    "ss": ("sample_sampler", TEXT, str),
    "ci": ("control_image_path", TEXT, str),
    "cim": ("control_image_mask_path", TEXT, str),
    "cn": ("controlnet_image", TEXT, str),
    "ctr": ("cfg_trunc_ratio", TEXT, float),
    "rcfg": ("renorm_cfg", TEXT, float),
    "fs": ("flow_shift", DECIMAL, float),
}
OTHER_MODELS = ("cfg_trunc_ratio", "renorm_cfg")
IGNORED = {*OTHER_MODELS, "enum"}
FIELD_TYPES: dict[str, Callable[[Any], Any]] = {
    **{"prompt": str, "negative_prompt": str, "sample_sampler": str},
    **{"control_image_path": _paths, "control_image_mask_path": str, "controlnet_image": str},
    **{"width": int, "height": int, "seed": int, "sample_steps": int, "scale": float, "guidance_scale": float},
    "flow_shift": float,
}
IMAGE_FIELDS = ("control_image_path", "control_image_mask_path", "controlnet_image")
MAX_IMAGE_SIDE = 8192  # pixels of a side
MAX_PROMPTS = 10_000  # of a file
MAX_OPTIONS = 200  # of a prompt
LONGEST_PROMPT = 20_000  # characters with options; text encoders read at most some 4,000
STRONGEST = 1000  # of a scale or a shift
NO_PROMPT = {
    ".txt": ": {name} holds no prompt; write one per line",
    ".toml": ": {name} holds no prompt; write each as a table, [[prompt.subset]]",
    ".json": ": {name} holds no prompt; write a list of texts or of objects",
}
TOO_MANY = ": {name} holds {count}, and at most {most} are read: is this the right file?"
NO_TEXT = "{where} has no prompt"
NO_NUMBER: dict[Any, str] = {
    int: "{name} should be a whole number, not {value}",
    float: "{name} should be a number, not {value}",
}
SIDES = ("width", "height")
SMALLEST_SIDE = 64  # pixels, which every sampler generates at least
SAMPLERS = tuple(section_options(Sampling)["sample_sampler"].choices)


def read_prompts(path: str | Path) -> list[Prompt]:
    """Return all prompts of a file, in order. Raises ConfigError for every line or entry that makes no sense."""
    path = Path(path)
    with name_option("sample_prompts"):
        text, ending = read_outside_text(path), path.suffix.lower()
        tables = parse_toml(text, path) if ending == ".toml" else {}
        entries = parse_json(text, path) if ending == ".json" else []
    readers = {".toml": lambda: _from_toml(tables), ".json": lambda: _from_json(entries)}
    parsed = list(readers.get(ending, lambda: _parse_prompt_lines(text))())
    problems = [
        Problem("sample_prompts", ": {name}, {problem}", name=path.name, problem=problem)
        for _, prompt_problems in parsed
        for problem in prompt_problems
    ]
    check_number(len(parsed), path)
    raise_if_any(problems)
    if not parsed:
        raise ConfigError(Problem("sample_prompts", NO_PROMPT.get(ending, NO_PROMPT[".txt"]), name=path.name))
    return [prompt for prompt, _ in parsed]


def check_number(number: int, path: Path) -> None:
    """Raise ConfigError for a file with too many prompts."""
    if number > MAX_PROMPTS:
        count = counted(number, "prompt")
        raise ConfigError(Problem("sample_prompts", TOO_MANY, name=path.name, count=count, most=MAX_PROMPTS))


def with_used_images(prompt: Prompt, use: ControlUse) -> Prompt:
    """Return the prompt with only those of its images that the model can use."""
    max_shown = use.most or int(use.inpaints)
    return replace(
        prompt,
        control_image_path=(prompt.control_image_path or ())[:max_shown] or None,
        control_image_mask_path=prompt.control_image_mask_path if use.inpaints else None,
        training_mask=prompt.training_mask if use.inpaints else None,
        controlnet_image=prompt.controlnet_image if use.guided else None,
    )


def prompt_images(prompt: Prompt) -> tuple[str, ...]:
    other_images = (prompt.control_image_mask_path, prompt.controlnet_image)
    return (*(prompt.control_image_path or ()), *filter(None, other_images))


def rounded_side(side: int, multiple: int) -> int:
    return max(side // multiple * multiple, SMALLEST_SIDE)


def parse_line(line: str) -> Prompt:
    """`a cat --w 640 --h 960 --d 42 --n blurry` -> Prompt, by the rules of sd-scripts.

    Options are separated by a blank and two dashes. Unknown options, and those whose value does not begin as it should,
    are left out; `--ci` may occur several times. The text before the first option is the prompt, and is also read as an
    option. Raises ConfigError for a line that is too long for a prompt.
    """
    pieces = line.split(" --")
    _check_extent(len(pieces) - 1, len(line))
    options = [option for option in map(option_of, pieces) if option]
    values: dict[str, Any] = dict(options)
    if control_paths := tuple(value.strip() for name, value in options if name == "control_image_path"):
        values["control_image_path"] = control_paths
    return without_random_seed(Prompt(pieces[0], **values))


def _check_extent(num_options: int, num_characters: int) -> None:
    """Raise ConfigError for more than a prompt can have, on which reading would take long."""
    if num_options > MAX_OPTIONS:
        count = counted(num_options, "option")
        raise ConfigError("has {count}, and a prompt has at most {most}", count=count, most=MAX_OPTIONS)
    if num_characters > LONGEST_PROMPT:
        count = counted(num_characters, "character")
        raise ConfigError("has {count}, and a prompt has at most {most}", count=count, most=LONGEST_PROMPT)


def without_random_seed(prompt: Prompt) -> Prompt:
    """Return the prompt without a seed if it asks for a random one."""
    return replace(prompt, seed=None) if prompt.seed == RANDOM_SEED else prompt


def drawn_seed() -> int:
    return secrets.randbelow(2**32)


def with_drawn_seeds(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return the prompts, each that has no seed with a random one, so that its image can be generated again."""
    return [replace(prompt, seed=drawn_seed()) if prompt.seed is None else prompt for prompt in prompts]


def seeds_of(prompts: Iterable[Prompt]) -> list[int | None]:
    return [prompt.seed for prompt in prompts]


def option_of(piece: str) -> tuple[str, Any] | None:
    """`w 640px` -> ("width", 640); None for what is no option."""
    letter, blank, value = piece.partition(" ")
    if not blank or letter.lower() not in LETTERS:
        return None
    name, pattern, kind = LETTERS[letter.lower()]
    match = pattern.match(value.strip())
    try:
        return (name, kind(match[0])) if match else None
    except ValueError:
        return None


def prompt_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that hold prompts, with their numbers; a comment begins with #."""
    for number, line in enumerate(text.split("\n"), start=1):
        if (written := line.strip()) and not written.startswith("#"):
            yield number, written


def _parse_prompt_lines(text: str) -> Iterator[Parsed]:
    for number, line in prompt_lines(text):
        yield _from_line(line, Message("line {number}", number=number))


def parse_line_at(where: MessageLike, line: str) -> Prompt:
    """Return the prompt of `parse_line`. Raises ConfigError that names the place of the line."""
    try:
        return parse_line(line)
    except ConfigError as e:
        raise ConfigError("{where} {problem}", where=where, problem=e.said) from None


def _from_line(line: str, where: MessageLike) -> Parsed:
    try:
        prompt = parse_line_at(where, line)
    except ConfigError as e:
        return Prompt(""), [e.said]
    return prompt, _problems_at(where, prompt)


def _from_toml(tables: JsonMapping) -> Iterator[Parsed]:
    common = tables.get("prompt", {})
    entries = common.pop("subset", []) if isinstance(common, dict) else []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(Problem("sample_prompts", ": prompts in TOML are tables, [[prompt.subset]]"))
    if entries and (outside := [name for name in tables if name != "prompt"]):
        # Unread, a size at the top would be silently without effect.
        yield Prompt(""), [Message("{options}: only [prompt] is read; move it there", options=", ".join(outside))]
    for number, entry in enumerate(entries, start=1):
        if repeated := sorted(common.keys() & entry.keys()):
            template = "subset {number}: {options} is in [prompt], too; keep one of the two"
            yield Prompt(""), [Message(template, number=number, options=", ".join(repeated))]
        else:
            yield _from_mapping({**common, **entry}, Message("subset {number}", number=number))


def _from_json(entries: Any) -> Iterator[Parsed]:
    if not isinstance(entries, list):
        raise ConfigError(Problem("sample_prompts", ": a JSON prompt file is a list of texts or of objects"))
    for number, entry in enumerate(entries, start=1):
        if isinstance(entry, str):
            where = Message("entry {number}", number=number)
            yield _from_line(entry, where) if entry.strip() else (Prompt(""), [Message(NO_TEXT, where=where)])
        elif isinstance(entry, dict):
            yield _from_mapping(entry, Message("entry {number}", number=number))
        else:
            yield Prompt(""), [Message("entry {number} is neither a text nor an object", number=number)]


def _from_mapping(values: JsonMapping, where: MessageLike) -> Parsed:
    try:
        _check_extent(sum(len(v) if isinstance(v, list) else 1 for v in values.values()), len(str([*values.values()])))
    except ConfigError as e:
        return Prompt(""), [Message("{where} {problem}", where=where, problem=e.said)]
    fields = {k: v for k, v in values.items() if k in FIELD_TYPES and v is not None}
    problems: list[MessageLike] = []
    if unknown := sorted(values.keys() - FIELD_TYPES.keys() - IGNORED):
        template = "{where}: there is no option {unknown}; known are {names}"
        problems.append(Message(template, where=where, unknown=", ".join(unknown), names=", ".join(FIELD_TYPES)))
    if not str(fields.get("prompt", "")).strip():
        problems.append(Message(NO_TEXT, where=where))
    read: dict[str, Any] = {"prompt": ""}
    for name, value in fields.items():
        try:
            read[name] = _number_of_field(name, value, FIELD_TYPES[name])
        except ConfigError as e:
            problems.append(Message("{where}: {problem}", where=where, problem=e.said))
    prompt = without_random_seed(Prompt(**read))
    return prompt, [*problems, *_problems_at(where, prompt)]


def _number_of_field(name: str, value: JsonValue, kind: Callable[[Any], Any]) -> Any:
    """Return the value of a prompt's field in a TOML or JSON file. Raises ConfigError for another kind of value."""
    try:
        if kind is not _paths and isinstance(value, bool | list | dict):
            raise TypeError(value)
        if kind is str and isinstance(value, float) and not math.isfinite(value):
            raise TypeError(value)
        if kind in (int, float) and isinstance(value, str) and "_" in value:  # which Python takes for a separator
            raise ValueError(value)
        if kind is int and float(value) != int(float(value)):  # type: ignore[arg-type]  # a part of it would be lost
            raise ValueError(value)
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        template = "{name} should be text, not {value}" if kind in (str, _paths) else NO_NUMBER[kind]
        raise ConfigError(template, name=name, value=repr(value)) from None


def _problems_at(where: MessageLike, prompt: Prompt) -> list[MessageLike]:
    return [Message("{where}: {problem}", where=where, problem=why) for why in find_value_problems(prompt)]


def find_value_problems(prompt: Prompt) -> Iterator[Message]:
    """Yield what makes no sense in a prompt."""
    limits = {"sample_steps": (1, MAX_STEPS), **dict.fromkeys(SIDES, (1, MAX_IMAGE_SIDE))}
    limits |= dict.fromkeys(("scale", "guidance_scale", "flow_shift"), (0, STRONGEST))
    for name, (least, most) in limits.items():
        number = getattr(prompt, name)
        if number is not None and not least <= number <= most:
            template = "{name} must be from {least} to {most}, not {number}"
            yield Message(template, name=name, least=least, most=most, number=number)
    if prompt.flow_shift == 0:
        yield Message("flow_shift 0 leaves no noise to begin with; write 3, or leave it out")
    if prompt.seed is not None and not -(2**63) <= prompt.seed < 2**64:  # the seeds that PyTorch takes
        yield Message("seed {seed} is out of range; write one from 0 to 2^64 - 1", seed=prompt.seed)


def with_defaults(prompt: Prompt, defaults: JsonMapping, multiple: int) -> Prompt:
    """Fill in what the prompt leaves open, and round its size down to what the model can generate.

    An unknown sampler becomes the first of all, as in sd-scripts. A prompt with steps or a shift of its own takes no
    list of sigmas.
    """
    if prompt.sample_steps or prompt.flow_shift:
        defaults = {name: value for name, value in defaults.items() if name != "sample_sigmas"}
    if prompt.sample_sampler and prompt.sample_sampler not in SAMPLERS:
        prompt = replace(prompt, sample_sampler=SAMPLERS[0])
    filled = replace(prompt, **{k: v for k, v in defaults.items() if getattr(prompt, k) is None})
    width, height = (rounded_side(side or 0, multiple) for side in (filled.width, filled.height))
    return replace(filled, width=width, height=height)
