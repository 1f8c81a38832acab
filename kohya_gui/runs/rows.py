"""The rows of the table of runs, as JSON."""

import hashlib
import json
import time
from dataclasses import asdict, replace
from functools import lru_cache

from kohya_gui.server.json_api import ApiRequest
from library.config.json_types import JsonObject
from library.runs import explain, overview

MARK_DIGITS = 8  # of the hash of a row or of the order, in hexadecimal
MAX_NOTE_SHOWN = 300  # characters of a note in the table
KIND_TITLES = {
    "lora": "LoRA",
    "finetune": "Fine-tune",
    "textual-inversion": "Textual inversion",
    "lllite": "ControlNet-LLLite",
}


def changed_rows(request: ApiRequest) -> JsonObject:
    """The rows that a browser does not show yet, by its `marks` of those that it shows, and the order if it differs."""
    shown, now = request.values("marks"), time.time()
    summaries = overview.overview()
    ids = [summary.id for summary in summaries]
    order = _mark_of("\n".join(ids))
    rows = {}
    for summary in summaries:
        row = row_of(summary, now)
        if shown.get(summary.id) != row["mark"]:
            rows[summary.id] = row
    return {"rows": rows, "order": order} | ({} if request.text("order") == order else {"ids": ids})


def row_of(summary: overview.RunSummary, now: float) -> JsonObject:
    """One row, with a mark that changes with its contents."""
    left = summary.time_left(now)
    taken = overview.seconds_taken(summary, now) if summary.active else None
    seconds = [None if value is None else round(value) for value in (left, taken)]
    # What depends on the time is no part of the cache's key, nor is it of a run that has ended.
    return _row(replace(summary, reported=None), *seconds)


@lru_cache(maxsize=4096)
def _row(summary: overview.RunSummary, left: int | None, taken: int | None) -> JsonObject:
    content = asdict(summary)
    del content["eta"], content["reported"], content["output_folder"], content["resumes"]
    row: JsonObject = {
        **content,
        "note": summary.note[:MAX_NOTE_SHOWN],
        "kind": KIND_TITLES.get(summary.kind, summary.kind) or summary.title,
        "error": explain.cause(str(summary.error)) or summary.error,
        "active": summary.active,
        "left": left,
        "taken": overview.seconds_taken(summary) if taken is None else taken,
    }
    return {**row, "mark": _mark_of(json.dumps(row, default=str))}


def _mark_of(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:MARK_DIGITS]
