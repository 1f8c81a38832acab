"""Full fine-tuning of the denoiser and, with train_text_encoder, the text encoders."""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError
from library.config.run_config import RunConfig
from library.families.base import Family, ModelComponents
from library.families.capabilities import HasBlockRates, HasFrozenParts, ReadsLayers, WritesFolders
from library.methods.base import TrainingMethod
from library.methods.sharding import ShardedModel, rows_of_parameter

ENCODER = "text_encoder"  # the beginning of the names of their groups


class FullFinetune(TrainingMethod):
    """All or most parameters of a model."""

    def __init__(self, components: ModelComponents, family: Family, groups: list[dict[str, Any]]) -> None:
        """`groups` for the optimizer, the denoiser's first; parameters in none of them stay frozen."""
        # Keep references, as `components` may drop some networks later.
        self.components, self.family, self._groups = copy.copy(components), family, groups
        self.components.encoders, self.components.deferred = dict(components.encoders), dict(components.deferred)
        self.denoiser: nn.Module | None = components.denoiser
        self.block_classes = tuple(family.block_classes)
        self.shards: ShardedModel | None = None
        for parameter in self.parameters():
            parameter.requires_grad_(True)
        self.trained_parts = {
            name: any(p.requires_grad for p in network.parameters()) for name, network in _networks(components).items()
        }
        if not any(self.trained_parts.values()):
            raise ConfigError("nothing is trained: every learning rate is 0")

    def shard(self, device: torch.device) -> None:
        """Shard the denoiser on the device from now on; its parameters become this process' rows."""
        assert self.denoiser is not None
        # The denoiser's parameters are replaced, so remember their names; those of other networks stay.
        names = {id(p): name for name, p in self.denoiser.named_parameters()}
        parameters_or_names = [[names.get(id(p), p) for p in group["params"]] for group in self._groups]
        for group in self._groups:
            group["params"] = []  # frees the whole weights
        shards = self.shards = ShardedModel(self.denoiser, self.block_classes, device)
        for group, params in zip(self._groups, parameters_or_names, strict=True):
            group["params"] = [shards.parameters[p] if isinstance(p, str) else p for p in params]

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return the whole model under the keys of a single file; not copied and not cast if `dtype` is None."""
        tensors = self.family.export(self.components)
        return tensors if dtype is None else {name: tensor.to(dtype) for name, tensor in tensors.items()}

    def write_folder(self, place: Path, put: Callable[[Path, Mapping[str, Tensor]], None]) -> None:
        assert isinstance(self.family, WritesFolders)
        self.family.write_folder(self.components, place, put)

    def snapshot(self) -> dict[str, Tensor]:
        """Return all trained parameters for a saved state; not copied."""
        values = super().snapshot()
        if shards := self.shards:
            values |= {
                name: shards.whole(name.partition(".")[2]) for name, p in self.named().items() if rows_of_parameter(p)
            }
        return values

    def drop_encoder_gradients(self) -> None:
        """Leave the text encoders out of the next optimizer step."""
        for group in self._groups:
            for parameter in group["params"] if group["name"].startswith(ENCODER) else ():
                parameter.grad = None

    def train(self, mode: bool = True) -> "FullFinetune":
        """Switch the trained networks to training or evaluation mode."""
        for name, network in _networks(self.components).items():
            # Networks kept only for saving stay in evaluation mode.
            network.train(mode and self.trained_parts.get(name, False))
        return self

    def named(self) -> dict[str, nn.Parameter]:
        """Return trained parameters by network and path; of a sharded model this process' rows."""
        parameters = {
            f"{n}.{key}": p for n, net in _networks(self.components).items() for key, p in net.named_parameters()
        }
        parameters |= {f"denoiser.{name}": p for name, p in self.shards.parameters.items()} if self.shards else {}
        return {name: p for name, p in parameters.items() if p.requires_grad}


def unfreeze_model(components: ModelComponents, family: Family, config: RunConfig) -> FullFinetune:
    groups = [*_denoiser_groups(components, family, config), *_encoder_groups(components, family, config)]
    return FullFinetune(components, family, [g for g in groups if g["lr"] and g["params"]])


def _networks(components: ModelComponents) -> dict[str, nn.Module]:
    return {"denoiser": components.denoiser, **{n: e for n, e in components.encoders.items() if e is not None}}


def _denoiser_groups(components: ModelComponents, family: Family, config: RunConfig) -> Iterator[dict[str, Any]]:
    rate, rates = config.optim.learning_rate, config.optim.block_lrs
    if not rate:
        return  # as in sd-scripts, learning_rate 0 freezes the U-Net even with block_lr
    if not rates:
        is_frozen = family.is_frozen if isinstance(family, HasFrozenParts) else None
        trained = [p for path, p in components.denoiser.named_parameters() if not (is_frozen and is_frozen(path))]
        yield {"params": trained, "lr": rate, "name": "unet"}
        return
    assert isinstance(family, HasBlockRates)
    blocks: dict[int, list[nn.Parameter]] = {i: [] for i in range(len(rates))}
    for path, parameter in components.denoiser.named_parameters():
        blocks[family.learning_rate_block(path)].append(parameter)
    for i, params in blocks.items():
        yield {"params": params, "lr": rates[i], "name": family.rate_names[i]}


def _encoder_groups(components: ModelComponents, family: Family, config: RunConfig) -> Iterator[dict[str, Any]]:
    if not config.trains_whole_encoders:
        return
    for name, option in config.encoder_rates.items():
        if (encoder := components.encoders.get(name)) is None:
            continue
        encoder_rate = getattr(config.optim, option)
        rate = config.optim.learning_rate if encoder_rate is None else encoder_rate
        label = option.replace("learning_rate_te", ENCODER)
        yield {"params": _parameters_in_use(name, encoder, family), "lr": rate, "name": label}


def _parameters_in_use(name: str, encoder: nn.Module, family: Family) -> list[nn.Parameter]:
    """Return the encoder's parameters that affect its output."""
    # transformers 5 has "encoder.layers"; earlier versions put "text_model." before it.
    paths = {path.removeprefix("text_model."): p for path, p in encoder.named_parameters()}
    if not isinstance(family, ReadsLayers):
        return list(paths.values())
    layers = 1 + max(int(path.split(".")[2]) for path in paths if path.startswith("encoder.layers."))
    return [p for path, p in paths.items() if family.is_read(name, path, layers)]
