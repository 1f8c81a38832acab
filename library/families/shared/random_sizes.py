"""Sizes of networks that several families share, for random networks. The defaults are those of tiny ones."""

from dataclasses import dataclass
from typing import Any

from library.families.shared import qwen_vae
from library.families.shared.qwen_vae import ImageVAE

# QwenVaeSizes of the published weights.
FULL_QWEN_VAE: dict[str, Any] = {"vae": 96, "vae_widths": (1, 2, 4, 4), "vae_resnets": 2}


# LanguageModelSizes of Qwen3-4B and Qwen3-VL-4B.
QWEN3_4B: dict[str, Any] = {"text": 2560, "text_layers": 36, "text_mlp": 9728, "text_heads": 32, "text_groups": 8}


@dataclass(frozen=True)
class LanguageModelSizes:
    """Width and depth of a language model used as text encoder."""

    text: int = 48
    text_layers: int = 2
    text_mlp: int = 128
    text_heads: int = 1
    text_groups: int = 1  # heads of keys and values

    def text_settings(self, words: int) -> dict[str, Any]:
        """Return the settings of its transformers class, for a tokenizer with `words` tokens."""
        return {
            "vocab_size": words,
            "hidden_size": self.text,
            "intermediate_size": self.text_mlp,
            "num_hidden_layers": self.text_layers,
            "num_attention_heads": self.text_heads,
            "num_key_value_heads": self.text_groups,
        }


@dataclass(frozen=True)
class QwenVaeSizes:
    """Width and depth of Qwen-Image's VAE, which other models have, too."""

    vae: int = 8
    vae_widths: tuple[int, ...] = (1, 2, 2, 2)  # of the levels, as multiples of `vae`
    vae_resnets: int = 1
    channels: int = 16  # of the latents

    def empty_vae(self) -> ImageVAE:
        return qwen_vae.empty_qwen_vae(self.vae, self.vae_widths, self.vae_resnets, self.channels, [False, True, True])
