"""FLUX.1 as a family: loading, encoding of images and captions, and the prediction of a training step."""

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.config import ineffective
from library.config.problems import ConfigError, Problem
from library.families.base import (
    BlockChain,
    BlockCost,
    BlockInputs,
    DeferredNetwork,
    Family,
    LatentCache,
    ModelComponents,
    TextCache,
)
from library.families.capabilities import BlockModulation, CaptionLimit
from library.families.facts import Shapes
from library.families.flux import checkpoint, control_tokens, variants
from library.families.flux.facts import FACTS
from library.families.flux.model import APPROXIMATOR, Sizes
from library.families.flux.options import FluxLora, FluxTrain
from library.families.flux.sampler import FluxSampler
from library.families.shared import autoencoder, clip, packing, part_files, t5, tokenizers, weights
from library.families.shared.assistants import assistant_fix, idle_assistant, lacks_assistant, takes_assistant
from library.families.shared.transformer_family import TransformerFamily
from library.objectives.base import NoisedBatch

PART_PREFIXES = {"denoiser": "lora_unet", "clip_l": "lora_te1", "t5xxl": "lora_te3"}
T5_STEP = 64  # a shortened text length is a multiple of this many tokens
T5_LENGTH = {False: 512, True: 256}  # training lengths in tokens; True: schnell
POOLED = 768  # width of CLIP-L's vector in sd-scripts' caches; zeros if the model does not use it

FLUX_MODULATION: Mapping[str, BlockModulation] = {
    "DoubleStreamBlock": BlockModulation(("img_mod.lin", "txt_mod.lin"), argument=2),
    "SingleStreamBlock": BlockModulation(("modulation.lin",), argument=1),
}


class FluxFamily(TransformerFamily):
    """FLUX.1 and its relatives: a transformer, CLIP-L (not Chroma), T5 and an autoencoder."""

    name = "flux"
    sampler_class = FluxSampler
    block_classes = ("DoubleStreamBlock", "SingleStreamBlock")
    block_chain = BlockChain(("double_blocks", "single_blocks"))
    adapter_targets = ("DoubleStreamBlock", "SingleStreamBlock")
    text_adapter_targets = (*clip.CLIP_LAYER_CLASSES, *t5.T5_LAYER_CLASSES)
    latent_cache = LatentCache(suffix="_flux.npz", keyed_by_size=True)
    text_cache = TextCache(
        suffix="_flux_te.npz",
        keys=("l_pooled", "t5_out", "txt_ids", "t5_attn_mask"),
        options=("apply_t5_attn_mask",),
    )
    # Dimensions with varying numbers of tokens: img, txt, pe and mask; joint, pe and mask.
    block_inputs = {
        "DoubleStreamBlock": BlockInputs(streams=(0, 1), dynamic=((0, 1), (1, 1), (3, 1), (4, 1))),
        "SingleStreamBlock": BlockInputs(streams=(0,), dynamic=((0, 1), (2, 1), (3, 1))),
    }
    scale, shift = autoencoder.FLUX

    def __init__(self, config: FluxLora | FluxTrain):
        super().__init__(config)
        self.variant = config.model.variant
        self.files = checkpoint.PART_FILES[config.model.model_type]
        # Text encoder -> its tokenizer: id on the hub, and folder in a diffusers model.
        places = {"clip_l": (tokenizers.CLIP_L, "tokenizer"), "t5xxl": (tokenizers.T5_XXL, self.variant.tokenizer)}
        self.tokenizers = {name: places[name] for name in self.variant.encoders}
        self.modulation: Mapping[str, BlockModulation] = FLUX_MODULATION if config.model.has_modulation else {}
        # Modulation runs once per image, and a double block has one half for the image tokens and one for the text
        # tokens.
        double, single = self.variant.used
        self.block_costs: Mapping[str, BlockCost] = {
            "DoubleStreamBlock": BlockCost("double_blocks", activations=30, used=double),
            "SingleStreamBlock": BlockCost("single_blocks", activations=25, used=single),
        }
        if self.variant.musubi:
            short, name = self.variant.musubi
            keys = ("l_pooled", "t5_out", *(["t5_attn_mask"] if config.model.apply_t5_attn_mask else []))
            self.latent_cache = LatentCache(f"_{short}.safetensors", True, name, numbers_controls=False)
            self.text_cache = TextCache(
                f"_{short}_te.safetensors",
                keys,
                self.text_cache.options,
                architecture=name,
                names={"t5_out": "t5_vec", "l_pooled": "clip_l_pooler"},
            )
        self.positions = packing.Positions()
        self.depth = (19, 38)  # double and single blocks; load() reads the model's own

    # ---- files

    @cached_property
    def is_schnell(self) -> bool:
        """Whether the model was distilled without guidance, read from its header; `load` sets it, too."""
        path = self.files.located(self.config, "denoiser")
        plain = checkpoint.flux_shapes(part_files.read_entries(path), "denoiser")
        return Sizes.of(checkpoint.FLUX_DENOISER.bfl_shapes(plain)).is_schnell

    @property
    def architecture(self) -> str:
        return self.variant.architecture or ("flux-1-schnell" if self.is_schnell else "flux-1-dev")

    @property
    def base_model_version(self) -> str:
        return self.variant.base_model_version

    @property
    def sample_defaults(self) -> Mapping[str, Any]:
        """Defaults of a sample prompt. Krea is recognised by its name, in the path or in the file's title."""
        options, title = self.config.model, ""
        with contextlib.suppress(ConfigError):
            title = checkpoint.title_in_metadata(self.config)
        variant = variants.choose_variant(options.model_type, options.pretrained_model_name_or_path, title)
        return {"negative_prompt": "", "width": 512, "height": 512, **variant.sample_defaults}

    @property
    def text_length(self) -> int:
        return self.config.model.t5xxl_max_token_length or T5_LENGTH[self.is_schnell]

    @property
    def text_lengths(self) -> dict[str, int]:
        of_tokens = (key for key in self.text_cache.keys if key != "l_pooled")
        return dict.fromkeys(of_tokens, self.text_length)

    @property
    def caption_limit(self) -> CaptionLimit:
        """The limit of T5 tokens, without the end mark; CLIP-L reads only the beginning. A model that is not downloaded
        yet counts as not schnell.
        """
        options, default_length = self.config.model, T5_LENGTH[False]
        is_known = options.t5xxl_max_token_length or self.files.present(self.config, "denoiser")
        length = self.text_length if is_known else default_length
        if options.t5xxl_train_length == "256" and length > 256:
            return CaptionLimit("t5xxl", 255, "t5xxl_train_length = max")
        return CaptionLimit(
            "t5xxl", length - 1, "" if length >= default_length else f"t5xxl_max_token_length = {default_length}"
        )

    def tokenizers_of_captions(self) -> tokenizers.Tokenizers:
        folders_and_names = {part: (self._tokenizer_folder(part), name) for part, (name, _) in self.tokenizers.items()}
        return tokenizers.Tokenizers(folders_and_names)

    def train_text_length(self, components: ModelComponents, captions: Collection[str]) -> int | None:
        """Return the number of T5 tokens that a step uses for these captions, by t5xxl_train_length; None for all."""
        train_length = self.config.model.t5xxl_train_length
        if train_length == "max":
            return None
        longest = 256
        if train_length == "longest":
            longest = (
                t5.longest_t5_text(components.tokenizers["t5xxl"], captions, self.text_length)
                + self.variant.padding_seen
            )
        return min(-(-longest // T5_STEP) * T5_STEP, self.text_length)

    def problems(self) -> Iterator[Problem]:
        """Yield problems of the model's files; read headers only."""
        problems = list(checkpoint.find_flux_problems(self.config, self.config.model.model_type))
        yield from problems
        for encoder in self.tokenizers:  # looked for beside the networks, so checked once these are found
            options = (encoder, checkpoint.MODEL_OPTION)
            if not self.files.named(self.config, encoder) or any(problem.option in options for problem in problems):
                continue
            try:
                self._tokenizer_folder(encoder)
            except ConfigError as e:
                yield from (problem.replaced(topic="model") for problem in e.problems)

    def notes(self) -> Iterator[Problem]:
        """Yield options without effect for this model, as far as that is known without downloading it."""
        if not self.files.present(self.config, "denoiser"):
            return
        options, base = self.config.model, self.config.model.pretrained_model_name_or_path
        names = f"{base} {checkpoint.title_in_metadata(self.config)} {part_files.pipeline(base)}".lower()
        if options.model_type in ("flux", "krea") and "kontext" in names:
            yield Problem(
                "model_type",
                "= {model_type} trains without reference images, and this file calls itself Kontext: use kontext to "
                "train with them",
                model_type=options.model_type,
                fix={"model_type": "kontext"},
            )
        if options.model_type == "flux" and re.search(variants.FLEX, names) and not options.bypass_guidance_embedding:
            yield Problem(
                "bypass_guidance_embedding",
                "is off, and this file calls itself Flex.1, which is trained without its guidance embedding: "
                "switch it on",
                fix={"bypass_guidance_embedding": True},
            )
        if self.is_schnell:
            for name, usual in (("guidance_scale", 3.5), ("bypass_guidance_embedding", False)):
                if getattr(options, name) != usual:
                    yield ineffective.remark(name, "FLUX.1 schnell takes no guidance")
        is_undistilled = bool(re.search(variants.UNDISTILLED, names))
        if is_undistilled or not self.variant.guided:
            yield from idle_assistant(self.config, self.variant.title if not is_undistilled else Path(str(base)).name)
        elif self.is_schnell and lacks_assistant(self.config):
            adapter = FACTS.assistant_loras[0]
            yield Problem(
                checkpoint.MODEL_OPTION,
                "is FLUX.1 schnell, which forgets how to generate in few steps if it is trained directly; set "
                "assistant_lora of a LoRA to its training adapter, or train on dev: {adapter}"
                if takes_assistant(self.config)
                else "is FLUX.1 schnell, which forgets how to generate in few steps if it is trained directly; "
                "train on dev",
                adapter=adapter.file,
                also="assistant_lora base_weights",
                fix=assistant_fix(self.config, adapter),
            )

    def _tokenizer_folder(self, encoder: str) -> Path:
        options, (name, subfolder) = self.config.model, self.tokenizers[encoder]
        files = (getattr(options, encoder), options.clip_l, options.t5xxl, options.ae)
        return tokenizers.tokenizer_beside(name, subfolder, self.config, files)

    def stored_shapes(self) -> dict[str, Shapes]:
        """Return the shapes of the parts whose files are on this machine."""
        shapes_by_part: dict[str, Shapes] = {}
        for part in self.files.parts:
            with contextlib.suppress(ConfigError):
                if path := self.files.present(self.config, part):
                    part_shapes = checkpoint.flux_shapes(part_files.read_entries(path), part)
                    shapes_by_part["vae" if part == "ae" else part] = part_shapes
        if "denoiser" in shapes_by_part:
            shapes_by_part["denoiser"] = checkpoint.FLUX_DENOISER.bfl_shapes(shapes_by_part["denoiser"])
            sizes = Sizes.of(shapes_by_part["denoiser"])
            self.depth = (sizes.double_blocks, sizes.single_blocks)
        return shapes_by_part

    def load(self, dtype: torch.dtype, frozen: torch.dtype | None = None, deferring: bool = False) -> ModelComponents:
        """Load all networks on the CPU, in the sizes of their files. Raises ConfigError.

        The transformer is in `dtype`, the others in `frozen`, if given. With `deferring` those stay in `deferred`, and
        their files are not opened.

        With fp8_base 8-bit matrices of the blocks stay 8-bit. The autoencoder is in float32 with no_half_vae, and
        instead of float16, whose range it exceeds.
        """
        config, mmap = self.config, not self.config.model.disable_mmap_load_safetensors
        paths = {part: self.files.located(config, part) for part in self.files.parts}
        keep_8_bits = config.adapters and config.precision.few_bits
        denoiser, fill = checkpoint.FLUX_DENOISER.open(paths["denoiser"], dtype, keep_8_bits, mmap)
        frozen = frozen or dtype
        exact = config.model.float32_vae or frozen == torch.float16
        kind = torch.float32 if exact else frozen
        read = {"clip_l": checkpoint.load_clip_l, "t5xxl": t5.load_t5}
        readers = {"vae": functools.partial(autoencoder.load_autoencoder, paths["ae"], kind, autoencoder.FLUX, mmap)}
        readers |= {part: functools.partial(read[part], paths[part], frozen, mmap) for part in self.variant.encoders}
        files = {part: tuple(weights.files(paths["ae" if part == "vae" else part])) for part in readers}
        deferred = {
            part: DeferredNetwork(read, files[part], f"flux {part} {kind if part == 'vae' else frozen}")
            for part, read in readers.items()
        }
        self.is_schnell = denoiser.sizes.is_schnell
        self.depth = (denoiser.sizes.double_blocks, denoiser.sizes.single_blocks)
        source = {part: str(path) for part, path in paths.items()}
        components = ModelComponents(
            denoiser, None, {}, self.tokenizers_of_captions(), source, deferred, fill_denoiser=fill
        )
        return components if deferring else components.read_all()

    def adapter_name(self, part: str, path: str) -> str:
        path = clip.canonical_clip_path(path) if part == "clip_l" else path
        return f"{PART_PREFIXES[part]}_{path.replace('.', '_')}"

    def is_frozen(self, path: str) -> bool:
        bypassed = self.config.model.bypass_guidance_embedding and path.startswith("guidance_in.")
        return bypassed or path.startswith(f"{APPROXIMATOR}.")

    def swap_plan(self, number: int) -> dict[str, int]:
        """Swap half of the number as double blocks, and for each of the others two single blocks, which are half as
        large.
        """
        double, single = number // 2, 2 * (number - number // 2)
        return {"DoubleStreamBlock": min(double, self.depth[0]), "SingleStreamBlock": min(single, self.depth[1])}

    # ---- a training step

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> scaled and shifted samples, float32 [B, 16, H / 8, W / 8]."""
        return self._encoded(components, pixels, lambda posterior: posterior.sample(generator))

    def control_latents(self, components: ModelComponents, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> scaled and shifted modes, float32 [B, 16, H / 8, W / 8]."""
        return self._encoded(components, pixels, lambda posterior: posterior.mode())

    def _encoded(self, components: ModelComponents, pixels: Tensor, pick: Callable[[Any], Tensor]) -> Tensor:
        with torch.no_grad(), torch.autocast(pixels.device.type, enabled=False):
            return (pick(autoencoder.encode(components.vae, pixels)).float() - self.shift) * self.scale

    def text(
        self, components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Captions -> l_pooled [B, 768] of CLIP-L; t5_out [B, L, 4096], txt_ids [B, L, 3], t5_attn_mask [B, L] of T5.

        With apply_t5_attn_mask T5 ignores padding, too. Gradients flow if enabled. Without CLIP-L l_pooled is zeros, as
        in sd-scripts' caches.
        """
        encoder_names = tuple(components.encoders) if encoders is None else encoders
        out: dict[str, Tensor] = {}
        if "clip_l" in encoder_names:
            model = components.encoders["clip_l"]
            ids = clip.clip_tokens(components.tokenizers["clip_l"], captions)[:, 0]
            ids = ids.to(next(model.parameters()).device, non_blocking=True)
            out["l_pooled"] = model(input_ids=ids).pooler_output
        if "t5xxl" in encoder_names:
            ids, mask = t5.t5_tokens(components.tokenizers["t5xxl"], captions, self.text_length)
            used = mask if self.config.model.apply_t5_attn_mask else None
            out["t5_out"] = t5.encode_t5_ids(components.encoders["t5xxl"], ids, used)
            device = out["t5_out"].device
            out["txt_ids"] = torch.zeros(*ids.shape, 3, device=device)
            out["t5_attn_mask"] = mask.to(device, non_blocking=True)
            if "clip_l" not in self.variant.encoders:
                out["l_pooled"] = torch.zeros(len(ids), POOLED, device=device)
        return {name: tensor for name, tensor in out.items() if name in self.text_cache.keys}

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
        latents, inpaints = noised.latents, self.variant.control_images.inpaints
        height, width = packing.token_grid(latents)
        options, guidance = self.config.model, None
        if not options.bypass_guidance_embedding:
            guidance = torch.full((len(latents),), options.guidance_scale, device=latents.device)
        references = [] if inpaints else [*map(packing.token_grid, controls)]
        output = denoiser(
            img=control_tokens.add_control_tokens(
                packing.pack(latents), control_tokens.packed(controls, inpaints), inpaints
            ),
            timesteps=noised.timesteps,
            guidance=guidance,
            **self.conditions(text, (height, width), latents.device, references),
        )
        # Tokens of reference images follow those of the image.
        return packing.unpack(output[:, : height * width].float(), height, width)

    def conditions(
        self,
        text: dict[str, Tensor],
        size: tuple[int, int],
        device: torch.device,
        references: Sequence[tuple[int, int]] = (),
    ) -> dict[str, Any]:
        """Return text and positions for the denoiser; `size` and `references` are heights and widths in tokens."""
        # Chroma sees one padding token after the words, so its mask is shifted by one.
        mask = text["t5_attn_mask"] if self.config.model.apply_t5_attn_mask else None
        if mask is not None and self.variant.padding_seen:
            mask = torch.nn.functional.pad(mask[:, :-1], (1, 0), value=1)
        return {
            "img_ids": self.positions.image(*size, device, references),
            "txt": text["t5_out"],
            "txt_ids": self.positions.text(text["t5_out"].shape[1], device),
            "y": text["l_pooled"],
            "txt_attention_mask": mask,
        }


_complete: type[Family] = FluxFamily  # the type checker reports missing members
