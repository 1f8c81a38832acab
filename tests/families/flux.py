"""A tiny FLUX.1 in the real formats, and what its tests share."""

from pathlib import Path

import pytest
import torch

from library import families
from library.config.building import build_config
from library.families.flux import random


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def schnell(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("schnell"), guidance=False)


def family(files, script="flux_train_network", **values):
    given = {"clip_l": files["clip_l"], "t5xxl": files["t5xxl"], "ae": files["ae"]}
    given |= {"pretrained_model_name_or_path": files["flux"], "model_prediction_type": "raw", **values}
    given = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return families.family_for(build_config(families.config_class(script), given))


@pytest.fixture(scope="module")
def dev(files):
    return family(files, t5xxl_max_token_length=16)


@pytest.fixture(scope="module")
def parts(dev):
    return dev.load(torch.float32)


def step(of, parts, captions=("a red circle", "a blue square"), seed=0, **given):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(len(captions), 16, 8, 12, generator=generator)
    noised = of.noised(latents, generator, **given)
    with torch.no_grad():
        text = of.text(parts, list(captions))
    return noised, text
