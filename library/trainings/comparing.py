"""Several runs beside each other: which settings differ, and what came of them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from library.config.json_types import JsonObject
from library.config.problems import ConfigError, MessageLike
from library.runs import file_contents, overview, queue_rows, reader


@dataclass(frozen=True)
class ComparedOption:
    """An option that is not the same in all runs, with the value in each; None for the default."""

    option: str
    values: tuple[MessageLike | None, ...]
    words: str = ""  # what differs where the option names a file, such as "prompts differ"


@dataclass(frozen=True)
class RunComparison:
    """Runs in the order in which they were named."""

    runs: tuple[overview.RunSummary, ...]
    options: tuple[ComparedOption, ...]


def compare_runs(runs: Sequence[reader.RecordedRun]) -> RunComparison:
    """Return the options in which runs differ. Raises ConfigError for fewer than two."""
    if len(runs) < 2:
        raise ConfigError("name two runs or more to compare")
    settings = [queue_rows.run_contents(run) for run in runs]
    names = dict.fromkeys(name for each in settings for name in each if name not in queue_rows.OWN_NAMES)
    return RunComparison(tuple(overview.summaries(runs)), tuple(_differing(settings, names)))


def _differing(settings: Sequence[JsonObject], names: Iterable[str]) -> Iterator[ComparedOption]:
    for name in names:
        values = file_contents.make_comparable([each.get(name) for each in settings])
        if len({file_contents.comparable(value) for value in values}) > 1:
            words = file_contents.describe_difference(name, values)
            yield ComparedOption(name, tuple(file_contents.texts_beside(values)), words)
