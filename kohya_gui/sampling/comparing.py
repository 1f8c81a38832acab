"""Which file of a run is best: starts `kohya compare`, and shows its results so far."""

import mimetypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

from starlette.responses import Response

from kohya_gui.i18n import dates
from kohya_gui.panel import samples
from kohya_gui.server import paths, picker
from kohya_gui.server.json_api import ApiRequest, Handler, PictureHandler
from kohya_gui.tools.commands import job_status
from library.comparing import plan
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike
from library.files import write_atomic
from library.jobs import job as jobs
from library.runs import layout, reader
from library.sampling import prompt_rows, prompts
from library.sampling.plan import check_size

KIND = "compare"
MAX_RUNS = 20  # runs
ENCODERS = ("", "dinov2", "clip")
RESULT = "comparison.json"
PLACE = re.compile(r"compare-[\d-]+")  # the name of a comparison's folder in its run's folder


class FileComparison:
    """Handlers for the part of the tab Try it that compares the files of a run."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots

    @property
    def handlers(self) -> dict[str, Handler]:
        """Handlers of requests from the page's scripts."""
        return {"comparing_choices": self.choices, "comparing_begin": self.begin, "comparing_found": self.found}

    @property
    def picture_handlers(self) -> dict[str, PictureHandler]:
        """Handlers of GET requests."""
        return {"compared": self.show}

    def choices(self, sent: ApiRequest) -> JsonObject:
        """The runs whose files can be compared, the newest first."""
        known = [run for run in reader.runs() if plan.is_comparable(run)][:MAX_RUNS]
        titles = [dates.moment(float(run.facts.get("started") or 0)) for run in known]
        return {
            "runs": [
                [run.id, Message("{name} · {when}", name=str(run.facts.get("output_name") or run.id), when=when)]
                for run, when in zip(known, titles, strict=True)
            ]
        }

    def begin(self, sent: ApiRequest) -> JsonObject:
        """Start comparing. Problems of the form are reported first."""
        if busy := next((job for job in jobs.every(KIND) if job.active), None):
            raise ConfigError("{title} is still running: stop it, or wait until it has ended", title=busy.id)
        run = _run(sent.text("run"))
        config = plan.config_of(run)
        paths.allow(config, self.roots)
        files, _ = plan.files_of(run)
        for file in files:
            paths.inside(str(file.path), self.roots, "file")
        words = [KIND, run.id, *self._encoder(sent)]
        lines = [line.strip() for line in sent.text("prompts").splitlines() if line.strip()]
        text = prompt_rows.text([{"prompt": line} for line in lines]) if lines else ""
        if text:
            check_size(len(files), [prompts.parse_line(line) for line in text.splitlines()])
        place = jobs.new(KIND)
        if text:
            write_atomic(place / "prompts.txt", text)
            words.append(f"--prompts={place / 'prompts.txt'}")
        return {"job": job_status(jobs.start(KIND, words, place))}

    def _encoder(self, sent: ApiRequest) -> list[str]:
        chosen = sent.text("encoder")
        if chosen == "folder":
            chosen = str(paths.folder(sent.text("folder"), self.roots, "Folder of the encoder"))
        elif chosen not in ENCODERS:
            raise ConfigError("There is no such choice: load the page again.")
        return [f"--encoder={chosen}"] if chosen else []

    def found(self, sent: ApiRequest) -> JsonObject:
        """The newest comparison of a run, complete or so far; without columns if there is none."""
        run = _run(sent.text("run"))
        known = _newest(run)
        place = Path(str(known.get("folder") or "")).name
        columns = [_text(one) for one in _list(known, "columns")]
        count = len(columns)
        rows = [_text(one) for one in _list(known, "rows")]
        proposal = known.get("proposal")
        proposal = proposal if isinstance(proposal, dict) else {}
        copies = [_cells(row, count) for row in _list(known, "copies")] or [[""] * count for _ in rows]
        cells = []
        for row, files in enumerate(_cells(one, count) for one in _list(known, "files")[: len(rows)]):
            queries = [{"run": run.id, "at": place, "row": row, "column": at} for at in range(count)]
            cells.append(
                [
                    _cell(query, copy) if name else None
                    for query, name, copy in zip(queries, files, copies[row], strict=True)
                ]
            )
        numbers = {
            "losses": [_shown(one, ".4f") for one in _cells(_list(known, "losses"), count)],
            "likeness": [_shown(one, ".3f") for one in _cells(_list(known, "likeness"), count)],
        }
        return {
            "columns": columns,
            "rows": rows,
            "cells": cells,
            **numbers,
            "held_out": bool(known.get("held_out")),
            "best": proposal.get("column"),
            "reason": proposal.get("reason") or "",
            "saved": [Path(str(one)).name for one in _list(known, "saved")],
            "notes": _list(known, "notes"),
            "folder": known.get("folder") or "",
        }

    def show(self, query: Mapping[str, str]) -> Response:
        """A picture of a comparison by its position; nothing else can be requested."""
        try:
            place, numbers = str(query.get("at") or ""), (int(query["row"]), int(query["column"]))
            folder = reader.run(str(query.get("run") or "")).folder.resolve()
            path = (folder / place / "{:02d}_{:02d}.png".format(*numbers)).resolve()
            if not (PLACE.fullmatch(place) and path.parent.parent == folder and path.is_file()):
                raise ValueError("no picture of a comparison")
        except (KeyError, ValueError):
            raise ConfigError("There is no such image.") from None
        small = query.get("small")
        body = samples.thumbnail(path, path.stat().st_mtime_ns) if small else samples.whole(path)
        kind = "image/jpeg" if small else mimetypes.guess_type(path.name)[0]
        return Response(body, media_type=kind or "application/octet-stream", headers=samples.CACHE_HEADERS)


def markup() -> str:
    """The part of the tab."""
    text = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return text.replace("[browse]", picker.button("folder", "Folder of the encoder", "folder"))


def _run(name: str) -> reader.RecordedRun:
    try:
        return reader.run(name)
    except KeyError:
        raise ConfigError("This run is not there any more: load the page again.") from None


def _newest(run: reader.RecordedRun) -> JsonObject:
    """The last results of a job for a run, else the ones stored in its folder."""
    for job in jobs.every(KIND):
        arguments = job.facts.get("arguments") or ()
        if run.id in arguments and job.result.get("files"):
            return job.result
    stored = sorted(run.folder.glob(f"compare-*/{RESULT}"), key=lambda path: path.parent.name)
    return layout.load(stored[-1]) if stored else {}


def _list(known: JsonMapping, name: str) -> list[object]:
    """A list in a stored comparison, which others may have edited."""
    found = known.get(name)
    return found if isinstance(found, list) else []


def _cells(row: object, count: int) -> list[object]:
    """The values of a row, one for each column."""
    found = row if isinstance(row, list) else []
    return [*found[:count], *[""] * (count - len(found))]


def _text(value: object) -> MessageLike:
    """A title or a prompt; messages stay messages, so that the browser can translate them."""
    return value if isinstance(value, str | Message) else str(value)


def _shown(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _cell(query: JsonObject, copy: object) -> JsonObject:
    """The addresses of a picture, and the name of the training picture that it nearly copies."""
    return {
        "small": "own/compared?" + urlencode({**query, "small": 1}),
        "large": "own/compared?" + urlencode(query),
        "copy": Path(str(copy)).name if copy else "",
    }
