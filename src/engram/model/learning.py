"""`learn`: a folder of pictures becomes a new model, or the next generation of one."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task, hold_out
from engram.data.labelled import LabelledImages, read_images, scan
from engram.data.scanning import SkippedFile
from engram.errors import EngramError, EngramWarning, UsageError
from engram.features import adapt
from engram.methods import Learner, MemorySources, Tuning, class_indices_of
from engram.model.accuracy import Accuracy
from engram.model.calibration import calibrate
from engram.model.evidence import HeldOutCounts, Judged, evidence, falls_sharply, judge, mark_held_out, replays
from engram.model.folder import ModelFolder, Writer
from engram.model.model import Adaptation, Calibration, Metadata, Model, load, remake, save
from engram.model.plan import (
    SMALLEST,
    LearnOptions,
    UpdatePlan,
    check_names,
    check_validation,
    plan_update,
    plan_update_of_samples,
)
from engram.model.warning_signs import warning_signs
from engram.network import Network, threads_for
from engram.progress import SILENT, Progress


class UpdateRejected(EngramError):
    """An update that is not good enough to be published, with the accuracy of each class and what may be the cause."""

    def __init__(
        self, message: str, class_accuracies: tuple[ClassAccuracy, ...], warnings: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.class_accuracies, self.warnings = class_accuracies, warnings


@dataclass(frozen=True, kw_only=True)
class ClassAccuracy:
    """The accuracy on the held-out images of one class, before and after the update."""

    name: str
    kind: str  # new, more or old
    images: int  # held out, that `after` was measured on
    before: float | None  # None where the class was new, or there was nothing to judge it by
    after: float | None
    estimated: bool = False  # the features of these images were adapted when the network changed


@dataclass(frozen=True, kw_only=True)
class TrainedUpdate:
    """A model after an update, and how it fared."""

    model: Model
    accuracy: Accuracy | None  # on held-out images; None where there are none
    class_accuracies: tuple[ClassAccuracy, ...]
    tuning: Tuning
    warnings: tuple[str, ...]

    @property
    def estimated(self) -> bool:
        """Whether the accuracy is an estimate: features were adapted when the network changed."""
        return self.model.metadata.held_out_counts.estimated


@dataclass(frozen=True, kw_only=True)
class UpdateResult:
    """What `learn` has done."""

    generation: int
    new: Mapping[str, int]  # pictures of each class that is new, and below of each that was known
    more: Mapping[str, int]
    classes: int  # known now
    memory_bytes: int
    seen_bytes: int  # of the files that were learned from
    seconds: float
    accuracy: float | None  # on held-out images of all classes that have any
    interval: tuple[float, float] | None  # 95 %
    held_out: int  # images that accuracy was measured on
    held_out_classes: int  # and their classes
    estimated: bool  # some of their features were adapted when the network changed
    class_accuracies: tuple[ClassAccuracy, ...]
    calibration: Calibration
    adaptation: Adaptation | None
    network: str
    tuned: bool  # whether the network was trained in this update
    tuning: str  # why, or why not
    classifier: str
    warnings: tuple[str, ...] = ()
    skipped: tuple[SkippedFile, ...] = field(default=())  # files that are no pictures, and those that cannot be read

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        skipped = [left.to_json() for left in self.skipped]
        return {**asdict(self), "skipped": skipped}


def learn(
    folder: ModelFolder, source: Path, options: LearnOptions | None = None, progress: Progress = SILENT
) -> UpdateResult:
    """Teach the model in a folder the pictures of `source`, or make one there. After an error all is as it was."""
    options = options or LearnOptions()
    begin = time.monotonic()
    found = scan(source, progress)
    with folder.writing() as writer:
        model = load(writer, device=options.device) if writer.exists() else None
        plan = plan_update(model, found, options)
        pictures = read_images(found, plan.image_size, progress)
        seen_bytes = sum(path.stat().st_size for path in pictures.paths if path.exists())
        learned = _publish(writer, model, _as_read(plan, pictures), pictures, options, progress, begin, seen_bytes)
    return replace(learned, skipped=(*found.skipped, *pictures.unreadable))


def learn_images(
    folder: ModelFolder,
    pictures: LabelledImages,
    options: LearnOptions | None = None,
    progress: Progress = SILENT,
    *,
    seen_bytes: int = 0,
) -> UpdateResult:
    """The same for pictures that were read already, from files of so many bytes."""
    options = options or LearnOptions()
    begin = time.monotonic()
    with folder.writing() as writer:
        model = load(writer, device=options.device) if writer.exists() else None
        check_names(model.names if model is not None else (), pictures.class_names)
        if model is not None and model.learner.shape_ != pictures.samples.shape:
            raise UsageError(f"This model sees samples of the shape {model.learner.shape_}, and keeps to it.")
        counts = Counter(pictures.class_names[label] for label in pictures.samples.labels.tolist())
        arriving = {name: counts[name] for name in pictures.class_names}
        plan = plan_update_of_samples(model, arriving, pictures.samples.shape, options)
        learned = _publish(writer, model, plan, pictures, options, progress, begin, seen_bytes)
    return replace(learned, skipped=pictures.unreadable)


def _publish(
    writer: Writer,
    model: Model | None,
    plan: UpdatePlan,
    pictures: LabelledImages,
    options: LearnOptions,
    progress: Progress,
    begin: float,
    seen_bytes: int,
) -> UpdateResult:
    """Carry a proposal out, and save what comes of it."""
    taught = train_update(model, plan, _labelled(pictures, plan), options, progress, _paths(pictures))
    facts, learner = taught.model.metadata, taught.model.learner
    seconds = time.monotonic() - begin
    record = {
        "new": dict(plan.new),
        "more": dict(plan.more),
        "seconds": round(seconds, 1),
        "memory_bytes": learner.memory.nbytes,
        "accuracy": None if taught.accuracy is None else taught.accuracy.value,
        "held_out": sum(facts.held_out_counts.total),
        "omega": None if facts.adaptation is None else facts.adaptation.omega,
    }
    manifest = save(writer, taught.model, action="learn", record=record)
    accuracy = taught.accuracy
    return UpdateResult(
        generation=manifest.generation,
        new=plan.new,
        more=plan.more,
        classes=len(taught.model.names),
        memory_bytes=learner.memory.nbytes,
        seen_bytes=seen_bytes,
        seconds=seconds,
        accuracy=None if accuracy is None else accuracy.value,
        interval=None if accuracy is None else (accuracy.low, accuracy.high),
        held_out=0 if accuracy is None else accuracy.total,
        held_out_classes=facts.held_out_counts.classes,
        estimated=taught.estimated,
        class_accuracies=taught.class_accuracies,
        calibration=facts.calibration,
        adaptation=facts.adaptation,
        network=plan.network,
        tuned=taught.tuning.tunes,
        tuning=taught.tuning.reason,
        classifier=learner.classifier_description,
        warnings=taught.warnings,
    )


def train_update(
    model: Model | None,
    plan: UpdatePlan,
    samples: Samples,
    options: LearnOptions,
    progress: Progress = SILENT,
    paths: Sequence[str] = (),
) -> TrainedUpdate:
    """The model that follows from these samples, and how good it is on held-out ones.

    Where the network is trained, some samples are held out from that. Stored features and classifier come from all.
    `paths` name the samples in warnings.
    """
    learner, index = plan.learner, plan.learner.tasks_
    if plan.trains:
        check_validation(options, [*plan.new.values(), *plan.more.values()])
    before = model.metadata if model is not None else Metadata()
    marks, images = learner.memory.features.held_out, len(learner.memory.images)
    with threads_for(samples.shape), warnings.catch_warnings():
        # A class may well have fewer pictures than there is room for.
        warnings.filterwarnings("ignore", ".* fewer than .* all are kept", EngramWarning)
        tuning = plan.tuning or learner.tuning(_task(index, samples), progress)
        if tuning.tunes or learner.make_classifier() is None:
            kept, arrived, adaptation = _tuned(learner, samples, options, tuning, progress)
        else:
            network = learner.network_ or learner.initial_network(samples, progress)
            kept = learner.absorb(_task(index, samples), network, progress)
            arrived, adaptation = torch.ones(len(samples), dtype=torch.bool), None
        if tuning.tunes and images and model is not None and not replays(model.learner):
            marks = None  # images were kept that are trained on now: nobody knows which features are theirs
        mark_held_out(learner, kept, marks, arrived)
        estimated = before.held_out_counts.estimated or (tuning.tunes and index > 0)
        judged = judge(learner) or _judge_head(learner, samples.select(arrived.nonzero().squeeze(1)))
        found = evidence(judged, len(plan.names), estimated=estimated)
        calibration = Calibration(temperature=before.calibration.temperature)
        if judged is not None:
            calibration = calibrate(judged.scores, judged.class_indices, before.calibration)
    facts = replace(
        before,
        seen=_seen(before, plan),
        budget=plan.budget,
        features_per_class=plan.features_per_class,
        calibration=calibration,
        adaptation=adaptation,
        held_out_counts=found,
        epochs=options.epochs,
        hold_out=options.hold_out,
    )
    taught = TrainedUpdate(
        model=Model(learner, plan.names, facts),
        accuracy=found.accuracy(),
        class_accuracies=_class_accuracies(plan, before.held_out_counts, found),
        tuning=tuning,
        warnings=warning_signs(learner, plan, kept, paths),
    )
    _refuse(taught, before.held_out_counts, options)
    return taught


def _seen(before: Metadata, plan: UpdatePlan) -> tuple[int, ...]:
    arrived = {**plan.new, **plan.more}
    counts = [*before.seen, *([0] * len(plan.new))]
    return tuple(count + arrived.get(name, 0) for name, count in zip(plan.names, counts, strict=True))


def _tuned(
    learner: Learner, samples: Samples, options: LearnOptions, tuning: Tuning, progress: Progress
) -> tuple[MemorySources, Tensor, Adaptation | None]:
    """Train the network on samples of which some are held out, and absorb all of them; which were held out (bool)."""
    index = learner.tasks_
    rest, apart = samples, samples.select(torch.arange(0))
    if options.hold_out:
        rest, apart = hold_out(samples, options.hold_out, learner.seed, f"held out {index}", smallest=SMALLEST)
    network = learner.fit(_task(index, rest), progress, None, start=learner.network_, tunes=tuning.tunes)
    adaptation, carrier = None, None
    if len(apart) and index and learner.adapts:
        adaptation, carrier = _judge_adapter(learner, network, _task(index, rest), apart, progress)
    with learner.adapting_by(carrier):
        kept = learner.absorb(_task(index, samples), network, progress)
    return kept, ~torch.isin(samples.rows, rest.rows), adaptation


def _as_read(plan: UpdatePlan, pictures: LabelledImages) -> UpdatePlan:
    """The proposal with the numbers of pictures that could be read."""
    counts = Counter(pictures.class_names[label] for label in pictures.samples.labels.tolist())
    return replace(
        plan,
        new={name: counts[name] for name in plan.new},
        more={name: counts[name] for name in plan.more},
    )


def _labelled(pictures: LabelledImages, plan: UpdatePlan) -> Samples:
    """The pictures with the learner's labels."""
    labels = torch.tensor([plan.labels[name] for name in pictures.class_names])
    return Samples.of(pictures.samples.inputs, labels[pictures.samples.labels])


def _task(index: int, samples: Samples) -> Task:
    return Task(index, samples.classes(), samples, samples.select(torch.arange(0)))


def _paths(pictures: LabelledImages) -> tuple[str, ...]:
    return tuple(map(str, pictures.paths))


def _judge_head(learner: Learner, held_out: Samples) -> Judged | None:
    """The head's scores of held-out samples: what there is of methods that store no features, for new classes alone."""
    if learner.classifier_ is not None or not len(held_out):
        return None
    scores = learner.scores(held_out.batch(torch.arange(len(held_out))))
    return Judged(scores, class_indices_of(held_out.labels, learner.classes_))


def _judge_adapter(
    learner: Learner, network: Network, task: Task, apart: Samples, progress: Progress
) -> tuple[Adaptation | None, str | None]:
    """How well stored features are adapted, judged on held-out samples of the new classes, and which adapter to use.

    From a few images an adapter may learn nothing that holds for others: then features are better left as they are.
    With all images another adapter might be chosen that nobody has judged: so this choice stands.
    """
    trial = remake(learner)
    trial.absorb(task, network, progress)
    if trial.adapter_ is None:
        return None, None
    old, new = F.normalize(learner.extract(apart)), F.normalize(trial.extract(apart))
    adapted = adapt(trial.adapter_, old, trial.trained.mean.device)
    omega, unadapted = (float((vectors * new).sum(1).mean()) for vectors in (adapted, old))
    adaptation = Adaptation(images=len(apart), omega=omega, omega_unadapted=unadapted, adapted=omega >= unadapted)
    return adaptation, trial.adapter_.name if adaptation.adapted else "identity"


def _class_accuracies(plan: UpdatePlan, before: HeldOutCounts, after: HeldOutCounts) -> tuple[ClassAccuracy, ...]:
    judged = []
    for class_index, name in enumerate(plan.names):
        kind = "new" if name in plan.new else "more" if name in plan.more else "old"
        earlier = before.accuracy([class_index]) if class_index < len(before.total) else None
        later = after.accuracy([class_index])
        judged.append(
            ClassAccuracy(
                name=name,
                kind=kind,
                images=after.total[class_index],
                before=None if earlier is None else earlier.value,
                after=None if later is None else later.value,
                estimated=after.estimated,
            )
        )
    return tuple(judged)


def _refuse(taught: TrainedUpdate, before: HeldOutCounts, options: LearnOptions) -> None:
    """Refuse an update that is below what was asked for, or after which accuracy on the old classes falls sharply."""
    if options.force:
        return
    old = range(len(before.total))
    earlier, later = before.accuracy(), taught.model.metadata.held_out_counts.accuracy(old)
    if earlier is not None and later is not None and falls_sharply(earlier, later):
        tunes = taught.tuning.tunes
        remedy = "Leave the network as it is (--tune none)" if tunes else "Check whether new classes repeat old ones"
        raise UpdateRejected(
            f"Accuracy on the {len(old)} old classes would fall from {earlier} to {later}: nothing was published, and "
            f"the model is as it was. {remedy}, give more images of the new classes, or publish it all the same "
            "(--force).",
            taught.class_accuracies,
            taught.warnings,
        )
    known = [each.after for each in taught.class_accuracies if each.after is not None]
    if options.at_least is None:
        return
    if not known:
        raise UpdateRejected(
            "There is nothing to judge this update by: no image was held out. Nothing was published, and the model is "
            "as it was. Leave --validate out, or publish it all the same with --force.",
            taught.class_accuracies,
            taught.warnings,
        )
    # The mean over classes, so that a large class does not hide a small one.
    mean = sum(known) / len(known)
    if mean < options.at_least:
        raise UpdateRejected(
            f"Accuracy would be {mean:.3f}, the mean over {len(known)} classes, which is below {options.at_least:g}: "
            "nothing was published, and the model is as it was. More images may help.",
            taught.class_accuracies,
            taught.warnings,
        )
