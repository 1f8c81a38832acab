"""Tiny models, LoRAs of them as the trainer attaches and saves them, and the models' outputs with these LoRAs."""

import dataclasses

import pytest
import torch

from library import families, methods
from library.config.building import build_config
from library.families.flux import random as random_flux
from library.families.flux.options import FluxLora
from library.families.sdxl import random as random_sdxl
from library.families.sdxl.options import SdxlLora


def loaded(base, **values):
    """(config, family, parts) of an SDXL file or of FLUX's files."""
    values = {"learning_rate": 1e-3, **values}
    if isinstance(base, dict):
        part_files = {name: str(base[name]) for name in ("clip_l", "t5xxl", "ae")}
        config = build_config(
            FluxLora, {"pretrained_model_name_or_path": str(base["flux"]), **part_files, **values}, notes=[]
        )
    else:
        config = build_config(SdxlLora, {"pretrained_model_name_or_path": str(base), **values}, notes=[])
    family = families.family_for(config)
    return config, family, family.load(torch.float32)


def trained(base, seed=0, size=0.05, **values):
    """(method, parts) of a model with adapters of random numbers."""
    config, family, parts = loaded(base, **values)
    method = methods.attach_method(parts, family, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in method.parameters():
            p.normal_(std=size, generator=generator)
    return method, parts


def asked(base, parts):
    """The outputs of the denoiser and of SDXL's second text encoder for fixed random inputs."""
    torch.manual_seed(5)
    with torch.no_grad():
        if isinstance(base, dict):
            model = parts.denoiser
            img, txt = torch.randn(1, 16, 64), torch.randn(1, 5, 64)
            ids = torch.zeros(16, 3), torch.zeros(5, 3)
            ones = torch.full((1,), 0.5)
            return model(img, ids[0], txt, ids[1], ones, torch.randn(1, 64), torch.ones(1)), torch.zeros(1)
        unet = parts.denoiser
        conditions = {"text_embeds": torch.randn(1, 128), "time_ids": torch.ones(1, 6)}
        latents, text = torch.randn(1, 4, 16, 16), torch.randn(1, 7, unet.config.cross_attention_dim)
        answer = unet(latents, torch.tensor([500.0]), text, added_cond_kwargs=conditions).sample
        tokens = torch.arange(7)[None]
        return answer, parts.encoders["clip_g"](tokens).last_hidden_state


@pytest.fixture(scope="session")
def sdxl(tmp_path_factory):
    # a level of each kind: tools treat a file tensor by tensor
    sizes = dataclasses.replace(random_sdxl.TINY, unet=(32, 64), depth=(0, 1))
    return random_sdxl.write_random_model(tmp_path_factory.mktemp("sdxl"), dtype=torch.float32, sizes=sizes)


@pytest.fixture(scope="session")
def flux(tmp_path_factory):
    return random_flux.write_random_model(tmp_path_factory.mktemp("flux"), dtype=torch.float32)


@pytest.fixture(scope="session")
def bases(sdxl, flux):
    return {"sdxl": sdxl, "flux": flux}


def file_of(base):
    return base["flux"] if isinstance(base, dict) else base


def saved(method, path, metadata=None, dtype=None):
    from safetensors.torch import save_file

    save_file(method.state_dict(dtype), path, metadata or {})
    return path


@pytest.fixture(scope="session")
def lora_files(bases, tmp_path_factory):
    """Per family two LoRA files (ranks 3 and 4, strengths not 1), and answers with the first attached."""
    folder, out = tmp_path_factory.mktemp("loras"), {}
    for name, base in bases.items():
        args = ["conv_dim=2", "conv_alpha=1"] if name == "sdxl" else []
        method, parts = trained(base, network_dim=3, network_alpha=2.0, network_args=args)
        first = saved(method, folder / f"{name}-a.safetensors", {"ss_training_comment": "hello"})
        other, _ = trained(base, seed=1, network_dim=4, network_alpha=4.0, network_args=args)
        second = saved(other, folder / f"{name}-b.safetensors")
        out[name] = (first, second, asked(base, parts))
    return out
