"""`learn`: make a new model from labelled images, or update one. Scan, plan, train, absorb, assess, publish."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task, hold_out
from engram.data.labelled import LabelledFiles, LabelledImages, read_images, scan
from engram.data.scanning import SkippedFile
from engram.errors import EngramError, EngramWarning, UsageError
from engram.features import adapt
from engram.methods import Learner, MemorySources, Tuning, class_indices_of
from engram.model.folder import ModelFolder, Writer
from engram.model.held_out import (
    Calibration,
    HeldOutCounts,
    HeldOutScores,
    RejectionThreshold,
    assess,
    mark_held_out,
    replays,
    value_and_interval,
)
from engram.model.model import Adaptation, Metadata, Model, with_settings
from engram.model.plan import (
    MIN_TO_HOLD_OUT,
    LearnOptions,
    UpdatePlan,
    check_names,
    check_validation,
    plan_update,
    plan_update_of_samples,
)
from engram.model.saving import load, save
from engram.network import Network, threads_for
from engram.progress import SILENT, Progress
from engram.text import printable

UNEQUAL = 10  # times as many images of one class as of another
# The cosine between the features of two images, in a pretrained network, above which they are nearly the same image:
# among 40 classes of Caltech-101 no two images of different classes exceed .79.
NEAR_DUPLICATE = 0.95
MOST_DOUBTFUL = 12  # images that are listed
LISTED = 5  # classes, or pairs of them, that a warning names
MAX_FALL = 0.1  # of the accuracy on old classes: an update with a larger one is rejected, if it is not chance


@dataclass(frozen=True, kw_only=True)
class DoubtfulImage:
    """An image of an update that is predicted as another class if its own feature is left out: perhaps mislabelled."""

    index: int  # its position among the images of the update
    name: str  # of its class
    predicted: str
    probability: float  # of the predicted class


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """The accuracy on the held-out images of one class, before and after the update."""

    name: str
    kind: str  # new, more (images of a known class) or old (no images in the update)
    images: int  # held out, on which `after` was measured
    before: float | None  # None: the class was new, or had no held-out images
    after: float | None
    estimated: bool = False  # the features of these images were adapted when the network changed


class UpdateRejected(EngramError):
    """An update that is not good enough to be published, with the accuracy of each class and possible causes."""

    def __init__(
        self, message: str, class_accuracies: tuple[ClassAccuracy, ...], warnings: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.class_accuracies, self.warnings = class_accuracies, warnings


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What `learn` has done."""

    version: int = 0  # 0: not saved
    new: Mapping[str, int]  # images of each new class
    more: Mapping[str, int]  # images of each class that was known
    classes: int  # known now
    memory_bytes: int
    seen_bytes: int = 0  # of the image files
    seconds: float = 0.0
    accuracy: float | None  # on held-out images of all classes that have any
    interval: tuple[float, float] | None  # 95 %
    held_out: int  # images that accuracy was measured on
    held_out_classes: int  # and their classes
    estimated: bool  # the features of some of these images were adapted when the network changed
    class_accuracies: tuple[ClassAccuracy, ...]
    calibration: Calibration
    rejection: RejectionThreshold | None  # of `--reject auto`; None: it cannot be estimated
    adaptation: Adaptation | None
    network: str
    tuned: bool  # whether the network was trained in this update
    tuning: str  # why, or why not
    classifier: str
    warnings: tuple[str, ...] = ()
    doubtful: tuple[DoubtfulImage, ...] = ()  # images of the update that look like another class, the worst first
    skipped: tuple[SkippedFile, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "skipped": [file.to_json() for file in self.skipped]}


def learn(
    folder: ModelFolder, source: Path, options: LearnOptions | None = None, progress: Progress = SILENT
) -> UpdateResult:
    """Teach the model in a folder the images of `source`, or make one there. After an error nothing is changed."""
    return learn_files(folder, scan(source, progress), options, progress)


def learn_files(
    folder: ModelFolder,
    files: LabelledFiles,
    options: LearnOptions | None = None,
    progress: Progress = SILENT,
    *,
    record: Mapping[str, Any] | None = None,
) -> UpdateResult:
    """`learn` for files that were found already. `record` is added to the history."""
    options, start = options or LearnOptions(), time.monotonic()
    with folder.writing() as writer:
        model = load(writer, device=options.device) if writer.exists() else None
        plan = plan_update(model, files, options)
        images = read_images(files, plan.image_size, progress)
        read = _count(images)  # some may be unreadable
        plan = replace(plan, new={name: read[name] for name in plan.new}, more={name: read[name] for name in plan.more})
        seen_bytes = sum(path.stat().st_size for path in images.paths if path.exists())
        updated, result = train_update(model, plan, _samples(images, plan), options, progress, images.paths)
        skipped = (*files.skipped, *images.unreadable)
        return _publish(writer, updated, replace(result, seen_bytes=seen_bytes, skipped=skipped), start, record)


def learn_images(
    folder: ModelFolder,
    images: LabelledImages,
    options: LearnOptions | None = None,
    progress: Progress = SILENT,
    *,
    seen_bytes: int = 0,
) -> UpdateResult:
    """`learn` for images that were decoded already, from files of so many bytes."""
    options, start = options or LearnOptions(), time.monotonic()
    with folder.writing() as writer:
        model = load(writer, device=options.device) if writer.exists() else None
        check_names(model.names if model is not None else (), images.class_names)
        if model is not None and model.learner.shape_ != images.samples.shape:
            raise UsageError(f"This model has learned samples of shape {model.learner.shape_}; that cannot be changed.")
        plan = plan_update_of_samples(model, _count(images), images.samples.shape, options)
        updated, result = train_update(model, plan, _samples(images, plan), options, progress, images.paths)
        return _publish(writer, updated, replace(result, seen_bytes=seen_bytes, skipped=images.unreadable), start)


def _publish(
    writer: Writer, model: Model, result: UpdateResult, start: float, details: Mapping[str, Any] | None = None
) -> UpdateResult:
    """Save the model as the next version, with a record of the update in the history."""
    result = replace(result, seconds=time.monotonic() - start)
    record = {
        **(details or {}),
        "new": dict(result.new),
        "more": dict(result.more),
        "seconds": round(result.seconds, 1),
        "memory_bytes": result.memory_bytes,
        "accuracy": result.accuracy,
        "held_out": result.held_out,
        "omega": None if result.adaptation is None else result.adaptation.omega,
    }
    return replace(result, version=save(writer, model, action="learn", record=record).version)


def train_update(
    model: Model | None,
    plan: UpdatePlan,
    samples: Samples,
    options: LearnOptions,
    progress: Progress = SILENT,
    paths: Sequence[Path] = (),
) -> tuple[Model, UpdateResult]:
    """The model after an update with these samples, not saved yet; UpdateRejected if it is not good enough.

    If the network is trained, some samples are held out from that. `paths` name the samples in warnings.
    """
    learner, index = plan.learner, plan.learner.tasks_
    if plan.trains:  # images that cannot be read are known now
        check_validation(options, [*plan.new.values(), *plan.more.values()])
    before = model.metadata if model is not None else Metadata()
    marks, exemplars = learner.memory.features.held_out, len(learner.memory.images)
    with threads_for(samples.shape), warnings.catch_warnings():
        # A class may well have fewer images than are stored per class.
        warnings.filterwarnings("ignore", ".* fewer than .* all are kept", EngramWarning)
        tuning = plan.tuning or learner.tuning(_task(index, samples), progress)
        sources, held_out, adaptation = _train_and_absorb(learner, samples, options, tuning, progress)
        if tuning.tunes and exemplars and model is not None and not replays(model.learner):
            marks = None  # the network was trained on exemplars that were held out, and their features are not known
        mark_held_out(learner, sources, marks, held_out)
        estimated = before.held_out_counts.estimated or (tuning.tunes and index > 0)
        scores = HeldOutScores.of(learner) or _head_scores(learner, samples.select(held_out.nonzero().squeeze(1)))
        counts, calibration = assess(scores, len(plan.names), before.calibration, estimated=estimated)
    metadata = replace(
        before,
        seen=_seen(plan, before),
        budget=plan.budget,
        features_per_class=plan.features_per_class,
        calibration=calibration,
        adaptation=adaptation,
        held_out_counts=counts,
        epochs=options.epochs,
        hold_out=options.hold_out,
    )
    updated = Model(learner, plan.names, metadata)
    result = replace(
        _result(updated, plan, tuning, before.held_out_counts),
        warnings=(*_class_sizes(plan), *_near_duplicates(learner, plan, sources, paths)),
        doubtful=_doubtful_images(scores, sources, plan.names, calibration.temperature),
    )
    if not options.force and (reason := _rejection(result, before.held_out_counts, counts, options.at_least)):
        raise UpdateRejected(f"The update was not published: {reason}", result.class_accuracies, result.warnings)
    return updated, result


def _result(model: Model, plan: UpdatePlan, tuning: Tuning, before: HeldOutCounts) -> UpdateResult:
    counts, learner = model.metadata.held_out_counts, model.learner
    accuracy, interval = value_and_interval(counts.accuracy())
    return UpdateResult(
        new=plan.new,
        more=plan.more,
        classes=len(plan.names),
        memory_bytes=learner.memory.nbytes,
        accuracy=accuracy,
        interval=interval,
        held_out=sum(counts.total),
        held_out_classes=counts.classes,
        estimated=counts.estimated,
        class_accuracies=_class_accuracies(plan, before, counts),
        calibration=model.metadata.calibration,
        rejection=model.rejection,
        adaptation=model.metadata.adaptation,
        network=plan.network,
        tuned=tuning.tunes,
        tuning=tuning.reason,
        classifier=learner.classifier_description,
    )


def _seen(plan: UpdatePlan, before: Metadata) -> tuple[int, ...]:
    """How many images of each class were ever learned."""
    arrived, seen = {**plan.new, **plan.more}, [*before.seen, *([0] * len(plan.new))]
    return tuple(count + arrived.get(name, 0) for name, count in zip(plan.names, seen, strict=True))


def _train_and_absorb(
    learner: Learner, samples: Samples, options: LearnOptions, tuning: Tuning, progress: Progress
) -> tuple[MemorySources, Tensor, Adaptation | None]:
    """Train on samples that are not held out, and absorb all: where the memory comes from, and which were held out."""
    index = learner.tasks_
    if not tuning.tunes and learner.make_classifier() is not None:
        network = learner.network_ or learner.initial_network(samples, progress)
        sources = learner.absorb(_task(index, samples), network, progress)
        return sources, torch.ones(len(samples), dtype=torch.bool), None
    rest, held_out = samples, samples.select(torch.arange(0))
    if options.hold_out:
        purpose = f"held out {index}"
        rest, held_out = hold_out(samples, options.hold_out, learner.seed, purpose, smallest=MIN_TO_HOLD_OUT)
    network = learner.fit(_task(index, rest), progress, None, start=learner.network_, tunes=tuning.tunes)
    adaptation, kind = None, None
    if len(held_out) and index and learner.make_adapter().needs_pairs:
        adaptation, kind = _assess_adapter(learner, network, _task(index, rest), held_out, progress)
    with learner.adapting_by(kind):
        sources = learner.absorb(_task(index, samples), network, progress)
    return sources, ~torch.isin(samples.rows, rest.rows), adaptation


def _assess_adapter(
    learner: Learner, network: Network, task: Task, held_out: Samples, progress: Progress
) -> tuple[Adaptation | None, str | None]:
    """How well stored features are adapted, measured on held-out samples of the new classes, and the adapter to use.

    From a few images an adapter may learn nothing that generalises: features are then better left as they are. The
    choice is kept for all images, since another adapter would not have been assessed.
    """
    trial = with_settings(learner)
    trial.absorb(task, network, progress)
    if trial.adapter_ is None:
        return None, None
    old, new = F.normalize(learner.extract(held_out)), F.normalize(trial.extract(held_out))
    adapted = adapt(trial.adapter_, old, trial.trained.mean.device)
    omega, unadapted = (float((vectors * new).sum(1).mean()) for vectors in (adapted, old))
    adaptation = Adaptation(images=len(held_out), omega=omega, omega_unadapted=unadapted, adapted=omega >= unadapted)
    return adaptation, trial.adapter_.name if adaptation.adapted else "identity"


def _head_scores(learner: Learner, held_out: Samples) -> HeldOutScores | None:
    """The head's scores of held-out samples, for methods that store no features: of the new classes only."""
    if learner.classifier_ is not None or not len(held_out):
        return None
    scores = learner.scores(held_out.batch(torch.arange(len(held_out))))
    return HeldOutScores(scores, class_indices_of(held_out.labels, learner.classes_))


def _class_accuracies(plan: UpdatePlan, before: HeldOutCounts, after: HeldOutCounts) -> tuple[ClassAccuracy, ...]:
    def accuracy(counts: HeldOutCounts, class_index: int) -> float | None:
        return value_and_interval(counts.accuracy([class_index]) if class_index < len(counts.total) else None)[0]

    return tuple(
        ClassAccuracy(
            name=name,
            kind="new" if name in plan.new else "more" if name in plan.more else "old",
            images=after.total[class_index],
            before=accuracy(before, class_index),
            after=accuracy(after, class_index),
            estimated=after.estimated,
        )
        for class_index, name in enumerate(plan.names)
    )


def _rejection(result: UpdateResult, before: HeldOutCounts, after: HeldOutCounts, at_least: float | None) -> str | None:
    """Why an update is rejected: accuracy on the old classes falls sharply, or is below `at_least`."""
    old = range(len(before.total))
    earlier, later = before.accuracy(), after.accuracy(old)
    if earlier and later and earlier.value - later.value > MAX_FALL and later.interval[1] < earlier.interval[0]:
        remedy = "Leave the network as it is (--tune none)" if result.tuned else "Check for duplicate classes"
        return (
            f"accuracy on the {len(old)} old classes would fall from {earlier} to {later}. {remedy}, "
            "give more images of the new classes, or publish it anyway (--force)."
        )
    if at_least is None:
        return None
    known = [each.after for each in result.class_accuracies if each.after is not None]
    if not known:
        return "no image was held out, so it cannot be validated. Omit --validate, or publish it anyway (--force)."
    mean = sum(known) / len(known)  # over classes, so that a large class does not hide a small one
    if mean < at_least:
        return f"accuracy, a mean over {len(known)} classes, would be {mean:.3f}, below {at_least:g}. More images help."
    return None


def _doubtful_images(
    found: HeldOutScores | None, sources: MemorySources, names: tuple[str, ...], temperature: float
) -> tuple[DoubtfulImage, ...]:
    """The images of an update that leave-one-out predictions contradict most."""
    if found is None or found.rows is None:
        return ()
    probabilities = torch.softmax(found.scores.double() / temperature, dim=1)
    positions, truth = sources.features[found.rows], found.class_indices[:, None]
    margins = probabilities.max(1).values - probabilities.gather(1, truth).squeeze(1)
    margins[positions < 0] = 0  # of an earlier update
    worst = margins.argsort(descending=True, stable=True)[:MOST_DOUBTFUL]
    return tuple(
        DoubtfulImage(
            index=int(positions[row]),
            name=names[int(found.class_indices[row])],
            predicted=names[int(probabilities[row].argmax())],
            probability=float(probabilities[row].max()),
        )
        for row in worst.tolist()
        if margins[row] > 0
    )


def _class_sizes(plan: UpdatePlan) -> Iterator[str]:
    if len(plan.names) == 1:
        yield "The model knows only one class, and so predicts it for any image. Teach it a second one."
    single = [name for name, count in plan.new.items() if count == 1]
    if single:
        others = f" and {len(single) - LISTED} more" if len(single) > LISTED else ""
        yield f"Only one image: {', '.join(map(printable, single[:LISTED]))}{others}. Give at least five of a class."
    counts = {name: count for name, count in {**plan.new, **plan.more}.items() if count}
    most, fewest = max(counts, key=lambda name: counts[name]), min(counts, key=lambda name: counts[name])
    if counts[most] >= UNEQUAL * counts[fewest]:
        sizes = f"{counts[most]} images of {printable(most)}, {counts[fewest]} of {printable(fewest)}"
        yield f"Classes are very unequal: {sizes}. Small classes are recognised less reliably."


def _near_duplicates(learner: Learner, plan: UpdatePlan, stored: MemorySources, paths: Sequence[Path]) -> Iterator[str]:
    """Images of the update whose features are almost those of an image of another class."""
    memory, sources = learner.memory.features, stored.features
    if not learner.is_pretrained or len(learner.shape_) != 3 or not len(memory):
        return
    # Some networks give all images similar features; without their mean they differ.
    rows, class_indices = F.normalize(memory.rows - memory.rows.mean(0)), memory.class_indices
    found: dict[frozenset[int], tuple[int, int]] = {}  # two classes -> two rows
    for some in (sources >= 0).nonzero().squeeze(1).split(1024):
        cosines = rows[some] @ rows.T  # (r, n)
        cosines[class_indices[some][:, None] == class_indices] = -1
        nearest = cosines.max(1)
        for place in (nearest.values > NEAR_DUPLICATE).nonzero().squeeze(1).tolist():
            row, other = int(some[place]), int(nearest.indices[place])
            found.setdefault(frozenset(class_indices[[row, other]].tolist()), (row, other))

    def named(row: int) -> str:
        name, source = printable(plan.names[int(class_indices[row])]), int(sources[row])
        return f"{printable(paths[source])} ({name})" if 0 <= source < len(paths) else f"an image of {name}"

    for row, other in list(found.values())[:LISTED]:
        yield f"Nearly the same image in two classes: {named(row)} and {named(other)}. Is one of them mislabelled?"
    if (others := len(found) - LISTED) > 0:
        yield f"Nearly the same image in two classes: {others} more {'pair' if others == 1 else 'pairs'} of classes."


def _count(images: LabelledImages) -> dict[str, int]:
    """How many images there are of each class."""
    counts = Counter(images.samples.labels.tolist())
    return {name: counts[label] for label, name in enumerate(images.class_names)}


def _samples(images: LabelledImages, plan: UpdatePlan) -> Samples:
    """The images with the learner's labels."""
    labels = torch.tensor([plan.labels[name] for name in images.class_names])
    return Samples.of(images.samples.inputs, labels[images.samples.labels])


def _task(index: int, samples: Samples) -> Task:
    return Task(index, samples.classes(), samples, samples.select(torch.arange(0)))
