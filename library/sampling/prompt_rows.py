"""Prompt files as rows of a form, and rows as lines of a prompt file. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from library.config.outside_files import read_text
from library.config.problems import ConfigError, Message, MessageLike, Problem, listed
from library.sampling.prompts import LETTERS, Prompt, option_of, parse_line, problem_of, prompt_lines, read

Row = Mapping[str, str]  # texts by field of Prompt; what a line says besides is in REST
REST = "rest"
REFERENCES, BETWEEN = "control_image_path", ";"  # the field that may name several files, and what divides them
LETTER = {name: letter for letter, (name, _, _) in LETTERS.items()}


def rows(path: Path) -> list[dict[str, str]]:
    """The prompts of a file as texts. Raises ConfigError as `read` does; a file without prompts has no rows."""
    if path.suffix.lower() in (".toml", ".json"):
        return [_row(prompt) for prompt in read(path)]
    return [_row_of_line(line) for _, line in prompt_lines(read_text(path))]


def _row(prompt: Prompt) -> dict[str, str]:
    row = {name: str(value) for name, value in vars(prompt).items() if value is not None}
    shown = prompt.control_image_path or ()
    if any(BETWEEN in path for path in shown):  # which the field cannot show
        del row[REFERENCES]
        return row | {REST: "".join(f" --{LETTER[REFERENCES]} {path}" for path in shown)}
    return row | ({REFERENCES: f"{BETWEEN} ".join(shown)} if shown else {})


def _parts(name: str, value: str) -> list[str]:
    """The values that a field's text says."""
    return [one.strip() for one in (value.split(BETWEEN) if name == REFERENCES else [value]) if one.strip()]


def _row_of_line(line: str) -> dict[str, str]:
    """A line's row. What has no field, or is not understood, is kept as it is written."""
    first, *pieces = line.split(" --")
    row = _row(replace(parse_line(line), prompt=first))
    rest = row.get(REST, "") + "".join(f" --{piece}" for piece in pieces if option_of(piece) is None)
    return row | ({REST: rest} if rest else {})


def line(row: Row) -> str:
    """The line of a .txt file for a row: "a cat --n blurry --w 640 --d 1"."""
    made = row["prompt"].strip()
    for name, letter in LETTER.items():
        made += "".join(f" --{letter} {value}" for value in _parts(name, row.get(name, "")))
    return made + row.get(REST, "")


def text(rows: Sequence[Row], before: str = "") -> str:
    """A .txt file with these rows; comments and blank lines of the file `before` stay where they are.

    Rows without a prompt are left out. Raises ConfigError for each row that cannot be written as a line.
    """
    wanted = [(number, row) for number, row in enumerate(rows, start=1) if row.get("prompt", "").strip()]
    problems = [
        Problem("sample_prompts", ": row {number}: {why}", number=number, why=why)
        for number, row in wanted
        if (why := _why_not(row))
    ]
    if problems:
        raise ConfigError(*problems)
    new, made = [line(row) for _, row in wanted], []
    taken = {number for number, _ in prompt_lines(before)}
    for number, old in enumerate(before.removesuffix("\n").split("\n") if before else [], start=1):
        if number not in taken:
            made.append(old)
        elif new:
            made.append(new.pop(0))
    return "\n".join([*made, *new]) + "\n"


def _why_not(row: Row) -> MessageLike:
    """Why a line would not be read as this row; "" where it is."""
    for name, value in row.items():
        if not value.isprintable():
            return Message("{name} has to be one line of text", name=name)
    if row["prompt"].lstrip().startswith("#"):
        return Message("a prompt cannot begin with #, which begins a comment")
    read_back, wrong = _row(parse_line(line({**row, REST: ""}))), []
    for name, value in row.items():
        if name in (REST, "prompt", "negative_prompt") or not value.strip():
            continue
        if read_back.get(name) is None or not _same(name, read_back[name], value):
            wrong.append(Message("{name} cannot be {value}", name=name, value=repr(value.strip())))
    if wrong:
        return listed(wrong, "; ")
    if " --" not in row["prompt"] and any(not row.get(name, "").strip() for name in read_back):
        return Message("the prompt begins as an option does in a prompt file; write another word first")
    for name in ("prompt", "negative_prompt"):
        if read_back.get(name, "") != row.get(name, "").strip():
            template = (
                "{name} holds a blank and two dashes, which begin an option in a prompt file: remove them, and use the "
                "fields for options"
            )
            return Message(template, name=name)
    return problem_of(parse_line(line(row)))


def _same(name: str, one: str, other: str) -> bool:
    try:
        return _parts(name, one) == _parts(name, other) or float(one) == float(other)
    except ValueError:
        return False
