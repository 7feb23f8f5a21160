"""Presets give each method, on each data set, settings that it knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from conftest import blobs
from learners_made import OF_EACH_LEARNER, OF_EACH_TRAINING
from torch import Tensor

from engram.data import Dataset, Samples, load
from engram.data.samples import LazyImages
from engram.errors import UsageError
from engram.experiments import PRESETS, Plan
from engram.experiments.running import class_counts, classes_per_task, preset
from engram.experiments.suite_plan import SuiteOptions, data_facts, runs_of, variants
from engram.methods import METHODS, OBJECTIVES, setting_names
from engram.network import Training

DIVIDED = [
    *("features", "hybrid", "features-unadapted", "gamma-lwf", "lwf", "gamma-icarl", "icarl", "finetune", "joint"),
    *("sdc", "ldc", "adc", "dpcr", "fecam", "fetril", "gaussian-replay", "ewc", "mas"),
    *("gem", "a-gem", "lwm", "il2m", "threshold-moving", "engram"),
]
UNDIVIDED = ["eeil", "lucir", "bic", "bic-uncorrected"]  # not divided by the number of classes


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def named(name: str, classes: int = 10) -> Dataset:
    samples = Samples.of(torch.zeros(classes, 32, 32, 3, dtype=torch.uint8), torch.arange(classes))
    return Dataset(name, samples, samples, tuple(map(str, range(classes))))


def test_the_objective_of_each_method_is_divided_or_not() -> None:
    assert sorted(DIVIDED + UNDIVIDED) == sorted(METHODS)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PRESETS)
def test_every_method_can_be_made_with_every_preset_and_only_of_settings_it_knows(
    name: str, method: str, digits: Dataset
) -> None:
    for dataset in (digits, named("cifar100"), blobs()):
        settings = preset(name, method, dataset)
        assert set(settings) <= setting_names(method)
        found = Plan(method=method, preset=name).learner(dataset).settings()
        assert {setting: found[setting] for setting in settings} == settings


@pytest.mark.parametrize("method", OF_EACH_LEARNER)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_preset_drops_what_the_chosen_objective_does_not_know(method: str, objective: str, digits: Dataset) -> None:
    for name in PRESETS:
        settings = preset(name, method, digits, objective)
        assert set(settings) <= setting_names(method, objective)
        assert ("expected_classes" in settings) == (objective not in ("eeil", "lucir", "bic"))
        plan = Plan(method=method, preset=name, settings={"objective": objective})
        assert type(plan.learner(digits).objective) is OBJECTIVES[objective]


def test_a_preset_drops_what_a_method_does_not_store(digits: Dataset) -> None:
    stored = {
        method: {"features_per_class", "adapter_width", "images_per_class"} & set(preset("short", method, digits))
        for method in ("features", "hybrid", "icarl", "finetune", "joint")
    }
    assert stored == {
        "features": {"features_per_class", "adapter_width"},
        "hybrid": {"features_per_class", "adapter_width", "images_per_class"},
        "icarl": {"images_per_class"},
        "finetune": set(),
        "joint": set(),
    }


# Epochs and learning rates


def test_the_paper_preset_has_the_epochs_of_the_objectives_paper(digits: Dataset) -> None:
    for method in METHODS:
        epochs = {"eeil": 40, "lucir": 160, "bic": 250, "bic-uncorrected": 250}.get(method, 70)
        training = Plan(method=method, preset="paper").learner(digits).training
        assert (training.epochs, training.schedule) == (epochs, "steps"), method
        assert training.learning_rate == (0.1 if method in UNDIVIDED else 2.0), method


@pytest.mark.parametrize(("objective", "epochs"), [("eeil", 40), ("lucir", 160), ("bic", 250), ("distillation", 70)])
def test_the_paper_preset_depends_on_the_objective_given(objective: str, epochs: int, digits: Dataset) -> None:
    plan = Plan(method="features", preset="paper", settings={"objective": objective})
    assert plan.learner(digits).training.epochs == epochs


def test_the_short_presets_learning_rate_on_digits_is_lower_for_lucir(digits: Dataset) -> None:
    for method, entry in METHODS.items():
        training = Plan(method=method).learner(digits).training
        assert (training.epochs, training.batch_size, training.schedule) == (20, 32, "one-cycle"), method
        assert training.learning_rate == (0.05 if entry.objective == "lucir" else 0.2), method


def test_the_short_presets_learning_rate_on_digits_depends_on_the_objective_given(digits: Dataset) -> None:
    def training(method: str, **settings: object) -> Training:
        return Plan(method=method, settings=settings).learner(digits).training

    for method in ("features", "lucir"):
        assert training(method, objective="lucir").learning_rate == 0.05
        for objective in ("distillation", "classification", "bic"):
            assert training(method, objective=objective).learning_rate == 0.2
    given = training("features", objective="lucir", learning_rate=0.3, epochs=2)
    assert (given.learning_rate, given.epochs) == (0.3, 2)


def test_on_other_data_the_short_preset_leaves_the_learning_rate_to_the_objective() -> None:
    for method in METHODS:
        training = Plan(method=method).learner(blobs()).training
        assert (training.epochs, training.schedule) == (10, "one-cycle"), method
        assert training.learning_rate == (0.1 if method in UNDIVIDED else 2.0), method


# What depends on the data alone


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(
    ("dataset", "pad", "flip"), [("cifar100", 4, True), ("cifar10", 4, True), ("digits", 1, False), ("mine", 0, False)]
)
def test_augmentation_depends_on_the_data(name: str, dataset: str, pad: int, flip: bool) -> None:
    for method in ("features", "bic"):
        training = Plan(method=method, preset=name).learner(named(dataset)).training
        assert (training.pad, training.flip) == (pad, flip)


@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_is_divided_by_the_number_of_classes_of_the_data(name: str) -> None:
    for method in DIVIDED:
        settings = Plan(method=method, preset=name).learner(named("mine", classes=7)).settings()
        assert settings["expected_classes"] == 7, method


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("digits", 10, 2),
        ("cifar10", 10, 2),
        ("cifar100", 100, 10),
        ("mine", 10, 2),
        ("mine", 33, 6),
        ("mine", 3, 1),
        ("imagenet100", 8, 1),
        ("imagenet1000", 200, 100),
    ],
)
def test_tasks_have_the_fields_usual_number_of_classes_or_a_fifth(name: str, classes: int, expected: int) -> None:
    dataset = named(name, classes)
    assert classes_per_task(dataset) == expected
    assert len(Plan().stream(dataset).tasks[0].classes) == expected


def test_a_method_with_images_in_total_stores_ten_of_each_digit_by_default(digits: Dataset) -> None:
    def stored(**settings: int) -> tuple[object, object]:
        found = Plan(method="icarl", settings=settings).learner(digits).settings()
        return found["images_per_class"], found["images_total"]

    assert stored() == (10, None)
    assert stored(images_per_class=7) == (7, None)
    assert stored(images_total=70) == (None, 70)
    paper = Plan(method="icarl", preset="paper").learner(digits).settings()
    assert (paper["images_per_class"], paper["images_total"]) == (None, 2000)


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match=r"'papre'.*'paper'"):
        Plan(preset="papre").learner(blobs())


# ImageNet


class Unmade(LazyImages):
    """Images that are never read: only their number and shape matter."""

    def __init__(self, count: int, side: int) -> None:
        self.shape = (count, side, side, 3)

    def __getitem__(self, rows: Tensor) -> Tensor:
        return torch.zeros(len(rows), *self.shape[1:], dtype=torch.uint8)

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        yield b""


def imagenet(name: str, classes: int, side: int = 256, per_class: int = 300) -> Dataset:
    labels = torch.arange(classes).repeat_interleave(per_class)
    samples = Samples(Unmade(len(labels), side), torch.arange(len(labels)), labels)
    return Dataset(
        name, samples, samples.select(torch.arange(0, len(labels), per_class)), tuple(map(str, range(classes)))
    )


PAPER_TRAINING = {"eeil": (80, 128, 1e-4), "lucir": (90, 128, 1e-4), "bic": (100, 256, 1e-3)}  # BiC: 1e-4 · 10 / t
MILESTONES = {
    "eeil": [20, 40, 60],
    "lucir": [30, 60],
    "bic": [30, 60, 80, 90],
}


@pytest.mark.parametrize("method", OF_EACH_TRAINING)
@pytest.mark.parametrize(("name", "classes"), [("imagenet100", 100), ("imagenet1000", 1000)])
def test_the_paper_preset_for_imagenet_is_the_papers(name: str, classes: int, method: str) -> None:
    dataset = imagenet(name, classes, per_class=2)
    learner = Plan(method=method, preset="paper").learner(dataset)
    training, own = learner.training, METHODS[method].objective
    assert (training.epochs, training.batch_size, training.weight_decay) == PAPER_TRAINING.get(own, (60, 128, 1e-5))
    milestones = MILESTONES.get(own, [20, 30, 40, 50])
    assert [round(share * training.epochs) for share in training.milestones] == milestones
    assert (training.learning_rate, training.learning_rate_decay) == (
        (0.1, 10.0) if own in ("eeil", "lucir", "bic") else (2.0, 5.0)
    )
    assert (training.crop, training.crop_area, training.pad, training.flip) == (224, None, 0, True)
    assert learner.network == "resnet18"
    settings = learner.settings()
    assert settings.get("less_forget", 10.0) == 10.0  # LUCIR's λ_base on ImageNet
    assert settings.get("expected_classes", classes) == classes
    assert settings.get("features_per_class", 250) == 250
    stream = Plan(preset="paper").stream(dataset)
    assert len(stream) == 10 and len(stream.tasks[0].classes) == classes // 10


@pytest.mark.parametrize(
    ("name", "classes", "megabytes"),
    [
        ("imagenet100", 100, {"features": 48.8, "hybrid": 236.3, "icarl": 375.0, "lucir": 375.0, "lwf": 0.0}),
        ("imagenet1000", 1000, {"features": 488.3, "hybrid": 2363.3, "eeil": 3750.0, "gamma-icarl": 3750.0}),
    ],
)
def test_runs_and_the_suite_of_table_1_store_what_the_paper_counts(
    name: str, classes: int, megabytes: dict[str, float]
) -> None:
    dataset = imagenet(name, classes)
    options = SuiteOptions(suite="table1", dataset=name, preset="paper")
    suite = {variant.method: variant for variant in variants(options, dataset)}
    stream = Plan(preset="paper").stream(dataset)
    counts = class_counts(stream.tasks)
    for method, expected in megabytes.items():
        (run,) = runs_of(suite[method], options, dataset)
        for plan in (run.plan, Plan(method=method, preset="paper")):
            predicted = plan.learner(dataset, stream).memory_bytes(counts, stream.tasks[0].train)
            assert round(predicted / 2**20, 1) == expected, method


def test_on_imagenet_1000_the_paper_varies_m_from_50_to_200() -> None:
    assert data_facts(imagenet("imagenet1000", 1000, per_class=2), "paper").task_sizes() == [50, 100, 200]


@pytest.mark.parametrize(("side", "crop"), [(256, 224), (64, 56), (32, 28)])
@pytest.mark.parametrize("name", PRESETS)
def test_crops_are_seven_eighths_of_the_size_of_the_images(name: str, side: int, crop: int) -> None:
    training = Plan(preset=name).learner(imagenet("imagenet100", 10, side, per_class=1)).training
    assert training.crop == crop
    assert Plan(preset=name, settings={"crop": 9}).learner(imagenet("imagenet100", 10, side, 1)).training.crop == 9


def test_the_short_preset_for_imagenet_changes_only_the_training() -> None:
    learner = Plan(method="lucir").learner(imagenet("imagenet100", 100, per_class=1))
    assert (learner.training.epochs, learner.training.schedule, learner.training.crop) == (10, "one-cycle", 224)
    assert learner.settings()["less_forget"] == 10.0 and learner.network == "resnet18"


def test_tiny_imagenet_has_a_network_and_padding_for_its_size() -> None:
    dataset = imagenet("tiny-imagenet-200", 200, side=64, per_class=1)
    for name, epochs in (("paper", 60), ("short", 10)):
        learner = Plan(method="icarl", preset=name).learner(dataset)
        assert (learner.network, learner.training.epochs) == ("resnet18-small", epochs)
        assert (learner.training.crop, learner.training.pad, learner.training.flip) == (None, 8, True)
        assert learner.settings()["images_total"] == 4000
    assert classes_per_task(dataset) == 20


def test_the_folder_of_a_run_on_files_depends_on_their_size_and_classes() -> None:
    options = SuiteOptions(suite="table1", dataset="imagenet100", methods=("lwf",))

    def folder(dataset: Dataset) -> str:
        return runs_of(variants(options, dataset)[0], options, dataset)[0].folder

    small, large, fewer = (imagenet("imagenet100", *each, 2) for each in ((20, 32), (20, 64), (10, 32)))
    assert len({folder(small), folder(large), folder(fewer)}) == 3
    assert folder(small) == folder(imagenet("imagenet100", 20, 32, 2))
