"""Add a training for each of several values of an option to the queue."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kohya_gui.form.requested import of_tab
from kohya_gui.server.json_api import ApiRequest, Handler
from library.check import isolated
from library.config.ineffective import ineffective_options
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem, problem_from_json
from library.config.schema import options_of
from library.runs import queue, start

MAX_VALUES = 12  # values at once
BUTTON = '<button type="button" class="several">Try several values</button>'


class SeveralValues:
    """Handlers for the forms of all training tabs."""

    def __init__(self, tabs: Mapping[str, Any]) -> None:
        self.tabs = tabs

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"several": self.several}

    def several(self, request: ApiRequest) -> JsonObject:
        """Check the form with each of these values of an option, and add a training for each to the queue.

        Each gets the full check of a start. Nothing is added if one of them has a problem.
        """
        tab = of_tab(self.tabs, request.text("tab"))
        name, contents, typed = request.text("option"), request.text("sent"), _values(request.text("values"))
        forms = [_form_with(contents, name, value) for value in typed]
        submissions = [tab.read_form(form) for form in forms]
        submission, first, notes = submissions[0]
        if name not in options_of(type(first.config)):
            raise ConfigError("{name} is not a setting of this form: load the page again", name=name)
        readings = [reading for _, reading, _ in submissions]
        _refuse_values(name, typed, [reading.problems for reading in readings])
        if why := ineffective_options(first.config).get(name):
            raise ConfigError("{name} has no effect here, whatever its value: {why}", name=name, why=why)
        if _has_equal_values(tab, forms, name):
            raise ConfigError("two of the values are the same: leave one out")
        reports = isolated.check_all([replace(reading, notes=[]) for reading in readings], submission.launch)
        _refuse_values(name, typed, [[*map(problem_from_json, isolated.findings_to_fix(each))] for each in reports])
        if (warning := isolated.find_caption_warning(reports[0])) and not submission.anyway:
            if isolated.has_unread_captions(warning):
                raise ConfigError("{why}. Change that, or press Add to queue once and confirm it", why=warning)
            raise ConfigError(
                "no image has a caption: write some in the Data tab, or press Add to queue once and confirm it"
            )
        added = [
            queue.add_to_queue(
                start.job_of_config(reading.config, submission.preset, **submission.launch),
                estimate=isolated.estimate_of(report),
            )
            for reading, report in zip(readings, reports, strict=True)
        ]
        names = ", ".join(entry.name for entry in added)
        paused = queue.read_queue().paused or queue.read_queue().halted
        text = "{count} trainings are in the queue: {names}."
        if paused:
            text = "{count} trainings are in the queue, which is paused: press Continue in the Runs tab. {names}."
        return {"said": Message(text, count=len(added), names=names), "notes": notes}


def _refuse_values(name: str, typed: Sequence[str], problems_by_value: Sequence[Sequence[Problem]]) -> None:
    """Raise ConfigError with the problems of each value; those common to all are listed once."""
    common = {str(problem) for problem in problems_by_value[0]}.intersection(
        *({str(problem) for problem in problems} for problems in problems_by_value)
    )
    shared = [problem for problem in problems_by_value[0] if str(problem) in common]
    own_problems = [
        Message("With {name} = {value}: {problem}", name=name, value=value, problem=problem)
        for value, problems in zip(typed, problems_by_value, strict=True)
        for problem in problems
        if str(problem) not in common
    ]
    if shared or own_problems:
        raise ConfigError(*shared, *own_problems)


def _values(text: str) -> list[str]:
    """Split what was typed at blanks, commas and semicolons."""
    values = [value for value in re.split(r"[\s,;]+", text) if value]
    if not 2 <= len(values) <= MAX_VALUES:
        raise ConfigError("give 2 to {most} values with blanks between them, such as 5e-5 1e-4 2e-4", most=MAX_VALUES)
    return values


def _form_with(sent: str, name: str, value: str) -> str:
    """Return the form's contents with another value, and with a name for the result of its own."""
    try:
        form = json.loads(sent)
        form_values = form["values"]
        output_name = re.sub(r"[^\w.+-]", "_", f"{form_values.get('output_name') or form['family']}-{name}-{value}")
        form_values |= {name: value, "output_name": output_name}
        form["typed"] = [*form.get("typed", ()), name]
        return json.dumps(form)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        raise ConfigError("This is not what the form sends: load the page again.") from None


def _has_equal_values(tab: Any, forms: list[str], name: str) -> bool:
    """Return whether two of the forms have the same value of an option, however it is typed."""
    values = []
    for form in forms:
        submission = tab.form.parse_submission(form)
        values.append(options_of(tab.form.configs[submission.family])[name].read(submission.values[name]))
    return any(value in values[:at] for at, value in enumerate(values))
