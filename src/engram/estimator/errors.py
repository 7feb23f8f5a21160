"""What engram refuses, as scikit-learn would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engram.errors import DataError, UsageError


class InvalidParameter(UsageError, ValueError):
    """A parameter or setting that cannot be; a ValueError, as scikit-learn has it."""


class InvalidInput(DataError, ValueError):
    """X or y that cannot be learned from or answered for; a ValueError, as scikit-learn has it."""


@contextmanager
def as_value_errors() -> Iterator[None]:
    """Inside, what engram refuses is a ValueError too."""
    try:
        yield
    except UsageError as error:
        raise InvalidParameter(str(error)) from error
    except DataError as error:
        raise InvalidInput(str(error)) from error
