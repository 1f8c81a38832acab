"""The expected tensor names of networks.

Names of text encoders and autoencoders are derived without building these, as importing their packages takes seconds.
Each function takes the plain names in a file, possibly incomplete, and returns all names of a complete one.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping

from library.families.facts import Shapes

BOTH = "{weight,bias}"
RESNET = "{norm1,conv1,norm2,conv2}"
QUANTS = ("quant_conv", "post_quant_conv")  # of autoencoders that have them


class IncompleteError(KeyError):
    """Tensors of a network that a file does not hold."""

    def __init__(self, missing: list[str], num_expected: int):
        super().__init__(missing[0])
        self.missing, self.num_expected = missing, num_expected

    def __str__(self) -> str:
        return f"{len(self.missing)} of {self.num_expected} tensors missing: {first_names(self.missing)}"


def first_names(names: list[str]) -> str:
    return ", ".join([*names[:2], *(["..."] if len(names) > 2 else [])])


def require(expected: Collection[str], names: Collection[str]) -> None:
    if missing := [name for name in expected if name not in names]:
        raise IncompleteError(missing, len(expected))


def expanded(*patterns: str) -> list[str]:
    """Expand patterns: "a.{b,c}.d" is a.b.d and a.c.d."""
    return [
        "".join(parts)
        for pattern in patterns
        for parts in itertools.product(*(part.split(",") for part in re.split(r"[{}]", pattern)))
    ]


def list_length(names: Iterable[str], start: str) -> int:
    indices = (name.removeprefix(start).partition(".")[0] for name in names if name.startswith(start))
    return max((int(number) + 1 for number in indices if number.isdecimal()), default=0)


def clip(names: Collection[str]) -> list[str]:
    """Return the tensors of a CLIP text encoder."""
    layer = "text_model.encoder.layers."
    return expanded(
        "text_model.embeddings.{token,position}_embedding.weight",
        f"text_model.final_layer_norm.{BOTH}",
        *(f"{layer}{n}.{{layer_norm1,layer_norm2,mlp.fc1,mlp.fc2}}.{BOTH}" for n in range(list_length(names, layer))),
        *(f"{layer}{n}.self_attn.{{q,k,v,out}}_proj.{BOTH}" for n in range(list_length(names, layer))),
    )


def t5(names: Collection[str]) -> list[str]:
    """Return the tensors of a T5 text encoder. Its embedding has two names, of which one is enough."""
    block = "encoder.block."
    inner = "{wi_0,wi_1,wo}" if any(".wi_" in name for name in names) else "{wi,wo}"
    embedding = "encoder.embed_tokens.weight"
    return expanded(
        embedding if embedding in names else "shared.weight",
        f"{block}0.layer.0.SelfAttention.relative_attention_bias.weight",
        "encoder.final_layer_norm.weight",
        *(f"{block}{n}.layer.0.SelfAttention.{{q,k,v,o}}.weight" for n in range(list_length(names, block))),
        *(f"{block}{n}.layer.1.DenseReluDense.{inner}.weight" for n in range(list_length(names, block))),
        *(f"{block}{n}.layer.{{0,1}}.layer_norm.weight" for n in range(list_length(names, block))),
    )


LANGUAGE_LAYER = (
    "self_attn.{q,k,v,o}_proj.weight",
    "mlp.{gate,up,down}_proj.weight",
    "{input,post_attention}_layernorm.weight",
)


def language_model(names: Collection[str]) -> list[str]:
    """Return the tensors of a Qwen2, whose attention has biases, or a Qwen3, whose attention has norms."""
    norms = "self_attn.{q,k}_norm.weight" if any("q_norm" in name for name in names) else "self_attn.{q,k,v}_proj.bias"
    patterns, layers = (norms, *LANGUAGE_LAYER), range(list_length(names, "layers."))
    return expanded(
        "embed_tokens.weight", "norm.weight", *(f"layers.{n}.{pattern}" for n in layers for pattern in patterns)
    )


def mistral(names: Collection[str]) -> list[str]:
    """Return the tensors of a Mistral that are read: the norm after the last layer may be missing."""
    layers = range(list_length(names, "layers."))
    return expanded("embed_tokens.weight", *(f"layers.{n}.{pattern}" for n in layers for pattern in LANGUAGE_LAYER))


def vision_language_model(names: Collection[str]) -> list[str]:
    """Return the tensors of a Qwen2.5-VL, with its vision encoder if the file has any of it."""
    words = language_model([name for name in names if not name.startswith("visual.")])
    if not any(name.startswith("visual.") for name in names):
        return words
    block = "visual.blocks."
    return words + expanded(
        "visual.patch_embed.proj.weight",
        "visual.merger.ln_q.weight",
        f"visual.merger.mlp.{{0,2}}.{BOTH}",
        *(f"{block}{n}.norm{{1,2}}.weight" for n in range(list_length(names, block))),
        *(f"{block}{n}.attn.{{qkv,proj}}.{BOTH}" for n in range(list_length(names, block))),
        *(f"{block}{n}.mlp.{{gate,up,down}}_proj.{BOTH}" for n in range(list_length(names, block))),
    )


def autoencoder_tensors(shapes: Shapes) -> list[str]:
    """Return the tensors of an AutoencoderKL, by diffusers name."""
    levels = max(list_length(shapes, "encoder.down_blocks."), list_length(shapes, "decoder.up_blocks."))
    sides = {"encoder.down_blocks": "downsamplers", "decoder.up_blocks": "upsamplers"}
    starts = [f"{start}.{n}.resnets." for start in sides for n in range(levels)]
    resnets_per_level = {
        start: max(list_length(shapes, level) for level in starts if level.startswith(start))
        for start in sides
        if levels
    }
    resnets = [f"{start}{n}" for start in starts for n in range(resnets_per_level[".".join(start.split(".")[:2])])]
    return expanded(
        f"{{encoder,decoder}}.{{conv_in,conv_norm_out,conv_out}}.{BOTH}",
        f"{{encoder,decoder}}.mid_block.resnets.{{0,1}}.{RESNET}.{BOTH}",
        f"{{encoder,decoder}}.mid_block.attentions.0.{{group_norm,to_q,to_k,to_v,to_out.0}}.{BOTH}",
        *(f"{resnet}.{RESNET}.{BOTH}" for resnet in resnets),
        *(f"{resnet}.conv_shortcut.{BOTH}" for resnet in resnets if changes_width(shapes, f"{resnet}.conv1.weight")),
        *(f"{start}.{n}.{name}.0.conv.{BOTH}" for start, name in sides.items() for n in range(levels - 1)),
        *(f"{quant}.{BOTH}" for quant in QUANTS if any(name.startswith(f"{quant}.") for name in shapes)),
    )


def autoencoder_with_statistics(shapes: Shapes) -> list[str]:
    return [*autoencoder_tensors(shapes), *expanded("bn.running_{mean,var}")]


VIDEO_RESNET = ("{norm1,norm2}.gamma", f"{{conv1,conv2}}.{BOTH}")
# Tensors of autoencoders of Qwen-Image's kind, by diffusers name.
OUTSIDE_OF_LEVELS = (
    *(f"{quant}.{BOTH}" for quant in QUANTS),
    f"{{encoder,decoder}}.{{conv_in,conv_out}}.{BOTH}",
    "{encoder,decoder}.norm_out.gamma",
    "{encoder,decoder}.mid_block.attentions.0.norm.gamma",
    f"{{encoder,decoder}}.mid_block.attentions.0.{{to_qkv,proj}}.{BOTH}",
    *(f"{{encoder,decoder}}.mid_block.resnets.{{0,1}}.{pattern}" for pattern in VIDEO_RESNET),
)


def video_autoencoder(shapes: Shapes) -> list[str]:
    """Return the tensors of Qwen-Image's VAE, by diffusers name."""
    levels, per_level = list_length(shapes, "decoder.up_blocks."), list_length(shapes, "decoder.up_blocks.0.resnets.")
    # The encoder has one resnet per level fewer than the decoder, but a downsampler after each level except the last;
    # all of them are in one list.
    down = [f"encoder.down_blocks.{n}" for n in range(max(levels * per_level - 1, 0))]
    halving = [path for n, path in enumerate(down, start=1) if per_level and n % per_level == 0]
    up = [f"decoder.up_blocks.{n}.resnets.{i}" for n in range(levels) for i in range(per_level)]
    doubling = [f"decoder.up_blocks.{n}.upsamplers.0" for n in range(levels - 1)]
    resnets = [path for path in (*down, *up) if path not in halving]
    return expanded(
        *OUTSIDE_OF_LEVELS,
        *(f"{path}.{pattern}" for path in resnets for pattern in VIDEO_RESNET),
        *(f"{path}.conv_shortcut.{BOTH}" for path in resnets if changes_width(shapes, f"{path}.conv1.weight")),
        *(f"{path}.resample.1.{BOTH}" for path in (*halving, *doubling)),
    )


def changes_width(shapes: Mapping[str, tuple[int, ...]], name: str) -> bool:
    shape = shapes.get(name, (0, 0))
    return shape[0] != shape[1]
