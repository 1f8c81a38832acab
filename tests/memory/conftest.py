"""The demo's files and pictures, made once."""

from tests.training import demo, shapes, squares  # noqa: F401
