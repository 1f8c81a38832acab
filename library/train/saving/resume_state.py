"""The state folder of a training: everything that resuming needs to continue bit for bit."""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from library.adapter_files.names import possible_families, sizes_of
from library.config.json_types import JsonMapping, JsonObject
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted, listed, option_name
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.data.held_out import IN_STATE
from library.families.shared.weights import header
from library.optim import resuming
from library.optim.names import spec_of
from library.outputs.paths import names
from library.train.choices import Choices
from library.train.saving.deciding_options import (
    LENGTH,
    MEASURED,
    computed_by,
    deciding_options,
    differences,
    is_rescheduled,
)
from library.train.saving.state_files import (
    AVERAGE,
    OPTIMIZER,
    PROGRESS,
    SCALER,
    SCHEDULER,
    WEIGHTS,
    State,
    damage,
    has_checksums,
    randomness,
    read_tensors,
    read_values,
)
from library.train.step import rng

if TYPE_CHECKING:
    from library.train.training import Training

VERSION = 1
CHANGED = (
    ": the training continues with what the config changes, and with the optimizer's moments of the state: "
    "{differences}"
)  # fmt: skip
STARTS_ONLY = ": {name} only sets where the optimizer's estimate starts, so the estimate of the state stays"
NO_CHECKSUMS = ": {folder} was saved without checksums, by an older version, so damage to its files is not noticed"
NOT_EXACTLY = "resume: the training continues, but not bit-exactly: {differences}"
WHOLE = ("denoiser", "clip_l", "clip_g", "t5xxl")  # what a whole model's tensors begin with
BESIDE = {"embedding.": "textual-inversion", "lllite_": "lllite"}  # the same of what else learns -> its kind
LEARNED = {
    "finetune": "a whole model",
    "lora": "adapters",
    "textual-inversion": "a word",
    "lllite": "LLLite",
}
# Options that decide what is trained and how it is grouped, and rates that leave a part out.
SHAPING = ("network_module", "network_dim", "network_args", "network_train_unet_only",
           "network_train_text_encoder_only", "train_text_encoder", "fused_optimizer_groups",
           "fused_backward_pass", "blockwise_fused_optimizers", "full_bf16", "full_fp16")  # fmt: skip
RATES = ("learning_rate", "unet_lr", "text_encoder_lr", "block_lr", "learning_rate_te1", "learning_rate_te2")
RANK = 4  # where network_dim is not set
OTHER_OPTIMIZER = Problem("resume",
    ": the state is of a run with another optimizer, or with other learning rates for other parts; "
    "resume with its own config")  # fmt: skip


def collect(training: "Training") -> State | None:
    """The present state in the main process, None in the others. A collective operation: every process has to call
    it."""
    world, updates, clock = training.world, training.updates, training.clock
    sources = world.gather(rng.get_rng_state(world.device))
    optimizer, average = updates.state_dict(), updates.average.state_dict() if updates.average else {}
    if not world.main:
        return None
    tensors = {WEIGHTS: training.method.snapshot()}
    values = {OPTIMIZER: optimizer, SCHEDULER: updates.schedule.state_dict()}
    values |= {randomness(rank): source for rank, source in enumerate(sources)}
    if updates.average:
        tensors[AVERAGE] = average
    if world.scaler:
        values[SCALER] = world.scaler.state_dict()
    facts = {"version": VERSION, **clock.state(), "seed": training.generators.seed}
    facts |= {"losses": training.step_log.meter.state(), "batches": training.batches.state_dict()}
    facts |= {"settings": deciding_options(training.config, clock.total), "choices": asdict(training.choices)}
    facts |= {"computed_by": computed_by(world.device), "groups": updates.groups}
    facts |= training.early_stop.state()
    if (marks := training.batches.images.held_out) is not None:
        facts |= {IN_STATE: list(marks)}
    return State(tensors, values, facts)


def resume(folder: Path, training: "Training") -> None:
    """Restore the state from a folder that `State.write` wrote. Raises ConfigError where it does not fit this run."""
    training.journal.phase(Message("resuming"))
    config, world, updates, clock = training.config, training.world, training.updates, training.clock
    if damaged := damage(folder):
        raise ConfigError(*damaged)
    facts = read_progress(folder)
    if not config.steps.moved and (why := finished(folder, facts, clock.total, config)):
        raise ConfigError(why)
    training.method.restore(read_tensors(folder / WEIGHTS))
    _take_over_optimizer(folder, facts, training)
    if updates.average and (folder / AVERAGE).is_file():
        updates.average.load_state_dict(read_tensors(folder / AVERAGE))
    elif updates.average:
        updates.average.start()
        training.journal.warn(Message("resume: the state has no averaged weights; the average starts again"))
    if world.scaler:
        world.scaler.load_state_dict(read_values(folder / SCALER, world.device))
    _compare(facts, training, training.batches.load_state_dict(facts["batches"]))
    training.generators.seed = facts["seed"]
    _move_clock(facts, training)
    if (folder / randomness(world.rank)).is_file():
        rng.set_rng_state(read_values(folder / randomness(world.rank), "cpu"), world.device)
    training.journal.say(f"Resumed {folder} after step {clock.step}.")


def _take_over_optimizer(folder: Path, facts: JsonMapping, training: "Training") -> None:
    """Load optimizer and schedule; rates and arguments that the config has changed apply."""
    config, known = training.config, facts.get("settings", {})
    in_shards = training.method.shards is not None  # then each process reads its own rows only
    stored = read_values(folder / OPTIMIZER, "cpu" if in_shards else training.world.device, mapped=in_shards)
    rescheduled = is_rescheduled(known, deciding_options(config, training.clock.total))
    saved = resuming.Saved(stored, read_values(folder / SCHEDULER, "cpu"), facts.get("groups"), known, rescheduled)
    try:
        training.updates.resume(saved, config)
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as e:  # other groups, or other memory
        raise ConfigError(OTHER_OPTIMIZER) from e


def _move_clock(facts: JsonMapping, training: "Training") -> None:
    """Set clock and data to where the state was saved, or to where the config says that this training begins."""
    clock, batches, accumulation = training.clock, training.batches, training.config.steps.gradient_accumulation_steps
    if training.config.steps.moved:
        batches.go_to(clock.epoch, clock.in_epoch * accumulation)
        return
    clock.step, clock.epoch = facts["current_step"], facts["current_epoch"]
    # Of other data, or other steps, the epoch may already be over at this place.
    steps = math.ceil(batches.index / accumulation)
    clock.in_epoch = min(steps, clock.per_epoch) if batches.epoch == clock.epoch else clock.per_epoch
    training.step_log.meter.load(facts["losses"][: clock.per_epoch])
    training.early_stop.restore(facts)


def changes(config: RunConfig, total: int | None = None) -> list[Problem]:
    """What a resume will change: the options that differ from the state's and decide results, and a state without
    checksums. `total` steps are those of this training, where they are known. Nothing for a folder that is no state."""
    folder = Path(config.steps.resume or "")
    try:
        facts = read_progress(folder)
    except ConfigError:
        return []
    known, now = facts.get("settings", {}), deciding_options(config, total or 0)
    for name in MEASURED if total else (*MEASURED, LENGTH):
        now.pop(name, None)
    found, given = list(differences(known, now)), config.steps.seed
    if given is not None and given != facts["seed"]:
        found.append(Message("the seed stays {seed}, {given} is not used", seed=facts["seed"], given=given))
    said = [Problem("resume", CHANGED, differences=listed(found, "; "))] if found else []
    said += [] if has_checksums(folder) else [Problem("resume", NO_CHECKSUMS, folder=folder)]
    return said + [
        Problem("resume", STARTS_ONLY, name=option_name(name)) for name in resuming.only_for_starts(known, config)
    ]


def _compare(facts: JsonMapping, training: "Training", data: MessageLike) -> None:
    """Warn of every difference that keeps this run from continuing bit for bit, besides `changes`."""
    config = training.config
    now = deciding_options(config, training.clock.total)
    found = list(differences(facts.get("settings", {}), {name: now[name] for name in MEASURED if name in now}))
    found += [data] * bool(data)
    folder, ranks = Path(config.steps.resume or ""), training.world.ranks
    if any(not (folder / randomness(rank)).is_file() for rank in range(ranks)):
        found.append(Message("the state is of fewer processes, so some have no random state"))
    found += differences(facts.get("computed_by", {}), computed_by(training.world.device))
    if found:
        training.journal.warn(Message(NOT_EXACTLY, differences=listed(found, "; ")))


def problems(folder: Path, config: RunConfig | None = None, total: int | None = None) -> list[Problem]:
    """Why a folder cannot be resumed, without loading a model; by the run of this config, if there is one, which has
    `total` steps, where its epochs have been counted."""
    if not folder.is_dir():
        template = ": there is no folder {folder}; give the path of a folder that ends in -state"
        return [Problem("resume", template, folder=folder)]
    if damaged := damage(folder):
        return damaged
    needed = (WEIGHTS, OPTIMIZER, SCHEDULER, randomness(0), PROGRESS)
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        template = ": {folder} is no complete state (it lacks {missing}); choose another -state folder"
        return [Problem("resume", template, folder=folder, missing=", ".join(missing))]
    try:
        facts = read_progress(folder)
    except ConfigError as e:
        return e.problems
    try:
        header(folder / WEIGHTS)
    except ConfigError:
        return [Problem("resume", ": {folder} is damaged; choose another -state folder", folder=folder)]
    if config is None:
        return []
    if other := [*_other_training(folder, facts, config)]:
        return other
    # With initial_step or initial_epoch the config says where to begin, not the state.
    if config.steps.moved:
        return []
    if total is None:
        if config.steps.max_train_epochs:
            return []
        total = int(config.steps.max_train_steps)
    return [why] if (why := finished(folder, facts, total, config)) else []


def _other_training(folder: Path, facts: JsonMapping, config: RunConfig) -> Iterator[Problem]:
    """Why the state is of another kind of training than this config, whatever the model is."""
    stored, known = header(folder / WEIGHTS), facts.get("settings", {})
    kind, advice = _kind(stored), "resume with its own config"
    if kind != config.kind:
        yield Problem("resume",
            ": {folder} is the state of a training of {saved}, and this one trains {now}; {advice}",
            folder=folder, saved=LEARNED[kind], now=LEARNED[config.kind], advice=advice)  # fmt: skip
        return
    with contextlib.suppress(ConfigError):  # of neither family, as far as names tell
        whole = kind == "finetune"
        layers = (name.removeprefix("denoiser.") if whole else name.partition(".")[0] for name in stored)
        if config.family not in possible_families(layers, {}, sizes_of(stored)):
            yield Problem("resume",
                ": {folder} is the state of a training of another family than {title}; {advice}",
                folder=folder, title=config.title, advice=advice)  # fmt: skip
            return
    saved = str(known.get("optimizer_type", config.optim.optimizer_type) or "")
    if _memory(saved) != _memory(config.optim.optimizer):
        now = config.optim.optimizer
        yield Problem("resume",
            ": {folder} was saved with optimizer_type {saved}, and this is {now}; {advice}", folder=folder,
            saved=saved or "AdamW", now=now, advice=advice)  # fmt: skip
    elif resuming.needs_other_memory(known, config):
        before, now = (listed(args, " ") for args in (known["optimizer_args"], config.optim.optimizer_args))
        yield Problem("resume",
            ": {folder} was saved with optimizer_args [{before}], and with [{now}] the optimizer keeps other "
            "moments, which the state does not have; {advice}", folder=folder, before=before, now=now,
            advice=advice)  # fmt: skip
    if not isinstance(config, AdapterRun):
        return
    network = config.network
    if str(known.get("network_module") or network.module) != network.module:
        before = known["network_module"]
        yield Problem("resume",
            ": {folder} was saved with network_module {before}, and this is {module}; {advice}",
            folder=folder, before=before, module=network.module, advice=advice)  # fmt: skip
    elif network.module.startswith("networks.") and not network.dim_from_weights:
        ranks = {shape[0] for name, shape in stored.items() if name.endswith("lora_down.weight")}
        before, now = known.get("network_dim", network.network_dim) or RANK, network.network_dim or RANK
        if before != now and ranks and now not in ranks:
            yield Problem("resume",
                ": {folder} was saved with network_dim {before}, and this is {now}; {advice}",
                folder=folder, before=before, now=now, advice=advice)  # fmt: skip


def _kind(stored: JsonMapping) -> str:
    """The kind of training that wrote a state, by the names of its trained tensors."""
    if any(name.startswith(f"{part}.") for name in stored for part in WHOLE):
        return "finetune"
    return next((kind for name in stored for part, kind in BESIDE.items() if name.startswith(part)), "lora")


def _memory(optimizer: str) -> tuple[str, str]:
    """The package and class of an optimizer, which determine the layout of its state; paged variants share that of the
    others."""
    made = spec_of(optimizer or "AdamW")
    return made.module.split(".")[0], made.name.removeprefix("Paged").lower()


def saved_groups(folder: Path) -> dict[str, int]:
    """The number of parameters in each group of the saved optimizer by its name, {} where it has none. Reads no tensor
    data."""
    saved = read_values(folder / OPTIMIZER, "meta")
    bundles = saved.get("bundles", [saved]) if isinstance(saved, dict) else []
    return group_sizes([group for bundle in bundles for group in bundle.get("param_groups", ())])


def group_sizes(groups: Iterable[JsonMapping]) -> dict[str, int]:
    """The number of parameters by the name of their group, those without any left out."""
    found: dict[str, int] = {}
    for at, group in enumerate(groups):
        name = str(group.get("name") or f"group {at + 1}")
        if group["params"]:
            found[name] = found.get(name, 0) + len(group["params"])
    return found


def other_groups(theirs: Mapping[str, int], ours: Mapping[str, int], changes: Message | None) -> Problem | None:
    """The problem if a state's optimizer has other groups of parameters than this training; `changes` are the options
    that do not agree."""
    if not theirs or theirs == ours:
        return None
    named = {"theirs": _named(theirs), "ours": _named(ours)}
    if changes is None:
        return Problem("resume",
            ": the optimizer of the state has other groups of parameters ({theirs}) than this config makes ({ours}); "
            "resume with its own config", **named)  # fmt: skip
    return Problem("resume",
        ": the optimizer of the state has other groups of parameters ({theirs}) than this config makes ({ours}), as "
        "{changes}; set this back, or start another training from the weights that it has saved", **named,
        changes=changes)  # fmt: skip


def _named(groups: Mapping[str, int]) -> Message:
    return listed([Message("{name}: {count}", name=name, count=count) for name, count in groups.items()])


def shaping_changes(folder: Path, config: RunConfig) -> Message | None:
    """The options that decide what is trained, in which groups, and differ from those of a state; None without any."""
    try:
        known = read_progress(folder).get("settings", {})
    except ConfigError:
        return None
    now = deciding_options(config, 0)
    rates = [name for name in RATES if not known.get(name) or not now.get(name)]  # of which 0 leaves a group out
    found = [*differences(known, {name: now[name] for name in (*SHAPING, *rates) if name in now})]
    return listed(found, "; ") if found else None


def finished(folder: Path, facts: JsonMapping, total_steps: int, config: RunConfig) -> Problem | None:
    """The problem where a training has no step left to do and its result exists; else None."""
    step, has_result = facts["current_step"], names(config).last.exists()
    early, patience = facts.get("early_stop") or {}, config.steps.early_stop_patience
    if has_result and step < total_steps and patience is not None and early.get("waited", 0) >= patience:
        return Problem("resume",
            ": early_stop_patience = {patience} ended the training of {folder} after step {step}, as its held-out loss "
            "was lowest at step {best}; raise early_stop_patience or leave it out to go on", folder=folder,
            patience=patience, step=step, best=early.get("best_step"), also="early_stop_patience")  # fmt: skip
    if step < total_steps or (step == total_steps and not has_result):
        return None
    return Problem("resume",
        ": {folder} was saved after step {step}, and this training has {steps}, so nothing is left to do; "
        "raise max_train_steps or max_train_epochs to go on", folder=folder, step=facts["current_step"],
        steps=counted(total_steps, "step"))  # fmt: skip


def read_progress(folder: Path) -> JsonObject:
    """Where the run stood: current_step, current_epoch, seed and more. ConfigError for a state of another program."""
    try:
        facts = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        if facts["version"] == VERSION:
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ConfigError(Problem("resume",
        ": {folder} was not written by this trainer, and cannot be resumed exactly; start "
        "from its weights instead (network_weights for a LoRA)", folder=folder))  # fmt: skip


def choices(config: RunConfig) -> Choices:
    """The choices of the training that is resumed, empty ones without `resume`. Raises ConfigError for a folder that is
    no state."""
    return Choices.read(read_progress(Path(config.steps.resume))) if config.steps.resume else Choices()
