"""What lies in a folder of pictures: folders, pictures, and what is neither. Names alone tell; nothing is opened."""

from __future__ import annotations

import os
import stat
from typing import AnyStr

# What is looked for in a folder. A picture's content decides how it is decoded, whatever its name.
EXTENSIONS = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".bmp", ".gif", ".heic", ".heif", ".hif")

# What systems leave in folders of pictures, besides what begins with a dot; in small letters.
SYSTEM_NAMES = frozenset(
    {"__macosx", "thumbs.db", "desktop.ini", "@eadir", "$recycle.bin", "lost+found", "system volume information"}
)

CIRCLE = "This link leads in a circle, back to a folder that it lies in."

_ENDINGS = tuple(os.fsencode(ending) for ending in EXTENSIONS)
_PASSED_OVER = frozenset(os.fsencode(name) for name in SYSTEM_NAMES)

Identity = tuple[int, int]  # of a folder: device and inode


def is_passed_over(entry: os.DirEntry[AnyStr]) -> bool:
    """Whether an entry is none of a person's: hidden, or left there by a system."""
    name = os.fsencode(entry.name)
    return name.startswith(b".") or name.lower() in _PASSED_OVER


def is_folder(entry: os.DirEntry[AnyStr]) -> bool:
    """Whether an entry is a folder that may be entered, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or into a folder that may not be entered
        return False


def problem_of(entry: os.DirEntry[AnyStr]) -> str:
    """Why an entry that is no folder is no picture, by its name and kind alone; or nothing."""
    try:
        kind = entry.stat().st_mode
    except OSError:
        return "This link leads nowhere." if entry.is_symlink() else "It cannot be looked at."
    if not stat.S_ISREG(kind):
        return "It is not a file."
    if not os.fsencode(entry.name).lower().endswith(_ENDINGS):
        return f"Its name does not end like that of a picture: {', '.join(EXTENSIONS)}."
    return ""


def identity_of(found: os.stat_result) -> Identity:
    """What tells a folder from all others, however it is reached."""
    return found.st_dev, found.st_ino
