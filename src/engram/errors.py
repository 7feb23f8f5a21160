"""Errors with messages for people: what was found, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EngramError(Exception):
    """Base class. The command line prints the message and exits with `exit_code`."""

    exit_code = 1


class UsageError(EngramError):
    """Wrong usage: an unknown name, a value out of range, contradictory settings."""

    exit_code = 2


class DataError(EngramError):
    """Data that is missing, damaged, or in an unexpected format."""


class BusyError(EngramError):
    """Another process holds the lock."""


class TrainingError(EngramError):
    """The loss, a gradient or a weight became NaN or infinite; the task was not committed."""


class LostError(EngramError):
    """Another rank of this distributed run has died."""


class ElsewhereError(EngramError):
    """Another rank of this distributed run has failed and reports why; this one exits with the same code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngramWarning(UserWarning):
    """Something the user should know that is not an error."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The last sentence of an error about an unknown name: the most similar known name, or all of them."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, cutoff=0.5)
    close.sort(key=lambda each: sorted(each) != sorted(name))  # letters in another order are the likeliest slip
    return f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(choices)}."


def unknown(kind: str, name: str, known: Iterable[str], see: str = "") -> UsageError:
    """The error for a name that is not in a registry."""
    return UsageError(f"There is no {kind} '{name}'. {nearest(name, known)}" + (f" See: {see}" if see else ""))


def not_installed(what: str, extra: str) -> UsageError:
    """The error for a missing package that an extra of engram installs."""
    return UsageError(f"{what} must be installed. In engram's folder: pip install -c constraints.txt -e '.[{extra}]'")
