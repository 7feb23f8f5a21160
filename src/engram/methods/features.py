"""The paper's method: store features, adapt them when the network changes, and classify all of them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import PositiveInt
from torch import Tensor
from torch.nn import functional as F

from engram.data import Samples, Task
from engram.data.augment import check_unlabelled_folder, unlabelled_crops
from engram.features import (
    ADAPTERS,
    CLASSIFIERS,
    CODECS,
    Adapter,
    Classifier,
    Codec,
    FeatureMemory,
    Memory,
    Pairs,
    select,
    warn_of_small_classes,
)
from engram.methods.learner import Learner, MemorySources, Work
from engram.methods.replay import Rehearsing
from engram.network import Network, extract
from engram.progress import SILENT, Progress
from engram.settings import Choice, choice

UNLABELLED = 5000  # crops of unlabelled images: as many as CIFAR-100's tasks have images


@dataclass(kw_only=True)
class Features(Learner):
    """Memory-efficient incremental learning through feature adaptation (Iscen et al., 2020): Algorithm 1."""

    features_per_class: PositiveInt = 250  # L, §5.3
    codec: Choice[Codec] = choice(CODECS, "float32", exclusive=True)  # auto: a budget's choice, else int8
    adapter: Choice[Adapter] = choice(ADAPTERS, "mlp")  # φ, §4.2; auto: mlp or ridge
    # g_W̃, §4.3; auto: chosen by leave-one-out cross-validation on the stored features
    classifier: Choice[Classifier] = choice(CLASSIFIERS, "svm")
    balanced: bool = True  # §5.4: the classifier is fitted on L features of every class; False: on all of the task's
    unlabelled: str | None = None  # a folder of any images, from which adapters learn too; none is stored

    def check(self, classes: int) -> None:
        super().check(classes)
        self.codec.make().check_installed()
        if self.unlabelled is not None:
            check_unlabelled_folder(Path(self.unlabelled))

    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        samples = self.rehearsal(task)
        class_indices = self.class_indices(task, samples.labels)
        features = extract(network, samples, progress, cache=self.cache)  # (n, d): v = h_t(x)
        memory = self._adapt(samples, network, features, class_indices, progress)
        old = len(samples) - len(task.train)  # stored images have features in the memory already
        with progress.phase("herd"):
            sources, counts = select(memory, features[old:], class_indices[old:], self.features_per_class)
            memory = memory.rearranged(F.normalize(features[old:]), sources, counts, self.codec.make())
            images, image_sources = self.select_images(task, features)
        warn_of_small_classes(counts, self.in_task(task), self.features_per_class)
        with progress.phase("classify"):
            inputs = self.classifier_inputs(task, memory.rows, memory.class_indices, lambda: features[old:])
            classifier = self.make_classifier().fit(*inputs, start=self.classifier_)
        self.commit(task, network, Memory(memory, images), classifier)
        return MemorySources(sources, image_sources)

    def resolved_settings(self, samples: Samples) -> dict[str, Any]:
        d, adapter, codec = self.dimension(samples), self.make_adapter(), self.codec.make()
        return {**super().resolved_settings(samples), **adapter.resolved_settings(d), **codec.resolved_settings(d)}

    def classifier_inputs(
        self, task: Task, rows: Tensor, class_indices: Tensor, features: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        if self.balanced:
            return rows, class_indices
        old = ~self.in_task(task)[class_indices]
        arrived = self.class_indices(task, task.train.labels)
        return torch.cat([rows[old], F.normalize(features())]), torch.cat([class_indices[old], arrived])

    def features_bytes(self, count: int, dimension: int) -> int:
        return self.codec.make().nbytes(count, dimension)

    def work(self, images: int, task: int, *, tunes: bool) -> Work:
        work = super().work(images, task, tunes=tunes)
        return work._replace(extracted=2 * images) if tunes else work  # by the old network and the new one

    @contextmanager
    def adapting_by(self, name: str | None) -> Iterator[None]:
        before = self.adapter
        self.adapter = before.named(name or before.name)
        try:
            yield
        finally:
            self.adapter = before

    def make_classifier(self) -> Classifier:
        return self.classifier.make()

    def make_adapter(self) -> Adapter:
        return self.adapter.make()

    def _adapt(
        self, samples: Samples, network: Network, features: Tensor, class_indices: Tensor, progress: Progress
    ) -> FeatureMemory:
        """φ(M_{t−1}): the stored features in the new network's feature space."""
        stored = self.memory_.features
        if self.network_ is None:
            return FeatureMemory.empty(network.dimension)
        unchanged, adapter = network is self.network_ or network.extracts_like(self.network_), self.make_adapter()
        if unchanged or not adapter.needs_pairs:
            return stored
        device = network.mean.device
        old = self.extract(samples, progress)  # (n, d): v̄ = h_{t−1}(x)
        paired = torch.zeros(network.classes, dtype=torch.bool)
        paired[class_indices] = True
        if self.unlabelled is not None:
            folder = Path(self.unlabelled)
            others = unlabelled_crops(folder, samples.shape, UNLABELLED, self.seed, self.tasks_, progress)
            old = torch.cat([old, self.extract(others, progress)])
            features = torch.cat([features, extract(network, others, progress, cache=self.cache)])
            class_indices = torch.cat([class_indices, others.labels])

        def classification(adapted: Tensor, targets: Tensor) -> Tensor:
            return self.objective.classification(network.head(adapted), targets, paired)

        key = (self.objective, paired, network.head, *network.head.state_dict().values())
        old, features, class_indices = old.to(device), features.to(device), class_indices.to(device)
        pairs = Pairs(old, features, class_indices, classification, key, self.make_classifier)
        self.adapter_ = adapter.fit(pairs, seed=self.seed, task=self.tasks_, progress=progress, cache=self.cache)
        return stored.adapted(self.adapter_, device)


@dataclass(kw_only=True)
class Hybrid(Rehearsing, Features):
    """P images and L features of every class (§5.2); images are replayed, and the adapter learns from them too."""
