"""The FLUX 3 denoiser, in the tree of its own checkpoints; `keys` handles those of diffusers.

Image, reference images and text each pass blocks of their own, and then joint ones. Nothing has a bias, and the
modulations, one for each kind of tokens and of blocks, serve all blocks.

Shape letters in this file: B images, S tokens (L of the text, I of the image, R of its references), C hidden width, H
heads, D width of one head, so that C = H * D.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from library.families.shared.double_stream import LastLayer, MLPEmbedder, Modulation, QKNorm, count_stream_blocks
from library.families.shared.packing import image_positions
from library.families.shared.transformer import (
    TIME_CHANNELS,
    DenoiserWithTables,
    equal_axes,
    finite,
    modulated,
    projections,
    rope,
    rotate_pairs,
    sdpa,
    sinusoids,
)

OF_IMAGE, OF_REFERENCES, OF_TEXT = "Flux3ImageBlock", "Flux3ReferenceBlock", "Flux3TextBlock"
JOINT = "MMSingleStreamBlock"
IMAGE, REFERENCES = "image", "image_cond"  # kinds of tokens, by their names in files
WORDS = "txt"
MODE_BLOCKS = "content_mode_blocks"
# Class of blocks -> the list that holds them.
CONTAINERS = {
    OF_IMAGE: f"{MODE_BLOCKS}.{IMAGE}",
    OF_REFERENCES: f"{MODE_BLOCKS}.{REFERENCES}",
    OF_TEXT: "txt_mode_blocks",
    JOINT: "single_blocks",
}
POSITION_SCALE = 0.5  # between the rows of an image, and between its columns

Size = tuple[int, int]  # height and width of an image, in tokens


@dataclass(frozen=True)
class Flux3Shape:
    """The sizes of a FLUX 3 model, read from the shapes of its tensors."""

    in_channels: int
    text_channels: int
    hidden: int
    head: int
    mlp: int
    mode_blocks: int  # of each kind of tokens
    joint_blocks: int
    distilled: bool  # whether it also reads the time that a step leads to

    @classmethod
    def of(cls, shapes: Mapping[str, Iterable[int]]) -> "Flux3Shape":
        """Return sizes from tensor shapes by single-file key. Raises KeyError naming the first missing key."""
        hidden, in_channels = shapes["emb_in.image.weight"]
        return cls(
            in_channels=in_channels,
            text_channels=tuple(shapes["txt_in.weight"])[1],
            hidden=hidden,
            head=tuple(shapes["single_blocks.0.norm.query_norm.scale"])[0],
            mlp=tuple(shapes["single_blocks.0.mlp_out.weight"])[1],
            mode_blocks=count_stream_blocks(shapes, CONTAINERS[OF_IMAGE]),
            joint_blocks=count_stream_blocks(shapes, CONTAINERS[JOINT]),
            distilled="ref_time_in.in_layer.weight" in shapes,
        )

    @property
    def axes(self) -> tuple[int, ...]:
        """The share of a head's width that each axis of a position gets: (time, row, column, word)."""
        return equal_axes(self.head)


class Flux3Layers(nn.Module):
    """Attention and MLP in parallel, the layers of all blocks."""

    attend: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = staticmethod(sdpa)

    def __init__(self, sizes: Flux3Shape):
        super().__init__()
        hidden = sizes.hidden
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.norm = QKNorm(sizes.head)
        self.attn_out = nn.Linear(hidden, hidden, bias=False)
        self.mlp_in = nn.Linear(hidden, 2 * sizes.mlp, bias=False)
        self.mlp_out = nn.Linear(sizes.mlp, hidden, bias=False)

    def updated(self, x: Tensor, modulation: Tensor, pe: Tensor, mask: Tensor | None) -> Tensor:
        """Return the tokens [B, S, C] after attention and MLP; `modulation` [B, 1 or S, 3 * C]."""
        shift, scale, gate = modulation.chunk(3, dim=-1)
        normed = modulated(x, shift, scale)
        *heads, inside = projections(normed, self.q_proj, self.k_proj, self.v_proj, self.mlp_in)
        width = self.norm.query_norm.scale.shape[0]
        q, k, v = (output.unflatten(-1, (-1, width)).transpose(1, 2) for output in heads)
        q, k = (
            rotate_pairs(norm(x), pe).to(v.dtype) for norm, x in ((self.norm.query_norm, q), (self.norm.key_norm, k))
        )
        gating, value = inside.chunk(2, dim=-1)
        added = self.attn_out(self.attend(q, k, v, mask)) + self.mlp_out(F.silu(gating) * value)
        return finite(x + gate * added)


class Flux3ImageBlock(Flux3Layers):
    """A block over an image alone."""

    def forward(self, x: Tensor, modulation: Tensor, pe: Tensor) -> Tensor:
        """x [B, S, C], modulation [B, 1, 3 * C], pe [2, S, D / 2] -> x."""
        return self.updated(x, modulation, pe, None)


class Flux3ReferenceBlock(Flux3ImageBlock):
    """A block over all references of an image, a class of its own, as a training without references runs none of it."""


class Flux3TextBlock(Flux3Layers):
    """A block over the text alone."""

    def forward(self, x: Tensor, modulation: Tensor, pe: Tensor, mask: Tensor) -> Tensor:
        """x [B, L, C], modulation [B, 1, 3 * C], pe [2, L, D / 2], mask [B, L] -> x."""
        return self.updated(x, modulation, pe, mask)


class MMSingleStreamBlock(Flux3Layers):
    """A block over text, image and references, each token with its own modulation. LyCORIS finds the class by its
    name.
    """

    def forward(self, x: Tensor, modulation: Tensor, pe: Tensor, mask: Tensor) -> Tensor:
        """x [B, S, C], modulation [B, S, 3 * C], pe [2, S, D / 2], mask [B, S] -> x."""
        return self.updated(x, modulation, pe, mask)


class KnownStreams(NamedTuple):
    """What the joint blocks read of text and references, computed once for all steps of a picture."""

    text: Tensor  # [B, L, C]
    references: Tensor | None  # [B, R, C]


def _modulations(hidden: int) -> nn.ModuleDict:
    return nn.ModuleDict({kind: Modulation(hidden, 1, bias=False) for kind in (IMAGE, REFERENCES, WORDS)})


class Flux3(DenoiserWithTables):
    """FLUX 3 Image Klein (or a smaller one), depending on its sizes."""

    def __init__(self, sizes: Flux3Shape):
        super().__init__()
        self.sizes, self.axes = sizes, sizes.axes
        hidden, inputs, kinds = sizes.hidden, sizes.in_channels, (IMAGE, REFERENCES)
        self.emb_in = nn.ModuleDict({kind: nn.Linear(inputs, hidden, bias=False) for kind in kinds})
        self.txt_in = nn.Linear(sizes.text_channels, hidden, bias=False)
        self.time_in = MLPEmbedder(TIME_CHANNELS, hidden, bias=False)
        self.ref_time_in = MLPEmbedder(TIME_CHANNELS, hidden, bias=False) if sizes.distilled else None
        self.early_stream_modulations, self.single_stream_modulations = _modulations(hidden), _modulations(hidden)
        number = range(sizes.mode_blocks)
        self.txt_mode_blocks = nn.ModuleList(Flux3TextBlock(sizes) for _ in number)
        self.content_mode_blocks = nn.ModuleDict(
            {
                IMAGE: nn.ModuleList(Flux3ImageBlock(sizes) for _ in number),
                REFERENCES: nn.ModuleList(Flux3ReferenceBlock(sizes) for _ in number),
            }
        )
        self.single_blocks = nn.ModuleList(MMSingleStreamBlock(sizes) for _ in range(sizes.joint_blocks))
        self.final_layer = nn.ModuleDict({IMAGE: LastLayer(hidden, inputs, bias=False)})

    def forward(  # noqa: PLR0913 - the inputs and conditions of the model
        self,
        img: Tensor,
        sizes: Sequence[Size],
        txt: Tensor,
        txt_mask: Tensor,
        timesteps: Tensor,
        targets: Tensor | None = None,
        known: KnownStreams | None = None,
    ) -> Tensor:
        """Predict the packed velocity of packed latents, of the image alone without its reference images.

        img [B, I + R, in channels]: the tokens of the image, then those of each reference image, of these `sizes`; txt
        [B, L, text channels]; txt_mask [B, L], 1 or true for tokens that are read; timesteps [B] in 0..1, float32.
        `targets` [B], which only a distilled model reads, are the times that a step leads to, by default `timesteps`.
        `known` is the result of `know_streams` for the same text and references, whose tokens `img` may lack then.
        """
        count = sizes[0][0] * sizes[0][1]
        vec, still = self.times(timesteps, timesteps if targets is None else targets)
        words, image, references = self.positions(tuple(sizes), txt.shape[1], img.device)
        is_read = txt_mask.to(torch.bool)
        kinds, tables = [WORDS, IMAGE], [words, image]
        streams = [known.text if known else self.text_stream(txt, is_read, still, words)]
        streams.append(self.image_stream(IMAGE, img[:, :count], vec, image))
        if references is not None:
            kinds, tables = [*kinds, REFERENCES], [*tables, references]
            stream = known.references if known else None
            streams.append(
                self.image_stream(REFERENCES, img[:, count:], still, references) if stream is None else stream
            )
        modulations = [self.single_stream_modulations[kind](vec if kind == IMAGE else still) for kind in kinds]
        return self.final_layer[IMAGE](self.joined(streams, modulations, tables, is_read)[:, :count], vec)

    @torch.no_grad()
    def know_streams(self, references: Tensor, sizes: Sequence[Size], txt: Tensor, txt_mask: Tensor) -> KnownStreams:
        """Compute what depends on neither image nor time; in a distilled model it does.

        `references` [B, R, in channels] are the tokens of all reference images; `sizes`, `txt` and `txt_mask` are those
        of `forward`.
        """
        times = torch.zeros(len(txt), device=txt.device)
        _, still = self.times(times, times)
        words, _, table = self.positions(tuple(sizes), txt.shape[1], txt.device)
        text = self.text_stream(txt, txt_mask.to(torch.bool), still, words)
        return KnownStreams(text, None if table is None else self.image_stream(REFERENCES, references, still, table))

    def text_stream(self, txt: Tensor, is_read: Tensor, still: Tensor, table: Tensor) -> Tensor:
        """Return the text [B, L, C] after its own blocks; `still` [B, C] embeds time 0, `table` holds its positions."""
        states = self.txt_in(txt.to(self.txt_in.weight.dtype))
        for block in self.txt_mode_blocks:
            states = block(states, self.early_stream_modulations[WORDS](still), table, is_read)
        return states

    def image_stream(self, kind: str, tokens: Tensor, time: Tensor, table: Tensor) -> Tensor:
        """Return the tokens of the image or of its references [B, S, C] after their own blocks; `time` [B, C]."""
        stream = self.emb_in[kind](tokens.to(self.txt_in.weight.dtype))
        modulation = self.early_stream_modulations[kind](time)
        blocks: Any = self.content_mode_blocks[kind]
        for block in blocks:
            stream = block(stream, modulation, table)
        return stream

    def times(self, timesteps: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the embedding [B, C] of the image's time, and that of time 0 for references and text."""
        vec, still = self.time_in(sinusoids(timesteps)), self.time_in(sinusoids(torch.zeros_like(timesteps)))
        if self.ref_time_in is not None:
            target = self.ref_time_in(sinusoids(targets))
            vec, still = vec + target, still + target
        return vec, still

    def joined(self, streams: list[Tensor], modulations: list[Tensor], tables: list[Tensor], is_read: Tensor) -> Tensor:
        """Return image and references [B, I + R, C] after the joint blocks; the first stream is the text."""
        lengths = [stream.shape[1] for stream in streams]
        joint = torch.cat(streams, dim=1)
        # Expanded once for all blocks: each of them reads what it would otherwise make and keep for its gradient.
        modulation = torch.cat([m.expand(-1, n, -1) for m, n in zip(modulations, lengths, strict=True)], dim=1)
        everywhere = is_read.new_ones(len(joint), joint.shape[1] - lengths[0])
        mask, pe = torch.cat((is_read, everywhere), dim=1), torch.cat(tables, dim=1)
        for block in self.single_blocks:
            joint = block(joint, modulation, pe, mask)
        return joint[:, lengths[0] :]

    def positions(
        self, sizes: tuple[Size, ...], length: int, device: torch.device
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the RoPE tables [2, S, D / 2] of text, image and all references (None without any), cached by size.

        Positions are (0, row, column, word): rows and columns count in halves, and references are words -1, -2, ...
        """

        def make() -> tuple[Tensor, Tensor, Tensor | None]:
            words = torch.zeros(length, 4, device=device)
            words[:, 3] = torch.arange(length, dtype=torch.float32, device=device)
            images = []
            for number, size in enumerate(sizes):
                ids = image_positions(*size, device) * POSITION_SCALE
                images.append(torch.cat((ids, torch.full_like(ids[:, :1], -number)), dim=1))
            references = torch.cat(images[1:]) if len(images) > 1 else None
            tables = [None if ids is None else rope(ids, self.axes) for ids in (words, images[0], references)]
            return tuple(tables)  # type: ignore[return-value]

        return self._tables.of((*(side for size in sizes for side in size), length), device, make)
