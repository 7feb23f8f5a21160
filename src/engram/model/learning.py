"""`learn`: a folder of pictures becomes a new model, or the next generation of one."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
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
from engram.methods import Features, Learner
from engram.model.calibration import calibrate
from engram.model.folder import ModelFolder
from engram.model.model import Adaptation, Calibration, Facts, Model, load, remake, save
from engram.model.proposal import SMALLEST, Proposal, Wishes, check_names, check_validation, propose, propose_samples
from engram.model.writing import Writer
from engram.network import Network, threads_for
from engram.progress import SILENT, Progress

FOLDS = 5

Carrier = Literal["mlp", "ridge", "identity"]  # what carries stored vectors over; identity leaves them as they are


class NotGoodEnough(EngramError):
    """What was learned is below what was asked for; nothing was published. `judged` says how good it was."""

    def __init__(self, message: str, judged: tuple[Judgement, ...]) -> None:
        super().__init__(message)
        self.judged = judged


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How well one class is told from the others, before and after."""

    name: str
    kind: str  # new, more or old
    images: int  # held out; 0 where stored vectors were judged by, each by a classifier that had not learned from it
    before: float | None  # None where the class was not known, or there was nothing to judge it by
    after: float | None


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
    accuracy: float | None  # on the pictures held out, among all classes
    judged: tuple[Judgement, ...]
    calibration: Calibration
    adaptation: Adaptation | None
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
    taught, judged, accuracy = teach(model, proposal, _labelled(pictures, proposal), wishes, progress)
    seconds = time.monotonic() - begin
    record = {
        "new": dict(proposal.new),
        "more": dict(proposal.more),
        "seconds": round(seconds, 1),
        "kept_bytes": taught.learner.memory.nbytes,
        "accuracy": accuracy,
        "omega": None if taught.facts.adaptation is None else taught.facts.adaptation.omega,
    }
    manifest = save(writer, taught, action="learn", record=record)
    return Learned(
        generation=manifest.generation,
        new=proposal.new,
        more=proposal.more,
        classes=len(taught.names),
        kept_bytes=taught.learner.memory.nbytes,
        seen_bytes=seen_bytes,
        seconds=seconds,
        accuracy=accuracy,
        judged=judged,
        calibration=taught.facts.calibration,
        adaptation=taught.facts.adaptation,
    )


def teach(
    model: Model | None, proposal: Proposal, samples: Samples, wishes: Wishes, progress: Progress = SILENT
) -> tuple[Model, tuple[Judgement, ...], float | None]:
    """The model that follows, how each class fares in it, and its accuracy on what was held out.

    The network is trained without the samples that are held out; what is kept, and the classifier, come from all.
    """
    learner, index = proposal.learner, proposal.learner.tasks_
    rest, apart = samples, samples.select(torch.arange(0))
    if wishes.hold_out:
        rest, apart = hold_out(samples, wishes.hold_out, learner.seed, f"held out {index}", smallest=SMALLEST)
    check_validation(wishes, [*proposal.new.values(), *proposal.more.values()])  # some may not have been readable
    before = model.facts if model is not None else Facts()
    with threads_for(samples.shape), warnings.catch_warnings():
        # A class may well have fewer pictures than there is room for.
        warnings.filterwarnings("ignore", ".* fewer than .* all are kept", EngramWarning)
        network = learner.train(_task(index, rest), progress) if proposal.trains else None
        calibration = Calibration(temperature=before.calibration.temperature)
        adaptation, carrier = None, None
        judged: tuple[Judgement, ...] = ()
        accuracy = None
        if len(apart):
            trial, adaptation, carrier = _trial(learner, network, _task(index, rest), apart, progress)
            scores = trial.scores(_inputs(apart))
            columns = trial.columns(_task(index, apart), apart.labels)
            accuracy = float((scores.argmax(dim=1) == columns).double().mean())
            judged = _judge(model, proposal, trial, apart, scores.argmax(dim=1), columns)
            calibration = calibrate(scores, columns, before.calibration)
            _refuse_below(wishes.at_least, judged)
        with _carrying(learner, carrier):
            learner.absorb(_task(index, samples), network or learner.trained, progress)
    arrived = {**proposal.new, **proposal.more}
    counts = [*before.seen, *([0] * len(proposal.new))]
    seen = tuple(count + arrived.get(name, 0) for name, count in zip(proposal.names, counts, strict=True))
    facts = replace(
        before,
        seen=seen,
        budget=proposal.budget,
        features_per_class=proposal.features_per_class,
        calibration=calibration,
        adaptation=adaptation,
        epochs=wishes.epochs,
        hold_out=wishes.hold_out,
    )
    return Model(learner, proposal.names, facts), judged, accuracy


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


def _inputs(samples: Samples) -> Tensor:
    return samples.batch(torch.arange(len(samples)))


def _trial(
    learner: Learner, network: Network | None, task: Task, apart: Samples, progress: Progress
) -> tuple[Learner, Adaptation | None, Carrier | None]:
    """What the learner would become without what is held out, and how well its stored vectors were carried over.

    From a few images an adapter may learn nothing that holds for others: then vectors are better left as they are. What
    carried them over comes last: with all images another might be chosen, which nobody has judged.
    """
    trial = remake(learner)
    trial.absorb(task, network or trial.trained, progress)
    if not isinstance(trial, Features) or trial.adapter_ is None:
        return trial, None, None
    old, new = F.normalize(learner.extract(apart)), F.normalize(trial.extract(apart))
    carried = carry_over(trial.adapter_, old, trial.trained.mean.device)
    omega, unadapted = (float((vectors * new).sum(1).mean()) for vectors in (carried, old))
    adaptation = Adaptation(images=len(apart), omega=omega, omega_unadapted=unadapted, adapted=omega >= unadapted)
    if adaptation.adapted:
        return trial, adaptation, kind_of(trial.adapter_)
    trial = remake(learner)
    with _carrying(trial, "identity"):
        trial.absorb(task, network or trial.trained, progress)
    return trial, adaptation, "identity"


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


def _judge(
    model: Model | None, proposal: Proposal, trial: Learner, apart: Samples, answers: Tensor, columns: Tensor
) -> tuple[Judgement, ...]:
    earlier = _answers_before(model, apart) if model is not None else None
    stored_before = _cross_validated(model.learner) if model is not None else {}
    stored_after = _cross_validated(trial) if model is not None else {}
    judged = []
    for column, name in enumerate(proposal.names):
        own = columns == column
        kind = "new" if name in proposal.new else "more" if name in proposal.more else "old"
        if bool(own.any()):
            known = earlier is not None and kind == "more"
            before = float((earlier[own] == column).double().mean()) if known else None  # type: ignore[index]
            after: float | None = float((answers[own] == column).double().mean())
        else:
            before, after = stored_before.get(column), stored_after.get(column)
        judged.append(Judgement(name=name, kind=kind, images=int(own.sum()), before=before, after=after))
    return tuple(judged)


def _answers_before(model: Model, apart: Samples) -> Tensor:
    return model.learner.scores(_inputs(apart)).argmax(dim=1)


def _cross_validated(learner: Learner) -> dict[int, float]:
    """The accuracy on each class's stored vectors, each answered by a classifier that did not learn from it.

    The images of old classes are gone, so this is what there is. The network did learn from them, so it flatters.
    """
    memory = learner.memory.features
    if learner.make_classifier() is None or not len(memory):
        return {}
    # A class's rows lie in herding order: so each fold has a fair part of every class. Small ones are in none.
    folds = torch.cat([torch.arange(count) % FOLDS - FOLDS * (count < FOLDS) for count in memory.counts.tolist()])
    rows, columns = memory.rows, memory.columns
    answers = torch.full((len(memory),), -1)
    for fold in range(FOLDS):
        classifier = learner.make_classifier()
        assert classifier is not None
        classifier.fit(rows[folds != fold], columns[folds != fold])
        answers[folds == fold] = classifier.scores(rows[folds == fold]).argmax(dim=1)
    right = (answers == columns).double()
    return {
        column: float(right[columns == column].mean())
        for column, count in enumerate(memory.counts.tolist())
        if count >= FOLDS
    }


def _refuse_below(at_least: float | None, judged: tuple[Judgement, ...]) -> None:
    """The threshold is for the mean over classes, so that a large one does not hide a small one."""
    known = [each.after for each in judged if each.after is not None]
    if at_least is None or not known:
        return
    mean = sum(known) / len(known)
    if mean < at_least:
        raise NotGoodEnough(
            f"The accuracy would be {mean:.3f}, the mean over {len(known)} classes, which is below {at_least:g}: "
            "nothing was published, and the model is as it was. More pictures or epochs may help.",
            judged,
        )
