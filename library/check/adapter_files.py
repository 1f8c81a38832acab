"""Problems of adapter files that a training starts from, found before a model is loaded."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from library import families
from library.adapter_files import fitting, names, storage
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families.shared.weights import header_entries
from library.methods import assistant_lora, small_files
from library.sampling import few_steps
from library.train.saving import resume_check

UNPICKLED = (".pt", ".pth", ".ckpt", ".bin")  # formats without a header, whose tensors must be read


def find_adapter_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield files that are no adapters, belong to another family, or have another rank, according to their headers."""
    for option, path in _existing_files(config):
        try:
            if path.suffix in UNPICKLED:
                small_files.tensor_names_of(path)
                continue
            stored = header_entries(path)
        except ConfigError as e:
            yield Problem(option, ": {problem}", problem=e.problems[0])
            continue
        if why := fitting.misfit(path, stored, config.family):
            yield Problem(option, ": {problem}", problem=why)
        elif option == "network_weights" and isinstance(config, AdapterRun) and fitting.names_family(path, stored):
            with contextlib.suppress(ConfigError):
                yield from _find_other_ranks(stored, config)


def find_damaged_values(config: RunConfig) -> Iterator[Problem]:
    """Yield files with NaN or infinity that nothing else reads before the training: LyCORIS has its own reader of
    network_weights, and a LoRA for samples is no part of the model.
    """
    for option, path in _existing_files(config):
        is_lycoris = isinstance(config, AdapterRun) and not config.network.module.startswith("networks.")
        if option == "sample_lora" or (option == "network_weights" and is_lycoris):
            try:
                small_files.read_tensors(path, "a LoRA file", option)
            except ConfigError as e:
                yield from e.problems


def find_relative_notes(config: RunConfig) -> Iterator[Problem]:
    """Yield files trained for another variant of the model, whose layers have the same names."""
    facts, own_version = families.facts_of(config.family), families.family_for(config).base_model_version
    family_versions = {facts.base_model_version, *(version for version, _ in facts.relatives.values())}
    for option, path in _existing_files(config):
        other = storage.metadata_of(path).get("ss_base_model_version") if path.suffix == ".safetensors" else own_version
        if other in family_versions and other != own_version:
            yield Problem(
                option,
                ": {path} was trained for {other} (ss_base_model_version), and this model is {own}; it is used "
                "anyway, because the names of the layers match",
                path=path,
                other=other,
                own=own_version,
            )


def _existing_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    """Yield existing adapter files, each with the option that names it."""
    paths_by_option: dict[str, Sequence[str]] = {}
    if isinstance(config, AdapterRun):
        paths_by_option["network_weights"] = [config.network.network_weights or ""]
        paths_by_option["base_weights"] = config.network.base_weights
        paths_by_option["assistant_lora"] = [*map(str, assistant_lora(config))]
    if config.sample.wanted:
        paths_by_option["sample_lora"] = [str(path) for path in few_steps.sample_lora(config)]
    for option, paths in paths_by_option.items():
        yield from ((option, Path(path)) for path in paths if Path(path).is_file())


def _find_other_ranks(stored: JsonMapping, config: AdapterRun) -> Iterator[Problem]:
    """Yield a LoRA file of another rank, if one rank applies to all layers."""
    network = config.network
    has_layer_ranks = any("_dim" in pair or "split_qkv" in pair for pair in network.network_args)
    if has_layer_ranks or network.dim_from_weights or not network.module.startswith("networks."):
        return
    rank, down = network.network_dim or resume_check.UNSET_RANK, "lora_down.weight"
    # In files with another model implementation's layers, a fused layer has the sum of its parts' ranks, or one for
    # all.
    entries = (
        item for item in stored.items() if item[0].endswith(down) and not names.of_other_tree(item[:1], config.family)
    )
    ranks = {name: (*entry["shape"], 0)[0] for name, entry in entries}  # in a damaged file it may be no matrix
    if differing := sorted(name for name in ranks if ranks[name] != rank):
        yield Problem(
            "network_weights",
            ": {layer} has rank {theirs} in the file and {ours} here (network_dim); "
            "set network_dim to the file's rank, or use dim_from_weights",
            also="network_dim",
            layer=fitting.layer_of(differing[0]),
            theirs=ranks[differing[0]],
            ours=rank,
        )
