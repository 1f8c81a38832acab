"""The page's messages beside the buttons: results, or problems with their place. Plain sentences in, HTML out."""

import html
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TypeVar

from kohya_gui.form import presets
from kohya_gui.i18n.sentences import data
from kohya_gui.server import allowed_folders
from library.check import isolated
from library.config.json_types import JsonMapping
from library.config.problems import (
    FLAG,
    Message,
    MessageLike,
    Problem,
    as_message,
    counted,
    ngettext,
    option_values,
    problem_from_json,
)
from library.importers.result import TO_FIX

T = TypeVar("T")
Places = Mapping[str, tuple[str, str]]  # option -> its label, its element's id
Fix = Callable[[Problem], Mapping[str, bool | str]]  # a problem -> values of fields that fix it

INEFFECTIVE_CODE = "ineffective"  # the code of a problem about an option without effect
OTHER_TAB = "other_tab"  # the code of the problem of a config for another tab, with that tab's id and title
VERDICT_SIGNS = {"ok": "✓", "hint": "!", "bad": "✗"}

UNDO = ' <button type="button" class="undo">Undo</button>'
AWAY = '<button type="button" class="away" aria-label="Close">✕</button>'

_number = count()  # makes each message unique, so that a repeated one counts as new


def good(text: MessageLike, notes: Iterable[MessageLike] = (), undo: bool = False) -> str:
    """Return a success message in one line. `notes` are folded if there are several, and open if one is a problem.
    `undo` offers to undo the filling."""
    notes = [_sentence(note) for note in notes]
    back = UNDO if undo else ""
    if len(notes) < 2:
        return _message("good", f"<p>{_spans([text, *notes])}{back}</p>", [text, *notes])
    more = counted(len(notes), "note")
    is_open = any(isinstance(note, Message) and note.template == TO_FIX for note in notes)
    fold = f"<details{' open' * is_open}><summary>{_spans([text, more])}{back}</summary>{_list(notes)}</details>"
    return _message("good", fold, [text, more, *notes])


def _spans(parts: Iterable[MessageLike]) -> str:
    return " ".join(f"<span>{html.escape(str(part))}</span>" for part in parts)


def _list(sentences: Iterable[MessageLike]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(str(sentence))}</li>' for sentence in sentences)}</ul>"


def loaded_html(
    text: Message, problems: Sequence[Problem], places: Places, fix: Fix, notes: Sequence[MessageLike]
) -> str:
    """Return the message about a loaded config: its problems, one per line with a button that fixes it, and then
    notes."""
    if not problems:
        return good(text, notes, undo=True)
    listed, marks, shown = _problem_lines(problems, places, fix)
    notes = [_sentence(note) for note in notes]
    more = counted(len(notes), "note")
    fold = f"<details><summary>{html.escape(str(more))}</summary>{_list(notes)}</details>" if notes else ""
    title = _problems_title(len(problems))
    head = f'<span>{html.escape(str(text))}</span> <b class="title">{html.escape(str(title))}</b>'
    body = f"<details open><summary>{head}{UNDO}</summary><ul>{listed}</ul>{fold}{_field_marks_style(marks)}</details>"
    return _message("warn", body, [text, title, more, *shown, *notes], alert=True)


def list_problems(problems: Sequence[Problem], places: Places, fix: Fix = lambda problem: {}) -> str:
    """Return problems to fix, one per line. Options that are on the page are named, marked, and linked to their
    fields."""
    listed, marks, shown = _problem_lines(problems, places, fix)
    title = _problems_title(sum(problem.code != OTHER_TAB for problem in problems))
    return _box("bad", title, f"<ul>{listed}</ul>{_field_marks_style(marks)}", shown, alert=True)


def _in_form_order(entries: Iterable[T], places: Places, problem_of: Callable[[T], Problem]) -> list[T]:
    """Return problems in the order of their fields, so that users fix them from top to bottom; those without a field
    last."""
    positions = {name: at for at, name in enumerate(places)}

    def position(entry: T) -> int:
        problem = problem_of(entry)
        is_placed = problem.place in ("", FLAG) and problem.option in positions
        return -1 if problem.code == OTHER_TAB else positions[problem.option] if is_placed else len(positions)

    return sorted(entries, key=position)


def _problem_lines(problems: Sequence[Problem], places: Places, fix: Fix) -> tuple[str, list[str], list[Message]]:
    """Return problems as lines with their buttons, the elements to mark, and the texts shown."""
    listed, marks, shown = "", list[str](), list[Message]()
    for problem in _in_form_order(problems, places, lambda problem: problem):
        line, element, text = _sentence_at_field(problem, places)
        shown.append(text)
        marks += [f"#{element}"] if element else []
        buttons = values_button(fix(problem), problem.code) + _allow_button(problem) + _other_button(problem)
        listed += f"<li>{line}{buttons}</li>"
    return listed, marks, shown


def report_html(
    report: JsonMapping,
    places: Places,
    fix: Callable[[JsonMapping], Mapping[str, bool | str]],
    model_files: Collection[str] = (),
) -> str:
    """Return all findings of a preflight check by topic, each with its mark and its fix, and the estimate of memory and
    time. `model_files` are the options whose files the dialog for base models finds and downloads."""
    listed, marks, shown = [], [], []
    all_bad = [finding for finding in report["findings"] if finding["verdict"] == "bad"]
    bad_findings = _in_form_order(all_bad, places, problem_from_json)
    others = [finding for finding in report["findings"] if finding["verdict"] != "bad"]
    for finding in (*bad_findings, *others):
        problem = problem_from_json(finding)
        line, element, text = _sentence_at_field(problem, places)
        shown.append(text)
        marks += [f"#{element}"] if element and finding["verdict"] == "bad" else []
        listed.append(
            f'<li class="{finding["verdict"]}"><i aria-hidden="true">{VERDICT_SIGNS[finding["verdict"]]}</i>'
            f"<b>{html.escape(finding['topic'])}</b>"
            f"<span>{line}{values_button(fix(finding), finding['code'])}{_allow_button(problem)}</span></li>"
        )
    failed = bool(report.get("failed"))
    title: MessageLike = "The check itself failed" if failed else "No problems found"
    if bad_findings:
        title = _problems_title(len(bad_findings))
    # Directly below the problems that it solves, as the end is out of sight on most screens.
    missing = [at for at, finding in enumerate(bad_findings, 1) if problem_from_json(finding).option in model_files]
    offer, first = (OFFER_MODELS, missing[-1]) if missing else ("", len(listed))
    body = f"{_findings_list(listed[:first])}{offer}{_findings_list(listed[first:])}{_field_marks_style(marks)}"
    body += OFFER_PROBE if not bad_findings and not failed else ""
    kind = "bad early" if report.get("early") else "bad" if bad_findings or failed else "good"
    return _box(kind, title, body, shown, alert=bool(bad_findings) or failed)


def _findings_list(lines: Sequence[str]) -> str:
    return f'<ul class="findings">{"".join(lines)}</ul>' if lines else ""


def without_captions(problem: Problem, again: str, values: Mapping[str, bool | str]) -> str:
    """Return the warning that captions are missing or not read, before a training is started or queued.

    `again` is the pressed button; `values` are the settings that would read the captions.
    """
    title, words = {
        "train": ("It has not started: no image has a caption", "Train without captions"),
        "later": ("It is not in the queue: no image has a caption", "Add it without captions"),
    }[again]
    if isolated.has_unread_captions(problem):
        title = {
            "train": "It has not started: caption files are not read",
            "later": "It is not in the queue: caption files are not read",
        }[again]
    write = '<button type="button" class="captions">Write captions</button>'
    sentence = problem.capitalized()
    body = (
        f'<p>{html.escape(str(sentence))}</p><p class="offer">'
        f"{values_button(values, problem.code) or write} "
        f'<button type="button" class="anyway" data-again="{again}">{html.escape(words)}</button></p>'
    )
    return _box("warn", title, body, [sentence], alert=True)


def _sentence(note: MessageLike) -> MessageLike:
    """Return a note as a sentence, capitalised unless it begins with the name of an option or a file."""
    if isinstance(note, Problem) and not note.option and not note.template.startswith("{"):
        return note.capitalized()
    return as_message(note)


OFFER_PROBE = (
    '<p class="offer"><button type="button" class="probe">Probe</button> <span>Runs some real steps at the '
    "largest image size, and proposes the fastest settings that fit.</span></p>"
)

OFFER_MODELS = (
    '<p class="offer"><button type="button" class="find-models"><span>Find or download a model</span></button> '
    "<span>Lists what is on this computer, and downloads the rest.</span></p>"
)


def values_button(values: Mapping[str, bool | str], code: str) -> str:
    """Return the button that puts values into the form; for an ineffective option (`code`) it resets the option."""
    if not values:
        return ""
    if code == INEFFECTIVE_CODE:
        names = html.escape(" ".join(values))
        return f' <button type="button" class="fix" data-leave="{names}"><span>Leave it out</span></button>'
    description = option_values({name: as_word(value) for name, value in values.items()})
    values_json = html.escape(json.dumps(dict(values)))
    shown = f'<span>Fix</span> <span class="values">{html.escape(str(description))}</span>'
    return f' <button type="button" class="fix" data-fix="{values_json}"{data(description)}>{shown}</button>'


def _allow_button(problem: Problem) -> str:
    """Return the button that allows the folder or the code that a problem asks about."""
    folder = allowed_folders.asked_folder(problem)
    words = "Allow this code" if folder.startswith(allowed_folders.CODE) else "Allow this folder"
    attributes = f'class="allow" data-allow="{html.escape(folder)}"'
    return f' <button type="button" {attributes}>{words}</button>' if folder else ""


def _other_button(problem: Problem) -> str:
    """Return the button that loads a config in the tab that it belongs to, or that saves over a file that exists."""
    if problem.code == presets.EXISTS:
        path, state = (html.escape(str(problem.arguments[name])) for name in ("path", "state"))
        return f' <button type="button" class="overwrite" data-path="{path}" data-state="{state}">Overwrite</button>'
    if problem.code != OTHER_TAB:
        return ""
    attributes = f'data-tab="{problem.arguments["tab"]}" data-title="{problem.arguments["title"]}"'
    return f' <button type="button" class="elsewhere" {attributes}>Load it there</button>'


def as_word(value: bool | str) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else value or "not set"


def _sentence_at_field(problem: Problem, places: Places) -> tuple[str, str, Message]:
    """Return a problem as HTML, the element that it is about or "", and its text."""
    place = places.get(problem.option) if problem.place in ("", FLAG) else None
    if not place:
        return html.escape(str(problem)), "", problem
    label, element = place
    sentence = Message(problem.template, **problem.arguments)
    attributes = f'class="jump" data-field="{element}" title="{problem.option}"'
    return (
        f'<button type="button" {attributes}>{html.escape(label)}</button>'
        f"{'' if sentence.template.startswith(':') else ' '}{html.escape(str(sentence))}",
        element,
        sentence,
    )


def _problems_title(number: int) -> Message:
    return ngettext("{count} problem to fix", "{count} problems to fix", number)


def _field_marks_style(marks: list[str]) -> str:
    chosen = ", ".join(f"{mark}:not(.mended)" for mark in marks)
    return f"<style>{chosen} {{ border-color: var(--bad) !important }}</style>" if marks else ""


def command_html(line: str, toml: str, file: tuple[Path, str, bool], notes: Iterable[MessageLike]) -> str:
    """Return the command line and the config that it needs, each with a button that copies it.

    `file` is the path of the config, the script that uses it, and whether it exists.
    """
    path, script, is_there = file
    notes = [*notes]
    body = _copyable_code("Command", line) + _copyable_code(path.name, toml) + (_list(notes) if notes else "")
    if is_there:
        return _box(
            "plain", Message("Train runs this command. {name} holds these settings.", name=path.name), body, notes
        )
    attributes = f'data-path="{html.escape(str(path))}" data-script="{html.escape(script)}"'
    save = (
        f'<button type="button" class="keep" {attributes}>Save the file</button> <code>{html.escape(str(path))}</code>'
    )
    offer = f'<p class="offer keeping">{save}</p>'
    return _box(
        "plain",
        Message("Train runs this command. Its file is not there yet: save it as {name} first.", name=path.name),
        offer + body,
        notes,
    )


def _copyable_code(title: str, text: str) -> str:
    copy = '<button type="button" class="copy">Copy</button>'
    return f'<div class="code"><b>{html.escape(title)}</b>{copy}<pre>{html.escape(text)}</pre></div>'


def _box(kind: str, title: MessageLike, body: str, sentences: Iterable[MessageLike], alert: bool = False) -> str:
    fold = f'<details open><summary><span class="title">{html.escape(str(title))}</span></summary>{body}</details>'
    return _message(kind, fold, [title, *sentences], alert)


def _message(kind: str, fold: str, sentences: Iterable[MessageLike], alert: bool = False) -> str:
    role, texts = "alert" if alert else "status", data(*sentences)
    return f'<div class="message {kind}" role="{role}" data-said="{next(_number)}"{texts}>{fold}{AWAY}</div>'
