"""A tiny FLUX.1 in the real formats, and what its tests share."""

import pytest
import torch

from library.families.flux import random
from tests.families import alike


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("flux"))


@pytest.fixture(scope="module")
def schnell(tmp_path_factory):
    return random.write_random_model(tmp_path_factory.mktemp("schnell"), guidance=False)


def family(files, script="flux_train_network", **values):
    values_set = {"clip_l": files["clip_l"], "t5xxl": files["t5xxl"], "ae": files["ae"]}
    values_set |= {"pretrained_model_name_or_path": files["flux"], "model_prediction_type": "raw", **values}
    return alike.configured(script, values_set)


@pytest.fixture(scope="module")
def dev(files):
    return family(files, t5xxl_max_token_length=16)


@pytest.fixture(scope="module")
def parts(dev):
    return dev.load(torch.float32)


def step(flux_family, parts, captions=("a red circle", "a blue square"), seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(len(captions), 16, 8, 12, generator=generator)
    noised = flux_family.noised(latents, generator, **options)
    with torch.no_grad():
        text = flux_family.text(parts, list(captions))
    return noised, text
