"""The page's messages beside the buttons: what was done, or what to fix and where. Pure HTML from plain words."""

import html
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path

from kohya_gui.i18n.sentences import data
from kohya_gui.server import allowed_folders
from library.config.json_types import JsonMapping
from library.config.problems import FLAG, Message, MessageLike, Problem, counted, ngettext, option_values, read
from library.importers.result import TO_FIX

Places = Mapping[str, tuple[str, str]]  # option -> its label, its element's id
Fix = Callable[[Problem], Mapping[str, bool | str]]  # a problem -> values of fields that fix it

INEFFECTIVE = "ineffective"  # the code of a problem about an option without effect
OTHER_TAB = "other_tab"  # the code of the problem of a config for another tab, with that tab's id and title
MARKS = {"ok": "✓", "hint": "!", "bad": "✗"}

AWAY = '<button type="button" class="away" aria-label="Close">✕</button>'

_number = count()  # makes each message different, so that a repeated one counts as new


def good(text: MessageLike, notes: Iterable[MessageLike] = (), undo: bool = False) -> str:
    """A success in one line. `notes` are folded if there are several and none is a problem. `undo` offers to undo the
    filling."""
    notes = [_sentence(note) for note in notes]
    more = counted(len(notes), "note") if len(notes) > 1 else Message("")
    shown = notes if len(notes) == 1 else [*filter(None, [more])]
    said = " ".join(f"<span>{html.escape(str(one))}</span>" for one in [text, *shown])
    back = ' <button type="button" class="undo">Undo</button>' if undo else ""
    listed = "".join(f"<li>{html.escape(str(note))}</li>" for note in notes)
    is_open = any(isinstance(note, Message) and note.template == TO_FIX for note in notes)
    fold = f"<details{' open' * is_open}><summary>{said}{back}</summary><ul>{listed}</ul></details>"
    fold = fold if more else f"<p>{said}{back}</p>"
    return _message("good", fold, [text, more, *notes])


def loaded(text: Message, found: Sequence[Problem], places: Places, fix: Fix, notes: Sequence[MessageLike]) -> str:
    """A config was loaded: its problems, one per line with the button that fixes it, and then notes."""
    if not found:
        return good(text, notes, undo=True)
    listed, marks, shown = _lines(found, places, fix)
    notes = [_sentence(note) for note in notes]
    more = counted(len(notes), "note")
    rest = "".join(f"<li>{html.escape(str(note))}</li>" for note in notes)
    fold = f"<details><summary>{html.escape(str(more))}</summary><ul>{rest}</ul></details>" if notes else ""
    title = _title(len(found))
    head = f'<span>{html.escape(str(text))}</span> <b class="title">{html.escape(str(title))}</b>'
    back = ' <button type="button" class="undo">Undo</button>'
    body = f"<details open><summary>{head}{back}</summary><ul>{listed}</ul>{fold}{_style(marks)}</details>"
    return _message("warn", body, [text, title, more, *shown, *notes], alert=True)


def list_problems(found: Sequence[Problem], places: Places, fix: Fix = lambda problem: {}) -> str:
    """Problems to fix, one per line. Options that are on the page are named, marked, and linked to their fields."""
    listed, marks, shown = _lines(found, places, fix)
    title = _title(sum(one.code != OTHER_TAB for one in found))
    return _box("bad", title, f"<ul>{listed}</ul>{_style(marks)}", shown, alert=True)


def _lines(found: Sequence[Problem], places: Places, fix: Fix) -> tuple[str, list[str], list[Message]]:
    """Problems as lines with their buttons, the elements to mark, and the texts shown."""
    listed, marks, shown = "", list[str](), list[Message]()
    for problem in found:
        said, element, text = _placed(problem, places)
        shown.append(text)
        marks += [f"#{element}"] if element else []
        listed += f"<li>{said}{button(fix(problem), problem.code)}{_allow(problem)}{_elsewhere(problem)}</li>"
    return listed, marks, shown


def report(
    found: JsonMapping,
    places: Places,
    fix: Callable[[JsonMapping], Mapping[str, bool | str]],
    model_files: Collection[str] = (),
) -> str:
    """All findings of a preflight check by topic, each with its mark and its fix, and the estimate of memory and time.
    `model_files` are the options whose files the dialog for base models finds and downloads."""
    listed, marks, shown = [], [], []
    for one in found["findings"]:
        problem = read(one)
        said, element, text = _placed(problem, places)
        shown.append(text)
        marks += [f"#{element}"] if element and one["verdict"] == "bad" else []
        listed.append(
            f'<li class="{one["verdict"]}"><i aria-hidden="true">{MARKS[one["verdict"]]}</i>'
            f"<b>{html.escape(one['topic'])}</b>"
            f"<span>{said}{button(fix(one), one['code'])}{_allow(problem)}</span></li>"
        )
    wrong = [one for one in found["findings"] if one["verdict"] == "bad"]
    failed = bool(found.get("failed"))
    title = _title(len(wrong)) if wrong else "The check itself failed" if failed else "No problems found"
    body = f'<ul class="findings">{"".join(listed)}</ul>{_style(marks)}'
    body += MODELS if any(read(one).option in model_files for one in wrong) else ""
    body += PROBE if not wrong and not failed else ""
    kind = "bad early" if found.get("early") else "bad" if wrong or failed else "good"
    return _box(kind, title, body, shown, alert=bool(wrong) or failed)


def without_captions(problem: Message, again: str) -> str:
    """The warning that no image has a caption, before a training is started or queued; `again` is the pressed
    button."""
    title, words = {
        "train": ("It has not started: no image has a caption", "Train without captions"),
        "later": ("It is not in the queue: no image has a caption", "Add it without captions"),
    }[again]
    said = problem.capitalized()
    made = (
        f'<p>{html.escape(str(said))}</p><p class="offer">'
        '<button type="button" class="captions">Write captions</button> '
        f'<button type="button" class="anyway" data-again="{again}">{html.escape(words)}</button></p>'
    )
    return _box("warn", title, made, [said], alert=True)


def _sentence(note: MessageLike) -> MessageLike:
    """A note as a sentence of its own: capitalised, unless it begins with the name of an option or a file."""
    if isinstance(note, Problem) and not note.option and not note.template.startswith("{"):
        return note.capitalized()
    return note if isinstance(note, Message) else Message(note)


PROBE = (
    '<p class="offer"><button type="button" class="probe">Probe</button> <span>Runs some real steps at the '
    "largest image size, and proposes the fastest settings that fit.</span></p>"
)

MODELS = (
    '<p class="offer"><button type="button" class="find-models"><span>Find or download a model</span></button> '
    "<span>Lists what is on this computer, and downloads the rest.</span></p>"
)


def button(values: Mapping[str, bool | str], code: str = "") -> str:
    """The button that puts values into the form; for an ineffective option (`code`) it resets the option."""
    if not values:
        return ""
    if code == INEFFECTIVE:
        names = html.escape(" ".join(values))
        return f' <button type="button" class="fix" data-leave="{names}"><span>Leave it out</span></button>'
    said = option_values({name: as_word(value) for name, value in values.items()})
    given = html.escape(json.dumps(dict(values)))
    shown = f'<span>Fix</span> <span class="values">{html.escape(str(said))}</span>'
    return f' <button type="button" class="fix" data-fix="{given}"{data(said)}>{shown}</button>'


def _allow(problem: Problem) -> str:
    """The button that allows the folder or the code that a problem asks about."""
    folder = allowed_folders.asked(problem)
    words = "Allow this code" if folder.startswith(allowed_folders.CODE) else "Allow this folder"
    given = f'class="allow" data-allow="{html.escape(folder)}"'
    return f' <button type="button" {given}>{words}</button>' if folder else ""


def _elsewhere(problem: Problem) -> str:
    """The button that loads a config in the tab that it belongs to."""
    if problem.code != OTHER_TAB:
        return ""
    given = f'data-tab="{problem.arguments["tab"]}" data-title="{problem.arguments["title"]}"'
    return f' <button type="button" class="elsewhere" {given}>Load it there</button>'


def as_word(value: bool | str) -> str:
    """A field's value in a sentence."""
    return ("on" if value else "off") if isinstance(value, bool) else value or "not set"


def _placed(problem: Problem, places: Places) -> tuple[str, str, Message]:
    """A problem as HTML, the element that it is about or "", and its text."""
    place = places.get(problem.option) if problem.place in ("", FLAG) else None
    if not place:
        return html.escape(str(problem)), "", problem
    label, element = place
    said = Message(problem.template, **problem.arguments)
    return (
        f'<button type="button" class="jump" data-field="{element}">{html.escape(label)}</button>'
        f" <code>{problem.option}</code>{'' if said.template.startswith(':') else ' '}{html.escape(str(said))}",
        element,
        said,
    )


def _title(wrong: int) -> Message:
    return ngettext("{count} problem to fix", "{count} problems to fix", wrong)


def _style(marks: list[str]) -> str:
    """Mark the fields that a message is about, until they are edited."""
    chosen = ", ".join(f"{mark}:not(.mended)" for mark in marks)
    return f"<style>{chosen} {{ border-color: var(--bad) !important }}</style>" if marks else ""


def command(line: str, toml: str, file: tuple[Path, str, bool], notes: Iterable[MessageLike]) -> str:
    """The command line and the config that it needs, each with a button that copies it.

    `file` is the path of the config, the script that uses it, and whether it exists.
    """
    path, script, is_there = file
    notes = [*notes]
    listed = "".join(f"<li>{html.escape(str(note))}</li>" for note in notes)
    body = _copied("Command", line) + _copied(path.name, toml) + (f"<ul>{listed}</ul>" if listed else "")
    if is_there:
        return _box(
            "plain", Message("Train runs this command. {name} holds these settings.", name=path.name), body, notes
        )
    given = f'data-path="{html.escape(str(path))}" data-script="{html.escape(script)}"'
    save = f'<button type="button" class="keep" {given}>Save the file</button> <code>{html.escape(str(path))}</code>'
    offer = f'<p class="offer keeping">{save}</p>'
    return _box(
        "plain",
        Message("Train runs this command. Its file is not there yet: save it as {name} first.", name=path.name),
        offer + body,
        notes,
    )


def _copied(title: str, text: str) -> str:
    copy = '<button type="button" class="copy">Copy</button>'
    return f'<div class="code"><b>{html.escape(title)}</b>{copy}<pre>{html.escape(text)}</pre></div>'


def _box(kind: str, title: MessageLike, body: str, said: Iterable[MessageLike] = (), alert: bool = False) -> str:
    """A message; `said` are the texts in its body."""
    fold = f'<details open><summary><span class="title">{html.escape(str(title))}</span></summary>{body}</details>'
    return _message(kind, fold, [title, *said], alert)


def _message(kind: str, fold: str, said: Iterable[MessageLike], alert: bool = False) -> str:
    role, texts = "alert" if alert else "status", data(*said)
    return f'<div class="message {kind}" role="{role}" data-said="{next(_number)}"{texts}>{fold}{AWAY}</div>'
