"""The options of Krea 2."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.run_config import Rule
from library.config.schema import define_section, opt
from library.families.shared.network_args import BlockArgs, LayerPreset, NetworkLayer, usual_layers

SHIFT_LINE = ((256, 0.5), (6400, 1.15))  # image tokens and mu: the shift of a size is e^mu, linear between and beyond

# Options parsed for every family that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "max_token_length": "captions of Krea 2 may have any length up to 507 tokens",
}

OTHER_KREA_2_FILES = {
    "text_encoder": "the Qwen3-VL-4B text encoder (qwen3vl_4b_bf16.safetensors)",
    "vae": "the Qwen-Image VAE (qwen_image_vae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Krea2Model(sections.Model):
    """The Krea 2 transformer and the networks around it."""

    vae: str | None = opt(None, "The Qwen-Image VAE (qwen_image_vae.safetensors).", kind="file", label="VAE")
    text_encoder: str | None = sections.text_encoder_file("Qwen3-VL-4B", "qwen3vl_4b_bf16.safetensors")
    model_version: Literal["raw", "turbo"] | None = opt(
        None,
        "Their files look the same; train on Raw. Not set: Raw, unless a name says Turbo.",
        words={"raw": "Krea 2 Raw", "turbo": "Krea 2 Turbo"},
    )

    others: ClassVar[Mapping[str, str]] = OTHER_KREA_2_FILES


@dataclass(frozen=True, kw_only=True, slots=True)
class Krea2Flow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "krea2_shift"] = opt(
        "krea2_shift",
        "How noise levels (timesteps) are drawn. krea2_shift and shift are usual.",
        words={"krea2_shift": "Krea 2 shift"},
    )
    discrete_flow_shift: float = sections.flow_shift(2.5)

    shift_line: ClassVar[tuple[tuple[int, float], tuple[int, float]]] = SHIFT_LINE
    size_shift: ClassVar[str] = "krea2_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class Krea2Memory(sections.Memory):
    """Memory and speed of a training of Krea 2."""

    blocks_to_swap: int | None = sections.blocks_to_swap(27)  # the 4 of the text fusion stay


@dataclass(frozen=True, kw_only=True, slots=True)
class Krea2Compile(sections.Compile):
    """How the blocks of Krea 2 are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {
        "layerwise": "Krea2LayerwiseBlock",
        "refiner": "Krea2RefinerBlock",
        "block": "SingleDiTBlock",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Krea2Network(sections.TransformerNetwork):
    """The adapters that are trained for Krea 2."""

    network_module: Literal["networks.lora_krea2", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class Krea2Run:
    """The common base of all Krea 2 trainings."""

    family: ClassVar[str] = "krea_2"
    script_with = staticmethod(families.script_with)
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = sections.flow_rules(Krea2Flow.size_shift)

    model: Krea2Model = define_section(Krea2Model)
    noise: Krea2Flow = define_section(Krea2Flow)
    memory: Krea2Memory = define_section(Krea2Memory)
    compile: Krea2Compile = define_section(Krea2Compile)


@dataclass(frozen=True, kw_only=True)
class Krea2Lora(Krea2Run, sections.TransformerLora):
    """LoRA and other adapters for Krea 2."""

    unfit: ClassVar[frozenset[str]] = sections.NO_ENCODER
    script: ClassVar[str] = "krea_2_train_network"
    title: ClassVar[str] = "Krea 2 LoRA"

    network: Krea2Network = define_section(Krea2Network)


@dataclass(frozen=True, kw_only=True)
class Krea2Train(Krea2Run, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for Krea 2."""

    script: ClassVar[str] = "krea_2_train"
    title: ClassVar[str] = "Krea 2 fine-tune"


@dataclass(frozen=True, kw_only=True, slots=True)
class Krea2Args(BlockArgs):
    """`networks.lora_krea2`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = usual_layers("_mlp_=0")
    block_lists: ClassVar[tuple[str, ...]] = ("blocks",)
    train_text_fusion: bool = opt(
        False,
        "adapters on the blocks that combine the text encoder's layers before they meet the image",
        label="Train the text fusion",
    )
    train_embedders: bool = opt(
        False,
        "adapters on the layers outside the blocks: for image, text and timestep, and the last one",
        label="Train the embedders",
    )

    def layer_rank(self, layer: NetworkLayer, rank: int) -> int:
        """Return the rank of a layer: outside of blocks by patterns of names and train_embedders."""
        if layer.inside:
            return BlockArgs.layer_rank(self, layer, rank)
        is_wanted = layer.part == "denoiser" and (self.train_embedders or self.is_included(layer.path))
        if not is_wanted or self.is_excluded(layer.path):
            return 0
        named = self.named_rank(layer)
        return rank if named is None else named

    def is_chosen(self, path: str) -> bool:
        is_trained = self.train_text_fusion or self.is_included(path) or path.startswith("blocks.")
        return is_trained and self.in_chosen_block(path)
