"""Check whether a config can resume a state folder, and what the resume would change. No model is loaded."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from library.adapter_files.names import module_sizes, possible_families
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Message, MessageLike, Problem, counted, join_messages, option_name
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families.shared.weights import header
from library.files import STATE_FACTS
from library.optim import resuming
from library.optim.names import optimizer_spec
from library.outputs.paths import output_names
from library.train.saving.deciding_options import ARITHMETIC, LENGTH, MEASURED, compare_settings, deciding_options
from library.train.saving.state_contents import fitting
from library.train.saving.state_files import (
    OPTIMIZER,
    SCHEDULER,
    WEIGHTS,
    damage,
    has_checksums,
    randomness,
    read_progress,
    read_values,
)

CHANGED = (
    ": the training continues with what the config changes, and with the optimizer's moments of the state: "
    "{differences}"
)
STARTS_ONLY = ": {name} only sets where the optimizer's estimate starts, so the estimate of the state stays"
NO_CHECKSUMS = ": {folder} was saved without checksums, by an older version, so damage to its files is not noticed"
OTHER_ARITHMETIC = (
    ": {folder} was saved by another version of this trainer: the training continues, but perhaps not bit-exactly; "
    "CHANGELOG.md names what has changed"
)
# Prefixes of tensor names that identify a state's kind of training; without any of them it trains adapters.
WHOLE_MODEL_PARTS = ("denoiser", "clip_l", "clip_g", "t5xxl")
KINDS_BY_PREFIX = {"embedding.": "textual-inversion", "lllite_": "lllite"}
LEARNED: dict[str, MessageLike] = {
    "finetune": Message("a whole model"),
    "lora": Message("adapters"),
    "textual-inversion": Message("a word"),
    "lllite": "LLLite",
}
ADVICE = Message("resume with its own config")
# Options that decide what is trained and how it is grouped, and rates that leave a part out.
SHAPING = (
    "network_module",
    "network_dim",
    "network_args",
    "network_train_unet_only",
    "network_train_text_encoder_only",
    "train_text_encoder",
    "stop_text_encoder_training",
    "fused_optimizer_groups",
    "fused_backward_pass",
    "blockwise_fused_optimizers",
    "full_bf16",
    "full_fp16",
)
RATES = (
    *("learning_rate", "unet_lr", "text_encoder_lr", "block_lr"),
    *("learning_rate_te", "learning_rate_te1", "learning_rate_te2"),
)
UNSET_RANK = 4  # of a network without network_dim


def changes(config: RunConfig, total: int | None = None) -> list[Problem]:
    """Return what a resume will change: options that differ from the state's and decide results, another version of the
    trainer, and a missing list of checksums. `total` are the steps of this training, if they are known. Empty for a
    folder that is no state."""
    folder = Path(config.steps.resume or "")
    try:
        facts = read_progress(folder)
    except ConfigError:
        return []
    saved, now = facts.get("settings", {}), deciding_options(config, total or 0)
    for name in MEASURED if total else (*MEASURED, LENGTH):
        now.pop(name, None)
    differences, seed = list(compare_settings(saved, now)), config.steps.seed
    if seed is not None and seed != facts["seed"]:
        differences.append(Message("the seed stays {seed}, {given} is not used", seed=facts["seed"], given=seed))
    remarks = [Problem("resume", CHANGED, differences=join_messages(differences, "; "))] if differences else []
    remarks += [] if facts.get("arithmetic") == ARITHMETIC else [Problem("resume", OTHER_ARITHMETIC, folder=folder)]
    remarks += [] if has_checksums(folder) else [Problem("resume", NO_CHECKSUMS, folder=folder)]
    return remarks + [
        Problem("resume", STARTS_ONLY, name=option_name(name)) for name in resuming.only_for_starts(saved, config)
    ]


def problems(folder: Path, config: RunConfig | None = None, total: int | None = None) -> list[Problem]:
    """Return why a folder cannot be resumed; loads no model. `config` is the run that would resume it, and `total` its
    steps, if its epochs have been counted."""
    if not folder.is_dir():
        template = ": there is no folder {folder}; give the path of a folder that ends in -state"
        return [Problem("resume", template, folder=folder)]
    if damaged := damage(folder):
        return damaged
    needed = (WEIGHTS, OPTIMIZER, SCHEDULER, randomness(0), STATE_FACTS)
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        template = ": {folder} is not a complete state (it lacks {missing}); choose another -state folder"
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
    if other_training := [*_other_training(folder, facts, config)]:
        return other_training
    # With initial_step or initial_epoch the config says where to begin, not the state.
    if config.steps.moved:
        return []
    if total is None:
        if config.steps.max_train_epochs:
            return []
        total = int(config.steps.max_train_steps)
    return [why] if (why := find_nothing_left(folder, facts, total, config)) else []


def _other_training(folder: Path, facts: JsonMapping, config: RunConfig) -> Iterator[Problem]:
    """Yield why the state belongs to another kind of training than this config."""
    stored, saved = header(folder / WEIGHTS), facts.get("settings", {})
    if other_model := _other_model(folder, stored, config):
        yield other_model
        return
    yield from _other_moments(folder, saved, config)
    if isinstance(config, AdapterRun):
        yield from _other_adapters(folder, stored, saved, config)


def _other_model(folder: Path, stored: JsonMapping, config: RunConfig) -> Problem | None:
    """Return the problem if a state's tensors belong to another kind of training, or to another family."""
    kind = _kind_of_training(stored)
    if kind != config.kind:
        return Problem(
            "resume",
            ": {folder} is the state of a training of {saved}, and this one trains {now}; {advice}",
            folder=folder,
            saved=LEARNED[kind],
            now=LEARNED[config.kind],
            advice=ADVICE,
        )
    with contextlib.suppress(ConfigError):  # names that fit no family prove nothing
        is_whole_model = kind == "finetune"
        layers = (name.removeprefix("denoiser.") if is_whole_model else name.partition(".")[0] for name in stored)
        if config.family not in possible_families(layers, {}, module_sizes(stored)):
            template = ": {folder} is the state of a training of another family than {title}; {advice}"
            return Problem("resume", template, folder=folder, title=config.title, advice=ADVICE)
    return None


def _other_moments(folder: Path, options: JsonMapping, config: RunConfig) -> Iterator[Problem]:
    """Yield the problem if the optimizer of this config keeps other moments than the state with these `options`."""
    saved = str(options.get("optimizer_type", config.optim.optimizer_type) or "")
    if _state_layout(saved) != _state_layout(config.optim.optimizer):
        yield _other_value(folder, "optimizer_type", saved or "AdamW", config.optim.optimizer)
    elif resuming.needs_other_memory(options, config):
        before, now = (join_messages(args, " ") for args in (options["optimizer_args"], config.optim.optimizer_args))
        yield Problem(
            "resume",
            ": {folder} was saved with optimizer_args [{before}], and with [{now}] the optimizer keeps other "
            "moments, which the state does not have; {advice}",
            folder=folder,
            before=before,
            now=now,
            advice=ADVICE,
        )


def _other_adapters(folder: Path, stored: JsonMapping, options: JsonMapping, config: AdapterRun) -> Iterator[Problem]:
    """Yield the problem if the adapters of this config are of another type or rank than the state's."""
    network = config.network
    if str(options.get("network_module") or network.module) != network.module:
        yield _other_value(folder, "network_module", options["network_module"], network.module)
    elif network.module.startswith("networks.") and not network.dim_from_weights:
        ranks = {shape[0] for name, shape in stored.items() if name.endswith("lora_down.weight")}
        before, now = options.get("network_dim", network.network_dim) or UNSET_RANK, network.network_dim or UNSET_RANK
        if before != now and ranks and now not in ranks:
            yield _other_value(folder, "network_dim", before, now)


def _other_value(folder: Path, name: str, before: object, now: object) -> Problem:
    template = ": {folder} was saved with {name} {before}, and this is {now}; {advice}"
    return Problem("resume", template, folder=folder, name=option_name(name), before=before, now=now, advice=ADVICE)


def _kind_of_training(stored: JsonMapping) -> str:
    """Return the kind of training that wrote a state, from the names of its trained tensors."""
    if any(name.startswith(f"{part}.") for name in stored for part in WHOLE_MODEL_PARTS):
        return "finetune"
    return next(
        (kind for name in stored for prefix, kind in KINDS_BY_PREFIX.items() if name.startswith(prefix)), "lora"
    )


def _state_layout(optimizer: str) -> tuple[str, str]:
    """Return the package and class of an optimizer, which determine the layout of its state; paged variants share that
    of the others."""
    spec = optimizer_spec(optimizer or "AdamW")
    return spec.module.split(".")[0], spec.name.removeprefix("Paged").lower()


def saved_groups(folder: Path) -> dict[str, int]:
    """Return the number of parameters in each group of the saved optimizer by name, {} if it has none. Reads no tensor
    data."""
    saved = read_values(folder / OPTIMIZER, "meta")
    with fitting(folder / OPTIMIZER):
        bundles = saved.get("bundles", [saved])
        return group_sizes([group for bundle in bundles for group in bundle.get("param_groups", ())])


def group_sizes(groups: Iterable[JsonMapping]) -> dict[str, int]:
    """Return the number of parameters by the name of their group; empty groups are left out."""
    sizes: dict[str, int] = {}
    for at, group in enumerate(groups):
        name = str(group.get("name") or f"group {at + 1}")
        if group["params"]:
            sizes[name] = sizes.get(name, 0) + len(group["params"])
    return sizes


def other_groups(
    theirs: Mapping[str, int], ours: Mapping[str, int], changes: Message | None, advice: Message = ADVICE
) -> Problem | None:
    """Return the problem if a state's optimizer has other groups of parameters than this training; `changes` are the
    options that differ, and `advice` says what to do where none does."""
    if not theirs or theirs == ours:
        return None
    group_texts = {"theirs": _describe_groups(theirs), "ours": _describe_groups(ours)}
    if changes is None:
        return Problem(
            "resume",
            ": the optimizer of the state has other groups of parameters ({theirs}) than this config makes ({ours}); "
            "{advice}",
            **group_texts,
            advice=advice,
        )
    return Problem(
        "resume",
        ": the optimizer of the state has other groups of parameters ({theirs}) than this config makes ({ours}), as "
        "{changes}; set this back, or start another training from the weights that it has saved",
        **group_texts,
        changes=changes,
    )


def _describe_groups(groups: Mapping[str, int]) -> Message:
    return join_messages([Message("{name}: {count}", name=name, count=count) for name, count in groups.items()])


def shaping_changes(folder: Path, config: RunConfig) -> Message | None:
    """Return the options that decide what is trained, in which groups, and differ from a state's; None without any."""
    try:
        saved = read_progress(folder).get("settings", {})
    except ConfigError:
        return None
    now = deciding_options(config, 0)
    rates = [name for name in RATES if not saved.get(name) or not now.get(name)]  # rates; 0 leaves a group out
    differences = [*compare_settings(saved, {name: now[name] for name in (*SHAPING, *rates) if name in now})]
    return join_messages(differences, "; ") if differences else None


def find_nothing_left(folder: Path, facts: JsonMapping, total_steps: int, config: RunConfig) -> Problem | None:
    """Return the problem if a training has no step left to do and its result exists; else None."""
    step, has_result = facts["current_step"], output_names(config).last.exists()
    early, patience = facts.get("early_stop") or {}, config.steps.early_stop_patience
    if has_result and step < total_steps and patience is not None and early.get("waited", 0) >= patience:
        return Problem(
            "resume",
            ": early_stop_patience = {patience} ended the training of {folder} after step {step}, as its held-out loss "
            "was lowest at step {best}; raise early_stop_patience or leave it out to continue",
            folder=folder,
            patience=patience,
            step=step,
            best=early.get("best_step"),
            also="early_stop_patience",
        )
    if step < total_steps or (step == total_steps and not has_result):
        return None
    return Problem(
        "resume",
        ": {folder} was saved after step {step}, and this training has {steps}, so nothing is left to do; "
        "raise max_train_steps or max_train_epochs to continue",
        folder=folder,
        step=facts["current_step"],
        steps=counted(total_steps, "step"),
    )
