"""The steps are tested as runs make them, on the same small data set."""

from tests.engine.conftest import data, tiny

__all__ = ["data", "tiny"]
