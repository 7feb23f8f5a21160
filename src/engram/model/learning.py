"""`learn`: a folder of pictures becomes a new model, or the next generation of one."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task
from engram.data.holdout import hold_out
from engram.data.left_out import LeftOut
from engram.data.pictures import Pictures, read, scan
from engram.errors import EngramError, EngramWarning, UsageError
from engram.features import carry_over, kind_of
from engram.methods import Features, Kept, Learner, Tuning, columns_of
from engram.model.accuracy import Accuracy
from engram.model.calibration import calibrate
from engram.model.evidence import Evidence, Judged, evidence, falls_sharply, judge, mark_held_out, replays
from engram.model.folder import ModelFolder
from engram.model.model import Adaptation, Calibration, Facts, Model, load, remake, save
from engram.model.proposal import SMALLEST, Proposal, Wishes, check_names, check_validation, propose, propose_samples
from engram.model.warning_signs import warning_signs
from engram.model.writing import Writer
from engram.network import Network, threads_for
from engram.progress import SILENT, Progress

Carrier = Literal["mlp", "ridge", "identity"]  # the adapter of stored features; identity leaves them as they are


class NotGoodEnough(EngramError):
    """An update that is not good enough to be published, with the accuracy of each class and what may be the cause."""

    def __init__(self, message: str, judged: tuple[Judgement, ...], warnings: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.judged, self.warnings = judged, warnings


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The accuracy on the held-out images of one class, before and after the update."""

    name: str
    kind: str  # new, more or old
    images: int  # held out, that `after` was measured on
    before: float | None  # None where the class was new, or there was nothing to judge it by
    after: float | None
    estimated: bool = False  # the features of these images were adapted when the network changed


@dataclass(frozen=True, kw_only=True)
class Taught:
    """A model after an update, and how it fared."""

    model: Model
    accuracy: Accuracy | None  # on held-out images; None where there are none
    judged: tuple[Judgement, ...]
    tuning: Tuning
    warnings: tuple[str, ...]

    @property
    def estimated(self) -> bool:
        """Whether the accuracy is an estimate: features were adapted when the network changed."""
        return self.model.facts.evidence.estimated


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What `learn` has done."""

    generation: int
    new: Mapping[str, int]  # pictures of each class that is new, and below of each that was known
    more: Mapping[str, int]
    classes: int  # known now
    kept_bytes: int
    seen_bytes: int  # of the files that were learned from
    seconds: float
    accuracy: float | None  # on held-out images of all classes that have any
    interval: tuple[float, float] | None  # 95 %
    held_out: int  # images that accuracy was measured on
    held_out_classes: int  # and their classes
    estimated: bool  # some of their features were adapted when the network changed
    judged: tuple[Judgement, ...]
    calibration: Calibration
    adaptation: Adaptation | None
    network: str
    tuned: bool  # whether the network was trained in this update
    tuning: str  # why, or why not
    classifier: str
    warnings: tuple[str, ...] = ()
    left_out: tuple[LeftOut, ...] = field(default=())  # files that are no pictures, and those that cannot be read

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        left_out = [left.to_json() for left in self.left_out]
        return {**asdict(self), "left_out": left_out}


def learn(folder: ModelFolder, source: Path, wishes: Wishes | None = None, progress: Progress = SILENT) -> Learned:
    """Teach the model in a folder the pictures of `source`, or make one there. After an error all is as it was."""
    wishes = wishes or Wishes()
    begin = time.monotonic()
    found = scan(source, progress)
    with folder.writing() as writer:
        model = load(writer, device=wishes.device) if writer.exists() else None
        proposal = propose(model, found, wishes)
        pictures = read(found, proposal.image_size, progress)
        seen_bytes = sum(path.stat().st_size for path in pictures.paths if path.exists())
        learned = _publish(writer, model, _as_read(proposal, pictures), pictures, wishes, progress, begin, seen_bytes)
    return replace(learned, left_out=(*found.left_out, *pictures.unreadable))


def learn_pictures(
    folder: ModelFolder,
    pictures: Pictures,
    wishes: Wishes | None = None,
    progress: Progress = SILENT,
    *,
    seen_bytes: int = 0,
) -> Learned:
    """The same for pictures that were read already, from files of so many bytes."""
    wishes = wishes or Wishes()
    begin = time.monotonic()
    with folder.writing() as writer:
        model = load(writer, device=wishes.device) if writer.exists() else None
        check_names(model.names if model is not None else (), pictures.class_names)
        if model is not None and model.learner.shape_ != pictures.samples.shape:
            raise UsageError(f"This model sees samples of the shape {model.learner.shape_}, and keeps to it.")
        counts = Counter(pictures.class_names[label] for label in pictures.samples.labels.tolist())
        arriving = {name: counts[name] for name in pictures.class_names}
        proposal = propose_samples(model, arriving, pictures.samples.shape, wishes)
        learned = _publish(writer, model, proposal, pictures, wishes, progress, begin, seen_bytes)
    return replace(learned, left_out=pictures.unreadable)


def _publish(
    writer: Writer,
    model: Model | None,
    proposal: Proposal,
    pictures: Pictures,
    wishes: Wishes,
    progress: Progress,
    begin: float,
    seen_bytes: int,
) -> Learned:
    """Carry a proposal out, and save what comes of it."""
    taught = teach(model, proposal, _labelled(pictures, proposal), wishes, progress, _paths(pictures))
    facts, learner = taught.model.facts, taught.model.learner
    seconds = time.monotonic() - begin
    record = {
        "new": dict(proposal.new),
        "more": dict(proposal.more),
        "seconds": round(seconds, 1),
        "kept_bytes": learner.memory.nbytes,
        "accuracy": None if taught.accuracy is None else taught.accuracy.value,
        "held_out": sum(facts.evidence.total),
        "omega": None if facts.adaptation is None else facts.adaptation.omega,
    }
    manifest = save(writer, taught.model, action="learn", record=record)
    accuracy = taught.accuracy
    return Learned(
        generation=manifest.generation,
        new=proposal.new,
        more=proposal.more,
        classes=len(taught.model.names),
        kept_bytes=learner.memory.nbytes,
        seen_bytes=seen_bytes,
        seconds=seconds,
        accuracy=None if accuracy is None else accuracy.value,
        interval=None if accuracy is None else (accuracy.low, accuracy.high),
        held_out=0 if accuracy is None else accuracy.total,
        held_out_classes=facts.evidence.classes,
        estimated=taught.estimated,
        judged=taught.judged,
        calibration=facts.calibration,
        adaptation=facts.adaptation,
        network=proposal.network,
        tuned=taught.tuning.tunes,
        tuning=taught.tuning.reason,
        classifier=learner.classifier_description,
        warnings=taught.warnings,
    )


def teach(
    model: Model | None,
    proposal: Proposal,
    samples: Samples,
    wishes: Wishes,
    progress: Progress = SILENT,
    paths: Sequence[str] = (),
) -> Taught:
    """The model that follows from these samples, and how good it is on held-out ones.

    Where the network is trained, some samples are held out from that. Stored features and classifier come from all.
    `paths` name the samples in warnings.
    """
    learner, index = proposal.learner, proposal.learner.tasks_
    if proposal.trains:
        check_validation(wishes, [*proposal.new.values(), *proposal.more.values()])
    before = model.facts if model is not None else Facts()
    marks, images = learner.memory.features.held_out, len(learner.memory.images)
    with threads_for(samples.shape), warnings.catch_warnings():
        # A class may well have fewer pictures than there is room for.
        warnings.filterwarnings("ignore", ".* fewer than .* all are kept", EngramWarning)
        tuning = proposal.tuning or learner.tuning(_task(index, samples), progress)
        if tuning.tunes or learner.make_classifier() is None:
            kept, arrived, adaptation = _tuned(learner, samples, wishes, tuning, progress)
        else:
            network = learner.network_ or learner.initial_network(samples, progress)
            kept = learner.absorb(_task(index, samples), network, progress)
            arrived, adaptation = torch.ones(len(samples), dtype=torch.bool), None
        if tuning.tunes and images and model is not None and not replays(model.learner):
            marks = None  # images were kept that are trained on now: nobody knows which features are theirs
        mark_held_out(learner, kept, marks, arrived)
        estimated = before.evidence.estimated or (tuning.tunes and index > 0)
        judged = judge(learner) or _judge_head(learner, samples.select(arrived.nonzero().squeeze(1)))
        found = evidence(judged, len(proposal.names), estimated=estimated)
        calibration = Calibration(temperature=before.calibration.temperature)
        if judged is not None:
            calibration = calibrate(judged.scores, judged.columns, before.calibration)
    facts = replace(
        before,
        seen=_seen(before, proposal),
        budget=proposal.budget,
        features_per_class=proposal.features_per_class,
        calibration=calibration,
        adaptation=adaptation,
        evidence=found,
        epochs=wishes.epochs,
        hold_out=wishes.hold_out,
    )
    taught = Taught(
        model=Model(learner, proposal.names, facts),
        accuracy=found.accuracy(),
        judged=_judgements(proposal, before.evidence, found),
        tuning=tuning,
        warnings=warning_signs(learner, proposal, kept, paths),
    )
    _refuse(taught, before.evidence, wishes)
    return taught


def _seen(before: Facts, proposal: Proposal) -> tuple[int, ...]:
    arrived = {**proposal.new, **proposal.more}
    counts = [*before.seen, *([0] * len(proposal.new))]
    return tuple(count + arrived.get(name, 0) for name, count in zip(proposal.names, counts, strict=True))


def _tuned(
    learner: Learner, samples: Samples, wishes: Wishes, tuning: Tuning, progress: Progress
) -> tuple[Kept, Tensor, Adaptation | None]:
    """Train the network on samples of which some are held out, and absorb all of them; which were held out (bool)."""
    index = learner.tasks_
    rest, apart = samples, samples.select(torch.arange(0))
    if wishes.hold_out:
        rest, apart = hold_out(samples, wishes.hold_out, learner.seed, f"held out {index}", smallest=SMALLEST)
    network = learner.fit(_task(index, rest), progress, None, start=learner.network_, tunes=tuning.tunes)
    adaptation, carrier = None, None
    if len(apart) and index and isinstance(learner, Features):
        adaptation, carrier = _judge_adapter(learner, network, _task(index, rest), apart, progress)
    with _carrying(learner, carrier):
        kept = learner.absorb(_task(index, samples), network, progress)
    return kept, ~torch.isin(samples.rows, rest.rows), adaptation


def _as_read(proposal: Proposal, pictures: Pictures) -> Proposal:
    """The proposal with the numbers of pictures that could be read."""
    counts = Counter(pictures.class_names[label] for label in pictures.samples.labels.tolist())
    return replace(
        proposal,
        new={name: counts[name] for name in proposal.new},
        more={name: counts[name] for name in proposal.more},
    )


def _labelled(pictures: Pictures, proposal: Proposal) -> Samples:
    """The pictures with the learner's labels."""
    labels = torch.tensor([proposal.labels[name] for name in pictures.class_names])
    return Samples.of(pictures.samples.inputs, labels[pictures.samples.labels])


def _task(index: int, samples: Samples) -> Task:
    return Task(index, samples.classes(), samples, samples.select(torch.arange(0)))


def _paths(pictures: Pictures) -> tuple[str, ...]:
    return tuple(map(str, pictures.paths))


def _judge_head(learner: Learner, held_out: Samples) -> Judged | None:
    """The head's scores of held-out samples: what there is of methods that store no features, for new classes alone."""
    if learner.classifier_ is not None or not len(held_out):
        return None
    scores = learner.scores(held_out.batch(torch.arange(len(held_out))))
    return Judged(scores, columns_of(held_out.labels, learner.classes_))


def _judge_adapter(
    learner: Learner, network: Network, task: Task, apart: Samples, progress: Progress
) -> tuple[Adaptation | None, Carrier | None]:
    """How well stored features are adapted, judged on held-out samples of the new classes, and which adapter to use.

    From a few images an adapter may learn nothing that holds for others: then features are better left as they are.
    With all images another adapter might be chosen that nobody has judged: so this choice stands.
    """
    trial = remake(learner)
    trial.absorb(task, network, progress)
    if not isinstance(trial, Features) or trial.adapter_ is None:
        return None, None
    old, new = F.normalize(learner.extract(apart)), F.normalize(trial.extract(apart))
    adapted = carry_over(trial.adapter_, old, trial.trained.mean.device)
    omega, unadapted = (float((vectors * new).sum(1).mean()) for vectors in (adapted, old))
    adaptation = Adaptation(images=len(apart), omega=omega, omega_unadapted=unadapted, adapted=omega >= unadapted)
    return adaptation, kind_of(trial.adapter_) if adaptation.adapted else "identity"


@contextmanager
def _carrying(learner: Learner, carrier: Carrier | None) -> Iterator[None]:
    """Inside, stored vectors are carried over by this, where it is known; the setting is as before afterwards."""
    if carrier is None or not isinstance(learner, Features):
        yield
        return
    before, learner.adaptation = learner.adaptation, replace(learner.adaptation, adapter=carrier)
    try:
        yield
    finally:
        learner.adaptation = before


def _judgements(proposal: Proposal, before: Evidence, after: Evidence) -> tuple[Judgement, ...]:
    judged = []
    for column, name in enumerate(proposal.names):
        kind = "new" if name in proposal.new else "more" if name in proposal.more else "old"
        earlier = before.accuracy([column]) if column < len(before.total) else None
        later = after.accuracy([column])
        judged.append(
            Judgement(
                name=name,
                kind=kind,
                images=after.total[column],
                before=None if earlier is None else earlier.value,
                after=None if later is None else later.value,
                estimated=after.estimated,
            )
        )
    return tuple(judged)


def _refuse(taught: Taught, before: Evidence, wishes: Wishes) -> None:
    """Refuse an update that is below what was asked for, or after which accuracy on the old classes falls sharply."""
    if wishes.force:
        return
    old = range(len(before.total))
    earlier, later = before.accuracy(), taught.model.facts.evidence.accuracy(old)
    if earlier is not None and later is not None and falls_sharply(earlier, later):
        tunes = taught.tuning.tunes
        remedy = "Leave the network as it is (--tune none)" if tunes else "Check whether new classes repeat old ones"
        raise NotGoodEnough(
            f"Accuracy on the {len(old)} old classes would fall from {earlier} to {later}: nothing was published, and "
            f"the model is as it was. {remedy}, give more images of the new classes, or publish it all the same "
            "(--force).",
            taught.judged,
            taught.warnings,
        )
    known = [each.after for each in taught.judged if each.after is not None]
    if wishes.at_least is None:
        return
    if not known:
        raise NotGoodEnough(
            "There is nothing to judge this update by: no image was held out. Nothing was published, and the model is "
            "as it was. Leave --validate out, or publish it all the same with --force.",
            taught.judged,
            taught.warnings,
        )
    # The mean over classes, so that a large class does not hide a small one.
    mean = sum(known) / len(known)
    if mean < wishes.at_least:
        raise NotGoodEnough(
            f"Accuracy would be {mean:.3f}, the mean over {len(known)} classes, which is below {wishes.at_least:g}: "
            "nothing was published, and the model is as it was. More images may help.",
            taught.judged,
            taught.warnings,
        )
