"""A training's networks built from their files' headers without weights, to find in seconds what would otherwise fail
when adapters are attached or a state is restored.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from library import families, methods
from library.config.problems import ConfigError, Message, Problem
from library.config.run_config import RunConfig
from library.config.schema import options_of
from library.config.sections import AdapterRun, ControlRun, EmbeddingRun
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.families.shared import weights
from library.memory.compile_targets import blocks_by_class
from library.memory.quantization import fp8_storage
from library.methods import snapshot
from library.optim import lr_schedule
from library.train.saving import resume_check
from library.train.saving.state_files import WEIGHTS

# Beside the denoiser in a single file; and the folders that hold it in one of diffusers.
OTHER_NETWORKS = ("text_encoders.", "conditioner.", "cond_stage_model.", "first_stage_model.", "vae.")
DENOISER_FOLDERS = ("transformer", "unet")


def find_model_file_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield mismatches of the files of adapters, `network_args` and `resume` with the model.

    These must be valid by themselves.
    """
    if not _needs_model(config) or not has_model_files(config):
        return
    try:
        method = _attach_empty_method(config)
    except ConfigError as e:
        yield from e.problems
        return
    except (RuntimeError, NotImplementedError) as e:  # LyCORIS' kinds that read the weights
        if not isinstance(config, AdapterRun) or config.network.module.startswith("networks."):
            raise
        logging.getLogger(__name__).debug("%s could not be tried beforehand: %s", config.network.module, e)
        return
    yield from lr_schedule.for_groups(config, [group["lr"] for group in method.groups() if group["params"]])
    if _resumes(config):
        yield from _state_mismatches(Path(config.steps.resume or ""), method, config)


def _needs_model(config: RunConfig) -> bool:
    if lr_schedule.has_lists(config):
        return network_args.args_class(config) is not None if isinstance(config, AdapterRun) else True
    if isinstance(config, ControlRun):
        return bool(config.control.network_weights) or _resumes(config)
    if isinstance(config, EmbeddingRun):
        return bool(config.embedding.weights) or _resumes(config)
    if not isinstance(config, AdapterRun):
        return _resumes(config)
    if network_args.args_class(config) is None:
        return False  # other modules cannot be predicted
    network = config.network
    files = network.network_weights or network.base_weights or network.assistant_lora
    return bool(files or network.network_args) or _resumes(config)


def _resumes(config: RunConfig) -> bool:
    return bool(config.steps.resume and not config.steps.resume_from_huggingface)


def has_model_files(config: RunConfig) -> bool:
    """Return whether the model's files are on this machine."""
    files = [o.name for o in options_of(type(config)).values() if o.section == "model" and o.kind == "file"]
    paths = [getattr(config.model, name) for name in files]
    return all(Path(name).exists() for name in paths if name)


def empty_components(config: RunConfig, encoders: bool) -> tuple[Family, ModelComponents]:
    """Return the networks of a config's model without memory, optionally with its text encoders. Raises ConfigError."""
    family = families.family_for(config)
    with weights.shapes_only():
        components = family.load(torch.float32, deferring=True)
        if encoders:
            components.read_encoders()
    return family, components


def find_idle_rounding(config: RunConfig) -> Iterator[Problem]:
    """Remark that fp8_base rounds nothing, as the denoiser's file already holds all matrices of the blocks in fp8.

    Without the option they would be widened, so it is not without effect.
    """
    precision = config.precision
    merges = isinstance(config, AdapterRun) and bool(config.network.base_weights)  # rounds the sums to fp8
    if not (config.adapters and precision.fp8_denoiser) or precision.auto_compute or merges:
        return
    if _keeps_fp8(config):
        yield Problem(
            "fp8_base" if precision.fp8_base else "fp8_base_unet",
            "rounds nothing: the file of the image model already has its matrices in fp8, and the option keeps them so",
        )


def find_second_rounding(config: RunConfig) -> Iterator[Problem]:
    """Remark that the denoiser's file has its matrices in 8 bits, and that this config rounds or trains them again."""
    option, precision = "pretrained_model_name_or_path", config.precision
    if not (kind := _eight_bits_of(Path(config.model.pretrained_model_name_or_path or ""))):
        return
    if not config.adapters:
        template = (
            "has weights in {kind}, which are already rounded: start a fine-tune from the bf16 file, which is "
            "more exact"
        )
        yield Problem(option, template, kind=kind)
    elif precision.nf4_denoiser:
        template = "rounds the image model a second time, because its file is in {kind}: the bf16 file is more exact"
        yield Problem("base_bits", template, kind=kind)
    elif kind == "fp8" and precision.int8_base:
        yield _keep_format("int8_base", kind, precision.int8_compute)
    elif kind == "int8" and precision.fp8_denoiser:
        option = "fp8_base" if precision.fp8_base else "fp8_base_unet"
        yield _keep_format(option, kind, precision.fp8_compute)


def _keep_format(option: str, kind: str, multiplies: bool) -> Problem:
    """Return the remark on an option that rounds to the other format; `multiplies`: products are in that one, too."""
    template = "rounds the image model a second time, because its file is in {kind}: use {better} to keep its values"
    better, other = f"{kind}_base", "int8" if kind == "fp8" else "fp8"
    fix = {option: False, better: True}
    fix |= {f"{other}_compute": False, f"{kind}_compute": True} if multiplies else {}
    return Problem(option, template, kind=kind, better=better, fix=fix)


def _keeps_fp8(config: RunConfig) -> bool:
    """Return whether fp8_base finds all frozen matrices of the denoiser's blocks in fp8 already."""
    if _eight_bits_of(Path(config.model.pretrained_model_name_or_path or "")) != "fp8":
        return False
    with contextlib.suppress(ConfigError), _quiet():
        family, components = empty_components(config, encoders=False)
        components.read_denoiser()
        blocks = [block for group in blocks_by_class(components.denoiser, family.block_classes) for block in group]
        dtypes = {layer.weight.dtype for block in blocks for layer in fp8_storage.frozen_layers(block)}
        return dtypes == {fp8_storage.FP8_DTYPE}
    return False


def _eight_bits_of(path: Path) -> str:
    """Return whether the denoiser in a checkpoint has tensors in int8 or fp8, "" for neither: from headers alone, as
    building its networks takes seconds.
    """
    dtypes: set[str] = set()
    with contextlib.suppress(ConfigError, OSError):
        files = [*path.rglob("*.safetensors")] if path.is_dir() else weights.files(path)
        own = [file for file in files if file.parent.name in DENOISER_FOLDERS] if path.is_dir() else []
        readable = (file for file in own or files if file.suffix == ".safetensors")
        tensors = (item for file in readable for item in weights.header_entries(file).items())
        dtypes = {str(entry["dtype"]) for name, entry in tensors if not name.startswith(OTHER_NETWORKS)}
    return "int8" if "I8" in dtypes else "fp8" if "F8_E4M3" in dtypes else ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Within the context, log no warnings, which the training repeats."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(level)


def _attach_empty_method(config: RunConfig) -> methods.TrainingMethod:
    with _quiet(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that tensors on the meta device hold no data
        family, components = empty_components(config, methods.reads_encoders(config))
        return methods.attach_method(components, family, config)


def _state_mismatches(folder: Path, method: methods.TrainingMethod, config: RunConfig) -> Iterator[Problem]:
    """Yield mismatches of a state: other networks, or another optimizer."""
    changes, advice = resume_check.shaping_changes(folder, config), _advice_on_blocks(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in method.snapshot().items()}
    if problem := snapshot.differing_tensors(shapes, weights.header(folder / WEIGHTS), changes, advice):
        yield problem
        return
    with contextlib.suppress(ConfigError):  # damaged files are reported elsewhere
        saved, now = resume_check.saved_groups(folder), resume_check.group_sizes(method.groups())
        if problem := resume_check.other_groups(saved, now, changes, advice):
            yield problem


def _advice_on_blocks(config: RunConfig) -> Message:
    """Return the advice for a state with other networks: version 0.3.0 read an empty list of blocks as all blocks."""
    empty = network_args.empty_block_lists(config) if isinstance(config, AdapterRun) else []
    if not empty:
        return resume_check.ADVICE
    template = "if an older version saved it, write {all} in network_args: an empty list meant all blocks then"
    return Message(template, all=" ".join(f"{name}=all" for name in empty))
