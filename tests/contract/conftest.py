"""Files for whole trainings, made once."""

import pytest

from tests.training import cached_shapes as shapes  # noqa: F401
from tests.training import cached_squares as squares  # noqa: F401
from tests.training import shallow, short_captions  # noqa: F401


@pytest.fixture(scope="session")
def demo(shallow):  # noqa: F811
    """Models of few blocks, as nothing here depends on how many there are."""
    return shallow
