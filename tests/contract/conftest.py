"""Files for whole trainings, written once per session."""

import pytest

from tests.training import cached_shapes as shapes  # noqa: F401
from tests.training import cached_squares as squares  # noqa: F401
from tests.training import shallow, short_captions  # noqa: F401


@pytest.fixture(scope="session")
def demo(shallow):  # noqa: F811
    return shallow  # nothing here depends on the number of blocks
