"""The paper's method: keep features, carry them over when the network changes, classify all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task
from engram.data.augment import check_unlabelled_folder, unlabelled_crops
from engram.features import (
    CLASSIFIERS,
    Adaptation,
    Classifier,
    Coding,
    FeatureMemory,
    Memory,
    Pairs,
    adapt,
    select,
    warn_of_small_classes,
)
from engram.features.adapters import Kind
from engram.features.codecs import product_bytes
from engram.methods.learner import Learner, MemorySources, Work
from engram.network import Network, extract
from engram.progress import SILENT, Progress

UNLABELLED = 5000  # windows of pictures of no class: as many as CIFAR-100's tasks have images


@dataclass(kw_only=True)
class Features(Learner):
    """Memory-efficient incremental learning through feature adaptation (Iscen et al., 2020): Algorithm 1."""

    features_per_class: PositiveInt = 250  # L, §5.3
    coding: Coding = field(default_factory=Coding)
    adaptation: Adaptation = field(default_factory=Adaptation)
    # g_W̃, §4.3; auto: chosen by leave-one-out cross-validation on the stored features
    classifier: Literal[
        "svm", "softmax", "lda", "discriminant", "nearest-mean", "ridge", "random-projection", "auto"
    ] = "svm"
    C: PositiveFloat = 1.0  # of the SVM, LinearSVC's default; of softmax
    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.05  # of LDA's covariance, towards a multiple of the identity
    penalty: PositiveFloat = 1.0  # of ridge
    balanced: bool = True  # §5.4: it learns from L features of every class; otherwise from all of the task's
    # A folder of pictures of anything. Adapters learn from them too, for the more different images they see of how the
    # network has moved, the better they are. Nothing of them is kept.
    unlabelled: str | None = None

    def check(self, classes: int) -> None:
        super().check(classes)
        self.coding.check()
        if self.unlabelled is not None:
            check_unlabelled_folder(Path(self.unlabelled))

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        samples = self.rehearsal(task)
        class_indices = self.class_indices(task, samples.labels)
        features = extract(network, samples, progress, cache=self.cache)  # (n, d): v = h_t(x)
        memory = self._adapt(samples, network, features, class_indices, progress)
        kept = len(samples) - len(task.train)  # images that were kept have features in the memory already
        with progress.phase("herd"):
            sources, counts = select(memory, features[kept:], class_indices[kept:], self.features_per_class)
            memory = memory.rearranged(F.normalize(features[kept:]), sources, counts, self.coding)
            images, image_sources = self.keep_images(task, features)
        warn_of_small_classes(counts, self.in_task(task), self.features_per_class)
        with progress.phase("classify"):
            inputs = self.classifier_inputs(task, memory.rows, memory.class_indices, lambda: features[kept:])
            classifier = self.make_classifier().fit(*inputs)
        self.commit(task, network, Memory(memory, images), classifier)
        return MemorySources(sources, image_sources)

    def resolved_settings(self, samples: Samples) -> dict[str, Any]:
        d, adaptation, codec = self.dimension(samples), self.adaptation, self.coding.used
        return {
            **super().resolved_settings(samples),
            "adapter_width": adaptation.adapter_width or 16 * d,
            "adapter_steps": adaptation.steps,
            "codec": codec,
            "codec_bytes": product_bytes(d, self.coding.codec_bytes) if codec == "pq" else None,
        }

    def classifier_inputs(
        self, task: Task, rows: Tensor, class_indices: Tensor, features: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The stored rows; unless `balanced`, all features of the task instead of the stored ones of its classes."""
        if self.balanced:
            return rows, class_indices
        old = ~self.in_task(task)[class_indices]
        arrived = self.class_indices(task, task.train.labels)
        return torch.cat([rows[old], F.normalize(features())]), torch.cat([class_indices[old], arrived])

    def features_bytes(self, count: int, dimension: int) -> int:
        return self.coding.nbytes(count, dimension)

    def work(self, images: int, task: int, *, tunes: bool) -> Work:
        work = super().work(images, task, tunes=tunes)
        if not tunes:
            return work
        steps = self.adaptation.steps_in_all if task else 0
        return replace(work, extracted=2 * images, adapter_steps=steps)  # by the old network and the new one

    def try_adapter(self, steps: int, dimension: int, pairs: int | None) -> None:
        # An MLP from a random start: its least-squares start is solved once, not in every step.
        few = replace(self.adaptation, adapter="mlp", adapter_init="random", adapter_steps=steps)
        vectors = torch.randn(few.adapter_batch if pairs is None else min(few.adapter_batch, pairs), dimension)
        known = Pairs(vectors, vectors, torch.zeros(len(vectors), dtype=torch.int64))
        few.fit(known, lambda adapted, _: adapted.sum(), seed=0, task=0)

    @property
    def adapts(self) -> bool:
        return self.adaptation.adapter != "identity"

    @contextmanager
    def adapting_by(self, kind: Kind | Literal["identity"] | None) -> Iterator[None]:
        before = self.adaptation
        self.adaptation = replace(before, adapter=kind or before.adapter)
        try:
            yield
        finally:
            self.adaptation = before

    def make_classifier(self) -> Classifier:
        kind = CLASSIFIERS[self.classifier]
        own = {each.name for each in fields(kind)} & {"C", "shrinkage", "penalty"}  # type: ignore[arg-type]
        return kind(**{name: getattr(self, name) for name in own})

    def _adapt(
        self, samples: Samples, network: Network, features: Tensor, class_indices: Tensor, progress: Progress
    ) -> FeatureMemory:
        """φ(M_{t−1}): the stored vectors in the new network's feature space."""
        stored = self.memory_.features
        if self.network_ is None:
            return FeatureMemory.empty(network.dimension)
        if network is self.network_ or network.extracts_like(self.network_):  # it was not trained
            return stored
        if self.adaptation.adapter == "identity":  # no pairs are needed, and extracting them is the costly part
            return stored
        device = network.mean.device
        old = self.extract(samples, progress)  # (n, d): v̄ = h_{t−1}(x)
        paired = torch.zeros(network.classes, dtype=torch.bool)
        paired[class_indices] = True
        if self.unlabelled is not None:
            folder = Path(self.unlabelled)
            beside = unlabelled_crops(folder, samples.shape, UNLABELLED, self.seed, self.tasks_, progress)
            old = torch.cat([old, self.extract(beside, progress)])
            features = torch.cat([features, extract(network, beside, progress, cache=self.cache)])
            class_indices = torch.cat([class_indices, beside.labels])
        pairs = Pairs(old.to(device), features.to(device), class_indices.to(device))

        def classification(carried: Tensor, targets: Tensor) -> Tensor:
            return self.objective.classification(network.head(carried), targets, paired)

        known = (self.objective, paired, network.head, *network.head.state_dict().values())
        self.adapter_ = self.adaptation.fit(
            pairs,
            classification,
            seed=self.seed,
            task=self.tasks_,
            progress=progress,
            known=known,
            cache=self.cache,
        )
        return FeatureMemory(adapt(self.adapter_, stored.rows, device), stored.counts)
