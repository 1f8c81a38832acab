"""The form as TOML text: written with its comments, checked while it is edited, and put back into the form."""

import json
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kohya_gui.form import loading, presets
from kohya_gui.form.form import Submission
from kohya_gui.form.requested import of_tab
from kohya_gui.form.tab import TrainingTab
from kohya_gui.server.json_api import ApiRequest, Handler
from library.config.building import Layer, read_layers
from library.config.commented_toml import to_commented_toml
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, option_names, problem_from_json
from library.config.schema import flatten_sections, option_values
from library.importers import Imported, is_command, parse_file

APPLIED = "The form now has the settings of this text, for {family} ({changes})."
NAME = "config.toml"  # of the text in messages
_AT_LINE = re.compile(r"at line (\d+)")  # in the errors of the TOML parser
_AT_END = "at end of document"


class TextEditor:
    """Handlers for the text of the forms of all training tabs."""

    def __init__(self, tabs: Mapping[str, TrainingTab], roots: Sequence[Path]) -> None:
        self.tabs, self.roots = tabs, roots

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {"text_of": self.write, "text_look": self.look, "text_check": self.check, "text_take": self.take}

    def write(self, request: ApiRequest) -> JsonObject:
        """Return the form's text as Save would write it; `source` is the text that it was loaded from. Unreadable
        values are left out, with a note."""
        tab, submission = self._parse(request)
        reading = read_layers(tab.form.configs[submission.family], [Layer(submission.values)])
        text = to_commented_toml(request.text("source"), reading.config, presets.comment(reading.config))
        left_out = Message("Left out, as it cannot be read: {options}", options=option_names(sorted(reading.wrong)))
        return {"text": text, "note": left_out if reading.wrong else ""}

    def look(self, request: ApiRequest) -> JsonObject:
        """Return the problems of the text itself, each with its line, while it is edited."""
        tab, submission = self._parse(request)
        text = request.text("text")
        try:
            imported = self._read(tab, submission, text)
        except ConfigError as error:
            return {"findings": [*_findings(error.problems, text)], "unreadable": True}
        return {"findings": [*_findings(loading.config_problems(tab.form, imported, self.roots, {}), text)]}

    def check(self, request: ApiRequest) -> JsonObject:
        """Return the report of Check for a form with this text."""
        tab, submission = self._parse(request)
        text = request.text("text")
        config = self._read(tab, submission, text).config
        values = tab.form.shown(config.family, option_values(config))
        typed = sorted(flatten_sections(parse_text(text), []))
        sent = {"family": config.family, "values": values, "launch": submission.launch, "typed": typed}
        _, _, notes, report = tab.check_form(json.dumps(sent))
        reported = [(problem_from_json(finding), finding["verdict"]) for finding in report["findings"]]
        lines = [_finding(problem, text, verdict) for problem, verdict in reported]
        return {"findings": [*(_finding(note, text, "hint") for note in notes), *lines]}

    def take(self, request: ApiRequest) -> JsonObject:
        """Put a text into the form, like a config that is loaded."""
        tab, submission = self._parse(request)
        with _file(request.text("text"), self._script(tab, submission)) as path:
            answer = loading.load_into_form(tab.form, path, submission, self.roots, APPLIED)
        filled = json.loads(answer["fill"])
        if "start" in filled:
            opened = Path(request.text("opened").partition("\n")[0]).name
            filled["start"]["title"] = opened or "Edited text"
        return {**answer, "fill": json.dumps(filled)}

    def _parse(self, request: ApiRequest) -> tuple[TrainingTab, Submission]:
        tab = of_tab(self.tabs, request.text("tab"))
        return tab, tab.form.parse_submission(request.text("sent"))

    def _script(self, tab: TrainingTab, submission: Submission) -> str:
        return tab.form.configs[submission.family].script

    def _read(self, tab: TrainingTab, submission: Submission, text: str) -> Imported:
        with _file(text, self._script(tab, submission)) as path:
            return presets.import_fitting(path, tab.form.configs, submission.family, self.roots)


@contextmanager
def _file(text: str, script: str = "config") -> Iterator[Path]:
    """A file with the text, named after the script of the form, which it is for unless it names another."""
    # Importers read files, by one reader with limits for all that comes from outside.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{script}{'.sh' if is_command(text) else '.toml'}"  # a pasted command is read, too
        path.write_text(text, encoding="utf-8", newline="")
        yield path


def parse_text(text: str) -> JsonObject:
    with _file(text) as path:
        return parse_file(path)


def _findings(problems: Iterable[Problem], text: str) -> Iterator[JsonObject]:
    for problem in problems:
        yield _finding(problem, text, "bad")


def _finding(problem: MessageLike, text: str, verdict: str) -> JsonObject:
    """Return a problem for the list beside a text: its sentence and its line, 0 if it has none."""
    sentence: Any = problem
    if isinstance(problem, Problem):
        arguments = {"path": NAME} if str(problem.arguments.get("path", "")).endswith(".toml") else {}
        sentence = problem.replaced(place="", **arguments)
    return {"verdict": verdict, "text": sentence, "line": _line_of(sentence, text)}


def _line_of(problem: MessageLike, text: str) -> int:
    lines = text.split("\n")
    if at := _AT_LINE.search(str(problem)):
        return min(int(at[1]), len(lines))
    if _AT_END in str(problem):
        return len(lines)
    if not isinstance(problem, Problem) or not problem.option:
        return 0
    key = re.compile(rf"""\s*["']?{re.escape(problem.option)}["']?\s*=""")
    return next((number for number, line in enumerate(lines, 1) if key.match(line)), 0)
