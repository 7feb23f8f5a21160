"""A suite as jobs: whose folders are named by what is run, and which train the same networks."""

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
from engram.experiments.jobs import Job, SuiteOptions, check, jobs_of, leaders_first, variants, write_suite
from engram.experiments.suites import SUITES, Variant

ORDER = SuiteOptions(suite="balance", dataset="arrays")


@pytest.fixture(scope="module")
def data() -> Dataset:
    """Ten classes: five tasks of two."""
    return blobs(classes=10)


def job(
    dataset: Dataset,
    method: str = "features",
    settings: Mapping[str, Any] | None = None,
    *,
    order: SuiteOptions = ORDER,
    size: int | None = None,
) -> Job:
    """The one run of a variant made for the occasion."""
    variant = Variant(label="one", method=method, settings=settings or {}, series="one", classes_per_task=size)
    (found,) = jobs_of(variant, order, dataset)
    return found


def all_jobs(order: SuiteOptions, dataset: Dataset) -> list[Job]:
    return [each for variant in variants(order, dataset) for each in jobs_of(variant, order, dataset)]


# Folders


def test_the_folder_is_the_same_whether_a_value_is_given_or_is_the_default(data: Dataset) -> None:
    plain = job(data).folder
    for settings in ({"alpha": 100.0}, {"alpha": "100"}, {"epochs": 10}, {"adapter_width": "none"}, {"C": 1}):
        assert job(data, settings=settings).folder == plain
        assert job(data, order=replace(ORDER, settings=settings)).folder == plain
    assert job(data, size=2).folder == plain
    short = {"epochs": 10, "schedule": "one-cycle"}
    assert job(data, order=replace(ORDER, preset="paper", settings=short)).folder == plain
    assert job(data, order=replace(ORDER, suite="table1")).folder == plain
    assert job(data, settings={"device": "cpu"}).folder == plain


def test_the_folder_is_another_for_another_setting_method_split_or_number_of_tasks(data: Dataset) -> None:
    found = [
        job(data),
        *(
            job(data, settings={name: value})
            for name, value in {"alpha": 10, "epochs": 9, "C": 2, "learning_rate": 1}.items()
        ),
        job(data, order=replace(ORDER, settings={"classifier": "ridge"})),
        job(data, order=replace(ORDER, preset="paper")),
        job(data, order=replace(ORDER, suite="alpha")),  # on the validation split
        job(data, order=replace(ORDER, tasks=2)),
        job(data, order=replace(ORDER, tasks=3)),
        job(data, size=5),
        job(data, "gamma-lwf"),
        job(data, "features-unadapted"),
        job(replace(data, name="others")),
        job(replace(data, test=data.train)),  # other data of the same name
    ]
    folders = [each.folder for each in found]
    assert len(set(folders)) == len(folders)


def test_a_method_told_to_be_another_still_has_a_folder_of_its_own(data: Dataset) -> None:
    unadapted, told = job(data, "features-unadapted"), job(data, "features", {"adapter": "identity"})
    assert unadapted.plan.learner(data).settings() == told.plan.learner(data).settings()
    assert unadapted.folder != told.folder


def test_of_data_that_are_published_the_name_is_enough(data: Dataset) -> None:
    known = replace(data, published=True)
    assert (known.identity, job(known).folder) == (None, job(replace(known, test=data.train)).folder)
    assert job(known).folder != job(data).folder


def test_the_seed_is_the_last_part_of_the_folder(data: Dataset) -> None:
    (variant, _) = variants(ORDER, data)
    found = jobs_of(variant, replace(ORDER, seeds=3), data)
    assert [each.plan.seed for each in found] == [0, 1, 2]
    assert [each.plan.seed for each in jobs_of(variant, replace(ORDER, seeds=2, seed=100), data)] == [100, 101]
    assert [Path(each.folder).name for each in found] == ["seed-0", "seed-1", "seed-2"]
    (parent,) = {Path(each.folder).parent for each in found}
    assert parent.parts[0] == "runs" and parent.name.startswith("features-")
    assert len({each.shares for each in found}) == 3  # other weights, another class order


def test_suites_that_meet_in_a_run_have_its_folder_in_common(data: Dataset) -> None:
    def folders(suite: str) -> set[str]:
        return {each.folder for each in all_jobs(replace(ORDER, suite=suite), data)}

    usual = folders("gamma") & folders("depth")  # γ = 0.05 is the usual one, and so are two hidden layers
    assert len(usual) == 1
    assert not folders("alpha") & usual  # α = 100 is, but not its adapters' start
    assert len(folders("memory") & folders("points")) >= 4
    assert not folders("balance") & folders("alpha")


# Sharing


def test_all_alphas_share_one_training(data: Dataset) -> None:
    found = all_jobs(replace(ORDER, suite="alpha"), data)
    assert len(found) == 5
    assert len({each.shares for each in found}) == 1


def test_methods_that_differ_after_training_share_it_at_one_gamma_and_not_at_another(data: Dataset) -> None:
    def shares(gamma: float) -> set[str]:
        return {
            job(data, method, {"feature_distillation": gamma}).shares
            for method in ("features", "gamma-lwf", "features-unadapted")
        }

    assert len(shares(0.05)) == len(shares(0.1)) == 1
    assert shares(0.05) != shares(0.1)
    gammas = all_jobs(replace(ORDER, suite="gamma"), data)
    by_method = [[each.shares for each in gammas if each.plan.method == name] for name in ("features", "gamma-lwf")]
    assert by_method[0] == by_method[1] and len(set(by_method[0])) == 5


def test_those_that_replay_the_same_images_share_and_those_that_replay_others_do_not(data: Dataset) -> None:
    def hybrid(**settings: int) -> str:
        return job(data, "hybrid", settings).shares

    one = hybrid(images_per_class=7, features_per_class=9)
    assert hybrid(images_per_class=7, features_per_class=12) == one
    assert job(data, "gamma-icarl", {"images_per_class": 7}).shares == one
    assert job(data, "gamma-icarl", {"images_per_class": 8}).shares != one
    assert job(data, "gamma-icarl", {"images_total": 70}).shares != one
    assert hybrid(images_per_class=8, features_per_class=9) != one
    assert job(data, "features", {"features_per_class": 9}).shares != one
    assert job(data, "gamma-icarl").shares == hybrid(images_per_class=20)  # 20 where nothing is said


def test_joint_training_shares_with_none(data: Dataset) -> None:
    joint, finetune = job(data, "joint"), job(data, "finetune")
    one, other = joint.plan.learner(data), finetune.plan.learner(data)
    assert one.training_settings(1) == other.training_settings(1)
    assert joint.shares != finetune.shares


def test_another_split_or_number_of_tasks_is_another_training(data: Dataset) -> None:
    orders = [ORDER, replace(ORDER, suite="alpha"), replace(ORDER, tasks=2)]
    found = [*(job(data, order=order) for order in orders), job(data, size=5), job(replace(data, name="others"))]
    assert len({each.shares for each in found}) == len(found)


# The order of jobs


@pytest.mark.parametrize("suite", SUITES)
def test_the_first_of_those_that_share_come_before_all_seconds_and_each_job_once(suite: str, data: Dataset) -> None:
    jobs = all_jobs(replace(ORDER, suite=suite, preset="paper", seeds=2), data)
    twice = [*jobs, *jobs[::2]]
    found = leaders_first(twice)
    assert sorted(each.folder for each in found) == sorted({each.folder for each in jobs})
    met: dict[str, int] = {}
    turns = []
    for each in found:
        turns.append(met.get(each.shares, 0))
        met[each.shares] = turns[-1] + 1
    assert turns == sorted(turns)
    assert [each.folder for each in leaders_first(found)] == [each.folder for each in found]


def test_jobs_that_share_nothing_stay_in_their_order(data: Dataset) -> None:
    jobs = [job(data, settings={"learning_rate": learning_rate}) for learning_rate in (0.5, 0.1, 0.3)]
    assert leaders_first(jobs) == jobs


# What a suite consists of


def test_a_suites_file_says_what_it_consists_of(data: Dataset, tmp_path: Path) -> None:
    order = replace(ORDER, suite="gamma", seeds=2, preset="paper")
    members = [(variant, jobs_of(variant, order, data)) for variant in variants(order, data)]
    path = write_suite(tmp_path, order, "engram suite gamma", members)
    assert path == tmp_path / "suite-gamma.json"
    kept = json.loads(path.read_text(encoding="utf-8"))
    rows = kept.pop("variants")
    suite = SUITES["gamma"]
    assert kept == {
        **{"schema": 1, "suite": "gamma", "dataset": "arrays", "preset": "paper", "command": "engram suite gamma"},
        **{"summary": suite.summary, "finding": suite.finding, "varies": "γ"},
    }
    assert len(rows) == 10
    for row, (variant, jobs) in zip(rows, members, strict=True):
        assert (row["label"], row["series"], row["value"]) == (variant.label, variant.series, variant.value)
        assert row["runs"] == [each.folder for each in jobs]
        assert all(not Path(run).is_absolute() and ".." not in Path(run).parts for run in row["runs"])
    assert [Path(run).name for run in rows[0]["runs"]] == ["seed-0", "seed-1"]


def test_only_the_methods_that_are_asked_for_are_run(data: Dataset) -> None:
    found = variants(replace(ORDER, suite="table1", methods=("bic", "lwf")), data)
    assert [variant.method for variant in found] == ["lwf", "bic"]
    found = variants(replace(ORDER, suite="gamma", methods=("gamma-lwf",)), data)
    assert [variant.value for variant in found] == [0, 0.01, 0.05, 0.1, 1]


def test_a_method_that_is_not_in_the_suite_is_refused_with_the_nearest(data: Dataset) -> None:
    with pytest.raises(UsageError, match=r"^The suite 'gamma' has no method 'lwf'\. Did you mean 'gamma-lwf'\?$"):
        variants(replace(ORDER, suite="gamma", methods=("features", "lwf")), data)
    with pytest.raises(UsageError, match=r"^The suite 'gamma' has no method 'bic'\. There are: features, gamma-lwf\.$"):
        variants(replace(ORDER, suite="gamma", methods=("bic",)), data)


def test_names_that_do_not_exist_are_refused_before_any_data_is_read() -> None:
    with pytest.raises(UsageError, match=r"^There is no suite 'alhpa'\. Did you mean 'alpha'\? See: engram suites$"):
        check(replace(ORDER, suite="alhpa"))
    with pytest.raises(UsageError, match=r"^There is no method 'lfw'\. Did you mean 'lwf'\? See: engram methods$"):
        check(replace(ORDER, suite="table1", methods=("bic", "lfw")))
    check(replace(ORDER, suite="table1", methods=("bic", "lwf")))


def test_a_setting_that_a_method_does_not_have_is_refused(data: Dataset) -> None:
    refusal = r"No method of the suite 'balance' has a setting 'alhpa'\. Did you mean 'alpha'\?"
    with pytest.raises(UsageError, match=refusal):
        all_jobs(replace(ORDER, settings={"alhpa": 1}), data)


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
        jobs = all_jobs(replace(ORDER, suite=suite, settings={setting: value}), data)
    except UsageError as error:
        assert setting in str(error)  # because the suite chooses it itself
        return
    assert [each.plan.learner(data).settings()[setting] for each in jobs] == [value] * len(jobs)


def test_all_tasks_asked_for_by_number_are_the_same_run(data: Dataset) -> None:
    number = len(all_jobs(ORDER, data)[0].plan.stream(data))
    asked = all_jobs(replace(ORDER, tasks=number), data)
    assert [job.folder for job in asked] == [job.folder for job in all_jobs(ORDER, data)]


def test_a_setting_goes_to_the_methods_that_have_it_and_one_that_none_has_is_refused(data: Dataset) -> None:
    jobs = all_jobs(replace(ORDER, suite="gamma", settings={"adapter_steps": 7}), data)
    found = {job.plan.method: job.plan.learner(data).settings().get("adapter_steps") for job in jobs}
    assert found == {"features": 7, "gamma-lwf": None}
    with pytest.raises(UsageError, match="No method of the suite 'gamma' has a setting 'adapter_stpes'"):
        all_jobs(replace(ORDER, suite="gamma", settings={"adapter_stpes": 7}), data)


def test_a_suite_that_has_nothing_to_vary_on_one_class_is_refused(data: Dataset) -> None:
    alone = data.train.of_classes(data.train.classes()[:1])
    with pytest.raises(UsageError, match="too few classes for the suite 'memory'"):
        all_jobs(replace(ORDER, suite="memory"), Dataset("alone", alone, alone, data.class_names))
