"""Take runs off the list, and put them back. Their files stay."""

from pathlib import Path

from library.config.problems import ConfigError, Message, Problem
from library.files import replace
from library.runs import layout, reader, registry

REMOVED = "removed-runs"  # beside the folder of pointers


def remove_run(run_id: str) -> None:
    """Take an ended run off the list. Raises ConfigError for an active or unknown one."""
    run = reader.existing_run(run_id)
    refuse_active(run)
    _move(run.id, _listed(), _removed())


def refuse_active(run: reader.RecordedRun) -> None:
    """Raise ConfigError for a run that is active."""
    if run.active:
        template = "{run} is still {state}: stop it first."
        raise ConfigError(Problem("", template, run=run.name, state=Message(run.state), code="busy"))


def restore_run(run_id: str) -> None:
    """Put a removed run back on the list. Raises ConfigError if it was not removed, or if its folder is gone."""
    folder = layout.load_facts(_removed() / f"{run_id}.json").get("folder") if layout.is_run_id(run_id) else None
    if not folder or not Path(folder).is_dir():
        raise ConfigError("The folder of this run is gone, so it cannot be put back on the list.")
    _move(run_id, _removed(), _listed())


def _listed() -> Path:
    return registry.data_folder() / "runs"


def _removed() -> Path:
    return registry.data_folder() / REMOVED


def _move(run_id: str, source: Path, target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
        replace(source / f"{run_id}.json", target / f"{run_id}.json")
    except OSError as error:
        raise ConfigError(
            "The list of runs cannot be changed in {folder} ({why}).", folder=target, why=error.strerror or error
        ) from error
