"""The demo's tiny models, made fit and fast as a training does it, and asked about a few sizes of image."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from library import families, methods
from library.compiler.log import CompileLog
from library.compiler.torch_settings import THREAD_SETTINGS, keep_torch_settings, wanted_settings
from library.config.building import build_config
from library.config.formats import read_toml
from library.memory import attention
from library.memory.prepare import prepare_denoiser
from library.memory.quantization import fp8_storage
from tests.training import demo as deep  # noqa: F401
from tests.training import shallow, shallow_unet, shapes, squares  # noqa: F401

SIZES = ((8, 8), (8, 16), (16, 8))  # of the latents; as many buckets


@dataclass
class Model:
    """A tiny model of a family with what learns in it."""

    config: Any
    family: Any
    components: Any
    method: Any
    text: dict[str, torch.Tensor]
    log: CompileLog

    def loss(self, size: tuple[int, ...]) -> torch.Tensor:
        """How wrong the model is about one noised batch, always the same for a size, of two images unless it says."""
        number, height, width = (2, *size)[-3:]
        generator = torch.Generator().manual_seed(height)
        channels = 4 if self.family.name == "sdxl" else 16
        torch.manual_seed(width)
        noised = self.family.noised(torch.randn(number, channels, height, width, generator=generator), generator)
        sizes = torch.tensor([[64.0, 64.0, 0.0, 0.0, 64.0, 64.0]]).repeat(number, 1)
        text = {name: rows[torch.arange(number) % 2] for name, rows in self.text.items()}
        mixed = self.config.precision.mixed_precision != "no"
        with torch.autocast("cpu", fp8_storage.compute_type(self.config)) if mixed else contextlib.nullcontext():
            predicted = self.family.predict(self.components.denoiser, noised, text, sizes)
        return (predicted - noised.target).square().mean()

    def gradients(self, sizes: tuple[tuple[int, ...], ...] = SIZES) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses of some sizes, and the gradients of all of them together."""
        losses = []
        for size in sizes:
            loss = self.loss(size)
            loss.backward()
            losses.append(loss.detach())
        got = [p.grad.flatten().float() for p in self.method.parameters() if p.grad is not None]
        return torch.stack(losses), torch.cat(got)


@pytest.fixture(scope="session")
def demo(request: Any) -> Any:
    """Models with fewer blocks of SDXL, each of which costs a graph; a test that counts them says `@several_blocks`."""
    return request.getfixturevalue(getattr(request, "param", "shallow_unet"))


@pytest.fixture
def forget() -> Any:
    """Nothing compiled before is known, and nothing stays."""
    torch._dynamo.reset()
    usual = build_config(families.config_class("flux_train_network"), {}, notes=[]).compile
    with keep_torch_settings(), attention.keep_attention_settings():
        THREAD_SETTINGS.want(wanted_settings(usual, torch.device("cpu")))
        yield
    torch._dynamo.reset()


@pytest.fixture
def made(demo: Any, tmp_path: Path, forget: Any) -> Any:
    """A function: script and options -> a model that is ready to train; compiled by aot_eager if `compile` is on."""

    def make(script: str, sizes: tuple[tuple[int, ...], ...] = SIZES, **values: Any) -> Model:
        short = {"t5xxl_max_token_length": 32} if script.startswith("flux_train") else {}
        plain = {"compile": False, "compile_blocks": None, "compile_backend": "aot_eager"}
        plain |= {"gradient_checkpointing": False, **short}
        given = {"output_dir": str(tmp_path), "cache_latents": True, "mixed_precision": "no", "full_bf16": False}
        config = build_config(
            families.config_class(script), read_toml(demo.configs[script]) | plain | given | values, notes=[]
        )
        family = families.family_for(config)
        parts = family.load(fp8_storage.storage_type(config))
        with torch.no_grad():
            text = {name: part.clone() for name, part in family.text(parts, ["zorb toy", "plix, red"]).items()}
        torch.manual_seed(0)
        method = methods.attach_method(parts, family, config)
        for parameter in method.parameters():
            if config.adapters:  # adapters begin with zeros, and would hide what gradients are worth
                parameter.data = torch.randn(parameter.shape, dtype=parameter.dtype) * 0.02
        log = CompileLog()
        done = prepare_denoiser(parts.denoiser, family, config, torch.device("cpu"), sizes, log=log)
        assert not done.not_compiled
        method.train()
        return Model(config, family, parts, method, text, log)

    return make
