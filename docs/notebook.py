"""Makes examples/tutorial.ipynb from docs/tutorial.md, so that the tutorial is written once.

python docs/notebook.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE / "tutorial.md"
NOTEBOOK = HERE.parent / "examples" / "tutorial.ipynb"


def cells(page: Path) -> list[tuple[str, str]]:
    """The page as cells: kind (markdown or code) and text. What the code prints and draws is dropped."""
    text = re.sub(
        r"<!--.*?-->\n|^!\[[^]]*\]\([^)]*\)\n|^```text\n.*?^```\n",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL | re.M,
    )
    parts = re.split(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    kinds = ("markdown", "code")
    found = [(kinds[number % 2], part.strip()) for number, part in enumerate(parts)]
    return [(kind, part) for kind, part in found if part]


def code(page: Path) -> str:
    """All code of the page, as one program."""
    return "\n\n".join(text for kind, text in cells(page) if kind == "code")


def as_notebook(page: Path) -> str:
    """The notebook, without outputs."""
    made = []
    for number, (kind, text) in enumerate(cells(page)):
        if kind == "markdown":  # links are relative to examples/
            text = re.sub(r"\]\((?![a-z]+:|#)", "](../docs/", text)
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": text.splitlines(keepends=True)}
        made.append(cell | ({"execution_count": None, "outputs": []} if kind == "code" else {}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(as_notebook(PAGE), encoding="utf-8")
    print(NOTEBOOK.relative_to(HERE.parent))
