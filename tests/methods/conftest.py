"""Small stand-ins with the class names and trees that adapters look for."""

import pytest
import torch
from torch import nn

from library.config.building import build_config
from library.families.base import ModelComponents


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)


class DoubleStreamBlock(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.img_mod = nn.ModuleDict({"lin": nn.Linear(width, 6 * width)})
        self.img_attn, self.txt_attn = Attention(width), Attention(width)
        self.img_mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, img, txt):
        shift = self.img_mod["lin"](img).chunk(6, dim=-1)[0]
        q, k, v = self.img_attn.qkv(img + shift).chunk(3, dim=-1)
        return img + self.img_attn.proj(q * k + v) + self.img_mlp(img), txt + self.txt_attn.proj(txt)


class SingleStreamBlock(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)
        self.modulation = nn.ModuleDict({"lin": nn.Linear(width, 3 * width)})

    def forward(self, x):
        q, k, v, mlp = self.linear1(x + self.modulation["lin"](x).chunk(3, -1)[0]).split([8, 8, 8, 32], dim=-1)
        return x + self.linear2(torch.cat([q * k + v, mlp], dim=-1))


class FluxLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.img_in, self.txt_in = nn.Linear(4, 8), nn.Linear(6, 8)
        self.double_blocks = nn.ModuleList(DoubleStreamBlock() for _ in range(2))
        self.single_blocks = nn.ModuleList(SingleStreamBlock() for _ in range(3))

    def forward(self, img, txt):
        img, txt = self.img_in(img), self.txt_in(txt)
        for block in self.double_blocks:
            img, txt = block(img, txt)
        x = torch.cat([txt, img], dim=1)
        for block in self.single_blocks:
            x = block(x)
        return x


class CLIPAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(8, 8)


class T5Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8, bias=False)


class Family:
    adapter_targets = ("DoubleStreamBlock", "SingleStreamBlock")
    text_adapter_targets = ("CLIPAttention", "T5Attention")
    prefixes = {"denoiser": "lora_unet", "clip_l": "lora_te1_text_model", "clip_g": "lora_te2", "t5xxl": "lora_te3"}

    def adapter_name(self, part, path):
        return f"{self.prefixes[part]}_{path}".replace(".", "_")

    def export(self, parts):
        return dict(parts.denoiser.state_dict())


@pytest.fixture
def flux_like():
    """A family and the parts of a model; the same numbers each time."""
    torch.manual_seed(0)
    encoders = {"clip_l": nn.Sequential(CLIPAttention()), "t5xxl": nn.Sequential(T5Attention())}
    return Family(), ModelComponents(FluxLike(), None, encoders, {})


@pytest.fixture
def flux_config():
    """A FLUX LoRA's config from option values."""
    from library.families.flux.options import FluxLora

    return lambda **values: build_config(FluxLora, {"learning_rate": 1e-3, **values}, notes=[])


@pytest.fixture
def sdxl_config():
    """An SDXL LoRA's config from option values."""
    from library.families.sdxl.options import SdxlLora

    return lambda **values: build_config(SdxlLora, {"learning_rate": 1e-3, **values}, notes=[])
