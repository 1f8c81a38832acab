"""Files for whole trainings, written once per session."""

import pytest

from tests.training import cached_shapes as shapes  # noqa: F401
from tests.training import cached_squares as squares  # noqa: F401
from tests.training import demo as deep  # noqa: F401
from tests.training import shallow  # noqa: F401


@pytest.fixture(scope="session")
def demo(request):
    """Models of few blocks; tests that count blocks or layers use `@several_blocks`."""
    return request.getfixturevalue(getattr(request, "param", "shallow"))
