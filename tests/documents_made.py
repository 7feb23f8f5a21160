"""The code blocks of the documents, and a folder in which they can be run as they are printed."""

from __future__ import annotations

import os
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from folders_made import write

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
FENCE = re.compile(r"^(?:<!-- ([^>]*?) -->\n)?```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = ("sh", "console")
SHOWN = ("text", "json")  # output, layouts of folders: not to be run


@dataclass(frozen=True)
class Block:
    """A code block: its language, text and line, and what the comment above it says."""

    document: Path
    line: int
    language: str
    text: str
    comment: str

    @property
    def commands(self) -> str:
        """What to run: of a console, the lines behind its prompts."""
        if self.language != "console":
            return self.text
        return "\n".join(re.findall(r"^\$ (.*(?:\\\n.*)*)$", self.text, re.MULTILINE))

    @property
    def skipped(self) -> bool:
        return self.comment.startswith("not run: ")

    @property
    def background(self) -> bool:
        return self.comment == "runs in the background"


def blocks(document: Path) -> list[Block]:
    """The code blocks of a document, except directives of Sphinx."""
    text = document.read_text(encoding="utf-8")
    found = [
        Block(document, text.count("\n", 0, match.start(2)) + 1, match[2].strip(), match[3], match[1] or "")
        for match in FENCE.finditer(text)
    ]
    return [block for block in found if not block.language.startswith("{")]


MONTHS = {
    "january": ("chair", "crab", "crayfish", "cup"),
    "march": ("elephant", "emu", "ferry", "grand_piano"),
    "april": ("kangaroo",),
    "june": ("chair", "crab", "crayfish", "cup"),
    "september": ("lotus", "umbrella", "windsor_chair"),
}
CLASSES = list(dict.fromkeys(name for names in MONTHS.values() for name in names))
PER_CLASS = 3  # enough to calibrate a model of four classes


def prepare(folder: Path) -> None:
    """Write the photos that the documents speak of, and the files that they name."""
    for number, (month, names) in enumerate(MONTHS.items()):
        for name in names:
            for index in range(PER_CLASS):
                write(folder / month / name / f"{index}.jpg", CLASSES.index(name), PER_CLASS * number + index)
    for label, name in enumerate(CLASSES):
        write(folder / "test" / name / "0.jpg", label, 100)
    for index in range(3):
        write(folder / "incoming" / f"{index}.jpg", index, 200)
        write(folder / "other" / f"{index}.jpg", 50 + index, 0)
        write(folder / f"{index}.jpg", index, 300)
    shutil.copy(folder / "1.jpg", folder / "photo.jpg")
    for name in ("means.py", "hold.py"):
        shutil.copy(ROOT / "examples" / name, folder)


def environment(commands: Path) -> dict[str, str]:
    """Variables of a shell that finds these commands first, and none of the user's settings for engram."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("ENGRAM_", "RAY_", "HF_"))}
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), variables.get("PATH", "")])
    return {**variables, "PATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "COLUMNS": "120"}
