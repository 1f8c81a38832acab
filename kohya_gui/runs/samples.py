"""The samples of a run as a gallery: prompts as rows, steps as columns."""

import math
import mimetypes
from collections.abc import Mapping

from starlette.responses import Response

from kohya_gui.panel.samples import CACHE_HEADERS, file_of_event, thumbnail, whole
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError
from library.runs import lineage, overview, reader

MAX_PROMPTS = 200  # rows sent to a browser
MAX_RESUMED = 50  # runs before one, each resumed by the next


def sample_grid(run: reader.RecordedRun) -> JsonObject:
    """Prompts by number, steps in order, and for each sample its number, its step and when it was made; before them
    those of the run that it resumes."""
    prompts: dict[int, str] = {}
    cells: dict[tuple[int, int], float] = {}
    for _, event in _samples(run):
        key = _key(event)
        if key.number not in prompts and len(prompts) >= MAX_PROMPTS:
            continue
        prompts[key.number] = str(event.get("prompt") or "")
        made = event.get("t")
        cells[key.number, key.step] = made if isinstance(made, int | float) else 0
    return {
        "prompts": [[number, prompts[number]] for number in sorted(prompts)],
        "steps": sorted({step for _, step in cells}),
        "samples": [[number, step, made] for (number, step), made in cells.items()],
    }


def serve(query: Mapping[str, str]) -> Response:
    """A sample by its run, step and prompt number; nothing else can be requested."""
    try:
        run = reader.find_run(query.get("run", ""))
        key = overview.SampleKey(int(query.get("step", "")), int(query.get("number", "")))
        maker, event = next(sample for sample in reversed(_samples(run)) if _key(sample[1]) == key)
        path = file_of_event(maker, event)
    except (KeyError, ValueError, StopIteration):
        raise ConfigError("There is no such image.") from None
    if query.get("small"):
        return Response(thumbnail(path, path.stat().st_mtime_ns), media_type="image/jpeg", headers=CACHE_HEADERS)
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return Response(whole(path), media_type=kind, headers=CACHE_HEADERS)


def _samples(run: reader.RecordedRun) -> list[tuple[reader.RecordedRun, JsonObject]]:
    """The samples of a run, and before them those of the runs that it goes on from, each with its run."""
    samples: list[tuple[reader.RecordedRun, JsonObject]] = []
    until, seen = math.inf, 0
    while run and seen < MAX_RESUMED:
        own = reader.progress(run.folder).update().events.get("sample", ())
        samples[:0] = [(run, event) for event in own if _key(event).step <= until]
        folder, at = lineage.parent_run(run.folder) or (None, None)
        if folder is None or at is None:
            break
        run, until, seen = reader.run_at(folder), min(until, at), seen + 1
    return samples


def _key(event: JsonMapping) -> overview.SampleKey:
    step, number = (event.get(name) for name in ("step", "number"))
    whole_numbers = (int(value) if isinstance(value, int | float) else 0 for value in (step, number))
    return overview.SampleKey(*whole_numbers)
