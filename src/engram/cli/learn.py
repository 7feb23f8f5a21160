"""`engram learn`: teach a model the pictures of a folder, or make one from them."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engram.cli.options import Device, Json, Quiet, Settings, parse_settings
from engram.cli.words import counted, megabytes, minutes, print_skipped, table
from engram.errors import UsageError
from engram.text import printable

if TYPE_CHECKING:
    from engram.data.scanning import SkippedFile
    from engram.model import ClassAccuracy, LearnOptions, ModelFolder, UpdatePlan, UpdateResult
    from engram.progress import Progress

NAMED = 12  # classes that a line names before it only counts
GOOD_ENOUGH = 0.5
MOST_DIGITS = 9  # of a number of epochs


def learn(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="The model's folder; made if there is none.")],
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER|LIST.csv", help="One sub-folder per class, or a list: path,label.")
    ],
    budget: Annotated[
        str | None, typer.Option(metavar="BYTES", help="What all that is kept may take, such as 50MB, from now on.")
    ] = None,
    features_per_class: Annotated[int | None, typer.Option(help="Features kept per class: 250.")] = None,
    images_per_class: Annotated[
        int | None, typer.Option(help="Keep so many images per class too, and learn from them again; 0: none any more.")
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="How a new model learns; `engram methods` lists them. Default: engram.")
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|hf:OWNER/NAME|FOLDER",
            help="The network of a new model; `engram networks` lists them. Default: efficientnet-lite0, pretrained.",
        ),
    ] = None,
    tune: Annotated[
        Literal["none", "first", "every", "auto"] | None,
        typer.Option(
            help="When the network is trained: never, on the first update, on every one, or where held-out images "
            "show that it helps. Default: auto."
        ),
    ] = None,
    classifier: Annotated[
        str | None,
        typer.Option(
            help="nearest-mean, ridge, lda, random-projection, softmax, svm, or auto: chosen by cross-validation on "
            "the stored features. Default: auto with a pretrained network."
        ),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Pixels a side at which pictures are seen. Default: by the data.")
    ] = None,
    epochs: Annotated[str, typer.Option(help="How often the pictures are gone through, or auto.")] = "auto",
    from_weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start a new model from the weights in a .safetensors or .pth.")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Show each class before and after; publish only what is good enough.")
    ] = False,
    at_least: Annotated[
        float | None,
        typer.Option(
            help=f"Least accuracy, as a mean over classes, to publish; {GOOD_ENOUGH} by default. Implies --validate."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Publish the update even if accuracy on old classes falls sharply.")
    ] = False,
    hold_out: Annotated[
        float, typer.Option(help="Where the network is trained: the share of the pictures held out to judge it by.")
    ] = 0.1,
    set: Settings = None,
    seed: Annotated[
        int | None, typer.Option(help="Of all that is drawn. Default: 0 for a new model, which keeps it.")
    ] = None,
    device: Device = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be learned, how long it takes and what is kept.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Teach a model new classes, or more of those it knows. The pictures may be gone afterwards.

    Of some pictures of each class a short vector is kept, and no picture unless asked for. Vectors are not anonymous.
    """
    from engram.cli.display import Display
    from engram.methods import parse_bytes
    from engram.model import LearnOptions, ModelFolder, UpdateRejected
    from engram.model import learn as learn_images
    from engram.network import parallel

    parallel.refuse_torchrun("engram learn")

    validate = validate or at_least is not None
    settings = parse_settings(set)
    own = {
        "features_per_class": features_per_class,
        "images_per_class": images_per_class,
        "network": network,
        "tune": tune,
        "classifier": classifier,
    }
    for name, value in own.items():
        if value is not None and str(value) != settings.get(name, str(value)):
            option = f"--{name.replace('_', '-')} {value}"
            raise UsageError(f"{option} and --set {name}={settings[name]} contradict each other. Give one of them.")
    options = LearnOptions(
        method=method,
        network=network,
        tune=tune,
        classifier=classifier,
        force=force,
        image_size=image_size,
        epochs=_epochs(settings.pop("epochs", epochs)),
        features_per_class=features_per_class,
        images_per_class=images_per_class,
        budget=None if budget is None else parse_bytes(budget),
        weights=from_weights,
        settings=settings,
        hold_out=hold_out,
        at_least=None if not validate else GOOD_ENOUGH if at_least is None else at_least,
        seed=seed,
        device=device,
    )
    folder = ModelFolder(model)
    folder.check_place()
    before = folder.current().generation if folder.exists() else 0
    try:
        with Display(quiet=quiet) as display:
            if dry_run:
                _dry_run(folder, source, options, display, json)
                return
            learned = learn_images(folder, source, options, display)
    except KeyboardInterrupt:
        typer.echo(f"Stopped. {_left_behind(folder, before)}", err=True)
        raise typer.Exit(130) from None
    except UpdateRejected as error:
        judged = [vars(each) for each in error.class_accuracies]
        plain = {"published": False, "reason": str(error), "class_accuracies": judged, "warnings": error.warnings}
        text = "\n".join([_table(error.class_accuracies), *_warnings(error.warnings)])
        typer.echo(json_format.dumps(plain) if json else text)
        raise
    print_skipped(learned.skipped)
    if json:
        typer.echo(json_format.dumps({"published": True, **learned.to_json()}))
        return
    if validate:
        typer.echo(_table(learned.class_accuracies))
    typer.echo("\n".join(_lines(learned, model)))


def _epochs(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or len(text) > MOST_DIGITS or not int(text):
        raise UsageError(f"--epochs is a whole number from 1 up, or auto; found '{text}'.")
    return int(text)


def _left_behind(folder: ModelFolder, before: int) -> str:
    """What an interruption found: it may have come just after the model was published."""
    now = folder.current().generation if folder.exists() else 0
    return "Nothing was changed." if now == before else f"What was learned is generation {now} already."


def _dry_run(folder: ModelFolder, source: Path, options: LearnOptions, progress: Progress, json: bool) -> None:
    from engram.data.labelled import scan
    from engram.model import expected_seconds, load, plan_update

    found = scan(source, progress)
    known = load(folder, device=options.device) if folder.exists() else None
    plan = plan_update(known, found, options)
    seconds = expected_seconds(plan)
    print_skipped(found.skipped)
    if json:
        typer.echo(json_format.dumps({**_plain(plan, found.skipped), "seconds": seconds}))
        return
    learner = plan.learner
    what = "teach" if known is not None else "make"
    per_class = learner.settings().get("features_per_class")
    lines = [
        f"would {what} {printable(folder.path)}: {_counts(plan.new, plan.more)}",
        f"network {printable(plan.network)} at {plan.image_size} pixels, {_training(plan)}; "
        f"about {minutes(seconds)} here",
        f"kept: at most {megabytes(plan.memory_bytes)}"
        + (f", up to {counted(per_class, 'feature')} a class" if per_class else "")
        + (f"; the budget is {megabytes(plan.budget)}" if plan.budget else ""),
        "Nothing was changed.",
    ]
    typer.echo("\n".join(lines))


def _training(plan: UpdatePlan) -> str:
    """Whether the network would be trained, and why."""
    epochs = counted(plan.learner.training.epochs, "epoch")
    if plan.tuning is None:
        return f"tuned for {epochs} if a trial on held-out images shows that it helps"
    if plan.tuning.tunes:
        return f"trained for {epochs} ({plan.tuning.reason})"
    return f"not trained ({plan.tuning.reason})"


def _plain(plan: UpdatePlan, skipped: Sequence[SkippedFile]) -> dict[str, Any]:
    return {
        "new": dict(plan.new),
        "more": dict(plan.more),
        "classes": len(plan.names),
        "method": plan.learner.name,
        "network": plan.network,
        "image_size": plan.image_size,
        "epochs": plan.learner.training.epochs if plan.trains else 0,
        "memory_bytes": plan.memory_bytes,
        "budget": plan.budget,
        "skipped": [left.to_json() for left in skipped],
    }


def _counts(new: Mapping[str, int], more: Mapping[str, int]) -> str:
    """The classes that arrive, with how many pictures there are of each."""
    parts = []
    for kind, classes in (("new", new), ("known", more)):
        names = [f"{printable(name)} {count:,}" for name, count in classes.items()]
        if len(names) > NAMED:
            names[NAMED:] = [f"and {len(names) - NAMED:,} more"]
        if names:
            parts.append(f"{counted(len(classes), f'{kind} class')} ({', '.join(names)})")
    return ", ".join(parts)


def _lines(learned: UpdateResult, model: Path) -> list[str]:
    pictures = counted(sum(learned.new.values()) + sum(learned.more.values()), "picture")
    lines = [
        f"learned {_counts(learned.new, learned.more)} in {minutes(learned.seconds)}",
        f"{printable(model)}, generation {learned.generation}: {counted(learned.classes, 'class')}; "
        f"{megabytes(learned.memory_bytes)} stored in all; this update: {pictures}, {megabytes(learned.seen_bytes)}",
    ]
    lines.append(_accuracy(learned))
    calibration = learned.calibration
    if calibration.error_after is not None:
        lines.append(
            f"probabilities calibrated on {counted(calibration.images, 'held-out picture')}: "
            f"expected calibration error {calibration.error_after:.3f}"
        )
    lines.append(
        f"network {printable(learned.network)}: {'tuned' if learned.tuned else 'not tuned'} ({learned.tuning})"
    )
    lines.append(f"classifier: {learned.classifier}")
    lines += _warnings(learned.warnings)
    adaptation = learned.adaptation
    if adaptation is not None and adaptation.adapted:
        lines.append(
            f"stored features were adapted with ω {adaptation.omega:.3f} "
            f"({adaptation.omega_unadapted:.3f} without adaptation)"
        )
    elif adaptation is not None:
        lines.append(
            f"stored features were not adapted, with ω {adaptation.omega_unadapted:.3f} "
            f"({adaptation.omega:.3f} with adaptation)"
        )
    return lines


def _warnings(warnings: Sequence[str]) -> list[str]:
    return [f"warning: {each}" for each in warnings]


def _accuracy(learned: UpdateResult) -> str:
    """Accuracy, with all that is needed to know what it means; or that there is none, and what to do."""
    if learned.accuracy is None or learned.interval is None:
        return "accuracy: not known, as no picture was held out. Measure it with: engram evaluate MODEL FOLDER"
    low, high = learned.interval
    judged, classes = learned.held_out_classes, learned.classes
    over = f"all {counted(classes, 'class')}" if judged == classes else f"{judged} of {counted(classes, 'class')}"
    number = f"accuracy {learned.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f})"
    text = f"{number} over {over}, on {counted(learned.held_out, 'held-out picture')}"
    if learned.estimated:
        text += ". This is an estimate: the network has changed since older pictures were seen"
    if judged < classes:
        text += ". Nothing is known of the others: measure them with engram evaluate MODEL FOLDER"
    return text


def _table(judged: Sequence[ClassAccuracy]) -> str:
    """A line per class: accuracy before and after."""
    rows = [("before", "after", "held out", "kind", "class")]
    for each in judged:
        before, after = ("–" if value is None else f"{value:.3f}" for value in (each.before, each.after))
        rows.append((before, after, str(each.images or "–"), each.kind, each.name))
    lines = [table(rows, right=range(3))]
    if any(each.estimated for each in judged):
        lines.append("These are estimates: the network has changed since older pictures were seen.")
    return "\n".join(lines)
