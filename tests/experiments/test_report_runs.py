"""Runs of a report: reading, sections, groups, and statistics against numpy and scipy."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from made_results import every_method, result, save, save_suite
from scipy import stats

from engram.errors import DataError
from engram.experiments.report.runs import LONGEST_LABEL, Section, distinct, make_sections, read_runs
from engram.experiments.results import Result


def read(folder: Path) -> tuple[list[Section], list[str]]:
    runs, suites, notes = read_runs([folder])
    return make_sections(runs, suites, notes), notes


def only(folder: Path, *results: Result) -> Section:
    (section,), _ = read(save(folder, *results))
    return section


def labels(folder: Path, *results: Result) -> list[str]:
    return list(only(folder, *results).groups.index)


def scored(method: str, scores: dict[int, float], **values: object) -> list[Result]:
    """Runs with these average accuracies by seed."""
    return [result(method, seed, [score, score], **values) for seed, score in scores.items()]


# Reading.


@pytest.mark.parametrize(
    "damage",
    [
        {"curve": "high"},
        {"curve": [0.9, float("nan"), 0.5]},
        {"curve": [90, 70, 50]},
        {"curve": []},
        {"classes_seen": [2, 4]},
        {"classes_seen": [4, 2, 6]},
        {"classes_seen": [0, 2, 4]},
        {"accuracy_matrix": [[0.9], [0.7], [0.5]]},
        {"omega": [1.0]},
        {"seconds": {"train": "long"}},
        {"seconds": {"train": -1.0}},
        {"settings": None},
        {"memory_bytes": -1},
        {"memory_bytes": 2**63},
        {"memory_bytes": 10**400},
        {"schema": 99},
        {"average_incremental_accuracy": 7.5},
        {"average_incremental_accuracy_top5": -0.5},
    ],
    ids=lambda damage: str(damage)[:50],
)
def test_a_damaged_result_is_named_and_the_others_are_used(damage: dict[str, object], tmp_path: Path) -> None:
    save(tmp_path, result("lwf"))
    bad = tmp_path / "bad" / "result.json"
    bad.parent.mkdir()
    bad.write_text(json.dumps({**result().to_json(), **damage}))
    runs, _, notes = read_runs([tmp_path])
    assert list(runs["method"]) == ["lwf"]
    assert len(notes) == 1 and str(bad) in notes[0]


@pytest.mark.parametrize("content", ["{", "[" * 100_000, '{"schema": 1}', "[]", "null", "[" * 900 + "]" * 900])
def test_a_file_that_is_no_result_is_skipped(content: str, tmp_path: Path) -> None:
    save(tmp_path, result("lwf"))
    (tmp_path / "result.json").write_text(content)
    runs, _, notes = read_runs([tmp_path])
    assert len(runs) == 1 and len(notes) == 1 and str(tmp_path / "result.json") in notes[0]


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}', '{"schema": 2, "suite": "a"}'])
def test_a_damaged_suite_is_skipped_and_its_results_are_used(content: str, tmp_path: Path) -> None:
    folder = save_suite(tmp_path, [1, 10])
    (folder / "suite.json").write_text(content)
    (section,), notes = read(folder)
    assert section.suite is None and len(section.groups) == 4
    assert len(notes) == 1 and str(folder / "suite.json") in notes[0]


def test_nothing_to_read_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        read_runs([tmp_path])
    with pytest.raises(DataError, match="nowhere"):
        read_runs([tmp_path / "nowhere"])


def test_a_file_named_twice_counts_once(tmp_path: Path) -> None:
    save(tmp_path, result())
    runs, _, notes = read_runs([tmp_path, tmp_path / "run-000", tmp_path / "run-000" / "result.json"])
    assert len(runs) == 1 and notes == []


def test_a_task_may_bring_known_classes_only(tmp_path: Path) -> None:
    section = only(tmp_path, result(classes_seen=[2, 4, 4]))
    assert section.title == "made: 2 tasks of 2 and 1 task of 0 classes"


# Sections.


def test_data_splits_and_numbers_of_tasks_are_sections_of_their_own(tmp_path: Path) -> None:
    split = {"first_task": None, "class_order": "seed", "validation": 0.0}
    kinds = [
        result(),
        result(dataset="other"),
        result(curve=[0.9, 0.8]),
        result(split={**split, "class_order": "1993"}),
        result(split={**split, "validation": 0.1}),
        result(classes_seen=[4, 6, 8]),
        result(classes_per_task=3),
        result(split={**split, "data": "0123456789abcdef"}),
        result(split={**split, "data": "fedcba9876543210"}),
    ]
    sections, _ = read(save(tmp_path, *kinds))
    assert sorted(section.title for section in sections) == [
        "made: 1 task of 4 and 2 tasks of 2 classes",
        "made: 2 tasks of 2 classes",
        "made: 3 tasks of 2 classes",
        "made: 3 tasks of 2 classes (2)",
        "made: 3 tasks of 2 classes, class order 1993",
        "made: 3 tasks of 2 classes, data 01234567",
        "made: 3 tasks of 2 classes, data fedcba98",
        "made: 3 tasks of 2 classes, validation share 0.1",
        "other: 3 tasks of 2 classes",
    ]
    assert all(len(section.runs) == 1 for section in sections)
    names = [section.name for section in sections]
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-z0-9-]+", name) for name in names)


def test_where_the_data_were_loaded_from_makes_no_section_of_its_own(tmp_path: Path) -> None:
    splits = [{"data": "ab", "source": {"dataset": "folder", "data": place}} for place in ("here", "there")]
    section = only(tmp_path, *(result(seed=seed, split=split) for seed, split in enumerate(splits)))
    assert list(section.groups["seeds"]) == [(0, 1)]


def test_a_suite_names_its_groups_their_values_and_what_varies(tmp_path: Path) -> None:
    (section,), _ = read(save_suite(tmp_path, [0.1, 1, 10, 100]))
    assert section.title == "alpha on made: 3 tasks of 2 classes" and section.varies == "alpha"
    assert list(section.groups["value"]) == [0.1, 1, 10, 100] * 2
    assert list(section.groups["seeds"]) == [(0, 1, 2)] * 8
    assert section.groups.index[0] == "features, α = 0.1"


def test_suites_may_share_a_folder_and_runs(tmp_path: Path) -> None:
    folder = save_suite(tmp_path, [1, 10])
    (folder / "suite.json").rename(folder / "suite-alpha.json")
    other = json.loads((folder / "suite-alpha.json").read_text())
    other |= {"suite": "one", "varies": None, "variants": other["variants"][:1]}
    (folder / "suite-one.json").write_text(json.dumps(other))
    sections, _ = read(folder)
    assert [(section.title[:5], len(section.groups)) for section in sections] == [("alpha", 4), ("one o", 1)]


def test_runs_that_a_suite_does_not_name_and_runs_it_lacks_are_noted(tmp_path: Path) -> None:
    folder = save_suite(tmp_path / "suite", [1, 10])
    (folder / "runs" / "hybrid-10" / "seed-2" / "result.json").unlink()
    result("lwf").save(folder / "result.json")
    sections, notes = read(tmp_path)
    assert [section.title[:5] for section in sections] == ["alpha", "made:"]
    assert len(notes) == 1 and str(folder) in notes[0] and "alpha" in notes[0] and " 1 " in notes[0]
    assert sections[0].groups["seeds"].iloc[-1] == (0, 1)


# Groups.


def test_runs_are_grouped_by_everything_but_seed_and_device(tmp_path: Path) -> None:
    settings = [{"alpha": 1.0, "decay": 2}, {"alpha": 100.0, "decay": 2}, {"decay": 2}]
    runs = [
        *(result("features", seed, settings={"seed": seed, "device": str(seed), **settings[0]}) for seed in (1, 0)),
        *(result("features", seed, settings={"seed": seed, **settings[1]}) for seed in (0, 1)),
        result("features", 0, settings={"seed": 0, **settings[2]}),
        result("lwf", 7, settings={"seed": 7, "decay": 5}),
    ]
    groups = only(tmp_path, *runs).groups
    seeds = {"features": (0,), "features, alpha = 1": (0, 1), "features, alpha = 100": (0, 1), "lwf": (7,)}
    assert groups["seeds"].to_dict() == seeds
    assert set(groups["series"]) == {"features", "lwf"}


def test_a_number_that_alone_tells_groups_apart_is_swept(tmp_path: Path) -> None:
    runs = [result("features", settings={"alpha": value, "decay": 2}) for value in (1, 10.0)]
    section = only(tmp_path / "swept", *runs, result("lwf", settings={"decay": 5}))
    assert section.varies == "alpha"
    assert {each for each in section.groups["value"] if each == each} == {1.0, 10.0}
    assert only(tmp_path / "alone", runs[0]).varies is None
    words = [result("features", settings={"head": value}) for value in ("cosine", "linear")]
    assert only(tmp_path / "words", *words).varies is None


def test_a_seed_found_twice_counts_once_and_is_noted_where_the_numbers_differ(tmp_path: Path) -> None:
    (section,), notes = read(save(tmp_path / "same", result(), result()))
    assert list(section.groups["seeds"]) == [(0,)] and notes == []
    (section,), notes = read(save(tmp_path / "other", result(), result(curve=[0.8, 0.7, 0.6])))
    assert section.runs["curve"].iloc[0] == [0.9, 0.7, 0.5]
    assert len(notes) == 1 and "Seed 0 of features" in notes[0]


def test_rows_are_best_first_and_bounds_last(tmp_path: Path) -> None:
    order = labels(tmp_path, *every_method(tasks=3, seeds=2))
    assert order[:2] == ["features", "hybrid"] and set(order[-2:]) == {"finetune", "joint"} and len(order) == 13


def test_rows_with_different_seeds_are_in_alphabetical_order(tmp_path: Path) -> None:
    runs = scored("lwf", {0: 0.9, 1: 0.9}) + scored("icarl", {0: 0.1, 1: 0.1}) + scored("features", {7: 0.5})
    assert labels(tmp_path, *runs) == ["features", "icarl", "lwf"]


def test_a_setting_that_is_none_goes_without_saying(tmp_path: Path) -> None:
    coded = [{"codec": "int8"}, *({"codec": "pq", "codec_bytes": size} for size in (None, 8))]
    found = labels(tmp_path, *(result("engram", settings=each) for each in coded))
    assert found == ["engram, codec = int8", "engram, codec = pq", "engram, codec = pq, codec_bytes = 8"]


def test_of_many_settings_a_few_that_tell_runs_apart_are_named(tmp_path: Path) -> None:
    def hybrid(objective: str, number: int, **others: object) -> Result:
        settings = {"head": "cosine", "width": number, "decay": number, "size": number, "objective": objective}
        return result("hybrid", settings={**settings, **others})

    runs = [hybrid("A", 1), hybrid("B", 2, head="linear"), hybrid("C", 3, epochs=5)]
    assert labels(tmp_path / "words", *runs) == [f"hybrid, objective = {name}" for name in "ABC"]
    found = labels(tmp_path / "numbers", *runs, hybrid("C", 4))
    assert len(set(found)) == 4 and max(label.count(" = ") for label in found) <= 2


def test_labels_are_never_the_same_nor_endless() -> None:
    found = distinct(["a", "a", "a (2)", "b" * 500, "b" * 501, "", ""])
    assert len(set(found)) == 7 and all(0 < len(label) < LONGEST_LABEL + 10 for label in found)


# Statistics.


def test_spread_is_mean_sample_deviation_and_interval(tmp_path: Path) -> None:
    values = [0.2, 0.9, 0.4, 0.7]
    spread = only(tmp_path, *scored("features", dict(enumerate(values)))).spread("top1").loc["features"]
    interval = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    expected = [np.mean(values), np.std(values, ddof=1), interval.low, interval.high]
    assert list(spread[["mean", "std", "low", "high"]]) == pytest.approx(expected)


def test_one_seed_has_no_deviation_and_no_interval(tmp_path: Path) -> None:
    spread = only(tmp_path, result(curve=[0.3, 0.3])).spread("top1").loc["features"]
    assert spread["mean"] == pytest.approx(0.3) and spread[["std", "low", "high"]].isna().all()


def test_curves_are_means_and_deviations_by_task(tmp_path: Path) -> None:
    curves = [[0.9, 0.5, 0.1], [0.7, 0.6, 0.3]]
    section = only(tmp_path, *(result(seed=seed, curve=each) for seed, each in enumerate(curves)))
    made = section.spread_by_task("curve").loc["features"]
    assert list(made["mean"]) == pytest.approx(np.mean(curves, axis=0))
    assert list(made["std"]) == pytest.approx(np.std(curves, axis=0, ddof=1))


def test_a_curve_has_no_point_where_a_run_has_none(tmp_path: Path) -> None:
    section = only(tmp_path, result(), result(seed=1), result("lwf"))
    first = section.spread_by_task("omega_first")["mean"]
    assert list(first["features"].isna()) == [True, False, False] and first["lwf"].isna().all()
    lacking = result(seed=1, omega_first=[None, None, 0.9])
    first = only(tmp_path / "lacking", result(), lacking).spread_by_task("omega_first")["mean"]
    assert list(first["features"].isna()) == [True, True, False]


def test_differences_are_those_of_the_paired_t_test(tmp_path: Path) -> None:
    a = {0: 0.81, 1: 0.75, 2: 0.90, 5: 0.66}
    b = {0: 0.78, 1: 0.77, 2: 0.80, 5: 0.60}
    section = only(tmp_path, *scored("features", {**a, 9: 0.1}), *scored("lwf", {8: 0.99, **b}))
    oracle = stats.ttest_rel(list(b.values()), list(a.values())).confidence_interval(0.95)
    found = section.differences().loc["lwf"]
    assert (found["low"], found["high"]) == pytest.approx((oracle.low, oracle.high))
    assert found["mean"] == pytest.approx(np.mean(list(b.values())) - np.mean(list(a.values())))


def test_a_difference_that_is_the_same_on_every_seed_has_no_width(tmp_path: Path) -> None:
    section = only(tmp_path, *scored("features", {0: 0.75, 1: 0.5}), *scored("lwf", {0: 0.5, 1: 0.25}))
    assert list(section.differences().loc["lwf", ["low", "mean", "high"]]) == [-0.25, -0.25, -0.25]


def test_runs_with_another_class_order_are_not_compared(tmp_path: Path) -> None:
    other = scored("lwf", {0: 0.4, 1: 0.4}, class_order=["other"] * 4)
    section = only(tmp_path, *scored("features", {0: 0.5, 1: 0.6}), *other)
    assert section.differences().loc["lwf"].isna().all()


def test_one_common_seed_gives_a_difference_without_an_interval_and_none_gives_nothing(tmp_path: Path) -> None:
    one = only(tmp_path / "one", *scored("features", {0: 0.5, 1: 0.6}), *scored("lwf", {1: 0.4, 2: 0.4}))
    assert one.differences().loc["lwf", "mean"] == pytest.approx(-0.2)
    assert pd.isna(one.differences().loc["lwf", "low"])
    none = only(tmp_path / "none", *scored("features", {0: 0.5}), *scored("lwf", {1: 0.4}))
    assert none.differences().loc["lwf"].isna().all()


def test_a_bound_is_no_reference(tmp_path: Path) -> None:
    runs = scored("joint", {0: 0.9, 1: 0.9}) + scored("features", {0: 0.8, 1: 0.7}) + scored("lwf", {0: 0.6, 1: 0.5})
    section = only(tmp_path, *runs)
    assert list(section.contenders.index) == ["features", "lwf"]
    assert list(section.differences().index) == ["lwf", "joint"]


def test_top_5_leads_on_imagenet(tmp_path: Path) -> None:
    assert only(tmp_path / "a", result(dataset="imagenet100")).metrics == ("top5", "top1")
    assert only(tmp_path / "b", result(dataset="cifar100")).metrics == ("top1",)
