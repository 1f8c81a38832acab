"""The facts that each family states about itself, so that no other package depends on its name. Needs no torch."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

Shapes = Mapping[str, tuple[int, ...]]


def holds(name: str, *shape: int) -> Callable[[Shapes], bool]:
    """The test whether a checkpoint has a tensor of this name and shape."""
    return lambda shapes: tuple(shapes.get(name, ())) == shape


def matching(kinds: Iterable[tuple[str, int | None, str]], shapes: Shapes) -> str:
    """The first words whose pattern is in a name, of a tensor with so many rows where a number says how many."""
    for pattern, rows, words in kinds:
        search = re.compile(pattern).search
        if any(rows in (None, *shape[:1]) for name, shape in shapes.items() if search(name)):
            return words
    return ""


def nothing(_shapes: Shapes) -> str:
    """No file of a family's own beside its base models."""
    return ""


@dataclass(frozen=True)
class AdapterModule:
    """A kind of adapter that a family has of its own: one value of network_module."""

    args: str  # module:class of what its network_args may say, a shared.network_args.NetworkArgs
    frozen_down: bool = False  # LoRA-FA: lora_down keeps its first values


@dataclass(frozen=True)
class HubFile:
    """A file of a model on the Hugging Face Hub."""

    option: str  # that names it in a config
    repository: str
    path: str  # in the repository
    size: int  # bytes, for where the hub cannot be asked


@dataclass(frozen=True)
class HubModel:
    """A base model on the Hugging Face Hub, with all files that training it needs: the base model's first."""

    title: str  # what people call it
    files: tuple[HubFile, ...]
    options: Mapping[str, str | bool] = field(default_factory=lambda: MappingProxyType({}))  # that training it needs


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of the denoiser that stand in one row of the page's picture of the model."""

    title: str
    count: int  # in the published model
    pattern: str  # is found in the names of adapters in these blocks; its group is the number of the block


def block_of(name: str, groups: Iterable[BlockGroup]) -> tuple[int, int] | None:
    """The block that an adapter of this name is in: the number of its group, and its own; None for no block."""
    for at, group in enumerate(groups):
        if found := re.search(group.pattern, name):
            return at, int(found[1])
    return None


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """The facts of one family. `module:name` names what is loaded only when it is needed."""

    name: str  # its folder: in file names, in presets/, in the record of a run
    title: str  # what people call it
    base_model: str  # one of its files, in words that fit into a sentence: "an SDXL single file"
    scripts: Mapping[str, str]  # training script -> module:class of its config
    family: str  # module:class of its Family
    pipelines: tuple[str, ...]  # classes of its pipelines in diffusers
    recognise: Callable[[Shapes], str]  # shapes of a checkpoint -> what it is of this family, in words; "" for others
    base_models: tuple[str, ...]  # those words of `recognise` that name a file which can be trained as it is

    # In the metadata of saved files.
    base_model_version: str  # ss_base_model_version, where no loaded model can tell
    architecture: str  # modelspec.architecture, where no loaded model can tell
    # The same of relatives: what `recognise` says of them -> both.
    relatives: Mapping[str, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    implementation: str  # modelspec.implementation
    has_prediction_type: bool  # whether its models differ in what they predict

    adapter_modules: Mapping[str, AdapterModule]  # by network_module; the first is the usual one
    blocks: tuple[BlockGroup, ...] = ()

    # Relatives that the demo has models of, and what people call them; VARIANTS of the random module has their sizes.
    demo_variants: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    trained_in_compute_dtype: bool  # a full fine-tune, too: float32 masters would be too large
    exceeds_fp16: bool = False  # what its published models compute is too large for fp16
    saves_all_parts: bool  # a fine-tune's file holds text encoders and VAE as well
    most_blocks_swapped: int
    text_tokens: int  # tokens of text that go through the denoiser's blocks beside those of the image
    graphs: Mapping[str, int]  # forward graphs that its blocks need, by class: one for each shape of a block
    compile_seconds: float  # of compiling them, as measured on an H200
    denoiser_prefix: str = ""  # of the denoiser's tensors in a file that holds the other networks too
    recognise_part: Callable[[Shapes], str] = nothing  # the same for its VAE and text encoders
    has_sd_scripts_defaults: bool = True  # whether sd-scripts trains it, so that its defaults are those of there
    # Fields of a sample prompt that name images which it is shown -> other options -> the values that it takes them
    # with.
    prompt_images: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=lambda: MappingProxyType({}))
    # Options that a base model needs: words of `recognise`, or a class of pipeline, -> their values.
    model_options: Mapping[str, Mapping[str, str | bool]] = field(default_factory=lambda: MappingProxyType({}))
    # Options that a file asks for by its name where no header can: a pattern of the name -> their values.
    named_options: Mapping[str, Mapping[str, str | bool]] = field(default_factory=lambda: MappingProxyType({}))
    hub_models: tuple[HubModel, ...] = ()  # that are offered for download, the usual one first
    # Options that name one of its parts -> whether a file with these shapes is that part.
    part_options: Mapping[str, Callable[[Shapes], bool]] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def lora_names(self) -> str:
        """module:object, a shared.lora_names.LoraNames."""
        return f"library.families.{self.name}.lora_names:NAMES"

    @property
    def demo(self) -> str:
        """The module with the tables of its demo and the check of its LoRA in diffusers."""
        return f"library.families.{self.name}.demo"
