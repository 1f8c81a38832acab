"""The protocol of a model family, and the values it takes and returns. Importing this needs no torch."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from library.compiler.block_inputs import BlockInputs
from library.objectives.base import NoisedBatch

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor, nn

    from library.config.problems import Problem
    from library.families.shared.sampler import Sampler


@dataclass(frozen=True)
class DeferredNetwork:
    """A network that is read from its files when it is needed; each call of `read` builds a new one."""

    read: "Callable[[], nn.Module]"
    files: tuple[Path, ...]
    kind: str  # what determines its weights besides the files: which network, and its dtype
    merged: bool = False  # whether `read` merges the files of `base_weights` into it


@dataclass(frozen=True)
class WeightPlacement:
    """The device and the storage of a denoiser's weights as they are read, by the names of its parameters."""

    device: "torch.device"  # of all weights not named below; casts are computed there
    host: Collection[str] = ()  # those kept in host memory
    eight_bits: Collection[str] = ()  # those that are stored as float8_e4m3fn, cast from the requested dtype


@dataclass
class ModelComponents:
    """The networks of one checkpoint, on the host until something moves them."""

    denoiser: "nn.Module"  # on the meta device until `read_denoiser`, if reading it was deferred
    vae: "nn.Module | None"
    encoders: "dict[str, nn.Module]"  # text encoders by short name: clip_l, clip_g, t5xxl
    tokenizers: Mapping[str, Any]
    source: dict[str, Any] = field(default_factory=dict)  # other data for saving: paths, logit_scale
    deferred: dict[str, DeferredNetwork] = field(default_factory=dict)  # "vae", or a text encoder's name
    read_again: dict[str, DeferredNetwork] = field(default_factory=dict)  # text encoders that were deferred
    fill_denoiser: "Callable[[WeightPlacement | None], object] | None" = None  # reads its weights, if that was deferred

    def read_denoiser(self, place: "Callable[[nn.Module], WeightPlacement] | None" = None) -> None:
        """Read the denoiser's weights, if that was deferred; `place` returns their placement, given the empty
        denoiser."""
        if self.fill_denoiser:
            self.fill_denoiser(place(self.denoiser) if place else None)
            self.fill_denoiser = None

    @property
    def deferred_files(self) -> list[Path]:
        return [file for network in self.deferred.values() for file in network.files]

    def read_vae(self) -> None:
        if deferred := self.deferred.pop("vae", None):
            self.vae = deferred.read()

    def read_all(self) -> Self:
        """Read all networks whose reading was deferred."""
        self.read_denoiser()
        self.read_vae()
        self.read_encoders()
        return self

    def read_encoders(self) -> None:
        """Read the text encoders, if that was deferred."""
        for name in [name for name in self.deferred if name != "vae"]:
            self.read_again[name] = self.deferred.pop(name)
            self.encoders[name] = self.read_again[name].read()


@dataclass(frozen=True)
class LatentCache:
    """The file format of a family's cached latents."""

    suffix: str  # of the file's name, after <stem>_<W>x<H>: "_sdxl.npz"
    keyed_by_size: bool  # keys carry the latents' size, so that one file holds several
    architecture: str = ""  # musubi-tuner's name of the model, if the file has its format: "flux_kontext"
    numbers_controls: bool = True  # whether a single reference image has a number in that format
    frames: bool = False  # whether latents in that format are those of a video of one frame, [C, 1, h, w]
    square: int = 1  # side of the squares whose latents are channels in the file, whose keys then count no frames


@dataclass(frozen=True)
class TextCache:
    """The file format of a family's cached text outputs."""

    suffix: str  # of the file's name, after <stem>: "_te_outputs.npz"
    keys: tuple[str, ...]  # the arrays in it, which are also the keys of what Family.text returns
    # Options of the model section, besides lengths: a change of their values invalidates the cache.
    options: tuple[str, ...] = ()
    mask: str = ""  # the key of the mask of the caption's tokens: the other arrays are cut by it, and it is not stored
    architecture: str = ""  # musubi-tuner's name of the model, if the file has its format
    names: Mapping[str, str] = field(default_factory=dict)  # key -> its name in the file, if different
    # The arrays (numpy) of a caption -> those of a dropped caption; None: cached captions cannot be dropped.
    without_caption: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    rate: str = ""  # sd-scripts' key of the caption_dropout_rate in the file

    @property
    def stored(self) -> tuple[str, ...]:
        return tuple(key for key in self.keys if key != self.mask)


@dataclass(frozen=True)
class SampleRequest:
    """One image to generate. Sizes are rounded down to a multiple; a seed of None is random."""

    prompt: str
    negative: str = ""
    width: int = 512
    height: int = 512
    steps: int = 20
    scale: float = 7.5  # classifier-free guidance; 1 samples without the negative prompt
    guidance: float | None = None  # of guidance-distilled models
    seed: int | None = None
    sampler_name: str | None = None
    guide: "Image.Image | None" = None  # the control image of a ControlNet-LLLite
    controls: "tuple[Image.Image, ...]" = ()  # reference images, or the image to inpaint
    mask: "Image.Image | None" = None  # bright in the region to inpaint
    shift: float | None = None  # of the sigmas, in place of the model's own
    sigmas: tuple[float, ...] = ()  # of the steps, falling, in place of the model's own; the last step ends at 0


@dataclass(frozen=True)
class BlockChain:
    """The blocks of a denoiser that `sample_cache` may skip, from the first one that always runs."""

    lists: tuple[str, ...]  # attributes of the denoiser, in the order of execution: lists of blocks, or one block
    is_unet: bool = False  # whether they are the levels of a U-Net, of which the last one always runs
    threshold: float = 0.15  # of `sample_cache = auto`
    max_skipped: int = 3  # passes in a row, as errors of predictions add up


@dataclass(frozen=True)
class BlockCost:
    """The cost of blocks of one class, measured with steps of rank 16 at 1024 x 1024; defaults if not measured."""

    container: str  # name of the lists in the denoiser that hold these blocks
    activations: float = 30  # elements kept for backward per element of the block's main input
    used: float = 0.8  # share of its parameters that each token is multiplied with


class Family(Protocol):
    """Everything in which model families differ. No other part of library/ may depend on a certain family.

    A family object holds the run's config, so its methods take none.
    """

    config: Any  # of the run: an instance of the family's own subclass of RunConfig

    @property
    def name(self) -> str:
        """Its name in file names and metadata: "sdxl"."""

    @property
    def grid(self) -> int:
        """Bucket sides are multiples of this many pixels."""

    @property
    def block_classes(self) -> tuple[str, ...]:
        """Classes in the denoiser that are compiled, checkpointed and swapped."""

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Classes in the denoiser whose linear layers can carry an adapter."""

    @property
    def text_adapter_targets(self) -> tuple[str, ...]:
        """Classes in the text encoders whose linear layers can carry an adapter; empty if these are never trained."""

    @property
    def block_inputs(self) -> Mapping[str, BlockInputs]:
        """The inputs of blocks by class in `block_classes`, so that one graph can serve all blocks of a class."""

    @property
    def sample_defaults(self) -> Mapping[str, Any]:
        """Defaults of a sample prompt's fields."""

    @property
    def sample_multiple(self) -> int:
        """Sides of sample images are multiples of this many pixels."""

    @property
    def latent_cache(self) -> LatentCache:
        """The file format of cached latents."""

    @property
    def text_cache(self) -> TextCache:
        """The file format of cached text outputs."""

    @property
    def validation_timesteps(self) -> Sequence[float]:
        """The noise levels at which validation measures the loss, in 0..1."""

    @property
    def patch_size(self) -> int:
        """Side of the square of latents that one token stands for."""

    @property
    def block_costs(self) -> Mapping[str, BlockCost]:
        """The costs of blocks by class in `block_classes`, for the estimate of memory and time."""

    @property
    def utilization(self) -> Mapping[bool, float]:
        """Expected model FLOPs utilization of a step (0..1), eager (False) and compiled (True)."""

    @property
    def architecture(self) -> str:
        """modelspec.architecture in saved files: "stable-diffusion-xl-v1-base", "flux-1-dev", "flux-1-schnell"."""

    @property
    def base_model_version(self) -> str:
        """ss_base_model_version in saved files: "sdxl_base_v1-0", "flux1", "chroma"."""

    def problems(self) -> "Iterator[Problem]":
        """Yield problems of the model's files, from their headers only; load nothing."""

    def notes(self) -> "Iterator[Problem]":
        """Yield options that have no effect with this model. Called only if `problems` has found none."""

    def stored_shapes(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return the shapes of tensors by part ("denoiser", "vae", text encoders) and name, from the headers of the
        files that are on this machine. Raises ConfigError.
        """

    def load(
        self, dtype: "torch.dtype", frozen: "torch.dtype | None" = None, deferring: bool = False
    ) -> ModelComponents:
        """Load everything to the CPU, in the sizes of the file. Networks that may be trained are in `dtype`, the others
        in `frozen`.

        With fp8_base, matrices that are 8-bit in the file stay so. With `deferring` the VAE and the text encoders are
        left in `deferred`, as caches may make them unnecessary, and `read_denoiser` reads the denoiser's weights.
        """

    def latents(
        self,
        components: ModelComponents,
        pixels: "Tensor",
        generator: "torch.Generator | list[torch.Generator] | None" = None,
    ) -> "Tensor":
        """Pixels [B, 3, H, W] in [-1, 1] -> latents in the cache's convention, float32.

        A list has one generator per image: the result then does not depend on the batch.
        """

    @property
    def text_lengths(self) -> Mapping[str, int]:
        """The length in tokens of the arrays of the text cache that have a token dimension."""

    def train_text_length(self, components: ModelComponents, captions: Collection[str]) -> int | None:
        """Return how many tokens of the arrays in `text_lengths` a training step reads for images with these captions;
        None for all.

        More captions never give a smaller number. Shorter arrays are padded with zeros.
        """

    def text(
        self, components: ModelComponents, captions: list[str], encoders: tuple[str, ...] | None = None
    ) -> "dict[str, Tensor]":
        """Captions -> the text inputs of the denoiser by the cache's keys, only those of `encoders` if given."""

    def noised(self, latents: "Tensor", generator: "torch.Generator", timesteps: "Tensor | None" = None) -> NoisedBatch:
        """Cached latents [B, C, h, w] -> noised latents, timesteps, target and weights of a training step.

        All on the latents' device, without a device sync. `timesteps` [B], if given, replace the sampled ones; their
        units are those of `validation_timesteps`.
        """

    def predict(
        self,
        denoiser: "nn.Module",
        noised: NoisedBatch,
        text: "dict[str, Tensor]",
        sizes: "Tensor",
        controls: "Sequence[Tensor]" = (),
    ) -> "Tensor":
        """Return the prediction in the parametrization of the target, float32 [B, C, h, w]. `denoiser` may be wrapped.

        sizes: float32 [B, 6], original height and width, crop top and left, target height and width. controls: the
        results of capabilities.TakesControls.control_latents for control and reference images; for inpainting, the
        latents of the image outside the mask, and the mask [B, 1, H, W] with 1 in the region to inpaint; for a
        ControlNet-LLLite, the pixels of its control image.
        """

    def export(self, components: ModelComponents) -> "dict[str, Tensor]":
        """Return the whole model under the keys of a single file."""

    def resolution_level(self, path: str) -> int:
        """Return log2 of the downsampling of the latents at the input of this block; 0 if all blocks see one size."""

    def execution_key(self, path: str) -> tuple[int, ...]:
        """Return a module's sort key by execution order; equal keys run in the order of the module tree."""

    def swap_plan(self, number: int) -> dict[str, int]:
        """`blocks_to_swap` -> how many blocks of each class in `block_classes` are kept in host memory."""

    def sampler(self, components: ModelComponents) -> "Sampler":
        """Return the sampler that generates images with these networks."""

    def adapter_name(self, part: str, path: str) -> str:
        """Return the name of a module's adapter in files: ("denoiser", "img_in") -> "lora_unet_img_in"."""
