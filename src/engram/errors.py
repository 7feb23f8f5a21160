"""The errors a person reads: one sentence that says what was found and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class EngramError(Exception):
    """Something could not be done. The message is shown as it is; the command line exits with `exit_code`."""

    exit_code = 1


class UsageError(EngramError):
    """The request itself was wrong: an unknown name, a value out of range, settings that contradict each other."""

    exit_code = 2


class DataError(EngramError):
    """Data that is missing, damaged, or not of the form it should have."""


class BusyError(EngramError):
    """Another process is working in the same place."""


class TrainingError(EngramError):
    """Training left the finite numbers; nothing of it was kept."""


class LostError(EngramError):
    """Another process of the same run is gone, and the run with it."""


class ElsewhereError(EngramError):
    """Another process of the same run has failed and says why; this one ends with the same exit code."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngramWarning(UserWarning):
    """Something a person should know that does not stop the work."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one nearest to it, or all of them."""
    choices = sorted(known)
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"Did you mean '{close[0]}'?" if close else f"There are: {', '.join(choices)}."


def unknown(kind: str, name: str, known: Iterable[str], see: str = "") -> UsageError:
    """The error for a name that is not in a table."""
    return UsageError(f"There is no {kind} '{name}'. {nearest(name, known)}" + (f" See: {see}" if see else ""))


def not_installed(what: str, extra: str) -> UsageError:
    """The error where a package is missing that an extra of engram brings."""
    return UsageError(f"{what} must be installed. In engram's folder: pip install -c constraints.txt '.[{extra}]'")
