"""Choose the layers that get an adapter, and its size: one table line per network module; the walk is shared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from library import families
from library.config.sections import AdapterRun
from library.families import network_args
from library.families.shared.network_args import NetworkArgs, NetworkLayer
from library.methods.adapters import AdapterSpec

DEFAULT_RANK = 4


@dataclass(frozen=True)
class AdapterPlan:
    """The config's choice of adapters; `spec` returns the adapter of a layer."""

    args: NetworkArgs
    rank: int
    alpha: float | int
    dropout: float
    blocks: tuple[str, ...]  # class names of the denoiser's blocks
    denoiser: bool
    encoders: bool
    frozen_down: bool = False  # LoRA-FA

    def spec(self, target: NetworkLayer) -> AdapterSpec | None:
        rank, alpha = self.args.rank_of(target, self.rank, self.alpha)
        return self.spec_of_rank(target, rank, alpha) if rank else None

    def spec_of_rank(self, target: NetworkLayer, rank: int, alpha: float | int) -> AdapterSpec:
        """Return a spec of this rank, with the config's dropouts and splits."""
        return AdapterSpec(
            rank=rank,
            alpha=alpha or rank,
            dropout=self.dropout,
            rank_dropout=self.args.rank_dropout or 0.0,
            module_dropout=self.args.module_dropout or 0.0,
            noise=self.args.ggpo_strengths,
            frozen_down=self.frozen_down,
            split=self.args.split_sizes(target),
        )

    def wants(self, part: str) -> bool:
        """Return whether this part of the model carries adapters."""
        if part == "denoiser":
            return self.denoiser
        return self.encoders and self.args.adapts_encoder(part)


def plan(config: AdapterRun, blocks: tuple[str, ...]) -> AdapterPlan:
    """Return the plan of a config. `blocks` are the class names that the family offers. Raises ConfigError for wrong
    arguments.
    """
    network, args = config.network, network_args.read_network_args(config)
    return AdapterPlan(
        args=args,
        rank=network.network_dim or DEFAULT_RANK,
        # sd-scripts' default is an integer, which shows in the dtype of alpha in its files.
        alpha=1 if network.network_alpha == 1 else network.network_alpha,
        dropout=network.network_dropout or 0.0,
        blocks=args.classes(blocks),
        denoiser=not network.network_train_text_encoder_only,
        encoders=network.encoders_learn,
        frozen_down=families.facts_of(config.family).adapter_modules[network.module].frozen_down,
    )


def find_target_layers(
    root: nn.Module, part: str, name_of: Callable[[str, str], str], blocks: tuple[str, ...]
) -> Iterator[NetworkLayer]:
    """Yield every linear layer and convolution of a network in tree order, with its outermost block of `blocks`."""
    inside: dict[str, str] = {}
    for path, module in root.named_modules():
        parent = path.rpartition(".")[0]
        kind = type(module).__name__
        inside[path] = inside.get(parent, "") or (kind if kind in blocks else "")
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield NetworkLayer(part, path, name_of(part, path), module, inside[path])
