"""Prompt files as rows of a form, and rows as lines of a prompt file. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from library.config.outside_files import read_outside_text
from library.config.problems import ConfigError, Message, MessageLike, Problem, join_messages, raise_if_any
from library.sampling.prompts import (
    LETTERS,
    RANDOM_SEED,
    Prompt,
    check_number,
    find_value_problems,
    option_of,
    parse_line,
    parse_line_at,
    prompt_lines,
    read_prompts,
)

Row = Mapping[str, str]  # texts by field of Prompt; the rest of a line is in REST
REST = "rest"
REFERENCES_FIELD, BETWEEN = "control_image_path", ";"  # the field that may name several files, and their separator
LETTER = {name: letter for letter, (name, _, _) in LETTERS.items()}


def prompt_rows_of_file(path: Path) -> list[dict[str, str]]:
    """Return the prompts of a file as texts; without prompts none. Raises ConfigError like `read_prompts`."""
    if path.suffix.lower() in (".toml", ".json"):
        return [row_of_prompt(prompt) for prompt in read_prompts(path)]
    lines = [*prompt_lines(read_outside_text(path))]
    check_number(len(lines), path)
    return [_row_of_line(line, number) for number, line in lines]


def row_of_prompt(prompt: Prompt) -> dict[str, str]:
    """Return a prompt as texts by field."""
    row = {name: str(value) for name, value in vars(prompt).items() if value is not None}
    references = prompt.control_image_path or ()
    if any(BETWEEN in path for path in references):  # the field cannot show the separator
        del row[REFERENCES_FIELD]
        return row | {REST: "".join(f" --{LETTER[REFERENCES_FIELD]} {path}" for path in references)}
    return row | ({REFERENCES_FIELD: f"{BETWEEN} ".join(references)} if references else {})


def _field_values(name: str, value: str) -> list[str]:
    return [part.strip() for part in (value.split(BETWEEN) if name == REFERENCES_FIELD else [value]) if part.strip()]


def _row_of_line(line: str, number: int) -> dict[str, str]:
    """Return a line's row. Parts without a field, or not understood, are kept as written."""
    first, *pieces = line.split(" --")
    row = row_of_prompt(replace(parse_line_at(Message("line {number}", number=number), line), prompt=first))
    unread = row.get(REST, "") + "".join(f" --{piece}" for piece in pieces if option_of(piece) is None)
    return row | ({REST: unread} if unread else {})


def prompt_line(row: Row) -> str:
    """Return the line of a .txt file for a row: "a cat --n blurry --w 640 --d 1"."""
    line = row["prompt"].strip()
    for name, letter in LETTER.items():
        line += "".join(f" --{letter} {value}" for value in _field_values(name, row.get(name, "")))
    return line + row.get(REST, "")


def rows_as_text(rows: Sequence[Row], before: str = "") -> str:
    """Return a .txt file with these rows; comments and blank lines of the file `before` keep their places.

    Skips rows without a prompt. Raises ConfigError for each row that cannot be written as a line.
    """
    numbered_rows = [(number, row) for number, row in enumerate(rows, start=1) if row.get("prompt", "").strip()]
    problems = [
        Problem("sample_prompts", ": row {number}: {why}", number=number, why=why)
        for number, row in numbered_rows
        if (why := _why_not(row))
    ]
    raise_if_any(problems)
    new, lines = [prompt_line(row) for _, row in numbered_rows], []
    prompt_numbers = {number for number, _ in prompt_lines(before)}
    for number, old in enumerate(before.removesuffix("\n").split("\n") if before else [], start=1):
        if number not in prompt_numbers:
            lines.append(old)
        elif new:
            lines.append(new.pop(0))
    return "\n".join([*lines, *new]) + "\n"


def _why_not(row: Row) -> MessageLike:
    """Return why a line would not be read back as this row; "" if it would."""
    for name, value in row.items():
        if not value.isprintable():
            return Message("{name} has to be one line of text", name=name)
    if row["prompt"].lstrip().startswith("#"):
        return Message("a prompt cannot begin with #, which begins a comment")
    try:
        read_back = row_of_prompt(parse_line(prompt_line({**row, REST: ""})))
    except ConfigError as e:
        return e.said
    wrong = []
    for name, value in row.items():
        if name in (REST, "prompt", "negative_prompt") or not value.strip() or _is_random_seed(name, value):
            continue
        if read_back.get(name) is None or not _same_value(name, read_back[name], value):
            wrong.append(Message("{name} cannot be {value}", name=name, value=repr(value.strip())))
    if wrong:
        return join_messages(wrong, "; ")
    if " --" not in row["prompt"] and any(not row.get(name, "").strip() for name in read_back):
        return Message("the prompt begins as an option does in a prompt file; write another word first")
    for name in ("prompt", "negative_prompt"):
        if read_back.get(name, "") != row.get(name, "").strip():
            template = (
                "{name} holds a blank and two dashes, which begin an option in a prompt file: remove them, and use the "
                "fields for options"
            )
            return Message(template, name=name)
    return join_messages([*find_value_problems(parse_line(prompt_line(row)))], "; ")


def _is_random_seed(name: str, value: str) -> bool:
    return name == "seed" and value.strip() == str(RANDOM_SEED)


def _same_value(name: str, first: str, second: str) -> bool:
    try:
        return _field_values(name, first) == _field_values(name, second) or float(first) == float(second)
    except ValueError:
        return False
