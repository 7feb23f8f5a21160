"""`engram inspect` and `engram verify`: what a model knows and stores, and whether its files are intact."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

import engram
from engram.cli.options import Json, ModelPath
from engram.cli.output import accuracy_text, print_json, rejection_text, table
from engram.text import format_bytes, plural, printable

if TYPE_CHECKING:
    from engram.model import Calibration, ModelSummary, Version


def verify(model: ModelPath, json: Json = False) -> None:
    """Check every file of a model against its checksum, and its parts against each other.

    This finds damage, not forgery: whoever can write the folder can write the checksums too. Nothing is changed:
    leftovers of an interrupted write are listed, and removed by the next command that changes the model. Exits with 1
    if anything is wrong.
    """
    found = engram.model.verify(engram.model.ModelFolder(model))
    if json:
        print_json(found.to_json())
    elif found.intact:
        versions = plural(len(found.versions), "version")
        typer.echo(f"intact: {versions}, current {found.in_use}, {format_bytes(found.bytes)}")
    else:
        typer.echo("\n".join(map(printable, found.problems)))
    if not json:
        for number in found.newer:
            typer.echo(
                f"version {number} is newer than current.json, which an interruption or an older copy explains; "
                f"to use it: engram rollback {shlex.quote(printable(model))} --to {number}"
            )
        if found.leftovers:
            what = f"left by an interrupted command, not in use: {', '.join(map(printable, found.leftovers))}"
            command = engram.model.ModelFolder(model).cleanup_command()
            how = "" if found.in_use is None else f"; to remove them now: {command}"
            typer.echo(f"{what}{how}")
    raise typer.Exit(0 if found.intact else 1)


def inspect(model: ModelPath, json: Json = False) -> None:
    """Show a model: its classes, memory in bytes, settings, accuracy and history."""
    found = engram.model.inspect(engram.model.ModelFolder(model))
    if json:
        print_json(found.to_json())
        return
    classes = table([("features", "images", "bytes", "seen", "class"), *_classes(found)], right=range(4))
    history = table([("", "date", "action", "", ""), *map(_event, found.history)], right=(0,), overflow="ellipsis")
    typer.echo("\n\n".join([table(_summary(found, model)), classes, history]))


def _summary(found: ModelSummary, model: Path) -> list[tuple[str, str]]:
    sizes, held_out, classes = found.bytes, found.held_out_counts, len(found.classes)
    accuracy = accuracy_text(
        found.accuracy, found.interval, sum(held_out.total), held_out.classes, classes, held_out.estimated
    )
    inputs = "vectors" if found.image_size is None else f"images of {found.image_size} pixels a side"
    budget = (
        "no budget" if found.budget is None else f"{sizes.memory / found.budget:.0%} of {format_bytes(found.budget)}"
    )
    changed = [f"{name} {value} ({found.defaults.get(name)})" for name, value in sorted(found.changed.items())]
    rows = [
        ("model", f"{model}, version {found.version} of {found.created}, by engram {found.engram}"),
        ("method", f"{found.method}; network {found.network}, {inputs}"),
        ("memory", f"{_exact(sizes.memory)}: {_features(found)}, images {sizes.images:,}; {budget}"),
        ("network", _exact(sizes.network)),
        ("folder", f"{_exact(sizes.folder)}, all versions"),
        ("classifier", found.classifier),
        ("accuracy", accuracy),
        ("calibration", _calibration(found.calibration)),
        ("unknown", rejection_text(found.rejection)),
        ("settings", "; ".join(changed) + " (in parentheses: the default)" if changed else "the defaults"),
    ]
    if (quality := found.adaptation) is not None:
        omegas = f"ω {quality.omega:.3f}, {quality.omega_unadapted:.3f} without, on {quality.images:,} held-out samples"
        rows.insert(-1, ("adaptation", omegas + ("" if quality.adapted else "; stored features were not adapted")))
    return rows


def _features(found: ModelSummary) -> str:
    """The bytes of the stored features, and their codec unless they are stored as they are."""
    shared = f", {found.bytes.shared:,} of it shared by all" if found.bytes.shared else ""
    return f"features {found.bytes.features:,}" + (f" ({found.codec}{shared})" if found.codec != "float32" else "")


def _exact(count: int) -> str:
    return f"{format_bytes(count)} ({count:,} bytes)"


def _calibration(calibration: Calibration) -> str:
    temperature = f"temperature {calibration.temperature:.3g}"
    if calibration.error_after is None:
        return "never calibrated" if calibration.temperature == 1 else f"{temperature}, not measured since"
    images = f"{calibration.images:,} held-out images"
    return f"{temperature}, expected calibration error {calibration.error_after:.3f} on {images}"


def _classes(found: ModelSummary) -> list[tuple[str, ...]]:
    counts = [(each.features, each.images, each.bytes, each.seen) for each in found.classes]
    rows = [(*count, each.name) for count, each in zip(counts, found.classes, strict=True)]
    total = (*map(sum, zip(*counts, strict=True)), f"total, {plural(len(found.classes), 'class')}")
    return [(*(f"{number:,}" for number in row[:4]), str(row[4])) for row in [*rows, total]]


def _event(event: Version) -> tuple[str, ...]:
    """A line of the history; `forget` removes the details of earlier events."""
    details, learned = event.details, event.learned
    kinds = (("new", "new"), ("more", "known"))
    what = ", ".join(
        f"{learned[kind]} {word} ({learned[f'{kind}_samples']:,} samples)" for kind, word in kinds if learned.get(kind)
    )
    if event.action == "rename" and details:
        what = f"{details.get('from')} → {details.get('to')}"
    elif event.action == "merge" and details:
        what = f"{details.get('class')} into {details.get('into')}"
    elif event.action == "forget" and "classes" in details:
        what = plural(details["classes"], "class")
    date = event.created.replace("T", " ").removesuffix("Z")
    state = "current" if event.in_use else "stored" if event.stored else "removed"
    return str(event.version), date, event.action, state, what
