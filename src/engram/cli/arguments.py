"""Arguments and options that several commands have, with one wording."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
