"""The report: what is put together, what is said of it, and the page it becomes."""

import ast
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from made_results import METHODS, every_method, result, save, save_suite
from scipy import stats

import engram
from engram.errors import DataError
from engram.experiments import report as package
from engram.experiments.aggregate import Group
from engram.experiments.report import make_report
from engram.experiments.report.appearance import (
    HUES,
    INK,
    KNOWN,
    MUTED,
    PAPER,
    Colour,
    Style,
    base_styles,
    group_styles,
)
from engram.experiments.report.commands import commands
from engram.experiments.report.page import Report
from engram.experiments.report.tables import as_csv, as_latex, cell_text, in_blocks
from engram.experiments.report.text import accuracy, integers, listed, megabytes, seconds, unmarked
from engram.experiments.results import Result
from engram.methods import METHODS as REAL_METHODS

COMMITTED = Path(__file__).parents[2] / "benchmarks" / "results"


def said(report: Report) -> str:
    return "\n".join(unmarked(line) for part in report.parts for line in [*part.values, *part.findings])


def seeds(method: str, averages: list[float], first: int = 0, **values: object) -> list[Result]:
    return [result(method, first + place, [each, each], **values) for place, each in enumerate(averages)]


# What is put together.


def test_data_sets_splits_and_numbers_of_tasks_are_sections_of_their_own(tmp_path: Path) -> None:
    kinds = [
        result(),
        result(dataset="other"),
        result(curve=[0.9, 0.8]),
        result(split={"first_task": None, "class_order": "1993", "validation": 0.0}),
        result(split={"first_task": None, "class_order": "seed", "validation": 0.1}),
        result(split={}),
        result(classes_seen=[4, 6, 8]),
        result(split={"first_task": None, "class_order": "seed", "validation": 0.0, "data": "0123456789abcdef"}),
    ]
    report = make_report([save(tmp_path, *kinds)])
    assert sorted(part.section.title for part in report.parts) == [
        "made: 2 tasks of 2 classes",
        "made: 3 tasks of 2 classes",
        "made: 3 tasks of 2 classes (data 01234567)",
        "made: 3 tasks of 2 classes (split not recorded)",
        "made: 3 tasks of 2 classes, class order 1993",
        "made: 3 tasks of 2 classes, validated on 10 % held out",
        "made: 3 tasks, 4 classes and then 2 each",
        "other: 3 tasks of 2 classes",
    ]
    assert all(len(part.section.groups) == 1 for part in report.parts)
    names = [part.section.name for part in report.parts]
    assert len(set(names)) == len(names) and all(re.fullmatch("[a-z0-9-]+", name) for name in names)


def test_rows_are_best_first_and_bounds_last(tmp_path: Path) -> None:
    report = make_report([save(tmp_path, *every_method(tasks=3, seeds=2))])
    labels = [group.label for group in report.parts[0].section.groups]
    assert labels[:2] == ["features", "hybrid"] and labels[-2:] == ["finetune", "joint"] and len(labels) == 13


def test_a_suite_says_its_groups_their_values_and_what_varies(tmp_path: Path) -> None:
    report = make_report([save_suite(tmp_path, [0.1, 1, 10, 100])])
    (part,) = report.parts
    assert part.section.title == "alpha on made: 3 tasks of 2 classes"
    assert [group.value for group in part.section.groups] == [0.1, 1, 10, 100] * 2
    assert [group.seeds for group in part.section.groups] == [(0, 1, 2)] * 8
    assert part.section.groups[0].label == "features, α = 0.1"
    page = report.html()
    assert "Accuracy and ω rise with α." in page and "engram suite alpha --dataset made" in page
    best = "features: accuracy is highest at features, α = 100 (.733) and lowest at features, α = 0.1 (.643)"
    assert best in said(report)


def test_suites_may_share_a_folder_and_runs(tmp_path: Path) -> None:
    folder = save_suite(tmp_path, [1, 10])
    (folder / "suite.json").rename(folder / "suite-alpha.json")
    other = json.loads((folder / "suite-alpha.json").read_text())
    other |= {"suite": "one", "varies": None, "variants": other["variants"][:1]}
    (folder / "suite-one.json").write_text(json.dumps(other))
    report = make_report([folder])
    assert [(part.section.title[:5], len(part.section.groups)) for part in report.parts] == [("alpha", 4), ("one o", 1)]
    assert "ω of the previous task's vectors lies between .960 and .980 along the tasks" in said(report)


def test_runs_that_a_suite_does_not_name_and_runs_it_lacks_are_told(tmp_path: Path) -> None:
    folder = save_suite(tmp_path / "suite", [1, 10])
    (folder / "runs" / "hybrid-10" / "seed-2" / "result.json").unlink()
    result("lwf").save(folder / "result.json")
    report = make_report([tmp_path])
    assert [part.section.title[:5] for part in report.parts] == ["alpha", "made:"]
    assert report.notes == [f"The suite alpha in {folder} is not complete: 1 of 12 runs have no result."]
    assert report.parts[0].section.groups[-1].seeds == (0, 1)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema": 1}', '{"schema": 2, "suite": "a", "dataset": "b"}'])
def test_a_damaged_suite_leaves_its_results(content: str, tmp_path: Path) -> None:
    folder = save_suite(tmp_path, [1, 10])
    (folder / "suite.json").write_text(content)
    report = make_report([folder])
    assert report.parts[0].section.suite is None and len(report.parts[0].section.groups) == 4
    assert len(report.notes) == 1 and str(folder / "suite.json") in report.notes[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"curve": "high"},
        {"curve": [0.9, float("nan"), 0.5]},
        {"curve": [90, 70, 50]},
        {"curve": []},
        {"classes_seen": [2, 4]},
        {"classes_seen": [4, 2, 6]},
        {"accuracy_matrix": [[0.9], [0.7], [0.5]]},
        {"omega": [1.0]},
        {"seconds": {"train": "long"}},
        {"settings": None},
        {"memory_bytes": -1},
        {"schema": 99},
        {"memory_bytes": 2**63},
        {"memory_bytes": 10**400},
        {"average_incremental_accuracy": 7.5},
        {"average_incremental_accuracy_top5": -0.5},
    ],
    ids=lambda damage: str(damage)[:50],
)
def test_a_damaged_result_is_named_and_the_others_go_on(damage: dict[str, object], tmp_path: Path) -> None:
    save(tmp_path, result("lwf"))
    bad = tmp_path / "bad" / "result.json"
    bad.parent.mkdir()
    bad.write_text(json.dumps({**result().to_json(), **damage}))
    report = make_report([tmp_path])
    assert [group.label for part in report.parts for group in part.section.groups] == ["lwf"]
    assert len(report.notes) == 1 and str(bad) in report.notes[0]
    assert str(bad) in report.html()


def test_a_result_may_have_no_omega_of_the_previous_task(tmp_path: Path) -> None:
    save(tmp_path, result(omega_previous=[None, None, None]))
    assert "ω of the previous task" not in said(make_report([tmp_path]))


def test_a_file_that_nests_without_end_is_left_out(tmp_path: Path) -> None:
    save(tmp_path, result("lwf"))
    (tmp_path / "result.json").write_text("[" * 100_000)
    assert "Left out" in make_report([tmp_path]).notes[0]


def test_nothing_to_report_on_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No result was found in"):
        make_report([tmp_path])
    with pytest.raises(DataError, match="There is no file or folder"):
        make_report([tmp_path / "nowhere"])


def test_the_same_file_named_twice_counts_once(tmp_path: Path) -> None:
    save(tmp_path, result())
    report = make_report([tmp_path, tmp_path / "run-000", tmp_path / "run-000" / "result.json"])
    assert report.parts[0].section.groups[0].seeds == (0,) and report.notes == []


# What is said.


def test_the_best_is_told_with_the_paired_interval(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7, 0.9]) + seeds("lwf", [0.7, 0.65, 0.75]) + seeds("finetune", [0.4, 0.4, 0.4])
    runs += seeds("joint", [0.95, 0.95, 0.95]) + seeds("icarl", [0.5, 0.5, 0.5])
    words = said(make_report([save(tmp_path, *runs)]))
    # differences .1, .05, .15: mean .1, deviation .05, t(.975, 2) = 4.3027, half width .1242
    assert (
        "features has the highest average incremental accuracy of 3: .800 (mean over seeds 0–2). Next is lwf with "
        ".700; the difference is .100 (95 % interval −.024 to .224, ahead on 3 of 3 seeds): too uncertain to call one "
        "of them better." in words
    )
    assert "Training on everything at once (joint) reaches .950 on the same seeds, against .800 of features." in words
    assert (
        "features keeps 12.2 MB of old classes; icarl 5.86 MB (2.1 times less) and joint 146.5 MB (12 times as much)."
        in words
    )


def test_drift_is_told_apart_from_what_the_network_cannot_do(tmp_path: Path) -> None:
    drifted = {"ceiling_curve": [0.9, 0.75], "drift_gap": [0.0, 0.15]}
    words = said(make_report([save(tmp_path, result("features", 0, [0.9, 0.6], **drifted))]))
    assert "features reaches an average incremental accuracy of .750 (seed 0 alone)." in words
    assert (
        "After the last task features is right on .600. Had no stored vector drifted it would be right on .750: of "
        "what it misses, .150 is lost to drift, and .250 because the network does not tell the classes apart." in words
    )


def test_what_adaptation_is_worth_is_told_of_the_same_settings(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7]) + seeds("features-unadapted", [0.6, 0.5]) + seeds("lwf", [0.4, 0.4])
    words = said(make_report([save(tmp_path / "same", *runs)]))
    assert "Adapting the stored vectors, against leaving them as they are: the difference is .200 (95 %" in words
    others = [
        Result(**{**each.to_json(), "settings": {"learning_rate": 9}}) if "un" in each.method else each for each in runs
    ]
    assert "Adapting" not in said(make_report([save(tmp_path / "other", *others)]))


def test_means_over_different_seeds_are_never_compared(tmp_path: Path) -> None:
    runs = seeds("features", [0.5, 0.5, 0.5]) + seeds("lwf", [0.4, 0.4, 0.4]) + seeds("icarl", [0.99], first=7)
    report = make_report([save(tmp_path, *runs)])
    words, table = said(report), report.parts[0].results
    assert "features has" not in words  # two are left to compare
    assert "features reaches an average incremental accuracy of .500, lwf .400 (mean over seeds 0–2)" in words
    assert "Not compared, for want of the same seeds: icarl (seed 7)." in words
    assert table.best == frozenset()
    assert any("different seeds" in note and "must not be compared" in note for note in table.notes)
    assert [row[0] for row in table.rows] == ["features", "icarl", "lwf"]  # by name: an order by means would compare


def test_groups_of_many_seeds_and_few_are_compared_on_those_they_share(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.6, 0.1, 0.1, 0.1]) + seeds("lwf", [0.4, 0.4])
    words = said(make_report([save(tmp_path, *runs)]))
    assert "features reaches an average incremental accuracy of .700, lwf .400 (mean over seeds 0, 1)" in words


def test_groups_that_overlap_in_part_are_compared_there(tmp_path: Path) -> None:
    runs = seeds("features", [0.9, 0.6]) + seeds("lwf", [0.4, 0.4], first=1)
    words = said(make_report([save(tmp_path, *runs)]))
    assert "features reaches an average incremental accuracy of .600, lwf .400 (seed 1 alone)" in words


def test_groups_without_a_common_seed_have_no_best(tmp_path: Path) -> None:
    words = said(make_report([save(tmp_path, result("features", 0), result("lwf", 1))]))
    assert "none of them is called the best" in words or "Not compared" in words
    assert "the difference" not in words


def test_one_seed_gives_no_interval(tmp_path: Path) -> None:
    words = said(make_report([save(tmp_path, *seeds("features", [0.8]), *seeds("lwf", [0.7]))]))
    assert "the difference is .100 on one seed, which gives no interval" in words and "95 %" not in words


def test_those_that_are_alike_are_named_together(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7]) + seeds("icarl", [0.7, 0.8]) + seeds("lwf", [0.4, 0.4])
    words = said(make_report([save(tmp_path, *runs)]))
    assert (
        "features and icarl have the highest average incremental accuracy of 3, .750 (mean over seeds 0, 1)." in words
    )


# Tables.


def test_the_best_values_are_marked_among_those_that_compete(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7]) + seeds("lwf", [0.6, 0.5], forgetting=0.1) + seeds("joint", [0.9, 0.9])
    table = make_report([save(tmp_path, *runs)]).parts[0].results
    marked = {(table.rows[row][0], table.columns[column]) for row, column in table.best}
    assert marked == {
        ("features", "average accuracy"),
        ("features", "after the last task"),
        ("lwf", "forgetting"),
        ("lwf", "kept, MB"),
    }


def test_seconds_are_not_compared_where_training_was_shared(tmp_path: Path) -> None:
    runs = [result("features"), result("lwf", seconds={"measure": 1.0}), result("icarl", seconds={"train": 5.0})]
    table = make_report([save(tmp_path, *runs)]).parts[0].results
    assert "seconds" not in {table.columns[column] for _, column in table.best}
    assert any("shared with other runs: lwf." in note for note in table.notes)


def test_numbers_have_the_house_style() -> None:
    assert [accuracy(each) for each in (0.4584, 1.0, -0.0123, -0.00001, 0.0)] == [
        ".458",
        "1.000",
        "−.012",
        ".000",
        ".000",
    ]
    assert [megabytes(each * 2**20) for each in (0, 6.1035, 48.83, 375, 3750, 0.2441, 0.004)] == [
        *("0", "6.10", "48.8", "375.0", "3,750.0", "0.24", "0.004")
    ]
    assert [seconds(each) for each in (0.84, 14.2, 1135.2)] == ["0.8", "14.2", "1,135"]
    assert integers([4, 0, 1, 2, 7, 8]) == "0–2, 4, 7, 8"
    assert [listed(each) for each in (["a"], ["a", "b"], ["a", "b", "c"])] == ["a", "a and b", "a, b and c"]
    assert listed(["a, b = 1", "a, b = 2", "c"]) == "a, b = 1; a, b = 2; and c"


def test_csv_has_numbers_in_full_and_latex_the_rules_of_booktabs(tmp_path: Path) -> None:
    table = make_report([save(tmp_path, *seeds("features", [0.8, 0.7]), *seeds("lwf", [0.6, 0.5]))]).parts[0].results
    rows = [line.split(",") for line in as_csv(table).splitlines()]
    assert rows[0][1] == "average accuracy"
    assert float(rows[1][1]) == pytest.approx(0.75) and float(rows[1][2]) == pytest.approx(0.0707, abs=1e-4)
    latex = as_latex(table)
    assert r"\toprule" in latex and r"\bottomrule" in latex
    assert r"features & $\mathbf{.750} \pm .071$ &" in latex and r"lwf & $.550 \pm .071$ &" in latex
    assert cell_text(table.rows[0][1]) == ".750 ± .071"


def test_settings_are_split_into_those_that_differ_and_those_in_common(tmp_path: Path) -> None:
    part = make_report(
        [save(tmp_path, result("features"), result("lwf", settings={"seed": 0, "learning_rate": 0.2}))]
    ).parts[0]
    assert part.apart is not None
    assert part.apart.rows == (("adapter", "mlp", None),)
    assert part.common.rows == (("learning_rate", "0.2"),)


def test_what_was_no_setting_yet_is_shown_as_what_was_done_and_objectives_as_they_are_set(tmp_path: Path) -> None:
    old = result("features", settings={"seed": 0, "objective": "Rebalancing"})
    new = result("hybrid", settings={"seed": 0, "objective": "Distillation", "precision": "bfloat16"})
    apart = make_report([save(tmp_path, old, new)]).parts[0].apart
    assert apart is not None
    shown = {row[0]: set(row[1:]) for row in apart.rows}
    assert shown == {"objective": {"lucir", "distillation"}, "precision": {"float32", "bfloat16"}}


def test_settings_of_many_groups_are_shown_five_at_a_time(tmp_path: Path) -> None:
    runs = [result("features", settings={"seed": 0, "learning_rate": number}) for number in range(7)]
    report = make_report([save(tmp_path, *runs)])
    apart = report.parts[0].apart
    assert apart is not None
    blocks = in_blocks(apart)
    assert [len(block.columns) for block in blocks] == [6, 3]
    assert blocks[1].columns == ("setting", *apart.columns[6:]) and blocks[1].rows[0][1:] == apart.rows[0][6:]
    assert report.html().count('aria-label="Settings in which groups differ"') == 2


def test_a_bound_of_other_seeds_does_not_keep_the_best_from_being_marked(tmp_path: Path) -> None:
    runs = seeds("features", [0.8, 0.7]) + seeds("lwf", [0.6, 0.5]) + seeds("joint", [0.9])
    table = make_report([save(tmp_path, *runs)]).parts[0].results
    assert table.best
    assert any("A bound was run with other seeds" in note for note in table.notes)
    assert not any("no best values are marked" in note for note in table.notes)


def test_an_environment_that_differs_is_counted(tmp_path: Path) -> None:
    runs = [result(seed=seed, environment={"torch": "2" if seed else "1", "device": "cpu"}) for seed in range(3)]
    assert make_report([save(tmp_path, *runs)]).environment.rows == (
        ("torch", "1 (1 results); 2 (2 results)"),
        ("device", "cpu"),
    )


# How to run it again.


def test_commands_name_the_stream_the_seeds_and_every_setting(tmp_path: Path) -> None:
    settings = {
        **{"network": "auto", "milestones": [0.5, 0.75], "weights": None, "flip": False, "device": "auto"},
        **{"objective": "Rebalancing", "odd": "a b; rm -rf /"},
    }
    split = {"first_task": 4, "class_order": "1993", "validation": 0.1}
    runs = [
        result("lwf", seed, dataset="digits", split=split, settings={**settings, "seed": seed}) for seed in (0, 1, 5)
    ]
    section = make_report([save(tmp_path, *runs)]).parts[0].section
    first, second = (" ".join(each.split()).replace("\\ ", "") for each in commands(section, section.groups[0]))
    assert first == (
        "engram run lwf --dataset digits --classes-per-task 2 --tasks 3 --first-task 4 --class-order 1993 "
        "--validation 0.1 --set network=auto --set milestones=0.5,0.75 --set weights=none --set flip=False "
        "--set objective=lucir --set 'odd=a b; rm -rf /' --seed 0 --seeds 2"
    )
    assert second.endswith("--seed 5")


def test_what_was_no_setting_yet_is_not_done_again_though_the_method_does_it_today(tmp_path: Path) -> None:
    runs = [result("engram", 0, dataset="digits", settings={"codec": "int8", "seed": 0})]
    section = make_report([save(tmp_path, *runs)]).parts[0].section
    (command,) = commands(section, section.groups[0])
    for flag in ("--set codec=int8", "--set weight_averaging=0.0", "--set weight_averaging_from=0.0"):
        assert flag in " ".join(command.split())


def test_the_command_loads_the_data_as_they_were_loaded_and_where_that_is_unknown_there_is_none(tmp_path: Path) -> None:
    split = {"first_task": None, "class_order": "seed", "validation": 0.0, "data": "ab"}
    source = {"dataset": "folder", "data": "my pictures", "image_size": 64, "fit": "pad", "--odd": "x"}
    runs = [result(dataset="my pictures", split={**split, "source": source}), result(dataset="made in Python")]
    unknown, known = make_report([save(tmp_path, *runs)]).parts
    (command,) = commands(known.section, known.section.groups[0])
    loading = "engram run features --dataset folder --data 'my pictures' --image-size 64 --fit pad --classes-per-task 2"
    assert " ".join(command.split()).replace("\\ ", "").startswith(loading)
    assert "odd" not in command
    assert commands(unknown.section, unknown.section.groups[0]) == []
    assert "Where its data came from was not recorded" in make_report([tmp_path]).html()


def test_a_task_may_bring_known_classes_alone(tmp_path: Path) -> None:
    report = make_report([save(tmp_path, result(classes_seen=[2, 4, 4]))])
    assert [part.section.title for part in report.parts] == ["made: 3 tasks, 4 classes"] and not report.notes
    for wrong in ([0, 2, 4], [2, 4, 3]):
        with pytest.raises(DataError, match="No result"):
            make_report([save(tmp_path / str(wrong), result(classes_seen=wrong))])


def test_what_is_said_is_of_the_seeds_that_are_named(tmp_path: Path) -> None:
    runs = [*seeds("features", [0.9, 0.9, 0.1, 0.1, 0.1]), *seeds("hybrid", [0.8, 0.8, 0.7, 0.7, 0.7])]
    others = [each for method in ("lwf", "icarl", "eeil", "bic") for each in seeds(method, [0.5, 0.5])]
    words = said(make_report([save(tmp_path, *runs, *others)]))
    assert "features has the highest average incremental accuracy of 6: .900 (mean over seeds 0, 1)" in words
    assert "the difference is .100 (95 % interval .100 to .100, ahead on 2 of 2 seeds)" in words
    assert "After the last task features is right on .900" in words


def test_where_it_was_computed_makes_no_group_of_its_own(tmp_path: Path) -> None:
    runs = [result(seed=seed, settings={"seed": seed, "device": device}) for seed, device in enumerate(("auto", "cpu"))]
    (part,) = make_report([save(tmp_path, *runs)]).parts
    assert [group.seeds for group in part.section.groups] == [(0, 1)]


def test_seconds_without_all_of_the_training_are_not_the_best(tmp_path: Path) -> None:
    taken = result("hybrid", seconds={"train": 5.0}, networks_taken=1)
    page = make_report([save(tmp_path, result(networks_taken=0), taken)]).html()
    assert "Without the time for training, or some of it, that was shared with other runs: hybrid." in page
    assert not make_report([tmp_path]).parts[0].section.groups[1].trained


# How it looks.


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_method_has_a_look_of_its_own() -> None:
    assert set(REAL_METHODS) <= set(KNOWN) and set(METHODS) <= set(KNOWN)
    looks = [(style.colour, style.marker, style.dash, style.hollow) for style in KNOWN.values()]
    assert len(set(looks)) == len(looks)


def test_a_method_looks_the_same_whatever_stands_beside_it() -> None:
    def look(*names: str) -> Style:
        return base_styles([Group(name, name, None, (result(name),)) for name in names])["lwf"]

    assert look("lwf", "features") == look("another", "lwf", "mine") == KNOWN["lwf"]


def test_a_series_of_another_name_has_the_colour_of_its_method() -> None:
    group = Group("lwf, M = 5", "lwf, M = 5", None, (result("lwf"),))
    assert group_styles([group], base_styles([group])) == [KNOWN["lwf"]]


@pytest.mark.parametrize("colour", HUES.values(), ids=HUES)
def test_colours_can_be_seen_on_light_and_dark_paper(colour: Colour) -> None:
    assert contrast(colour.light, PAPER.light) >= 3 and contrast(colour.dark, PAPER.dark) >= 3


def test_shades_of_a_series_can_be_seen_too(tmp_path: Path) -> None:
    section = make_report([save_suite(tmp_path, [0.1, 1, 10, 100])]).parts[0].section
    styles = group_styles(section.groups, base_styles(section.groups))
    assert len({style.colour for style in styles}) == 8
    assert all(contrast(style.colour.light, PAPER.light) >= 2.5 for style in styles)
    assert all(contrast(style.colour.dark, PAPER.dark) >= 3 for style in styles)


def test_many_variants_of_one_method_have_hues_that_no_other_method_has() -> None:
    groups = [Group(f"variant {number}", f"variant {number}", None, (result("lucir"),)) for number in range(7)]
    groups.append(Group("features", "features", None, (result("features"),)))
    *variants, other = group_styles(groups, base_styles(groups))
    assert len({style.colour for style in variants}) == 7
    assert {style.colour for style in variants} <= set(HUES.values()) - {other.colour}


@pytest.mark.parametrize("colour", [INK, MUTED])
def test_text_can_be_read_on_light_and_dark_paper(colour: Colour) -> None:
    assert contrast(colour.light, PAPER.light) >= 4.5 and contrast(colour.dark, PAPER.dark) >= 4.5


# The page.


class Outline(HTMLParser):
    """Elements of a page, their attributes, and the headings' levels."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def all(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


@pytest.fixture(scope="module")
def page() -> str:
    return make_report([COMMITTED]).html()


def test_the_page_reaches_for_nothing_outside_itself(page: str) -> None:
    assert not re.findall(r"https?://|//[a-z]+\.|@import|@font-face|javascript:", page)
    assert not re.findall(r"""url\((?!#)""", page)
    outline = Outline(page)
    assert not outline.all("script", "link", "iframe", "img", "object", "base", "form")
    assert not [value for _, attributes in outline.elements for name, value in attributes.items() if name == "src"]
    links = [attributes["href"] for _, attributes in outline.elements if "href" in attributes]
    assert links and all(link is not None and link.startswith(("#", "data:image/png;base64,")) for link in links)
    policy = next(each["content"] for each in outline.all("meta") if each.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_ids_are_unique_and_every_reference_finds_one(page: str) -> None:
    outline = Outline(page)
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert {one or other for one, other in wanted} <= set(ids)
    for _, attributes in outline.elements:
        assert set((attributes.get("aria-labelledby") or "").split()) <= set(ids)


def test_headings_are_in_order_and_tables_have_scopes(page: str) -> None:
    outline = Outline(page)
    levels = [int(tag[1]) for tag, _ in outline.elements if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert all(each.get("scope") in ("row", "col") for each in outline.all("th"))
    assert outline.all("html")[0]["lang"] == "en" and len(outline.all("main")) == 1


def test_every_figure_has_a_name_a_caption_and_a_table(page: str) -> None:
    figures = re.findall(r"<figure.*?</figure>", page, re.DOTALL)
    assert len(figures) >= 15
    for figure in figures:
        assert re.search(r'<svg[^>]* role="img"', figure) and "<title" in figure and "<desc" in figure
        assert "<figcaption>" in figure and "<details>" in figure and "<table>" in figure


def test_every_colour_of_a_drawing_follows_the_page(page: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    defined = set(re.findall(r"--c[0-9a-f]{6}(?=:)", page))
    assert set(re.findall(r"var\((--c[0-9a-f]{6})\)", drawings)) <= defined
    texts = re.findall(r"<text[^>]*>", drawings)
    assert texts and all("fill: var(--c" in each for each in texts)


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    folder = save(tmp_path, *every_method(tasks=3, seeds=2)[:6])
    assert make_report([folder]).html() == make_report([folder]).html()


def test_the_committed_results_are_told_as_numpy_has_them() -> None:
    folders = [COMMITTED / "digits" / name for name in ("features", "features-unadapted", "lwf")]
    scores = [
        [json.loads(file.read_text())["average_incremental_accuracy"] for file in sorted(folder.rglob("result.json"))]
        for folder in folders
    ]
    report = make_report(folders)
    rows = {str(row[0]): cell_text(row[1]) for row in report.parts[0].results.rows}
    for folder, values in zip(folders, scores, strict=True):
        assert rows[folder.name] == f"{np.mean(values):.3f} ± {np.std(values, ddof=1):.3f}".replace("0.", ".")
    interval = stats.ttest_rel(scores[0], scores[1]).confidence_interval(0.95)
    worth = f"{np.mean(scores[0]) - np.mean(scores[1]):.3f} (95 % interval {interval.low:.3f} to {interval.high:.3f},"
    assert f"leaving them as they are: the difference is {worth.replace('0.', '.')}" in said(report)


def test_json_has_the_numbers_and_the_words(tmp_path: Path) -> None:
    plain = make_report([save(tmp_path, *seeds("features", [0.8, 0.7]), *seeds("lwf", [0.6, 0.5]))]).to_json()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    first = plain["sections"][0]["groups"][0]
    assert (first["label"], first["seeds"]) == ("features", [0, 1])
    assert first["average"] == pytest.approx({"mean": 0.75, "deviation": 0.0707}, abs=1e-4)
    assert "features reaches" in plain["sections"][0]["findings"][0]


# The room.


def test_the_report_imports_nothing_that_learns() -> None:
    """The rest of the room does; so this looks at the files of the report alone."""
    assert package.__file__ is not None
    files = [*Path(package.__file__).parent.glob("*.py"), Path(engram.__path__[0]) / "experiments" / "aggregate.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [each.name for each in node.names] if isinstance(node, ast.Import) else []
            heavy = ("torch", "sklearn", "engram.methods", "engram.network", "engram.features", "engram.data")
            assert not [name for name in names if name.startswith(heavy)], file
            assert "pyplot" not in " ".join(names), file
