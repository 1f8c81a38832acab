"""Files for whole trainings, made once."""

from tests.training import demo, shapes, squares  # noqa: F401
