"""How commands are asked about data sets of files, and how they tell what was left out of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from engram.cli.output import skipped_lines

if TYPE_CHECKING:
    from engram.cli.display import Display
    from engram.data import Dataset, DecodeOptions

ImageSize = Annotated[
    int | None, typer.Option(help="Of data sets of files: pixels a side that pictures are decoded to.")
]
FitOption = Annotated[
    Literal["middle", "stretch"] | None,
    typer.Option(help="Of data sets of files: the middle square of a picture, or all of it made square."),
]
ClassList = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Of data sets of files: the classes to take, one a line.")
]
Cache = Annotated[
    str | None,
    typer.Option(metavar="BYTES", help="Of data sets of files: decode once into a file of at most this, such as 30GB."),
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Of data sets of files: threads that read and decode. Default: as torch.")
]


def decode_options(
    image_size: int | None,
    fit: Literal["middle", "stretch"] | None,
    class_list: Path | None,
    cache: str | None,
    workers: int | None,
) -> DecodeOptions:
    """What was asked for."""
    from engram.data import DecodeOptions
    from engram.methods import parse_bytes

    return DecodeOptions(
        size=image_size,
        fit=fit,
        class_list=class_list,
        cache=None if cache is None else parse_bytes(cache),
        workers=workers,
    )


def print_skipped(dataset: Dataset, display: Display) -> None:
    """A line for each file that is not among the samples, up to a number."""
    for line in skipped_lines(dataset.skipped):
        display.say(line)
