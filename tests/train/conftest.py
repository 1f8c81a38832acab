"""Files for whole trainings, made once."""

import pytest

from tests.training import cached_shapes as shapes  # noqa: F401
from tests.training import cached_squares as squares  # noqa: F401
from tests.training import demo as deep  # noqa: F401
from tests.training import shallow  # noqa: F401


@pytest.fixture(scope="session")
def demo(request):
    """Models of few blocks; a test that counts them says `@several_blocks`."""
    return request.getfixturevalue(getattr(request, "param", "shallow"))
