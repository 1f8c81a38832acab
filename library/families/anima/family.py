"""Anima as a family: loading, encoding of images and captions, and the prediction of a training step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.families.anima import adapter
from library.families.anima.checkpoint import MAX_TOKENS, anima_checkpoint
from library.families.anima.facts import FACTS
from library.families.anima.model import DENOISER_BLOCK
from library.families.anima.options import AnimaLora, AnimaTrain
from library.families.anima.sampler import AnimaSampler
from library.families.base import BlockChain, BlockCost, BlockInputs, Family, LatentCache, ModelComponents, TextCache
from library.families.capabilities import CaptionLimit
from library.families.facts import Shapes
from library.families.shared import language_model, packing, qwen_vae, t5, tokenizers
from library.families.shared.one_encoder import ENCODER, OneEncoderFamily
from library.objectives.base import NoisedBatch

TARGET = "t5"  # the tokenizer whose ids the adapter reads
TEXT_INPUTS = ("prompt_embeds", "attn_mask", "t5_input_ids", "t5_attn_mask")  # in the order of the denoiser's arguments
# Parts of paths with separate learning rates. The first that matches applies: all layers of the adapter have one rate.
RATE_GROUPS = ("llm_adapter.", ".self_attn.", ".cross_attn.", ".mlp.", ".adaln_modulation")
EMPTY_CAPTION = 1  # T5's id of an empty caption, EOS; also its value in the mask


def without_caption(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arrays (numpy) of an empty caption, from those of a cached one."""
    empty = {name: array * 0 for name, array in arrays.items()}
    for name in ("t5_input_ids", "t5_attn_mask"):
        empty[name][0] = EMPTY_CAPTION
    return empty


class AnimaFamily(OneEncoderFamily):
    """Anima: a transformer with a text adapter, Qwen3-0.6B, T5's tokenizer and Qwen-Image's VAE."""

    config: AnimaLora | AnimaTrain
    name = "anima"
    sampler_class = AnimaSampler
    swapped_class = DENOISER_BLOCK
    block_classes = (adapter.ADAPTER_BLOCK, DENOISER_BLOCK)
    block_chain = BlockChain(("blocks",))
    adapter_targets = (adapter.ADAPTER_BLOCK, DENOISER_BLOCK, "PatchEmbed", "TimestepEmbedding", "FinalLayer")
    text_adapter_targets = language_model.QWEN3_LAYERS
    latent_cache = LatentCache(suffix="_anima.npz", keyed_by_size=True)
    text_cache = TextCache(
        suffix="_anima_te.npz", keys=TEXT_INPUTS, without_caption=without_caption, rate="caption_dropout_rate"
    )
    # The number of image tokens varies (x and pe), that of text tokens does not.
    block_inputs = {
        adapter.ADAPTER_BLOCK: BlockInputs(streams=(0,), dynamic=()),
        DENOISER_BLOCK: BlockInputs(streams=(0,), dynamic=((0, 1), (4, 1))),
    }
    # A fifth of a block is modulation, computed once per image; text is a small part of the tokens.
    block_costs = {
        adapter.ADAPTER_BLOCK: BlockCost("llm_adapter.blocks", activations=4, used=0.1),
        DENOISER_BLOCK: BlockCost("blocks", activations=30, used=0.7),
    }
    sample_defaults = {"negative_prompt": "", "width": 512, "height": 512, "sample_steps": 30, "scale": 7.5}
    architecture = FACTS.architecture
    base_model_version = FACTS.base_model_version
    rate_names = ("base", "llm_adapter", "self_attn", "cross_attn", "mlp", "mod")

    def __init__(self, config: AnimaLora | AnimaTrain):
        super().__init__(config)
        self.checkpoint = anima_checkpoint(config)

    # ---- files

    def tokenizer_folders(self) -> dict[str, tuple[Path, str]]:
        """Return the folders of the tokenizers of Qwen3 and T5."""
        folders = super().tokenizer_folders()
        named_folder, name = self.config.model.t5_tokenizer_path, tokenizers.T5_XXL
        folder = tokenizers.tokenizer_of_option(named_folder, name, "t5_tokenizer_path") if named_folder else None
        return folders | {TARGET: (folder or self.tokenizer_folder(name, "t5_tokenizer"), name)}

    def stored_shapes(self) -> dict[str, Shapes]:
        """Return the shapes of the parts whose files are on this machine; the adapter is part of the denoiser."""
        shapes = super().stored_shapes()
        if "denoiser" in shapes:
            shapes["denoiser"] = {**shapes["denoiser"], **shapes.pop("llm_adapter", {})}
        return shapes

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        return {f"net.{name}": tensor for name, tensor in super().export(components).items()}

    def learning_rate_block(self, path: str) -> int:
        return next((number for number, part in enumerate(RATE_GROUPS, 1) if part in f".{path}"), 0)

    # ---- captions

    @property
    def caption_limit(self) -> CaptionLimit:
        """The limit of T5 tokens, without the end mark; Qwen3 needs fewer for the same words."""
        length = self.config.model.t5_max_token_length
        more = f"t5_max_token_length = {MAX_TOKENS}" if length < MAX_TOKENS else ""
        return CaptionLimit(TARGET, length - 1, more)

    @property
    def text_lengths(self) -> Mapping[str, int]:
        """The lengths in tokens of the arrays in the text cache."""
        options = self.config.model
        lengths = (options.qwen3_max_token_length,) * 2 + (options.t5_max_token_length,) * 2
        return dict(zip(TEXT_INPUTS, lengths, strict=True))

    def text(
        self, components: ModelComponents, captions: Sequence[str], encoders: tuple[str, ...] | None = None
    ) -> dict[str, Tensor]:
        """Captions -> prompt_embeds [B, L, 1024] of Qwen3, zero after each caption, with attn_mask [B, L]; t5_input_ids
        and t5_attn_mask [B, T]. Gradients flow if enabled.
        """
        if ENCODER not in (tuple(components.encoders) if encoders is None else encoders):
            return {}
        states, mask = self.checkpoint.encode(components.encoders[ENCODER], components.tokenizers[ENCODER], captions)
        target = t5.t5_tokens(components.tokenizers[TARGET], captions, self.config.model.t5_max_token_length)
        inputs = (states, mask, *(tensor.to(torch.int32).to(states.device, non_blocking=True) for tensor in target))
        return dict(zip(TEXT_INPUTS, inputs, strict=True))

    # ---- a training step

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised means, float32 [B, 16, H / 8, W / 8]; not sampled."""
        return qwen_vae.latents(components.vae, pixels)

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
        size = packing.token_grid(noised.latents)
        output = denoiser(packing.pack(noised.latents), size, *(text[name] for name in TEXT_INPUTS), noised.timesteps)
        # Inputs of a token are ordered by channel, outputs by row and column.
        return packing.unpack_channels_last(output.float(), *size)


_complete: type[Family] = AnimaFamily  # the type checker reports missing members
