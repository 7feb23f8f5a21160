"""Accuracy of an update: leave-one-out on features of images that no network was trained on."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from features_made import overlapping
from folders_made import paint
from models_made import DAISY, FORMULA, SIDE, TULIP, copied, draw
from torch import Tensor
from torch.nn import functional as F

from engram import storage
from engram.data import Samples, Task
from engram.features import Memory
from engram.methods import Learner, MemorySources, make
from engram.model import (
    LearnOptions,
    Model,
    ModelFolder,
    UpdateRejected,
    forget,
    inspect,
    learn,
    load,
    merge,
    rename,
    rollback,
    save,
    settings_of,
    verify,
    with_metadata,
)
from engram.model.held_out import (
    Accuracy,
    Calibration,
    HeldOutCounts,
    HeldOutScores,
    assess,
    falls_sharply,
    mark_held_out,
)
from engram.network import Training, extract
from engram.network.backbones import resnet32


def skipped(learner: Learner) -> HeldOutCounts:
    """By definition: each held-out feature is classified by a classifier refitted without it."""
    memory, fitted = learner.memory.features, learner.classifier_
    assert memory.held_out is not None and fitted is not None
    classifier = getattr(fitted, "chosen_", fitted)  # what Auto has chosen
    rows, class_indices = memory.rows, memory.class_indices
    right, total = [0] * len(memory.counts), [0] * len(memory.counts)
    for number in memory.held_out.nonzero().squeeze(1).tolist():
        if memory.counts[class_indices[number]] < 2:
            continue
        others = torch.arange(len(rows)) != number
        without = copy.copy(classifier).fit(rows[others], class_indices[others])
        answer = int(without.classes_[without.scores(rows[number : number + 1]).argmax()])
        right[class_indices[number]] += answer == int(class_indices[number])
        total[class_indices[number]] += 1
    return HeldOutCounts(correct=tuple(right), total=tuple(total))


def taught(sizes: list[int], classifier: str = "auto") -> Learner:
    """A learner of vectors of overlapping classes, all of them held out."""
    features, labels = overlapping(sizes, 24, noise=3.0)
    samples = Samples.of(features, labels)
    learner = make("features", network="identity", classifier=classifier)
    kept = learner.learn(Task(0, samples.classes(), samples, samples))
    mark_held_out(learner, kept, None, torch.ones(len(samples), dtype=torch.bool))
    return learner


# What accuracy is


# Where classes are weighed by their sizes, refitting without a feature changes its class's weight a little, which
# closed forms leave as it is: so one answer may differ.
@pytest.mark.parametrize(
    ("sizes", "classifier", "difference"),
    [
        ([20, 20, 20], "nearest-mean", 0),
        ([12, 2, 9, 1, 15], "nearest-mean", 0),
        *(([20, 20, 20], classifier, 1) for classifier in ("auto", "ridge", "lda")),
    ],
)
@pytest.mark.filterwarnings("ignore:.*fewer than.*")
def test_accuracy_matches_classifiers_refitted_without_each_feature(
    sizes: list[int], classifier: str, difference: int
) -> None:
    learner = taught(sizes, classifier)
    for marks in (torch.ones(sum(sizes), dtype=torch.bool), torch.arange(sum(sizes)) % 3 == 0):
        learner.memory_ = Memory(learner.memory.features.marked(marks), learner.memory.images)
        found, _ = assess(HeldOutScores.of(learner), len(sizes), Calibration(), estimated=False)
        expected = skipped(learner)
        assert found.total == expected.total and abs(sum(found.correct) - sum(expected.correct)) <= difference
        assert 0 < sum(found.correct) < sum(found.total)  # all right, or none, would agree with anything
        if not difference:
            assert found == expected
        of_each = torch.bincount(learner.memory.features.class_indices[marks], minlength=len(sizes)).tolist()
        assert found.total == tuple(count if size > 1 else 0 for count, size in zip(of_each, sizes, strict=True))


@pytest.fixture(scope="module")
def confused(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model of three colours with a pretrained network, some of whose images have wrong labels."""
    place = tmp_path_factory.mktemp("confused")
    pictures = paint(place / "pictures", ("red", "green", "blue"), 8)
    for wrong, right in (("red", "green"), ("green", "blue")):
        for number in range(2):
            shutil.move(pictures / wrong / f"{number}.png", pictures / right / f"wrong {number}.png")
    learn(ModelFolder(place / "model"), pictures)
    return ModelFolder(place / "model")


def test_accuracy_of_learn_matches_refitting_on_the_stored_features(confused: ModelFolder, tmp_path: Path) -> None:
    expected = skipped(load(confused).learner)
    facts = load(confused).metadata
    assert (facts.held_out_counts.correct, facts.held_out_counts.total) == (expected.correct, expected.total)
    assert expected.total == (10, 8, 6) and 10 < sum(expected.correct) < 24
    folder = copied(confused, tmp_path / "model")
    learned = learn(folder, paint(tmp_path / "white", ("white",), 5))
    expected = skipped(load(folder).learner)  # of all four classes, though three are gone
    accuracy = Accuracy(sum(expected.correct), 29)
    assert learned.accuracy == accuracy.value and learned.interval == accuracy.interval
    assert (learned.held_out, learned.held_out_classes, learned.estimated) == (29, 4, False)
    assert [each.images for each in learned.class_accuracies] == [10, 8, 6, 5]
    assert [each.after for each in learned.class_accuracies] == [
        right / total for right, total in zip(expected.correct, expected.total, strict=True)
    ]


@pytest.mark.parametrize("sizes", [[5], [1, 1, 1]])
@pytest.mark.filterwarnings("ignore:.*fewer than.*")
def test_no_accuracy_for_a_single_class_or_single_features(sizes: list[int]) -> None:
    learner = taught(sizes)
    assert learner.memory.features.held_out is not None and bool(learner.memory.features.held_out.all())
    assert HeldOutScores.of(learner) is None
    found, _ = assess(None, len(sizes), Calibration(), estimated=False)
    assert found.total == (0,) * len(sizes) and found.accuracy() is None


def test_accuracy_of_some_classes_counts_only_those() -> None:
    found = HeldOutCounts(correct=(3, 0, 5), total=(4, 0, 10))
    assert found.accuracy() == Accuracy(8, 14) and found.classes == 2
    assert found.accuracy([0]) == Accuracy(3, 4) and found.accuracy([1]) is None


# What is held out


def rows_of(model: Model) -> tuple[Tensor, Tensor]:
    """Stored features and their marks."""
    features = model.learner.memory.features
    assert features.held_out is not None and len(features.held_out) == len(features)
    return features.rows, features.held_out


class Watched:
    """The images that a network was trained on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images: list[Tensor] = []
        fit = Training.fit

        def watched(training: Training, network: Any, samples: Samples, *others: Any, **options: Any) -> Any:
            self.images += samples.batch(torch.arange(len(samples)))
            return fit(training, network, samples, *others, **options)

        monkeypatch.setattr(Training, "fit", watched)


@pytest.mark.parametrize(("method", "images_per_class"), [("features", None), ("hybrid", 3), ("engram", 3)])
def test_features_of_images_that_a_network_was_trained_on_are_never_counted(
    method: str, images_per_class: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    folder = ModelFolder(tmp_path / "model")
    settings = {"adapter": "identity", "codec": "float32", "weight_averaging": 0.0}  # what is stored stays as it is
    options = LearnOptions(
        method=method,
        network="small",
        image_size=SIDE,
        epochs=1,
        hold_out=0.3,
        images_per_class=images_per_class,
        settings=settings,
    )
    learn(folder, paint(tmp_path / "1", ("red", "green"), 10), options)
    model = load(folder)
    rows, marks = rows_of(model)
    assert len(watched.images) == 14 and 0 < int(marks.sum()) <= 6
    assert not bool((marks & were_among(rows, watched.images, model.learner)).any())
    learn(folder, paint(tmp_path / "2", ("blue", "white"), 10, seed=1), options)
    after, later = rows_of(load(folder))
    assert len(watched.images) == 14 + 14 + (6 if images_per_class else 0)  # those that were kept are replayed
    assert torch.equal(after[:20], rows) and torch.equal(later[:20], marks)
    assert not bool((later[:20] & were_among(after[:20], watched.images, model.learner)).any())
    assert not bool((later[20:] & were_among(after[20:], watched.images, load(folder).learner)).any())
    if not images_per_class:
        assert load(folder).metadata.held_out_counts.total == (3, 3, 3, 3)


def were_among(rows: Tensor, images: list[Tensor], learner: Learner) -> Tensor:
    """Which stored features are those of some of these images in the network of a learner."""
    return (rows @ F.normalize(extract(learner.trained, _samples(images))).T).amax(1) > 1 - 1e-6


def test_exemplars_count_as_held_out_until_an_update_trains_on_them(tmp_path: Path) -> None:
    folder, weights = ModelFolder(tmp_path / "model"), tmp_path / "weights.safetensors"
    storage.save_tensors(weights, resnet32().state_dict())  # with weights, a network is left as it is
    options = LearnOptions(images_per_class=2, weights=weights, image_size=16, settings={"adapter_steps": 5})
    learn(folder, paint(tmp_path / "1", ("red", "green"), 6), options)
    assert load(folder).metadata.held_out_counts.total == (6, 6)
    few = paint(tmp_path / "2", ("blue",), 6)
    learned = learn(copied(folder, tmp_path / "frozen"), few)
    assert not learned.tuned and learned.held_out == 18
    tuned = LearnOptions(tune="every", epochs=1, hold_out=0.5)
    learned = learn(folder, few, tuned)  # which replays two of red and of green, and nothing says which
    assert learned.tuned and load(folder).metadata.held_out_counts.total[:2] == (0, 0)


def _samples(images: list[Tensor]) -> Samples:
    return Samples.of(torch.stack(images), torch.zeros(len(images), dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:.*fewer than.*")
def test_held_out_marks_follow_the_stored_features() -> None:
    """By the definition of `MemorySources`: a position among the new samples, or −1 − i for row i of the old memory."""
    learner = taught([4, 4])
    before = torch.tensor([True, False, False, True, False, True, True, False])
    arrived = torch.tensor([True, False, True])
    kept = MemorySources(torch.tensor([-1, -4, 0, -6, 1, 2, -8, -3]), torch.empty(0))
    for earlier, expected in (
        (before, [True, True, True, True, False, True, False, False]),
        (None, [False, False, True, False, False, True, False, False]),  # nothing is known of the old ones
    ):
        mark_held_out(learner, kept, earlier, arrived)
        assert learner.memory.features.held_out is not None
        assert learner.memory.features.held_out.tolist() == expected


EDITS: dict[str, Callable[[ModelFolder], object]] = {
    "forget": lambda folder: forget(folder, [DAISY]),
    "merge": lambda folder: merge(folder, DAISY, TULIP),
    "rename": lambda folder: rename(folder, DAISY, "daisy"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_held_out_marks_survive_edits_and_saving(edit: str, calibrated_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(calibrated_model, tmp_path / "model")
    before, marks = rows_of(load(folder))
    EDITS[edit](folder)
    after, later = rows_of(load(folder))
    assert len(after) == {"forget": 48, "merge": 48, "rename": 72}[edit]
    source = (after[:, None] == before[None]).all(2).int().argmax(1)  # which row it was
    assert torch.equal(after, before[source]) and torch.equal(later, marks[source])
    found = load(folder).metadata.held_out_counts
    class_indices = load(folder).learner.memory.features.class_indices
    assert found.total == tuple(torch.bincount(class_indices[later]).tolist()) and sum(found.correct) > 0
    assert found.estimated and verify(folder).problems == ()
    if edit != "forget":  # which leaves nothing to go back to
        rollback(folder)
        assert torch.equal(rows_of(load(folder))[1], marks)


@pytest.mark.parametrize("edit", ["forget", "merge"])
def test_remaining_classes_are_assessed_again_after_an_edit(edit: str, confused: ModelFolder, tmp_path: Path) -> None:
    folder = copied(confused, tmp_path / "model")
    if edit == "forget":
        forget(folder, ["blue"])
    else:
        merge(folder, "green", "blue")  # then nothing of green is wrongly labelled blue
    found, expected = load(folder).metadata.held_out_counts, skipped(load(folder).learner)
    assert (found.correct, found.total) == (expected.correct, expected.total)
    before, after = load(confused).metadata.held_out_counts.accuracy(), found.accuracy()
    assert before is not None and after is not None and after.value > before.value


def test_a_later_update_that_trains_the_network_makes_accuracy_an_estimate(
    small_model: ModelFolder, tmp_path: Path
) -> None:
    assert not load(small_model, generation=1).metadata.held_out_counts.estimated
    assert load(small_model).metadata.held_out_counts.estimated
    folder = copied(small_model, tmp_path / "model")
    learned = learn(folder, draw(tmp_path / "rose", ("rose",), 8))
    assert not learned.tuned and learned.estimated  # it still rests on features that were adapted
    assert all(each.estimated for each in learned.class_accuracies)


def test_accuracy_is_unknown_without_held_out_marks_until_new_images_arrive(
    small_model: ModelFolder, tmp_path: Path
) -> None:
    """Models of version 0.1 have no marks, and their manifests no evidence."""
    folder = copied(small_model, tmp_path / "model")
    with folder.writing() as writer:
        model, manifest = load(writer), writer.current()
        state = {name: each for name, each in model.learner.state().items() if not name.endswith("held_out")}
        assert len(state) == len(model.learner.state()) - 1
        writer.publish(
            state,
            action="learn",
            method=model.learner.name,
            settings=settings_of(model.learner),
            classes=model.names,
            details={name: value for name, value in manifest.details.items() if name != "held_out_counts"},
        )
    found = inspect(folder)
    assert (found.accuracy, found.interval, found.held_out_counts) == (None, None, HeldOutCounts())
    assert json.loads(json.dumps(found.to_json()))["accuracy"] is None and verify(folder).problems == ()
    rename(folder, DAISY, "daisy")
    assert inspect(folder).accuracy is None
    learned = learn(folder, draw(tmp_path / "more", ("rose", TULIP), 10), LearnOptions(epochs=1, hold_out=0.5))
    after = load(folder)
    assert after.names == (TULIP, "daisy", FORMULA, "rose")
    assert after.metadata.held_out_counts.total[1:3] == (0, 0) and after.metadata.held_out_counts.total[3] > 0
    assert learned.held_out_classes <= 2 and learned.accuracy is not None
    assert [each.before for each in learned.class_accuracies] == [None] * 4


def test_a_method_without_features_is_assessed_on_the_images_of_the_update(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    options = LearnOptions(method="lwf", network="small", image_size=SIDE, epochs=2, hold_out=0.3)
    assert learn(folder, paint(tmp_path / "1", ("red", "green"), 10), options).held_out == 6
    learned = learn(folder, paint(tmp_path / "2", ("blue", "white"), 10), options)
    assert load(folder).metadata.held_out_counts.total == (0, 0, 3, 3) and learned.held_out_classes == 2


# What is refused


@pytest.mark.parametrize(
    ("before", "after", "falls"),
    [
        ((95, 100), (70, 100), True),
        ((100, 100), (0, 100), True),
        ((95, 100), (86, 100), False),  # by less than a tenth
        ((9, 10), (7, 10), False),  # which may be chance
        ((1000, 1000), (905, 1000), False),  # sure, and still less than a tenth
        ((1000, 1000), (880, 1000), True),
        ((70, 100), (95, 100), False),
    ],
)
def test_a_fall_is_sharp_if_large_and_significant(before: tuple[int, int], after: tuple[int, int], falls: bool) -> None:
    assert falls_sharply(Accuracy(*before), Accuracy(*after)) is falls


def test_unknown_accuracy_does_not_fall() -> None:
    assert not falls_sharply(None, Accuracy(0, 100)) and not falls_sharply(Accuracy(100, 100), None)


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFolder, Path]:
    """A model of red and green, and the same images under other names."""
    place = tmp_path_factory.mktemp("colours")
    pictures = paint(place / "1", ("red", "green"), 12)
    learn(ModelFolder(place / "model"), pictures)
    for name, other in (("red", "crimson"), ("green", "emerald")):
        shutil.copytree(pictures / name, place / "again" / other)
    return ModelFolder(place / "model"), place / "again"


def test_update_that_loses_old_classes_is_rejected(colours: tuple[ModelFolder, Path], tmp_path: Path) -> None:
    model, again = colours
    folder = copied(model, tmp_path / "model")
    before = {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()}
    with pytest.raises(UpdateRejected) as caught:
        learn(folder, again)
    assert {path: path.read_bytes() for path in folder.path.rglob("*") if path.is_file()} == before
    judged = {each.name: (each.kind, each.images, each.before) for each in caught.value.class_accuracies}
    assert judged == {
        **{name: ("old", 12, 1.0) for name in ("green", "red")},
        **{name: ("new", 12, None) for name in ("crimson", "emerald")},
    }
    after = [each.after for each in caught.value.class_accuracies[:2]]
    assert all(value is not None and value < 0.5 for value in after)
    assert str(Accuracy(24, 24)) in str(caught.value) and "--force" in str(caught.value)
    assert any("crimson" in warning and "red" in warning for warning in caught.value.warnings)


def test_force_publishes_a_rejected_update(colours: tuple[ModelFolder, Path], tmp_path: Path) -> None:
    model, again = colours
    folder = copied(model, tmp_path / "model")
    learned = learn(folder, again, LearnOptions(force=True))
    assert learned.generation == 2 and load(folder).names == ("green", "red", "crimson", "emerald")
    assert learned.accuracy is not None and learned.accuracy < 0.5


def test_training_that_ruins_old_classes_is_rejected(tmp_path: Path) -> None:
    """An adapter of one hidden unit makes all stored features alike, so no classifier can separate them."""
    folder = ModelFolder(tmp_path / "model")
    options = LearnOptions(method="features", network="small", image_size=SIDE, epochs=10, hold_out=0.5)
    learn(folder, paint(tmp_path / "1", ("red", "green", "blue"), 40), options)
    before = load(folder).metadata.held_out_counts.accuracy()
    assert before is not None and before.value > 0.9
    ruinous = replace(
        options,
        epochs=1,
        settings={"adapter": "mlp", "adapter_init": "random", "adapter_steps": 1, "adapter_width": 1},
    )
    few = paint(tmp_path / "2", ("white", "black"), 4)  # too few to hold one out and judge the adapter by it
    with pytest.raises(UpdateRejected, match=r"3 old classes would fall .*--tune none"):
        learn(folder, few, ruinous)
    assert folder.current().generation == 1
    learned = learn(folder, few, replace(ruinous, force=True))
    assert folder.current().generation == 2 and learned.tuned and learned.estimated


def test_a_model_of_unknown_accuracy_is_not_rejected(colours: tuple[ModelFolder, Path], tmp_path: Path) -> None:
    model, again = colours
    folder = copied(model, tmp_path / "model")
    with folder.writing() as writer:
        save(writer, with_metadata(load(writer), held_out_counts=HeldOutCounts()), action="learn")
    assert learn(folder, again).generation == 3
