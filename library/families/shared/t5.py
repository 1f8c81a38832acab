"""The T5 text encoder of FLUX.1, in the sizes of its tensors."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from library.families import recognition
from library.families.shared import empty_weights, weights
from library.families.shared.part_files import complete

WHAT = "a T5 text encoder"
T5_LAYER_CLASSES = ("T5Attention", "T5DenseGatedActDense")  # classes whose linear layers carry adapters
T5_MARKER = "encoder.block.0.layer.0.SelfAttention.q.weight"
EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight")  # one matrix; files hold it under either name or both
BIAS = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
GATED = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"
T5_V1_MARKER = "encoder.block.0.layer.1.DenseReluDense.wi.weight"


def t5_config(shapes: Mapping[str, Sequence[int]]) -> Any:
    """Return the sizes from shapes by file name. Raises KeyError if a tensor that determines them is missing."""
    from transformers.models.t5 import T5Config

    words, width = shapes[embedding(shapes)]
    buckets, heads = shapes[BIAS]
    gated = GATED in shapes
    layers = {name.split(".")[2] for name in shapes if name.startswith("encoder.block.")}
    return T5Config(
        vocab_size=words,
        d_model=width,
        d_kv=shapes[T5_MARKER][0] // heads,
        d_ff=shapes[GATED if gated else T5_V1_MARKER][0],
        num_layers=len(layers),
        num_heads=heads,
        relative_attention_num_buckets=buckets,
        feed_forward_proj="gated-gelu" if gated else "relu",
        is_encoder_decoder=False,
        use_cache=False,
    )


def embedding(names: Iterable[str]) -> str:
    return EMBEDDINGS[1] if EMBEDDINGS[0] not in names and EMBEDDINGS[1] in names else EMBEDDINGS[0]


def plain_t5_names(names: Iterable[str]) -> dict[str, str]:
    """Keys of a file, with any prefix -> {T5's own key: key in the file}."""
    names = list(names)
    prefix = next((name.removesuffix(T5_MARKER) for name in names if name.endswith(T5_MARKER)), "")
    return {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}


def load_t5(path: Path, dtype: torch.dtype, mmap: bool = True) -> nn.Module:
    """Read a T5 encoder (one file, shards, or a text_encoder_2 folder) as a T5EncoderModel in `dtype`. Raises
    ConfigError.
    """
    # 8-bit weights are cast to `dtype`, as nothing computes in 8 bits here.
    from transformers.models.t5.modeling_t5 import T5DenseActDense, T5DenseGatedActDense, T5EncoderModel

    file = weights.open_weights(path, mmap)
    if not any(name.endswith(T5_MARKER) for name in file):
        raise recognition.wrong_kind_error(path, WHAT)
    names, shapes = plain_t5_names(file), file.shapes()
    with complete(path, WHAT):
        with empty_weights.empty_weights():
            model = T5EncoderModel(t5_config({plain: shapes[name] for plain, name in names.items()}))
        for module in model.modules():
            if type(module) is T5DenseGatedActDense:
                module.__class__ = _uncast_mlp(T5DenseGatedActDense)
            elif type(module) is T5DenseActDense:
                module.__class__ = _uncast_mlp(T5DenseActDense)
        model.encoder.embed_tokens = model.shared  # tied, or moving the model would copy it twice
        stored = {
            parameter: embedding(names) if parameter in EMBEDDINGS else parameter for parameter in model.state_dict()
        }
        file_keys = {parameter: names[name] for parameter, name in stored.items() if name in names}
        return weights.assign(
            model, {parameter: weights.cast_floating(file[key], dtype) for parameter, key in file_keys.items()}
        )


@functools.cache
def _uncast_mlp(cls: type[nn.Module]) -> Any:
    """Return the MLP class without its cast to the dtype of the last matrix, which may be 8 bits."""

    class Dense(cls):
        def forward(self: Any, hidden_states: Tensor) -> Tensor:
            if hasattr(self, "wi_0"):
                hidden = self.act(self.wi_0(hidden_states)) * self.wi_1(hidden_states)
            else:
                hidden = self.act(self.wi(hidden_states))
            return self.wo(self.dropout(hidden))

    Dense.__name__ = Dense.__qualname__ = cls.__name__  # ours and other adapters find their layers by this name
    return Dense


def t5_tokens(tokenizer: Any, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Return token ids and mask [B, length]: truncated or padded to `length`, with EOS."""
    batch = tokenizer(
        list(texts),
        max_length=length,
        padding="max_length",
        truncation=True,
        return_tensors="pt",
        add_special_tokens=True,
    )
    return batch.input_ids, batch.attention_mask


def longest_t5_text(tokenizer: Any, texts: Iterable[str], length: int) -> int:
    ids = tokenizer(list(texts), max_length=length, truncation=True, add_special_tokens=True).input_ids
    return max(map(len, ids), default=0)


def encode_t5_ids(model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
    """Token ids [B, L] -> the last hidden states after the final norm [B, L, C]; without mask also of padding."""
    device = model.shared.weight.device
    if mask is not None:
        # As [B, 1, L, L], because transformers synchronises with the device to check whether a mask [B, L] masks
        # anything.
        mask = mask.to(device, torch.bool, non_blocking=True)[:, None, None].expand(-1, 1, ids.shape[1], -1)
    return model(input_ids=ids.to(device, non_blocking=True), attention_mask=mask).last_hidden_state
