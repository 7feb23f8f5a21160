"""`learn` with a pretrained network that is not trained: only features, classifier and accuracy change."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from folders_made import COLOURS, paint
from models_made import Interrupting, copied, files_of
from torch import Tensor
from torch.nn import functional as F

from engram.data.labelled import read_images, scan
from engram.features import Int8
from engram.model import LearnOptions, Model, ModelFolder, evaluate, learn, load, plan_update, predict, verify
from engram.network.pretrained import Variant

ALL = tuple(COLOURS)
DIMENSION = 64  # of the features of the network `small`


def extractor(model: Model) -> dict[str, Tensor]:
    return model.learner.trained.extractor.state_dict()


def stored(model: Model, name: str) -> Tensor:
    features = model.learner.memory.features
    return features.rows[features.class_indices == model.class_index(name)]


def networks(folder: ModelFolder) -> list[str]:
    return [path.name for path in (folder.path / "networks").iterdir()]


@pytest.fixture(scope="module")
def two_colours(small_weights: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model of red and green, six photos of each, with exact features. Copy it to change it."""
    place = tmp_path_factory.mktemp("two")
    folder = ModelFolder(place / "model")
    learn(folder, paint(place / "photos", ("red", "green"), 6), exact(small_weights))
    return folder


def exact(weights: Path) -> LearnOptions:
    return LearnOptions(weights=weights, settings={"codec": "float32"})


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A model of red and green, two photos of each, learned without any option. Copy it to change it."""
    place = tmp_path_factory.mktemp("default")
    learn(ModelFolder(place / "model"), paint(place / "photos", ("red", "green"), 2))
    return ModelFolder(place / "model")


@pytest.fixture
def folder(two_colours: ModelFolder, tmp_path: Path) -> ModelFolder:
    return copied(two_colours, tmp_path / "model")


def test_the_default_is_a_pretrained_network_that_is_not_trained(default: ModelFolder) -> None:
    model = load(default)
    network = model.learner.trained
    assert (model.learner.network, model.image_size, network.dimension) == ("efficientnet-lite0", 224, 1280)
    published = model.learner.initial_network(read_images(scan(default.path.parent / "photos"), 224).samples)
    own = extractor(model)
    assert all(torch.equal(tensor, own[name]) for name, tensor in published.extractor.state_dict().items())


def test_a_second_update_leaves_network_and_old_features_bit_identical(folder: ModelFolder, tmp_path: Path) -> None:
    before, files = load(folder), networks(folder)
    learn(folder, paint(tmp_path / "new", ("blue", "white"), 6))
    after = load(folder)
    assert after.names == ("green", "red", "blue", "white")
    assert all(torch.equal(tensor, extractor(after)[name]) for name, tensor in extractor(before).items())
    for name in before.names:
        assert torch.equal(stored(after, name), stored(before, name))
    assert networks(folder) == files and len(files) == 1  # two versions share one file
    assert load(folder, version=1).names == ("green", "red") and verify(folder).problems == ()


def test_features_are_stored_as_int8_by_default_and_do_not_move(default: ModelFolder, tmp_path: Path) -> None:
    folder = copied(default, tmp_path / "model")
    before = load(folder)
    assert before.learner.memory.nbytes == Int8().nbytes(4, 1280)
    learn(folder, paint(tmp_path / "2", ("blue",), 6))
    for name in before.names:
        assert F.cosine_similarity(stored(load(folder), name), stored(before, name)).min() > 0.9999


def test_stored_features_are_the_unit_features_of_the_images(two_colours: ModelFolder) -> None:
    model, photos = load(two_colours), read_images(scan(two_colours.path.parent / "photos"), 16)
    expected = F.normalize(model.learner.extract(photos.samples))
    for label, name in enumerate(photos.class_names):
        own = expected[photos.samples.labels == label]
        assert torch.equal((stored(model, name) @ own.T).argmax(1).sort().values, torch.arange(6))
        torch.testing.assert_close((stored(model, name) @ own.T).amax(1), torch.ones(6))


# Images of an update


def test_classes_may_arrive_one_at_a_time(small_weights: Path, tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    for number, name in enumerate(ALL):
        options = LearnOptions(weights=None if number else small_weights)
        learned = learn(folder, paint(tmp_path / name, (name,), 5), options)
        assert learned.classes == number + 1 and learned.new == {name: 5} and not learned.tuned
        assert learned.held_out == (5 * (number + 1) if number else 0)  # of a single class nothing can be held out
    model = load(folder)
    assert model.names == ALL and model.metadata.seen == (5,) * 6
    assert evaluate(model, paint(tmp_path / "again", ALL, 5, seed=1)).accuracy >= 0.9
    assert len(networks(folder)) == 1 and verify(folder).problems == ()


def test_a_class_may_have_one_image(folder: ModelFolder, tmp_path: Path) -> None:
    learned = learn(folder, paint(tmp_path / "one", ("blue",), 1))
    assert load(folder).metadata.held_out_counts.total == (6, 6, 0)  # its class has no other feature to be fitted to
    assert (learned.held_out, learned.held_out_classes, learned.classes) == (12, 2, 3)
    assert evaluate(load(folder), paint(tmp_path / "again", ("blue",), 5, seed=1)).accuracy >= 0.8
    learned = learn(folder, paint(tmp_path / "more", ("blue",), 1, seed=2))
    assert load(folder).metadata.held_out_counts.total == (6, 6, 2) and learned.held_out_classes == 3


def test_a_first_update_may_have_one_image_per_class(small_weights: Path, tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    options = replace(exact(small_weights), classifier="auto")
    learned = learn(folder, paint(tmp_path / "ones", ("red", "green", "blue"), 1), options)
    assert (learned.accuracy, learned.held_out, learned.classifier) == (None, 0, "nearest mean")
    assert evaluate(load(folder), paint(tmp_path / "again", ("red", "green", "blue"), 5, seed=1)).accuracy > 0.8


def test_thirty_images_of_one_class_do_not_outweigh_two_of_another(small_weights: Path, tmp_path: Path) -> None:
    folder, photos = ModelFolder(tmp_path / "model"), tmp_path / "photos"
    paint(photos, ("red",), 30)
    paint(photos, ("green",), 2)
    learned = learn(folder, photos, exact(small_weights))
    assert load(folder).learner.memory.features.counts.tolist() == [2, 30]
    assert load(folder).metadata.held_out_counts.total == (2, 30) and learned.held_out == 32
    found = evaluate(load(folder), paint(tmp_path / "again", ("red", "green"), 10, seed=1))
    assert found.mean_accuracy >= 0.9


def test_more_of_a_known_class_joins_it(folder: ModelFolder, tmp_path: Path) -> None:
    before = load(folder)
    learned = learn(folder, paint(tmp_path / "more", ("red",), 4, seed=3))
    after = load(folder)
    assert (learned.new, learned.more) == ({}, {"red": 4}) and after.names == before.names
    assert after.metadata.seen == (6, 10) and after.metadata.held_out_counts.total == (6, 10)
    old, new = stored(before, "red"), stored(after, "red")
    assert all(bool((new == row).all(1).any()) for row in old) and len(new) == 10
    assert torch.equal(stored(after, "green"), stored(before, "green"))


def test_features_removed_by_a_budget_no_longer_count_in_accuracy(folder: ModelFolder, tmp_path: Path) -> None:
    learn(folder, paint(tmp_path / "new", ("blue",), 6), LearnOptions(budget=3 * 4 * DIMENSION * 4))
    model = load(folder)
    assert model.learner.memory.features.counts.tolist() == [4, 4, 4]
    assert model.metadata.held_out_counts.total == (4, 4, 4) and model.metadata.seen == (6, 6, 6)


def test_exemplars_can_be_stored_beside_features_of_a_frozen_network(small_weights: Path, tmp_path: Path) -> None:
    folder = ModelFolder(tmp_path / "model")
    learn(folder, paint(tmp_path / "1", ("red", "green"), 4), LearnOptions(weights=small_weights, images_per_class=1))
    learn(folder, paint(tmp_path / "2", ("blue",), 4))
    memory = load(folder).learner.memory
    assert memory.images.counts.tolist() == [1, 1, 1] and memory.features.counts.tolist() == [4, 4, 4]
    assert load(folder).metadata.held_out_counts.total == (4, 4, 4)


# Options


@pytest.mark.parametrize(
    ("classifier", "description"),
    [("lda", "LDA (shrinkage 0.05)"), ("nearest-mean", "nearest mean"), ("ridge", "ridge (penalty 1)")],
)
def test_requested_classifier_is_used(classifier: str, description: str, folder: ModelFolder, tmp_path: Path) -> None:
    learned = learn(folder, paint(tmp_path / "new", ("blue",), 6), LearnOptions(classifier=classifier))
    assert learned.classifier == load(folder).learner.classifier_description == description
    assert learned.held_out == 18
    assert learn(folder, paint(tmp_path / "white", ("white",), 3)).classifier == description  # from now on


def test_tune_first_freezes_the_network_after_the_first_update(small_weights: Path, tmp_path: Path) -> None:
    """Its training images are not held out; those of later updates are."""
    folder = ModelFolder(tmp_path / "model")
    options = replace(exact(small_weights), tune="first", epochs=1, hold_out=0.25)
    learned = learn(folder, paint(tmp_path / "1", ("red", "green"), 8), options)
    before = load(folder)
    assert learned.tuned and learned.tuning == "as asked for" and not learned.estimated
    assert before.metadata.held_out_counts.total == (2, 2)
    learned = learn(folder, paint(tmp_path / "2", ("blue",), 8), replace(options, tune=None, weights=None))
    after = load(folder)
    assert not learned.tuned and "first task only" in learned.tuning and not learned.estimated
    assert after.metadata.held_out_counts.total == (2, 2, 8)
    assert all(torch.equal(tensor, extractor(after)[name]) for name, tensor in extractor(before).items())
    assert torch.equal(stored(after, "red"), stored(before, "red"))


@pytest.mark.parametrize("tune", [None, "none"])
def test_a_model_that_started_from_a_file_of_weights_stays_a_pretrained_one(
    tune: str | None, small_weights: Path, tmp_path: Path
) -> None:
    """The folder has no path to the file, which may be removed."""
    shutil.copy(small_weights, tmp_path / "weights.pth")
    folder = ModelFolder(tmp_path / "model")
    options = LearnOptions(weights=tmp_path / "weights.pth", tune=tune)
    learned = learn(folder, paint(tmp_path / "1", ("red", "green"), 6), options)
    assert not learned.tuned and learned.network == "small"
    (tmp_path / "weights.pth").unlink()
    before = load(folder)
    assert before.learner.is_pretrained and "weights" not in folder.current().settings
    learned = learn(folder, paint(tmp_path / "2", ("blue", "white"), 6))
    assert not learned.tuned and not learned.estimated and learned.held_out == 24
    assert all(torch.equal(tensor, extractor(load(folder))[name]) for name, tensor in extractor(before).items())


def test_same_images_give_the_same_model(two_colours: ModelFolder, small_weights: Path, tmp_path: Path) -> None:
    learn(ModelFolder(tmp_path / "again"), two_colours.path.parent / "photos", exact(small_weights))
    one, two = (folder.load()[1] for folder in (two_colours, ModelFolder(tmp_path / "again")))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_model_loads_without_the_package_of_its_weights(
    default: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(default, tmp_path / "model")
    monkeypatch.setattr(Variant, "path", lambda self: None)
    photos = paint(tmp_path / "new", ("blue",), 3)
    (found,) = predict(load(folder), [photos / "blue" / "0.png"], top=1)
    assert found.path == photos / "blue" / "0.png"
    learn(folder, photos)
    assert load(folder).names == ("green", "red", "blue")
    assert plan_update(load(folder), scan(photos), LearnOptions()).image_size == 224


@pytest.mark.parametrize("phase", ["read", "extract", "herd", "classify"])
def test_interrupted_update_changes_nothing(
    phase: str, folder: ModelFolder, small_weights: Path, tmp_path: Path
) -> None:
    photos = paint(tmp_path / "new", ("blue",), 3)
    before = files_of(folder.path)
    for place, options in ((folder, None), (ModelFolder(tmp_path / "first"), exact(small_weights))):
        with pytest.raises(KeyboardInterrupt):
            learn(place, photos, options, Interrupting(phase))
    assert files_of(folder.path) == before
    assert not (tmp_path / "first").exists()
