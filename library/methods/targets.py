"""Which layers get an adapter, and of what size: one table line per network module, the walk is the same."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from library.methods import network_args
from library.methods.adapters import AdapterSpec
from library.methods.network_args import FluxArgs, LoraArgs

# Classes inside the text encoders whose linear layers carry adapters.
TEXT = ("CLIPAttention", "CLIPSdpaAttention", "CLIPMLP", "T5Attention", "T5DenseGatedActDense")
CONV = ("ResnetBlock2D", "Downsample2D", "Upsample2D")  # with conv_dim, these as well
EMBEDDERS = ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")  # in the order of in_dims
DEFAULT_RANK = 4


@dataclass(frozen=True)
class TargetLayer:
    """A layer that could carry an adapter."""

    part: str  # "denoiser", or a text encoder's short name
    path: str  # in the module tree
    name: str  # in the file
    layer: nn.Module
    inside: str  # class name of the block it is in; "" for none

    @property
    def is_large_conv(self) -> bool:
        """A convolution with a real kernel; 1x1 ones count as linear layers."""
        return isinstance(self.layer, nn.Conv2d) and self.layer.kernel_size != (1, 1)


Rank = tuple[int, float | int]  # rank and alpha
NONE: Rank = (0, 0)


@dataclass(frozen=True)
class AdapterPlan:
    """What the config says about adapters, ready to be asked layer by layer."""

    args: Any
    rank: int
    alpha: float | int
    dropout: float
    size: Callable[["AdapterPlan", TargetLayer], Rank]  # the line of the table
    blocks: tuple[str, ...]  # class names of the denoiser's blocks
    denoiser: bool
    encoders: bool
    frozen_down: bool = False  # LoRA-FA

    def spec(self, found: TargetLayer) -> AdapterSpec | None:
        """The adapter for this layer, or None."""
        rank, alpha = self.size(self, found)
        return self.made(found, rank, alpha) if rank else None

    def made(self, found: TargetLayer, rank: int, alpha: float | int) -> AdapterSpec:
        """A spec of this rank, with the dropouts and the splitting the config asks for."""
        return AdapterSpec(
            rank=rank,
            alpha=alpha or rank,
            dropout=self.dropout,
            rank_dropout=self.args.rank_dropout or 0.0,
            module_dropout=self.args.module_dropout or 0.0,
            noise=self.ggpo,
            frozen_down=self.frozen_down,
            split=split_sizes(found) if getattr(self.args, "split_qkv", False) else (),
        )

    @property
    def ggpo(self) -> tuple[float, float] | None:
        """The two strengths of GGPO, where both are given."""
        sigma, beta = getattr(self.args, "ggpo_sigma", None), getattr(self.args, "ggpo_beta", None)
        return (sigma, beta) if sigma is not None and beta is not None else None

    def wants(self, part: str) -> bool:
        """Whether this part of the model carries adapters."""
        if part == "denoiser":
            return self.denoiser
        return self.encoders and (part != "t5xxl" or getattr(self.args, "train_t5xxl", False))


def plan(config: Any, blocks: tuple[str, ...]) -> AdapterPlan:
    """Read the config. `blocks` are the class names that the family offers. Raises ConfigError for wrong arguments."""
    network, args = config.network, network_args.read(config)
    if not isinstance(args, LoraArgs) or args.conv_dim is not None or args.conv_block_dims:
        blocks = (*blocks, *CONV)
    only = {"single": "Single", "double": "Double"}.get(getattr(args, "train_blocks", "all"), "")
    return AdapterPlan(
        args=args,
        rank=network.network_dim or DEFAULT_RANK,
        alpha=1 if network.network_alpha == 1 else network.network_alpha,  # sd-scripts' default is an integer
        dropout=network.network_dropout or 0.0,
        size=SIZES[network.module],
        blocks=tuple(b for b in blocks if b.startswith(only)),
        denoiser=not network.network_train_text_encoder_only,
        encoders=not network.network_train_unet_only,
        frozen_down=network.module == "networks.lora_fa",
    )


def layers(
    root: nn.Module, part: str, name_of: Callable[[str, str], str], blocks: tuple[str, ...]
) -> Iterator[TargetLayer]:
    """Every linear layer and convolution of one network, in the order of its tree, with the block it is in."""
    inside: dict[str, str] = {}
    for path, module in root.named_modules():
        parent = path.rpartition(".")[0]
        kind = type(module).__name__
        inside[path] = inside.get(parent, "") or (kind if kind in blocks else "")
        if isinstance(module, nn.Linear | nn.Conv2d):
            yield TargetLayer(part, path, name_of(part, path), module, inside[path])


def block_of(name: str) -> int:
    """SDXL: the number of the block an adapter's name is in, as in network_args; 0 for the embeddings, 22 for out."""
    match = re.match(r"lora_unet_(input_blocks|middle_block|output_blocks|out)_(\d+)_?", name)
    if not match:
        return 0
    first = {"input_blocks": 1, "middle_block": 10, "output_blocks": 13}
    return first[match[1]] + int(match[2]) if match[1] in first else network_args.NUM_BLOCKS - 1


def split_sizes(found: TargetLayer) -> tuple[int, ...]:
    """Output sizes of query, key, value (and MLP) inside FLUX's fused matrices; () for other layers."""
    if not re.search(r"_blocks_\d+_(?:\w+_attn_qkv|linear1)$", found.name):
        return ()
    width, rest = found.layer.in_features, found.layer.out_features - 3 * found.layer.in_features
    return (width, width, width, rest) if rest else (width, width, width)


# ---- the table


def _sdxl(plan: AdapterPlan, found: TargetLayer) -> Rank:
    args: LoraArgs = plan.args
    if not found.inside:
        return NONE
    ranks, alphas, rank, alpha = args.block_dims, args.block_alphas, plan.rank, plan.alpha
    if found.is_large_conv:
        ranks, alphas, rank = args.conv_block_dims, args.conv_block_alphas, args.conv_dim or 0
        alpha = 1 if args.conv_alpha is None else args.conv_alpha
    if found.part != "denoiser":
        return rank, alpha
    block = block_of(found.name)
    if args.block_weights and not args.block_weights[block]:
        return NONE  # a block that does not learn is left out of the file
    return ranks[block] if ranks else rank, alphas[block] if alphas else alpha


TYPES = (
    (r"img_attn", "img_attn_dim"),
    (r"txt_attn", "txt_attn_dim"),
    (r"img_mlp", "img_mlp_dim"),
    (r"txt_mlp", "txt_mlp_dim"),
    (r"img_mod", "img_mod_dim"),
    (r"txt_mod", "txt_mod_dim"),
    (r"single_blocks_\d+_linear", "single_dim"),
    (r"modulation", "single_mod_dim"),
)


def _flux(plan: AdapterPlan, found: TargetLayer) -> Rank:
    args: FluxArgs = plan.args
    embedder = _embedder_rank(args, found)
    if not found.inside and embedder is None:
        return NONE
    for pattern, rank in network_args.patterns(args.network_reg_dims, int):
        if re.search(pattern, found.name):
            return rank, plan.alpha
    if embedder is not None:
        return embedder, plan.alpha
    if found.part != "denoiser":
        return plan.rank, plan.alpha
    block = re.search(r"(double|single)_blocks_(\d+)_", found.name)
    chosen = network_args.indices(getattr(args, f"train_{block[1]}_block_indices")) if block else None
    if chosen is not None and int(block[2]) not in chosen:
        return NONE
    for pattern, option in TYPES:
        if (rank := getattr(args, option)) is not None and re.search(pattern, found.name):
            return rank, plan.alpha
    return plan.rank, plan.alpha


def _embedder_rank(args: FluxArgs, found: TargetLayer) -> int | None:
    ranks = network_args.ranks(args.in_dims)
    if not ranks or found.part != "denoiser":
        return None
    return next((r for name, r in zip(EMBEDDERS, ranks, strict=True) if found.path.split(".")[0] == name), None)


SIZES: dict[str, Callable[[AdapterPlan, TargetLayer], Rank]] = {
    "networks.lora": _sdxl,
    "networks.lora_fa": _sdxl,
    "networks.lora_flux": _flux,
}
