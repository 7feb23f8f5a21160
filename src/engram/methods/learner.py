"""`Learner`: the one extension point. It trains a network by an objective, and says what is stored of a task.

In this order: settings; training and absorbing a task; classification; questions that others ask; state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, PositiveFloat
from torch import Tensor, nn
from torch.nn import functional as F

from engram.data import Samples, Task, concatenate
from engram.errors import DataError, EngramError, UsageError
from engram.features import Adapter, Classifier, FeatureMemory, IdentityAdapter, ImageMemory, Memory, Statistics
from engram.methods.objectives import Distillation, Objective, TrainingContext
from engram.methods.tuning import Tune, Tuning, decide, judge
from engram.network import (
    Cache,
    CosineHead,
    EpochCheckpoints,
    Network,
    TrainableWeights,
    Training,
    check_name,
    choose_device,
    choose_extractor,
    extract,
    has_bfloat16,
    is_pretrained,
    make_network,
    parallel,
    restore_network,
)
from engram.progress import SILENT, Progress
from engram.settings import flatten
from engram.storage import tensors_of

NOTHING = torch.empty(0, dtype=torch.int64)
OF_LATER_TASKS = ("rotation_tasks", "weight_averaging", "weight_averaging_from")  # without effect on the first task


class MemorySources(NamedTuple):
    """Where each row of the memory came from when a task was absorbed.

    s ≥ 0 is a position in the task's training samples; −1 − i is row i of the memory before.
    """

    features: Tensor = NOTHING  # int64, one per stored feature
    images: Tensor = NOTHING  # int64, one per stored image


class Work(NamedTuple):
    """What an update takes, in the units that `measure_costs` times."""

    trained: int  # images in training, once per epoch
    taught: bool  # whether they also pass through a teacher
    head_only: bool  # whether only the head is trained
    extracted: int  # images whose features are extracted after training
    adapter_steps: int = 0
    passes: int = 1  # of each image in training, through the network that is trained


@dataclass(kw_only=True)
class Learner(ABC):
    """Learns tasks one after another. Fields are settings; learned state ends in `_`.

    A subclass defines `absorb`: what is stored, and what classifies. The objective defines how the network is trained.
    """

    network: str | nn.Module = "auto"  # §5.1: resnet32 for CIFAR, resnet18 for ImageNet; auto: by the inputs' shape
    # When the network is trained: never, on the first task, or on every one, as in the paper. auto: a network that
    # starts from scratch on every task; a pretrained one on the first, where held-out images show that it gains.
    tune: Tune = "auto"
    tuned_weights: Literal["auto", "norms", "all"] = "auto"  # auto: of a pretrained network, norm layers' alone
    head: Literal["cosine", "linear", "corrected", "shifted"] = "cosine"  # §4.1; corrected is BiC's, shifted IL2M's
    scale: PositiveFloat = 16.0  # initial scale of a cosine head, then learned; chosen on CIFAR-100's validation split
    last_relu: bool = True  # whether the extractor ends in a ReLU; LUCIR's does not
    weights: str | None = None  # a safetensors file to start the extractor from
    objective: Objective = field(default_factory=Distillation)  # what training minimises
    training: Training = field(default_factory=Training)
    weight_averaging: Annotated[float, Field(ge=0, lt=1)] = 0.0  # the share of the old network in the average
    weight_averaging_from: Annotated[float, Field(ge=0, lt=1)] = 0.0  # ... while more than this share of classes is old
    seed: int = 0
    device: str = "auto"

    shares_training: ClassVar[bool] = True  # whether `training_settings` and the stream determine the networks
    starts_over: ClassVar[bool] = False  # whether each task trains a new network, on all images so far

    name: str = field(default="", init=False)  # the entry of METHODS that it was made from
    network_: Network | None = field(default=None, init=False, repr=False)
    classes_: tuple[int, ...] = field(default=(), init=False, repr=False)  # labels, in the order of the head's rows
    task_of_class_: tuple[int, ...] = field(default=(), init=False, repr=False)  # the task that brought each class
    tasks_: int = field(default=0, init=False, repr=False)  # how many tasks were learned
    pretrained_: bool = field(default=False, init=False, repr=False)  # whether it had weights before the first task
    shape_: tuple[int, ...] = field(default=(), init=False, repr=False)  # of one input
    memory_: Memory = field(default_factory=Memory, init=False, repr=False)
    classifier_: Classifier | None = field(default=None, init=False, repr=False)  # None: the head classifies
    adapter_: Adapter | None = field(default=None, init=False, repr=False)  # the last one; not saved
    cache: Cache | None = field(default=None, init=False, repr=False)  # of features and adapters; `run` sets it
    _frozen: tuple[Network, Network] | None = field(default=None, init=False, repr=False)  # a network, and it frozen

    def __post_init__(self) -> None:
        if isinstance(self.network, str):
            check_name(self.network)
        self.name = type(self).__name__.lower()

    # Training and absorbing a task.

    def learn(self, task: Task, progress: Progress = SILENT) -> MemorySources:
        """Train on a task and absorb it."""
        return self.absorb(task, self.train(task, progress), progress)

    def train(self, task: Task, progress: Progress = SILENT, checkpoints: EpochCheckpoints | None = None) -> Network:
        """A network trained on the task, starting from the present one. The learner itself does not change.

        If the network is not to be tuned on this task, the present one itself.
        """
        tuning = self.tuning(task, progress)
        if not tuning.tunes and self.make_classifier() is not None:
            return self.network_ or self.initial_network(self.rehearsal(task), progress)
        return self.fit(task, progress, checkpoints, start=self.network_, tunes=tuning.tunes)

    @abstractmethod
    def absorb(self, task: Task, network: Network, progress: Progress = SILENT) -> MemorySources:
        """Take over the trained network, update the memory, and refit the classifier; ends with `commit`."""

    def commit(self, task: Task, network: Network, memory: Memory, classifier: Classifier | None) -> None:
        """The last step of `absorb`: replaces the state as a whole."""
        self.task_of_class_ = self._task_of_class(task)
        self.classes_ = self.classes_with(task)
        self.shape_ = task.train.shape
        self.network_ = self._with_all_rows(network, memory.features)
        self.memory_ = replace(memory, carried_bytes=network.carried.nbytes)
        self.classifier_ = classifier
        self.pretrained_ = self.is_pretrained
        self.tasks_ += 1

    def make_classifier(self) -> Classifier | None:
        """An unfitted classifier of the kind that this learner uses; None: the head classifies."""
        return None

    def make_adapter(self) -> Adapter:
        """An unfitted adapter of the kind that this learner uses; the identity: stored features stay as they are."""
        return IdentityAdapter()

    def refit(self, network: Network, memory: Memory, groups: Sequence[Sequence[int]]) -> Classifier | None:
        """The classifier of a network and a memory after classes were removed or merged: `groups` of class indices."""
        classifier = self.make_classifier()
        return None if classifier is None else classifier.fit(memory.features.rows, memory.features.class_indices)

    def classes_with(self, task: Task) -> tuple[int, ...]:
        """The classes known once the task is learned, in the order of the head's rows."""
        return tuple(dict.fromkeys((*self.classes_, *task.classes)))

    def class_indices(self, task: Task, labels: Tensor) -> Tensor:
        """Labels as rows of the head once the task is learned."""
        return class_indices_of(labels, self.classes_with(task))

    def in_task(self, task: Task) -> Tensor:
        """Which of the classes known once the task is learned are in it, bool (K,)."""
        return torch.isin(torch.tensor(self.classes_with(task)), torch.tensor(task.classes))

    def rehearsal(self, task: Task) -> Samples:
        """The stored images, and then the task's."""
        self.check(len(self.classes_with(task)))
        images = self.memory_.images
        if not len(images):
            return task.train
        return concatenate(Samples.of(images.rows, torch.tensor(self.classes_)[images.class_indices]), task.train)

    def held_out(self, task: Task) -> Tensor:
        """Which samples of the rehearsal are not trained on, bool (n,): none, unless a method says so."""
        return torch.zeros(len(self.memory_.images) + len(task.train), dtype=torch.bool)

    def select_images(self, task: Task, features: Tensor) -> tuple[ImageMemory, Tensor]:
        """The images to store after the task, and the source of each: none, unless a method says so.

        `features` (n, d) are those of the rehearsal in the new network.
        """
        return self.memory_.images, NOTHING

    def fit(
        self,
        task: Task,
        progress: Progress,
        checkpoints: EpochCheckpoints | None,
        *,
        start: Network | None,
        tunes: bool = True,
    ) -> Network:
        """Train a network on the rehearsal: from `start`, which is also the teacher, or from scratch.

        If it is not to be tuned, only its head is trained.
        """
        context = self._context(task, start, progress, tunes)
        student, samples, class_indices = context.student, context.samples, context.class_indices
        if not self.objective.replays:
            samples, class_indices = samples.select(context.arrived), class_indices[context.arrived]
        self.objective.prepare(context)
        context.training.fit(
            student,
            samples,
            class_indices,
            self.objective.training_loss(context),
            seed=self.seed,
            task=self.tasks_,
            progress=progress,
            checkpoints=checkpoints,
            gradient_hook=self.objective.gradient_hook(context),
        )
        student.auxiliary = nn.ModuleDict()
        averages = self.weight_averaging and context.old > self.weight_averaging_from * student.classes
        if start is not None and averages:
            student.average_with(start, self.weight_averaging)
        self.objective.finish(context)
        parallel.broadcast_module(student)
        return student.eval().requires_grad_(False)

    def _context(self, task: Task, start: Network | None, progress: Progress, tunes: bool = True) -> TrainingContext:
        samples, held_out = self.rehearsal(task), self.held_out(task)
        class_indices = self.class_indices(task, samples.labels)
        trained, validation = (~held_out).nonzero().squeeze(1), held_out.nonzero().squeeze(1)
        base = start or self.initial_network(samples, progress)
        new, trainable = len(self.classes_with(task)) - base.classes, self.tuned if tunes else "head"
        student = base.grown(new, self.seed, "head", self.tasks_, trainable=trainable).to(choose_device(self.device))
        return TrainingContext(
            student=student,
            teacher=start.frozen() if start is not None else None,
            samples=samples.select(trained) if len(validation) else samples,
            class_indices=class_indices[trained],
            exemplars=int((trained < len(self.memory_.images)).sum()),
            in_task=self.in_task(task).to(student.mean.device),
            task_of_class=torch.tensor(self._task_of_class(task), device=student.mean.device),
            held_out=(samples.select(validation), class_indices[validation]) if len(validation) else None,
            training=self.objective.training_of(self.training, self.tasks_),
            seed=self.seed,
            task=self.tasks_,
            progress=progress,
        )

    def initial_network(self, samples: Samples, progress: Progress = SILENT) -> Network:
        """The network before the first task, without classes, for samples like these."""
        made = make_network(
            self.network,
            self.head,
            samples,
            seed=self.seed,
            scale=self.scale,
            last_relu=self.last_relu,
            weights=self.weights,
            crop=self.training.crop,
            progress=progress,
        )
        return made.eval().requires_grad_(False).to(choose_device(self.device))

    def _task_of_class(self, task: Task) -> tuple[int, ...]:
        new = len(self.classes_with(task)) - len(self.classes_)
        return (*self.task_of_class_, *([self.tasks_] * new))

    def _with_all_rows(self, network: Network, features: FeatureMemory) -> Network:
        """The network with a row of its head for every class.

        A network that was not trained on the task has none for its new classes. They start at the mean of the stored
        features, so that the network is a useful teacher when the next one is trained.
        """
        missing = len(self.classes_) - network.classes
        if not missing:
            return network
        grown = network.grown(missing, self.seed, "head", self.tasks_)
        rows = features.rows.split(features.counts.tolist())
        if isinstance(grown.head, CosineHead) and len(rows) == len(self.classes_):
            with torch.no_grad():
                grown.head.weight[-missing:] = F.normalize(torch.stack([each.mean(0) for each in rows[-missing:]]))
        return grown.eval().requires_grad_(False)

    # Classification.

    @property
    def trained(self) -> Network:
        """The present network, or an error if there is none."""
        if self.network_ is None:
            raise EngramError("This learner has not learned anything yet. Call learn(task) first.")
        return self.network_

    @property
    def frozen_network(self) -> Network:
        """The present network, frozen for extraction; made once."""
        if self._frozen is None or self._frozen[0] is not self.trained:
            self._frozen = self.trained, self.trained.frozen()
        return self._frozen[1]

    def extract(self, samples: Samples, progress: Progress = SILENT, phase: str = "extract") -> Tensor:
        """Features of samples, (n, d), not normalised."""
        return extract(self.frozen_network, samples, progress, phase, cache=self.cache)

    def classify(self, features: Tensor) -> Tensor:
        """Scores (n, K) of features that `extract` returned."""
        classifier = self.classifier_
        return self.head_scores(features) if classifier is None else classifier.scores(F.normalize(features))

    def head_scores(self, features: Tensor) -> Tensor:
        """The scores (n, K) of the network's own head."""
        head = self.trained.head
        with torch.no_grad():
            return head(features.to(head.weight.device)).cpu()  # type: ignore[no-any-return]

    def scores(self, inputs: Tensor) -> Tensor:
        """Scores (n, K) of raw inputs, in the order of `classes_`."""
        return self.classify(self.features(inputs))

    def features(self, inputs: Tensor) -> Tensor:
        """Features (n, d) of raw inputs, not normalised."""
        samples = Samples.of(inputs, torch.zeros(len(inputs), dtype=torch.int64))
        if samples.shape != self.shape_:
            raise DataError(f"This learner has learned inputs of shape {self.shape_}; these are {samples.shape}.")
        return self.extract(samples)

    # Questions that budgets, dry runs, suites and measurements ask. The defaults are right for a method that stores
    # float32 features or images, as many of each class as its settings features_per_class and images_per_class say.

    def check(self, classes: int) -> None:
        """Refuse, before anything is learned, settings that cannot work for so many classes."""
        if self.tune == "none" and not self.is_pretrained and isinstance(self.network, str):
            raise UsageError(
                f"The network '{self.network}' starts from random weights and must be trained: tune=none is for "
                "pretrained ones, such as efficientnet-lite0. See: engram networks"
            )

    def features_limit(self, classes: int) -> int:
        """The most features stored of a class when so many classes are known."""
        return int(self.settings().get("features_per_class") or 0)

    def images_limit(self, classes: int) -> int:
        """The most images stored of a class when so many classes are known."""
        return int(self.settings().get("images_per_class") or 0)

    def features_bytes(self, count: int, dimension: int) -> int:
        """The bytes of so many stored features."""
        return 4 * count * dimension

    def stored_features(self, arriving: Tensor) -> int:
        """How many features are stored once `arriving` samples of each class, int64 (K,), are learned."""
        return count_stored(self.memory_.features.counts, arriving, self.features_limit(len(arriving)))

    def stored_images(self, arriving: Tensor) -> int:
        """How many images are stored once `arriving` samples of each class, int64 (K,), are learned."""
        return count_stored(self.memory_.images.counts, arriving, self.images_limit(len(arriving)))

    def memory_bytes(self, arriving: Tensor, samples: Samples) -> int:
        """The bytes of the memory once `arriving` samples of each class (K,), like these, are learned."""
        features = self.stored_features(arriving)
        stored = self.features_bytes(features, self.dimension(samples)) if features else 0
        images = self.stored_images(arriving) * samples.sample_bytes
        carried = self.objective.carried_bytes(self._network_for(samples)) if self.objective.carries else 0
        return stored + images + self.statistics_bytes(arriving, samples) + carried

    def statistics_bytes(self, arriving: Tensor, samples: Samples) -> int:
        """The bytes of the statistics of classes once these samples are learned: none, unless a method says so."""
        return 0

    def dimension(self, samples: Samples) -> int:
        """d: the length of the feature vectors of samples like these."""
        return self._network_for(samples).dimension

    def _network_for(self, samples: Samples) -> Network:
        return self.network_ or self.initial_network(samples.select(torch.arange(1)))

    def work(self, images: int, task: int, *, tunes: bool) -> Work:
        """What learning so many images, stored ones included, takes as task `task` from 0."""
        taught = task > 0 and not self.starts_over
        return Work(
            trained=self.training.epochs * images if tunes or self.make_classifier() is None else 0,
            taught=taught,
            head_only=not tunes,
            extracted=images if self.features_limit(1) or self.images_limit(1) else 0,
            adapter_steps=self.make_adapter().most_steps if task and tunes else 0,
            passes=2 if self.objective.rotates(taught) else 1,
        )

    def classifier_inputs(
        self, task: Task, rows: Tensor, class_indices: Tensor, features: Callable[[], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """What the classifier is fitted on, given stored features (n, d); `features()` gives those of the task."""
        return rows, class_indices

    def without_drift(
        self, task: Task, true: Tensor, class_indices: Tensor, features: Callable[[], Tensor]
    ) -> Classifier:
        """The classifier if nothing had drifted: `true` (n, d) are the present unit features of the stored samples."""
        classifier = self.make_classifier()
        assert classifier is not None
        return classifier.fit(*self.classifier_inputs(task, true, class_indices, features))

    def adapting_by(self, adapter: str | None) -> AbstractContextManager[None]:
        """A context in which stored features are adapted by this kind of adapter; None: as the settings say."""
        return nullcontext()

    @property
    def is_pretrained(self) -> bool:
        """Whether the network had weights before the first task."""
        return is_pretrained(self.network) or self.weights is not None or self.pretrained_

    @property
    def tuned(self) -> TrainableWeights:
        """Which weights of the extractor are trained."""
        norms = self.tuned_weights == "norms" or (self.tuned_weights == "auto" and is_pretrained(self.network))
        return "norms" if norms else "all"

    def decided(self, task: Task, number: int) -> Tuning | None:
        """Whether to train the network on this task, which is task `number` from 0; None: a trial decides."""
        counts = task.train.labels.unique(return_counts=True)[1].tolist()
        return decide(self.tune, counts, first=not number or self.starts_over, pretrained=self.is_pretrained)

    def tuning(self, task: Task, progress: Progress = SILENT) -> Tuning:
        """Whether to train the network on this task, by a trial if need be, and why."""
        if (decided := self.decided(task, self.tasks_)) is not None:
            return decided
        tune = partial(self.fit, progress=progress, checkpoints=None, start=None)
        return judge(task, self.initial_network(task.train, progress), tune, self.seed, progress, self.cache)

    def trains(self, task: Task, number: int) -> bool:
        """Whether anything is trained on this task, if only in a trial: the network, or the head that classifies."""
        decided = self.decided(task, number)
        return decided is None or decided.tunes or self.make_classifier() is None

    @property
    def is_cacheable(self) -> bool:
        """Whether settings and stream determine the network: not with one's own module, or weights from a file."""
        return self.shares_training and isinstance(self.network, str) and self.weights is None

    @property
    def classifier_description(self) -> str:
        """What classifies, in a few words."""
        return "the network's head" if self.classifier_ is None else self.classifier_.description

    def settings(self) -> dict[str, Any]:
        """All settings as plain values by their flat names, with the name of the objective."""
        return {**flatten(self), "objective": self.objective.name or type(self.objective).__name__}

    def resolved_settings(self, samples: Samples) -> dict[str, Any]:
        """`settings()` with each automatic value replaced by the one that it stands for on samples like these."""
        device = choose_device(self.device)
        resolved = {"tuned_weights": self.tuned, "device": device.type}
        resolved["tune"] = "every" if self.tune == "auto" and not self.is_pretrained else self.tune
        resolved["precision"] = self.training.resolved_precision(samples.shape, device)
        if self.network == "auto":
            side, shape = self.training.crop, samples.shape
            resolved["network"] = choose_extractor((side, side, shape[2]) if side and len(shape) > 1 else shape)
        return {**self.settings(), **resolved}

    def training_settings(self, task: int) -> dict[str, object]:
        """All settings that determine the network trained on this task, 0 the first, given the stream."""
        names = "network tune tuned_weights head scale last_relu weights weight_averaging weight_averaging_from seed"
        own = {name: getattr(self, name) for name in names.split()}
        if not self.weight_averaging:
            own["weight_averaging_from"] = 0.0  # without effect
        if not self.is_pretrained and (self.tune == "auto" or (self.tune == "first" and not task)):
            own["tune"] = "every"  # from scratch, all train alike
        elif self.tune != "every":
            own["trains_head"] = self.make_classifier() is None  # of a network that is not tuned
        settings = {**own, **flatten(self.training), **flatten(self.objective)}
        if not self.objective.rotation_labels:
            settings["rotation_tasks"] = "every"  # without effect
        if settings["precision"] == "auto":  # which the stream and the device resolve
            settings["precision"] = f"auto, {has_bfloat16(choose_device(self.device))}"
        later = frozenset() if task else {*self.objective.of_later_tasks, *OF_LATER_TASKS}
        used = {name: value for name, value in settings.items() if name not in later}
        return {"objective": self.settings()["objective"], **used}

    # State: tensors alone, so that no code is saved.

    @property
    def memory(self) -> Memory:
        """What is stored of earlier tasks."""
        return self.memory_

    def state(self) -> dict[str, Tensor]:
        """All that is learned: one network, one classifier, one memory."""
        parts = {
            "network": self.trained.state_dict(),
            "classifier": {} if self.classifier_ is None else self.classifier_.state(),
            "memory.features": self.memory_.features.tensors(),
            "memory.images": self.memory_.images.tensors(),
            "memory.statistics": self.memory_.statistics.tensors() if len(self.memory_.statistics) else {},
        }
        numbers = {
            "classes": self.classes_,
            "task_of_class": self.task_of_class_,
            "shape": self.shape_,
            "tasks": (self.tasks_,),
            "pretrained": (int(self.pretrained_),),
        }
        state = {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}
        return state | {name: torch.tensor(value, dtype=torch.int64) for name, value in numbers.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Become the learner, with the same settings, whose `state()` this is."""
        try:
            self.classes_ = tuple(state["classes"].tolist())
            self.task_of_class_ = tuple(state["task_of_class"].tolist())
            self.shape_ = tuple(state["shape"].tolist())
            self.tasks_ = int(state["tasks"])
            self.pretrained_ = bool(state["pretrained"])
            self.network_ = self.restored_network(tensors_of(state, "network"), self.shape_)
            # Features have the codec that they were saved with.
            features = FeatureMemory.restored(tensors_of(state, "memory.features"))
            images = ImageMemory.restored(tensors_of(state, "memory.images"))
            statistics = Statistics.restored(tensors_of(state, "memory.statistics"))
            self.memory_ = Memory(features, images, statistics, self.network_.carried.nbytes)
            self.classifier_ = self.restored_classifier(tensors_of(state, "classifier"))
        except (KeyError, RuntimeError, TypeError) as error:
            raise DataError(
                f"The saved state is not of a learner '{self.name}' with these settings: {error}"
            ) from error

    def restored_classifier(self, tensors: Mapping[str, Tensor]) -> Classifier | None:
        """The classifier whose `state()` this is; None: the head classifies."""
        classifier = self.make_classifier()
        return None if classifier is None else classifier.restore(tensors)

    def restored_network(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> Network:
        """The network, for inputs of this shape, with the state dict `tensors`."""
        network = restore_network(
            self.network, self.head, shape, tensors, last_relu=self.last_relu, crop=self.training.crop
        )
        return network.requires_grad_(False).to(choose_device(self.device))


def count_stored(before: Tensor, arriving: Tensor, limit: int) -> int:
    """How many rows are stored of classes that have `before` rows (k,) and get `arriving` samples (K,)."""
    available = arriving.clone()
    available[: len(before)] += before
    return int(available.clamp(max=limit).sum())


def class_indices_of(labels: Tensor, classes: tuple[int, ...]) -> Tensor:
    """Labels as positions in `classes`."""
    order = torch.tensor(classes).argsort()
    return order[torch.searchsorted(torch.tensor(classes)[order], labels)]
