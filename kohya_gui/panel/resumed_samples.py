"""The samples of a run, and before them those of the runs that it continues."""

import math
from typing import NamedTuple

from library.config.json_types import JsonMapping
from library.runs import layout, lineage, reader, written_files

MAX_RESUMED = 50  # runs before one, each resumed by the next


class RunSample(NamedTuple):
    """A sample, with the run that made it and its place among the samples of that run."""

    run: reader.RecordedRun
    place: int
    event: JsonMapping

    @property
    def step(self) -> int:
        step = self.event.get("step")
        return int(step) if isinstance(step, layout.NUMBER) else 0

    @property
    def exists(self) -> bool:
        """Whether its image is still there, and may be shown."""
        return written_files.sample_file(self.run, self.event) is not None


def own_samples(run: reader.RecordedRun) -> list[RunSample]:
    events = reader.progress(run.folder).update().events.get("sample", ())
    return [RunSample(run, place, event) for place, event in enumerate(events)]


def with_resumed(run: reader.RecordedRun) -> list[RunSample]:
    """Return the samples of a run, and before them those of the runs that it continues, up to where it does."""
    samples: list[RunSample] = []
    until, seen = math.inf, 0
    while seen < MAX_RESUMED:
        samples[:0] = [sample for sample in own_samples(run) if sample.step <= until]
        folder, at = lineage.parent_run(run.folder) or (None, None)
        if folder is None or at is None:
            break
        run, until, seen = reader.run_at(folder), min(until, at), seen + 1
    return samples


def existing_samples(run: reader.RecordedRun) -> list[RunSample]:
    """Return those samples of a run and of the runs that it continues whose images nobody has deleted."""
    return [sample for sample in with_resumed(run) if sample.exists]
