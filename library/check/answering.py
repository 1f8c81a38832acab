"""The other end of `library.check.check_process`: it reads forms, and prints their reports."""

import json
import os
import sys
import threading

from library.check.report import make_report
from library.config.building import Reading, draft
from library.config.json_types import JsonObject
from library.config.problems import problem_from_json
from library.config.schema import options_of
from library.families import config_class

IDLE = 300.0  # a process that waits for a request ends after this many seconds


def answer_requests() -> None:
    """Read forms as JSON from stdin and print their reports as JSON; see `check_process.question_of`.

    This process may have started long before: it takes the environment of the request, and ends when none comes.
    """
    idle = threading.Timer(IDLE, os._exit, (0,))
    idle.daemon = True
    idle.start()
    text = sys.stdin.read()
    idle.cancel()
    if text:
        question = json.loads(text)
        os.chdir(question["folder"])
        os.environ.clear()
        os.environ.update(question["environment"])
        print(json.dumps([_answer_request(request) for request in question["requests"]]))


def _answer_request(request: JsonObject) -> JsonObject:
    cls = config_class(request["script"])
    values = {name: options_of(cls)[name].read(value) for name, value in request["values"].items()}
    config = draft(cls, values)
    problems = [problem_from_json(stored_problem) for stored_problem in request["problems"]]
    reading = Reading(config, problems, [], frozenset(request["wrong"]))
    return make_report(config, reading).as_json()
