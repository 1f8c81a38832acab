"""The settings of a run or of a queue entry as a config, to be viewed in the form, changed, or resumed."""

from dataclasses import replace as replaced
from typing import Any

from library.config.building import draft, replace_options
from library.config.json_types import JsonMapping
from library.config.outside_files import parse_toml
from library.config.problems import ConfigError
from library.config.schema import flatten_sections, options_of
from library.families import config_class
from library.runs import reader, resume, start


def started_config(run: reader.RecordedRun) -> Any:
    """The config that a run was started with: its TOML or, if it was started in a shell, its record."""
    text = resume.run_toml(run)
    script = str(run.facts.get("script") or "")
    return config_from(script, text) if text else _config(script, flatten_sections(resume.run_settings(run)))


def config_from(script: str, toml: str) -> Any:
    return _config(script, flatten_sections(parse_toml(toml, "run.toml")))


def _config(script: str, values: JsonMapping) -> Any:
    try:
        config = config_class(script)
    except (KeyError, ConfigError):
        raise ConfigError(
            "This run was made by {script}, which this version does not have.", script=script or "an unknown script"
        ) from None
    options = options_of(config)  # an older version may have had other options
    return draft(config, {name: options[name].read(value) for name, value in values.items() if name in options})


def continuation(run: reader.RecordedRun) -> start.TrainingJob:
    """The job that resumes a run; from the beginning if it has saved no state."""
    resume.check_resumable(run)
    state = resume.newest_state(run)
    config = replace_options(started_config(run), resume=str(state) if state else None)
    job = start.job(config, **resume.run_launch_options(run))
    # Relative paths start from the folder of the shell that the run was started in.
    folder, output = str(run.facts.get("folder") or job.folder), str(run.facts.get("output_dir") or job.output)
    return replaced(job, folder=folder, output=output, resumes=run.id)
