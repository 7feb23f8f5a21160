"""`learn`: make a model from images, and update it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from folders_made import paint
from images_made import encoded
from models_made import DAISY, NAMES, SIDE, TULIP, Interrupting, copied, draw, entries
from torch.nn import functional as F

from engram.data import Samples
from engram.data.labelled import read_images, scan
from engram.errors import BusyError, DataError, TrainingError, UsageError
from engram.features import Adapter, AutoAdapter, Int8, MLPAdapter, RidgeAdapter
from engram.methods import BudgetError
from engram.model import (
    LearnOptions,
    Model,
    ModelFolder,
    UpdateRejected,
    evaluate,
    expected_seconds,
    forget,
    learn,
    load,
    plan_update,
    plan_update_of_samples,
    save,
    train_update,
    verify,
    with_settings,
)
from engram.network import extract

QUICK = {"adapter_steps": 20, "adapter_width": 32}
OPTIONS = LearnOptions(epochs=2, trains=True, settings=QUICK)


def model_of(folder: ModelFolder, path: Path) -> tuple[ModelFolder, Model]:
    folder = copied(folder, path)
    return folder, load(folder)


def test_classes_of_three_updates_are_recognised(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    # A network that has seen two colours learns two others without them: only exemplars preserve it.
    settings = {"batch_size": 8, "adapter_width": 64, "adapter_steps": 100}
    options = LearnOptions(image_size=SIDE, epochs=10, images_per_class=5, network="small", settings=settings)
    learn(folder, paint(tmp_path / "1", ("red", "green"), 20), options)
    learn(folder, paint(tmp_path / "2", ("blue", "white"), 30), options)
    learn(folder, paint(tmp_path / "3", ("black",), 20))
    model = load(folder)
    assert model.names == ("green", "red", "blue", "white", "black") and model.metadata.seen == (20, 20, 30, 30, 20)
    assert evaluate(model, paint(tmp_path / "again", model.names, 10, seed=1)).accuracy > 0.9
    assert folder.problems() == []


def test_a_single_new_class_does_not_displace_the_others(tmp_path: Path) -> None:
    """A network trained on one class alone predicts it everywhere, so it is only trained beside exemplars."""
    folder = ModelFolder(tmp_path / "model")
    options = LearnOptions(image_size=SIDE, epochs=10, settings={"batch_size": 8})
    learn(folder, paint(tmp_path / "1", ("red", "green"), 20), options)
    blue = paint(tmp_path / "2", ("blue",), 20)
    assert plan_update(load(folder), scan(paint(tmp_path / "3", ("blue", "white"), 6)), LearnOptions()).trains
    assert plan_update(load(folder), scan(blue), LearnOptions(trains=True)).trains
    assert not plan_update(load(folder), scan(blue), LearnOptions()).trains
    learn(folder, blue, LearnOptions(epochs=10))  # `epochs` does not decide whether it is trained
    assert evaluate(load(folder), paint(tmp_path / "again", ("red", "green", "blue"), 10, seed=1)).mean_accuracy > 0.9


def test_a_model_of_a_single_class_is_intact_and_can_be_edited_and_updated(
    small_model: ModelFolder, tmp_path: Path
) -> None:
    folder = copied(small_model, tmp_path / "model")
    learned = learn(folder, draw(tmp_path / "rose", ("rose",), 12), LearnOptions())
    assert learned.new == {"rose": 12} and verify(folder).problems == ()
    network = load(folder).learner.trained
    before = load(small_model).learner.trained
    assert torch.equal(network.head.weight[:3], before.head.weight) and network.classes == 4
    vectors = load(folder).learner.memory.features
    mean = F.normalize(vectors.rows[vectors.class_indices == 3].mean(0), dim=0)
    torch.testing.assert_close(network.head.weight[3], mean)
    learn(folder, draw(tmp_path / "two", ("iris", "lily"), 12), LearnOptions(epochs=1))
    assert verify(folder).problems == ()
    forget(folder, ["rose"])
    assert verify(folder).problems == () and "rose" not in load(folder).names


def test_a_single_new_class_is_trained_with_exemplars_of_others(hybrid_model: ModelFolder, tmp_path: Path) -> None:
    assert plan_update(load(hybrid_model), scan(draw(tmp_path / "rose", ("rose",), 6)), LearnOptions()).trains


def test_only_unit_vectors_are_stored_of_images(small_model: ModelFolder) -> None:
    _, tensors = small_model.load()
    assert not len(tensors["memory.images.rows"])
    vectors = tensors["memory.features.rows"]
    assert vectors.shape == (18, 64) and torch.allclose(vectors.norm(dim=1), torch.ones(18), atol=1e-5)


def test_saved_model_predicts_the_same(tmp_path: Path) -> None:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randint(0, 256, (24, SIDE, SIDE, 3), generator=draws, dtype=torch.uint8)
    samples = Samples.of(inputs, torch.arange(24) % 2)
    options = LearnOptions(network="small", epochs=1, settings=QUICK)
    taught, _ = train_update(
        None, plan_update_of_samples(None, {"a": 12, "b": 12}, (SIDE, SIDE, 3), options), samples, options
    )
    folder = ModelFolder(tmp_path / "model")
    with folder.writing() as writer:
        save(writer, taught, action="learn")
    assert torch.equal(load(folder).probabilities(inputs[:7]), taught.probabilities(inputs[:7]))
    assert torch.allclose(taught.probabilities(inputs[:7]).sum(1), torch.ones(7))


def test_same_images_give_the_same_model(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", ("a", "b"), 8)
    options = LearnOptions(image_size=SIDE, epochs=1, settings=QUICK)
    for name in ("one", "two"):
        learn(ModelFolder(tmp_path / name), photos, options)
    one, two = (ModelFolder(tmp_path / name).load()[1] for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_more_images_of_a_known_class_add_features_and_leave_the_network(
    small_model: ModelFolder, tmp_path: Path
) -> None:
    folder, before = model_of(small_model, tmp_path / "model")
    more = draw(tmp_path / "more", (TULIP,), 30)
    learned = learn(folder, more, LearnOptions(features_per_class=12))
    after = load(folder)
    class_index = after.class_index(TULIP)
    assert after.names == before.names and learned.more == {TULIP: 30} and not learned.new
    assert after.metadata.seen[class_index] == before.metadata.seen[class_index] + 30
    counts = after.learner.memory.features.counts.tolist()
    assert counts[class_index] == 12 and sorted(counts) == [6, 6, 12]
    for name, tensor in before.learner.trained.state_dict().items():
        assert torch.equal(after.learner.trained.state_dict()[name], tensor), name
    assert learned.adaptation is None
    images = read_images(scan(more), SIDE).samples
    vectors = F.normalize(extract(after.learner.trained, images))
    kept = after.learner.memory.features.rows[after.learner.memory.features.class_indices == class_index]
    new = (kept @ vectors.T).max(1).values > 1 - 1e-6
    assert 0 < int(new.sum()) <= 12  # the best twelve of six old and thirty new ones


def test_known_classes_are_trained_on_if_requested(small_model: ModelFolder, tmp_path: Path) -> None:
    folder, before = model_of(small_model, tmp_path / "model")
    learned = learn(folder, draw(tmp_path / "more", (TULIP, DAISY), 10), OPTIONS)
    weight = "extractor.conv1.weight"
    after = load(folder).learner.trained.state_dict()
    changed = [
        name for name, tensor in before.learner.trained.state_dict().items() if not torch.equal(tensor, after[name])
    ]
    assert any(name.startswith("extractor") for name in changed), weight
    assert learned.adaptation is not None and learned.adaptation.omega > 0


def test_one_update_may_have_new_and_known_classes(small_model: ModelFolder, tmp_path: Path) -> None:
    folder, before = model_of(small_model, tmp_path / "model")
    learned = learn(folder, draw(tmp_path / "both", ("rose", TULIP), 10), OPTIONS)
    after = load(folder)
    assert learned.new == {"rose": 10} and learned.more == {TULIP: 10}
    assert after.names == (*before.names, "rose") and len(set(after.learner.classes_)) == 4


def test_budget_shrinks_classes_evenly_least_representative_features_first(
    small_model: ModelFolder, tmp_path: Path
) -> None:
    folder, before = model_of(small_model, tmp_path / "model")
    options = LearnOptions(settings=QUICK, epochs=1, budget=4 * 4 * 64 * 4)
    learn(folder, draw(tmp_path / "rose", ("rose",), 10), options)
    after = load(folder)
    assert after.learner.memory.features.counts.tolist() == [4, 4, 4, 4]
    assert after.learner.memory.nbytes <= 4 * 4 * 64 * 4 == after.metadata.budget
    learn(folder, draw(tmp_path / "lily", ("lily",), 10), OPTIONS)  # from now on
    assert load(folder).learner.memory.features.counts.tolist() == [3, 3, 3, 3, 3]
    before_rows = before.learner.memory.features.rows.reshape(3, 6, -1)
    trimmed = learn(
        ModelFolder(copied(small_model, tmp_path / "other").path),
        draw(tmp_path / "t", (TULIP,), 1),
        LearnOptions(budget=4 * 3 * 64 * 4),
    )
    rows = load(ModelFolder(tmp_path / "other")).learner.memory.features.rows.reshape(3, 4, -1)
    others = [class_index for class_index, name in enumerate(before.names) if name != TULIP]
    assert torch.equal(rows[others], before_rows[others][:, :4]) and trimmed.memory_bytes == 4 * 3 * 64 * 4


def test_raised_budget_lets_later_classes_store_more(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    learn(folder, draw(tmp_path / "rose", ("rose",), 10), LearnOptions(settings=QUICK, epochs=1, budget=4 * 4 * 64 * 2))
    assert load(folder).learner.memory.features.counts.tolist() == [2, 2, 2, 2]
    learn(folder, draw(tmp_path / "lily", ("lily",), 10), LearnOptions(settings=QUICK, epochs=1, budget=2**20))
    assert load(folder).learner.memory.features.counts.tolist() == [2, 2, 2, 2, 6]


def test_method_that_stores_every_image_is_refused_before_training(tmp_path: Path) -> None:
    found = scan(draw(tmp_path / "photos", ("rose", "lily"), 5))
    options = LearnOptions(method="joint", image_size=SIDE, epochs=1, network="small")
    every = 2 * 5 * SIDE * SIDE * 3
    assert plan_update(None, found, options).memory_bytes == every
    with pytest.raises(BudgetError, match=f"{every - 1:,} bytes .* {every:,}"):
        plan_update(None, found, replace(options, budget=every - 1))


def test_exemplars_over_budget_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    folder, image = ModelFolder(tmp_path / "a" / "model"), SIDE * SIDE * 3
    photos = draw(tmp_path / "photos", (TULIP, DAISY), 8)
    quick = LearnOptions(
        method="icarl", image_size=SIDE, epochs=1, network="small", images_per_class=3, budget=5 * image
    )
    with pytest.raises(BudgetError, match=r"3,840 bytes .* 4,608.*--images-per-class 2"):
        learn(folder, photos, quick)
    with pytest.raises(BudgetError, match=r"768 .* 2 classes.* 1,536"):
        learn(folder, photos, replace(quick, budget=image))
    assert not (tmp_path / "a").exists()
    learn(folder, photos, replace(quick, images_per_class=2))
    with pytest.raises(UsageError, match="--images-per-class 1"):
        learn(folder, draw(tmp_path / "more", ("rose", "lily"), 8), LearnOptions(epochs=1))
    learn(folder, tmp_path / "more", LearnOptions(epochs=1, images_per_class=1))
    assert load(folder).learner.memory.nbytes == 4 * image
    assert verify(folder).problems == ()


@pytest.mark.parametrize(("room", "fewer"), [(7, 1), (3, 0)])
def test_exemplars_that_leave_no_room_for_features_are_refused_with_the_number_that_fits(
    room: int, fewer: int, tmp_path: Path
) -> None:
    folder, image, vector = ModelFolder(tmp_path / "model"), SIDE * SIDE * 3, 64 * 4
    options = LearnOptions(method="hybrid", image_size=SIDE, network="small", epochs=1, hold_out=0, settings=QUICK)
    first = replace(options, images_per_class=3, budget=7 * image)
    learn(folder, draw(tmp_path / "1", (TULIP, DAISY), 4), first)
    more = draw(tmp_path / "2", ("rose", "lily"), 4)
    budget = room * image
    with pytest.raises(BudgetError, match=rf"{budget:,} bytes .* 1,024 .* 9,216.*--images-per-class {fewer}\."):
        learn(folder, more, replace(options, budget=budget))
    assert 4 * vector == 1024 and folder.current().version == 1
    learn(folder, more, replace(options, budget=budget, images_per_class=fewer))
    kept = load(folder).learner.memory
    assert kept.images.counts.tolist() == [fewer] * 4 and kept.nbytes <= budget


def test_budget_below_one_feature_per_class_is_refused(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    with pytest.raises(UsageError, match=r"4 classes.* 1,024"):
        learn(folder, draw(tmp_path / "rose", ("rose",), 6), LearnOptions(budget=1000))
    assert folder.current().version == 2


def test_new_model_uses_the_method_engram_and_int8(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    options = LearnOptions(image_size=SIDE, epochs=1, settings=QUICK)
    learn(folder, draw(tmp_path / "1", ("a", "b"), 8), options)
    learn(folder, draw(tmp_path / "2", ("c", "d"), 8), options)
    model = load(folder)
    assert model.learner.name == "engram"
    assert model.learner.memory.nbytes == Int8().nbytes(4 * 8, 64)
    assert not len(model.learner.memory.images) and verify(folder).problems == ()


def test_method_engram_stores_exemplars_while_requested(tmp_path: Path) -> None:
    folder, counts = ModelFolder(tmp_path / "model"), []
    for names, images in ((("a", "b"), None), (("c", "d"), 2), (("e", "f"), None), (("g", "h"), 0)):
        options = LearnOptions(image_size=SIDE, epochs=1, images_per_class=images, settings=QUICK)
        learn(folder, draw(tmp_path / names[0], names, 4), options)
        assert load(folder).learner.name == "engram" and verify(folder).problems == ()
        counts.append(load(folder).learner.memory.images.counts.tolist())
    assert [sum(each) for each in counts] == [0, 4, 8, 0]


def test_unreadable_images_are_listed_and_not_counted(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", ("a", "b"), 6)
    (photos / "a" / "broken.png").write_bytes((photos / "a" / "0.png").read_bytes()[:50])
    (photos / "b" / "notes.txt").write_text("not a photo")
    learned = learn(ModelFolder(tmp_path / "model"), photos, LearnOptions(image_size=SIDE, epochs=1))
    assert learned.new == {"a": 6, "b": 6}
    assert [left.path.name for left in learned.skipped] == ["notes.txt", "broken.png"]
    assert load(ModelFolder(tmp_path / "model")).metadata.seen == (6, 6)


def test_held_out_images_are_assessed_and_stored(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    options = LearnOptions(image_size=SIDE, epochs=4, hold_out=0.3, settings=QUICK)
    learned = learn(folder, draw(tmp_path / "first", ("a", "b"), 40), options)
    assert [each.images for each in learned.class_accuracies] == [12, 12] and learned.calibration.images == 24
    assert learned.accuracy is not None and all(each.before is None for each in learned.class_accuracies)
    assert (learned.held_out, learned.held_out_classes, learned.estimated) == (24, 2, False)
    assert load(folder).learner.memory.features.counts.tolist() == [40, 40]
    learned = learn(folder, draw(tmp_path / "second", ("c", "a"), 20), options)
    kinds = {each.name: (each.kind, each.images, each.before is not None) for each in learned.class_accuracies}
    # 12 of the first 40 and 6 of the next 20: those of earlier updates still count, by their adapted features.
    assert kinds == {"a": ("more", 18, True), "b": ("old", 12, True), "c": ("new", 6, False)}
    assert (learned.held_out, learned.held_out_classes, learned.estimated) == (36, 3, True)
    assert learned.adaptation is not None and learned.adaptation.images == 12
    assert learned.adaptation.adapted == (learned.adaptation.omega >= learned.adaptation.omega_unadapted)


@pytest.mark.parametrize(("steps", "adapted"), [(1, False), (200, True)])
def test_features_are_adapted_only_if_that_brings_them_nearer(
    steps: int, adapted: bool, small_model: ModelFolder, tmp_path: Path
) -> None:
    folder, before = model_of(small_model, tmp_path / "model")
    settings = {"adapter_init": "random", "adapter_steps": steps, "adapter_width": 128, "learning_rate": 4.0}
    learned = learn(folder, draw(tmp_path / "new", ("rose", "lily"), 20), LearnOptions(epochs=4, settings=settings))
    assert learned.adaptation is not None and learned.adaptation.adapted is adapted
    old, new = before.learner.memory.features.rows, load(folder).learner.memory.features.rows[: 3 * 6]
    assert torch.equal(old, new) is not adapted
    assert load(folder).learner.settings()["adapter"] == "mlp"  # the next update tries it again


def test_features_are_adapted_by_the_adapter_that_was_assessed(
    small_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all images another adapter might be chosen than without the held-out ones."""
    choices = iter([True, False])
    monkeypatch.setattr(AutoAdapter, "_prefers_ridge", lambda *arguments: next(choices))
    adapters = []
    fit_ridge = RidgeAdapter._fit

    def recording(*arguments: Any, **options: Any) -> Adapter:
        adapters.append(fit_ridge(*arguments, **options))
        return adapters[-1]

    monkeypatch.setattr(RidgeAdapter, "_fit", recording)
    folder = copied(small_model, tmp_path / "model")
    settings = {**QUICK, "adapter": "auto", "learning_rate": 4.0}
    learned = learn(folder, draw(tmp_path / "new", ("rose", "lily"), 20), LearnOptions(epochs=4, settings=settings))
    assert learned.adaptation is not None and learned.adaptation.adapted
    assert [adapter.name for adapter in adapters] == ["ridge", "ridge"]
    assert load(folder).learner.settings()["adapter"] == "auto"  # the next update chooses again


def test_update_that_cannot_be_validated_is_refused_before_training(small_model: ModelFolder, tmp_path: Path) -> None:
    folder, few = copied(small_model, tmp_path / "model"), draw(tmp_path / "few", ("rose", "lily"), 4)
    with pytest.raises(UsageError, match="no class has 5"):
        plan_update(load(folder), scan(few), LearnOptions(at_least=0.5))  # as a dry run does
    for number in (4, 5):  # found to be no images only when they are read
        (few / "rose" / f"{number}.png").write_bytes(b"")
    with pytest.raises(UsageError, match="no class has 5"):
        learn(folder, few, LearnOptions(at_least=0.5), Interrupting("train"))


def test_expected_seconds_of_a_small_update_use_small_adapter_batches(
    small_model: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = []
    monkeypatch.setattr(MLPAdapter, "fit", lambda self, pairs, **options: timed.append(len(pairs.old)))
    expected_seconds(plan_update(load(small_model), scan(draw(tmp_path / "new", ("rose", "lily"), 6)), LearnOptions()))
    assert set(timed) == {12}  # not the 128 of a full batch


@pytest.mark.parametrize("size", [0, 7, 1025, 100_000])
def test_image_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(UsageError, match="image_size"):
        LearnOptions(image_size=size)


def test_without_held_out_images_nothing_is_assessed(tmp_path: Path) -> None:
    learned = learn(
        ModelFolder(tmp_path / "model"),
        draw(tmp_path / "photos", ("a", "b"), 6),
        LearnOptions(image_size=SIDE, epochs=1, hold_out=0),
    )
    assert learned.accuracy is None and learned.interval is None and learned.held_out == 0
    assert [(each.images, each.before, each.after) for each in learned.class_accuracies] == [(0, None, None)] * 2
    assert learned.calibration.temperature == 1 and not load(ModelFolder(tmp_path / "model")).is_calibrated


def test_update_below_the_requested_accuracy_is_not_published(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    before = entries(folder.path)
    shutil.copytree(draw(tmp_path / "tulip", (TULIP,), 10) / TULIP, tmp_path / "twin" / "nothing")
    with pytest.raises(UpdateRejected, match="below 1") as caught:
        learn(folder, tmp_path / "twin", LearnOptions(epochs=1, settings=QUICK, hold_out=0.5, at_least=1.0))
    assert {each.name for each in caught.value.class_accuracies} == {*NAMES, "nothing"}
    assert entries(folder.path) == before


def test_rejected_first_update_leaves_nothing(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", ("a", "b", "c"), 6)
    for other in ("b", "c"):  # three classes with the same images
        shutil.rmtree(photos / other)
        shutil.copytree(photos / "a", photos / other)
    with pytest.raises(UpdateRejected):
        learn(
            ModelFolder(tmp_path / "model"),
            photos,
            LearnOptions(image_size=SIDE, epochs=1, hold_out=0.5, at_least=0.99),
        )
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("phase", ["read", "train", "extract", "adapt", "herd", "classify"])
def test_an_interruption_leaves_the_old_model_as_it_was(phase: str, small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    before = entries(folder.path)
    with pytest.raises(KeyboardInterrupt):
        learn(folder, draw(tmp_path / "rose", ("rose",), 6), OPTIONS, Interrupting(phase))
    assert entries(folder.path) == before


def test_interrupted_first_update_leaves_no_folder(tmp_path: Path) -> None:
    photos = draw(tmp_path / "photos", ("a", "b"), 6)
    with pytest.raises(KeyboardInterrupt):
        learn(ModelFolder(tmp_path / "model"), photos, LearnOptions(image_size=SIDE, epochs=1), Interrupting("train"))
    assert not (tmp_path / "model").exists()


def test_a_training_that_ends_with_infinite_statistics_is_not_published(tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    photos = draw(tmp_path / "photos", (TULIP, DAISY), 24)
    settings = {"learning_rate": 1e9}
    options = LearnOptions(image_size=SIDE, epochs=2, network="small", settings=settings)
    with pytest.raises(TrainingError, match="not finite"):
        learn(folder, photos, options)
    assert not folder.path.exists()


def test_two_updates_cannot_run_at_once(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    with folder.writing(), pytest.raises(BusyError, match=str(folder.path)):
        learn(folder, draw(tmp_path / "rose", ("rose",), 6), OPTIONS)


@pytest.mark.parametrize("twin", ["[RED]tulip", "ga\u0308nseblu\u0308mchen".upper()])
def test_near_duplicate_of_a_known_name_is_refused(twin: str, small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    with pytest.raises(DataError, match="capitals"):
        learn(folder, draw(tmp_path / "twin", (twin,), 6), OPTIONS)


@pytest.mark.parametrize("written", ["ga\u0308nseblu\u0308mchen", f" {DAISY} "])
def test_names_that_differ_in_blanks_or_accent_encoding_are_one_class(
    written: str, small_model: ModelFolder, tmp_path: Path
) -> None:
    folder = copied(small_model, tmp_path / "model")
    learned = learn(folder, draw(tmp_path / "more", (written,), 6))
    assert learned.more == {DAISY: 6}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 32}, "image size is 16"),
        ({"network": "resnet18"}, "has the network 'auto'"),
        ({"method": "finetune"}, "the method 'features'"),
        ({"weights": Path("some.safetensors")}, "has weights"),
        ({"settings": {"learning_rat": 1}}, "Did you mean 'learning_rate'"),
        ({"settings": {"network": "resnet18"}}, "This model has network=auto"),
        ({"settings": {"head": "linear"}}, "This model has head=cosine"),
        ({"settings": {"last_relu": "false"}}, "This model has last_relu=True"),
        ({"settings": {"crop": "8"}}, "This model has crop=None"),
        ({"settings": {"weights": "nope"}}, "This model has weights"),
    ],
)
def test_changes_that_a_model_cannot_make_are_refused(
    options: dict[str, object], message: str, small_model: ModelFolder, tmp_path: Path
) -> None:
    found = scan(draw(tmp_path / "rose", ("rose",), 6))
    with pytest.raises(UsageError, match=message):
        plan_update(load(small_model), found, LearnOptions(**options))  # type: ignore[arg-type]


def test_repeating_settings_of_a_model_is_no_change(small_model: ModelFolder, tmp_path: Path) -> None:
    found = scan(draw(tmp_path / "rose", ("rose",), 6))
    as_it_is = {"network": "auto", "head": "cosine", "last_relu": "true", "crop": "none", "weights": "none"}
    assert plan_update(load(small_model), found, LearnOptions(settings=as_it_is)).new == {"rose": 6}


@pytest.mark.parametrize(
    "options",
    [{"hold_out": 1.0}, {"at_least": 2.0}, {"at_least": 0.5, "hold_out": 0.0}, {"epochs": 0}, {"images_per_class": -1}],
)
def test_invalid_options_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        LearnOptions(**options)  # type: ignore[arg-type]


def test_update_follows_its_plan(small_model: ModelFolder, tmp_path: Path) -> None:
    folder = copied(small_model, tmp_path / "model")
    photos = draw(tmp_path / "rose", ("rose",), 10)
    plan = plan_update(load(folder), scan(photos), OPTIONS)
    assert plan.new == {"rose": 10} and plan.trains and expected_seconds(plan) > 0
    assert learn(folder, photos, OPTIONS).memory_bytes == plan.memory_bytes


@pytest.mark.parametrize(("side", "expected"), [(40, 32), (20, 20), (300, 32)])
def test_a_network_from_scratch_uses_the_images_own_size_up_to_a_limit(
    side: int, expected: int, tmp_path: Path
) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    for number in range(3):
        pixels = np.zeros((side, side + 10 * number, 3), dtype=np.uint8)
        (tmp_path / "p" / "a" / f"{number}.png").write_bytes(encoded(pixels, "PNG"))
    assert plan_update(None, scan(tmp_path / "p"), LearnOptions(network="auto")).image_size == expected
    assert plan_update(None, scan(tmp_path / "p"), LearnOptions()).image_size == 224  # the pretrained network's own


def test_more_images_mean_fewer_epochs(tmp_path: Path) -> None:
    few, many = (draw(tmp_path / str(count), ("a", "b"), count) for count in (5, 700))
    epochs = [plan_update(None, scan(folder), LearnOptions()).learner.training.epochs for folder in (few, many)]
    assert epochs[0] > epochs[1] >= 5


def test_unlabelled_images_are_used_and_their_path_is_not_saved(tmp_path: Path) -> None:
    folder, quick = ModelFolder(tmp_path / "model"), {"adapter_steps": 5, "adapter_width": 16}
    options = LearnOptions(image_size=SIDE, epochs=1, network="small", settings=quick)
    learn(folder, draw(tmp_path / "first", ("a", "b"), 6), options)
    anything = draw(tmp_path / "anything", ("x", "y"), 4)
    second = draw(tmp_path / "second", ("c", "d"), 6)
    given = replace(options, settings={**quick, "unlabelled": str(anything)})
    learn(folder, second, given)
    assert "unlabelled" not in folder.current().settings
    assert load(folder).names == ("a", "b", "c", "d")
    with pytest.raises(UsageError, match="gone "):
        learn(folder, second, replace(options, settings={"unlabelled": str(tmp_path / "gone")}))
    assert folder.current().version == 2


def test_new_model_takes_the_network_of_its_weights(tmp_path: Path) -> None:
    from engram import storage
    from engram.network.registry import resnet32

    torch.manual_seed(0)
    extractor = resnet32()
    path = tmp_path / "weights.safetensors"
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.4, 0.5, 0.6])
    storage.save_tensors(path, {**extractor.state_dict(), "input.mean": mean, "input.std": std})
    plan = plan_update(None, scan(draw(tmp_path / "p", ("a",), 6)), LearnOptions(weights=path, image_size=SIDE))
    assert plan.learner.network == "resnet32"
    with pytest.raises(UsageError, match=r"'resnet32', not of 'small'"):
        plan_update(None, scan(tmp_path / "p"), LearnOptions(weights=path, image_size=SIDE, network="small"))
    folder = ModelFolder(tmp_path / "model")
    learn(folder, draw(tmp_path / "q", ("a", "b"), 6), LearnOptions(weights=path, image_size=SIDE, epochs=1))
    model = load(folder)
    assert torch.equal(model.learner.trained.mean, mean) and torch.equal(model.learner.trained.std, std)
    assert "weights" not in folder.current().settings  # the path is of this machine only
    start = extractor.conv1.weight.detach()
    now = model.learner.trained.extractor.get_parameter("conv1.weight")
    assert F.cosine_similarity(start.flatten(), now.flatten(), dim=0) > 0.9  # trained on, not drawn anew
    assert with_settings(model.learner).trained.dimension == 64
