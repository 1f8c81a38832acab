"""Training methods: full fine-tuning, adapters, textual inversion, and ControlNet-LLLite."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from library.config.hub_names import FILE, about_absent, is_file_id
from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.sections import AdapterRun, ControlRun, EmbeddingRun
from library.families import network_args
from library.families.base import Family, ModelComponents
from library.methods import embedding, full, lllite, lora, lora_files, lycoris
from library.methods.factor_cache import FactorCache
from library.methods.full import FullFinetune
from library.methods.sharding import ShardedModel

__all__ = ["FullFinetune", "TrainingMethod", "attach", "base_weights", "notes", "problems", "reads_encoders"]


class TrainingMethod(Protocol):
    """What the trainer needs of a training method. Adapters can also load a file: `load_state_dict`."""

    trained_parts: dict[str, bool]  # part name ("denoiser", "clip_l", ...) -> has trained parameters
    denoiser: nn.Module | None  # if its own weights are trained, which may be swapped and stepped block by block
    block_classes: tuple[str, ...]  # of its blocks
    shards: ShardedModel | None  # where several processes hold parts of the denoiser
    factor_caches: Sequence[FactorCache]  # what adapters compute once for a whole forward pass of the denoiser

    def groups(self) -> list[dict[str, Any]]:
        """Parameter groups for the optimizer: {"params", "lr", "name"}; a rate of 0 leaves a group out."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters."""
        ...

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """What the file holds, in its keys, on the CPU."""
        ...

    def snapshot(self) -> dict[str, Tensor]:
        """Trained values by name, for a saved state; not copied."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Put a snapshot back, bit for bit."""
        ...

    def train(self, mode: bool = True) -> "TrainingMethod":
        """Training or evaluation mode of trained modules."""
        ...

    def note_gradients(self) -> None:
        """Before a step: take from the gradients what the next forward pass needs of them (GGPO)."""
        ...

    def mean_gradient(self) -> Tensor | None:
        """Before a step: the mean size of the gradients where upstream shows it, on the device."""
        ...

    def limit_norms(self, maximum: float) -> dict[str, Tensor]:
        """`scale_weight_norms`: shrink what is larger; returns how many, and their norms, as 0-dim tensors on the
        device."""
        ...


def attach(components: ModelComponents, family: Family, config: RunConfig) -> TrainingMethod:
    """Freeze the model, create the trained parameters, and return the method. Call once, before dtypes, devices,
    compiling."""
    for network in (components.denoiser, components.vae, *components.encoders.values()):
        if network is not None:
            network.requires_grad_(False)
    if isinstance(config, EmbeddingRun):
        return embedding.attach(components, family, config)
    if isinstance(config, ControlRun):
        return lllite.attach(components, family, config)
    if not isinstance(config, AdapterRun):
        return full.attach(components, family, config)
    for path, multiplier in base_weights(config):
        tensors = lora_files.plain_file("base_weights", path, config.family)
        unmatched = lora.merge(components, family, tensors, multiplier)
        lora_files.report_unmatched("base_weights", path, unmatched, len(lora_files.by_name(tensors)))
    is_ours = config.network.module.startswith("networks.")
    return (lora if is_ours else lycoris).attach(components, family, config)


def reads_encoders(config: RunConfig) -> bool:
    """Whether `attach` needs the text encoders: they or their words are trained, adapter files may change them, or
    LyCORIS counts them."""
    if isinstance(config, EmbeddingRun):
        return True
    if not isinstance(config, AdapterRun):
        return config.trains_whole_encoders
    network = config.network
    files = network.base_weights or network.network_weights or network.dim_from_weights
    return bool(files) or not network.network_train_unet_only or not network.module.startswith("networks.")


def base_weights(config: AdapterRun) -> list[tuple[str, float]]:
    """LoRA files to merge into the base before training, each with its multiplier, by default 1."""
    files, multipliers = config.network.base_weights or (), config.network.base_weights_multiplier or ()
    return list(zip(files, (*multipliers, *[1.0] * len(files)), strict=False))


def problems(config: RunConfig) -> Iterator[Problem]:
    """Problems of the training method that depend on files and installed packages."""
    if isinstance(config, EmbeddingRun):
        yield from embedding.problems(config)
    if isinstance(config, ControlRun):
        yield from lllite.problems(config)
    if not isinstance(config, AdapterRun):
        return
    yield from network_args.problems(config)
    yield from lycoris.problems(config)
    files = {"network_weights": config.network.network_weights}
    files |= {f"base_weights {i}": path for i, path in enumerate(config.network.base_weights or (), 1)}
    for option, path in files.items():
        if path and not Path(path).is_file() and not (option != "network_weights" and is_file_id(path)):
            if Path(path).is_dir():
                yield Problem(option, ": {path} is a folder: name a file in it", path=path)
            else:
                yield about_absent(option, path, "" if option == "network_weights" else FILE)


def notes(config: RunConfig) -> Iterator[Problem]:
    """Options that are set and have no effect in this run."""
    if isinstance(config, AdapterRun):
        yield from network_args.notes(config)
