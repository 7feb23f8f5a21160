"""Classes of a model dropped, renamed or joined into one, and an earlier generation put in use again."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engram.data.labelled import name_key
from engram.errors import DataError, UsageError, unknown
from engram.methods import editing
from engram.model.calibration import calibrate
from engram.model.evidence import evidence, judge
from engram.model.folder import ModelFolder
from engram.model.model import Calibration, Model, load, save
from engram.text import composed, printable, unfit


@dataclass(frozen=True, kw_only=True)
class ForgetPreview:
    """What goes when classes are forgotten."""

    names: tuple[str, ...]
    not_in_use: tuple[str, ...]  # of these: known to other generations than the one in use alone
    features: int  # stored vectors, in the generation in use
    images: int  # stored images
    bytes: int  # of both
    generations: tuple[int, ...]  # all there are: the new one replaces them


@dataclass(frozen=True, kw_only=True)
class EditResult:
    """A model after it was changed."""

    action: str
    generation: int  # in use now
    classes: tuple[str, ...]  # known now
    details: Mapping[str, Any] = field(default_factory=dict)  # what was done

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "action": self.action,
            "generation": self.generation,
            "classes": list(self.classes),
            **self.details,
        }


def preview_forget(folder: ModelFolder, names: Sequence[str]) -> ForgetPreview:
    """What `forget` would remove; nothing is changed."""
    return _removal(folder, load(folder, device="cpu"), names)


def forget(folder: ModelFolder, names: Sequence[str]) -> EditResult:
    """Remove classes and every trace of them but in the network's weights. There is no way back.

    Their vectors, images, rows of the head and of the classifier, and names go, with all that the history tells of any
    class, and every earlier generation. The classifier of the others is made anew from what is kept of them. A class
    that is only in generations not in use, as after a rollback, goes with these.
    """
    folder.require()
    with folder.writing() as writer:
        model = load(writer)
        gone = _removal(writer, model, names)
        if len(gone.not_in_use) < len(gone.names):
            model = _without(model, gone.names)
        # No name: this stays in the history.
        record = {"classes": len(gone.names), "features": gone.features, "images": gone.images}
        manifest = save(writer, model, action="forget", record=record, alone=True)
    details = {
        "forgotten": list(gone.names),
        "not_in_use": list(gone.not_in_use),
        "features": gone.features,
        "images": gone.images,
        "bytes": gone.bytes,
        "removed_generations": list(gone.generations),
    }
    return EditResult(action="forget", generation=manifest.generation, classes=manifest.classes, details=details)


def rename(folder: ModelFolder, old: str, new: str) -> EditResult:
    """Give a class another name. Earlier generations, and the history, know it by the old one."""
    folder.require()
    with folder.writing() as writer:
        model = load(writer, device="cpu")
        old, new = _known(model.names, old), composed(new)
        if problem := unfit(new):
            raise UsageError(problem)
        _refuse_twins(folder, model, old, new)
        names = tuple(new if name == old else name for name in model.names)
        details = {"from": old, "to": new}
        manifest = save(writer, replace(model, names=names), action="rename", record=details)
    return EditResult(action="rename", generation=manifest.generation, classes=manifest.classes, details=details)


def merge(folder: ModelFolder, name: str, into: str) -> EditResult:
    """Join a class into another, which answers for both from then on."""
    folder.require()
    with folder.writing() as writer:
        model = load(writer)
        name, into = _known(model.names, name), _known(model.names, into)
        editing.merge(model.learner, model.label(name), model.label(into))
        counts = dict(zip(model.names, model.metadata.seen, strict=True))
        counts[into] += counts.pop(name) if name != into else 0
        edited = _edited(model, list(counts), list(counts.values()))
        memory, class_index = edited.learner.memory, edited.class_index(into)
        kept = {"features": memory.features.counts, "images": memory.images.counts}
        details = {
            "class": name,
            "into": into,
            **{kind: int(each[class_index]) if len(each) else 0 for kind, each in kept.items()},
        }
        manifest = save(writer, edited, action="merge", record=details)
    return EditResult(action="merge", generation=manifest.generation, classes=manifest.classes, details=details)


def rollback(folder: ModelFolder, to: int | None = None) -> EditResult:
    """Put an earlier generation in use again: the one that the present one was made from, unless told otherwise.

    This also mends a damaged `current.json`. It makes no generation, and none is lost.
    """
    folder.require()
    with folder.writing() as writer:
        before = _in_use(writer)
        manifest = writer.use(_parent(writer) if to is None else to)
    details = {"from": before, "created": manifest.created}
    return EditResult(action="rollback", generation=manifest.generation, classes=manifest.classes, details=details)


def _removal(folder: ModelFolder, model: Model, names: Sequence[str]) -> ForgetPreview:
    everywhere = tuple(dict.fromkeys((*model.names, *(name for each in folder.manifests() for name in each.classes))))
    known = tuple(dict.fromkeys(_known(everywhere, name) for name in names))
    if not known:
        raise UsageError("Name a class to forget, or several.")
    if set(known) >= set(model.names):
        raise UsageError(f"No class would be left. To forget all of them, remove the folder {folder.path}.")
    memory, class_indices = model.learner.memory, [model.class_index(name) for name in known if name in model.names]
    counts = [
        int(kind.counts[class_indices].sum()) if len(kind.counts) else 0 for kind in (memory.features, memory.images)
    ]
    sizes = [kind.row_bytes for kind in (memory.features, memory.images)]
    return ForgetPreview(
        names=known,
        not_in_use=tuple(name for name in known if name not in model.names),
        features=counts[0],
        images=counts[1],
        bytes=sum(count * size for count, size in zip(counts, sizes, strict=True)),
        generations=tuple(folder.generations()),
    )


def _without(model: Model, gone: Collection[str]) -> Model:
    left = [class_index for class_index, name in enumerate(model.names) if name not in gone]
    editing.forget(model.learner, *(model.label(name) for name in model.names if name in gone))
    return _edited(
        model,
        [model.names[class_index] for class_index in left],
        [model.metadata.seen[class_index] for class_index in left],
    )


def _edited(model: Model, names: Sequence[str], seen: Sequence[int]) -> Model:
    """The model with other classes; its classifier is another, so it is judged and calibrated again."""
    before = model.metadata
    judged = judge(model.learner)
    calibration = Calibration(temperature=before.calibration.temperature)
    if judged is not None:
        calibration = calibrate(judged.scores, judged.class_indices, before.calibration)
    found = evidence(judged, len(names), estimated=before.held_out_counts.estimated)
    facts = replace(before, seen=tuple(seen), calibration=calibration, held_out_counts=found)
    return Model(model.learner, tuple(names), facts)


def _known(names: Collection[str], name: str) -> str:
    """The name as the model has it: an accent may be typed as a letter of its own."""
    for each in (name, composed(name)):
        if each in names:
            return each
    raise unknown("class", printable(name), map(printable, names))


def _refuse_twins(folder: ModelFolder, model: Model, old: str, new: str) -> None:
    if new == old:
        raise UsageError(f"The class is called '{printable(new)}' already.")
    twin = next(
        (name for name in model.names if name != old and name_key(name) == name_key(new)),
        None,
    )
    if twin is not None:
        command = shlex.join(["engram", "merge", str(folder.path), old, twin])
        raise UsageError(
            f"There is a class {twin!a}, and {new!a} does not differ from it, or in capitals, spaces or the encoding "
            f"of accents alone. Choose another name; or make one class of both with: {printable(command)}"
        )


def _in_use(folder: ModelFolder) -> int | None:
    try:
        return folder.pointer().current
    except DataError:
        return None


def _parent(folder: ModelFolder) -> int:
    """The generation that the one in use was made from, if it is still there."""
    current, there = folder.current(), folder.generations()
    if current.parent in there:
        return current.parent
    others = ", ".join(str(number) for number in there if number != current.generation)
    remedy = f"Choose one with --to: {others}." if others else "It is the only one there is."
    why = "has none before it" if current.parent is None else f"was made from {current.parent}, which is not kept"
    raise UsageError(f"Generation {current.generation} {why}. {remedy}")
