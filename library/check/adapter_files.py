"""What is wrong with files of adapters that a training starts from, before a model is loaded."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from library import families
from library.adapter_files import names, storage
from library.config.json_types import JsonMapping
from library.config.problems import ConfigError, Problem
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun
from library.families import recognition
from library.families.shared.weights import entries
from library.methods import small_files
from library.train.saving import resume_check

UNPICKLED = (".pt", ".pth", ".ckpt", ".bin")  # which have no header: their tensors are read


def problems(config: RunConfig) -> Iterator[Problem]:
    """Files that are no adapters, were made for another family, or have another rank; told by their headers."""
    if not isinstance(config, AdapterRun):
        return
    for option, path in _given(config):
        try:
            if path.suffix in UNPICKLED:
                small_files.names_of(path)
                continue
            stored = entries(path)
        except ConfigError as e:
            yield Problem(option, ": {problem}", problem=e.problems[0])
            continue
        shapes = {key: tuple(about["shape"]) for key, about in stored.items()}
        base, words = recognition.described(shapes)
        if base:
            yield Problem(option, ": {path} is {found}, not a LoRA file; choose a LoRA file", path=path, found=words)
            continue
        try:
            found = names.possible_families(map(_layer, stored), storage.metadata_of(path), names.sizes_of(shapes))
        except names.ForeignModelError as e:
            yield Problem(option, ": {path}: {error}", path=path, error=e.problems[0])
            continue
        except ConfigError:  # of neither family, as far as names tell
            continue
        if config.family not in found:
            template = ": {path} was made for {other}, and this is {title}; choose a file made for it"
            other = families.facts(found[0]).title
            yield Problem(option, template, path=path, other=other, title=config.title)
        elif option == "network_weights":
            with contextlib.suppress(ConfigError):
                yield from _other_ranks(stored, config)


def notes(config: RunConfig) -> Iterator[Problem]:
    """Files that say they were trained for a relative of the model, whose layers have the same names."""
    if not isinstance(config, AdapterRun):
        return
    facts, own = families.facts(config.family), families.family_for(config).base_model_version
    known = {facts.base_model_version, *(version for version, _ in facts.relatives.values())}
    for option, path in _given(config):
        other = storage.metadata_of(path).get("ss_base_model_version") if path.suffix == ".safetensors" else own
        if other in known and other != own:
            yield Problem(
                option,
                ": {path} was trained for {other} (ss_base_model_version), and this is {own}; it is used, as the "
                "layers of both have the same names",
                path=path,
                other=other,
                own=own,
            )


def _given(config: AdapterRun) -> Iterator[tuple[str, Path]]:
    """The files of adapters that are there, each with the option that names it."""
    given = {"network_weights": [config.network.network_weights or ""], "base_weights": config.network.base_weights}
    for option, paths in given.items():
        yield from ((option, Path(path)) for path in paths if Path(path).is_file())


def _other_ranks(stored: JsonMapping, config: AdapterRun) -> Iterator[Problem]:
    """A LoRA file of another rank, where one rank is that of all layers."""
    network = config.network
    own = any("_dim" in pair or "split_qkv" in pair for pair in network.network_args)
    if own or network.dim_from_weights or not network.module.startswith("networks."):
        return
    rank, down = network.network_dim or resume_check.RANK, "lora_down.weight"
    # A fused layer of another tree has the ranks of its parts, or one for all of them.
    own_tree = (
        item for item in stored.items() if item[0].endswith(down) and not names.of_other_tree(item[:1], config.family)
    )
    ranks = {name: (*about["shape"], 0)[0] for name, about in own_tree}  # of a damaged file it may be no matrix
    if odd := sorted(name for name in ranks if ranks[name] != rank):
        yield Problem(
            "network_weights",
            ": {layer} has rank {theirs} in the file and {ours} here (network_dim); "
            "set network_dim to the file's rank, or use dim_from_weights",
            also="network_dim",
            layer=_layer(odd[0]),
            theirs=ranks[odd[0]],
            ours=rank,
        )


def _layer(key: str) -> str:
    return key.partition(".")[0] if key.startswith("lora_") else key
