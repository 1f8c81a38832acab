"""The options of Anima."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from library import families
from library.config import sections
from library.config.problems import Problem
from library.config.run_config import Rule
from library.config.schema import define_section, opt
from library.families.shared.network_args import BlockArgs, LayerPreset, NetworkLayer, usual_layers

# Options that sd-scripts parses for every family, but that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "max_token_length": "captions of Anima are as long as qwen3_max_token_length and t5_max_token_length",
}

# Flags of sd-scripts with another name here, and those that are not needed.
FLAG_ALIASES = {"unsloth_offload_checkpointing": "cpu_offload_checkpointing"}
FOREIGN = {
    "attn_mode": "attention is PyTorch's SDPA; attention_kernel chooses among its kernels",
    "vae_chunk_size": "the VAE switches to tiles when memory is short",
    "vae_disable_cache": "a single image needs no cache in the VAE",
}
RATE_OPTIONS = ("self_attn_lr", "cross_attn_lr", "mlp_lr", "mod_lr", "llm_adapter_lr")

OTHER_FILES = {
    "qwen3": "the Qwen3-0.6B text encoder (qwen_3_06b_base.safetensors)",
    "vae": "the Qwen-Image VAE (qwen_image_vae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaModel(sections.Model):
    """The Anima transformer and the networks around it."""

    vae: str | None = opt(None, "The Qwen-Image VAE (qwen_image_vae.safetensors).", kind="file", label="VAE")
    qwen3: str | None = opt(
        None, "The Qwen3-0.6B text encoder (qwen_3_06b_base.safetensors).", kind="file", label="Qwen3 text encoder"
    )
    llm_adapter_path: str | None = opt(
        None,
        "A file with the text adapter. Empty: the base model's own.",
        kind="file",
        label="Text adapter",
        advanced=True,
    )
    t5_tokenizer_path: str | None = opt(
        None,
        "A folder with T5's tokenizer. Empty: found beside the model, or downloaded.",
        kind="folder",
        label="T5 tokenizer folder",
        advanced=True,
    )
    qwen3_max_token_length: int = opt(
        512,
        "Captions are cut after this many tokens for Qwen3.",
        min=1,
        ceiling=8192,
        label="Qwen3 caption length",
        advanced=True,
    )
    t5_max_token_length: int = opt(
        512,
        "The same for T5. The model was trained with 512, and sees the zeros behind a caption.",
        min=1,
        ceiling=8192,
        label="T5 caption length",
        advanced=True,
    )

    @property
    def text_encoder(self) -> str | None:
        return self.qwen3

    others: ClassVar[Mapping[str, str]] = OTHER_FILES


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaFlow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "flux_shift"] = opt(
        "sigmoid",
        "How noise levels (timesteps) are drawn. sigmoid is usual.",
        words={"flux_shift": "FLUX shift"},
    )
    discrete_flow_shift: float = sections.flow_shift(1.0)
    weighting_scheme: Literal["sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform"] = opt(
        "uniform", "Weights timesteps: in the loss and, with sigma sampling, how often they are drawn."
    )
    weighted_by_step: ClassVar[bool] = False  # sd-scripts weights Anima's loss by sigma itself
    size_shift: ClassVar[str] = "flux_shift"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaAdapterCache(sections.TextBatchCache):
    """What is encoded once when adapters are trained."""

    def check(self, run: Any) -> Iterator[Problem]:
        """Reject caching the outputs of a trained text encoder, which change in every step."""
        yield from sections.TextBatchCache.check(self, run)
        if self.text and not run.network.network_train_unet_only:
            yield Problem(
                "cache_text_encoder_outputs",
                "cannot be used while the text encoder learns: set network_train_unet_only, or leave the cache out",
                also="cache_text_encoder_outputs_to_disk network_train_unet_only",
                fix={"network_train_unet_only": True},
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaFullOptim(sections.FullOptim):
    """Rates for the parts of the model."""

    self_attn_lr: float | None = opt(
        None,
        "A rate of its own for self-attention. 0 freezes it. Empty: the learning rate.",
        min=0.0,
        label="Self-attention learning rate",
        advanced=True,
    )
    cross_attn_lr: float | None = opt(
        None, "The same for attention over the text.", min=0.0, label="Cross-attention learning rate", advanced=True
    )
    mlp_lr: float | None = opt(None, "The same for the MLP.", min=0.0, label="MLP learning rate", advanced=True)
    mod_lr: float | None = opt(
        None, "The same for the timestep modulation.", min=0.0, label="Modulation learning rate", advanced=True
    )
    llm_adapter_lr: float | None = opt(
        None, "The same for the text adapter.", min=0.0, label="Text adapter learning rate", advanced=True
    )

    @property
    def block_lrs(self) -> tuple[float, ...]:
        """The default rate, and those of the parts in the order of AnimaFamily.rate_names; () if no part has one."""
        parts = (self.llm_adapter_lr, self.self_attn_lr, self.cross_attn_lr, self.mlp_lr, self.mod_lr)
        rates = [self.learning_rate if rate is None else rate for rate in parts]
        return (self.learning_rate, *rates) if any(rate is not None for rate in parts) else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaMemory(sections.Memory):
    """Memory and speed of a training of Anima."""

    blocks_to_swap: int | None = sections.blocks_to_swap(26)


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaCompile(sections.Compile):
    """How the blocks of Anima are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {"adapter": "LLMAdapterTransformerBlock", "block": "Block"}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaNetwork(sections.Network):
    """The adapters that are trained for Anima."""

    network_module: Literal["networks.lora_anima", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class AnimaRun:
    """The common base of all Anima trainings."""

    family: ClassVar[str] = "anima"
    script_with = staticmethod(families.script_with)
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = sections.flow_rules(AnimaFlow.size_shift)
    aliases: ClassVar[Mapping[str, str]] = FLAG_ALIASES
    foreign: ClassVar[Mapping[str, str]] = FOREIGN

    model: AnimaModel = define_section(AnimaModel)
    noise: AnimaFlow = define_section(AnimaFlow)
    memory: AnimaMemory = define_section(AnimaMemory)
    compile: AnimaCompile = define_section(AnimaCompile)


@dataclass(frozen=True, kw_only=True)
class AnimaLora(AnimaRun, sections.TransformerLora):
    """LoRA and other adapters for Anima."""

    script: ClassVar[str] = "anima_train_network"
    title: ClassVar[str] = "Anima LoRA"
    foreign: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(RATE_OPTIONS, "it is for the fine-tune; network_args has network_reg_lrs"),
        "no_half_vae": "the VAE is in mixed_precision, and in float32 instead of fp16",
    }

    cache: AnimaAdapterCache = define_section(AnimaAdapterCache)
    network: AnimaNetwork = define_section(AnimaNetwork)


@dataclass(frozen=True, kw_only=True)
class AnimaTrain(AnimaRun, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for Anima."""

    script: ClassVar[str] = "anima_train"
    title: ClassVar[str] = "Anima fine-tune"

    optim: AnimaFullOptim = define_section(AnimaFullOptim)


EXCLUDED = re.compile(r".*(_modulation|_norm|_embedder|final_layer).*")  # unless a pattern includes them
ADAPTER_PREFIX = "llm_adapter."


@dataclass(frozen=True, kw_only=True, slots=True)
class AnimaArgs(BlockArgs):
    """`networks.lora_anima`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = usual_layers(r".*\.mlp\..*=0")
    block_lists: ClassVar[tuple[str, ...]] = ("blocks",)
    matches_paths: ClassVar[bool] = True
    train_llm_adapter: bool = opt(False, "adapters on the text adapter as well", label="Text adapter learns as well")

    def layer_rank(self, layer: NetworkLayer, rank: int) -> int:
        """Return the rank of a layer; patterns apply to the usual ones and to those that a pattern includes."""
        usual = not EXCLUDED.fullmatch(layer.path) and (
            self.train_llm_adapter or not layer.path.startswith(ADAPTER_PREFIX)
        )
        if layer.part == "denoiser" and not usual and not self.is_included(layer.path):
            return 0
        return BlockArgs.layer_rank(self, layer, rank)
