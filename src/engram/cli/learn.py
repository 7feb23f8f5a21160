"""`engram learn`: teach a model the pictures of a folder, or make one from them."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram.cli.run import Device, pairs
from engram.cli.words import left_out_lines, megabytes, minutes
from engram.errors import UsageError
from engram.text import shown

if TYPE_CHECKING:
    from engram.model import Judgement, Learned, ModelFolder, Proposal, Wishes

NAMED = 12  # classes that a line names before it only counts


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
    network: Annotated[
        str | None,
        typer.Option(help="resnet18, resnet18-small, resnet32, small. Default: by the data."),
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="Pixels a side at which pictures are seen. Default: by the data.")
    ] = None,
    epochs: Annotated[str, typer.Option(help="How often the pictures are gone through, or auto.")] = "auto",
    from_weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Start a new model from a pretrained extractor: .safetensors.")
    ] = None,
    validate: Annotated[
        bool, typer.Option("--validate", help="Show each class before and after; publish only what is good enough.")
    ] = False,
    at_least: Annotated[
        float, typer.Option(help="With --validate: the accuracy, as a mean over classes, to publish from.")
    ] = 0.5,
    hold_out: Annotated[
        float, typer.Option(help="The share of the pictures to judge and calibrate by; they are kept all the same.")
    ] = 0.1,
    set: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any other setting.")] = None,
    seed: Annotated[int, typer.Option(help="Of a new model's weights and everything drawn.")] = 0,
    device: Annotated[Device, typer.Option(help="What to compute on.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be learned, how long it takes and what is kept.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress.")] = False,
) -> None:
    """Teach a model new classes, or more of those it knows. The pictures may be gone afterwards.

    Of each picture a short vector is kept, nothing else. Vectors are not anonymous: they tell something of the picture.
    """
    from engram.cli.display import Display
    from engram.methods import parse_bytes
    from engram.model import ModelFolder, NotGoodEnough, Wishes
    from engram.model import learn as learn_pictures

    wishes = Wishes(
        network=network,
        image_size=image_size,
        epochs=_epochs(epochs),
        features_per_class=features_per_class,
        images_per_class=images_per_class,
        budget=None if budget is None else parse_bytes(budget),
        weights=from_weights,
        settings=pairs(set or []),
        hold_out=hold_out,
        at_least=at_least if validate else None,
        seed=seed,
        device=device,
    )
    folder = ModelFolder(model)
    with Display(quiet=quiet) as display:
        if dry_run:
            _dry_run(folder, source, wishes, display, json)
            return
        try:
            learned = learn_pictures(folder, source, wishes, display)
        except KeyboardInterrupt:
            display.say("Stopped. Nothing was changed.")
            raise typer.Exit(130) from None
        except NotGoodEnough as error:
            if json:
                typer.echo(json_format.dumps({"published": False, "judged": [vars(each) for each in error.judged]}))
            else:
                typer.echo(_table(error.judged))
            raise
        for line in left_out_lines(learned.left_out):
            display.say(line)
    if json:
        typer.echo(json_format.dumps({"published": True, **learned.to_json()}, ensure_ascii=False))
        return
    if validate:
        typer.echo(_table(learned.judged))
    typer.echo("\n".join(_lines(learned, model)))


def _epochs(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or not int(text):
        raise UsageError(f"--epochs is a whole number or auto; found '{text}'.")
    return int(text)


def _dry_run(folder: ModelFolder, source: Path, wishes: Wishes, display: Any, json: bool) -> None:
    from engram.data.pictures import scan
    from engram.model import expected_seconds, load, propose

    found = scan(source, display)
    known = load(folder, device=wishes.device) if folder.exists() else None
    proposal = propose(known, found, wishes)
    seconds = expected_seconds(proposal)
    for line in left_out_lines(found.left_out):
        display.say(line)
    if json:
        typer.echo(json_format.dumps({**_plain(proposal), "seconds": seconds}, ensure_ascii=False))
        return
    learner = proposal.learner
    what = "teach" if known is not None else "make"
    per_class = getattr(learner, "features_per_class", None)
    lines = [
        f"would {what} {folder.path}: {_counts(proposal.new, 'new')}{_counts(proposal.more, 'known')}".rstrip(),
        f"network {_network(proposal)} at {proposal.image_size} pixels, "
        + (f"{learner.training.epochs} epochs, " if proposal.trains else "not trained again for classes it knows, ")
        + f"about {minutes(seconds)} here",
        f"kept: at most {megabytes(proposal.kept_bytes)}"
        + (f", up to {per_class} features a class" if per_class else "")
        + (f"; the budget is {megabytes(proposal.budget)}" if proposal.budget else ""),
        "Nothing was changed.",
    ]
    typer.echo("\n".join(lines))


def _network(proposal: Proposal) -> str:
    from engram.network import choose_extractor

    name = proposal.learner.network
    size = proposal.image_size
    return choose_extractor((size, size, 3)) if name == "auto" else str(name)


def _plain(proposal: Proposal) -> dict[str, Any]:
    return {
        "new": dict(proposal.new),
        "more": dict(proposal.more),
        "classes": len(proposal.names),
        "method": proposal.learner.name,
        "network": _network(proposal),
        "image_size": proposal.image_size,
        "epochs": proposal.learner.training.epochs if proposal.trains else 0,
        "kept_bytes": proposal.kept_bytes,
        "budget": proposal.budget,
    }


def _counts(classes: Mapping[str, int], kind: str) -> str:
    if not classes:
        return ""
    names = [f"{shown(name)} {count}" for name, count in classes.items()]
    more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
    classes_ = "class" if len(names) == 1 else "classes"
    return f"{len(names)} {kind} {classes_} ({', '.join(names[:NAMED])}{more}) "


def _lines(learned: Learned, model: Path) -> list[str]:
    pictures = sum(learned.new.values()) + sum(learned.more.values())
    lines = [
        f"learned {_counts(learned.new, 'new')}{_counts(learned.more, 'known')}in {minutes(learned.seconds)}",
        f"{model}, generation {learned.generation}: {learned.classes} classes; "
        f"{megabytes(learned.kept_bytes)} kept in all, the {pictures} pictures were {megabytes(learned.seen_bytes)}",
    ]
    if learned.accuracy is not None:
        held_out = sum(each.images for each in learned.judged)
        lines.append(
            f"accuracy {learned.accuracy:.3f} among all classes on {held_out} pictures that it was not trained on"
        )
    calibration = learned.calibration
    if calibration.error_after is not None:
        lines.append(
            f"probabilities: off by {calibration.error_after:.3f} on average, "
            f"{calibration.error_before:.3f} before they were calibrated on those"
        )
    if learned.adaptation is not None:
        lines.append(
            f"stored vectors were carried over with ω {learned.adaptation.omega:.3f} "
            f"({learned.adaptation.omega_unadapted:.3f} had they been left alone)"
        )
    return lines


def _table(judged: Sequence[Judgement]) -> str:
    """A line a class: what was gained, what was forgotten."""
    width = max(len("class"), *(len(shown(each.name)) for each in judged))
    lines = [f"{'class':{width}}  {'':4}  before   after  judged by"]
    for each in judged:
        by = f"{each.images} pictures held out" if each.images else "its stored vectors"
        by = by if each.after is not None else "nothing: too few"
        numbers = "  ".join("     –" if value is None else f"{value:6.3f}" for value in (each.before, each.after))
        lines.append(f"{shown(each.name):{width}}  {each.kind:4}  {numbers}  {by}")
    return "\n".join(lines)
