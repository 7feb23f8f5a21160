"""Turn the section Unreleased of CHANGELOG.md into that of a version: python .ci/changelog.py VERSION [DATE].

It refuses a version that is not the one of the package, of CITATION.cff and of the documents. A section that is there
already is left as it is, so that a release can be tried again.
"""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACES = {  # every place that names the version
    "src/engram/__init__.py": r'^__version__ = "(.*)"$',
    "CITATION.cff": r"^version: (.*)$",
    "docs/install.md": r"engram-([\d.]+)-py3",
}
UNRELEASED = "## [Unreleased]"


def write(version: str, date: str) -> str:
    """Write the section, and say what was done."""
    for place, pattern in PLACES.items():
        found = re.search(pattern, (ROOT / place).read_text(encoding="utf-8"), re.MULTILINE)
        if found is None or found[1] != version:
            sys.exit(f"{place} names version {found and found[1]}, not {version}.")
    path = ROOT / "CHANGELOG.md"
    text = path.read_text(encoding="utf-8")
    if f"## [{version}]" in text:
        return f"CHANGELOG.md has a section for {version}."
    changes = text.split(f"{UNRELEASED}\n", 1)[1].split("\n## [", 1)[0].strip()
    if not changes:
        sys.exit("CHANGELOG.md lists no changes under Unreleased.")
    path.write_text(text.replace(f"{UNRELEASED}\n", f"{UNRELEASED}\n\n## [{version}] - {date}\n", 1), encoding="utf-8")
    return f"CHANGELOG.md: the changes under Unreleased are now those of {version}."


if __name__ == "__main__":
    print(write(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else datetime.date.today().isoformat()))
