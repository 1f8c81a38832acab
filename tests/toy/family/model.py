"""The toy's denoiser: transformer blocks over text and patches of 2 x 2 latents."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoids(values: Tensor, width: int) -> Tensor:
    """Values [N] -> [N, width]."""
    rates = torch.exp(-math.log(10000) * torch.arange(width // 2, device=values.device) / (width // 2))
    angles = values.float()[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ToyBlock(nn.Module):
    """Attention and MLP."""

    def __init__(self, width: int, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, width] -> the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ToyDenoiser(nn.Module):
    """Latents [B, C, h, w], timesteps [B] and text [B, L, text] -> [B, C, h, w]."""

    def __init__(self, width: int = 64, blocks: int = 3, channels: int = 4, text: int = 64):
        super().__init__()
        self.width, self.channels = width, channels
        self.patches, self.words, self.time = (
            nn.Linear(4 * channels, width),
            nn.Linear(text, width),
            nn.Linear(width, width),
        )
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(blocks))
        self.norm, self.answer = nn.LayerNorm(width), nn.Linear(width, 4 * channels)

    def forward(self, latents: Tensor, timesteps: Tensor, text: Tensor) -> Tensor:
        """The answer in the latents' size."""
        dtype, (height, width) = self.patches.weight.dtype, latents.shape[-2:]
        x = self.patches(F.pixel_unshuffle(latents.to(dtype), 2).flatten(2).transpose(1, 2))
        x = x + sinusoids(torch.arange(x.shape[1], device=x.device), self.width).to(x.dtype)
        x = x + self.time(sinusoids(timesteps, self.width).to(dtype))[:, None]
        words = self.words(text.to(dtype))
        x = torch.cat([words.to(x.dtype), x], dim=1)
        for block in self.blocks:
            x = block(x)
        x = self.answer(self.norm(x[:, words.shape[1] :]))
        return F.pixel_shuffle(x.transpose(1, 2).unflatten(-1, (height // 2, width // 2)), 2)
