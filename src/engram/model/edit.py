"""Edits of a model's classes: `forget`, `rename`, `merge`; and `rollback` to an earlier version."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engram.data.labelled import name_key
from engram.errors import UsageError, unknown
from engram.methods import editing
from engram.model.folder import ModelFolder
from engram.model.held_out import HeldOutScores, assess
from engram.model.model import Model
from engram.model.saving import load, save
from engram.text import composed, printable, unfit


@dataclass(frozen=True, kw_only=True)
class ForgetPreview:
    """What `forget` removes."""

    names: tuple[str, ...]
    not_in_use: tuple[str, ...]  # those that only versions not in use know
    features: int  # stored features, in the version in use
    images: int  # exemplars
    bytes: int  # of both
    versions: tuple[int, ...]  # all there are: the new one replaces them


@dataclass(frozen=True)
class EditResult:
    """A model after an edit."""

    action: str
    version: int  # in use now
    classes: tuple[str, ...]  # known now
    details: Mapping[str, Any]  # what was done

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"action": self.action, "version": self.version, "classes": list(self.classes), **self.details}


def preview_forget(folder: ModelFolder, names: Sequence[str]) -> ForgetPreview:
    """What `forget` would remove; nothing is changed."""
    return _preview(folder, load(folder, device="cpu"), names)


def forget(folder: ModelFolder, names: Sequence[str]) -> EditResult:
    """Remove classes and every trace of them except in the network's weights. This cannot be undone.

    Their features, exemplars, names and rows of the head and the classifier are removed, with every earlier version
    and what the history says of any class. The classifier is fitted again to the stored features of the others. A class
    that only versions not in use know, as after a rollback, is removed with these.
    """
    folder.require()
    with folder.writing() as writer:
        model = load(writer)
        gone = _preview(writer, model, names)
        if len(gone.not_in_use) < len(gone.names):
            seen = {name: count for name, count in _seen(model).items() if name not in gone.names}
            editing.forget(model.learner, *(model.label(name) for name in model.names if name not in seen))
            model = _edited(model, seen)
        # Without names: this stays in the history.
        record = {"classes": len(gone.names), "features": gone.features, "images": gone.images}
        manifest = save(writer, model, action="forget", record=record, alone=True)
    details = {
        "forgotten": list(gone.names),
        "not_in_use": list(gone.not_in_use),
        "bytes": gone.bytes,
        "features": gone.features,
        "images": gone.images,
        "removed_versions": list(gone.versions),
    }
    return EditResult("forget", manifest.version, manifest.classes, details)


def rename(folder: ModelFolder, old: str, new: str) -> EditResult:
    """Rename a class. Earlier versions and the history keep the old name."""
    folder.require()
    with folder.writing() as writer:
        model = load(writer, device="cpu")
        old, new = _known(model.names, old), composed(new)
        if problem := unfit(new):
            raise UsageError(problem)
        _check_new_name(folder, model, old, new)
        names = tuple(new if name == old else name for name in model.names)
        details = {"from": old, "to": new}
        manifest = save(writer, replace(model, names=names), action="rename", record=details)
    return EditResult("rename", manifest.version, manifest.classes, details)


def merge(folder: ModelFolder, name: str, into: str) -> EditResult:
    """Merge a class into another."""
    folder.require()
    with folder.writing() as writer:
        model = load(writer)
        name, into = _known(model.names, name), _known(model.names, into)
        editing.merge(model.learner, model.label(name), model.label(into))
        seen = _seen(model)
        seen[into] += seen.pop(name)
        edited = _edited(model, seen)
        features, images = _stored(edited, [into])
        details = {"class": name, "into": into, "features": features, "images": images}
        manifest = save(writer, edited, action="merge", record=details)
    return EditResult("merge", manifest.version, manifest.classes, details)


def rollback(folder: ModelFolder, to: int | None = None) -> EditResult:
    """Put an earlier version in use again; by default, the parent of the one in use.

    This also repairs a damaged `current.json`. It makes no new version and removes none.
    """
    folder.require()
    with folder.writing() as writer:
        before = writer.number_in_use()
        manifest = writer.use(_parent(writer) if to is None else to)
    details = {"from": before, "created": manifest.created}
    return EditResult("rollback", manifest.version, manifest.classes, details)


def _preview(folder: ModelFolder, model: Model, names: Sequence[str]) -> ForgetPreview:
    everywhere = tuple(dict.fromkeys((*model.names, *(name for each in folder.manifests() for name in each.classes))))
    known = tuple(dict.fromkeys(_known(everywhere, name) for name in names))
    if not known:
        raise UsageError("Name a class to forget, or several.")
    if set(known) >= set(model.names):
        raise UsageError(f"No class would be left. To forget all of them, remove the folder {folder.path}.")
    features, images = _stored(model, [name for name in known if name in model.names])
    memory = model.learner.memory
    return ForgetPreview(
        names=known,
        not_in_use=tuple(name for name in known if name not in model.names),
        features=features,
        images=images,
        bytes=features * memory.features.row_bytes + images * memory.images.row_bytes,
        versions=tuple(folder.versions()),
    )


def _stored(model: Model, names: Sequence[str]) -> tuple[int, int]:
    """How many features and exemplars of these classes are stored."""
    memory, class_indices = model.learner.memory, [model.class_index(name) for name in names]
    counts = (memory.features.counts, memory.images.counts)
    features, images = (int(each[class_indices].sum()) if len(each) else 0 for each in counts)
    return features, images


def _seen(model: Model) -> dict[str, int]:
    return dict(zip(model.names, model.metadata.seen, strict=True))


def _edited(model: Model, seen: Mapping[str, int]) -> Model:
    """The model with these classes; its classifier was fitted again, so it is assessed and calibrated again."""
    before = model.metadata
    counts, calibration = assess(
        HeldOutScores.of(model.learner), len(seen), before.calibration, estimated=before.held_out_counts.estimated
    )
    metadata = replace(before, seen=tuple(seen.values()), calibration=calibration, held_out_counts=counts)
    return Model(model.learner, tuple(seen), metadata)


def _known(names: Collection[str], name: str) -> str:
    """The name as the model has it: an accent may be typed as a character of its own."""
    for each in (name, composed(name)):
        if each in names:
            return each
    raise unknown("class", printable(name), map(printable, names))


def _check_new_name(folder: ModelFolder, model: Model, old: str, new: str) -> None:
    if new == old:
        raise UsageError(f"The class is called '{printable(new)}' already.")
    twin = next((name for name in model.names if name != old and name_key(name) == name_key(new)), None)
    if twin is not None:
        command = shlex.join(["engram", "merge", str(folder.path), old, twin])
        raise UsageError(
            f"There is a class {twin!a}, and {new!a} does not differ from it, or only in capitals, spaces or the "
            f"encoding of accents. Choose another name, or merge the two with: {printable(command)}"
        )


def _parent(folder: ModelFolder) -> int:
    """The version that the one in use was made from, if it is still there."""
    current, there = folder.current(), folder.versions()
    if current.parent in there:
        return current.parent
    others = ", ".join(str(number) for number in there if number != current.version)
    remedy = f"Choose one with --to: {others}." if others else "It is the only one there is."
    why = "has none before it" if current.parent is None else f"was made from {current.parent}, which was removed"
    raise UsageError(f"Version {current.version} {why}. {remedy}")
