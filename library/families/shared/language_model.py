"""Language models as text encoders: tensor names in files, batches of captions of any length, Qwen3 and Mistral."""

import importlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.families.facts import Shapes
from library.families.shared import expected_tensors, random_networks, weights
from library.families.shared.part_files import Part, complete
from library.families.shared.tensor_names import count_list_blocks
from library.families.shared.weights import assign

EMBEDDING = "embed_tokens.weight"
HEAD_WIDTH = 128  # width of one head, in every size of Qwen2.5-VL, Qwen3 and Mistral Small
DEFAULT_THETA = 1e6
QWEN3 = "a Qwen3 text encoder"  # the description by `recognise`
MISTRAL = "a Mistral text encoder"
QWEN3_LAYERS = ("Qwen3Attention", "Qwen3MLP")  # classes whose linear layers carry adapters
QWEN3_MARK = "layers.0.self_attn.q_norm.weight"  # a tensor that Qwen2.5-VL does not have


def plain_language_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a file -> {key of the language model: key in the file}; the vision encoder is skipped."""
    names = list(names)
    marks = (EMBEDDING, QWEN3_MARK, "layers.0.self_attn.q_proj.bias")  # the first may be missing in an incomplete file
    prefix = next((name.removesuffix(mark) for mark in marks for name in names if name.endswith(mark)), "")
    unprefixed = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
    return {
        plain: name for plain, name in unprefixed.items() if plain.startswith(("embed_tokens.", "layers.", "norm."))
    }


def padded_length(ids: Sequence[Sequence[int]], step: int, dropped: int = 0) -> int:
    return -(-(max(map(len, ids), default=dropped) - dropped) // step) * step


def padded_ids(ids: Sequence[Sequence[int]], step: int, dropped: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids as a tensor, and a mask [B, L] of those after the first `dropped`; L is a multiple of `step`."""
    # Captions are padded on the right, which causal attention never sees.
    length = padded_length(ids, step, dropped) or step  # if all captions are empty
    padded = torch.zeros(len(ids), dropped + length, dtype=torch.long)
    mask = torch.zeros(len(ids), length, dtype=torch.long)
    for row, tokens in enumerate(ids):
        padded[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, : len(tokens) - dropped] = 1
    return padded.to(device, non_blocking=True), mask.to(device, non_blocking=True)


def encode_ids(model: Any, ids: Sequence[Sequence[int]], step: int, dropped: int = 0) -> tuple[Tensor, Tensor]:
    """Encode token ids: return the last hidden states [B, L, C] without the first `dropped`, zero after each caption,
    and a mask [B, L] of the caption's own tokens. L is a multiple of `step`.
    """
    padded, mask = padded_ids(ids, step, dropped, next(model.parameters()).device)
    states = model(input_ids=padded).last_hidden_state[:, dropped:]
    return states * mask[..., None].to(states.dtype), mask


def encode_layers(
    model: Any, ids: Sequence[Sequence[int]], step: int, dropped: int, layers: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Encode like `encode_ids`, but return the outputs after these numbers of layers, [B, L, layers, C]."""
    padded, mask = padded_ids(ids, step, dropped, next(model.parameters()).device)
    states = model(input_ids=padded, output_hidden_states=True).hidden_states
    stacked = torch.stack([states[number][:, dropped:] for number in layers], dim=2)
    return stacked * mask[..., None, None].to(stacked.dtype), mask


def empty_language_model(
    kind: str, skipped: int = 0, norm: bool = True, eps: float = 1e-6, theta: float = DEFAULT_THETA, **settings: Any
) -> nn.Module:
    """Build a model of transformers ("Qwen2", "Qwen3", "Mistral") on the meta device.

    Without its last `skipped` layers it has no final norm either: its output is then hidden_states[-1 - skipped] of the
    whole model. `norm` says whether the model has one otherwise.
    """
    # Import from its own module: through `transformers`, the type checker would read every model.
    module = importlib.import_module(f"transformers.models.{kind.lower()}")
    settings["num_hidden_layers"] -= skipped
    rope = {"rope_type": "default", "rope_theta": theta}
    config_class, model_class = (getattr(module, f"{kind}{part}") for part in ("Config", "Model"))
    config = config_class(rms_norm_eps=eps, use_cache=False, rope_parameters=rope, **settings)

    def make() -> nn.Module:
        model: Any = model_class(config)
        if skipped or not norm:
            model.norm = nn.Identity()
        return model

    return random_networks.build_on_meta(make)


def qwen3_part(what: str, file: str, option: str = "text_encoder") -> Part:
    return Part(option, what, ("text_encoder", file), (QWEN3_MARK,), expected_tensors.language_model)


def settings_of(shapes: Shapes) -> dict[str, int]:
    """Return the settings of a model, from shapes by plain name. Raises KeyError naming the first that is missing."""
    words, hidden = shapes[EMBEDDING]
    return {
        "vocab_size": words,
        "hidden_size": hidden,
        "intermediate_size": shapes["layers.0.mlp.gate_proj.weight"][0],
        "num_hidden_layers": count_list_blocks(shapes, "layers"),
        "num_attention_heads": shapes["layers.0.self_attn.q_proj.weight"][0] // HEAD_WIDTH,
        "num_key_value_heads": shapes["layers.0.self_attn.k_proj.weight"][0] // HEAD_WIDTH,
    }


# ---- Qwen3 and Mistral


def empty_qwen3(skipped: int = 0, **settings: Any) -> nn.Module:
    return empty_language_model("Qwen3", skipped, head_dim=HEAD_WIDTH, max_position_embeddings=40960, **settings)


def empty_mistral(skipped: int = 0, norm: bool = True, **settings: Any) -> nn.Module:
    limits: dict[str, Any] = {"head_dim": HEAD_WIDTH, "max_position_embeddings": 131072, "sliding_window": None}
    return empty_language_model("Mistral", skipped, norm, 1e-5, 1e9, **limits, **settings)


def load_qwen3(
    path: Path, dtype: torch.dtype, mmap: bool = True, skipped: Callable[[int], int] = lambda layers: 0
) -> nn.Module:
    """Read a Qwen3, a single file or a folder; `skipped` returns how many of its layers to leave out at the end. Raises
    ConfigError.
    """

    def empty_one(shapes: Shapes) -> nn.Module:
        settings = settings_of(shapes)
        return empty_qwen3(skipped(settings["num_hidden_layers"]), **settings)

    return _load(path, QWEN3, empty_one, dtype, mmap)


def load_mistral(path: Path, dtype: torch.dtype, mmap: bool, skipped: Callable[[int], int]) -> nn.Module:
    """Read a Mistral like `load_qwen3`. A file without the final norm has only the layers that are needed."""

    def empty_one(shapes: Shapes) -> nn.Module:
        settings, whole = settings_of(shapes), "norm.weight" in shapes
        return empty_mistral(skipped(settings["num_hidden_layers"]) if whole else 0, norm=whole, **settings)

    return _load(path, MISTRAL, empty_one, dtype, mmap)


def _load(path: Path, what: str, empty_one: Callable[[Shapes], nn.Module], dtype: torch.dtype, mmap: bool) -> nn.Module:
    file = weights.open_weights(path, mmap)
    with complete(path, what):
        named, stored = plain_language_names(file), file.shapes()
        model = empty_one({plain: stored[name] for plain, name in named.items()})
        return assign(model, {plain: weights.cast_floating(file[named[plain]], dtype) for plain in model.state_dict()})
