"""The size of a form's adapter, counted by a process that has torch (`library.check.adapter_size`) and keeps running,
as starting one takes seconds and counting a fraction of one."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence

from library.check.check_process import environment_for_check
from library.check.isolated import sent
from library.config.json_types import JsonObject
from library.config.problems import Message, ngettext, problem_from_json
from library.config.sections import AdapterRun
from library.files import size_text

MAX_SIZES = 64  # results kept, the newest ones
UNKNOWN = "The size of this adapter is known once it trains."
CANNOT_COUNT = "The size cannot be counted: run Check."
MODEL_OPTION = "pretrained_model_name_or_path"


class SizeProcess:
    """The process, started on first use, and its latest results."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # the pipe carries one result at a time
        self._results: dict[str, JsonObject] = {}
        self._counts: dict[str, list[int]] = {}

    def ask(self, config: AdapterRun) -> JsonObject:
        """Return the size of a config's adapter; `why` explains if there is none."""
        request = json.dumps({"script": config.script, "values": sent(config)})
        with self._lock:
            size = self._results.get(request) or self._counted(request)
            if size:
                self._results[request] = size
            for old in list(self._results)[:-MAX_SIZES]:
                del self._results[old]
        if "counts" in size:
            self._counts[_model_key(config)] = size["counts"]
        return _with_words(size)

    def counts(self, config: AdapterRun) -> Sequence[int] | None:
        return self._counts.get(_model_key(config))

    def _counted(self, request: str) -> JsonObject:
        """Ask the process; {} if it has ended twice."""
        for _ in range(2):  # the process may have ended since its start
            process = self._process
            if process is None or process.poll() is not None:
                command = [sys.executable, "-m", "library.check.adapter_size"]
                process = self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    env=environment_for_check({}),
                )
            try:
                if process.stdin and process.stdout:
                    process.stdin.write(request + "\n")
                    process.stdin.flush()
                    return dict(json.loads(process.stdout.readline()))
            except (OSError, ValueError):
                process.kill()
        return {}


def _model_key(config: AdapterRun) -> str:
    return json.dumps([config.script, getattr(config.model, MODEL_OPTION, None)])


def _with_words(size: JsonObject) -> JsonObject:
    """Return a result with its sentences for the page."""
    if not size:
        return {"said": CANNOT_COUNT}
    if "why" in size:
        if not size["why"]:
            return {"said": UNKNOWN}
        problem = problem_from_json(size["why"])
        return {"said": "" if problem.place else problem.capitalized()}  # those of an argument are below its field
    sentence = ngettext(
        "{count} layer learns: {parameters} parameters, a file of about {size}.",
        "{count} layers learn: {parameters} parameters, a file of about {size}.",
        size["layers"],
        parameters=_many(size["parameters"]),
        size=size_text(size["bytes"]),
    )
    return {"said": sentence, "blocks": size["blocks"]}


def _many(number: int) -> Message | str:
    return Message("{count} million", count=f"{number / 1e6:,.1f}") if number >= 1e6 else f"{number:,}"
