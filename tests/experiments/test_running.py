"""Runs: saved, resumed, refused, shared."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learners_made import OF_EACH_TRAINING, quick
from runs_made import AfterTask, comparable, final_bytes

from engram.data import Stream, load
from engram.errors import DataError, EngramError, TrainingError, UsageError
from engram.experiments import Plan, Result, run, summarise
from engram.experiments.folder import RunFolder
from engram.methods import Learner, make
from engram.network import Cache
from engram.network.registry import make_extractor
from engram.progress import Phase
from engram.storage import load_tensors, save_tensors


@pytest.fixture(scope="module")
def whole(vectors: Stream, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder and the result of a run of three tasks. Copy it to change it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, run(quick(), vectors, out=folder)


@pytest.fixture(scope="module")
def first_task(vectors: Stream, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same run of the first task alone."""
    folder = tmp_path_factory.mktemp("first-task") / "run"
    run(quick(), vectors.first(1), out=folder)
    return folder


@pytest.fixture
def begun(first_task: Path, tmp_path: Path) -> Path:
    """A copy of it that may be changed."""
    return Path(shutil.copytree(first_task, tmp_path / "begun"))


def test_a_run_leaves_its_result_and_last_checkpoint_and_nothing_else(whole: tuple[Path, Result]) -> None:
    folder, result = whole
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "checkpoint-003",
        "events.jsonl",
        "result.json",
        "run.json",
    ]
    assert Result.load(folder / "result.json") == result
    split = {"first_task": None, "class_order": "seed", "validation": 0.0}
    assert result.split == {**split, "data": result.split["data"]}


def test_the_same_seed_gives_the_same_bytes(whole: tuple[Path, Result], vectors: Stream, tmp_path: Path) -> None:
    folder, first = whole
    assert comparable(run(quick(), vectors, out=tmp_path)) == comparable(first)
    assert final_bytes(tmp_path) == final_bytes(folder)


def test_a_run_resumes_with_the_same_weights_under_another_path_but_not_with_others(
    images: Stream, tmp_path: Path
) -> None:
    weights = tmp_path / "weights.safetensors"
    extractor = make_extractor("small", images.tasks[0].train.shape)

    def starting(scale: float) -> Learner:
        save_tensors(weights, {name: scale * tensor for name, tensor in extractor.state_dict().items()})
        return quick("lwf", network="small", weights=str(weights))

    run(starting(1.0), images, out=tmp_path / "run")
    with pytest.raises(UsageError, match="weights"):
        run(starting(2.0), images, out=tmp_path / "run", resume=True)
    weights.unlink()
    weights = tmp_path / "moved.safetensors"
    assert run(starting(1.0), images, out=tmp_path / "run", resume=True).settings["weights"] != str(weights)


def test_a_run_resumed_in_another_environment_records_both(vectors: Stream, begun: Path) -> None:
    file = begun / "checkpoint-001" / "seconds.json"
    spent = json.loads(file.read_text())
    now = spent["environment"]["torch"]
    file.write_text(json.dumps({**spent, "environment": {**spent["environment"], "torch": "1.0"}}))
    made_with = run(quick(), vectors, out=begun, resume=True).environment
    assert made_with == {**spent["environment"], "torch": f"1.0, then {now}"}


class _Interrupt(Exception):
    pass


def test_a_run_stopped_between_tasks_resumes_to_the_same_bytes(
    whole: tuple[Path, Result], vectors: Stream, tmp_path: Path
) -> None:
    def stop(task: int, measured: object) -> None:
        if task == 2:
            raise _Interrupt

    with pytest.raises(_Interrupt):
        run(quick(), vectors, out=tmp_path, listeners=[AfterTask(stop)])
    folder, result = whole
    assert comparable(run(quick(), vectors, out=tmp_path, resume=True)) == comparable(result)
    assert final_bytes(tmp_path) == final_bytes(folder)


class _Stopping(Phase):
    """A progress that stops the work in the second task, at a step of a phase that it names."""

    def __init__(self, name: str, step: int) -> None:
        self.name, self.step, self.entered = name, step, 0

    @contextmanager
    def phase(self, name: str, steps: int | None = None) -> Iterator["_Stopping"]:
        self.entered += name == self.name
        self.counted = 0
        yield self

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.counted += steps
        # Of the stages after the first, only the second task has any.
        if note and self.counted > self.step and self.entered == (2 if self.name == "train" else 1):
            raise _Interrupt


def _stop_and_resume(method: str, stream: Stream, folder: Path, phase: str, step: int) -> None:
    settings = {"epochs": 6, "learning_rate": 0.05, "batch_size": 128, "expected_classes": 1, "tune": "every"}
    whole = run(quick(method, **settings), stream, out=folder / "whole")
    with pytest.raises(_Interrupt):
        run(quick(method, **settings), stream, out=folder / "cut", progress=_Stopping(phase, step))
    assert (folder / "cut" / "training.safetensors").exists()
    assert comparable(run(quick(method, **settings), stream, out=folder / "cut", resume=True)) == comparable(whole)
    assert final_bytes(folder / "cut") == final_bytes(folder / "whole")


@pytest.mark.parametrize("method", OF_EACH_TRAINING)
def test_a_method_stopped_in_training_resumes_to_the_same_bytes(method: str, vectors: Stream, tmp_path: Path) -> None:
    _stop_and_resume(method, vectors.first(2), tmp_path, "train", 3)


def test_eeil_stopped_in_fine_tuning_resumes_to_the_same_bytes(vectors: Stream, tmp_path: Path) -> None:
    _stop_and_resume("eeil", vectors.first(2), tmp_path, "fine-tune", 2)


def test_resuming_a_finished_run_returns_its_result(
    whole: tuple[Path, Result], vectors: Stream, tmp_path: Path
) -> None:
    folder, result = whole
    shutil.copytree(folder, tmp_path / "run")
    assert run(quick(), vectors, out=tmp_path / "run", resume=True) == result


def test_resuming_a_finished_run_does_not_change_its_environment(vectors: Stream, begun: Path) -> None:
    file = begun / "result.json"
    before = {**json.loads(file.read_text()), "environment": {"torch": "1.0"}}
    file.write_text(json.dumps(before))
    assert run(quick(), vectors.first(1), out=begun, resume=True).environment == {"torch": "1.0"}
    assert json.loads(file.read_text()) == before


def test_a_run_extended_by_tasks_has_no_result_until_it_is_complete(vectors: Stream, begun: Path) -> None:

    def stop(task: int, measured: object) -> None:
        if task == 2:
            raise _Interrupt

    with pytest.raises(_Interrupt):
        run(quick(), vectors, out=begun, resume=True, listeners=[AfterTask(stop)])
    assert not (begun / "result.json").exists()


def test_seconds_of_interrupted_training_are_counted(vectors: Stream, tmp_path: Path) -> None:
    with pytest.raises(_Interrupt):
        run(quick(epochs=6), vectors.first(2), out=tmp_path, progress=_Stopping("train", 3))
    file = tmp_path / "training.safetensors"
    state = load_tensors(file)
    assert 0 < float(state["seconds"]) < 60
    save_tensors(file, {**state, "seconds": torch.tensor(1000.0)})
    assert 1000 < run(quick(epochs=6), vectors.first(2), out=tmp_path, resume=True).seconds["train"] < 1060


def test_an_error_before_the_first_checkpoint_leaves_the_folder_free(vectors: Stream, tmp_path: Path) -> None:
    with pytest.raises(_Interrupt):
        run(quick(epochs=1), vectors, out=tmp_path, progress=_Stopping("run", -1))
    run(quick(), vectors.first(1), out=tmp_path)


@pytest.mark.parametrize("found", ['{"hello": 1}', "[]"])
def test_a_foreign_run_json_is_refused_and_left_alone(found: str, vectors: Stream, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(found)
    with pytest.raises(UsageError, match=r"run\.json"):
        run(quick(), vectors.first(1), out=tmp_path, resume=True)
    assert (tmp_path / "run.json").read_text() == found


def test_a_foreign_folder_named_like_a_checkpoint_is_left_alone(vectors: Stream, begun: Path) -> None:
    (begun / "checkpoint-old").mkdir()
    assert len(run(quick(), vectors.first(2), out=begun, resume=True).curve) == 2
    assert (begun / "checkpoint-old").is_dir()


def test_a_run_can_be_extended_by_more_tasks(whole: tuple[Path, Result], vectors: Stream, begun: Path) -> None:
    assert comparable(run(quick(), vectors, out=begun, resume=True)) == comparable(whole[1])


@pytest.mark.parametrize(
    ("change", "named"),
    [({"learning_rate": 0.1}, "learning_rate: 0.2, now 0.1"), ({"seed": 5}, "seed: 0, now 5"), ({"C": 2}, "C: 1.0")],
)
def test_a_changed_setting_is_refused_and_named(
    vectors: Stream, begun: Path, change: dict[str, object], named: str
) -> None:
    before = final_bytes(begun)
    with pytest.raises(UsageError, match=named):
        run(quick(**change), vectors.first(1), out=begun, resume=True)
    assert final_bytes(begun) == before


def test_settings_are_recorded_as_the_values_that_they_stand_for(vectors: Stream, tmp_path: Path) -> None:
    automatic = run(make("hybrid", epochs=1, features_per_class=8, codec="auto"), vectors.first(1), out=tmp_path)
    resolved = {"network": "mlp", "tune": "every", "tuned_weights": "all", "device": "cpu", "images_per_class": 20}
    resolved |= {"adapter_width": 16 * 64, "adapter_steps": 720, "codec": "int8", "codec_bytes": None, "weights": None}
    assert resolved.items() <= automatic.settings.items()
    explicit = {name: value for name, value in resolved.items() if name != "device"}
    assert (
        run(make("hybrid", epochs=1, features_per_class=8, **explicit), vectors.first(1), out=tmp_path, resume=True)
        == automatic
    )


def test_other_data_or_another_class_order_is_refused(vectors: Stream, begun: Path) -> None:
    other = Stream(vectors.name, (vectors.tasks[0],), vectors.class_names)
    train = other.tasks[0].train
    changed = train.inputs.clone()
    changed[int(train.rows[0]), 0] += 1
    task = replace(other.tasks[0], train=replace(train, inputs=changed))
    with pytest.raises(UsageError, match="the data, the class order or the tasks"):
        run(quick(), replace(other, tasks=(task,)), out=begun, resume=True)


def test_a_folder_that_holds_a_run_or_anything_else_is_left_alone(begun: Path, vectors: Stream, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--resume"):
        run(quick(), vectors.first(1), out=begun)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years")
    with pytest.raises(UsageError, match=r"thesis\.tex"):
        run(quick(), vectors.first(1), out=tmp_path / "mine", resume=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years"


def test_a_damaged_checkpoint_is_named(vectors: Stream, begun: Path) -> None:
    file = begun / "checkpoint-001" / "learner.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(EngramError, match=r"learner\.safetensors"):
        run(quick(), vectors.first(1), out=begun, resume=True)


def test_a_run_with_a_loss_that_is_not_finite_publishes_nothing(vectors: Stream, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="task 1, epoch"):
        run(quick(learning_rate=1e30), vectors, out=tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "events.jsonl"]
    run(quick(), vectors.first(1), out=tmp_path)  # and the folder is free


def test_runs_that_differ_only_after_training_share_it(vectors: Stream, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "trained")

    def networks() -> int:
        return len(list((tmp_path / "trained").glob("network-*")))

    for method, settings in (
        ("features", {}),
        ("features-unadapted", {}),
        ("gamma-lwf", {}),
        ("features", {"alpha": 1.0, "features_per_class": 5}),
    ):
        shared = run(quick(method, **settings), vectors, cache=cache)
        assert comparable(shared) == comparable(run(quick(method, **settings), vectors))
    assert networks() == len(vectors)
    run(quick("gamma-lwf", feature_distillation=0.5), vectors, cache=cache)
    assert networks() == 2 * len(vectors) - 1  # the first task has no teacher
    run(quick("joint"), vectors, cache=cache)
    assert networks() == 2 * len(vectors) - 1


def test_a_custom_network_is_not_cached(vectors: Stream, tmp_path: Path) -> None:
    own = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.ReLU())
    run(quick("gamma-lwf", network=own), vectors.first(1), cache=Cache(tmp_path))
    assert not list(tmp_path.iterdir())


def test_another_seed_gives_another_class_order_and_other_weights() -> None:
    digits = load("digits")
    plan = Plan(method="gamma-lwf", tasks=1, settings={"epochs": 1})
    first, second = plan.run(digits), plan.with_seed(1).run(digits)
    assert first.class_order != second.class_order
    one, other = plan.learner(digits), plan.with_seed(1).learner(digits)
    stream = plan.stream(digits)
    weights = [each.train(stream.tasks[0]).state_dict()["extractor.layers.0.weight"] for each in (one, other)]
    assert not torch.allclose(*weights)


def test_a_summary_has_mean_and_deviation_over_seeds(tmp_path: Path) -> None:
    digits = load("digits")
    plan = Plan(method="finetune", tasks=2, settings={"epochs": 1})
    results = plan.run_seeds(2, digits, tmp_path)
    assert [replace(result, seconds={}) for result in results] == [
        replace(plan.with_seed(seed).run(digits), seconds={}) for seed in (0, 1)
    ]
    summary = summarise(results)
    values = [result.average_incremental_accuracy for result in results]
    assert summary["average_incremental_accuracy"]["mean"] == pytest.approx(sum(values) / 2)
    assert summary["average_incremental_accuracy"]["deviation"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed-0", "seed-1", "summary.json"]


def test_a_summary_of_one_seed_has_no_deviation() -> None:
    results = [Plan(method="finetune", tasks=1, settings={"epochs": 1}).run(load("digits"))]
    assert summarise(results)["average_incremental_accuracy"]["deviation"] is None


def test_a_folder_for_seeds_that_holds_anything_else_is_refused_before_anything_runs(tmp_path: Path) -> None:
    digits, plan = load("digits"), Plan(method="finetune", tasks=1, settings={"epochs": 1})

    def refused(seed: int = 0, seeds: int = 2, resume: bool = False) -> str:
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(UsageError) as caught:
            plan.with_seed(seed).run_seeds(seeds, digits, tmp_path, resume=resume)
        assert sorted(tmp_path.rglob("*")) == before
        return str(caught.value)

    (tmp_path / "seed-1").mkdir()
    (tmp_path / "seed-1" / "run.json").write_text("{}")
    assert str(tmp_path / "seed-1") in refused()
    (tmp_path / "summary.json").write_text('{"seeds": [0, 1, 2]}')
    assert "seeds 0, 2" in refused(1, 1, resume=True)
    (tmp_path / "summary.json").write_text('"my own notes"')
    assert "summary.json" in refused(resume=True)
    (tmp_path / "thesis.tex").write_text("years")
    assert "thesis.tex" in refused(resume=True)


def test_a_task_without_test_samples_is_refused_before_anything_is_learned(vectors: Stream, tmp_path: Path) -> None:
    last = vectors.tasks[-1]
    tasks = (*vectors.tasks[:-1], replace(last, test=last.test.select(torch.arange(0))))
    with pytest.raises(DataError, match="Task 3"):
        run(quick("finetune"), replace(vectors, tasks=tasks), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_result_counts_reused_networks(vectors: Stream, tmp_path: Path) -> None:
    taken = [
        run(quick("lwf"), stream, cache=Cache(tmp_path)).networks_reused
        for stream in (vectors.first(1), vectors.first(2), vectors.first(2))
    ]
    assert taken == [0, 1, 2]


def test_reused_networks_are_counted_over_a_kill(vectors: Stream, tmp_path: Path) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    cache = Cache(tmp_path / "trained")
    run(quick("lwf"), vectors.first(1), cache=cache)
    with pytest.raises(KeyboardInterrupt):
        run(quick("lwf"), vectors, out=tmp_path / "run", cache=cache, listeners=[AfterTask(stop)])
    resumed = run(quick("lwf"), vectors, out=tmp_path / "run", resume=True)
    assert resumed.networks_reused == 1
    assert {"measure", "train"} <= resumed.seconds.keys()


def test_the_thousandth_checkpoint_is_the_last(tmp_path: Path) -> None:
    for number in (998, 999, 1000):
        (tmp_path / f"checkpoint-{number:03d}").mkdir()
    folder = RunFolder(tmp_path)
    assert folder.tasks_done == 1000
    folder.tidy()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1000"]


def test_the_seed_is_refused_as_a_setting() -> None:
    with pytest.raises(UsageError, match="--seed"):
        Plan(method="features", settings={"seed": 3})
