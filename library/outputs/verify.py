"""Verify right after each save that the file loads into its model."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import safe_open

from library import families
from library.adapter_files.models import ModelFile
from library.adapter_files.verify import verify_lora
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, counted, join_messages
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.methods import TrainingMethod

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


# A bad file is only a warning, as the training's state may still be good.
# Why: docs/decisions/2026-11-20-saved-files-are-read-back.md
def expected(method: TrainingMethod) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in method.state_dict().items()}


def verify_saved_file(path: Path, shapes_of: Callable[[], Shapes], config: RunConfig) -> JsonObject:
    """Compare a file's names and shapes with the model's, and verify a LoRA like `kohya tools verify`.

    Returns {"ok", "text"} for the run's record, with a sentence as `text`; empty if only PyTorch can read the file.
    """
    # Never raises: an error here becomes the result, so that it ends no training.
    if path.suffix != ".safetensors":
        return {}
    shapes = shapes_of()
    try:
        difference = compare_names(path, shapes) or (_verified(path, config) if isinstance(config, AdapterRun) else "")
    except Exception as error:  # such as a damaged file or an unmounted disk
        log.warning("%s could not be checked", path, exc_info=True)
        difference = Message("it cannot be read back: {why}", why=error)
    loads = "it loads, and holds what the model does: {tensors}"
    if config.adapters:
        loads = "it loads, and fits the model's names and shapes: {tensors}"
    return {"ok": not difference, "text": difference or Message(loads, tensors=counted(len(shapes), "tensor"))}


def compare_names(path: Path, shapes: Shapes) -> MessageLike:
    """Return how a file and the model differ; "" if all names and shapes match."""
    with safe_open(path, framework="pt") as file:
        stored_shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    missing = [name for name in shapes if name not in stored_shapes]
    unknown = [name for name in stored_shapes if name not in shapes]
    reshaped = [name for name in stored_shapes if name in shapes and shapes[name] != stored_shapes[name]]
    differences: list[Message] = []
    if missing:
        differences.append(
            Message("{tensors} missing, first {first}", tensors=counted(len(missing), "tensor"), first=missing[0])
        )
    if unknown:
        tensors = counted(len(unknown), "tensor")
        differences.append(Message("{tensors} unknown to the model, first {first}", tensors=tensors, first=unknown[0]))
    if reshaped:
        differences.append(
            Message(
                "{tensors} of another shape, first {first}", tensors=counted(len(reshaped), "tensor"), first=reshaped[0]
            )
        )
    return join_messages(differences, "; ") if differences else ""


def _verified(path: Path, config: AdapterRun) -> MessageLike:
    """Return the first problem found by `kohya tools verify`, with the base model's header if it is readable."""
    if config.network.module not in families.facts_of(config.family).adapter_modules:
        return ""
    findings = verify_lora(path, _readable_base(Path(config.model.pretrained_model_name_or_path or "")))
    return findings.problems[0] if findings.problems else ""


def _readable_base(base: Path) -> Path | None:
    """Return a base model that the tools read; None for one that only the trainer reads, such as a .ckpt or a file in 8
    bits with scales, which is no fault of the saved file.
    """
    try:
        return ModelFile(base).path if base.is_file() else None
    except ConfigError:
        return None
