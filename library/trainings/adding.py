"""Check a training and add it to the queue, for shell and HTTP."""

from dataclasses import dataclass
from typing import Any

from library.check import isolated
from library.config.building import Reading
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Message, MessageLike, Problem, option_name, problem_from_json
from library.config.run_config import RunConfig
from library.config.sections.captions import NO_CAPTIONS
from library.runs import keys, queue, start

UNCAPTIONED = "no image has a caption: write some, or confirm that this is intended"
UNREAD = "{why}. Change that, or confirm that it is intended"


@dataclass(frozen=True)
class Added:
    """An entry of the queue, the sentence about it, and what the check remarks."""

    entry: queue.QueueEntry
    said: MessageLike
    hints: tuple[MessageLike, ...]


def check_and_add(reading: Reading[Any], launch: JsonMapping, first: bool, without_captions: bool) -> Added:
    """Add the training of a config to the queue. Raises ConfigError with all that is to be fixed, and if no image has a
    caption, unless that is meant.
    """
    report = isolated.check_reading(reading, launch)
    if findings := isolated.findings_to_fix(report):
        raise ConfigError(*map(problem_from_json, findings))
    if (warning := isolated.find_caption_warning(report)) and not without_captions:
        template = UNREAD if isolated.has_unread_captions(warning) else UNCAPTIONED
        raise ConfigError(Problem("", template, why=warning, code=NO_CAPTIONS))
    config = reading.config
    notes = keep_keys(config)
    job = start.job_of_config(config, **launch)
    entry = queue.add_to_queue(job, first, isolated.estimate_of(report))
    hints = [problem_from_json(finding) for finding in report["findings"] if finding["verdict"] == "hint"]
    return Added(entry, queue.queued_sentence(entry), (*notes, *hints))


def keep_keys(config: RunConfig) -> list[MessageLike]:
    """Store the tokens of a config in their own file, as the queue keeps none. Return a sentence for each new one."""
    new = keys.store_keys(keys.keys_of_config(config))
    template = "{name} is kept in {folder}, for you only, and is in no config."
    return [Message(template, name=option_name(name), folder=keys.keys_file()) for name in new]
