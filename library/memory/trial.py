"""A trial preparation."""

from library.memory.prepare import restored_after as undone

__all__ = ["undone"]
