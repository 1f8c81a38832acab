"""Check on the disk, right after each save, that the file loads into its model."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import safe_open

from library import families
from library.adapter_files.verify import verify
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, counted, listed
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.methods import TrainingMethod

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


# Why: docs/decisions/2026-11-20-saved-files-are-read-back.md
def expected(method: TrainingMethod) -> Shapes:
    """The names and shapes that a file of this method holds; they stay the same for the whole run."""
    return {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()}


def check(path: Path, shapes_of: Callable[[], Shapes], config: RunConfig) -> JsonObject:
    """Compare a file's names and shapes with the model's, and look at a LoRA as `kohya tools verify` does.

    Returns {"ok", "text"} for the run's record: `text` is a sentence. Nothing where only PyTorch could read the file.
    It never ends a training: an error in here becomes the answer.
    """
    if path.suffix != ".safetensors":
        return {}
    shapes = shapes_of()
    try:
        wrong = differences(path, shapes) or (_verified(path, config) if isinstance(config, AdapterRun) else "")
    except Exception as error:  # such as a damaged file or an unmounted disk
        log.warning("%s could not be checked", path, exc_info=True)
        wrong = Message("it cannot be read back: {why}", why=error)
    loads = "it loads, and holds what the model does: {tensors}"
    if config.adapters:
        loads = "it loads, and fits the model's names and shapes: {tensors}"
    return {"ok": not wrong, "text": wrong or Message(loads, tensors=counted(len(shapes), "tensor"))}


def differences(path: Path, shapes: Shapes) -> MessageLike:
    """What a file and the model do not have in common; "" when all names and shapes match."""
    with safe_open(path, framework="pt") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    missing = [name for name in shapes if name not in found]
    unknown = [name for name in found if name not in shapes]
    other = [name for name in found if name in shapes and shapes[name] != found[name]]
    said: list[Message] = []
    if missing:
        said.append(
            Message("{tensors} missing, first {first}", tensors=counted(len(missing), "tensor"), first=missing[0])
        )
    if unknown:
        tensors = counted(len(unknown), "tensor")
        said.append(Message("{tensors} unknown to the model, first {first}", tensors=tensors, first=unknown[0]))
    if other:
        said.append(
            Message("{tensors} of another shape, first {first}", tensors=counted(len(other), "tensor"), first=other[0])
        )
    return listed(said, "; ") if said else ""


def _verified(path: Path, config: AdapterRun) -> MessageLike:
    """The first problem that `kohya tools verify` finds, with the base model's header where it can be read."""
    if config.network.module not in families.facts(config.family).adapter_modules:
        return ""
    base = Path(config.model.pretrained_model_name_or_path or "")
    try:
        found = verify(path, base if base.is_file() else None)
    except ConfigError:  # a base that only the trainer reads, such as a .ckpt
        found = verify(path)
    return found.problems[0] if found.problems else ""
