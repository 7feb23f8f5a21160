"""Arguments and options that several commands share, declared once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from engram.errors import UsageError

NETWORK_METAVAR = "NAME|hf:OWNER/NAME|FOLDER"
DECODING = ("fit", "class_list", "cache", "workers")  # options as `engram.data.DecodeOptions` has them


def _bytes(text: str) -> int:
    from engram.methods import parse_bytes

    return parse_bytes(text)


def _setting(text: str) -> tuple[str, str]:
    """`KEY=VALUE`; a dash in a key is an underscore."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise UsageError(f"--set wants KEY=VALUE, such as --set learning_rate=0.5; found '{text}'.")
    return key.strip().replace("-", "_"), value


ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")]
NewModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder; created if missing.")]
LabelledImages = Annotated[
    Path, typer.Argument(metavar="FOLDER|LIST.csv", help="One sub-folder per class, or a list: path,label.")
]
Version = Annotated[int | None, typer.Option(metavar="N", help="An earlier version instead of the current one.")]
Network = Annotated[
    str | None,
    typer.Option(
        metavar=NETWORK_METAVAR,
        help="`engram networks` lists them. Default: of a model efficientnet-lite0, else by the data and from scratch.",
    ),
]
FeaturesPerClass = Annotated[int | None, typer.Option(help="Features stored per class.")]
ImagesPerClass = Annotated[int | None, typer.Option(help="Exemplars per class, which are trained on again; 0: none.")]
Budget = Annotated[
    int | None,
    typer.Option(
        metavar="BYTES", parser=_bytes, help="Most bytes for stored features and exemplars of all classes, such as 6MB."
    ),
]
Tune = Annotated[
    Literal["none", "first", "every", "auto"] | None,
    typer.Option(
        help="When to train the network: never, on the first task or update, on every one, or (auto) every time from "
        "scratch and, if pretrained, once where held-out images show a gain."
    ),
]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], typer.Option(help="Device to compute on.")]
Settings = Annotated[
    list[Any] | None,  # of pairs
    typer.Option(
        "--set", metavar="KEY=VALUE", parser=_setting, help="Any other setting; `engram methods METHOD` lists them."
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Publish updates even if accuracy on old classes falls.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]


@dataclass(kw_only=True)
class ExperimentOptions:
    """The data set, how its files are decoded, and how to run and report."""

    dataset: Annotated[str, typer.Option(help="Data set; `engram datasets` lists them.")] = "digits"
    data: Annotated[Path | None, typer.Option(help="Where its files are: a folder, or for arrays the file.")] = None
    image_size: Annotated[int | None, typer.Option(help="For image files: decode to squares of so many pixels.")] = None
    fit: Annotated[
        Literal["middle", "stretch"] | None,
        typer.Option(help="For image files: take the middle square, or stretch the image to a square."),
    ] = None
    class_list: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For image files: use only the classes in FILE, one a line.")
    ] = None
    cache: Annotated[
        int | None,
        typer.Option(
            metavar="BYTES",
            parser=_bytes,
            help="For image files: decode once, into a file of at most BYTES, such as 30GB.",
        ),
    ] = None
    workers: Annotated[
        int | None, typer.Option(min=1, help="For image files: threads that read and decode. Default: torch's.")
    ] = None
    preset: Annotated[
        Literal["paper", "short"], typer.Option(help="paper: the paper's settings; short: a few epochs, one cycle.")
    ] = "short"
    seed: Annotated[
        int, typer.Option(min=0, help="The first seed, from which the class order and weights are drawn.")
    ] = 0
    tasks: Annotated[int | None, typer.Option(help="Stop after so many tasks of the same stream.")] = None
    device: Device = "auto"
    set: Settings = None
    out: Annotated[Path | None, typer.Option(help="The folder for results. Default: one under runs/.")] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue what was interrupted in the folder.")] = False
    json: Json = False
    quiet: Quiet = False
