"""SDXL as a family: loading, encoding of images and captions, and the prediction of a training step."""

import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError, Problem
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
from library.families.sdxl import checkpoint, conditions, emphasis, folder, keys, model
from library.families.sdxl.facts import FACTS
from library.families.sdxl.network_args import block_number
from library.families.sdxl.options import SdxlControlLLLite, SdxlLora, SdxlTextualInversion, SdxlTrain
from library.families.shared import added_words, autoencoder, clip, hub, tokenizers, weights
from library.objectives.base import NoisedBatch
from library.objectives.diffusion import Diffusion

if TYPE_CHECKING:
    from library.families.base import Family
    from library.families.shared.sampler import Sampler

SIDES = ("down_blocks", "mid_block", "up_blocks")  # of the U-Net, in the order in which they run

CONTROLLED = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q")  # layers whose input LLLite changes


class SdxlFamily:
    """Stable Diffusion XL: a U-Net, two CLIP text encoders and a VAE. Holds the run's config."""

    name = "sdxl"
    grid = 32
    block_classes = ("BasicTransformerBlock", "ResnetBlock2D")
    block_chain = BlockChain(("down_blocks", "mid_block", "up_blocks"), is_unet=True, max_skipped=1)
    adapter_targets = ("Transformer2DModel",)
    text_adapter_targets = clip.CLIP_LAYER_CLASSES
    architecture = FACTS.architecture
    base_model_version = FACTS.base_model_version
    # Tokens of the image; height and width of its features.
    block_inputs = {
        "BasicTransformerBlock": BlockInputs(streams=(0,), dynamic=((0, 1),)),
        "ResnetBlock2D": BlockInputs(streams=(0,), dynamic=((0, 2), (0, 3))),
    }
    # Weights that read the text are used for few tokens, hence `used` below 1.
    block_costs = {"BasicTransformerBlock": BlockCost("transformer_blocks", activations=36, used=0.85)}
    utilization = {False: 0.13, True: 0.195}  # much of the U-Net's time is not spent in matrix products
    patch_size = 1
    sample_defaults = {"negative_prompt": "", "width": 512, "height": 512, "sample_steps": 30, "scale": 7.5}
    sample_multiple = 8
    latent_cache = LatentCache(suffix="_sdxl.npz", keyed_by_size=False)
    text_cache = TextCache(
        suffix="_te_outputs.npz",
        keys=("hidden_state1", "hidden_state2", "pool2"),
        options=("weighted_captions",),
    )

    def __init__(self, config: SdxlLora | SdxlTrain | SdxlTextualInversion | SdxlControlLLLite):
        self.config = config
        self.layout = keys.Layout()
        self.objective = Diffusion(config.noise, config.loss, config.model.v_parameterization, model.SCALE)

    @property
    def token(self) -> str | None:
        return self.config.hub.huggingface_token

    def problems(self) -> Iterator[Problem]:
        """Yield the problems of this run's files; read headers only."""
        options = self.config.model
        name, vae = options.pretrained_model_name_or_path or "", options.vae
        problems = []
        if problem := hub.missing_model(f"--{checkpoint.MODEL_OPTION}", name, checkpoint.WANTED):
            problems = [problem]
        elif Path(name).exists():
            problems = list(checkpoint.find_base_model_problems(Path(name), vae))
        else:
            choose = functools.partial(model.wanted_files, half=False)
            problems = [
                p for p in [hub.unreachable_model(f"--{checkpoint.MODEL_OPTION}", name, choose, self.token)] if p
            ]
        yield from problems
        if vae:
            yield from checkpoint.problems_of_vae(vae, self.token)
        if problems:
            return  # tokenizers are looked for beside a valid model
        if Path(name).exists():
            yield from self.config.compile.beyond(checkpoint.blocks_of(Path(name)))
        try:
            caption_tokenizers = self.tokenizers_of_captions()
            if isinstance(self.config, SdxlTextualInversion):
                yield from added_words.find_word_problems(caption_tokenizers, self.config.embedding.words)
        except ConfigError as e:
            yield from (problem.replaced(topic="model") for problem in e.problems)

    def notes(self) -> Iterator[Problem]:
        """Yield warnings about settings that rarely do what was intended."""
        config = self.config
        half = config.precision.mixed_precision == "fp16" and not config.model.no_half_vae
        if half and not config.model.vae:
            yield Problem(
                "mixed_precision",
                "= fp16: the VAE of SDXL overflows in fp16, and its images are black (NaN); add "
                "no_half_vae, give a vae that was made for fp16, or use bf16",
            )

    def _tokenizers(self, model_path: str | Path | None) -> tokenizers.Tokenizers:
        """Return the tokenizers of a model, by its path or Hugging Face id. Raises ConfigError if one is missing."""
        folders_and_names: dict[str, tuple[Path, str]] = {}
        for part, (name, subfolder) in conditions.TOKENIZERS.items():
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
        with weights.shapes_only():
            stored = model.open_checkpoint(model_path, half=False, mmap=True, vae=self.config.model.vae)
            shapes = {part: {n: tuple(t.shape) for n, t in read().items()} for part, read in stored.parts.items()}
            shapes["denoiser"] = stored.shapes
        self.layout = keys.Layout.of(shapes["denoiser"])
        return shapes

    def load(self, dtype: torch.dtype, frozen: torch.dtype | None = None, deferring: bool = False) -> ModelComponents:
        """Load all networks to the CPU, the trained ones in `dtype`. Raises ConfigError.

        Frozen text encoders and the VAE are in `frozen`, if that is given, but the VAE in float32 with no_half_vae.
        With `deferring` they are left in `deferred`.
        """
        options, half = self.config.model, dtype == torch.float16
        mmap = not options.disable_mmap_load_safetensors
        choose = functools.partial(model.wanted_files, half=half)
        model_path = hub.local(
            options.pretrained_model_name_or_path or "", f"--{checkpoint.MODEL_OPTION}", choose, self.token
        )
        stored = model.open_checkpoint(model_path, half, mmap, options.vae)
        place = hub.local(options.vae, "--vae", checkpoint.vae_files, self.token) if options.vae else None
        # A fine-tune saves the VAE, too, so it is read now: its file could be deleted meanwhile.
        vae = functools.partial(model.read_vae, place, half, mmap) if place else None
        if vae:
            stored.parts["vae"] = vae if deferring and self.config.adapters else functools.partial(dict, vae())
        self.layout = keys.Layout.of(stored.shapes)
        frozen = frozen or dtype
        text = dtype if self.config.trains_whole_encoders else frozen
        kinds = {"vae": torch.float32 if options.no_half_vae else frozen, "clip_l": text, "clip_g": text}
        keep_fp8 = self.config.adapters and self.config.precision.few_bits
        denoiser, fill = model.open_unet(stored, dtype, keep_fp8)

        def read(part: str) -> nn.Module:
            return model.build_network(stored, part, kinds[part])

        def waiting(part: str) -> DeferredNetwork:
            network_path = place if place and part == "vae" else model_path
            files = (
                weights.files(network_path) if network_path.is_file() else sorted(network_path.rglob("*.safetensors"))
            )
            return DeferredNetwork(functools.partial(read, part), tuple(files), f"sdxl {part} {kinds[part]} {half}")

        source = {"rest": stored.unassigned, "path": str(model_path)}
        deferred = {part: waiting(part) for part in ("vae", *conditions.TOKENIZERS)}
        components = ModelComponents(
            denoiser, None, {}, self._tokenizers(model_path), source, deferred, fill_denoiser=fill
        )
        if not deferring:
            components.read_denoiser()
            components.read_vae()
            components.read_encoders()
        return components

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> raw samples of the VAE's posterior, float32 [B, 4, H/8, W/8].

        The VAE computes in its own dtype, without autocast; the sample is drawn in float32.
        """
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
            posterior = autoencoder.encode(components.vae, pixels)
            return type(posterior)(posterior.parameters.float()).sample(generator)

    @property
    def text_lengths(self) -> dict[str, int]:
        chunks = clip.chunks_of(self.config.model.max_token_length)
        return dict.fromkeys(("hidden_state1", "hidden_state2"), 75 * chunks + 2)

    @property
    def caption_limit(self) -> CaptionLimit:
        """The limit of both text encoders: 75 tokens for each chunk."""
        options = self.config.model
        tokens, more = 75 * clip.chunks_of(options.max_token_length), "max_token_length = 225"
        count = emphasis.count_weighted_tokens if options.weighted_captions else count_caption_tokens
        return CaptionLimit("clip_l", tokens, more if tokens < 225 else "", count)

    def tokenizers_of_captions(self) -> tokenizers.Tokenizers:
        return self._tokenizers(self.config.model.pretrained_model_name_or_path)

    def train_text_length(self, components: ModelComponents, captions: Collection[str]) -> int | None:
        return None  # all of it, as SDXL attends to the padding, too

    def text(
        self, components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Captions -> hidden_state1 [B, L, 768], hidden_state2 [B, L, 1280], pool2 [B, 1280]; L is 77, 152 or 227."""
        chunks = clip.chunks_of(self.config.model.max_token_length)
        return conditions.encode_with_clips(components, captions, encoders, chunks, self.config.model.weighted_captions)

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
        context = torch.cat([text["hidden_state1"], text["hidden_state2"]], dim=-1).to(dtype)
        # time_ids stay float32: diffusers turns them into [cos, sin] of 6 x 256 and puts them behind the pooled text.
        added = {"text_embeds": text["pool2"].to(dtype), "time_ids": sizes}
        if controls:  # one, which LLLite reads
            added["control"] = controls[0].to(dtype)
        output = denoiser(
            noised.latents.to(dtype), noised.timesteps, context, added_cond_kwargs=added, return_dict=False
        )
        return output[0].float()

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        """Return the whole model under the single file's names, in its present dtypes."""
        components.read_vae()
        components.read_encoders()
        out = dict(components.source.get("rest", {}))
        out.setdefault(keys.LOGIT_SCALE, torch.tensor(keys.FULL_LOGIT_SCALE))
        out |= keys.sdxl_part_to_single("denoiser", components.denoiser.state_dict())
        out |= keys.sdxl_part_to_single("vae", components.vae.state_dict()) if components.vae is not None else {}
        for part, encoder in components.encoders.items():
            out |= keys.sdxl_part_to_single(part, clip.clip_tensors(encoder))
        return {name: tensor.contiguous() for name, tensor in out.items()}

    def write_folder(self, components: ModelComponents, place: Path, put: folder.Put) -> None:
        """Write the whole model as a diffusers folder; `put(path, tensors)` writes a file of weights."""
        components.read_vae()
        components.read_encoders()
        noise, model_options = self.config.noise, self.config.model
        folder.write_model_folder(components, place, put, model_options.v_parameterization, noise.zero_terminal_snr)

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

    def controlled_layers(self, denoiser: nn.Module) -> Iterator[tuple[str, int]]:
        """Yield self-attention's queries, keys and values and cross-attention's queries in the down and mid blocks."""
        for path, _ in denoiser.named_modules():
            if path.startswith(SIDES[:2]) and path.endswith(CONTROLLED):
                yield path, self.resolution_level(path)

    def control_name(self, path: str) -> str:
        return f"lllite_{self.adapter_name('denoiser', path).removeprefix('lora_')}"

    def swap_plan(self, number: int) -> dict[str, int]:
        """Swap transformer blocks only, which hold three quarters of the weights."""
        return {"BasicTransformerBlock": number}

    def sampler(self, components: ModelComponents) -> "Sampler":
        """Return the sampler that generates images with these networks."""
        from library.families.sdxl.sampler import SdxlSampler  # imported late, as it loads diffusers

        return SdxlSampler(self, components)

    rate_names = tuple(f"block{number}" for number in range(23))

    def learning_rate_block(self, path: str) -> int:
        return block_number(self.adapter_name("denoiser", path.rpartition(".")[0]))

    def adapter_name(self, part: str, path: str) -> str:
        return keys.adapter_name(part, path, self.layout)


def compute_dtype(denoiser: nn.Module, device: str) -> torch.dtype:
    """Return the dtype that the denoiser computes in: autocast's if that is on, else its weights'."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    unet: Any = getattr(denoiser, "module", denoiser)
    return unet.conv_in.weight.dtype


if TYPE_CHECKING:
    _complete: type[Family] = SdxlFamily  # the type checker names what is missing
