"""Tiny checkpoints in the real formats, written once for all family tests."""

import pytest

from tests.families.flux import dev, files, parts, schnell  # noqa: F401
from tests.training import demo  # noqa: F401


@pytest.fixture(scope="session")
def tiny_sdxl(tmp_path_factory):
    """A single-file SDXL checkpoint in float32, its tokenizers beside it."""
    import torch

    from library.families.sdxl import random

    return random.write_random_model(tmp_path_factory.mktemp("sdxl"), dtype=torch.float32)


@pytest.fixture(scope="session")
def tiny_sdxl_folder(tmp_path_factory):
    """The same model as a diffusers folder."""
    import torch

    from tests import sdxl_files

    return sdxl_files.write_diffusers(tmp_path_factory.mktemp("sdxl_diffusers"), dtype=torch.float32)
