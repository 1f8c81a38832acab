"""The size of a form's adapter, counted by a process that has torch (`library.check.adapter_size`) and keeps running,
as starting one takes seconds and counting a fraction of one."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence

from library.check.isolated import environment, sent
from library.config.json_types import JsonObject
from library.config.problems import Message, read
from library.config.sections import AdapterRun
from library.files import size_text

MAX_SIZES = 64  # sizes
UNKNOWN = "The size of this adapter is known once it trains."
FAILED = "The size cannot be counted: run Check."
MODEL = "pretrained_model_name_or_path"


class SizeProcess:
    """The process, started on first use, and its latest results."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()  # the pipe carries one result at a time
        self._results: dict[str, JsonObject] = {}
        self._counts: dict[str, list[int]] = {}

    def ask(self, config: AdapterRun) -> JsonObject:
        """The size of a config's adapter; `why` explains if there is none."""
        request = json.dumps({"script": config.script, "values": sent(config)})
        with self._lock:
            if request not in self._results:
                self._results[request] = self._counted(request)
                for old in list(self._results)[:-MAX_SIZES]:
                    del self._results[old]
            found = self._results[request]
        if "counts" in found:
            self._counts[_model(config)] = found["counts"]
        return _with_words(found)

    def counts(self, config: AdapterRun) -> Sequence[int] | None:
        """The blocks of a config's model by group, if they were counted already."""
        return self._counts.get(_model(config))

    def _counted(self, request: str) -> JsonObject:
        for _ in range(2):  # the process may have ended since its start
            process = self._process
            if process is None or process.poll() is not None:
                asked = [sys.executable, "-m", "library.check.adapter_size"]
                process = self._process = subprocess.Popen(
                    asked,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    encoding="utf-8",
                    env=environment({}),
                )
            try:
                if process.stdin and process.stdout:
                    process.stdin.write(request + "\n")
                    process.stdin.flush()
                    return dict(json.loads(process.stdout.readline()))
            except (OSError, ValueError):
                process.kill()
        return {"why": FAILED}


def _model(config: AdapterRun) -> str:
    return json.dumps([config.script, getattr(config.model, MODEL, None)])


def _with_words(found: JsonObject) -> JsonObject:
    """A result with its sentences for the page."""
    if "why" in found:
        problem = read(found["why"]) if found["why"] else None
        # Problems of an argument are shown below its field.
        return {"said": UNKNOWN if problem is None else "" if problem.place else problem.capitalized()}
    template = "{layers} layers learn: {parameters} parameters, a file of about {size}."
    if found["layers"] == 1:
        template = "{layers} layer learns: {parameters} parameters, a file of about {size}."
    said = Message(
        template, layers=f"{found['layers']:,}", parameters=_many(found["parameters"]), size=size_text(found["bytes"])
    )
    return {"said": said, "blocks": found["blocks"]}


def _many(number: int) -> Message | str:
    """12.3 million, or 45,000."""
    return Message("{count} million", count=f"{number / 1e6:,.1f}") if number >= 1e6 else f"{number:,}"
