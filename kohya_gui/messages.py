"""What the page says beside the buttons: done, or what is to be fixed and where. Pure HTML from plain words."""

import html
from collections.abc import Iterable, Mapping
from itertools import count

Places = Mapping[str, tuple[str, str]]  # option -> its label, its element's id

_number = count()  # makes each message differ from the last, so that the same one said twice is seen to be new


def good(text: str, notes: Iterable[str] = ()) -> str:
    """Something was done; notes are what the user should know about it."""
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return _box("good", text, f"<ul>{listed}</ul>" if listed else "")


def problems(text: str, places: Places) -> str:
    """What must be fixed, a line each. Options that are on the page are named, marked, and reached by a click."""
    lines = [line for line in text.splitlines() if line.strip()]
    listed, marks = [], []
    for line in lines:
        name, _, rest = line.partition(" ")
        if place := places.get(name):
            label, element = place
            marks.append(f"#{element}")
            listed.append(
                f'<li><button type="button" class="jump" data-field="{element}">{html.escape(label)}</button>'
                f" <code>{name}</code> {html.escape(rest)}</li>"
            )
        else:
            listed.append(f"<li>{html.escape(line)}</li>")
    style = f"<style>{', '.join(marks)} {{ border-color: var(--bad) !important }}</style>" if marks else ""
    title = "This has to be fixed first" if len(lines) == 1 else f"{len(lines)} things have to be fixed first"
    return _box("bad", title, f"<ul>{''.join(listed)}</ul>{style}", alert=True)


def command(line: str, toml: str, name: str, notes: Iterable[str]) -> str:
    """The command line and the config it needs, each with a button that copies it."""
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    shown = _copied("Command", line) + _copied(name, toml) + (f"<ul>{listed}</ul>" if listed else "")
    return _box("plain", f"Train runs this command. For a shell of your own, save the second part as {name}.", shown)


def _copied(title: str, text: str) -> str:
    copy = '<button type="button" class="copy">Copy</button>'
    return f'<div class="code"><b>{html.escape(title)}</b>{copy}<pre>{html.escape(text)}</pre></div>'


def _box(kind: str, title: str, body: str, alert: bool = False) -> str:
    role = "alert" if alert else "status"
    title = html.escape(title)
    fold = f"<details open><summary>{title}</summary>{body}</details>" if body else f"<p>{title}</p>"
    return f'<div class="message {kind}" role="{role}" data-said="{next(_number)}">{fold}</div>'
