"""Options of a prompt file that do not do what they say, and images that cannot be read."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from library.config.json_types import JsonMapping
from library.config.outside_files import parse_json, parse_toml, read_outside_text
from library.config.problems import Message, MessageLike, Problem
from library.config.run_config import ControlUse
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
    parse_line,
    prompt_images,
    prompt_lines,
    read_prompts,
    rounded_side,
    with_used_images,
)

# An option that is part of the text before it: without a blank, or with a tab or a long dash that an editor has made.
GLUE = "glued"  # the name of such an option in what follows, which is no field
GLUED = re.compile(rf"(?:(?<=[^ -])--|[\u2013\u2014])(?:{'|'.join(LETTERS)})(?=\s)", re.IGNORECASE)
OPTION_IN_TEXT = re.compile(rf"(?<!\S)--(?:{'|'.join(LETTERS)})(?=\s)", re.IGNORECASE)  # an option within a text
# Options that not every model follows, or whose value may be one that is not known.
IDLE_BY_MODEL = {
    *OTHER_MODELS,
    "negative_prompt",
    "guidance_scale",
    "sample_sampler",
    "control_image_path",
    "control_image_mask_path",
    "controlnet_image",
    "flow_shift",
}


@dataclass(frozen=True)
class PromptUse:
    """What a model makes of the options of its prompts."""

    images: ControlUse = ControlUse()
    multiple: int = 1  # of sides
    idle: Mapping[str, MessageLike] = field(default_factory=dict)  # fields without effect on this model, and why
    # Whether negative prompts count at a scale; None for a prompt that names no scale.
    reads_negative: Callable[[float | None], bool] = lambda _: True


USUAL = PromptUse()
NAMES = {name: letter for letter, (name, _, _) in LETTERS.items() if name != "control_image_path"}


def broken_images(
    prompts: Iterable[Prompt], use: ControlUse, why_not: Callable[[str], str]
) -> Iterator[tuple[str, str]]:
    """Yield the images that the model would be shown with these prompts but that cannot be read, each once, with the
    reason; "" for a missing one. `why_not` returns why a file is no image, "" if it is one."""
    for name in dict.fromkeys(name for prompt in prompts for name in prompt_images(with_used_images(prompt, use))):
        if not Path(name).is_file():
            yield name, ""
        elif why := why_not(name):
            yield name, why


def unreadable(path: str | Path, use: ControlUse, why_not: Callable[[str], str]) -> Iterator[Problem]:
    """Yield the `broken_images` of a readable file of prompts as problems."""
    for image, why in broken_images(read_prompts(path), use, why_not):
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


def notes(path: str | Path, use: PromptUse = USUAL) -> list[Problem]:
    """Return each option in the prompts of a readable file that does not do what it says."""
    path = Path(path)
    return [
        Problem("sample_prompts", ": {name}, {where}: {what} {why}", name=path.name, where=where, what=option, why=why)
        for where, entry in _entries(path)
        for option, why in _idle(entry, use)
    ]


def line_notes(line: str, use: PromptUse) -> list[Message]:
    return [Message("prompt: {what} {why}", what=option, why=why) for option, why in _idle(line, use)]


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


def _idle(entry: str | JsonMapping, use: PromptUse) -> Iterator[tuple[MessageLike, MessageLike]]:
    """Yield the options of a prompt that do not do what they say, as written there, each with the reason."""
    most, num_controls = use.images.most or int(use.images.inpaints), 0
    written = [*_written(entry)]
    left = Counter(option[0] for _, option in written if option)
    scale = parse_line(entry).scale if isinstance(entry, str) else _scale_of(entry.get("scale"))
    for text, option in written:
        name = option[0] if option else ""
        left[name] -= 1
        why = _why_idle(text, option, use)
        if not why and name == "control_image_path":
            num_controls += 1
            if num_controls > most:
                why = Message("is ignored: this model takes at most {most} of them", most=most)
        elif isinstance(entry, str) and option and name in NAMES and left[name]:
            why = Message("is ignored: --{letter} follows once more", letter=NAMES[name])
        elif not why and name == "negative_prompt" and not use.reads_negative(scale):
            why = Message("is ignored: the scale (--l) switches guidance off, and with it negative prompts")
        if why := why or _rounded(option, use.multiple):
            yield text, why
    yield from _within_texts(entry)


def _scale_of(value: Any) -> float | None:
    return None if value is None else float(value)


def _within_texts(entry: str | JsonMapping) -> Iterator[tuple[MessageLike, MessageLike]]:
    """Yield what a text holds or begins with that looks like an option of a line."""
    if isinstance(entry, str):
        first = entry.split(" --")[0]
        if option := option_of(first):  # as in sd-scripts
            begins = " ".join(first.split(" ")[:2])
            yield begins, Message("is also read as {name}: begin the prompt with another word", name=option[0])
        if begins := OPTION_IN_TEXT.match(first):
            yield begins[0], Message("is read as part of the text: write the prompt first, then its options")
        return
    for text_field in ("prompt", "negative_prompt"):
        for text in OPTION_IN_TEXT.findall(str(entry.get(text_field) or "")):
            name = LETTERS[text.removeprefix("--").lower()][0]
            yield text, Message("is read as part of the text: write {name} beside it", name=name)


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
            if part not in (None, "") and name in (*IDLE_BY_MODEL, *SIDES):
                yield f"{name} = {part}", (name, part)


def _is_text(piece: str) -> bool:
    # In words as a value another option may have got lost.
    return LETTERS.get(piece.partition(" ")[0].lower(), ("", WHOLE, int))[1] is TEXT


def _why_idle(written: str, option: tuple[str, Any] | None, use: PromptUse) -> MessageLike:
    """Return why an option of a prompt does not do what it says; "" if it does."""
    if option and option[0] == GLUE:
        return Message("is read as part of the text before it: begin an option with a space and two dashes")
    if option:
        if reason := use.idle.get(option[0]):
            return Message("is ignored: {reason}", reason=reason)
        if written.startswith("--") and (cut := _cut(written, option[1])):
            return cut
        if option[0] == "sample_sampler" and option[1] not in SAMPLERS:
            template = "is not a known sampler, so {used} is used; known are {names}"
            return Message(template, used=SAMPLERS[0], names=", ".join(SAMPLERS))
        images = use.images
        effects = {"control_image_path": images.most or images.inpaints, "control_image_mask_path": images.inpaints}
        effects |= {"controlnet_image": images.guided}
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
    if pattern is WHOLE and pattern.fullmatch(value_text):
        return Message("is read as {value}, the largest number that is taken", value=value)
    return Message("is read as {value}; write a plain number", value=value)
