"""The plan of an update: what `learn` will do, decided before anything is trained. A dry run prints it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import nn

from engram.data import Samples
from engram.data.images import UnreadableImage, extent
from engram.data.labelled import LabelledFiles, name_key
from engram.errors import DataError, UsageError
from engram.methods import Learner, Tuning, decide, make, measure_costs, setting_names
from engram.methods.budget import MOST, fit_update
from engram.model.model import Metadata, Model, blank_inputs, unlearned, with_settings
from engram.network import (
    DEFAULT_PRETRAINED,
    NETWORKS,
    choose_extractor,
    extractor_for_weights,
    input_size,
    is_pretrained,
)
from engram.network.registry import IDENTITY, SMALL_SIDE
from engram.settings import check
from engram.text import printable, unfit

METHOD = "engram"
EXAMINED = 100  # images whose size is read, spread over all that were found
# Largest image side for a network trained from scratch, by the number of images: 84-pixel photos of twelve classes were
# classified no better at 64 or 84 pixels than at 32, in three times the time.
MAX_SIDE_FROM_SCRATCH = {2_000: 32, 20_000: 64}
MAX_SIDE_OF_MANY = 96
SMALLEST_SIDE, LARGEST_SIDE = 8, 1024  # smaller ones show a network nothing; larger ones take too long on a CPU
TRAINED_AT = {"resnet18": 224, "resnet18-small": 64, "resnet32": 32, "small": 16}  # image side that weights are for

BATCH = 32
STEPS = 1_000  # of training in each update, within these limits:
FEWEST_EPOCHS, MOST_EPOCHS = 10, 40

# A network that starts from random weights needs a high learning rate, later updates a lower one: twelve classes of
# photos in three updates ended at an accuracy of .40 instead of .35.
FIRST_RATE, LATER_RATE = 2.0, 0.5
# The same for objectives that are not divided by the number of classes. They preserve features by themselves: a lower
# rate in later updates costs three points (three updates of four CIFAR-100 classes, 80 images each).
UNDIVIDED_RATE, UNDIVIDED_RATE_FROM_WEIGHTS = 0.1, 0.025

IMAGES: dict[str, Any] = {
    **{"batch_size": BATCH, "schedule": "one-cycle", "expected_classes": 100},
    **{"pad": 4, "flip": True},
    **{"adapter_width": 1024},
}
# A pretrained network has strong features, so cross-validation on them chooses the classifier, and large images, so
# random crops may be shifted further.
PRETRAINED: dict[str, Any] = {"classifier": "auto", "shrinkage": 0.2, "pad": 16}

MIN_TO_HOLD_OUT = 5  # images of a class; of a smaller one none is held out

# Options that are settings of a learner; they take precedence over `LearnOptions.settings`.
SETTINGS = ("network", "tune", "classifier", "epochs", "features_per_class", "images_per_class", "seed")
# Settings of the network itself: stored features would mean nothing to a network with others.
NETWORK_SETTINGS = ("network", "head", "last_relu", "crop", "weights")

Positive = Annotated[int, Field(ge=1, le=MOST)]


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """Options of `learn`. None keeps what the model has; a new model chooses by the images."""

    method: str | None = None  # None: engram
    network: str | nn.Module | None = None
    image_size: Annotated[int, Field(ge=SMALLEST_SIDE, le=LARGEST_SIDE)] | None = None
    epochs: Positive | None = None  # if the network is trained
    trains: bool = False  # True: train the network even on classes that are too few to tell apart
    tune: str | None = None  # none, first, every or auto: when the network is trained
    classifier: str | None = None
    force: bool = False  # publish an update even if accuracy falls
    features_per_class: Positive | None = None
    images_per_class: Annotated[int, Field(ge=0, le=MOST)] | None = None  # exemplars; 0: store none any more
    budget: Positive | None = None  # bytes that stored features and exemplars may take
    weights: Path | None = None  # a safetensors file to start a new model from
    settings: Mapping[str, Any] = field(default_factory=dict)  # any other settings of the method
    hold_out: Annotated[float, Field(ge=0, lt=1)] = 0.1  # the share of the images held out if the network is trained
    at_least: Annotated[float, Field(ge=0, le=1)] | None = None  # an update of lower accuracy is rejected
    seed: int | None = None  # None: the model's, which is 0 for a new one
    device: str = "auto"

    def __post_init__(self) -> None:
        check(self)
        if self.at_least is not None and not self.hold_out:
            raise UsageError("To reach an accuracy, some images must be held out.")


@dataclass(frozen=True, kw_only=True)
class UpdatePlan:
    """What will be learned, with which settings, and how much will be stored."""

    learner: Learner  # with the settings of the update, and what was learned so far
    names: tuple[str, ...]  # of all classes after the update, by class index
    labels: Mapping[str, int]  # the learner's label of each class of the update
    new: Mapping[str, int]  # images of each new class
    more: Mapping[str, int]  # images of each known class
    tuning: Tuning | None  # whether the network is trained, and why; None: a trial on held-out images decides
    shape: tuple[int, ...]  # of one sample: (h, w, c), or (d,) of vectors
    memory_bytes: int  # at most, after the update
    budget: int | None
    features_per_class: int | None  # as requested; the learner's is what the budget allows

    @property
    def image_size(self) -> int:
        """The side of the square images."""
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
    """Plan an update with these image files. None of them is decoded."""
    check_names(model.names if model is not None else (), found.class_names, f" in {printable(found.source)}")
    size = _image_size(model, found, options)
    counts = Counter(found.class_names[label] for label in found.labels)
    return plan_update_of_samples(model, {name: counts[name] for name in found.class_names}, (size, size, 3), options)


def plan_update_of_samples(
    model: Model | None, arriving: Mapping[str, int], shape: tuple[int, ...], options: LearnOptions
) -> UpdatePlan:
    """Plan an update with so many samples of each class, each of this shape."""
    known, metadata = ((), Metadata()) if model is None else (model.names, model.metadata)
    fresh = tuple(name for name in arriving if name not in known)
    first = 0 if model is None else max(model.learner.classes_, default=-1) + 1
    labels = {name: first + number for number, name in enumerate(fresh)}
    if model is not None:
        labels |= {name: model.label(name) for name in arriving if name in known}
    names = (*known, *fresh)
    learner = _learner(model, options, sum(arriving.values()), shape)
    learner.check(len(names))
    budget = options.budget if options.budget is not None else metadata.budget
    requested = learner.settings().get("features_per_class")
    counts, blank = torch.tensor([arriving.get(name, 0) for name in names]), _blank(1, shape)
    if budget is not None and (chosen := fit_update(learner, counts, budget, blank)):
        learner = with_settings(learner, **chosen, weights=learner.weights)
    plan = UpdatePlan(
        learner=learner,
        names=names,
        labels=labels,
        new={name: arriving[name] for name in fresh},
        more={name: arriving[name] for name in arriving if name in known},
        tuning=_tuning(learner, options, len(fresh), list(arriving.values())),
        shape=shape,
        memory_bytes=learner.memory_bytes(counts, blank),
        budget=budget,
        features_per_class=requested,
    )
    if plan.trains:
        check_validation(options, arriving.values())
    return plan


def expected_seconds(plan: UpdatePlan) -> float:
    """About how long the update takes on this machine, from a few steps timed now."""
    learner = plan.learner
    images = sum(plan.new.values()) + sum(plan.more.values()) + len(learner.memory.images)
    work = learner.work(images, learner.tasks_, tunes=plan.trains)
    blank = _blank(learner.training.batch_size, plan.shape)
    costs = measure_costs(learner, blank, len(plan.names), pairs=images, trains=work.trained > 0)
    times = 2 if plan.trains else 1  # all images are absorbed once to assess the adapter, and once for the result
    return costs.training(work) + times * costs.absorbing(work)


def check_names(known: Sequence[str], arriving: Sequence[str], where: str = "") -> None:
    """Raise DataError for a name that differs from a known one only in capitals or accents, or is no class name."""
    spelled = {name_key(name): name for name in known}
    for name in arriving:
        twin = spelled.get(name_key(name))
        if twin is not None and twin != name:
            raise DataError(
                f"The class {name!a}{where} differs from {twin!a}, which the model knows, only in "
                "capitals, spaces or the encoding of accents. Give both one name, or two that differ more."
            )
        if name not in known and (problem := unfit(name)):
            raise DataError(f"{problem} Rename it.")


def check_validation(options: LearnOptions, arriving: Iterable[int]) -> None:
    """Raise UsageError if validation is requested and no class has enough samples to hold one out."""
    if options.at_least is not None and max(arriving, default=0) < MIN_TO_HOLD_OUT:
        raise UsageError(f"Nothing can be validated: no class has {MIN_TO_HOLD_OUT} images, of which to hold one out.")


def _blank(count: int, shape: tuple[int, ...]) -> Samples:
    return Samples.of(blank_inputs(count, shape), torch.zeros(count, dtype=torch.int64))


def _tuning(learner: Learner, options: LearnOptions, fresh: int, arriving: list[int]) -> Tuning | None:
    if options.trains and not learner.is_pretrained:
        return Tuning(True, "as asked for")
    decided = decide(learner.tune, arriving, first=not learner.tasks_, pretrained=learner.is_pretrained)
    trains = decided is None or decided.tunes
    if trains and learner.tasks_ and not _worth_training(learner, fresh, len(arriving)):
        return Tuning(False, "these classes alone give it nothing to distinguish")
    return decided


def _worth_training(learner: Learner, fresh: int, arriving: int) -> bool:
    """Whether to train on `arriving` classes, `fresh` of them new.

    Trained on some of the known classes, or on a single new one, a network would learn to see them everywhere. Its
    features are better left as they are, unless there are exemplars of other classes to compare with.
    """
    if learner.make_classifier() is None:  # the head classifies, and must be trained to know a class
        return True
    if not fresh:
        return arriving == len(learner.classes_) >= 2  # all classes: nothing can be forgotten
    return arriving >= 2 or len(learner.memory.images) > 0


def _image_size(model: Model | None, found: LabelledFiles, options: LearnOptions) -> int:
    if model is None:
        network = _network(options, (LARGEST_SIDE, LARGEST_SIDE, 3))
        own = input_size(network) if isinstance(network, str) else None
        return options.image_size or own or choose_size(found, options.weights)
    if model.image_size is None:
        raise UsageError("This model has learned vectors, not images. Teach it from Python.")
    if options.image_size not in (None, model.image_size):
        raise UsageError(f"This model's image size is {model.image_size} and cannot be changed.")
    return model.image_size


def _network(options: LearnOptions, shape: tuple[int, ...]) -> str | nn.Module:
    """The network of a new model."""
    if options.network is not None:
        return options.network
    return choose_network(shape) if options.weights is None else extractor_for_weights(options.weights)


def _learner(model: Model | None, options: LearnOptions, samples: int, shape: tuple[int, ...]) -> Learner:
    """The learner of the update, with what the model has learned."""
    requested = {"epochs": choose_epochs(samples), **options.settings}
    requested |= {name: value for name in SETTINGS if (value := getattr(options, name)) is not None}
    if model is None:
        return _new_learner(options, requested, shape)
    _check_unchanged(model.learner, options)
    if model.metadata.features_per_class is not None:
        requested.setdefault("features_per_class", model.metadata.features_per_class)
    if model.learner.training.learning_rate == FIRST_RATE:
        requested.setdefault("learning_rate", LATER_RATE)
    return with_settings(model.learner, **requested)


def _new_learner(options: LearnOptions, requested: Mapping[str, Any], shape: tuple[int, ...]) -> Learner:
    method, weights, network = options.method or METHOD, options.weights, _network(options, shape)
    if weights is not None and network in NETWORKS and network != (own := extractor_for_weights(weights)):
        raise UsageError(f"{printable(weights)} has weights of the network '{own}', not of '{network}'.")
    pretrained = is_pretrained(network)
    defaults = image_settings(
        method,
        options.settings.get("objective"),
        from_scratch=weights is None and not pretrained,
        pretrained=pretrained,
    )
    own_settings = {
        "network": network,
        "weights": None if weights is None else str(weights),
        "device": options.device,
    }
    return make(method, **{**defaults, **own_settings, **requested})


def _check_unchanged(learner: Learner, options: LearnOptions) -> None:
    """Raise UsageError for options that would need another network or method than the model has."""
    if options.weights is not None:
        raise UsageError("This model has weights already. Only a new model can start from a file.")
    if options.network not in (None, learner.network):
        raise UsageError(f"This model has the network '{learner.network}', which cannot be changed.")
    if options.method not in (None, learner.name):
        raise UsageError(f"This model has the method '{learner.name}', which cannot be changed.")
    requested = {name: options.settings[name] for name in NETWORK_SETTINGS if name in options.settings}
    before, after = learner.settings(), unlearned(learner, **requested).settings()  # of one type: "1" is 1
    for name in requested:
        if after[name] != before[name]:
            has = "weights" if name == "weights" else f"{name}={before[name]}"
            raise UsageError(f"This model has {has}, which cannot be changed. Make a new one.")


def image_settings(
    method: str, objective: str | None, *, from_scratch: bool, pretrained: bool = False
) -> dict[str, Any]:
    """Default settings of a method for images; `pretrained`: for a network of the catalogue with weights."""
    known = setting_names(method, objective)
    if "expected_classes" in known:  # the loss is divided by their number
        learning_rate = FIRST_RATE if from_scratch else LATER_RATE
    else:
        learning_rate = UNDIVIDED_RATE if from_scratch else UNDIVIDED_RATE_FROM_WEIGHTS
    settings = {**IMAGES, "learning_rate": learning_rate, **(PRETRAINED if pretrained else {})}
    if "features_per_class" not in known:  # cross-validation needs stored features
        settings.pop("classifier", None)
    return {name: value for name, value in settings.items() if name in known}


def choose_size(found: LabelledFiles, weights: Path | None) -> int:
    """The image side for these files: the median of their smaller sides, within limits."""
    sides = []
    for path in found.paths[:: max(1, len(found.paths) // EXAMINED)]:
        try:
            sides.append(min(extent(path)))
        except UnreadableImage:
            continue
    images = len(found.paths)
    if weights is not None:
        largest = TRAINED_AT[extractor_for_weights(weights)]
    else:
        largest = next((side for most, side in MAX_SIDE_FROM_SCRATCH.items() if images <= most), MAX_SIDE_OF_MANY)
    # If none of them can be read, reading all of them will say why.
    return max(SMALLEST_SIDE, min(statistics.median_low(sides or [largest]), largest))


def choose_epochs(samples: int, steps: int = STEPS, fewest: int = FEWEST_EPOCHS, most: int = MOST_EPOCHS) -> int:
    """The number of epochs in which so many samples make this number of steps, within limits."""
    return max(fewest, min(most, round(steps * BATCH / samples)))


def choose_network(shape: tuple[int, ...]) -> str:
    """The network of a new model for inputs of this shape, (h, w, c) or (d,): pretrained, unless images are tiny."""
    if len(shape) == 1:
        return IDENTITY
    return DEFAULT_PRETRAINED if min(shape[:2]) >= SMALL_SIDE else "auto"
