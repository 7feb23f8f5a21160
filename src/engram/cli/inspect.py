"""`engram inspect`: what a model knows and keeps, in bytes."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from engram.cli.options import Json, ModelPath
from engram.cli.words import megabytes, table

if TYPE_CHECKING:
    from engram.model import Calibration, Generation, ModelSummary


def inspect(model: ModelPath, json: Json = False) -> None:
    """Show what a model knows and keeps: its classes, bytes, settings, how good it was found to be, its history."""
    from engram.model import ModelFolder
    from engram.model import inspect as inspect_model

    found = inspect_model(ModelFolder(model))
    if json:
        typer.echo(json_format.dumps(found.to_json()))
        return
    history = [("", "date", "action", "", ""), *map(_event, found.history)]
    tables = [
        table(_facts(found, model)),
        table([("features", "images", "bytes", "seen", "class"), *_classes(found)], right=range(4)),
        table(history, right=(0,), folded=False),
    ]
    typer.echo("\n\n".join(tables))


def _facts(found: ModelSummary, model: Path) -> list[tuple[str, str]]:
    sizes = found.bytes
    seen = "vectors" if found.image_size is None else f"pictures at {found.image_size} pixels a side"
    budget = "no budget" if found.budget is None else f"{sizes.memory / found.budget:.0%} of {megabytes(found.budget)}"
    rows = [
        ("model", f"{model}, generation {found.generation} of {found.created}, by engram {found.engram}"),
        ("method", f"{found.method}; network {found.network}, {seen}"),
        ("kept", f"{_exactly(sizes.memory)}: {_features(found)}, images {sizes.images:,}; {budget}"),
        ("network", _exactly(sizes.network)),
        ("folder", f"{_exactly(sizes.folder)}, all generations"),
        ("classifier", found.classifier),
        ("accuracy", _accuracy(found)),
        ("calibration", _calibration(found.calibration)),
    ]
    if found.adaptation is not None:
        rows.append(
            (
                "adaptation",
                f"ω {found.adaptation.omega:.3f}, unadapted {found.adaptation.omega_unadapted:.3f}, "
                f"on {found.adaptation.images:,} samples that were held out"
                + ("" if found.adaptation.adapted else "; so vectors were left as they were"),
            )
        )
    changed = [f"{name} {value} ({found.defaults.get(name)})" for name, value in sorted(found.changed.items())]
    rows.append(("settings", "; ".join(changed) + " (in parentheses: the default)" if changed else "the defaults"))
    return rows


def _accuracy(found: ModelSummary) -> str:
    if found.accuracy is None or found.interval is None:
        return "not known: no picture was held out. Measure it with engram evaluate"
    low, high = found.interval
    judged, classes = found.held_out_counts.classes, len(found.classes)
    over = "all classes" if judged == classes else f"{judged} of {classes} classes"
    estimate = "; an estimate, as the network has changed since" if found.held_out_counts.estimated else ""
    return (
        f"{found.accuracy:.3f} (95 % interval {low:.3f} to {high:.3f}) over {over}, "
        f"on {sum(found.held_out_counts.total):,} held-out pictures{estimate}"
    )


def _features(found: ModelSummary) -> str:
    """The bytes of the vectors and, where they are not the paper's, how they are kept."""
    sizes = found.bytes
    shared = f", {sizes.shared:,} of it shared by all" if sizes.shared else ""
    return f"features {sizes.features:,}" + (f" ({found.codec}{shared})" if found.codec != "float32" else "")


def _exactly(count: int) -> str:
    return f"{megabytes(count)} ({count:,} bytes)"


def _calibration(calibration: Calibration) -> str:
    found = f"temperature {calibration.temperature:.3g}"
    if calibration.error_before is None or calibration.error_after is None:
        return "never calibrated" if calibration.temperature == 1 else f"{found}, not measured since"
    return (
        f"{found}, expected calibration error {calibration.error_after:.3f} on {calibration.images:,} held-out pictures"
    )


def _classes(found: ModelSummary) -> list[tuple[str, ...]]:
    counts = [(each.features, each.images, each.bytes, each.seen) for each in found.classes]
    total = tuple(map(sum, zip(*counts, strict=True)))
    names = [each.name for each in found.classes]
    rows = [(*count, name) for count, name in zip(counts, names, strict=True)]
    last = (*total, f"in all, {len(names)} class{'es' if len(names) != 1 else ''}")
    return [(*(f"{number:,}" for number in row[:4]), str(row[4])) for row in [*rows, last]]


def _event(event: Generation) -> tuple[str, ...]:
    date = event.created.replace("T", " ").removesuffix("Z")
    state = "in use" if event.in_use else "kept" if event.kept else "gone"
    return str(event.generation), date, event.action, state, _what(event)


def _what(event: Generation) -> str:
    """What was done, in a few words; what a forgetting has removed is not known."""
    details, learned = event.details, event.learned
    if learned:
        kinds = [
            f"{learned[kind]} {word} ({learned[f'{kind}_samples']:,} samples)"
            for kind, word in (("new", "new"), ("more", "known"))
            if learned.get(kind)
        ]
        return ", ".join(kinds)
    if event.action == "rename" and details:
        return f"{details.get('from')} → {details.get('to')}"
    if event.action == "merge" and details:
        return f"{details.get('class')} into {details.get('into')}"
    if event.action == "forget" and details:
        return f"{details.get('classes')} class{'es' if details.get('classes') != 1 else ''}"
    return ""
