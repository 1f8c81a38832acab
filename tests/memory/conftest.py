"""The demo's files and pictures, made once."""

import pytest

from tests.training import shallow_unet, shapes, short_captions, squares  # noqa: F401


@pytest.fixture(scope="session")
def demo(shallow_unet):  # noqa: F811
    """Models of several blocks, all of which can wait in host memory; of SDXL's, fewer of each kind are enough."""
    return shallow_unet
