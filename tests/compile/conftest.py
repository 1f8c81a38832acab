"""The demo's tiny models, prepared as a training prepares them, and their losses and gradients at a few image sizes."""

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
    """A tiny model of a family and the method that trains it."""

    config: Any
    family: Any
    components: Any
    method: Any
    text: dict[str, torch.Tensor]
    log: CompileLog

    def loss(self, size: tuple[int, ...]) -> torch.Tensor:
        """The loss of one noised batch, the same each time for a size: ([number of images,] height, width)."""
        number, height, width = (2, *size)[-3:]
        generator = torch.Generator().manual_seed(height)
        channels = {"sdxl": 4, "sd15": 4, "flux_2": 32, "flux_3": 32}.get(self.family.name, 16)
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
        gradients = [p.grad.flatten().float() for p in self.method.parameters() if p.grad is not None]
        return torch.stack(losses), torch.cat(gradients)


@pytest.fixture(scope="session")
def demo(request: Any) -> Any:
    """SDXL's model has fewer blocks here, as each costs a graph; tests that count blocks use `@several_blocks`."""
    return request.getfixturevalue(getattr(request, "param", "shallow_unet"))


@pytest.fixture
def forget() -> Any:
    """Start without compiled code of earlier tests, and leave none to later ones."""
    torch._dynamo.reset()
    usual = build_config(families.config_class("flux_train_network"), {}, notes=[]).compile
    with keep_torch_settings(), attention.keep_attention_settings():
        THREAD_SETTINGS.want(wanted_settings(usual, torch.device("cpu")))
        yield
    torch._dynamo.reset()


@pytest.fixture
def model_of(demo: Any, tmp_path: Path, forget: Any) -> Any:
    """A function: script and options -> a model that is ready to train; aot_eager compiles it if `compile` is on."""

    def make(script: str, sizes: tuple[tuple[int, ...], ...] = SIZES, **values: Any) -> Model:
        short = {"t5xxl_max_token_length": 32} if script.startswith("flux_train") else {}
        plain = {"compile": False, "compile_blocks": None, "compile_backend": "aot_eager"}
        plain |= {"gradient_checkpointing": False, **short}
        base_options = {"output_dir": str(tmp_path), "cache_latents": True, "mixed_precision": "no", "full_bf16": False}
        config = build_config(
            families.config_class(script), read_toml(demo.configs[script]) | plain | base_options | values, notes=[]
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
        prepared = prepare_denoiser(parts.denoiser, family, config, torch.device("cpu"), sizes, log=log)
        assert not prepared.not_compiled
        method.train()
        return Model(config, family, parts, method, text, log)

    return make
