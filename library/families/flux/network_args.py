"""`--network_args` of FLUX.1's LoRA (`networks.lora_flux`)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.schema import opt
from library.families.shared.network_args import (
    LARGEST_RANK,
    NO_ADAPTER,
    LayerPreset,
    NetworkArgs,
    NetworkLayer,
    PatternArgs,
    index_factors,
    indices,
    patterns,
    ranks,
)

EMBEDDERS = ("img_in", "time_in", "vector_in", "guidance_in", "txt_in")  # in the order of in_dims
LAYER_TYPES = (
    (r"img_attn", "img_attn_dim"),
    (r"txt_attn", "txt_attn_dim"),
    (r"img_mlp", "img_mlp_dim"),
    (r"txt_mlp", "txt_mlp_dim"),
    (r"img_mod", "img_mod_dim"),
    (r"txt_mod", "txt_mod_dim"),
    (r"single_blocks_\d+_linear", "single_dim"),
    (r"modulation", "single_mod_dim"),
)


def _none(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "0")


def _rank_on(layers: str, label: str) -> Any:
    return opt(None, f"rank on {layers}", label=f"{label} rank", min=0, ceiling=LARGEST_RANK, advanced=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class FluxArgs(PatternArgs):
    """`networks.lora_flux`."""

    ggpo: ClassVar[bool] = True
    encoder_rates: ClassVar[tuple[str, ...]] = ("t5xxl",)
    presets: ClassVar[tuple[LayerPreset, ...]] = (
        LayerPreset("All layers", "Attention, MLP and modulation of every block learn, as in sd-scripts.", {}),
        LayerPreset(
            "Without modulation",
            "Attention and MLP of every block: a smaller file, and what most other trainers do.",
            _none("img_mod_dim", "txt_mod_dim", "single_mod_dim"),
        ),
        LayerPreset(
            "Attention only",
            "Attention of every block; in single blocks it shares its matrices with the MLP.",
            _none("img_mlp_dim", "txt_mlp_dim", "img_mod_dim", "txt_mod_dim", "single_mod_dim"),
        ),
        LayerPreset(
            "Image stream only",
            "What double blocks do with the text stays as it is, so that prompts are understood as before.",
            _none("txt_attn_dim", "txt_mlp_dim", "txt_mod_dim"),
        ),
        LayerPreset(
            "Blocks 7 and 20",
            "Two single blocks, which are enough for a face or an object: the smallest file, and the fastest.",
            {"train_double_block_indices": "none", "train_single_block_indices": "7,20"},
        ),
    )
    block_arguments: ClassVar[tuple[str, ...]] = ("train_double_block_indices", "train_single_block_indices")

    train_blocks: Literal["all", "single", "double"] = opt("all", "which blocks carry adapters")
    train_double_block_indices: str = opt("all", 'double blocks that carry adapters: "all", "none" or "0-3,5"')
    train_single_block_indices: str = opt("all", 'single blocks that carry adapters: "all", "none" or "0-3,5"')
    img_attn_dim: int | None = _rank_on("the image stream's attention", "Image attention")
    txt_attn_dim: int | None = _rank_on("the text stream's attention", "Text attention")
    img_mlp_dim: int | None = _rank_on("the image stream's MLP", "Image MLP")
    txt_mlp_dim: int | None = _rank_on("the text stream's MLP", "Text MLP")
    img_mod_dim: int | None = _rank_on("the image stream's modulation", "Image modulation")
    txt_mod_dim: int | None = _rank_on("the text stream's modulation", "Text modulation")
    single_dim: int | None = _rank_on("linear1 and linear2 of the single blocks", "Single block")
    single_mod_dim: int | None = _rank_on("the modulation of the single blocks", "Single block modulation")
    in_dims: str = opt(
        "",
        "ranks of img_in, time_in, vector_in, guidance_in and txt_in: [4,0,0,0,4]",
        label="Embedder ranks",
        advanced=True,
    )
    split_qkv: bool = opt(
        False,
        "separate adapters for query, key, value (and MLP) inside the fused matrices",
        label="Split query, key, value",
        advanced=True,
    )
    train_t5xxl: bool = opt(False, "adapters on T5 as well", label="T5 learns as well", advanced=True)
    verbose: bool = opt(False, "log every adapter", advanced=True)
    ggpo_sigma: float | None = opt(
        None, "strength of GGPO's weight-scaled noise", label="GGPO sigma", min=0.0, advanced=True
    )
    ggpo_beta: float | None = opt(
        None, "strength of GGPO's gradient-scaled noise", label="GGPO beta", min=0.0, advanced=True
    )

    @property
    def logs_adapters(self) -> bool:
        return self.verbose

    @property
    def ggpo_strengths(self) -> tuple[float, float] | None:
        sigma, beta = self.ggpo_sigma, self.ggpo_beta
        return None if sigma is None or beta is None else (sigma, beta)

    def adapts_encoder(self, part: str) -> bool:
        return part != "t5xxl" or self.train_t5xxl

    def check(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """Check the values with a special syntax."""
        yield from self.unreadable(
            train_double_block_indices=indices, train_single_block_indices=indices, in_dims=ranks
        )

    def notes(self, _run: RunConfig | None = None) -> Iterator[Problem]:
        """Return arguments without effect, and why."""
        for name in ("conv_dim", "conv_alpha"):
            if getattr(self, name) is not None:
                yield Problem("network_args", "{name} has no effect: its blocks have no convolutions", name=name)
        strengths = {"ggpo_sigma": self.ggpo_sigma, "ggpo_beta": self.ggpo_beta}
        alone = [name for name, value in strengths.items() if value is not None]
        if len(alone) == 1:
            yield Problem(
                "network_args", "{alone} has no effect: GGPO needs both ggpo_sigma and ggpo_beta", alone=alone[0]
            )

    def chosen_blocks(self, counts: Sequence[int]) -> list[list[float]]:
        """Return 1 for each block with adapters, else 0: for double blocks, then for single blocks."""
        texts = (self.train_double_block_indices, self.train_single_block_indices)
        kinds = zip(("double", "single"), texts, counts, strict=True)
        return [index_factors(text if self.train_blocks in ("all", kind) else "none", n) for kind, text, n in kinds]

    def classes(self, targets: tuple[str, ...]) -> tuple[str, ...]:
        only = {"single": "Single", "double": "Double"}.get(self.train_blocks, "")
        return tuple(name for name in NetworkArgs.classes(self, targets) if name.startswith(only))

    def rank_of(self, layer: NetworkLayer, rank: int, alpha: float) -> tuple[int, float]:
        """Return a layer's rank and alpha: by patterns of names, then by kind of layer; by in_dims for embedders."""
        embedder = self._embedder_rank(layer)
        if (not layer.inside and embedder is None) or self.is_excluded(layer.path):
            return NO_ADAPTER
        for pattern, named_rank in patterns(self.network_reg_dims, int):
            if re.search(pattern, layer.name):
                return named_rank, alpha
        if embedder is not None:
            return embedder, alpha
        if layer.part != "denoiser":
            return rank, alpha
        block = re.search(r"(double|single)_blocks_(\d+)_", layer.name)
        chosen = indices(getattr(self, f"train_{block[1]}_block_indices")) if block else None
        if block and chosen is not None and int(block[2]) not in chosen:
            return NO_ADAPTER
        for pattern, option in LAYER_TYPES:
            if (type_rank := getattr(self, option)) is not None and re.search(pattern, layer.name):
                return type_rank, alpha
        return rank, alpha

    def _embedder_rank(self, layer: NetworkLayer) -> int | None:
        embedder_ranks = ranks(self.in_dims)
        if not embedder_ranks or layer.part != "denoiser":
            return None
        return next(
            (r for name, r in zip(EMBEDDERS, embedder_ranks, strict=True) if layer.path.split(".")[0] == name), None
        )

    def split_sizes(self, layer: NetworkLayer) -> tuple[int, ...]:
        """Return the output sizes of query, key, value (and MLP) in the fused matrices; () for other layers."""
        if not self.split_qkv or not re.search(r"_blocks_\d+_(?:\w+_attn_qkv|linear1)$", layer.name):
            return ()
        width, outputs = layer.features
        mlp_width = outputs - 3 * width
        return (width, width, width, mlp_width) if mlp_width else (width, width, width)
