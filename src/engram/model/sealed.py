"""JSON files that carry their own checksum.

The first entry of such a file is `sha256`, the digest of every byte after its digits. So any change is found, even one
that leaves the same JSON, without a second file, and whatever schema the rest has.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from engram.errors import DataError
from engram.storage import parse_json

OPENING = b'{\n  "sha256": "'
DIGITS = 64
LONGEST = 16 * 2**20  # bytes; the names of a million classes fit


def seal(value: Mapping[str, Any]) -> bytes:
    """The content of the file that holds `value`. What is not JSON is a ValueError or TypeError."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False)
    rest = f'",{text[1:]}\n'.encode()
    return OPENING + hashlib.sha256(rest).hexdigest().encode() + rest


def unseal(content: bytes, name: str) -> dict[str, Any]:
    """What the file `name` of this content holds, if it is unchanged since it was sealed."""
    carried, rest = content[len(OPENING) :][:DIGITS], content[len(OPENING) + DIGITS :]
    if not content.startswith(OPENING) or hashlib.sha256(rest).hexdigest().encode() != carried:
        raise DataError(f"{name} was changed or cut short: its content does not have the SHA-256 that it carries.")
    value: dict[str, Any] = parse_json(content, name)
    del value["sha256"]
    return value
