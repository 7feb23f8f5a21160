"""Text from outside, made safe for where it is shown."""

from __future__ import annotations

import unicodedata
from pathlib import Path

LONGEST_NAME = 10_000  # letters
NOT_IN_NAMES = frozenset({"Cc", "Cs", "Zl", "Zp"})  # control characters, surrogates, line and paragraph separators
UNSEEN = frozenset({"Cf", "Mn", "Zs"})  # joiners, accents, blanks: allowed between letters, not alone
BLANKS = frozenset("\u115f\u1160\u2800\u3164\uffa0\U0001d159")  # letters and symbols that are shown as blanks
FORMULAS = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20", "\t", "\r")  # how spreadsheets' formulas begin


def printable(text: object) -> str:
    """A path or a name on one line that any terminal can print: what is not printable is escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in str(text)
    )


def csv_text(text: str) -> str:
    """The text for a CSV cell, so that no spreadsheet takes it for a formula."""
    return f"'{text}" if text.startswith(FORMULAS) else text


def composed(name: str) -> str:
    """A name in the form in which it is stored: accents composed with their letters (NFC), no blanks around it."""
    return unicodedata.normalize("NFC", name).strip()


def names_in(path: Path) -> list[str]:
    """The names in a UTF-8 text file, one per line, with the line ends of any system."""
    if not path.is_file():  # reading a pipe or a device may never end
        raise OSError(f"{printable(path)} is not a regular file")
    return [name for line in path.read_text(encoding="utf-8-sig").splitlines() if (name := composed(line))]


def unfit(name: str) -> str | None:
    """Why this cannot be the name of a class, in a sentence; None if it can: people must be able to read it."""
    if not name.strip():
        return "A class cannot have an empty name."
    if len(name) > LONGEST_NAME:
        return f"The name of a class has {LONGEST_NAME:,} letters at most; '{printable(name[:20])}…' has {len(name):,}."
    kinds = {"Zs" if letter in BLANKS else unicodedata.category(letter) for letter in name}
    if kinds & NOT_IN_NAMES or not kinds - UNSEEN:
        return f"'{printable(name)}' cannot be the name of a class: it has characters that cannot be shown on a line."
    return None


def format_bytes(count: int) -> str:
    """Bytes in MB of 2^20, as the paper counts, in KB where they are few and in GB where they are many."""
    if count >= 10 * 2**30:
        return f"{count / 2**30:,.1f} GB"
    return f"{count / 2**20:.2f} MB" if count >= 100 * 2**10 else f"{count / 2**10:.1f} KB"


def format_duration(seconds: float) -> str:
    """A duration in seconds, minutes or hours."""
    if seconds < 90:
        return f"{max(seconds, 1):.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def plural(number: int, noun: str) -> str:
    """`1 class`, `2 classes`, `1,234 images`."""
    many = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else many}"
