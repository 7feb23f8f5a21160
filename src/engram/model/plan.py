"""What `learn` is going to do, decided before anything is trained: a dry run shows it, the real one carries it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engram.data import Samples
from engram.data.labelled import LabelledFiles, name_key
from engram.errors import DataError, UsageError
from engram.features import ImageMemory, Memory
from engram.methods import Learner, Tuning, decide, fit_update, make, measure_costs, setting_names
from engram.methods.budget import MOST
from engram.model.defaults import (
    FIRST_RATE,
    LARGEST_SIDE,
    LATER_RATE,
    METHOD,
    SMALLEST_SIDE,
    choose_epochs,
    choose_network,
    choose_size,
    picture_settings,
)
from engram.model.model import Model, remake, settings_of, unlearned
from engram.network import NAMES, choose_extractor, extractor_for_weights, input_size, is_pretrained
from engram.text import printable, unfit

SMALLEST = 5  # of a class with fewer pictures none is held out

# Settings that say what the network is. What is stored belongs to it, and would mean nothing to another.
FORM = ("network", "head", "last_relu", "crop", "weights")


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """What may be asked of `learn`. None leaves it to the model or, when that is new, to the pictures."""

    method: str | None = None  # None: engram
    network: str | nn.Module | None = None
    image_size: int | None = None
    epochs: int | None = None  # how often the pictures are gone through, where the network is trained
    trains: bool = False  # True: the network is trained even where that shows it nothing to tell apart
    tune: str | None = None  # none, first, every or auto: when the network is trained
    classifier: str | None = None
    force: bool = False  # publish an update even if accuracy falls
    features_per_class: int | None = None
    images_per_class: int | None = None  # 0: none any more
    budget: int | None = None  # bytes that all that is kept may take
    weights: Path | None = None  # a safetensors file to start a new model from
    settings: Mapping[str, Any] = field(default_factory=dict)  # any other of the method's
    hold_out: float = 0.1  # the share of the pictures that the network is not trained on, to judge it by
    at_least: float | None = None  # the accuracy below which nothing is published; None: it is published anyway
    seed: int | None = None  # of all that is drawn; None: the model's, which is 0 of a new one
    device: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.hold_out < 1:
            raise UsageError(f"The share to hold out must lie between 0 and 1; found {self.hold_out}.")
        if self.at_least is not None and not (0 <= self.at_least <= 1 and self.hold_out):
            raise UsageError("The accuracy to reach must lie between 0 and 1, and something must be held out for it.")
        for name, least in (("epochs", 1), ("features_per_class", 1), ("images_per_class", 0), ("budget", 1)):
            value = getattr(self, name)
            if value is not None and not least <= value <= MOST:
                bound = f"at least {least}" if value < least else f"at most {MOST}"
                raise UsageError(f"{name.replace('_', ' ').capitalize()} must be {bound}; found {value}.")
        if self.image_size is not None and not SMALLEST_SIDE <= self.image_size <= LARGEST_SIDE:
            raise UsageError(
                f"Pictures can be seen at {SMALLEST_SIDE} to {LARGEST_SIDE} pixels a side; found {self.image_size}."
            )


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """What would be learned, by whom, and what would be kept."""

    learner: Learner  # with the settings that will hold, and all that is known so far
    names: tuple[str, ...]  # of all classes after it, in the order of the learner's columns
    labels: Mapping[str, int]  # the learner's label of each class that arrives
    new: Mapping[str, int]  # how many pictures of each class that is new
    more: Mapping[str, int]  # and of each that is known
    tuning: Tuning | None  # whether the network is trained, and why; None: a trial on held-out images decides
    shape: tuple[int, ...]  # of one sample: (h, w, c), or (d,) of vectors
    memory_bytes: int  # at most, once it is learned
    budget: int | None
    features_per_class: int | None  # asked for; the learner's is what the budget leaves of it

    @property
    def image_size(self) -> int:
        """The side of the squares that pictures become."""
        return self.shape[0]

    @property
    def network(self) -> str:
        """The name of the network; "auto" stands for one that depends on the shape."""
        name = self.learner.network
        return choose_extractor(self.shape) if name == "auto" else str(name)

    @property
    def trains(self) -> bool:
        """Whether the network is trained, or may be; otherwise only memory and classifier change."""
        return self.tuning is None or self.tuning.tunes


def plan_update(model: Model | None, found: LabelledFiles, options: LearnOptions) -> UpdatePlan:
    """What to do with these pictures. Nothing is decoded yet."""
    check_names(model.names if model is not None else (), found.class_names, f" in {printable(found.source)}")
    size = _image_size(model, found, options)
    counts = Counter(found.class_names[label] for label in found.labels)
    return plan_update_of_samples(model, {name: counts[name] for name in found.class_names}, (size, size, 3), options)


def plan_update_of_samples(
    model: Model | None, arriving: Mapping[str, int], shape: tuple[int, ...], options: LearnOptions
) -> UpdatePlan:
    """What to do with so many samples of each class, each of this shape."""
    known = model.names if model is not None else ()
    fresh = tuple(name for name in arriving if name not in known)
    first = max(model.learner.classes_, default=-1) + 1 if model is not None else 0
    labels = {name: first + number for number, name in enumerate(fresh)}
    if model is not None:
        labels |= {name: model.label(name) for name in arriving if name in known}
    learner = _learner(model, options, sum(arriving.values()), shape)
    names = (*known, *fresh)
    learner.check(len(names))
    budget = options.budget if options.budget is not None else (model.metadata.budget if model is not None else None)
    asked = learner.settings().get("features_per_class")
    arrived = torch.tensor([arriving.get(name, 0) for name in names])
    learner, kept = _within(learner, arrived, budget, shape)
    plan = UpdatePlan(
        learner=learner,
        names=names,
        labels=labels,
        new={name: arriving[name] for name in fresh},
        more={name: arriving[name] for name in arriving if name in known},
        tuning=_tuning(learner, options, len(fresh), list(arriving.values())),
        shape=shape,
        memory_bytes=kept,
        budget=budget,
        features_per_class=asked,
    )
    if plan.trains:
        check_validation(options, arriving.values())
    return plan


def expected_seconds(plan: UpdatePlan) -> float:
    """About how long it will take here, from a few steps timed now."""
    learner, size = plan.learner, plan.image_size
    arriving = sum(plan.new.values()) + sum(plan.more.values())
    blank = Samples.of(torch.zeros(learner.training.batch_size, size, size, 3, dtype=torch.uint8), _zeros(learner))
    replayed = len(learner.memory.images)
    work = learner.work(arriving + replayed, learner.tasks_, tunes=plan.trains)
    costs = measure_costs(learner, blank, len(plan.names), pairs=arriving + replayed, trains=work.trained > 0)
    times = 2 if plan.trains else 1  # all is absorbed once to judge the adapter, and once for good
    return costs.training(work) + times * costs.absorbing(work)


def _tuning(learner: Learner, options: LearnOptions, fresh: int, arriving: list[int]) -> Tuning | None:
    if options.trains and not learner.is_pretrained:
        return Tuning(True, "as asked for")
    decided = decide(learner.tune, arriving, first=not learner.tasks_, pretrained=learner.is_pretrained)
    trains = decided is None or decided.tunes
    if trains and learner.tasks_ and not _worth_training(learner, fresh, len(arriving)):
        return Tuning(False, "these classes alone show it nothing to tell apart")
    return decided


def _worth_training(learner: Learner, fresh: int, arriving: int) -> bool:
    """Whether to train on `arriving` classes, of which so many are new.

    Some of the known classes, or a single new one, show the network nothing to tell apart: it would learn to see them
    everywhere. Its features are then better left as they are, unless images of other classes are there to compare with.
    """
    if learner.make_classifier() is None:  # its head answers, which knows a class only if it was trained on it
        return True
    if not fresh:
        return arriving == len(learner.classes_) >= 2  # all that it knows: nothing can be forgotten
    return arriving >= 2 or len(learner.memory.images) > 0


def _zeros(learner: Learner) -> torch.Tensor:
    return torch.zeros(learner.training.batch_size, dtype=torch.int64)


def check_names(known: Sequence[str], arriving: Sequence[str], where: str = "") -> None:
    """A class that differs from a known one in capitals or accents alone is a mistake, and one for years."""
    spelled = {name_key(name): name for name in known}
    for name in arriving:
        twin = spelled.get(name_key(name))
        if twin is not None and twin != name:
            raise DataError(
                f"The class {name!a}{where} differs from {twin!a}, which the model knows, in "
                "capitals, spaces or the encoding of accents alone. Give both one name, or two that differ more."
            )
        if name not in known and (problem := unfit(name)):
            raise DataError(f"{problem} Rename it.")


def check_validation(options: LearnOptions, arriving: Iterable[int]) -> None:
    """Refuse to validate by so many samples of each class where none of them can be held out."""
    if options.at_least is not None and max(arriving, default=0) < SMALLEST:
        raise UsageError(f"Nothing can be validated: no class has {SMALLEST} pictures, of which to hold one out.")


def _image_size(model: Model | None, found: LabelledFiles, options: LearnOptions) -> int:
    if model is None:
        network = _network_of(options, (LARGEST_SIDE, LARGEST_SIDE, 3))
        own = input_size(network) if isinstance(network, str) else None
        return options.image_size or own or choose_size(found, options.weights)
    if model.image_size is None:
        raise UsageError("This model has learned vectors, not pictures. Teach it from Python.")
    if options.image_size not in (None, model.image_size):
        raise UsageError(f"This model sees pictures at {model.image_size} pixels a side, and keeps to it.")
    return model.image_size


def _network_of(options: LearnOptions, shape: tuple[int, ...]) -> str | nn.Module:
    """The network of a new model: a pretrained one, unless another was asked for."""
    if options.network is not None:
        return options.network
    return choose_network(shape) if options.weights is None else extractor_for_weights(options.weights)


def _learner(model: Model | None, options: LearnOptions, pictures: int, shape: tuple[int, ...]) -> Learner:
    asked = {**options.settings, "epochs": options.epochs or options.settings.get("epochs") or choose_epochs(pictures)}
    features = options.features_per_class or (model.metadata.features_per_class if model is not None else None)
    if features is not None:
        asked.setdefault("features_per_class", features)
    asked |= {name: value for name in ("tune", "classifier") if (value := getattr(options, name)) is not None}
    if model is None:
        return _new_learner(options, asked, shape)
    if options.weights is not None:
        raise UsageError("This model has weights already. Those of a file can only start a new one.")
    if options.network not in (None, model.learner.network):
        raise UsageError(f"This model has the network '{model.learner.network}', and keeps it.")
    if options.method not in (None, model.learner.name):
        raise UsageError(f"This model learns by the method '{model.learner.name}', and keeps to it.")
    _refuse_another_form(model.learner, options.settings)
    learner = _keeping_images(model, options)
    if learner.training.learning_rate == FIRST_RATE:
        asked = {"learning_rate": LATER_RATE, **asked}
    if options.seed is not None:
        asked["seed"] = options.seed
    return remake(learner, **{**asked, **_images(learner.name, options)})


def _refuse_another_form(learner: Learner, settings: Mapping[str, Any]) -> None:
    """Refuse settings that would make another network of the one there is; to repeat what it has is no change."""
    asked = {name: settings[name] for name in FORM if name in settings}
    before, after = learner.settings(), unlearned(learner, **asked).settings()
    for name in asked:
        if after[name] != before[name]:
            has = "weights already, and keeps them" if name == "weights" else f"{name}={before[name]}, and keeps it"
            raise UsageError(f"This model has {has}. Only a new one can be made otherwise.")


def _images(method: str, options: LearnOptions) -> dict[str, Any]:
    """The wish for images, for this method; one that cannot keep any is not troubled with the wish for none."""
    wanted = options.images_per_class
    heard = wanted if wanted or "images_per_class" in setting_names(method) else None
    return {} if heard is None else {"images_per_class": heard}


def _new_learner(options: LearnOptions, asked: Mapping[str, Any], shape: tuple[int, ...]) -> Learner:
    method = options.method or METHOD
    if method == "features" and options.images_per_class:
        method = "hybrid"  # what a model of features becomes where images are asked for later
    network = _network_of(options, shape)
    if options.weights is not None and network in NAMES and network != (own := extractor_for_weights(options.weights)):
        raise UsageError(f"{printable(options.weights)} has weights of the network '{own}', and not of '{network}'.")
    weights = None if options.weights is None else str(options.weights)
    recipe = picture_settings(
        method,
        options.settings.get("objective"),
        from_scratch=weights is None and not is_pretrained(network),
        pretrained=is_pretrained(network),
    )
    settings = {**recipe, "network": network, "weights": weights, "seed": options.seed or 0, **asked}
    return make(method, **{**settings, **_images(method, options), "device": options.device})


def _keeping_images(model: Model, options: LearnOptions) -> Learner:
    """The learner, as one that keeps images too, or no longer, where that is what is asked for."""
    learner = model.learner
    wanted = {0: "features", None: learner.name}.get(options.images_per_class, "hybrid")
    if wanted == learner.name or learner.name not in ("features", "hybrid"):
        return learner
    images = ImageMemory.empty(learner.shape_) if wanted == "hybrid" else ImageMemory.empty()
    counts = torch.zeros(len(learner.classes_), dtype=torch.int64) if wanted == "hybrid" else images.counts
    gone = ("images_per_class", "images_total")
    settings = {name: value for name, value in settings_of(learner).items() if name not in gone}
    other = make(wanted, **settings, device=learner.device)
    other.restore(learner.state())
    other.memory_ = Memory(learner.memory.features, ImageMemory(images.rows, counts))
    return other


def _within(
    learner: Learner, arriving: torch.Tensor, budget: int | None, shape: tuple[int, ...]
) -> tuple[Learner, int]:
    """The learner with as many features a class as the budget allows, and the bytes that all it keeps may take."""
    blank = torch.zeros(1, *shape, dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    one = Samples.of(blank, torch.zeros(1, dtype=torch.int64))
    chosen = {} if budget is None else fit_update(learner, arriving, budget, one)
    if chosen:
        learner = remake(learner, **chosen, weights=learner.weights)
    return learner, learner.memory_bytes(arriving, one)
