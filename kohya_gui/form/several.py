"""Add a training for each of several values of an option to the queue."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kohya_gui.server.json_api import ApiRequest, Handler
from library.check import isolated
from library.config.ineffective import ineffective_options
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, Problem
from library.config.problems import read as read_problem
from library.config.schema import options
from library.runs import queue, start

MAX_VALUES = 12  # values at once
BUTTON = '<button type="button" class="several">Try several values</button>'


class SeveralValues:
    """Handlers for the forms of all training tabs."""

    def __init__(self, tabs: Mapping[str, Any]) -> None:
        self.tabs = tabs

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {"several": self.several}

    def several(self, sent: ApiRequest) -> JsonObject:
        """Check the form with each of these values of an option, and add a training for each to the queue.

        Each gets the full check of a start. Nothing is added if one of them has a problem.
        """
        tab = self.tabs.get(sent.text("tab"))
        if tab is None:
            raise ConfigError("there is no such tab: load the page again")
        name, said, typed = sent.text("option"), sent.text("sent"), _values(sent.text("values"))
        forms = [_with(said, name, value) for value in typed]
        read = [tab.read(form) for form in forms]
        given, first, notes = read[0]
        if name not in options(type(first.config)):
            raise ConfigError("{name} is no setting of this form: load the page again", name=name)
        readings = [reading for _, reading, _ in read]
        _refuse(name, typed, [reading.problems for reading in readings])
        if why := ineffective_options(first.config).get(name):
            raise ConfigError("{name} has no effect here, whatever its value: {why}", name=name, why=why)
        if _same(tab, forms, name):
            raise ConfigError("two of the values are the same: leave one out")
        reports = isolated.check_all([replace(reading, notes=[]) for reading in readings], given.launch)
        _refuse(name, typed, [[read_problem(one) for one in isolated.problems(report)] for report in reports])
        if isolated.uncaptioned(reports[0]) and not given.anyway:
            raise ConfigError(
                "no image has a caption: write some in the Data set tab, or press Add to queue once and say that it "
                "is meant"
            )
        added = [
            queue.add(start.job(reading.config, **tab.launch_of(reading.config, given.launch))) for reading in readings
        ]
        names = ", ".join(entry.name for entry in added)
        paused = queue.read().paused or queue.read().halted
        text = "{count} trainings are in the queue: {names}."
        if paused:
            text = "{count} trainings are in the queue, which is paused: press Continue in the Queue tab. {names}."
        return {"said": Message(text, count=len(added), names=names), "notes": notes}


def _refuse(name: str, typed: Sequence[str], found: Sequence[Sequence[Problem]]) -> None:
    """Raise ConfigError with the problems of each value; those common to all are listed once."""
    every = {str(problem) for problem in found[0]}.intersection(*({str(one) for one in others} for others in found))
    shared = [problem for problem in found[0] if str(problem) in every]
    own = [
        Message("With {name} = {value}: {problem}", name=name, value=value, problem=problem)
        for value, problems in zip(typed, found, strict=True)
        for problem in problems
        if str(problem) not in every
    ]
    if shared or own:
        raise ConfigError(*shared, *own)


def _values(text: str) -> list[str]:
    """Values as typed: separated by blanks or commas."""
    found = [value for value in re.split(r"[\s,;]+", text) if value]
    if not 2 <= len(found) <= MAX_VALUES:
        raise ConfigError("give 2 to {most} values with blanks between them, such as 5e-5 1e-4 2e-4", most=MAX_VALUES)
    return found


def _with(sent: str, name: str, value: str) -> str:
    """The form's contents with another value, and with a different name for the result."""
    try:
        form = json.loads(sent)
        held = form["values"]
        own = re.sub(r"[^\w.+-]", "_", f"{held.get('output_name') or form['family']}-{name}-{value}")
        held |= {name: value, "output_name": own}
        form["typed"] = [*form.get("typed", ()), name]
        return json.dumps(form)
    except (TypeError, ValueError, KeyError, AttributeError, RecursionError):
        raise ConfigError("This is not what the form sends: load the page again") from None


def _same(tab: Any, forms: list[str], name: str) -> bool:
    """Whether two texts are the same value."""
    read = []
    for form in forms:
        given = tab.form.parse_submission(form)
        read.append(options(tab.form.configs[given.family])[name].read(given.values[name]))
    return any(value in read[:at] for at, value in enumerate(read))
