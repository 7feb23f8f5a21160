"""Arguments and options that several commands share, declared once; and commands whose options are a dataclass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from engram.errors import UsageError

if TYPE_CHECKING:
    from engram.data import DecodeOptions

Options = TypeVar("Options")

NETWORK_METAVAR = "NAME|hf:OWNER/NAME|FOLDER"

ModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder.")]
NewModelPath = Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder; created if missing.")]
LabelledImages = Annotated[
    Path, typer.Argument(metavar="FOLDER|LIST.csv", help="One sub-folder per class, or a list: path,label.")
]
Generation = Annotated[int | None, typer.Option(metavar="N", help="An earlier generation instead of the current one.")]
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
    str | None,
    typer.Option(metavar="BYTES", help="Most bytes for stored features and exemplars of all classes, such as 6MB."),
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
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting; `engram methods METHOD` lists them."),
]
Force = Annotated[bool, typer.Option("--force", help="Publish updates even if accuracy on old classes falls.")]
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


def parse_optional_bytes(text: str | None) -> int | None:
    """A number of bytes such as 6MB, if one is given."""
    from engram.methods import parse_bytes

    return None if text is None else parse_bytes(text)


def command(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Turn a function of a dataclass into a command whose options are the fields of the dataclass."""
    hints = get_type_hints(options, include_extras=True)

    def decorate(function: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(function)
        def called(**values: Any) -> None:
            function(options(**values))

        called.__annotations__ = {}
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    each.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if each.default is MISSING else each.default,
                    annotation=hints[each.name],
                )
                for each in fields(options)  # type: ignore[arg-type]
            ]
        )
        return called

    return decorate


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
        str | None,
        typer.Option(metavar="BYTES", help="For image files: decode once, into a file of at most BYTES, such as 30GB."),
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

    def decoding(self) -> DecodeOptions:
        from engram.data import DecodeOptions

        return DecodeOptions(
            size=self.image_size,
            fit=self.fit,
            class_list=self.class_list,
            cache=parse_optional_bytes(self.cache),
            workers=self.workers,
        )
