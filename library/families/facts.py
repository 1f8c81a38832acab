"""The static properties of each family, so that no other package depends on its name. Needs no torch."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from library.config.run_config import ControlUse

Shapes = Mapping[str, tuple[int, ...]]
COMMON_NAMES = ("diffusion_pytorch_model.safetensors", "pytorch_lora_weights.safetensors")  # on the hub


def has_tensor(name: str, *shape: int) -> Callable[[Shapes], bool]:
    return lambda shapes: tuple(shapes.get(name, ())) == shape


def is_qwen3_vl(width: int) -> Callable[[Shapes], bool]:
    """Return a test whether shapes are those of a Qwen3-VL: a Qwen3 of this width with a vision encoder."""

    def is_this(shapes: Shapes) -> bool:
        embedding = next((shape for name, shape in shapes.items() if name.endswith("embed_tokens.weight")), ())
        return tuple(embedding) == (151936, width) and any("visual.deepstack_merger_list." in name for name in shapes)

    return is_this


def matching(kinds: Iterable[tuple[str, int | None, str]], shapes: Shapes) -> str:
    """Return the first description whose pattern matches the name of a tensor that has this number of rows (None: any
    number), "" if there is none.
    """
    for pattern, rows, words in kinds:
        search = re.compile(pattern).search
        if any(rows in (None, *shape[:1]) for name, shape in shapes.items() if search(name)):
            return words
    return ""


@dataclass(frozen=True)
class AdapterModule:
    """A kind of adapter that only one family has: one value of network_module."""

    args: str  # module:class of its network_args, a shared.network_args.NetworkArgs
    frozen_down: bool = False  # LoRA-FA: lora_down is not trained


@dataclass(frozen=True)
class HubFile:
    """A file of a model on the Hugging Face Hub."""

    option: str  # that names it in a config
    repository: str
    path: str  # in the repository
    size: int  # bytes, to be shown if the hub is not reachable


def hub_files(repository: str, **places: tuple[str, int]) -> tuple[HubFile, ...]:
    """Return files of a repository by option, from each one's path without .safetensors and its size."""
    return tuple(HubFile(option, repository, f"{place}.safetensors", size) for option, (place, size) in places.items())


@dataclass(frozen=True)
class HubModel:
    """A base model on the Hugging Face Hub, with all files that training requires: the base model's first."""

    title: str  # of the model
    files: tuple[HubFile, ...]
    options: Mapping[str, str | bool] = field(default_factory=lambda: MappingProxyType({}))  # that training it requires


@dataclass(frozen=True)
class HubLora:
    """A published LoRA."""

    title: str
    file: str  # on the Hugging Face Hub: owner/name/file
    strength: float = 1.0

    @property
    def value(self) -> str:
        return self.file if self.strength == 1 else f"{self.file}:{self.strength:g}"

    def is_named(self, path: str) -> bool:
        """Return whether a path or hub id names this file; a name that many files have counts only in a folder of its
        repository.
        """
        _, repository, *_, name = self.file.split("/")
        *folders, last = re.split(r"[/\\]", path)
        return last == name and (name not in COMMON_NAMES or any(repository in folder for folder in folders))


@dataclass(frozen=True)
class FewStepLora(HubLora):
    """A LoRA with which a model generates in few steps, and the settings that it was distilled for."""

    # Fields of a sample prompt that it needs: sample_steps or sample_sigmas, scale, guidance_scale, flow_shift, ...
    prompt: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of the denoiser in one row of the page's diagram of the model."""

    title: str
    count: int  # in the published model
    pattern: str  # matches names of adapters in these blocks
    number: Callable[[re.Match[str]], int] = lambda match: int(match[1])  # of the block, from such a match


def block_of_adapter(name: str, groups: Iterable[BlockGroup]) -> tuple[int, int] | None:
    """Return the block of an adapter: (number of its group, number of the block); None outside of blocks."""
    for number, group in enumerate(groups):
        if match := re.search(group.pattern, name):
            return number, group.number(match)
    return None


@dataclass(frozen=True)
class ImportedModel:
    """What importers of other trainers' files have to know of a family whose denoiser is a transformer."""

    blocks: int  # that another trainer's share of blocks refers to; of FLUX, double blocks and pairs of single ones
    most_swapped: int  # the largest number of blocks to swap that an import writes
    parts: tuple[str, ...] = ("text_encoder", "vae")  # options that name the networks beside the denoiser
    size_shift: str = "shift"  # the timestep_sampling that shifts by the size of an image
    model_version: str = ""  # of a model whose name matches none of `named_options`; "" if names do not decide


NOT_IMPORTED = ImportedModel(0, 0, ())  # of families that have no such options


@dataclass(frozen=True, kw_only=True)
class SmallModel:
    """The small trained model of a family that comes with the program: the base of the demo's LoRA and fine-tune, and
    the settings with which they learn in minutes on a CPU.
    """

    files: Mapping[str, str]  # parts, as the tables name them -> files in library/demo/small_models/<family>
    tables: Callable[[Mapping[str, Path]], Mapping[str, list[tuple[str, Any, str]]]]  # paths of parts -> of a TOML
    prompt: str  # the options of a sample prompt, as in a line of a prompt file
    rank: int
    alpha: float
    rates: Mapping[str, float]  # by kind of training
    steps: int


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """The static properties of one family. `module:name` refers to an object that is imported when it is needed."""

    name: str  # its folder: in file names, in presets/, in the record of a run
    title: str  # what people call it
    base_model: str  # one of its files, as part of a sentence: "an SDXL single file"
    scripts: Mapping[str, str]  # training script -> module:class of its config
    family: str  # module:class of its Family
    pipelines: tuple[str, ...]  # classes of its pipelines in diffusers
    recognise: Callable[[Shapes], str]  # shapes of a checkpoint -> its description, if it is of this family; else ""
    base_models: tuple[str, ...]  # those descriptions of `recognise` that can be trained directly

    # In the metadata of saved files.
    base_model_version: str  # ss_base_model_version, if no model is loaded
    architecture: str  # modelspec.architecture, if no model is loaded
    # The same of variants: description by `recognise` -> both.
    relatives: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    implementation: str  # modelspec.implementation
    has_prediction_type: bool = False  # whether its models differ in their prediction type

    adapter_modules: Mapping[str, AdapterModule]  # by network_module; the first is the default
    blocks: tuple[BlockGroup, ...] = ()

    # Variants in the demo, with their titles; VARIANTS of the random module has their sizes.
    demo_variants: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    trained_in_compute_dtype: bool = True  # also in a full fine-tune: float32 master weights would be too large
    exceeds_fp16: bool = False  # activations of its published models overflow fp16
    saves_all_parts: bool = False  # a fine-tune's file includes text encoders and VAE
    most_blocks_swapped: int
    text_tokens: int  # text tokens in the denoiser's blocks, in addition to image tokens
    graphs: Mapping[str, int]  # forward graphs that its blocks need, by class: one for each shape of a block
    compile_seconds: float  # of compiling them, as measured on an H200
    decoder_memory: float = 1.5  # GiB that the VAE needs in 16 bits to decode 1024 x 1024 pixels, besides its weights
    denoiser_prefix: str = ""  # of the denoiser's tensors in a file that holds the other networks too
    # Whether `recognise` runs before that of the other families, since they would take its files for their own.
    recognised_first: bool = False
    recognise_part: Callable[[Shapes], str] = lambda _shapes: ""  # `recognise` for its VAE and text encoders
    has_sd_scripts_defaults: bool = True  # whether sd-scripts trains it, so that its defaults apply
    # Fields of a sample prompt for input images -> other options -> the values that they require.
    prompt_images: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=lambda: MappingProxyType({}))
    # Options that a base model requires: description by `recognise`, or class of pipeline, -> their values.
    model_options: Mapping[str, Mapping[str, str | bool]] = field(default_factory=lambda: MappingProxyType({}))
    # Options inferred from a file's name where its header is ambiguous: pattern of the name -> their values.
    named_options: Mapping[str, Mapping[str, str | bool]] = field(default_factory=lambda: MappingProxyType({}))
    hub_models: tuple[HubModel, ...] = ()  # available for download, the default first
    hub_folder: str = ""  # owner/name of the model in diffusers' layout, where no single files are published
    few_step_loras: tuple[FewStepLora, ...] = ()  # that the page proposes for samples
    assistant_loras: tuple[HubLora, ...] = ()  # with which its distilled models are trained
    imported: ImportedModel = NOT_IMPORTED
    unguided_scale: float = 1.0  # the scale of a sample prompt with which it is sampled without the negative prompt
    # Text encoder -> its key in the files of textual inversions, if that is not its name.
    embedding_keys: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # Options of its parts -> a test whether a file with these shapes is that part.
    part_options: Mapping[str, Callable[[Shapes], bool]] = field(default_factory=lambda: MappingProxyType({}))

    def __deepcopy__(self, memo: object) -> Self:
        # Immutable, so copies of a family can share it.
        return self

    @property
    def lora_names(self) -> str:
        """module:object, a shared.lora_names.LoraNames."""
        return f"library.families.{self.name}.keys:LORA_NAMES"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Common properties of a variant; subclasses of families add others."""

    title: str  # what people call it
    control_images: ControlUse = ControlUse()  # control or reference images that it reads
    base_model_version: str  # ss_base_model_version
    architecture: str  # modelspec.architecture; "" where it is in the header

    def __deepcopy__(self, memo: object) -> Self:
        # Immutable, so copies of a family can share it.
        return self
