"""Values of trained parameters: compared with those of a saved state, and restored bit for bit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from library.config.problems import ConfigError, Message, Problem, counted, join_messages
from library.methods.sharding import own_part, whole_shape

ADVICE = Message("resume with its own config")


def differing_tensors(
    here: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, tuple[int, ...]],
    changes: Message | None = None,
    advice: Message = ADVICE,
) -> Problem | None:
    """Return the problem if names or shapes of trained and saved tensors differ; `changes` are the options
    that differ, and `advice` says what to do where none does.
    """
    what = [
        Message(template, tensors=counted(len(names), "tensor"), layer=min(names))
        for template, names in (
            ("only here: {tensors}, first {layer}", here.keys() - saved.keys()),
            ("only in the state: {tensors}, first {layer}", saved.keys() - here.keys()),
        )
        if names
    ]
    if not what and (differing := sorted(name for name in here if here[name] != saved[name])):
        sizes = {"theirs": _format_shape(saved[differing[0]]), "ours": _format_shape(here[differing[0]])}
        what = [Message("{layer} has the shape {theirs} in the state and {ours} here", layer=differing[0], **sizes)]
    if not what:
        return None
    if changes is None:
        return Problem(
            "resume",
            ": the state was made with other networks than this config describes ({what}); {advice}",
            what=join_messages(what, "; "),
            advice=advice,
        )
    return Problem(
        "resume",
        ": the state was made with other networks than this config describes ({what}), as {changes}; set this back, or "
        "start another training from the weights that it has saved",
        what=join_messages(what, "; "),
        changes=changes,
    )


def _format_shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "1"


@torch.no_grad()
def restore_values(named: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved values into the parameters. Raises ConfigError, changing nothing, if names or shapes differ."""
    here, saved = (
        {name: tuple(whole_shape(tensor)) for name, tensor in tensors_by_name.items()}
        for tensors_by_name in (named, tensors)
    )
    if problem := differing_tensors(here, saved):
        raise ConfigError(problem)
    for name, parameter in named.items():
        parameter.copy_(own_part(tensors[name], parameter))
