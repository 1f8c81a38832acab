"""Models with a distilled Turbo whose files look the same: only `model_version` tells them apart."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from library.config.problems import Problem
from library.families.facts import HubLora
from library.families.shared.assistants import assistant_fix, idle_assistant, lacks_assistant, takes_assistant


def is_turbo(config: Any) -> bool:
    return config.model.model_version == "turbo"


def find_unnamed_turbo(path: Path, config: Any, base: str, seems_turbo: bool) -> Iterator[Problem]:
    """Yield the problem of a file that seems to be Turbo, without a `model_version`; `base` is the other version."""
    if seems_turbo and not config.model.model_version:
        yield Problem(
            "model_version",
            ": {path} seems to be Turbo, whose files look the same: set model_version = turbo, or {base} if it is not "
            "Turbo",
            path=path,
            base=base,
            also="pretrained_model_name_or_path",
            fix={"model_version": "turbo"},
        )


def unset_version(base: str, title: str) -> Problem:
    """Return the remark that the file counts as that of the model to train on, by its version and its title."""
    return Problem(
        "model_version",
        "is not set, so the file is trained as {title}; files of Turbo look the same",
        title=title,
        fix={"model_version": base},
    )


def turbo_forgets(config: Any, title: str, adapter: HubLora | None = None) -> Problem:
    """Return the warning of training Turbo instead of the model with this title, or without its training adapter."""
    if adapter is None or not takes_assistant(config):
        return Problem(
            "model_version",
            "= turbo: Turbo forgets how to generate in few steps if it is trained directly; train on {title}",
            title=title,
        )
    return Problem(
        "model_version",
        "= turbo: Turbo forgets how to generate in few steps if it is trained directly; set assistant_lora of a LoRA "
        "to its training adapter, or train on {title}: {adapter}",
        title=title,
        adapter=adapter.file,
        also="assistant_lora base_weights",
        fix=assistant_fix(config, adapter),
    )


def version_notes(config: Any, base: str, titles: tuple[str, str], adapter: HubLora) -> Iterator[Problem]:
    """Warn of a version that no file reveals, and of training Turbo without its training adapter.

    `base` is the version to train on, `titles` are its name beside Turbo's and by itself.
    """
    if not config.model.model_version:
        yield unset_version(base, titles[0])
    elif not is_turbo(config):
        yield from idle_assistant(config, titles[1])
    elif lacks_assistant(config):
        yield turbo_forgets(config, titles[0], adapter)
