"""What is compared: a run, its saved files, and the prompts. Loads no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from library import families
from library.config.building import draft
from library.config.json_types import JsonMapping, JsonObject, as_float
from library.config.outside_files import load_toml
from library.config.pasted import pasted_path
from library.config.problems import ConfigError, Message, counted
from library.config.run_config import RunConfig
from library.config.schema import flatten_sections, option_values, options_of
from library.runs import layout, lineage, reader, resume
from library.sampling.plan import BASE_MODEL
from library.sampling.prompts import Prompt, read_prompts
from library.sampling.recorded_prompts import recorded_prompt

COMPARED_KINDS = ("lora", "finetune")  # kinds of trainings whose files can be compared
COMPARED_SUFFIXES = (".safetensors", ".ckpt", ".pt")
MAX_COMPARED_FILES = 8  # files compared by default
AVERAGE = "-ema"
SEED = 1  # for prompts without a seed
# Training options that a finished file does not need: compiling, several GPUs, and memory for gradients.
LEFT_OUT = (
    "gradient_checkpointing",
    "cpu_offload_checkpointing",
    "checkpoint_keep_attention",
    "fp8_compute",
    "fp8_transposed_weights",
    "int8_compute",
    "resume",
    "network_weights",
    "sample_prompts",
    "logging_dir",
)
MERGED = ("base_weights", "base_weights_multiplier")  # of the section `network`, but files learn on top of them
LEFT_OUT_SECTIONS = ("compile", "distributed", "network", "log", "hub", "optim")


@dataclass(frozen=True)
class SavedFile:
    """A file saved by a run, or the folder of a diffusers model; `is_base`: the model that the run started from."""

    path: Path
    step: int
    is_base: bool = False

    @property
    def title(self) -> Message:
        """Its column title."""
        if self.is_base:
            return Message(BASE_MODEL)
        if self.path.stem.endswith(AVERAGE):
            return Message("step {step}, average", step=self.step)
        return Message("step {step}", step=self.step)


def run_of(name: str) -> reader.RecordedRun:
    """Return a run by its id or folder; for "" the newest with saved files. Raises ConfigError."""
    if not name:
        for run in reader.runs():
            if _saved(run):
                return run
        raise ConfigError("no run has saved a file yet: train first, or write the folder of a run")
    folder = pasted_path(name)
    if folder.is_dir():
        inner = sorted(folder.glob(f"runs/*/{layout.RUN}"), key=lambda path: path.stat().st_mtime)
        if (folder / layout.RUN).is_file() or inner:
            return reader.run_at((folder if (folder / layout.RUN).is_file() else inner[-1].parent).resolve())
        raise ConfigError(
            "{folder} is not the folder of a run: there is no {name} in it", folder=folder, name=layout.RUN
        )
    try:
        return reader.find_run(name)
    except KeyError:
        template = (
            "{name} is not a run: write the id that the page shows, the folder of a run, or nothing for the newest"
        )
        raise ConfigError(template, name=name) from None


def is_comparable(run: reader.RecordedRun) -> bool:
    script = str(run.facts.get("script") or "")
    return script in families.RUNS and families.config_class(script).kind in COMPARED_KINDS and bool(_saved(run))


def _with_earlier(run: reader.RecordedRun) -> list[tuple[reader.RecordedRun, JsonObject]]:
    """Return the events of a run's files, preceded by those of the runs that it resumes, up to its start."""
    recorded = [(run, event) for event in _saved(run)]
    folder, last_step = run.folder, math.inf
    while (parent := lineage.parent_run(folder)) is not None:
        folder, at = parent
        last_step = min(last_step, math.inf if at is None else at)
        earlier = reader.run_at(folder)
        recorded = [*((earlier, event) for event in _saved(earlier) if _step(event) <= last_step), *recorded]
    return recorded


def _step(event: JsonMapping) -> int:
    return int(as_float(event.get("step")))


def _saved(run: reader.RecordedRun) -> Sequence[JsonObject]:
    events = reader.progress(run.folder).update().events.get("saved", ())
    return [event for event in events if event.get("file") and not str(event["file"]).rstrip("/\\").endswith("-state")]


def saved_files_of_run(
    run: reader.RecordedRun, max_files: int = MAX_COMPARED_FILES
) -> tuple[list[SavedFile], list[Message]]:
    """Return the files of a run and of the runs that it resumes, earliest first, and what is left out.

    At most `max_files`, evenly spread; the last one is always included. Raises ConfigError without any.
    """
    recorded = _with_earlier(run)
    if not recorded:
        raise ConfigError("{run} has saved no file yet", run=run.name)
    steps_by_path: dict[Path, int] = {}
    gone: list[str] = []
    for saving_run, event in recorded:
        path = _locate_saved_file(saving_run, str(event["file"]))
        if path is None:
            gone.append(Path(str(event["file"])).name)
        else:
            steps_by_path[path] = _step(event)
    # The last file also belongs to a step or an epoch.
    newest = {(step, path.stem.endswith(AVERAGE)): path for path, step in steps_by_path.items()}
    files = sorted(
        (SavedFile(path, step) for (step, _), path in newest.items()), key=lambda file: (file.step, file.path)
    )
    if not files:
        raise ConfigError(
            "the files that {run} has saved are gone: {names}",
            run=run.name,
            names=", ".join(gone[:MAX_COMPARED_FILES]),
        )
    notes = []
    if gone:
        notes.append(Message("{count} that the run has saved are gone.", count=counted(len(set(gone)), "file")))
    if len(files) > max_files:
        notes.append(
            Message("{shown} of {count} files are compared: --files says how many.", shown=max_files, count=len(files))
        )
        last = len(files) - 1  # counted back from the last file, so that it is always included
        files = [files[last - round(at * last / max(1, max_files - 1))] for at in reversed(range(max_files))]
    return files, notes


def base_of_run(config: RunConfig) -> SavedFile:
    """Return the model that a run started from, which is compared before its files."""
    return SavedFile(Path(config.model.pretrained_model_name_or_path or ""), 0, is_base=True)


def _locate_saved_file(run: reader.RecordedRun, name: str) -> Path | None:
    """Return where a saved file is, even if its whole folder was moved."""
    recorded = Path(str(run.facts.get("folder") or "."), name)
    for path in (recorded, run.folder.parent.parent / recorded.name):
        if (path.is_file() and path.suffix.lower() in COMPARED_SUFFIXES) or (path / "model_index.json").is_file():
            return path
    return None


def config_of_run(run: reader.RecordedRun) -> RunConfig:
    """Return a run's config, with its drawn seed. Raises ConfigError if it cannot be compared."""
    script = str(run.facts.get("script") or "")
    if script not in families.RUNS:
        template = "{run} was made by {script}, which this version does not have"
        raise ConfigError(template, run=run.name, script=script or "an unknown script")
    kind = families.config_class(script)
    if kind.kind not in COMPARED_KINDS:
        template = "the files of {run} are no LoRA and no model: compare them in the tab Try it, or with kohya sample"
        raise ConfigError(template, run=run.name)
    toml = run.folder / layout.TOML
    settings = flatten_sections(load_toml(toml)) if toml.is_file() else flatten_sections(resume.run_settings(run))
    options = options_of(kind)
    values = {
        name: options[name].read(value) for name, value in settings.items() if name in options and value is not None
    }
    if isinstance(seed := run.facts.get("seed"), int):
        values["seed"] = seed
    if not values.get("pretrained_model_name_or_path"):
        raise ConfigError("{run} does not say which model it trained", run=run.name)
    return draft(kind, values)


def model_config(config: RunConfig, model: Path | None = None) -> RunConfig:
    """Return the config to open a model that a run has trained or started from, with training-only options off."""
    kind = families.config_class(families.lora_script(config.family))
    options = options_of(kind)
    values = {
        name: value
        for name, value in option_values(config).items()
        if name in options and (name in MERGED or not _is_of_training(name, options[name].section))
    }
    if model is not None:
        values["pretrained_model_name_or_path"] = str(model)
    return draft(kind, values)


def _is_of_training(name: str, section: str) -> bool:
    return name in LEFT_OUT or section in LEFT_OUT_SECTIONS


def prompts_of_run(run: reader.RecordedRun, config: RunConfig) -> list[Prompt]:
    """Return the prompts of a run's samples, from its file or its record; none if it has none."""
    prompt_file = Path(str(config.sample.sample_prompts or ""))
    if config.sample.sample_prompts and prompt_file.is_file():
        return read_prompts(prompt_file)
    samples = reader.progress(run.folder).update().events.get("sample", ())
    recorded = [recorded_prompt(event) for event in samples]
    return list(dict.fromkeys(prompt for prompt in recorded if prompt.prompt))
