"""Qwen-Image as a family: how its files become networks, captions become conditions, latents become a training step."""

import contextlib
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from library.config.problems import ConfigError, Problem
from library.families.base import BlockCost, BlockInputs, DeferredNetwork, LatentCache, ModelComponents, TextCache
from library.families.facts import Shapes
from library.families.qwen_image import checkpoint, text_encoder
from library.families.qwen_image.facts import FACTS
from library.families.qwen_image.options import QwenLora, QwenTrain
from library.families.qwen_image.sampler import QwenSampler
from library.families.qwen_image.vae import normalised
from library.families.shared import packing, part_files, tokenizers, weights
from library.objectives import flow
from library.objectives.base import NoisedBatch

if TYPE_CHECKING:
    from library.families.base import Family
    from library.families.shared.sampler import Sampler

BLOCK = "QwenImageTransformerBlock"
FILES = checkpoint.FILES


class QwenFamily:
    """Qwen-Image: a transformer, the language model of Qwen2.5-VL and a VAE. Holds the run's config."""

    name = "qwen_image"
    block_classes = (BLOCK,)
    adapter_targets = (BLOCK,)
    latent_cache = LatentCache(suffix="_qi.safetensors", keyed_by_size=True, architecture="qwen_image")
    text_cache = TextCache(
        suffix="_qi_te.safetensors",
        keys=("vl_embed", "vl_mask"),
        mask="vl_mask",
        architecture="qwen_image",
        names={"vl_embed": "varlen_vl_embed"},
    )
    # The number of tokens varies: of img, txt, pe and mask.
    block_inputs = {BLOCK: BlockInputs(streams=(0, 1), dynamic=((0, 1), (1, 1), (3, 1), (4, 1)))}
    # A third of a block is modulation, which is asked once for an image; of the rest one half is for the words.
    block_costs = {BLOCK: BlockCost("transformer_blocks", activations=30, used=0.333)}
    utilization = {False: 0.3, True: 0.42}
    patch_size = 2
    sample_defaults = {"negative_prompt": " ", "width": 1024, "height": 1024, "sample_steps": 25, "scale": 4.0}
    sample_multiple = 16
    validation_timesteps = (0.2, 0.4, 0.6, 0.8)
    architecture = FACTS.architecture
    base_model_version = FACTS.base_model_version
    text_lengths: Mapping[str, int] = MappingProxyType(
        {"vl_embed": text_encoder.LONGEST, "vl_mask": text_encoder.LONGEST}
    )

    def __init__(self, config: QwenLora | QwenTrain):
        self.config = config
        self.grid: int = type(config).grid

    # ---- files

    def problems(self) -> Iterator[Problem]:
        """What is missing or wrong among the model's files, each in a sentence; reads headers only."""
        wrong = list(checkpoint.problems(self.config))
        yield from wrong
        options = {checkpoint.PARTS[part].option for part in ("denoiser", "text_encoder")}
        if not FILES.named(self.config, "text_encoder") or any(one.option in options for one in wrong):
            return  # the tokenizer is looked for beside the networks, so it is asked for once these are found
        try:
            self._tokenizer_folder()
        except ConfigError as e:
            yield from (problem.replaced(topic="model") for problem in e.problems)

    def notes(self) -> Iterator[Problem]:
        """Nothing depends on the very model."""
        return iter(())

    def _tokenizer_folder(self) -> Path:
        options = self.config.model
        base = options.pretrained_model_name_or_path
        whole = part_files.whole_model(Path(base)) if base and Path(base).exists() else None
        for place in (options.text_encoder, whole or base, options.vae):
            for folder in tokenizers.places(tokenizers.QWEN_VL, place, "tokenizer", None):
                if tokenizers.holds(folder, tokenizers.kind(tokenizers.QWEN_VL)):
                    return folder
        token, kept = self.config.hub.huggingface_token, options.tokenizer_cache_dir
        return tokenizers.find(tokenizers.QWEN_VL, whole or base, "tokenizer", kept, token)

    def stored_shapes(self) -> dict[str, Shapes]:
        """Shapes of the parts whose files are on this machine."""
        found: dict[str, Shapes] = {}
        for part in checkpoint.PARTS:
            with contextlib.suppress(ConfigError):
                if path := FILES.present(self.config, part):
                    found[part] = checkpoint.plain_shapes(part_files.read_entries(path), part)
        return found

    def load(self, dtype: torch.dtype, frozen: torch.dtype | None = None, deferring: bool = False) -> ModelComponents:
        """All three networks on the CPU, in sizes that their files tell. Raises ConfigError.

        The transformer is in `dtype`, the other two in `frozen`, if that is given. With `deferring` these wait in
        `deferred`, and their files are not opened. The VAE is in float32 in place of float16, whose range it exceeds.
        """
        config, mmap = self.config, not self.config.model.disable_mmap_load_safetensors
        paths = {part: FILES.located(config, part) for part in checkpoint.PARTS}
        keep_8_bits = config.adapters and config.precision.fp8_denoiser
        denoiser, fill = checkpoint.open_denoiser(paths["denoiser"], dtype, keep_8_bits, mmap)
        frozen = frozen or dtype
        kind = torch.float32 if frozen == torch.float16 else frozen
        readers = {
            "vae": functools.partial(checkpoint.load_vae, paths["vae"], kind, mmap),
            "text_encoder": functools.partial(checkpoint.load_text_encoder, paths["text_encoder"], frozen, mmap),
        }
        deferred = {
            part: DeferredNetwork(
                read, tuple(weights.files(paths[part])), f"{self.name} {part} {kind if part == 'vae' else frozen}"
            )
            for part, read in readers.items()
        }
        words = tokenizers.Tokenizers({"text_encoder": (self._tokenizer_folder(), tokenizers.QWEN_VL)})
        source = {part: str(path) for part, path in paths.items()}
        parts = ModelComponents(denoiser, None, {}, words, source, deferred, fill_denoiser=fill)
        if not deferring:
            parts.read_denoiser()
            parts.read_vae()
            parts.read_encoders()
        return parts

    def export(self, parts: ModelComponents) -> dict[str, Tensor]:
        """The denoiser under the keys of a single file (without prefix); nothing else is saved with it."""
        return {name.replace("_orig_mod.", ""): tensor for name, tensor in parts.denoiser.state_dict().items()}

    def adapter_name(self, part: str, path: str) -> str:
        """("denoiser", "transformer_blocks.0.attn.to_q") -> "lora_unet_transformer_blocks_0_attn_to_q"."""
        return f"{'lora_unet' if part == 'denoiser' else 'lora_te'}_{path.replace('.', '_')}"

    def resolution_level(self, path: str) -> int:
        """All blocks see the same tokens."""
        return 0

    def execution_key(self, path: str) -> tuple[int, ...]:
        """The conditioning and the inputs come before the blocks, and the last norm behind them, as in the tree."""
        return ()

    def swap_plan(self, number: int) -> dict[str, int]:
        """So many of the blocks."""
        return {BLOCK: number}

    # ---- a training step

    def latents(self, parts: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised means, float32 [B, 16, H / 8, W / 8]. Nothing is drawn."""
        vae: Any = parts.vae  # an ImageVAE
        first = next(vae.parameters())
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
            return normalised(vae.encode(pixels.to(first.device, first.dtype)))

    def train_text_length(self, parts: ModelComponents, captions: Collection[str]) -> int | None:
        """As long as the longest of these captions. Captions that change with each step have a length of their own."""
        if not self.config.cache.text:
            return None
        return text_encoder.longest(parts.tokenizers["text_encoder"], captions)

    def text(
        self, parts: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Captions -> vl_embed [B, L, 3584], zero behind each caption, and vl_mask [B, L] with ones on it."""
        wanted = tuple(parts.encoders) if encoders is None else encoders
        if "text_encoder" not in wanted:
            return {}
        states, mask = text_encoder.encode(
            parts.encoders["text_encoder"], parts.tokenizers["text_encoder"], list(captions)
        )
        return {"vl_embed": states, "vl_mask": mask}

    def noised(self, latents: Tensor, generator: torch.Generator, timesteps: Tensor | None = None) -> NoisedBatch:
        """Cached latents -> one training step, see flow.noised. `timesteps` in 0..1 replace drawn ones."""
        return flow.noised(latents, self.config.noise, self.config.loss, generator, timesteps)

    def predict(
        self,
        denoiser: nn.Module,
        noised: NoisedBatch,
        text: dict[str, Tensor],
        sizes: Tensor,
        controls: Sequence[Tensor] = (),
    ) -> Tensor:
        """The denoiser's answer in the terms of the target, float32 [B, 16, h, w]. `sizes` say nothing to it."""
        latents = noised.latents
        size = latents.shape[-2] // 2, latents.shape[-1] // 2
        answer = denoiser(packing.pack(latents), size, text["vl_embed"], text["vl_mask"], noised.timesteps)
        velocity = packing.unpack(answer.float(), *size)
        return flow.prediction(velocity, latents, noised.sigmas, self.config.noise.model_prediction_type)

    def sampler(self, parts: ModelComponents) -> "Sampler":
        """What draws sample images with these networks."""
        return QwenSampler(self, parts)


if TYPE_CHECKING:
    _complete: type[Family] = QwenFamily  # the type checker names what is missing
