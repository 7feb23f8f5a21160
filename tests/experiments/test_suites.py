"""The paper's tables and figures as declarations: which runs, with which values, on which split."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from engram.data import Dataset, Samples, load
from engram.experiments import PRESETS, Plan
from engram.experiments.suite_plan import SuiteOptions, data_facts, runs_of, variants
from engram.experiments.suites import SUITES, DataFacts, Variant
from engram.methods import METHODS, OBJECTIVES

VALIDATED = {"cosine", "alpha", "width", "depth", "gamma", "parts"}
UNVALIDATED = {
    "exemplar-free",
    "exemplar-free-warm",
    "exemplars",
    "memory",
    "points",
    "table1",
    "quality",
    "balance",
    "frontier",
}


def made(classes: int, per_class: int, name: str = "mine", side: int = 2) -> Dataset:
    """This many classes with this many tiny images each."""
    labels = torch.arange(classes).repeat_interleave(per_class)
    images = torch.zeros(len(labels), side, side, 3, dtype=torch.uint8)
    samples = Samples.of(images, labels)
    return Dataset(name, samples, samples, tuple(f"class {label}" for label in range(classes)))


@pytest.fixture(scope="module")
def hundred() -> Dataset:
    """What the paper's numbers are for: 100 classes of 500 images."""
    return made(100, 500, name="cifar100")


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


def of(suite: str, dataset: Dataset, preset: str = "paper") -> list[Variant]:
    return variants(SuiteOptions(suite=suite, dataset=dataset.name, preset=preset), dataset)


def plan_of(variant: Variant, suite: str, dataset: Dataset, preset: str) -> Plan:
    options = SuiteOptions(suite=suite, dataset=dataset.name, preset=preset)
    return runs_of(variant, options, dataset)[0].plan


def varied(found: list[Variant], setting: str) -> list[tuple[str, Any]]:
    return [(variant.method, variant.settings.get(setting)) for variant in found]


def test_every_experiment_of_the_paper_has_a_suite_and_five_are_ours() -> None:
    assert set(SUITES) == VALIDATED | UNVALIDATED
    assert len(SUITES) == 10 + 5


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("data", ["digits", "hundred"])
def test_every_variant_can_be_made_into_a_learner_that_has_its_settings(
    data: str, suite: str, preset: str, request: pytest.FixtureRequest
) -> None:
    dataset = request.getfixturevalue(data)
    found = of(suite, dataset, preset)
    assert len(found) >= 2
    for variant in found:
        plan = Plan(method=variant.method, preset=preset, settings=variant.settings)
        learner = plan.learner(dataset)
        assert learner.name == variant.method
        objective = variant.settings.get("objective", METHODS[variant.method].objective)
        assert isinstance(learner.objective, OBJECTIVES[objective])
        assert {**variant.settings, "objective": learner.settings()["objective"]}.items() <= learner.settings().items()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("suite", SUITES)
def test_labels_are_unique_and_so_are_the_points_of_a_series(suite: str, preset: str, hundred: Dataset) -> None:
    found = of(suite, hundred, preset)
    assert len({variant.label for variant in found}) == len(found)
    assert all(variant.series for variant in found)
    if SUITES[suite].varies is None:
        assert all(variant.value is None for variant in found)
    else:
        assert len({(variant.series, variant.value) for variant in found}) == len(found)


# The paper's values


@pytest.mark.parametrize(
    ("suite", "setting", "values"),
    [
        ("alpha", "alpha", [0.1, 1, 10, 100, 1000]),
        ("width", "adapter_width", [32, 64, 128, 256, 512, 1024, 2048]),
        ("depth", "adapter_depth", [1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("preset", PRESETS)
def test_settings_of_the_adapter_are_varied_on_features_only(
    suite: str, setting: str, values: list[float], preset: str, hundred: Dataset
) -> None:
    found = of(suite, hundred, preset)
    assert varied(found, setting) == [("features", value) for value in values]
    assert [variant.value for variant in found] == values
    others = {tuple(sorted((k, v) for k, v in variant.settings.items() if k != setting)) for variant in found}
    assert len(others) == 1


def test_gamma_is_varied_on_features_and_on_gamma_lwf(hundred: Dataset) -> None:
    found, values = of("gamma", hundred), [0, 0.01, 0.05, 0.1, 1]
    expected = [(method, value) for method in ("features", "gamma-lwf") for value in values]
    assert varied(found, "feature_distillation") == expected
    assert [(variant.series, variant.value) for variant in found] == expected


def test_quality_compares_500_features_without_and_with_fifty_images(hundred: Dataset) -> None:
    without, with_images = of("quality", hundred)
    assert (without.method, dict(without.settings)) == ("features", {"features_per_class": 500})
    stored = {"features_per_class": 500, "images_per_class": 50}
    assert (with_images.method, dict(with_images.settings)) == ("hybrid", stored)


@pytest.mark.parametrize("preset", PRESETS)
def test_table_1_has_the_papers_ten_systems_and_their_memory(preset: str, hundred: Dataset) -> None:
    total, images, features = {"images_total": 2000}, {"images_per_class": 20}, {"features_per_class": 250}
    expected: dict[str, dict[str, int]] = {
        **{"lwf": {}, "icarl": total, "eeil": total, "lucir": images, "bic-uncorrected": total, "bic": total},
        **{"gamma-lwf": {}, "gamma-icarl": images, "features": features},
        "hybrid": {**features, "images_per_class": 10},
    }
    assert {variant.method: dict(variant.settings) for variant in of("table1", hundred, preset)} == expected


def test_table_1_on_digits_has_the_presets_numbers(digits: Dataset) -> None:
    found = {variant.method: dict(variant.settings) for variant in of("table1", digits, "short")}
    assert found["features"] == {"features_per_class": 100}
    assert found["gamma-icarl"] == {"images_per_class": 10}
    assert found["icarl"] == {"images_total": 100}
    assert found["hybrid"] == {"features_per_class": 100, "images_per_class": 5}


@pytest.mark.parametrize(("preset", "sizes"), [("paper", [5, 10, 20]), ("short", [10])])
def test_memory_varies_features_images_and_images_beside_100_features_for_several_task_sizes(
    preset: str, sizes: list[int], hundred: Dataset
) -> None:
    found = [
        (variant.classes_per_task, variant.method, dict(variant.settings)) for variant in of("memory", hundred, preset)
    ]
    expected = []
    for size in sizes:
        expected += [(size, "features", {"features_per_class": count}) for count in (50, 100, 250, 500)]
        for count in (5, 10, 20, 50):
            expected.append((size, "gamma-icarl", {"images_per_class": count}))
            expected.append((size, "hybrid", {"images_per_class": count, "features_per_class": 100}))
    assert len(found) == len(expected)
    assert all(each in found for each in expected)


@pytest.mark.parametrize(("preset", "sizes"), [("paper", [5, 10, 20]), ("short", [10])])
def test_points_have_features_and_images_at_the_same_places_for_several_task_sizes(
    preset: str, sizes: list[int], hundred: Dataset
) -> None:
    places: dict[tuple[str, int | None], list[float | None]] = {}
    for variant in of("points", hundred, preset):
        assert list(variant.settings.values()) == [variant.value]
        places.setdefault((variant.method, variant.classes_per_task), []).append(variant.value)
    assert set(places) == {(method, size) for method in ("features", "gamma-icarl") for size in sizes}
    assert len({tuple(values) for values in places.values()}) == 1
    assert all(len(values) >= 4 for values in places.values())


def test_memory_and_points_of_one_task_size_lie_on_one_line_per_method(hundred: Dataset) -> None:
    for suite, methods in (("memory", 3), ("points", 2)):
        lines = {(variant.series, variant.method, variant.classes_per_task) for variant in of(suite, hundred)}
        assert len(lines) == len({series for series, *_ in lines}) == 3 * methods


def test_cosine_compares_a_cosine_head_and_a_linear_one_on_lwf(hundred: Dataset) -> None:
    found = of("cosine", hundred)
    assert varied(found, "head") == [("lwf", "cosine"), ("lwf", "linear")]
    learners = [plan_of(variant, "cosine", hundred, "paper").learner(hundred) for variant in found]
    one, other = ({k: v for k, v in learner.settings().items() if k != "head"} for learner in learners)
    assert one == other and one["feature_distillation"] == 0


def test_balance_varies_only_what_the_classifier_is_fitted_on(hundred: Dataset) -> None:
    found = of("balance", hundred)
    assert varied(found, "balanced") == [("features", True), ("features", False)]
    learners = [plan_of(variant, "balance", hundred, "paper").learner(hundred) for variant in found]
    one, other = ({k: v for k, v in learner.settings().items() if k != "balanced"} for learner in learners)
    assert one == other and one["features_per_class"] == 250


# Fewer samples, fewer classes


def facts_of(per_class: int, **others: Any) -> DataFacts:
    values: dict[str, Any] = {"classes": 100, "classes_per_task": 10, "features_per_class": 250, "full": True}
    values["sample_bytes"] = 3072
    return DataFacts(**{**values, "per_class": per_class, "images_per_class": 20, **others})


def test_numbers_per_class_are_the_papers_from_500_samples_on_and_below_in_proportion() -> None:
    assert facts_of(500).scaled(50, 100, 250, 500) == [50, 100, 250, 500]
    assert facts_of(5000).scaled(50, 100, 250, 500) == [50, 100, 250, 500]
    assert facts_of(100).scaled(50, 100, 250, 500) == [10, 20, 50, 100]
    assert facts_of(10).scaled(50, 100, 250, 500) == [1, 2, 5, 10]


def test_scaled_numbers_are_positive_unique_and_at_most_the_samples_of_a_class() -> None:
    for per_class in (*range(1, 510), 5000):
        found = facts_of(per_class).scaled(5, 10, 20, 50, 100, 250, 500)
        assert found == sorted(set(found))
        assert found[0] >= 1 and found[-1] == min(per_class, 500)
        assert len(found) == 7 or per_class < 100


@pytest.mark.parametrize(
    ("classes", "usual", "sizes"),
    [(100, 10, [5, 10, 20]), (10, 2, [1, 2, 4]), (10, 1, [1, 2]), (6, 1, [1, 2]), (3, 1, [1]), (100, 50, [25, 50])],
)
def test_task_sizes_are_half_and_twice_the_usual_where_that_leaves_two_tasks(
    classes: int, usual: int, sizes: list[int]
) -> None:
    assert facts_of(500, classes=classes, classes_per_task=usual).task_sizes() == sizes
    assert facts_of(500, classes=classes, classes_per_task=usual, full=False).task_sizes() == [usual]


def test_the_facts_of_a_data_set_are_its_classes_and_its_smallest_class(hundred: Dataset) -> None:
    fewer = replace(hundred, train=hundred.train.select((torch.arange(50_000) % 500 < 30).nonzero().squeeze(1)))
    smaller = replace(fewer, train=fewer.train.select(torch.arange(7, 3000)))
    found = data_facts(smaller, "paper")
    assert (found.classes, found.per_class, found.classes_per_task, found.full) == (100, 23, 10, True)
    assert not data_facts(smaller, "short").full


@pytest.mark.parametrize(
    "suite", [suite for suite in SUITES if suite != "frontier"]
)  # budgets may hold more than there is
def test_no_suite_stores_more_than_a_class_has_or_nothing_or_repeats_a_run(suite: str) -> None:
    for preset, per_class in product(PRESETS, (500, 139, 30, 12, 2)):
        dataset, seen = made(10, per_class), []
        smallest: dict[tuple[object, ...], int] = {}  # by split, since splitting takes longest
        for variant in of(suite, dataset, preset):
            plan = plan_of(variant, suite, dataset, preset)
            split = (plan.classes_per_task, plan.first_task, plan.validation)
            if split not in smallest:
                smallest[split] = _smallest(plan, dataset)
            settings = plan.learner(dataset).settings()
            total = settings.get("images_total")
            images = None if variant.method == "engram" else settings.get("images_per_class")  # 0 by default
            stored = [settings.get("features_per_class"), images, total and total // 10]
            assert all(1 <= count <= smallest[split] for count in stored if count is not None), (variant.label, stored)
            seen.append((plan.classes_per_task, variant.method, settings))
        assert all(each not in seen[:place] for place, each in enumerate(seen))


def _smallest(plan: Plan, dataset: Dataset) -> int:
    """The samples of the smallest class as it arrives in a run, without what is held out."""
    return min(int(torch.bincount(task.train.labels)[list(task.classes)].min()) for task in plan.stream(dataset))


@pytest.mark.parametrize("data", ["digits", "thirty"])
@pytest.mark.parametrize("preset", PRESETS)
def test_balance_stores_fewer_features_than_a_class_has_samples(preset: str, data: str, digits: Dataset) -> None:
    dataset = digits if data == "digits" else made(10, 30)
    for variant in of("balance", dataset, preset):
        plan = plan_of(variant, "balance", dataset, preset)
        assert plan.learner(dataset).settings()["features_per_class"] < _smallest(plan, dataset)


# The split


@pytest.mark.parametrize("suite", SUITES)
def test_suites_that_choose_settings_use_the_validation_split_and_the_others_the_test_split(
    suite: str, digits: Dataset
) -> None:
    plan = plan_of(of(suite, digits)[0], suite, digits, "paper")
    stream = plan.stream(digits)
    tested = sum(len(task.test) for task in stream)
    trained = sum(len(task.train) for task in stream)
    if suite in VALIDATED:
        assert stream.split["validation"] == SUITES[suite].validation == 0.1
        assert trained + tested == len(digits.train)
        assert tested == pytest.approx(0.1 * len(digits.train), rel=0.02)
    else:
        assert stream.split["validation"] == SUITES[suite].validation == 0
        assert (trained, tested) == (len(digits.train), len(digits.test))


def test_the_frontier_leaves_out_budgets_smaller_than_one_sample_per_class() -> None:
    dataset = made(10, 50, side=16)
    found = of("frontier", dataset, "short")
    whole = list(SUITES["frontier"].variants(data_facts(dataset, "short")))
    skipped = {(variant.method, variant.budget) for variant in whole if variant not in found}
    assert ("gamma-icarl", 256) in skipped  # a third of an image of 768 bytes
    assert ("features", 256) not in skipped  # 64 numbers
    for variant in found:
        (run,) = runs_of(variant, SuiteOptions(suite="frontier", dataset=dataset.name, tasks=2), dataset)
        assert variant.budget is not None
        assert run.plan.budget == variant.budget * len(run.plan.stream(dataset).classes)


def test_the_frontier_ends_where_every_sample_is_stored() -> None:
    dataset = made(10, 20, side=16)  # 65 images would be 45 more than there are
    for series in ("gamma-icarl", "engram, int8"):
        line = [variant for variant in of("frontier", dataset, "short") if variant.series == series]
        chosen = [plan_of(variant, "frontier", dataset, "short").chosen(dataset) for variant in line]
        counts = [next(iter(each.values())) for each in chosen]
        assert len(counts) > 1 and max(counts[:-1]) < 20 <= counts[-1]
