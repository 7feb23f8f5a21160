"""Methods that store means and covariances of classes instead of features, and move them when the network drifts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task
from engram.errors import UsageError
from engram.features import (
    CLASSIFIERS,
    COMPENSATIONS,
    Classifier,
    Compensation,
    Covariance,
    Drift,
    Memory,
    Statistics,
    statistics_bytes,
)
from engram.methods.learner import Learner, MemorySources, Work
from engram.network import Network, extract, parallel
from engram.progress import SILENT, Progress
from engram.randomness import generator
from engram.settings import Choice, choice


@dataclass(kw_only=True)
class Gaussians(Learner):
    """Store a mean of every class, and a covariance if asked for, as SDC, LDC, ADC, DPCR, FeCAM and FeTrIL do.

    They differ in how statistics are moved (`compensation`) and in what is computed from them: a classifier in closed
    form, or one that is fitted on samples which stand for the old classes (`replay`). All use unit features. DPCR's
    ridge regression is class-balanced, with an intercept; its authors' has weights of unit length instead.
    """

    covariance: Covariance = "none"  # one of each class, one that all share, or none
    compensation: Choice[Compensation] = choice(COMPENSATIONS, "sdc")
    classifier: Choice[Classifier] = choice(CLASSIFIERS, "nearest-mean")
    # Fit the classifier on samples drawn from a Gaussian per class, or (FeTrIL) on those of the nearest new class, by
    # the distance of means as in its authors' code, translated to the old class's mean. none: on the statistics.
    replay: Literal["none", "gaussian", "translation"] = "none"
    replay_per_class: PositiveInt = 250

    def check(self, classes: int) -> None:
        super().check(classes)
        if self.replay == "gaussian" and self.covariance == "none":
            raise UsageError("replay=gaussian needs covariances. Set covariance=class or covariance=shared.")
        if self.replay == "translation" and self.make_classifier().saved != Classifier.saved:
            raise UsageError(f"replay=translation needs a linear classifier, and '{self.classifier.name}' is none.")
        if self.replay == "none":
            needs = self.make_classifier().statistics
            if needs is None:
                raise UsageError(
                    f"The classifier '{self.classifier.name}' needs features, and this method stores none. Set "
                    "classifier to nearest-mean, lda, ridge or fecam, or set replay=gaussian."
                )
            if needs == "covariances" and self.covariance == "none":
                raise UsageError(
                    f"The classifier '{self.classifier.name}' needs covariances. Set covariance=class or =shared."
                )

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        class_indices = self.class_indices(task, task.train.labels)
        features = self._unit(extract(network, task.train, progress, cache=self.cache))  # (n, d)
        statistics = self._compensated(task, network, features, progress)
        arrived = Statistics.of(features, class_indices, len(self.classes_with(task)), self.covariance)
        statistics = statistics.joined(arrived)
        with progress.phase("classify"):
            classifier = self._fitted(statistics, features, class_indices)
        self.commit(task, network, replace(self.memory_, statistics=statistics), classifier)
        return MemorySources()

    def _unit(self, features: Tensor) -> Tensor:
        return self.make_classifier().transform(F.normalize(features))

    def _compensated(self, task: Task, network: Network, features: Tensor, progress: Progress) -> Statistics:
        """The statistics of the old classes in the new network's feature space."""
        statistics, compensation = self.memory_.statistics, self.compensation.make()
        before = self.network_
        if before is None or not compensation.needs_pairs or network is before or network.extracts_like(before):
            return statistics
        old = self._unit(self.extract(task.train, progress))
        with progress.phase("adapt"):
            drift = Drift(old, features, self._perturb(task.train, network), self.seed, self.tasks_)
            tensors = parallel.broadcast(lambda: compensation(statistics, drift).tensors())
        return Statistics.restored(tensors)

    def _perturb(self, samples: Samples, network: Network) -> Callable[..., tuple[Tensor, Tensor]]:
        """Perturbs images through the old network, and gives their features in both."""
        before, after = self.trained.frozen(exact=True), network.frozen(exact=True)
        scale = before.std if len(samples.shape) == 1 else 255 * before.std  # the inputs' standard deviations

        def perturb(mean: Tensor, positions: Tensor, steps: int, step_size: float) -> tuple[Tensor, Tensor]:
            inputs = samples.batch(positions).to(scale.device).float()
            length = step_size * math.sqrt(inputs.numel())  # of a step of all images, in standard deviations
            for _ in range(steps):
                inputs.requires_grad_(True)
                distance = (self._unit(before.features(inputs)) - mean.to(scale.device)).square().sum()
                (gradient,) = torch.autograd.grad(distance, inputs)
                direction = F.normalize((gradient * scale).flatten(), dim=0).view_as(gradient)
                inputs = (inputs - length * scale * direction).detach()
            with torch.no_grad():
                old, new = (self._unit(each.features(inputs)).cpu() for each in (before, after))
            return old, new

        return perturb

    def _fitted(self, statistics: Statistics, features: Tensor, class_indices: Tensor) -> Classifier:
        """The classifier; `features` (n, d), transformed, are those of the present task."""
        classifier = self.make_classifier()
        if self.replay == "none":
            return classifier.fit_statistics(statistics)
        if self.replay == "gaussian":
            rows, classes = statistics.sampled(self.replay_per_class, generator(self.seed, "gaussian replay"))
            return classifier.fit(F.normalize(rows), classes)
        return classifier.fit(*self._translated(statistics, features, class_indices))

    def _translated(self, statistics: Statistics, features: Tensor, class_indices: Tensor) -> tuple[Tensor, Tensor]:
        """FeTrIL, Eq. 2: the features of the nearest class of the task, translated to the mean of each old class."""
        own = class_indices.unique()  # the classes of the task
        nearest = own[torch.cdist(statistics.means, statistics.means[own]).argmin(1)]  # (K,)
        rows, classes = [], []
        for class_index in range(len(statistics)):
            source = class_index if class_index in own else int(nearest[class_index])
            some = features[class_indices == source][: self.replay_per_class]
            rows.append(some + (statistics.means[class_index] - statistics.means[source]))
            classes.append(torch.full((len(some),), class_index))
        return F.normalize(torch.cat(rows)), torch.cat(classes)

    def refit(self, network: Network, memory: Memory, groups: Sequence[Sequence[int]]) -> Classifier:
        if self.replay == "translation" and self.classifier_ is not None:  # no features are left to translate
            return self.classifier_.regrouped(groups)
        nothing = torch.empty(0, network.dimension)
        return self._fitted(memory.statistics, nothing, torch.empty(0, dtype=torch.int64))

    def without_drift(
        self, task: Task, true: Tensor, class_indices: Tensor, features: Callable[[], Tensor]
    ) -> Classifier:
        rows = self.make_classifier().transform(true)
        statistics = Statistics.of(rows, class_indices, len(self.classes_), self.covariance)
        arrived = torch.isin(class_indices, self.in_task(task).nonzero().squeeze(1))
        return self._fitted(statistics, rows[arrived], class_indices[arrived])

    def make_classifier(self) -> Classifier:
        return self.classifier.make()

    def statistics_bytes(self, arriving: Tensor, samples: Samples) -> int:
        return statistics_bytes(len(arriving), self.dimension(samples), self.covariance)

    def work(self, images: int, task: int, *, tunes: bool) -> Work:
        passes = 2 if tunes and task and self.compensation.make().needs_pairs else 1
        return super().work(images, task, tunes=tunes)._replace(extracted=passes * images)

    def state(self) -> dict[str, Tensor]:
        if self.replay == "none":  # the classifier follows from the memory, and may be as large
            return {name: tensor for name, tensor in super().state().items() if not name.startswith("classifier.")}
        return super().state()

    def restored_classifier(self, tensors: Mapping[str, Tensor]) -> Classifier | None:
        if self.replay == "none":
            return self.make_classifier().fit_statistics(self.memory_.statistics)
        return super().restored_classifier(tensors)


METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "sdc": {"compensation": "sdc"},
    "ldc": {"compensation": "ldc"},
    "adc": {"compensation": "adc"},
    "dpcr": {"compensation": "dpcr", "covariance": "class", "classifier": "ridge"},
    "fecam": {"compensation": "identity", "covariance": "class", "classifier": "fecam", "tune": "first"},
    "fetril": {"compensation": "identity", "classifier": "svm", "replay": "translation", "tune": "first"},
    "gaussian-replay": {
        **{"compensation": "ridge", "covariance": "class"},
        **{"classifier": "svm", "replay": "gaussian"},
    },
}
