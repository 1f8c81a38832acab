"""Everything that can be known to go wrong before a model is loaded, all of it at once."""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from library import data, families, methods
from library.check import adapter_files, graph_limit, meta_model, sample_prompts, training_length
from library.compiler import checks
from library.config import building, code_names, fixes, ineffective, schema
from library.config.environment import SWITCHED_ON, first_process, processes, shards_asked
from library.config.json_types import JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, problems_of, together
from library.config.run_config import RunConfig
from library.data import debug_dataset, text_encoding
from library.families.base import Family
from library.files import free_space
from library.memory.quantization import fp8_matmul, int8_matmul
from library.methods import lycoris
from library.optim import optimizers
from library.outputs import hub, trackers
from library.outputs import paths as save
from library.runs import reader, registry
from library.runs.record import Record
from library.train.journal import Progress
from library.train.saving import base_files, resume_check

# What rules of the options have spoken of already, where a look at the files says the same in other words.
RULED = {"resolution", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "model_type", "initial_step"}
# With these all learns.
RATES: JsonObject = {"learning_rate": 1e-4, "unet_lr": None, "text_encoder_lr": (), "block_lr": None}
PATIENCE = 2.0  # seconds after which a look at the images says how far it is
FITTED = ("model", "network", "other adapters")  # stages to be passed before parts are fitted together
COUNTED = ("model", "images", "machine")  # the same before graphs are counted
SHAPING = {
    "network_dim",
    "network_args",
    "network_module",
    "dim_from_weights",
    "network_train_unet_only",
    "network_train_text_encoder_only",
    "train_text_encoder",
}
LEAST_SPACE = 64 * 2**20  # bytes; less than any result needs

# What `accelerate launch` sets where its config asks for a way to cut a model into shards.
SHARDING = {"ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM"}


def check(config: RunConfig) -> list[Problem]:
    """Raise ConfigError with every problem of this run; return what its user should know besides."""
    images = data.check(config, config.grid, Progress(print, PATIENCE) if first_process() else None)
    found, remarks = judged(config, images)
    if found:
        raise ConfigError(*found)
    if images.masks and first_process():
        print(images.masks)
    return remarks


def show(config: RunConfig) -> None:
    """Print what a training would see, and train nothing (`debug_dataset`). Raises ConfigError as `check` does.

    Only a run that the page has prepared leaves anything behind: its folder, which says that it is over.
    """
    if not first_process():
        return
    page = contextlib.nullcontext()
    if os.environ.get("KOHYA_RUN_DIR"):
        page = Record.start(schema.changed(config), config.script, config.save.output_dir or ".", "", config.title)
    with page, contextlib.suppress(BrokenPipeError):  # whoever reads along has seen enough
        for line in debug_dataset.lines(config, config.steps.seed or 0):
            print(line)


def problems(config: RunConfig) -> Iterator[Problem]:
    """What has to be fixed before this run can start. Loads no model."""
    yield from findings(config)[0]


def load_named_code(config: RunConfig) -> None:
    """Import the code of packages that are not listed, which a check leaves alone. Raises ConfigError for what is not
    of the kind that its option expects."""
    found = [*optimizers.named_code_problems(config)]
    try:
        if name := code_names.unlisted(config).get("network_module"):
            lycoris.load_module(name)
    except ConfigError as e:
        found += e.problems
    if found:
        raise ConfigError(*found)


def code_notes(config: RunConfig) -> list[Problem]:
    """The names of code that is not listed, which no check has looked at."""
    template = "{name} is code of a package that this program does not list; it runs when the training starts"
    return [Problem(option, template, name=name) for option, name in code_names.unlisted(config).items()]


def beyond(reading: building.Reading[Any]) -> list[Problem]:
    """What has to be fixed besides the problems that reading a config has found."""
    return judged(reading.config, look(reading), reading)[0]


def findings(config: RunConfig) -> tuple[list[Problem], list[Problem]]:
    """Problems that stop a run, and remarks that do not."""
    return judged(config, data.check(config, config.grid))


def look(reading: building.Reading[Any]) -> data.Check:
    """The look at the images of a config that may be wrong in itself."""
    nothing = data.Check([], [])
    with _tolerant(bool(reading.problems), nothing.problems):
        return data.check(reading.config, reading.config.grid, quick=True)
    return nothing


def judged(
    config: RunConfig, images: data.Check, reading: building.Reading[Any] | None = None
) -> tuple[list[Problem], list[Problem]]:
    """Problems and remarks, from what `data.check` has found.

    Where reading the config has found problems already, these are not repeated, and what would only follow from them
    is left out.
    """
    problems, wrong = (reading.problems, reading.wrong) if reading else ([], frozenset())
    config = base_files.with_local_files(config)
    unreachable, announced = base_files.remote_files(config)
    named = wrong.union(*(problem.options for problem in problems))
    missing = building.missing(config)
    silent = {problem.option for problem in missing}  # what is not given at all is said once
    found = [problem for problem in missing if problem.option not in named]
    failed: dict[str, bool] = {}
    for stage, ask in _stages(config, images, unreachable, failed).items():
        said: list[Problem] = []
        with _tolerant(bool(problems), said):
            said += problems_of(ask()) if stage != "fit" or wrong.isdisjoint(SHAPING) else ()
        failed[stage] = bool(said)
        for problem in said:
            again = stage in ("images", "model", "length") and problem.option in RULED & named
            known = again or problem in (*problems, *found) or problem.option in silent
            if not known and wrong.isdisjoint(problem.options):
                found.append(problem)
    remarks: list[MessageLike] = [*images.warnings, *training_length.length_notes(config, images)]
    remarks += [*code_notes(config), *announced]
    # Notes about what cannot be read would only be errors.
    with _tolerant(bool(problems), []):
        family = families.family_for(config)
        remarks += [] if failed["model"] else [*family.notes(), *_cut_captions(family, images)]
        resumes = not (failed["length"] or any(one.option == "resume" for one in found))
        remarks += _changed(config, images) if resumes else []
        remarks += [] if failed["network"] else methods.notes(config)
        remarks += [] if failed["model"] or failed["other adapters"] else adapter_files.notes(config)
        remarks += [] if config.compile.compile_fullgraph else _graphs(config, images, failed)
        remarks += [] if failed["optimizer"] else optimizers.notes(config)
        remarks += [] if failed["samples"] else sample_prompts.idle_prompts(config, family)
        remarks += [unlisted] if (unlisted := registry.unusable()) else []
        of_machine = [*_single_process(config), *_sixteen_bits(config), *_missing_gpu_features(config)]
        remarks += [one for one in of_machine if one.option not in {p.option for p in (*problems, *found)}]
        remarks += ineffective.remarks(config, [*problems, *found, *remarks, *building.notes(config)])
    return found, [remark for remark in problems_of(remarks) if wrong.isdisjoint(remark.options)]


def _stages(
    config: RunConfig, images: data.Check, unreachable: Sequence[Problem], failed: Mapping[str, bool]
) -> dict[str, Callable[[], Iterable[MessageLike]]]:
    """What is checked, in the order in which it is reported. `failed` fills up meanwhile: the last two stages look at
    what the earlier ones have found."""
    return {
        "model": lambda: families.family_for(config).problems(),
        "images": lambda: images.problems,
        "length": lambda: training_length.length_problems(config, images),
        "network": lambda: [*methods.problems(config), *unreachable],
        "optimizer": lambda: optimizers.problems(config),
        "save": lambda: save.problems(config),
        "space": lambda: _space(config),
        "alone": lambda: _alone(config),
        "samples": lambda: sample_prompts.unusable_prompts(config),
        "machine": lambda: _machine(config),
        "hub": lambda: hub.problems(config),
        "trackers": lambda: trackers.problems(config),
        "resume": lambda: _resumed(config),
        "other adapters": lambda: adapter_files.problems(config),
        "rates": lambda: optimizers.zero_rate_problems(config),
        "graphs": lambda: _graphs(config, images, failed) if config.compile.compile_fullgraph else [],
        "fit": lambda: [] if any(map(failed.get, FITTED)) else _fitted(config, failed),
    }


@contextlib.contextmanager
def _tolerant(unsound: bool, said: list[Problem]) -> Iterator[None]:
    """What is to be fixed goes into `said`. Where a config is known to be wrong in itself, a check may fail in any way
    over values that do not go together; it is made again when these are mended."""
    try:
        yield
    except ConfigError as e:
        said += e.problems
    except Exception:
        if not unsound:
            raise


def _fitted(config: RunConfig, failed: Mapping[str, bool]) -> Iterator[Problem]:
    """What does not go together, of what is in order by itself."""
    config = base_files.without_remote_files(config)
    if failed["resume"]:
        config = replace(config, steps=replace(config.steps, resume=None))
    if failed["rates"]:  # as if something learned
        rates = {name: rate for name, rate in RATES.items() if hasattr(config.optim, name)}
        config = replace(config, optim=replace(config.optim, **rates))
    yield from meta_model.problems(config)


def _graphs(config: RunConfig, images: data.Check, failed: Mapping[str, bool]) -> Iterator[Problem]:
    """More graphs than are allowed: a mistake with compile_fullgraph, else only slower."""
    if not any(map(failed.get, COUNTED)):
        yield from graph_limit.problems(config, images.images, _device())


def _single_process(config: RunConfig) -> Iterator[Problem]:
    """What is for several processes, where there is one."""
    if processes() == 1:
        for name in schema.changed(config).get("distributed", {}):
            yield ineffective.remark(name, "it is for several processes, and this is one")


def _sixteen_bits(config: RunConfig) -> Iterator[Problem]:
    """A type of 16 bits that the model exceeds, or that the GPU only emulates."""
    device, kind, facts = _device(), config.precision.mixed_precision, families.facts(config.family)
    if kind == "fp16" and facts.exceeds_fp16:
        instead = together(["bf16", *["full_bf16"] * config.precision.full_fp16])
        yield Problem(
            "mixed_precision",
            "= fp16: what {title} computes is too large for it, so the loss is likely to become NaN; use {instead}",
            title=facts.title,
            instead=instead,
            fix=fixes.in_bf16(config),
        )
    is_old = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    if kind == "bf16" and is_old and not facts.exceeds_fp16:
        half = {"mixed_precision": "fp16"}
        with contextlib.suppress(ConfigError):  # other options may need bf16, and then there is nothing to advise
            building.replace(config, **half)
            yield Problem("mixed_precision", "= bf16: this GPU emulates it, which is slow; fp16 is fast here", fix=half)


def _missing_gpu_features(config: RunConfig) -> Iterator[Problem]:
    """What only some GPUs can do, where there is none of them."""
    recorded_by, mode = config.compile.recorded_by, config.compile.compile_mode
    if recorded_by and mode != "max-autotune" and _device().type != "cuda":  # which tunes kernels for a CPU, too
        yield ineffective.remark(recorded_by, "there is no GPU that records CUDA graphs")
    if not config.adapters:
        return
    fp8, int8 = fp8_matmul.supports_fp8(_device()), int8_matmul.supports_int8(_device())
    for name, works in (("fp8_compute", fp8), ("int8_compute", int8), ("auto_compute", fp8 or int8)):
        if not getattr(config.precision, name) or works:
            continue
        if name == "fp8_compute" and int8:
            yield Problem(
                name,
                "has no effect here: this GPU multiplies in int8, not in fp8; use auto_compute, which times both ways",
                fix={"fp8_compute": False, "auto_compute": True},
            )
        else:
            yield ineffective.remark(name, "this machine cannot multiply in 8 bits, only keep them")


def _cut_captions(family: Family, images: data.Check) -> Iterator[Problem]:
    """Captions that are longer than the text encoder reads; nothing where its tokenizer cannot be had."""
    with contextlib.suppress(ConfigError):
        variants = family.config.cache.cached_caption_variants if family.config.cache.text else 1
        yield from text_encoding.cut_captions(images.images.items if images.images else (), family, variants)


def _resumed(config: RunConfig) -> Iterator[Problem]:
    """A state on the hub is looked at when it has been downloaded."""
    if config.steps.resume and not config.steps.resume_from_huggingface:
        yield from resume_check.problems(Path(config.steps.resume), config)


def _changed(config: RunConfig, images: data.Check) -> list[Problem]:
    """What the config changes in the training that it resumes."""
    if not config.steps.resume or config.steps.resume_from_huggingface:
        return []
    steps = training_length.expected_length(config, images)
    alone = processes() == 1  # of several, each takes a share of an epoch
    return resume_check.changes(config, steps.total if steps and alone else None)


def _space(config: RunConfig) -> Iterator[Problem]:
    if not config.save.output_dir:
        return
    folder = Path(config.save.output_dir).absolute()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if nearest.is_dir() and not os.access(nearest, os.W_OK):
        yield Problem("output_dir", ": {folder} cannot be written to; choose another folder", folder=nearest)
    elif (left := free_space(nearest)) < LEAST_SPACE:
        template = ": the disk of {folder} is full ({left} MB left); make room, or choose another folder"
        yield Problem("output_dir", template, folder=nearest, left=left >> 20)


def _alone(config: RunConfig) -> Iterator[Problem]:
    """Two trainings would write over each other's files."""
    if not config.save.output_dir or not first_process():  # the others' run is that of the first
        return
    for folder in (Path(config.save.output_dir) / "runs").glob("*"):
        run = reader.at(folder)
        mine = os.environ.get("KOHYA_RUN_DIR") == str(folder.absolute())
        if run.active and not mine and run.facts.get("output_name") == config.save.output_name:
            template = ": a training that writes these files is {state}; stop it, or choose another name"
            yield Problem("output_name", template, state=Message(run.state), fix=save.free_name(config))


def _device() -> Any:
    """What the training will compute on."""
    on_cpu = not torch.cuda.is_available() or os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    return torch.device("cpu" if on_cpu else "cuda")


def _machine(config: RunConfig) -> Iterator[Problem]:
    """What this machine cannot do."""
    device = _device()
    if device.type == "cpu" and config.precision.mixed_precision == "fp16":
        template = ": fp16 needs a GPU, and none was found; use bf16 or no"
        yield Problem("mixed_precision", template, fix=fixes.in_bf16(config))
    asked = [what for switch, what in SHARDING.items() if os.environ.get(switch, "").lower() in SWITCHED_ON]
    for what in [*asked, *["version 1 of FSDP"] * (shards_asked() == 1)]:
        yield Problem(
            "",
            topic="training",
            what=what,
            template="accelerate is told to use {what}, which is not used here: choose MULTI_GPU in "
            "`accelerate config`, and fsdp = true to shard a full fine-tune (FSDP2)",
        )
    if shards_asked() == 2 and os.environ.get("FSDP_OFFLOAD_PARAMS", "").lower() in SWITCHED_ON:
        yield Problem(
            "fsdp",
            ": accelerate is told to offload shards to CPU memory (fsdp_offload_params), which is not supported: "
            "set it to false in `accelerate config`",
        )
    if processes() > 1 and config.memory.blocks_to_swap and not config.adapters and not config.optim.stepped_early:
        yield Problem(
            "blocks_to_swap",
            ": on several GPUs a whole model can be swapped only with fused_backward_pass and Adafactor; "
            "add these, or leave blocks_to_swap out",
        )
    if config.compile.compile and not config.compile.compile_fallback:
        yield from checks.problems(config.compile, device)
