"""The options of Qwen-Image."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from library import families
from library.config import sections
from library.config.json_types import JsonMapping, JsonObject
from library.config.names import RETIRED_BESIDE_REFERENCES
from library.config.problems import Message, Problem
from library.config.run_config import ControlUse, Rule, RunConfig
from library.config.schema import define_section, opt, section_options
from library.config.values import Option
from library.families.qwen_image.variants import EDITS, QWEN_VARIANTS, QwenVariant
from library.families.shared.network_args import BlockArgs, LayerPreset, usual_layers

SHIFT_LINE = ((256, 0.5), (8192, 0.9))  # image tokens and mu: the shift of a size is e^mu, linear between and beyond

# Options parsed for every family that mean nothing here.
INEFFECTIVE = {
    **sections.NO_GUIDANCE,
    "max_token_length": "captions of Qwen-Image may have any length up to 1024 tokens",
}

# Flags of musubi-tuner that are not needed here.
MUSUBI_FLAGS = {
    "fp8_vl": "fp8_base keeps the text encoder in 8 bits as well",
    "num_layers": "the number of blocks is read from the file",
}

OTHER_QWEN_FILES = {
    "text_encoder": "the Qwen2.5-VL text encoder (qwen_2.5_vl_7b.safetensors)",
    "vae": "the Qwen-Image VAE (qwen_image_vae.safetensors)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenModel(sections.Model):
    """The Qwen-Image transformer and the networks around it."""

    vae: str | None = opt(None, "The Qwen-Image VAE (qwen_image_vae.safetensors).", kind="file", label="VAE")
    text_encoder: str | None = sections.text_encoder_file("Qwen2.5-VL", "qwen_2.5_vl_7b.safetensors")
    model_version: Literal["original", "edit", "edit-2509", "edit-2511", "layered"] | None = opt(
        None,
        "Qwen-Image and Qwen-Image-2512 (original) see no images; others see reference images.",
        words={name: variant.title for name, variant in QWEN_VARIANTS.items()}
        | {"original": "Qwen-Image, Qwen-Image-2512", "layered": "Qwen-Image-Layered"},
    )

    @property
    def variant(self) -> QwenVariant:
        return QWEN_VARIANTS.get(self.model_version or "original", QWEN_VARIANTS["original"])

    def check(self, run: RunConfig) -> Iterator[Problem]:
        """Reject the layered model, reference images with a model that takes none, and text that is not cached with one
        that reads them.
        """
        yield from sections.Model.check(self, run)
        if self.model_version == "layered":
            yield Problem(
                "model_version",
                "= layered is not trained here: use Qwen-Image, Qwen-Image-2512 or one of the Edit models",
                fix={"model_version": "original"},
            )
        if getattr(run.data, "control_directory", None) and not self.variant.control_images.most:
            yield Problem(
                "control_directory",
                "is for model_version = {versions}: Qwen-Image takes no reference images",
                versions=" / ".join(EDITS),
                also="model_version",
                fix={"control_directory": None},
            )
        has_images = run.data.train_data_dir or run.data.dataset_config  # pictures alone cache nothing
        if self.variant.template and has_images and not run.cache.text:
            yield Problem(
                "cache_text_encoder_outputs",
                "must be on with model_version = {version}, whose text encoder also reads the reference images",
                version=self.model_version,
                also="model_version",
                fix={"cache_text_encoder_outputs": True},
            )

    others: ClassVar[Mapping[str, str]] = OTHER_QWEN_FILES


@dataclass(frozen=True, kw_only=True, slots=True)
class OldVersions:
    """musubi-tuner's former flags for the Edit models."""

    edit: bool = opt(False, "Qwen-Image-Edit.")
    edit_plus: bool = opt(False, "Qwen-Image-Edit-2509.")


def convert_model_version(old: JsonMapping, set_options: Collection[str]) -> tuple[JsonObject, list[Problem]]:
    """Return the model_version of old flags, unless it is also set."""
    names = {"edit": "edit", "edit_plus": "edit-2509"}
    enabled = [name for name in names if old.get(name)]
    if not enabled:
        return {}, []
    if "model_version" in set_options:
        why = Message("model_version is set, and counts alone")
        return {}, [Problem(enabled[-1], "has no effect: {why}", why=why)]
    return {"model_version": names[enabled[-1]]}, [
        Problem(enabled[-1], "is read as model_version = {version}", version=names[enabled[-1]])
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenFlow(sections.TransformerFlow):
    """Noise, timesteps and the type of the prediction."""

    timestep_sampling: Literal["sigma", "uniform", "sigmoid", "shift", "qwen_shift"] = opt(
        "qwen_shift",
        "How noise levels (timesteps) are drawn. qwen_shift and shift are usual.",
        words={"qwen_shift": "Qwen shift"},
    )
    discrete_flow_shift: float = sections.flow_shift(2.2)

    shift_line: ClassVar[tuple[tuple[int, float], tuple[int, float]]] = SHIFT_LINE
    size_shift: ClassVar[str] = "qwen_shift"


EDITED = {"model_version": EDITS}  # values whose models take reference images
REFERENCE_FOLDER = sections.reference_folder(EDITED)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenData(sections.Data):
    """The images, and the reference images beside them."""

    control_directory: str | None = REFERENCE_FOLDER


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenAdapterData(sections.AdapterData):
    """The same when adapters are trained."""

    control_directory: str | None = REFERENCE_FOLDER


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenMemory(sections.ModulatedMemory):
    """Memory and speed of a training of Qwen-Image."""

    blocks_to_swap: int | None = sections.blocks_to_swap(59)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenCompile(sections.Compile):
    """How the blocks of Qwen-Image are compiled."""

    kinds: ClassVar[Mapping[str, str]] = {"block": "QwenImageTransformerBlock"}


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenNetwork(sections.TransformerNetwork):
    """The adapters that are trained for Qwen-Image."""

    network_module: Literal["networks.lora_qwen_image", "lycoris.kohya"] | str | None = sections.network_module()


@dataclass(frozen=True, kw_only=True)
class QwenRun:
    """The common base of all Qwen-Image trainings."""

    family: ClassVar[str] = "qwen_image"
    script_with = staticmethod(families.script_with)
    retired: ClassVar[Mapping[str, str]] = RETIRED_BESIDE_REFERENCES
    ineffective: ClassVar[Mapping[str, str]] = INEFFECTIVE
    ineffective_rules: ClassVar[tuple[Rule, ...]] = sections.flow_rules(QwenFlow.size_shift)
    foreign: ClassVar[Mapping[str, str]] = MUSUBI_FLAGS
    old: ClassVar[Mapping[str, Option]] = section_options(OldVersions)
    convert = staticmethod(convert_model_version)

    @property
    def control_images(self) -> ControlUse:
        return self.model.variant.control_images

    model: QwenModel = define_section(QwenModel)
    noise: QwenFlow = define_section(QwenFlow)
    memory: QwenMemory = define_section(QwenMemory)
    compile: QwenCompile = define_section(QwenCompile)


@dataclass(frozen=True, kw_only=True)
class QwenLora(QwenRun, sections.TransformerLora):
    """LoRA and other adapters for Qwen-Image."""

    unfit: ClassVar[frozenset[str]] = sections.NO_ENCODER
    script: ClassVar[str] = "qwen_image_train_network"
    title: ClassVar[str] = "Qwen-Image LoRA"

    data: QwenAdapterData = define_section(QwenAdapterData)
    network: QwenNetwork = define_section(QwenNetwork)


@dataclass(frozen=True, kw_only=True)
class QwenTrain(QwenRun, sections.TransformerTrain):
    """Full fine-tuning and DreamBooth for Qwen-Image."""

    script: ClassVar[str] = "qwen_image_train"
    title: ClassVar[str] = "Qwen-Image fine-tune"

    data: QwenData = define_section(QwenData)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenArgs(BlockArgs):
    """`networks.lora_qwen_image`."""

    presets: ClassVar[tuple[LayerPreset, ...]] = (
        *usual_layers("_mlp_=0"),
        LayerPreset(
            "Image stream only",
            "What the blocks do with the text stays as it is, so that prompts are understood as before.",
            {"network_reg_dims": "_(txt_mlp|add_[kqv]_proj|to_add_out)=0"},
        ),
    )
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    train_modulation: bool = opt(
        False,
        "adapters on the modulation as well, as files of musubi-tuner have them",
        label="Modulation learns as well",
    )

    def is_chosen(self, path: str) -> bool:
        return (self.train_modulation or "_mod." not in path) and self.in_chosen_block(path)
