"""Qwen-Image-2.1 as a family: loading, encoding of images and captions, and the prediction of a training step."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from library.config.problems import Problem
from library.families.base import BlockChain, BlockCost, BlockInputs, Family, LatentCache, ModelComponents, TextCache
from library.families.qwen_image_21 import text_encoder
from library.families.qwen_image_21.checkpoint import QWEN_21_CHECKPOINT
from library.families.qwen_image_21.facts import FACTS
from library.families.qwen_image_21.keys import qwen_21_to_single
from library.families.qwen_image_21.model import BLOCK, BLOCK_LIST
from library.families.qwen_image_21.options import MAX_REFERENCES, Qwen21Lora, Qwen21Train
from library.families.qwen_image_21.sampler import Qwen21Sampler
from library.families.qwen_image_21.vae import qwen_21_latents
from library.families.shared import turbo
from library.families.shared.assistants import assistant_fix, lacks_assistant, takes_assistant
from library.families.shared.one_encoder import ENCODER, OneEncoderFamily
from library.families.shared.packing import pack_with_references, unpack
from library.objectives.base import NoisedBatch

if TYPE_CHECKING:
    from PIL import Image


EMBED, MASK = "qwen21_vl_embed", "qwen21_vl_mask"


class Qwen21Family(OneEncoderFamily):
    """Qwen-Image-2.1: a transformer behind a causal condition, Qwen3-VL-8B and a VAE with an alpha channel."""

    config: Qwen21Lora | Qwen21Train
    name = "qwen_image_21"
    sampler_class = Qwen21Sampler
    checkpoint = QWEN_21_CHECKPOINT
    swapped_class = BLOCK
    block_classes = (BLOCK,)
    block_chain = BlockChain((BLOCK_LIST,))
    adapter_targets = (BLOCK,)
    sample_multiple = 32
    latent_cache = LatentCache(suffix="_q21.safetensors", keyed_by_size=True, architecture="qwen_image_21", square=2)
    text_cache = TextCache(suffix="_q21_te.safetensors", keys=(EMBED, MASK), mask=MASK, architecture="qwen_image_21")
    # Dimensions with varying numbers of tokens: img, cond, their positions, the mask, what sees what of cond, and the
    # keys and values of cond.
    block_inputs = {
        BLOCK: BlockInputs(
            streams=(0, 1), dynamic=((0, 1), (1, 1), (4, 3), (5, 1), (6, 1), (7, 0), (7, 1), (8, 2), (9, 2))
        )
    }
    # Text is a small part of the tokens.
    block_costs = {BLOCK: BlockCost(BLOCK_LIST, activations=26, used=1.0)}
    architecture = FACTS.architecture
    base_model_version = FACTS.base_model_version

    @property
    def is_turbo(self) -> bool:
        return turbo.is_turbo(self.config)

    @property
    def sample_defaults(self) -> Mapping[str, Any]:
        usual = {"negative_prompt": " ", "width": 1024, "height": 1024, "sample_steps": 40, "scale": 1.0}
        return usual | ({"sample_steps": 8} if self.is_turbo else {})

    def notes(self) -> Iterator[Problem]:
        """Warn of a version that no file reveals, and of training a distilled model without the assistant."""
        if not self.config.model.model_version:
            yield turbo.unset_version("base", "Qwen-Image-2.1")
        if self.is_turbo:
            # Its steps are lost even with the assistant, which was made for the model of more steps.
            if not self.config.preservation:
                yield turbo.turbo_forgets(self.config, "Qwen-Image-2.1")
        elif lacks_assistant(self.config):
            assistant = FACTS.assistant_loras[0]
            yield Problem(
                "pretrained_model_name_or_path",
                ": Qwen-Image-2.1 is distilled to need no guidance, and forgets that if it is trained directly; set "
                "assistant_lora of a LoRA to its training assistant: {assistant}"
                if takes_assistant(self.config)
                else ": Qwen-Image-2.1 is distilled to need no guidance, and forgets that in a fine-tune; a LoRA keeps "
                "it, with assistant_lora = {assistant}",
                assistant=assistant.file,
                also="assistant_lora base_weights",
                fix=assistant_fix(self.config, assistant),
            )

    def export(self, components: ModelComponents) -> dict[str, Tensor]:
        return qwen_21_to_single(super().export(components))

    # ---- captions

    @property
    def picture_template(self) -> str:
        """Only where images may have references: other captions, such as the empty one, are encoded for all images."""
        data = self.config.data
        places = (data.control_directory, data.dataset_config, getattr(data, "in_json", None))
        return "qwen-image-2.1" if any(places) else ""

    def text_with_pictures(
        self, components: ModelComponents, captions: Sequence[str], pictures: "Sequence[Sequence[Image.Image]]"
    ) -> dict[str, Tensor]:
        """Captions with the reference images of each -> states of the words [B, L, C] and a mask [B, L]."""
        images = [[text_encoder.shown(picture) for picture in row] for row in pictures]
        arrays = text_encoder.encode_with_references(
            components.encoders[ENCODER], components.tokenizers[ENCODER], list(captions), images
        )
        return dict(zip(self.text_cache.keys, arrays, strict=True))

    def picture_tokens(self, components: ModelComponents, sizes: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens that images of these sizes add to a caption in a step."""
        return text_encoder.reference_words(components.tokenizers[ENCODER], len(sizes))

    @cached_property
    def leads(self) -> tuple[int, ...]:
        """The numbers of tokens of the text before each reference image, for as many as a model reads."""
        return text_encoder.lead_lengths(self.tokenizers_of_captions()[ENCODER], MAX_REFERENCES)

    # ---- a training step

    def latents(self, components: ModelComponents, pixels: Tensor, generator: Any = None) -> Tensor:
        """Pixels [B, 3, H, W] in [-1, 1] -> normalised means, float32 [B, 16, H / 8, W / 8]; not sampled."""
        return qwen_21_latents(components.vae, pixels)

    def control_latents(self, components: ModelComponents, pixels: Tensor) -> Tensor:
        return self.latents(components, pixels)

    def velocity(
        self, denoiser: nn.Module, noised: NoisedBatch, text: dict[str, Tensor], controls: Sequence[Tensor]
    ) -> Tensor:
        """Return the predicted velocity, noise minus image, float32 [B, C, h, w]."""
        tokens, sizes = pack_with_references(noised.latents, controls)
        leads = self.leads[: len(controls)] if controls else ()
        output = denoiser(tokens, sizes, text[EMBED], text[MASK], noised.timesteps, leads)
        return unpack(output.float(), *sizes[0])


_complete: type[Family] = Qwen21Family  # the type checker reports missing members
