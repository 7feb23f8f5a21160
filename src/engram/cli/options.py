"""Arguments and options that several commands share, declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engram.errors import UsageError

NETWORK_METAVAR = "NAME|hf:OWNER/NAME|FOLDER"

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")]
LabelledImages = Annotated[
    Path, typer.Argument(metavar="FOLDER|LIST.csv", help="One sub-folder per class, or a list: path,label.")
]
Generation = Annotated[int | None, typer.Option(metavar="N", help="An earlier generation instead of the current one.")]
Tune = Annotated[
    Literal["none", "first", "every", "auto"] | None,
    typer.Option(
        help="When to train the network: never, on the first task or update, on every one, or (auto) every time from "
        "scratch and, if pretrained, once where held-out images show a gain."
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Device to compute on.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; `engram methods METHOD` lists them."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


def parse_settings(texts: list[str] | None) -> dict[str, Any]:
    """`KEY=VALUE` texts as a mapping; a dash in a key is an underscore."""
    settings: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UsageError(f"--set wants KEY=VALUE, such as --set learning_rate=0.5; found '{text}'.")
        settings[key.strip().replace("-", "_")] = value
    return settings
