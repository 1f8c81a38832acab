"""The demo's files and pictures, written once per session."""

import pytest

from tests.training import shallow_unet, shapes, short_captions, squares  # noqa: F401


@pytest.fixture(scope="session")
def demo(shallow_unet):  # noqa: F811
    """Models of several blocks, for blocks to swap; SDXL has fewer of each kind, which is enough."""
    return shallow_unet
