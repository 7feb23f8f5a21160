"""`engram export`: a model as a file for those who have no engram."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from engram.cli.options import Json, ModelPath, Quiet
from engram.cli.words import megabytes
from engram.text import printable


def export(
    model: ModelPath,
    out: Annotated[
        Path,
        typer.Argument(
            metavar="OUT",
            help="The file: .onnx, the whole model; .npz, the stored vectors and labels; "
            ".safetensors, the extractor's weights, for engram learn --from-weights.",
        ),
    ],
    generation: Annotated[
        int | None, typer.Option(metavar="N", help="An earlier generation; by default the one in use.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model as ONNX, what it keeps as arrays, or its weights. The model stays as it is."""
    from engram.cli.display import Display
    from engram.model import ModelFolder, load
    from engram.model import export as export_model

    folder = ModelFolder(model)
    number = folder.current().generation if generation is None else generation
    with Display(quiet=quiet) as display:
        loaded = load(folder, generation=number, device="cpu")
        exported = export_model(loaded, out, generation=number, overwrite=overwrite, progress=display)
    if json:
        typer.echo(json_format.dumps(exported.to_json()))
        return
    typer.echo(f"{exported.kind}: {printable(exported.path)} ({megabytes(exported.bytes)}, generation {number})")
