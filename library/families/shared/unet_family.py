"""Families of Stable Diffusion: a U-Net, CLIP text encoders and a VAE in one checkpoint, trained by diffusion."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError, Problem
from library.config.sections import EmbeddingRun
from library.families.base import (
    BlockChain,
    BlockCost,
    BlockInputs,
    DeferredNetwork,
    LatentCache,
    ModelComponents,
    TextCache,
)
from library.families.capabilities import CaptionLimit, count_caption_tokens
from library.families.shared import (
    added_words,
    autoencoder,
    clip,
    emphasis,
    hub,
    tokenizers,
    unet_folder,
    unet_problems,
    weights,
)
from library.families.shared.unet import compute_dtype
from library.families.shared.unet_checkpoint import MODEL_OPTION, UnetCheckpoints, located_vae, read_vae
from library.families.shared.unet_names import Layout
from library.objectives.base import NoisedBatch
from library.objectives.diffusion import Diffusion

if TYPE_CHECKING:
    from library.families.shared.sampler import Sampler

SIDES = ("down_blocks", "mid_block", "up_blocks")  # of the U-Net, in the order in which they run


class UnetFamily(ABC):
    """Holds the run's config."""

    name: str
    checkpoints: ClassVar[UnetCheckpoints]
    folder: ClassVar[unet_folder.PipelineFolder]
    tokenizer_places: ClassVar[Mapping[str, tuple[str, str]]]  # text encoder -> name on the hub, and its folder
    text_cache: TextCache
    latent_cache: LatentCache
    block_classes = ("BasicTransformerBlock", "ResnetBlock2D")
    block_chain = BlockChain(("down_blocks", "mid_block", "up_blocks"), is_unet=True, max_skipped=1)
    adapter_targets = image_transformers = ("Transformer2DModel",)
    text_adapter_targets = clip.CLIP_LAYER_CLASSES
    # Tokens of the image; height and width of its features.
    block_inputs = {
        "BasicTransformerBlock": BlockInputs(streams=(0,), dynamic=((0, 1),)),
        "ResnetBlock2D": BlockInputs(streams=(0,), dynamic=((0, 2), (0, 3))),
        "GroupNorm": BlockInputs(streams=(0,), dynamic=((0, 2), (0, 3))),
    }
    # Weights that read the text are used for few tokens, hence `used` below 1.
    block_costs = {"BasicTransformerBlock": BlockCost("transformer_blocks", activations=36, used=0.85)}
    utilization = {False: 0.13, True: 0.195}  # much of the U-Net's time is not spent in matrix products
    patch_size = 1
    sample_defaults = {"negative_prompt": "", "width": 512, "height": 512, "sample_steps": 30, "scale": 7.5}
    sample_multiple = 8

    def __init__(self, config: Any):
        self.config = config
        self.grid: int = type(config).grid
        self.layout = Layout()
        self.objective = Diffusion(config.noise, config.loss, config.model.v_parameterization, self.checkpoints.scale)

    # ---- what its models differ in

    @abstractmethod
    def encode_captions(
        self,
        components: ModelComponents,
        captions: Sequence[str],
        encoders: tuple[str, ...] | None,
        chunks: int,
        weighted: bool,
    ) -> dict[str, Tensor]:
        """Encode captions, cut or padded to `chunks` of 75 tokens, by these text encoders, None for all."""

    @abstractmethod
    def unet_inputs(
        self, text: dict[str, Tensor], dtype: torch.dtype, sizes: Tensor, controls: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return the text for cross-attention, [B, L, C] in `dtype`, and the U-Net's other conditions, if it has
        some.
        """

    @abstractmethod
    def adapter_name(self, part: str, path: str) -> str:
        """Return the name of a module's adapter in files."""

    def other_tensors(self, components: ModelComponents) -> dict[str, Tensor]:
        """Return tensors of a single file that belong to no network."""
        return dict(components.source.get("rest", {}))

    # ---- files

    @property
    def architecture(self) -> str:
        return self.checkpoints.facts.architecture

    @property
    def base_model_version(self) -> str:
        return self.checkpoints.facts.base_model_version

    @property
    def token(self) -> str | None:
        return self.config.hub.huggingface_token

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of this run's files; read headers only."""
        options, title = self.config.model, self.checkpoints.facts.title
        name, vae = options.pretrained_model_name_or_path or "", options.vae
        option = f"--{MODEL_OPTION}"
        problems = []
        if problem := hub.missing_model(option, name, unet_problems.wanted_model(title)):
            problems = [problem]
        elif Path(name).exists():
            problems = list(unet_problems.find_base_model_problems(self.checkpoints, Path(name), vae))
        else:
            choose = functools.partial(self.checkpoints.wanted_files, half=False)
            problems = [p for p in [hub.unreachable_model(option, name, choose, self.token)] if p]
        yield from problems
        if vae:
            yield from unet_problems.find_vae_problems(vae, self.token, title)
        if problems:
            return  # tokenizers are looked for beside a valid model
        if Path(name).exists():
            yield from self.config.compile.beyond(unet_problems.count_blocks(self.checkpoints, Path(name)))
        try:
            caption_tokenizers = self.tokenizers_of_captions()
            if isinstance(self.config, EmbeddingRun) and (words := self.config.embedding.words):
                yield from added_words.find_word_problems(caption_tokenizers, words)
        except ConfigError as e:
            yield from (problem.replaced(topic="model") for problem in e.problems)

    def _tokenizers(self, model_path: str | Path | None) -> tokenizers.Tokenizers:
        """Return the tokenizers of a model, by its path or Hugging Face id. Raises ConfigError if one is missing."""
        folders_and_names: dict[str, tuple[Path, str]] = {}
        for part, (name, subfolder) in self.tokenizer_places.items():
            folder = tokenizers.find_tokenizer(
                name, model_path, subfolder, self.config.model.tokenizer_cache_dir, self.token
            )
            folders_and_names[part] = folder, name
        return tokenizers.Tokenizers(folders_and_names)

    def stored_shapes(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Return the shapes of all parts if the model is on this machine, else {}."""
        model_path = Path(self.config.model.pretrained_model_name_or_path or "")
        if not model_path.exists():
            return {}
        model_path = self.checkpoints.located(model_path)
        with weights.shapes_only():
            stored = self.checkpoints.open(model_path, half=False, mmap=True, vae=self.config.model.vae)
            shapes = {part: {n: tuple(t.shape) for n, t in read().items()} for part, read in stored.parts.items()}
            shapes["denoiser"] = stored.shapes
        self.layout = Layout.of(shapes["denoiser"])
        return shapes

    def load(self, dtype: torch.dtype, frozen: torch.dtype | None = None, deferring: bool = False) -> ModelComponents:
        """Load all networks to the CPU, the trained ones in `dtype`. Raises ConfigError.

        Frozen text encoders and the VAE are in `frozen`, if that is given, but the VAE in float32 with no_half_vae.
        With `deferring` they are left in `deferred`.
        """
        options, half, checkpoints = self.config.model, dtype == torch.float16, self.checkpoints
        mmap = not options.disable_mmap_load_safetensors
        choose = functools.partial(checkpoints.wanted_files, half=half)
        name, option = options.pretrained_model_name_or_path or "", f"--{MODEL_OPTION}"
        model_path = checkpoints.located(hub.local(name, option, choose, self.token))
        stored = checkpoints.open(model_path, half, mmap, options.vae)
        place = hub.local(options.vae, "--vae", unet_problems.vae_files, self.token) if options.vae else None
        place = located_vae(place) if place else None
        # A fine-tune saves the VAE, too, so it is read now: its file could be deleted meanwhile.
        vae = functools.partial(read_vae, place, half, mmap) if place else None
        if vae:
            stored.parts["vae"] = vae if deferring and self.config.adapters else functools.partial(dict, vae())
        self.layout = Layout.of(stored.shapes)
        frozen = frozen or dtype
        text = dtype if self.config.trains_whole_encoders else frozen
        kinds = {"vae": torch.float32 if options.no_half_vae else frozen, **dict.fromkeys(self.tokenizer_places, text)}
        keep_fp8 = self.config.adapters and self.config.precision.few_bits
        denoiser, fill = checkpoints.open_unet(stored, dtype, keep_fp8)

        def read(part: str) -> nn.Module:
            return checkpoints.build_network(stored, part, kinds[part])

        def waiting(part: str) -> DeferredNetwork:
            network_path = place if place and part == "vae" else model_path
            files = (
                weights.files(network_path) if network_path.is_file() else sorted(network_path.rglob("*.safetensors"))
            )
            kind = f"{self.name} {part} {kinds[part]} {half}"
            return DeferredNetwork(functools.partial(read, part), tuple(files), kind)

        source = {"rest": stored.unassigned, "path": str(model_path)}
        deferred = {part: waiting(part) for part in ("vae", *self.tokenizer_places)}
        components = ModelComponents(
            denoiser, None, {}, self._tokenizers(model_path), source, deferred, fill_denoiser=fill
        )
        return components if deferring else components.read_all()

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        """Return the whole model under the single file's names, in its present dtypes."""
        components.read_vae()
        components.read_encoders()
        to_single = self.checkpoints.single.to_single
        out = self.other_tensors(components)
        out |= to_single("denoiser", components.denoiser.state_dict())
        out |= to_single("vae", components.vae.state_dict()) if components.vae is not None else {}
        for part, encoder in components.encoders.items():
            out |= to_single(part, clip.clip_tensors(encoder))
        return {name: tensor.contiguous() for name, tensor in out.items()}

    def write_folder(self, components: ModelComponents, place: Path, put: unet_folder.Put) -> None:
        """Write the whole model as a diffusers folder; `put(path, tensors)` writes a file of weights."""
        components.read_vae()
        components.read_encoders()
        objective = self.config.model.v_parameterization, self.config.noise.zero_terminal_snr
        unet_folder.write_model_folder(self.folder, components, place, put, objective)

    # ---- images and captions

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> raw samples of the VAE's posterior, float32 [B, 4, H/8, W/8].

        The VAE computes in its own dtype, without autocast; the sample is drawn in float32.
        """
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
            posterior = autoencoder.encode(components.vae, pixels)
            return type(posterior)(posterior.parameters.float()).sample(generator)

    @property
    def chunks(self) -> int:
        return clip.count_chunks(self.config.model.max_token_length)

    @property
    def caption_limit(self) -> CaptionLimit:
        """The limit of all text encoders: 75 tokens for each chunk."""
        tokens, more = 75 * self.chunks, "max_token_length = 225"
        count = emphasis.count_weighted_tokens if self.config.model.weighted_captions else count_caption_tokens
        return CaptionLimit("clip_l", tokens, more if tokens < 225 else "", count)

    def tokenizers_of_captions(self) -> tokenizers.Tokenizers:
        return self._tokenizers(self.config.model.pretrained_model_name_or_path)

    def train_text_length(self, components: ModelComponents, captions: Collection[str]) -> int | None:
        return None  # all of it, as the U-Net attends to the padding, too

    def text(
        self, components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Captions -> the text cache's arrays; hidden states are [B, L, C], where L is 77, 152 or 227."""
        weighted = self.config.model.weighted_captions
        return self.encode_captions(components, captions, encoders, self.chunks, weighted)

    # ---- a step

    def noised(self, latents: Tensor, generator: torch.Generator, timesteps: Tensor | None = None) -> NoisedBatch:
        return self.objective.noised(latents, generator, timesteps)

    @property
    def validation_timesteps(self) -> list[int]:
        """Four timesteps between min_timestep and max_timestep: 200, 400, 600, 800."""
        noise = self.config.noise
        low, high = noise.min_timestep or 0, 1000 if noise.max_timestep is None else noise.max_timestep
        return [low + (high - low) * i // 5 for i in range(1, 5)]

    def predict(
        self,
        denoiser: nn.Module,
        noised: NoisedBatch,
        text: dict[str, Tensor],
        sizes: Tensor,
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the U-Net's output, float32 [B, 4, h, w]. `sizes` [B, 6]: original h w, crop top left, target h w."""
        dtype = compute_dtype(denoiser, noised.latents.device.type)
        context, added = self.unet_inputs(text, dtype, sizes, controls)
        latents = noised.latents.to(dtype)
        output = denoiser(latents, noised.timesteps, context, added_cond_kwargs=added, return_dict=False)
        return output[0].float()

    def resolution_level(self, path: str) -> int:
        """Return log2 of the downsampling of the latents at a block of the U-Net."""
        side, _, below = path.partition(".")
        lowest, number = len(self.layout.attention) - 1, below.partition(".")[0]
        if side == "down_blocks":
            return int(number)
        return lowest - int(number) if side == "up_blocks" else lowest

    def execution_key(self, path: str) -> tuple[int, ...]:
        """Return the sort key by execution: down, middle, up; within a level each resnet before its attention."""
        side, *below = path.split(".")
        if side not in SIDES:
            return (len(SIDES),) if side.startswith("conv_") and side != "conv_in" else (-1,)
        level, (kind, number, *_) = (0, below) if side == "mid_block" else (int(below[0]), below[1:])
        return SIDES.index(side), level, kind.endswith("samplers"), int(number), kind != "resnets"

    def swap_plan(self, number: int) -> dict[str, int]:
        """Swap transformer blocks only, which hold most of the weights that one can swap."""
        return {"BasicTransformerBlock": number}

    def sampler(self, components: ModelComponents) -> "Sampler":
        """Return the sampler that generates images with these networks."""
        from library.families.shared.unet_sampler import UnetSampler  # imported late, as it loads diffusers

        return UnetSampler(self, components)
