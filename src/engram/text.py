"""Text from outside, made safe for where it is shown."""

from __future__ import annotations


def shown(text: object) -> str:
    """A path or a name on one line that any terminal can print: what is not printable is escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in str(text)
    )


def csv_text(text: str) -> str:
    """The text for a CSV cell, so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
