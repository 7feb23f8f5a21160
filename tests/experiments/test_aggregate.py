"""Groups over seeds: means, deviations and paired differences, against numpy and scipy."""

import numpy as np
import pytest
from made_results import result
from scipy import stats

from engram.experiments.aggregate import (
    Group,
    common_seeds,
    curve,
    distinct,
    group_by_settings,
    mean_matrix,
    measured,
    paired,
    phases,
    shortened,
    summary,
)
from engram.experiments.results import Result


def group(results: list[Result], label: str = "features") -> Group:
    return Group(label, label, None, tuple(results))


def scored(scores: dict[int, float], method: str = "features", **values: object) -> Group:
    """A group with these average accuracies by seed."""
    return group([result(method, seed, [score, score], **values) for seed, score in scores.items()], method)


def test_summary_is_the_mean_and_the_sample_deviation() -> None:
    values = [0.2, 0.9, 0.4, 0.7]
    assert summary(values) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    assert summary([0.3]) == (0.3, None)


def test_curves_are_means_and_deviations_along_the_tasks() -> None:
    curves = [[0.9, 0.5, 0.1], [0.7, 0.6, 0.3]]
    made = curve(group([result(seed=seed, curve=each) for seed, each in enumerate(curves)]))
    assert [point.mean for point in made if point] == pytest.approx(np.mean(curves, axis=0))
    assert [point.deviation for point in made if point] == pytest.approx(np.std(curves, axis=0, ddof=1))


def test_a_curve_has_no_point_where_a_result_has_none() -> None:
    both = group([result(seed=0), result(seed=1)])
    assert curve(both, "omega_first")[0] is None and curve(both, "omega_first")[1] is not None
    assert curve(group([result("lwf")]), "drift_gap") == [None, None, None]
    assert measured(group([result("lwf")]), "gap") is None


def test_the_mean_matrix_is_a_mean_cell_by_cell() -> None:
    matrices = [[[0.9], [0.5, 0.7]], [[0.7], [0.1, 0.3]]]
    made = group([result(seed=seed, curve=[0.8, 0.5], accuracy_matrix=each) for seed, each in enumerate(matrices)])
    assert mean_matrix(made) == [pytest.approx([0.8]), pytest.approx([0.3, 0.5])]


def test_a_phase_that_a_run_did_not_have_took_no_time() -> None:
    runs = [result(seed=0, seconds={"train": 4.0, "adapt": 2.0}), result(seed=1, seconds={"train": 6.0})]
    assert phases(group(runs)) == {"train": 5.0, "adapt": 1.0}


def test_results_are_grouped_by_everything_but_the_seed() -> None:
    runs = [
        *(result("features", seed, settings={"seed": seed, "alpha": 1.0, "learning_rate": 0.2}) for seed in (1, 0)),
        *(result("features", seed, settings={"seed": seed, "alpha": 100.0, "learning_rate": 0.2}) for seed in (0, 1)),
        result("features", 0, settings={"seed": 0, "learning_rate": 0.2}),
        result("lwf", 7, settings={"seed": 7, "learning_rate": 0.5}),
    ]
    notes: list[str] = []
    groups = group_by_settings(runs, notes)
    assert [each.label for each in groups] == [
        "features, alpha = 1",
        "features, alpha = 100",
        "features, alpha not recorded",
        "lwf",
    ]
    assert [each.seeds for each in groups] == [(0, 1), (0, 1), (0,), (7,)]
    assert {each.series for each in groups} == {"features", "lwf"}
    assert notes == []


def test_a_seed_found_twice_counts_once_and_is_told_where_the_numbers_differ() -> None:
    notes: list[str] = []
    same = group_by_settings([result(), result()], notes)
    assert [each.seeds for each in same] == [(0,)] and notes == []
    other = group_by_settings([result(), result(curve=[0.8, 0.7, 0.6])], notes)
    assert other[0].results[0].curve == [0.9, 0.7, 0.5]
    assert notes == ["Seed 0 of features was found twice, with different numbers; the first is used."]


def test_paired_is_the_interval_of_the_paired_t_test() -> None:
    a = {0: 0.81, 1: 0.75, 2: 0.90, 5: 0.66}
    b = {0: 0.78, 1: 0.77, 2: 0.80, 5: 0.60}
    found = paired(scored({**a, 9: 0.1}), scored({8: 0.99, **b}, "lwf"))
    assert found is not None
    oracle = stats.ttest_rel(list(a.values()), list(b.values())).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((oracle.low, oracle.high))
    assert found.mean == pytest.approx(np.mean(list(a.values())) - np.mean(list(b.values())))
    assert (found.seeds, found.wins, found.is_clear) == ((0, 1, 2, 5), 3, False)


def test_a_difference_that_is_the_same_on_every_seed_has_no_width() -> None:
    found = paired(scored({0: 0.75, 1: 0.5}), scored({0: 0.5, 1: 0.25}, "lwf"))
    assert found is not None and (found.low, found.mean, found.high) == (0.25, 0.25, 0.25) and found.is_clear


@pytest.mark.parametrize(
    "other",
    [
        {"dataset": "another"},
        {"classes_per_task": 3},
        {"split": {"validation": 0.1}},
        {"split": {}},
        {"class_order": ["other"] * 4},
        {"classes_seen": [2, 5]},
    ],
)
def test_different_streams_are_not_compared(other: dict[str, object]) -> None:
    mine, theirs = scored({0: 0.5, 1: 0.6}), scored({0: 0.4, 1: 0.4}, "lwf", **other)
    assert common_seeds(mine, theirs) == ()
    assert paired(mine, theirs) is None


def test_fewer_than_two_common_seeds_give_no_interval() -> None:
    assert paired(scored({0: 0.5, 1: 0.6}), scored({1: 0.4, 2: 0.4}, "lwf")) is None
    assert common_seeds(scored({0: 0.5, 1: 0.6}), scored({1: 0.4, 2: 0.4}, "lwf")) == (1,)


def test_a_setting_that_is_none_goes_without_saying() -> None:
    coded = [{"codec": "pq", "codec_bytes": size} for size in (None, 8)]
    groups = group_by_settings([result("engram", settings=each) for each in [{"codec": "int8"}, *coded]], [])
    labels = ["engram, codec = int8", "engram, codec = pq", "engram, codec = pq, codec_bytes = 8"]
    assert [each.label for each in groups] == labels


def test_of_many_settings_a_few_that_tell_results_apart_are_named() -> None:
    def hybrid(objective: str, number: int, **others: object) -> Result:
        settings = {
            "head": "cosine",
            "learning_rate": number,
            "learning_rate_decay": number,
            "size": number,
            "objective": objective,
            **others,
        }
        return result("hybrid", settings=settings)

    runs = [hybrid("A", 1), hybrid("B", 2, head="linear"), hybrid("C", 3, epochs=5)]
    assert [each.label for each in group_by_settings(runs, [])] == [
        "hybrid, objective = A",
        "hybrid, objective = B",
        "hybrid, objective = C",
    ]
    assert [each.label for each in group_by_settings([*runs, hybrid("C", 4)], [])][2:] == [
        "hybrid, learning_rate = 3",
        "hybrid, learning_rate = 4",
    ]
    assert [each.label for each in group_by_settings([*runs, hybrid("C", 3)], [])][2:] == [
        "hybrid, objective = C, epochs = 5",
        "hybrid, objective = C, epochs not recorded",
    ]
    labels = [each.label for each in group_by_settings([hybrid("C", 3, epochs=None), *runs[:2], hybrid("C", 3)], [])]
    assert labels[0] != labels[3]  # nothing but whether it was recorded tells them apart


def test_labels_are_never_the_same_nor_endless() -> None:
    labels = distinct(["a", "a", "a (2)", "b" * 500, "b" * 501])
    assert len(set(labels)) == 5 and all(len(label) < 130 for label in labels)
    assert shortened("abcdefghij", 7) == "abcd…ij"
