"""`engram export`: a model as a file that needs no engram."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import engram
from engram.cli.options import Json, ModelPath, Quiet, Version
from engram.cli.output import Display, print_json
from engram.text import format_bytes, printable

Out = Annotated[
    Path,
    typer.Argument(
        metavar="OUT.onnx|OUT.npz|OUT.safetensors",
        help=".onnx: the whole model; .npz: stored features and labels; .safetensors: the extractor's weights, for "
        "engram learn --from-weights.",
    ),
]


def export(
    model: ModelPath,
    out: Out,
    version: Version = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Export a model as ONNX, its stored features as arrays, or its weights."""
    folder = engram.model.ModelFolder(model)
    number = folder.current().version if version is None else version
    with Display(quiet=quiet) as display:
        loaded = engram.model.load(folder, version=number, device="cpu")
        exported = engram.model.export(loaded, out, version=number, overwrite=overwrite, progress=display)
    if json:
        print_json(exported.to_json())
        return
    typer.echo(f"{exported.kind}: {printable(exported.path)} ({format_bytes(exported.bytes)}, version {number})")
