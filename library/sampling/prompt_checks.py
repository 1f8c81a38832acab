"""Options of a prompt file that do not do what they say, and images that cannot be read."""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping
from library.config.outside_files import parse_json, parse_toml, read_outside_text
from library.config.problems import Message, MessageLike, Problem
from library.config.run_config import ControlUse
from library.sampling import prompts as prompt_files
from library.sampling.prompts import (
    LETTERS,
    OTHER_MODELS,
    SAMPLERS,
    SIDES,
    SMALLEST_SIDE,
    TEXT,
    WHOLE,
    Prompt,
    option_of,
    prompt_lines,
    rounded_side,
)

NO_CONTROLS = ControlUse()
# An option that is part of the text before it: without a blank, or with a tab or a long dash that an editor has made.
GLUE = "glued"  # the name of such an option in what follows, which is no field
GLUED = re.compile(rf"(?:(?<=[^ -])--|[\u2013\u2014])(?:{'|'.join(LETTERS)})(?=\s)", re.IGNORECASE)
# Options that not every model follows, or whose value may be one that is not known.
IDLE_BY_MODEL = {
    *OTHER_MODELS,
    "sample_sampler",
    "control_image_path",
    "control_image_mask_path",
    "controlnet_image",
    "flow_shift",
}


def broken_images(
    prompts: Iterable[Prompt], use: ControlUse, why_not: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """Yield the images that the model would be shown with these prompts but that cannot be read, each once, with the
    reason; "" for a missing one. `why_not` returns why a file is no image, "" if it is one."""
    for name in dict.fromkeys(
        name for prompt in prompts for name in prompt_files.prompt_images(prompt_files.with_used_images(prompt, use))
    ):
        if not Path(name).is_file():
            yield name, ""
        elif why := why_not(name):
            yield name, why


def unreadable(path: str | Path, use: ControlUse, why_not: Callable[[str], str]) -> Iterator[Problem]:
    """Yield the `broken_images` of a readable file of prompts as problems."""
    for image, why in broken_images(prompt_files.read_prompts(path), use, why_not):
        if why:
            yield Problem(
                "sample_prompts",
                ": {name} names an image that cannot be read: {image} ({why})",
                name=Path(path).name,
                image=image,
                why=why,
            )
        else:
            yield Problem(
                "sample_prompts",
                ": {name} names an image that does not exist: {image}",
                name=Path(path).name,
                image=image,
            )


def notes(path: str | Path, use: ControlUse = NO_CONTROLS, shifts: bool = False, multiple: int = 1) -> list[Problem]:
    """Return each option in the prompts of a readable file that does not do what it says; `use` says what images the
    model is shown, `shifts` whether a prompt may shift the sigmas, and sides are multiples of `multiple`."""
    path = Path(path)
    return [
        Problem("sample_prompts", ": {name}, {where}: {what} {why}", name=path.name, where=where, what=option, why=why)
        for where, entry in _entries(path)
        for option, why in _idle(entry, use, shifts, multiple)
    ]


def line_notes(line: str, use: ControlUse, shifts: bool, multiple: int) -> list[Message]:
    return [Message("prompt: {what} {why}", what=option, why=why) for option, why in _idle(line, use, shifts, multiple)]


def _entries(path: Path) -> Iterator[tuple[MessageLike, str | JsonMapping]]:
    """Yield the prompts of a readable file as written there, lines or mappings of options, each with its place."""
    text = read_outside_text(path)
    if path.suffix.lower() == ".toml":
        common = dict(parse_toml(text, path)["prompt"])
        for number, entry in enumerate(common.pop("subset"), start=1):
            yield Message("subset {number}", number=number), {**common, **entry}
    elif path.suffix.lower() == ".json":
        for number, entry in enumerate(parse_json(text, path), start=1):
            yield Message("entry {number}", number=number), entry
    else:
        for number, line in prompt_lines(text):
            yield Message("line {number}", number=number), line


def _idle(
    entry: str | JsonMapping, use: ControlUse, shifts: bool, multiple: int
) -> Iterator[tuple[MessageLike, MessageLike]]:
    """Yield the options of a prompt that do not do what they say, as written there, each with the reason."""
    num_controls = 0
    for written, option in _written(entry):
        why = _why_idle(written, option, use, shifts)
        if not why and option and option[0] == "control_image_path":
            max_shown, num_controls = use.most or int(use.inpaints), num_controls + 1
            why = (
                Message("is ignored: this model takes at most {most} of them", most=max_shown)
                if num_controls > max_shown
                else ""
            )
        if why := why or _rounded(option, multiple):
            yield written, why


def _rounded(option: tuple[str, Any] | None, multiple: int) -> MessageLike:
    """Return what becomes of a side that the model cannot generate, as a reason; "" if it can."""
    if not option or option[0] not in SIDES:
        return ""
    side = int(float(option[1]))
    used = rounded_side(side, multiple)
    if used == side:
        return ""
    if side < SMALLEST_SIDE:
        return Message("becomes {used}, the shortest side of an image", used=used)
    return Message("becomes {used}, as sides are multiples of {multiple} here", used=used, multiple=multiple)


def _written(entry: str | JsonMapping) -> Iterator[tuple[str, tuple[str, Any] | None]]:
    """Yield the options of a prompt, each as it is written and as it is read; in a line they follow two dashes."""
    if isinstance(entry, str):
        first, *pieces = entry.split(" --")
        for piece in pieces:
            yield f"--{piece}", option_of(piece)
        for text in (first, *(piece for piece in pieces if _is_text(piece))):
            yield from ((option, (GLUE, option)) for option in GLUED.findall(text))
        return
    for name, value in entry.items():
        for part in value if isinstance(value, list) else [value]:
            if part is not None and name in (*IDLE_BY_MODEL, *SIDES):
                yield f"{name} = {part}", (name, part)


def _is_text(piece: str) -> bool:
    # In words as a value another option may have got lost.
    return LETTERS.get(piece.partition(" ")[0].lower(), ("", WHOLE, int))[1] is TEXT


def _why_idle(written: str, option: tuple[str, Any] | None, use: ControlUse, shifts: bool) -> MessageLike:
    """Return why an option of a prompt does not do what it says; "" if it does."""
    if option and option[0] == GLUE:
        return Message("is read as part of the text before it: begin an option with a space and two dashes")
    if option:
        if written.startswith("--") and (cut := _cut(written, option[1])):
            return cut
        if option[0] == "sample_sampler" and option[1] not in SAMPLERS:
            template = "is not a known sampler, so {used} is used; known are {names}"
            return Message(template, used=SAMPLERS[0], names=", ".join(SAMPLERS))
        effects = {"control_image_path": use.most or use.inpaints, "control_image_mask_path": use.inpaints}
        effects |= {"controlnet_image": use.guided, "flow_shift": shifts}
        works = effects.get(option[0], option[0] not in OTHER_MODELS)
        return "" if works else Message("is ignored: it is for other models")
    letter = written.removeprefix("--").partition(" ")[0].lower()
    if letter not in LETTERS:
        return Message(
            "is ignored: there is no such option; known are {names}",
            names=", ".join(f"--{letter}" for letter in LETTERS),
        )
    name, pattern, _ = LETTERS[letter]
    template = "is ignored: write a number of 0 or more after a space ({name})"
    return Message("is ignored: write text after a space ({name})" if pattern is TEXT else template, name=name)


def _cut(text: str, value: Any) -> MessageLike:
    """Return which part of a number in a line is not read, as a reason; "" if it is read whole."""
    letter, _, value_text = text.removeprefix("--").partition(" ")
    pattern = LETTERS[letter.lower()][1]
    value_text = value_text.strip()
    if pattern is TEXT or (pattern.fullmatch(value_text) and type(value)(value_text) == value):
        return ""
    return Message("is read as {value}; write a plain number", value=value)
