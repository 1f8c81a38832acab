"""Files for whole trainings, made once."""

import pytest

from tests.training import shallow, shapes, short_captions, squares  # noqa: F401


@pytest.fixture(scope="session")
def demo(shallow):  # noqa: F811
    """Models of few blocks, as nothing here depends on how many there are."""
    return shallow
