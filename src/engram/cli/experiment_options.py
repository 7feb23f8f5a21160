"""The options of `engram run` and `engram suite`: dataclasses whose fields are options of the command line."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from engram.cli.options import NETWORK_METAVAR, Device, Json, Quiet, Settings, Tune, parse_settings
from engram.cli.output import skipped_lines

if TYPE_CHECKING:
    from engram.cli.display import Display
    from engram.data import Dataset, DecodeOptions
    from engram.experiments import Plan
    from engram.experiments.suite_plan import SuiteOptions

Options = TypeVar("Options")

PLANNED = ("method", "preset", "classes_per_task", "first_task", "tasks", "class_order", "validation", "seed")
SETTINGS = ("network", "tune", "epochs", "features_per_class", "images_per_class", "images_total", "device")


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
        """How image files are decoded."""
        from engram.data import DecodeOptions
        from engram.methods import parse_bytes

        cache = None if self.cache is None else parse_bytes(self.cache)
        return DecodeOptions(
            size=self.image_size, fit=self.fit, class_list=self.class_list, cache=cache, workers=self.workers
        )


@dataclass(kw_only=True)
class RunCommandOptions(ExperimentOptions):
    """The options of `engram run`."""

    method: Annotated[str, typer.Argument(help="Method; `engram methods` lists them.")] = "features"
    network: Annotated[
        str | None,
        typer.Option(metavar=NETWORK_METAVAR, help="`engram networks` lists them. Default: from scratch, by the data."),
    ] = None
    tune: Tune = None
    classes_per_task: Annotated[int | None, typer.Option(help="Classes per task. Default: by the data.")] = None
    first_task: Annotated[int | None, typer.Option(help="Classes of the first task, if another number.")] = None
    class_order: Annotated[
        str, typer.Option(help="seed: drawn from the seed; 1993: the field's; or a file, one class a line.")
    ] = "seed"
    validation: Annotated[
        float, typer.Option(help="Hold out this share of the training samples, and test on it instead.")
    ] = 0.0
    epochs: Annotated[int | None, typer.Option(help="Epochs per task. Default: by the preset.")] = None
    features_per_class: Annotated[
        int | None, typer.Option(help="Features stored per class. Default: by the preset.")
    ] = None
    images_per_class: Annotated[int | None, typer.Option(help="Exemplars per class. Default: by the preset.")] = None
    images_total: Annotated[int | None, typer.Option(help="Exemplars in all, shared out among the classes seen.")] = (
        None
    )
    budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory for all classes, such as 6MB: chooses these numbers, and a codec."),
    ] = None
    seeds: Annotated[int | None, typer.Option(min=1, help="Run so many seeds, from --seed up.")] = None
    trainings: Annotated[
        Path | None, typer.Option(help="A folder of trained networks, shared by runs that differ only after training.")
    ] = None
    track: Annotated[bool, typer.Option("--track", help="Also write TensorBoard scalars to the run's folder.")] = False

    def plan(self) -> Plan:
        """The plan of the run."""
        from engram.experiments import Plan
        from engram.methods import parse_bytes

        given = {name: value for name in SETTINGS if (value := getattr(self, name)) is not None}
        return Plan(
            settings={**given, **parse_settings(self.set)},
            budget=None if self.budget is None else parse_bytes(self.budget),
            **{name: getattr(self, name) for name in PLANNED},
        )


@dataclass(kw_only=True)
class SuiteCommandOptions(ExperimentOptions):
    """The options of `engram suite`."""

    name: Annotated[str, typer.Argument(help="Table or figure; `engram suites` lists them.")]
    seeds: Annotated[int, typer.Option(min=1, help="Run so many seeds, from --seed up.")] = 1
    methods: Annotated[str, typer.Option(metavar="A,B", help="Only these methods of the suite.")] = ""
    plan: Annotated[bool, typer.Option("--plan", help="Print the runs, their time and memory; run nothing.")] = False
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time. Default: 1; on Ray as many as there is room for.")
    ] = None
    on: Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a Ray cluster.")] = "local"

    def suite_options(self) -> SuiteOptions:
        """What to run."""
        from engram.experiments.suite_plan import SuiteOptions

        same = ("dataset", "data", "out", "preset", "seeds", "seed", "tasks")
        return SuiteOptions(
            suite=self.name,
            decoding=self.decoding(),
            methods=tuple(method for method in self.methods.split(",") if method),
            settings={**({} if self.device == "auto" else {"device": self.device}), **parse_settings(self.set)},
            **{name: getattr(self, name) for name in same},
        )


def print_skipped(dataset: Dataset, display: Display) -> None:
    """Print a line for each file that is not among the samples, up to a number."""
    for line in skipped_lines(dataset.skipped):
        display.say(line)
