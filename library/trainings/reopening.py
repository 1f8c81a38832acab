"""The settings of a run or of a queue entry as a config: to be viewed, changed, or resumed."""

from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

from library.config.building import draft, replace_options
from library.config.json_types import JsonMapping
from library.config.outside_files import parse_toml
from library.config.problems import ConfigError, Message, MessageLike, Problem, join_messages, raise_if_any
from library.config.schema import flatten_sections, options_of
from library.families import config_class
from library.runs import gpu_slots, queue, reader, resume, start


@dataclass(frozen=True)
class Reopened:
    """A config from a record, and the options in the record that this version does not have."""

    config: Any
    unknown: tuple[str, ...] = ()

    @property
    def notes(self) -> list[MessageLike]:
        """A sentence about the unknown options, if there are any."""
        template = "The settings of this run have {names}, which this version does not have: left out."
        return [Message(template, names=", ".join(self.unknown))] if self.unknown else []


def started_config(run: reader.RecordedRun) -> Reopened:
    """The config that a run was started with: its TOML or, if it was started in a shell, its record."""
    text = resume.run_toml(run)
    script = str(run.facts.get("script") or "")
    return config_from(script, text) if text else _config(script, flatten_sections(resume.run_settings(run)))


def config_from(script: str, toml: str) -> Reopened:
    return _config(script, flatten_sections(parse_toml(toml, "run.toml")))


def _config(script: str, values: JsonMapping) -> Reopened:
    try:
        config = config_class(script)
    except (KeyError, ConfigError):
        raise ConfigError(
            "This run was made by {script}, which this version does not have.", script=script or "an unknown script"
        ) from None
    options = options_of(config)  # an older version may have had other options
    readable = {name: options[name].read(value) for name, value in values.items() if name in options}
    return Reopened(draft(config, readable), tuple(name for name in values if name not in options))


def continuation(run: reader.RecordedRun) -> start.TrainingJob:
    """The job that resumes a run; from the beginning if it has saved no state."""
    raise_if_any(resume.find_run_problems(run))
    state = resume.newest_state(run)
    config = replace_options(started_config(run).config, resume=str(state) if state else None)
    job = start.job_of_config(config, **resume.run_launch_options(run))
    # Relative paths start from the folder of the shell that the run was started in.
    folder, output = str(run.facts.get("folder") or job.folder), str(run.facts.get("output_dir") or job.output)
    preset = str(run.facts.get("preset") or "")
    return replaced(job, folder=folder, output=output, resumes=run.id, preset=preset)


@dataclass(frozen=True)
class Resumed:
    """What became of a run that was to be resumed: the id of the new run, or of an entry of the queue."""

    said: MessageLike
    run: str = ""
    entry: str = ""


def resume_run(run: reader.RecordedRun) -> Resumed:
    """Resume a run now, or put it first into the queue until devices are free. Raises ConfigError if that is not
    possible, or was done already.
    """
    if not run.active and not queue.can_resume(run, reader.runs()):  # another browser was faster, or it is complete
        template = "{run} has finished, or was resumed already."
        raise ConfigError(Problem("", template, run=run.name, code=queue.BUSY))
    job, state = continuation(run), resume.newest_state(run)
    active = [other.facts for other in reader.runs() if other.active and other.is_here]
    if gpu_slots.choose_devices(job.how, gpu_slots.free_devices(active)):
        run_id = start.begin_job(job)
        if state:
            sentence = Message("It resumes after step {step}: this is the new run.", step=resume.step_of(state))
            return Resumed(_with_notes(sentence, run), run_id)
        return Resumed(_with_notes("It starts again from the beginning: this is the new run.", run), run_id)
    entry = queue.add_to_queue(job, first=True)
    sentence = "Another training is running: this one resumes when that has ended (see the Runs tab)."
    return Resumed(_with_notes(sentence, run), entry=entry.id)


def _with_notes(sentence: MessageLike, run: reader.RecordedRun) -> MessageLike:
    notes = started_config(run).notes
    return join_messages([sentence, *notes], " ") if notes else sentence
