"""Several runs beside each other: which settings differ, and what came of them."""

from collections.abc import Sequence
from dataclasses import dataclass

from library.config.problems import ConfigError
from library.runs import overview, queue_rows, reader


@dataclass(frozen=True)
class ComparedOption:
    """An option that is not the same in all runs, with the value in each; None for the default."""

    option: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class RunComparison:
    """Runs in the order in which they were named."""

    runs: tuple[overview.RunSummary, ...]
    options: tuple[ComparedOption, ...]


def compare_runs(runs: Sequence[reader.RecordedRun]) -> RunComparison:
    """Return the options in which runs differ. Raises ConfigError for fewer than two."""
    if len(runs) < 2:
        raise ConfigError("name two runs or more to compare")
    values = [queue_rows.run_values(run) for run in runs]
    names = dict.fromkeys(name for each in values for name in each if name not in queue_rows.OWN_NAMES)
    rows = [ComparedOption(name, tuple(queue_rows.value_text(each.get(name)) for each in values)) for name in names]
    differing = [row for row in rows if len(set(row.values)) > 1]
    return RunComparison(tuple(overview.summaries(runs)), tuple(differing))
