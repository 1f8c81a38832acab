"""Which file of a run is best: starts `kohya compare`, and shows its results so far."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from kohya_gui.panel import samples
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import ApiRequest, Handler, ImageHandler
from kohya_gui.tools.commands import job_status, refuse_second
from library.comparing import plan
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.files import write_atomic
from library.jobs import jobs
from library.runs import dates, layout, reader
from library.sampling import prompt_rows, prompts
from library.sampling.plan import BASE_MODEL, check_image_count

COMPARE_KIND = "compare"
MAX_RUNS = 20  # runs
ENCODER_CHOICES = ("", "dinov2", "clip")
RESULT = "comparison.json"
PLACE = re.compile(r"compare-[\d-]+")  # name of a comparison's folder in its run's folder


class FileComparison:
    """Handlers for the part of the tab Try it that compares the files of a run."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    @property
    def handlers(self) -> dict[str, Handler]:
        return {"comparing_choices": self.choices, "comparing_begin": self.begin, "comparing_found": self.found}

    @property
    def image_handlers(self) -> dict[str, ImageHandler]:
        return {"compared": self.show}

    def choices(self, request: ApiRequest) -> JsonObject:
        """Return the runs whose files can be compared, the newest first."""
        runs = [run for run in reader.runs() if plan.is_comparable(run)][:MAX_RUNS]
        return {"runs": [[run.id, title_of(run)] for run in runs]}

    def begin(self, request: ApiRequest) -> JsonObject:
        """Start comparing. Problems of the form are reported first."""
        refuse_second(COMPARE_KIND)
        run = reader.existing_run(request.text("run"))
        config = plan.config_of_run(run)
        paths.allow(config, self.roots)
        files, _ = plan.saved_files_of_run(run)
        for file in files:
            paths.allowed_path(str(file.path), self.roots, "file")
        words = [COMPARE_KIND, run.id, *self._encoder(request)]
        lines = [line.strip() for line in request.text("prompts").splitlines() if line.strip()]
        text = prompt_rows.rows_as_text([{"prompt": line} for line in lines]) if lines else ""
        if text:
            # Whether a whole model has its base beside it is found out by the job.
            check_image_count(len(files) + config.adapters, [prompts.parse_line(line) for line in text.splitlines()])
        place = jobs.new(COMPARE_KIND)
        if text:
            write_atomic(place / "prompts.txt", text)
            words.append(f"--prompts={place / 'prompts.txt'}")
        return {"job": job_status(jobs.start_job(COMPARE_KIND, words, place))}

    def _encoder(self, request: ApiRequest) -> list[str]:
        chosen = request.choice("encoder", (*ENCODER_CHOICES, "folder"))
        if chosen == "folder":
            chosen = str(paths.existing_folder(request.text("folder"), self.roots, "Folder of the encoder"))
        return [f"--encoder={chosen}"] if chosen else []

    def found(self, request: ApiRequest) -> JsonObject:
        """Return the newest comparison of a run, complete or so far; without columns if there is none."""
        run = reader.existing_run(request.text("run"))
        comparison = _newest(run)
        place = Path(str(comparison.get("folder") or "")).name
        columns = [column_title(title) for title in _list(comparison, "columns")]
        count = len(columns)
        rows = [_title_or_prompt(prompt) for prompt in _list(comparison, "rows")]
        proposal = comparison.get("proposal")
        proposal = proposal if isinstance(proposal, dict) else {}
        seeds = _cells(_list(comparison, "seeds"), len(rows))
        copies = [_cells(row, count) for row in _list(comparison, "copies")] or [[""] * count for _ in rows]
        cells = []
        for row, files in enumerate(_cells(file_row, count) for file_row in _list(comparison, "files")[: len(rows)]):
            queries = [{"run": run.id, "at": place, "row": row, "column": at} for at in range(count)]
            cells.append(
                [
                    {**_comparison_cell(query, copy), "seed": seeds[row]}
                    if name and _image_path(run, query).is_file()
                    else None
                    for query, name, copy in zip(queries, files, copies[row], strict=True)
                ]
            )
        numbers = {
            "losses": [_format_if_number(loss, ".4f") for loss in _cells(_list(comparison, "losses"), count)],
            "likeness": [
                _format_if_number(likeness, ".3f") for likeness in _cells(_list(comparison, "likeness"), count)
            ],
        }
        return {
            "columns": columns,
            "rows": rows,
            "cells": cells,
            **numbers,
            "held_out": bool(comparison.get("held_out")),
            "best": proposal.get("column"),
            "reason": column_title(proposal.get("reason") or ""),
            "saved": [Path(str(path)).name for path in _list(comparison, "saved")],
            "notes": _list(comparison, "notes"),
            "folder": comparison.get("folder") or "",
        }

    def show(self, query: Mapping[str, str]) -> Response:
        """Return an image of a comparison by its position; nothing else can be requested."""
        try:
            run = reader.find_run(str(query.get("run") or ""))
            path, folder = _image_path(run, query), run.folder.resolve()
            if not (PLACE.fullmatch(path.parent.name) and path.parent.parent == folder and path.is_file()):
                raise ValueError("not an image of a comparison")
        except (KeyError, ValueError):
            raise ConfigError("There is no such image.") from None
        return samples.serve_image(path, bool(query.get("small")))


def _image_path(run: reader.RecordedRun, query: Mapping[str, Any]) -> Path:
    """The path of an image of a comparison, whether or not it is there."""
    name = f"{int(query['row']):02d}_{int(query['column']):02d}.png"
    return (run.folder / str(query.get("at") or "") / name).resolve()


def comparison_html() -> str:
    """Return the part of the tab."""
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return text.replace("[browse]", picker.browse_button("folder", "Folder of the encoder", "folder"))


def title_of(run: reader.RecordedRun) -> MessageLike:
    """Return the title of a run in lists: its name and start time, if it has started."""
    name, started = run.name, run.facts.get("started")
    return Message("{name} · {when}", name=name, when=dates.moment(float(started))) if started else name


def _newest(run: reader.RecordedRun) -> JsonObject:
    """Return the last results of a job for a run, else the ones stored in its folder."""
    for job in jobs.jobs_of_kinds(COMPARE_KIND):
        arguments = job.facts.get("arguments") or ()
        if run.id in arguments and job.result.get("files"):
            return job.result
    stored = sorted(run.folder.glob(f"compare-*/{RESULT}"), key=lambda path: path.parent.name)
    return layout.load_facts(stored[-1]) if stored else {}


def _list(comparison: JsonMapping, name: str) -> list[object]:
    """Return a list in a stored comparison, which others may have edited."""
    entries = comparison.get(name)
    return entries if isinstance(entries, list) else []


def _cells(row: object, count: int) -> list[object]:
    """Return the values of a row, one for each column."""
    values = row if isinstance(row, list) else []
    return [*values[:count], *[""] * (count - len(values))]


def column_title(title: object) -> MessageLike:
    """What the page calls a column of a comparison: as the samples of a run are called, too."""
    if str(title) == BASE_MODEL:
        return Message("Base model")
    return title.capitalized() if isinstance(title, Message) else str(title)


def _title_or_prompt(value: object) -> MessageLike:
    # Messages stay messages, so that the browser can translate them.
    return value if isinstance(value, str | Message) else str(value)


def _format_if_number(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _comparison_cell(query: JsonObject, copy: object) -> JsonObject:
    """Return the addresses of an image, and the name of the training image that it nearly copies."""
    return {
        "small": "own/compared?" + urlencode({**query, "small": 1}),
        "large": "own/compared?" + urlencode(query),
        "copy": Path(str(copy)).name if copy else "",
    }
