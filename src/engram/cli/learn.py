"""`engram learn`: update a model with the images of a folder, or create one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.cli import options as option
from engram.cli.output import Display, accuracy_text, print_json, print_skipped, rejection_text, share, table
from engram.errors import UsageError
from engram.text import format_bytes, format_duration, plural, printable

if TYPE_CHECKING:
    from engram.data.scanning import SkippedFile
    from engram.model import ClassAccuracy, LearnOptions, ModelFolder, UpdatePlan, UpdateResult

MOST_NAMED = 12  # classes that a line names; the others are counted
LEAST_ACCURACY = 0.5
SAME = (  # as `LearnOptions` has them
    *("method", "network", "image_size", "epochs", "tune", "classifier", "force", "features_per_class"),
    *("images_per_class", "budget", "hold_out", "seed", "device"),
)


def _epochs(text: str) -> int | None:
    if text == "auto":
        return None
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise UsageError(f"--epochs is a whole number from 1 up, or auto; found '{text}'.")
    return int(text)


@dataclass(kw_only=True)
class LearnCommandOptions:
    """The options of `engram learn`."""

    model: option.NewModelPath
    source: option.LabelledImages
    budget: option.Budget = None
    features_per_class: option.FeaturesPerClass = None
    images_per_class: option.ImagesPerClass = None
    method: Annotated[
        str | None, typer.Option(help="Of a new model; `engram methods` lists them. Default: engram.")
    ] = None
    network: option.Network = None
    tune: option.Tune = None
    classifier: Annotated[
        str | None,
        typer.Option(
            help="nearest-mean, ridge, lda, random-projection, softmax, svm, or auto: chosen by cross-validation on "
            "the stored features. Default: auto with a pretrained network."
        ),
    ] = None
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels. Default: by the images.")] = None
    epochs: Annotated[
        int | None,
        typer.Option(
            metavar="E|auto", parser=_epochs, help="Passes over the images if the network is trained. Default: auto."
        ),
    ] = None
    from_weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Start a new model from the weights in a .safetensors or .pth file."),
    ] = None
    validate: Annotated[
        bool, typer.Option("--validate", help="Print each class before and after; reject the update below --at-least.")
    ] = False
    at_least: Annotated[
        float | None,
        typer.Option(help=f"Least mean accuracy over classes. Default: {LEAST_ACCURACY}. Implies --validate."),
    ] = None
    force: option.Force = False
    hold_out: Annotated[float, typer.Option(help="Share of the images to hold out where the network is trained.")] = 0.1
    set: option.Settings = None
    seed: Annotated[int | None, typer.Option(help="Random seed of a new model. Default: 0.")] = None
    device: option.Device = "auto"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the plan: classes, time and memory.")] = False
    json: option.Json = False
    quiet: option.Quiet = False

    def learn_options(self) -> LearnOptions:
        from engram.model import LearnOptions

        return LearnOptions(
            weights=self.from_weights,
            at_least=LEAST_ACCURACY if self.validate and self.at_least is None else self.at_least,
            settings=dict(self.set or ()),
            **{name: getattr(self, name) for name in SAME},
        )


def learn(given: LearnCommandOptions) -> None:
    """Teach a model new classes, or more about known ones. The images may be deleted afterwards.

    It stores a short feature vector of some images per class, and no image unless asked. Features are not anonymous.
    """
    from engram.model import ModelFolder
    from engram.network import parallel

    parallel.refuse_torchrun("engram learn")
    options, folder = given.learn_options(), ModelFolder(given.model)
    folder.check_place()
    (_dry_run if given.dry_run else _learn)(folder, given.source, options, quiet=given.quiet, json=given.json)


def _learn(folder: ModelFolder, source: Path, options: LearnOptions, *, quiet: bool, json: bool) -> None:
    from engram.model import UpdateRejected
    from engram.model import learn as update

    before = folder.current().version if folder.exists() else 0
    try:
        with Display(quiet=quiet) as display:
            learned = update(folder, source, options, display)
    except KeyboardInterrupt:
        now = folder.current().version if folder.exists() else 0
        state = "Nothing was changed." if now == before else f"The update is already published as version {now}."
        typer.echo(f"Interrupted. {state}", err=True)
        raise typer.Exit(130) from None
    except UpdateRejected as error:
        classes = [vars(each) for each in error.class_accuracies]
        if json:
            print_json(
                {"published": False, "reason": str(error), "class_accuracies": classes, "warnings": error.warnings}
            )
        else:
            typer.echo("\n".join([_class_table(error.class_accuracies), *_warnings(error.warnings)]))
        raise
    print_skipped(learned.skipped)
    if json:
        print_json({"published": True, **learned.to_json()})
        return
    if options.at_least is not None:
        typer.echo(_class_table(learned.class_accuracies))
    typer.echo("\n".join(_summary(learned, folder.path)))


def _dry_run(folder: ModelFolder, source: Path, options: LearnOptions, *, quiet: bool, json: bool) -> None:
    from engram.data.labelled import scan
    from engram.model import expected_seconds, load, plan_update

    with Display(quiet=quiet) as display:
        found = scan(source, display)
        known = load(folder, device=options.device) if folder.exists() else None
        plan = plan_update(known, found, options)
        seconds = expected_seconds(plan)
    print_skipped(found.skipped)
    if json:
        print_json({**_plan_json(plan, found.skipped), "seconds": seconds})
        return
    per_class = plan.learner.settings().get("features_per_class")
    features = f", up to {plural(per_class, 'feature')} per class" if per_class else ""
    budget = f"; the budget is {format_bytes(plan.budget)}" if plan.budget else ""
    action = "update" if known is not None else "create"
    typer.echo(
        f"would {action} {printable(folder.path)}: {_counts(plan.new, plan.more)}\n"
        f"network {printable(plan.network)} at {plan.image_size} pixels, {_training(plan)}; "
        f"about {format_duration(seconds)} here\n"
        f"memory: at most {format_bytes(plan.memory_bytes)}{features}{budget}\n"
        "Nothing was changed."
    )


def _training(plan: UpdatePlan) -> str:
    """Whether the network would be trained, and why."""
    epochs = plural(plan.learner.training.epochs, "epoch")
    if plan.tuning is None:
        return f"tuned for {epochs} if a trial on held-out images shows that it helps"
    return f"{f'trained for {epochs}' if plan.tuning.tunes else 'not trained'} ({plan.tuning.reason})"


def _plan_json(plan: UpdatePlan, skipped: Sequence[SkippedFile]) -> dict[str, Any]:
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
        "skipped": [each.to_json() for each in skipped],
    }


def _counts(new: Mapping[str, int], more: Mapping[str, int]) -> str:
    """The classes of the update with their numbers of images."""
    parts = []
    for kind, classes in (("new", new), ("known", more)):
        names = [f"{printable(name)} {count:,}" for name, count in classes.items()]
        if len(names) > MOST_NAMED:
            names[MOST_NAMED:] = [f"and {len(names) - MOST_NAMED:,} more"]
        if names:
            parts.append(f"{plural(len(classes), f'{kind} class')} ({', '.join(names)})")
    return ", ".join(parts)


def _summary(learned: UpdateResult, model: Path) -> list[str]:
    images = plural(sum(learned.new.values()) + sum(learned.more.values()), "image")
    measured, classes = learned.held_out_classes, learned.classes
    accuracy = accuracy_text(learned.accuracy, learned.interval, learned.held_out, measured, classes, learned.estimated)
    lines = [
        f"learned {_counts(learned.new, learned.more)} in {format_duration(learned.seconds)}",
        f"{printable(model)}, version {learned.version}: {plural(learned.classes, 'class')}; "
        f"memory {format_bytes(learned.memory_bytes)}; this update: {images}, {format_bytes(learned.seen_bytes)}",
        f"accuracy {accuracy}",
    ]
    if learned.calibration.error_after is not None:
        lines.append(
            f"probabilities calibrated on {plural(learned.calibration.images, 'held-out image')}: "
            f"expected calibration error {learned.calibration.error_after:.3f}"
        )
    if learned.rejection is not None:
        lines.append(f"unknown classes: {rejection_text(learned.rejection)}")
    lines.append(
        f"network {printable(learned.network)}: {'tuned' if learned.tuned else 'not tuned'} ({learned.tuning})"
    )
    lines += [f"classifier: {learned.classifier}", *_warnings(learned.warnings)]
    if (quality := learned.adaptation) is not None:
        used, other = quality.omega, f"{quality.omega_unadapted:.3f} without adaptation"
        if not quality.adapted:
            used, other = quality.omega_unadapted, f"{quality.omega:.3f} with adaptation"
        lines.append(f"stored features were {'' if quality.adapted else 'not '}adapted: ω {used:.3f} ({other})")
    return lines


def _warnings(warnings: Sequence[str]) -> list[str]:
    return [f"warning: {each}" for each in warnings]


def _class_table(classes: Sequence[ClassAccuracy]) -> str:
    """Accuracy before and after, a line per class."""
    rows = [("before", "after", "held out", "kind", "class")]
    for each in classes:
        rows.append((share(each.before), share(each.after), str(each.images or "–"), each.kind, each.name))
    estimated = any(each.estimated for each in classes)
    note = "\nThese are estimates: the network has changed since older images were seen." if estimated else ""
    return table(rows, right=range(3)) + note
