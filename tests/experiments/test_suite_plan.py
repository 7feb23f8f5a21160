"""The plan of a suite: folders named after what is run, shared trainings, names and settings that are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import blobs

from engram.data import Dataset
from engram.errors import UsageError
from engram.experiments.suite_plan import SuiteOptions, SuiteRun, plan_suite, runs_of, scheduled, variants
from engram.experiments.suites import SUITES, Variant

OPTIONS = SuiteOptions(suite="balance", dataset="arrays", out=Path("out"))


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Ten classes: five tasks of two."""
    return blobs(classes=10)


def run(
    dataset: Dataset,
    method: str = "features",
    settings: Mapping[str, Any] | None = None,
    *,
    options: SuiteOptions = OPTIONS,
    size: int | None = None,
) -> SuiteRun:
    """The only run of a new variant."""
    variant = Variant(label="one", method=method, settings=settings or {}, series="one", classes_per_task=size)
    (found,) = runs_of(variant, options, dataset)
    return found


def all_runs(options: SuiteOptions, dataset: Dataset) -> list[SuiteRun]:
    return [each for variant in variants(options, dataset) for each in runs_of(variant, options, dataset)]


# Folders


def test_the_folder_is_the_same_whether_a_value_is_given_or_is_the_default(data: Dataset) -> None:
    plain = run(data).folder
    same = ({"alpha": 100.0}, {"alpha": "100"}, {"epochs": 10}, {"adapter_width": "none"}, {"C": 1}, {"network": "mlp"})
    for settings in same:
        assert run(data, settings=settings).folder == plain
        assert run(data, options=replace(OPTIONS, settings=settings)).folder == plain
    assert run(data, size=2).folder == plain
    short = {"epochs": 10, "schedule": "one-cycle"}
    assert run(data, options=replace(OPTIONS, preset="paper", settings=short)).folder == plain
    assert run(data, options=replace(OPTIONS, suite="table1")).folder == plain
    assert run(data, settings={"device": "cpu"}).folder == plain


def test_the_folder_is_another_for_another_setting_method_split_or_number_of_tasks(data: Dataset) -> None:
    found = [
        run(data),
        *(
            run(data, settings={name: value})
            for name, value in {"alpha": 10, "epochs": 9, "C": 2, "learning_rate": 1}.items()
        ),
        run(data, options=replace(OPTIONS, settings={"classifier": "ridge"})),
        run(data, options=replace(OPTIONS, preset="paper")),
        run(data, options=replace(OPTIONS, suite="alpha")),  # on the validation split
        run(data, options=replace(OPTIONS, tasks=2)),
        run(data, options=replace(OPTIONS, tasks=3)),
        run(data, size=5),
        run(data, "gamma-lwf"),
        run(data, "features-unadapted"),
        run(replace(data, name="others")),
        run(replace(data, test=data.train)),  # other data of the same name
    ]
    folders = [each.folder for each in found]
    assert len(set(folders)) == len(folders)


def test_methods_with_equal_settings_have_different_folders(data: Dataset) -> None:
    unadapted, identity = run(data, "features-unadapted"), run(data, "features", {"adapter": "identity"})
    assert unadapted.plan.learner(data).settings() == identity.plan.learner(data).settings()
    assert unadapted.folder != identity.folder


def test_a_published_data_set_is_identified_by_its_name(data: Dataset) -> None:
    known = replace(data, published=True)
    assert (known.identity, run(known).folder) == (None, run(replace(known, test=data.train)).folder)
    assert run(known).folder != run(data).folder


def test_the_seed_is_the_last_part_of_the_folder(data: Dataset) -> None:
    (variant, _) = variants(OPTIONS, data)
    found = runs_of(variant, replace(OPTIONS, seeds=3), data)
    assert [each.plan.seed for each in found] == [0, 1, 2]
    assert [each.plan.seed for each in runs_of(variant, replace(OPTIONS, seeds=2, seed=100), data)] == [100, 101]
    assert [Path(each.folder).name for each in found] == ["seed-0", "seed-1", "seed-2"]
    (parent,) = {Path(each.folder).parent for each in found}
    assert parent.parent == OPTIONS.folder / "runs" and parent.name.startswith("features-")
    assert len({each.training for each in found}) == 3  # other weights, another class order


def test_suites_share_the_folder_of_a_run_that_both_need(data: Dataset) -> None:
    def folders(suite: str) -> set[Path]:
        return {each.folder for each in all_runs(replace(OPTIONS, suite=suite), data)}

    usual = folders("gamma") & folders("depth")  # γ = 0.05 is the usual one, and so are two hidden layers
    assert len(usual) == 1
    assert not folders("alpha") & usual  # α = 100 is, but not its adapters' start
    assert len(folders("memory") & folders("points")) >= 4
    assert not folders("balance") & folders("alpha")


# Sharing


def test_all_alphas_share_one_training(data: Dataset) -> None:
    found = all_runs(replace(OPTIONS, suite="alpha"), data)
    assert len(found) == 5
    assert len({each.training for each in found}) == 1


def test_methods_that_differ_after_training_share_it_at_one_gamma_and_not_at_another(data: Dataset) -> None:
    def shares(gamma: float) -> set[str]:
        return {
            run(data, method, {"feature_distillation": gamma}).training
            for method in ("features", "gamma-lwf", "features-unadapted")
        }

    assert len(shares(0.05)) == len(shares(0.1)) == 1
    assert shares(0.05) != shares(0.1)
    gammas = all_runs(replace(OPTIONS, suite="gamma"), data)
    by_method = [[each.training for each in gammas if each.plan.method == name] for name in ("features", "gamma-lwf")]
    assert by_method[0] == by_method[1] and len(set(by_method[0])) == 5


def test_runs_share_a_training_only_if_they_replay_the_same_images(data: Dataset) -> None:
    def hybrid(**settings: int) -> str:
        return run(data, "hybrid", settings).training

    one = hybrid(images_per_class=7, features_per_class=9)
    assert hybrid(images_per_class=7, features_per_class=12) == one
    assert run(data, "gamma-icarl", {"images_per_class": 7}).training == one
    assert run(data, "gamma-icarl", {"images_per_class": 8}).training != one
    assert run(data, "gamma-icarl", {"images_total": 70}).training != one
    assert hybrid(images_per_class=8, features_per_class=9) != one
    assert run(data, "features", {"features_per_class": 9}).training != one
    assert run(data, "gamma-icarl").training == hybrid(images_per_class=20)  # 20 is the default


def test_joint_training_shares_with_none(data: Dataset) -> None:
    joint, finetune = run(data, "joint"), run(data, "finetune")
    one, other = joint.plan.learner(data), finetune.plan.learner(data)
    assert one.training_settings(1) == other.training_settings(1)
    assert joint.training != finetune.training


def test_another_split_or_number_of_tasks_is_another_training(data: Dataset) -> None:
    choices = [OPTIONS, replace(OPTIONS, suite="alpha"), replace(OPTIONS, tasks=2)]
    found = [*(run(data, options=options) for options in choices), run(data, size=5), run(replace(data, name="others"))]
    assert len({each.training for each in found}) == len(found)


# The order of runs


@pytest.mark.parametrize("suite", SUITES)
def test_the_schedule_has_each_run_once_and_the_first_of_each_training_before_any_second(
    suite: str, data: Dataset
) -> None:
    runs = all_runs(replace(OPTIONS, suite=suite, preset="paper", seeds=2), data)
    twice = [*runs, *runs[::2]]
    found = scheduled(twice)
    assert sorted(each.folder for each in found) == sorted({each.folder for each in runs})
    met: dict[str, int] = {}
    turns = []
    for each in found:
        turns.append(met.get(each.training, 0))
        met[each.training] = turns[-1] + 1
    assert turns == sorted(turns)
    assert [each.folder for each in scheduled(found)] == [each.folder for each in found]


def test_runs_that_share_nothing_stay_in_their_order(data: Dataset) -> None:
    runs = [run(data, settings={"learning_rate": learning_rate}) for learning_rate in (0.5, 0.1, 0.3)]
    assert scheduled(runs) == runs


# The content of a suite


def test_the_file_of_a_suite_lists_its_variants_and_runs(data: Dataset, tmp_path: Path) -> None:
    plan = plan_suite(replace(OPTIONS, suite="gamma", seeds=2, preset="paper", out=tmp_path), data)
    plan.start("engram suite gamma", resume=False)
    written = json.loads((tmp_path / "suite-gamma.json").read_text(encoding="utf-8"))
    rows = written.pop("variants")
    suite = SUITES["gamma"]
    assert written == {
        **{"schema": 1, "suite": "gamma", "dataset": "arrays", "preset": "paper", "command": "engram suite gamma"},
        **{"summary": suite.summary, "finding": suite.finding, "varies": "γ"},
    }
    assert len(rows) == 10
    for row, planned in zip(rows, plan.rows, strict=True):
        variant = planned.variant
        assert (row["label"], row["series"], row["value"]) == (variant.label, variant.series, variant.value)
        assert [tmp_path / run for run in row["runs"]] == [each.folder for each in planned.runs]
        assert all(not Path(run).is_absolute() and ".." not in Path(run).parts for run in row["runs"])
    assert [Path(run).name for run in rows[0]["runs"]] == ["seed-0", "seed-1"]


def test_only_the_chosen_methods_are_run(data: Dataset) -> None:
    found = variants(replace(OPTIONS, suite="table1", methods=("bic", "lwf")), data)
    assert [variant.method for variant in found] == ["lwf", "bic"]
    found = variants(replace(OPTIONS, suite="gamma", methods=("gamma-lwf",)), data)
    assert [variant.value for variant in found] == [0, 0.01, 0.05, 0.1, 1]


def test_a_method_that_is_not_in_the_suite_is_refused_with_the_nearest(data: Dataset) -> None:
    with pytest.raises(UsageError, match=r"'gamma'.*'lwf'.*'gamma-lwf'"):
        variants(replace(OPTIONS, suite="gamma", methods=("features", "lwf")), data)
    with pytest.raises(UsageError, match=r"'gamma'.*'bic'.*features, gamma-lwf"):
        variants(replace(OPTIONS, suite="gamma", methods=("bic",)), data)


def test_names_that_do_not_exist_are_refused_before_any_data_is_read() -> None:
    with pytest.raises(UsageError, match=r"'alhpa'.*'alpha'.*engram suites"):
        replace(OPTIONS, suite="alhpa")
    with pytest.raises(UsageError, match=r"'lfw'.*'lwf'.*engram methods"):
        replace(OPTIONS, suite="table1", methods=("bic", "lfw"))


def test_a_setting_that_a_method_does_not_have_is_refused(data: Dataset) -> None:
    with pytest.raises(UsageError, match=r"'balance'.*'alhpa'.*'alpha'"):
        all_runs(replace(OPTIONS, settings={"alhpa": 1}), data)


@pytest.mark.parametrize(
    ("suite", "setting", "value"),
    [
        ("alpha", "epochs", 3),
        ("alpha", "features_per_class", 8),
        ("alpha", "alpha", 5.0),
        ("balance", "balanced", True),
    ],
)
def test_a_setting_for_every_run_is_in_every_run_or_is_refused(
    suite: str, setting: str, value: object, data: Dataset
) -> None:
    try:
        runs = all_runs(replace(OPTIONS, suite=suite, settings={setting: value}), data)
    except UsageError as error:
        assert setting in str(error)  # because the suite chooses it itself
        return
    assert [each.plan.learner(data).settings()[setting] for each in runs] == [value] * len(runs)


def test_giving_the_number_of_all_tasks_is_the_same_run(data: Dataset) -> None:
    number = len(all_runs(OPTIONS, data)[0].plan.stream(data))
    given = all_runs(replace(OPTIONS, tasks=number), data)
    assert [run.folder for run in given] == [run.folder for run in all_runs(OPTIONS, data)]


def test_a_setting_goes_to_the_methods_that_have_it_and_one_that_none_has_is_refused(data: Dataset) -> None:
    runs = all_runs(replace(OPTIONS, suite="gamma", settings={"adapter_steps": 7}), data)
    found = {run.plan.method: run.plan.learner(data).settings().get("adapter_steps") for run in runs}
    assert found == {"features": 7, "gamma-lwf": None}
    with pytest.raises(UsageError, match=r"'gamma'.*'adapter_stpes'"):
        all_runs(replace(OPTIONS, suite="gamma", settings={"adapter_stpes": 7}), data)


def test_a_suite_that_has_nothing_to_vary_on_one_class_is_refused(data: Dataset) -> None:
    alone = data.train.of_classes(data.train.classes()[:1])
    with pytest.raises(UsageError, match="'memory'"):
        all_runs(replace(OPTIONS, suite="memory"), Dataset("alone", alone, alone, data.class_names))
