"""The U-Net of Stable Diffusion: its sizes from the shapes of tensors, and diffusers' class without overhead."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from library.families.shared import clip, empty_weights
from library.families.shared.attention import attend
from library.families.shared.joint_layers import JointAttention
from library.families.shared.transformer import projections
from library.families.shared.unet_names import Layout
from library.imports import without_optional

SIZE_CHANNELS = 256  # each of the six numbers of SDXL's size conditioning becomes a sinusoid of this length
ADDED = "add_embedding.linear_1.weight"  # of U-Nets that are conditioned on sizes and a pooled text


def depths(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Return (block, number of transformer layers) of every attention in a U-Net with diffusers names."""
    layers_by_attention: dict[str, set[str]] = {}
    for name in names:
        path, separator, below = name.partition(".transformer_blocks.")
        if separator:
            layers_by_attention.setdefault(path, set()).add(below.split(".")[0])
    for path, layers in layers_by_attention.items():
        yield path.rsplit(".attentions.", 1)[0], 1 + max(map(int, layers))


def unet_config(shapes: Mapping[str, tuple[int, ...]], heads: int | None = None) -> dict[str, Any]:
    """Return the arguments of UNet2DConditionModel for a U-Net with these shapes by diffusers name.

    `heads` is the number of attention heads of every level; None for heads of 64 channels.
    """
    layout = Layout.of(shapes)
    levels = range(len(layout.attention))
    channels = [shapes[f"down_blocks.{i}.resnets.0.conv1.weight"][0] for i in levels]
    depth = dict(depths(shapes))
    cross = next(shape[1] for name, shape in shapes.items() if name.endswith("attn2.to_k.weight"))
    linear = len(next(shape for name, shape in shapes.items() if name.endswith(".proj_in.weight"))) == 2
    config = {
        "in_channels": shapes["conv_in.weight"][1],
        "out_channels": shapes["conv_out.weight"][0],
        "block_out_channels": tuple(channels),
        "layers_per_block": layout.layers,
        "down_block_types": tuple("CrossAttnDownBlock2D" if a else "DownBlock2D" for a in layout.attention),
        "up_block_types": tuple("CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(layout.attention)),
        "transformer_layers_per_block": tuple(depth.get(f"down_blocks.{i}", 1) for i in levels),
        # diffusers' name for the number of heads
        "attention_head_dim": heads or tuple(max(1, c // clip.HEAD_CHANNELS) for c in channels),
        "cross_attention_dim": cross,
        "use_linear_projection": linear,
        "sample_size": 128 if ADDED in shapes else 64,
    }
    if ADDED in shapes:
        config |= {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": SIZE_CHANNELS,
            "projection_class_embeddings_input_dim": shapes[ADDED][1],
        }
    return config


def empty_unet(shapes: Mapping[str, tuple[int, ...]], heads: int | None) -> nn.Module:
    """Return a U-Net of these shapes on the meta device."""
    # A single attention processor lets all blocks share compiled graphs.
    unet_class, residual = _classes()
    with empty_weights.empty_weights():
        unet = unet_class(**unet_config(shapes, heads))
    unet.set_attn_processor(SharedInputAttention())
    for module in unet.modules():
        if hasattr(module, "to_q"):
            module.joint = module.text_projected = None
        if isinstance(module, residual):  # 1 in some blocks and 1.0 in others would need two graphs
            module.output_scale_factor = float(module.output_scale_factor)
    return unet


def compute_dtype(denoiser: nn.Module, device: str) -> torch.dtype:
    """Return the dtype that the denoiser computes in: autocast's if that is on, else its weights'."""
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    unet: Any = getattr(denoiser, "module", denoiser)
    return unet.conv_in.weight.dtype


class SharedInputAttention:
    """The attention processor of the U-Net: layers with the same input (queries, keys, values) compute at once.

    `JointAttention` sets `joint` and `text_projected` of an attention.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,  # the padding of captions is attended to
    ) -> Tensor:
        """[B, S, C] and the text [B, L, text channels], or None for self-attention -> [B, S, C]."""
        if encoder_hidden_states is None:
            own = attn.joint
            joint = own is not None and own.serves(hidden_states)
            projected = own(hidden_states) if joint else projections(hidden_states, attn.to_q, attn.to_k, attn.to_v)
        elif attn.text_projected is not None:
            projected = attn.to_q(hidden_states), *attn.text_projected
        else:
            projected = attn.to_q(hidden_states), *projections(encoder_hidden_states, attn.to_k, attn.to_v)
        q, k, v = (tensor.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for tensor in projected)
        attended = attend(q, k, v).transpose(1, 2).flatten(2)
        return attn.to_out[0](attended)


@functools.cache
def _classes() -> tuple[Any, Any]:
    """Return diffusers' U-Net without its per-pass handling of peft adapters, which would import peft, and its residual
    blocks.
    """
    with without_optional("diffusers"):
        from diffusers.models import resnet
        from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel

    own_forward = inspect.unwrap(UNet2DConditionModel.forward)

    class Unet(UNet2DConditionModel):
        joint_attention: JointAttention | None = None

        def forward(self, sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, **more: Any) -> Any:
            self.begin_pass(encoder_hidden_states)
            return own_forward(self, sample, timestep, encoder_hidden_states, **more)

        def join_layers(self) -> None:
            """Join the layers that read the same input, once weights, adapters and device are final."""
            self.joint_attention = JointAttention(module for module in self.modules() if hasattr(module, "to_q"))

        def separate_layers(self) -> None:
            """Undo `join_layers`."""
            if self.joint_attention:
                self.joint_attention.separate()
            self.joint_attention = None

        def begin_pass(self, text: Tensor) -> None:
            """Do what comes before the blocks: compute the keys and values of the text [B, L, text channels]."""
            if self.joint_attention:
                self.joint_attention.begin_pass(text)

    Unet.__name__ = Unet.__qualname__ = UNet2DConditionModel.__name__  # saved folders name this class
    return Unet, resnet.ResnetBlock2D
