"""What families of one transformer with one text encoder, trained by flow matching, have in common."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from library.config.problems import Problem
from library.config.run_config import RunConfig
from library.config.schema import define_section, opt
from library.config.sections.adapters import AdapterData, Network
from library.config.sections.caching import TextBatchCache
from library.config.sections.flow import FLOW_INEFFECTIVE, Flow, FlowLoss, SafetensorsSave
from library.config.sections.inputs import Data
from library.config.sections.machine import Memory
from library.config.sections.runs import AdapterRun, FullRun

_SDPA = "attention is PyTorch's SDPA"
# Flags of musubi-tuner that are options here under another name, and those that nothing here needs.
_NAMES = {
    "dit": "pretrained_model_name_or_path",
    "gradient_checkpointing_cpu_offload": "cpu_offload_checkpointing",
}
_FOREIGN = {
    "fp8_scaled": "fp8_base keeps the model in 8 bits; there is no finer setting",
    "split_attn": _SDPA,
    "flash_attn": _SDPA,
    "sage_attn": _SDPA,
    "dit_dtype": "the number format is mixed_precision",
    "vae_dtype": "the number format is mixed_precision",
}


def flow_shift(usual: float) -> Any:
    """Declare the option discrete_flow_shift with a family's own default."""
    return opt(
        usual, "Above 1 trains noisy timesteps more often: composition more than detail.", label="Flow shift", min=0.0
    )


def text_encoder_file(name: str, file: str) -> Any:
    words = f"The {name} text encoder ({file}, bf16 or fp8)."
    return opt(None, words, kind="file", label="Text encoder")


def reference_folder(shown_with: Mapping[str, tuple[str, ...]]) -> Any:
    words = "Reference images, such as those before an edit, under the same file names."
    return opt(None, words, kind="folder", label="Reference folder", shown_with=shown_with)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceData(Data):
    """The images, and the reference images beside them."""

    control_directory: str | None = reference_folder({})


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceAdapterData(AdapterData):
    """The same when adapters are trained."""

    control_directory: str | None = reference_folder({})


def blocks_to_swap(limit: int) -> Any:
    words = f"Blocks in CPU memory, at most {limit}. Raise it only until the model fits: costs speed."
    return opt(None, words, min=0, max=limit)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulatedMemory(Memory):
    """Memory of a model whose blocks have large layers that read nothing but the time and pooled text."""

    offload_modulation: bool = opt(
        False,
        "Up to a third of the model waits in CPU memory. For a 4-bit base, or slow swapping.",
        label="Offload modulation",
    )

    def moves_modulation(self, run: RunConfig) -> bool:
        return self.offload_modulation and self.can_offload_modulation(run)

    def can_offload_modulation(self, run: RunConfig) -> bool:
        """Return whether this training's model has such layers, frozen, and read by no other package."""
        is_plain = isinstance(run, AdapterRun) and run.network.module.startswith("networks.")
        return is_plain and getattr(run.model, "has_modulation", True)

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject offloading layers that are trained, or whose weights another package reads."""
        yield from Memory.check(self, run)
        if not self.offload_modulation or not getattr(run.model, "has_modulation", True):
            return  # without such layers it has no effect
        fix = {"offload_modulation": False}
        if not run.adapters:
            yield Problem(
                "offload_modulation",
                "is for adapters, as a fine-tune trains these layers: leave it out, or use blocks_to_swap",
                fix=fix,
            )
        elif isinstance(run, AdapterRun) and not run.network.module.startswith("networks."):
            yield Problem(
                "offload_modulation",
                "cannot be used with LyCORIS, which computes with the weights of these layers: use {usual}, or "
                "blocks_to_swap",
                usual=f"network_module = {run.network.usual}",
                also="network_module",
                fix=fix,
            )


def network_module() -> Any:
    words = "The type of adapter. Empty: LoRA."
    return opt(None, words, label="Network module", kind="code")


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerFlow(Flow):
    """Noise, timesteps and the type of the prediction."""

    sigmoid_scale: float = opt(1.0, "Above 1 trains very low and very high timesteps more often. 1 is usual.", min=0.0)
    model_prediction_type: Literal["raw", "additive", "sigma_scaled"] = opt(
        "raw",
        "How the prediction of the model is interpreted. raw is usual.",
        label="Prediction type",
    )
    weighting_scheme: Literal["sigma_sqrt", "logit_normal", "mode", "cosmap", "none", "uniform"] = opt(
        "none", "Weights timesteps: in the loss and, with sigma sampling, how often they are drawn."
    )
    always_weighted: ClassVar[bool] = True
    weighted_by_step: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerNetwork(Network):
    """The adapters that are trained."""

    network_train_unet_only: bool = opt(
        True, "Train the image model only, not the text encoder, which is never trained here.", label="Image model only"
    )

    @property
    def encoders_learn(self) -> bool:
        return False

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Adapters in the transformer."""
        yield from Network.check(self, run)
        if self.network_train_text_encoder_only and not self.network_train_unet_only:
            yield Problem(
                "network_train_text_encoder_only",
                "leaves nothing to train, as the text encoder of this model is never trained: switch it off",
                fix={"network_train_text_encoder_only": False},
            )


@dataclass(frozen=True, kw_only=True)
class TransformerRun:
    """Common parts of all trainings of such a family."""

    grid: ClassVar[int] = 16
    shifts_samples: ClassVar[bool] = True
    ineffective: ClassVar[Mapping[str, str]] = FLOW_INEFFECTIVE
    aliases: ClassVar[Mapping[str, str]] = _NAMES
    foreign: ClassVar[Mapping[str, str]] = _FOREIGN

    cache: TextBatchCache = define_section(TextBatchCache)
    loss: FlowLoss = define_section(FlowLoss)


NO_ENCODER = frozenset({"network_train_text_encoder_only"})  # `unfit` where no text encoder learns


@dataclass(frozen=True, kw_only=True)
class TransformerLora(TransformerRun, AdapterRun):
    """Adapters in the transformer."""

    foreign: ClassVar[Mapping[str, str]] = {"mem_eff_save": "adapter files are small"}


@dataclass(frozen=True, kw_only=True)
class TransformerTrain(TransformerRun, FullRun):
    """A training of the transformer itself."""

    foreign: ClassVar[Mapping[str, str]] = {
        "train_text_encoder": "the text encoder of this model is not trained",
        "block_lr": "it is for the blocks of another model",
    }

    save: SafetensorsSave = define_section(SafetensorsSave)
