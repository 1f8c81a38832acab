"""SDXL as a family: its conditions, the control of LLLite, and learning rates by blocks."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from library.config.problems import Problem
from library.families.base import Family, LatentCache, ModelComponents, TextCache
from library.families.sdxl import conditions, keys, model
from library.families.sdxl.network_args import block_number
from library.families.sdxl.options import SdxlControlLLLite, SdxlLora, SdxlTextualInversion, SdxlTrain
from library.families.shared.unet_family import SIDES, UnetFamily

CONTROLLED = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn2.to_q")  # layers whose input LLLite changes


class SdxlFamily(UnetFamily):
    """Stable Diffusion XL: a U-Net, two CLIP text encoders and a VAE. Holds the run's config."""

    name = "sdxl"
    checkpoints = model.CHECKPOINTS
    folder = model.SDXL_FOLDER
    tokenizer_places = conditions.TOKENIZERS
    config: SdxlLora | SdxlTrain | SdxlTextualInversion | SdxlControlLLLite
    latent_cache = LatentCache(suffix="_sdxl.npz", keyed_by_size=False)
    text_cache = TextCache(
        suffix="_te_outputs.npz",
        keys=("hidden_state1", "hidden_state2", "pool2"),
        options=("weighted_captions",),
    )
    rate_names = tuple(f"block{number}" for number in range(23))

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

    @property
    def text_lengths(self) -> dict[str, int]:
        return dict.fromkeys(("hidden_state1", "hidden_state2"), 75 * self.chunks + 2)

    def encode_captions(
        self,
        components: ModelComponents,
        captions: Sequence[str],
        encoders: tuple[str, ...] | None,
        chunks: int,
        weighted: bool,
    ) -> dict[str, Tensor]:
        return conditions.encode_with_clips(components, captions, encoders, chunks, weighted)

    def unet_inputs(
        self, text: dict[str, Tensor], dtype: torch.dtype, sizes: Tensor, controls: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, Tensor] | None]:
        """Return both hidden states side by side, and the pooled text, sizes and control image."""
        context = torch.cat([text["hidden_state1"], text["hidden_state2"]], dim=-1).to(dtype)
        # time_ids stay float32: diffusers turns them into [cos, sin] of 6 x 256 and puts them behind the pooled text.
        added = {"text_embeds": text["pool2"].to(dtype), "time_ids": sizes}
        if controls:  # one, which LLLite reads
            added["control"] = controls[0].to(dtype)
        return context, added

    def other_tensors(self, components: ModelComponents) -> dict[str, Tensor]:
        return {keys.LOGIT_SCALE: torch.tensor(keys.FULL_LOGIT_SCALE), **UnetFamily.other_tensors(self, components)}

    def is_read(self, part: str, path: str, layers: int) -> bool:
        """Return whether a parameter of a text encoder affects its output: CLIP-L is read before its last layer,
        without the final norm.
        """
        return part != "clip_l" or not path.startswith((f"encoder.layers.{layers - 1}.", "final_layer_norm."))

    def controlled_layers(self, denoiser: nn.Module) -> Iterator[tuple[str, int]]:
        """Yield self-attention's queries, keys and values and cross-attention's queries in the down and mid blocks."""
        for path, _ in denoiser.named_modules():
            if path.startswith(SIDES[:2]) and path.endswith(CONTROLLED):
                yield path, self.resolution_level(path)

    def control_name(self, path: str) -> str:
        return f"lllite_{self.adapter_name('denoiser', path).removeprefix('lora_')}"

    def learning_rate_block(self, path: str) -> int:
        return block_number(self.adapter_name("denoiser", path.rpartition(".")[0]))

    def adapter_name(self, part: str, path: str) -> str:
        return keys.adapter_name(part, path, self.layout)


_complete: type[Family] = SdxlFamily  # the type checker names what is missing
