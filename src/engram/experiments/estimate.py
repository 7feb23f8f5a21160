"""How long runs will take and how much they will keep."""

from __future__ import annotations

from dataclasses import dataclass

from engram.data import Stream
from engram.experiments.keeping import images_before, memory_bytes
from engram.methods import Costs, Features, Joint, Learner, Memoryless


@dataclass(frozen=True)
class Estimate:
    """What one run will take, task by task, and what it will keep at its end."""

    training: tuple[float, ...]  # seconds
    images: tuple[int, ...]  # that are extracted, measuring included: runs of one training share equal ones
    extracting: tuple[float, ...]  # seconds
    adapting: tuple[float, ...]
    memory_bytes: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self.training) + sum(self.extracting) + sum(self.adapting)


def estimate(learner: Learner, stream: Stream, costs: Costs) -> Estimate:
    """What learning a stream will take with these costs, nothing shared."""
    epochs, training, images, adapting, seen = learner.training.epochs, [], [], [], 0
    for task in stream:
        arriving, tested = len(task.train), sum(len(each.test) for each in stream.tasks[: task.index + 1])
        kept = images_before(learner, stream, task.index)
        decided = learner.decided(task, task.index)
        tunes = decided is None or decided.tunes  # a trial trains for about as long as what it may lead to
        training.append(epochs * (arriving + kept) * _image_seconds(learner, costs, task.index, tunes))
        both = isinstance(learner, Features) and tunes  # the old network and the new one see all images
        passes = 0 if isinstance(learner, Memoryless | Joint) else 2 if both else 1
        steps = learner.adaptation.steps_in_all if isinstance(learner, Features) and task.index and tunes else 0
        seen += len(task.classes)
        features = learner.features_per_class * seen if isinstance(learner, Features) else 0
        images.append(passes * (arriving + kept) + tested + features)  # the features' images are looked at in measuring
        adapting.append(steps * costs.adapter_step)
    return Estimate(
        training=tuple(training),
        images=tuple(images),
        extracting=tuple(each * costs.extracted for each in images),
        adapting=tuple(adapting),
        memory_bytes=memory_bytes(learner, stream),
    )


def _image_seconds(learner: Learner, costs: Costs, task: int, tunes: bool) -> float:
    """Seconds for one image in one epoch of training; 0 where nothing is trained."""
    taught = task > 0 and not learner.starts_over
    if tunes:
        return costs.taught if taught else costs.first
    if learner.make_classifier() is not None:
        return 0.0
    return costs.head + (costs.extracted if taught else 0.0)
