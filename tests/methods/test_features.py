"""The paper's method: stored features, their adaptation, and the classifier."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F

from engram.data import Samples, Stream
from engram.data.augment import unlabelled_crops
from engram.errors import TrainingError, UsageError
from engram.features import Adapter, IdentityAdapter, LinearSVM, MLPAdapter, Pairs, herd
from engram.methods import Features, Memoryless, make
from engram.network import Network, extract
from engram.storage import save_tensors


def learner(**settings: object) -> Features:
    given = {
        "epochs": 3,
        "batch_size": 16,
        "learning_rate": 0.2,
        "expected_classes": 6,
        "adapter_steps": 20,
        "adapter_width": 64,
        **settings,
    }
    made = make("features", **given)
    assert isinstance(made, Features)
    return made


@pytest.fixture
def unlabelled_photos(tmp_path: Path) -> Path:
    """A folder of two images of noise."""
    for number in range(2):
        noise = np.random.default_rng(number).integers(0, 256, (30, 30, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{number}.png")
    return tmp_path


def test_new_features_are_herded_and_stored_as_unit_vectors(vectors: Stream) -> None:
    task = vectors.tasks[0]
    one = learner(features_per_class=7)
    sources = one.learn(task)
    features = F.normalize(extract(one.network_, task.train))
    for class_index, label in enumerate(task.classes):
        positions = (task.train.labels == label).nonzero().squeeze(1)
        expected = positions[herd(features[positions], 7)]
        assert sources.features[7 * class_index : 7 * class_index + 7].tolist() == expected.tolist()
    assert torch.equal(one.memory.features.rows, features[sources.features])
    assert torch.allclose(one.memory.features.rows.norm(dim=1), torch.ones(14))
    assert one.memory.nbytes == 14 * 64 * 4


def test_old_features_are_adapted_and_not_herded_again(vectors: Stream) -> None:
    one = learner(features_per_class=7)
    one.learn(vectors.tasks[0])
    before = one.memory.features.rows
    sources = one.learn(vectors.tasks[1])
    assert sources.features[:14].tolist() == [-1 - slot for slot in range(14)]
    after = one.memory.features.rows[:14]
    assert not torch.allclose(before, after, atol=1e-3)
    assert torch.allclose(after.norm(dim=1), torch.ones(14))


def test_the_adapters_classification_loss_has_the_scale_of_training(
    vectors: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L_cls is divided by K as in training; as a sum it would outweigh similarity if there are many classes."""
    losses = []

    def fit(self: MLPAdapter, pairs: Pairs, **_: object) -> Adapter:
        assert pairs.classification is not None
        losses.append(pairs.classification(pairs.new, pairs.class_indices).item())
        return IdentityAdapter()

    monkeypatch.setattr(MLPAdapter, "fit", fit)
    one = learner(features_per_class=7, expected_classes=50)
    first, second = vectors.tasks[:2]
    one.learn(first)
    network = one.train(second)
    one.absorb(second, network)
    scores = network.head(extract(network, second.train))[:, -len(second.classes) :]  # of the task's classes alone
    targets = torch.stack([second.train.labels == label for label in second.classes], dim=1).float()
    expected = F.binary_cross_entropy_with_logits(scores, targets, reduction="none").sum(1).mean() / 50
    assert losses == [pytest.approx(expected.item(), rel=1e-5)]


def test_the_adapter_learns_from_unlabelled_images_and_none_is_stored(
    images: Stream, unlabelled_photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Pairs] = []

    def fit(self: MLPAdapter, pairs: Pairs, **_: object) -> Adapter:
        given.append(pairs)
        return IdentityAdapter()

    monkeypatch.setattr(MLPAdapter, "fit", fit)
    monkeypatch.setattr("engram.methods.features.UNLABELLED", 100)
    one = learner(features_per_class=7, unlabelled=str(unlabelled_photos))
    first, second = images.tasks[:2]
    one.learn(first)
    before = one.network_
    one.learn(second)
    (pairs,) = given
    own = len(second.train)
    assert torch.equal(pairs.old[:own], extract(before, second.train))
    assert pairs.class_indices[:own].tolist() == one.class_indices(second, second.train.labels).tolist()
    beside = unlabelled_crops(unlabelled_photos, second.train.shape, 100, one.seed, 1)
    assert torch.allclose(pairs.new[own:], extract(one.network_, beside), atol=1e-5)
    assert pairs.class_indices[own:].unique().tolist() == [-1] and len(pairs.class_indices) == own + 100
    assert one.memory.features.counts.tolist() == [7] * 4


def test_a_missing_folder_of_unlabelled_images_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nowhere"):
        learner(unlabelled=str(tmp_path / "nowhere")).check(4)


def test_unadapted_features_stay_as_they_are(vectors: Stream) -> None:
    one = learner(features_per_class=7, adapter="identity")
    one.learn(vectors.tasks[0])
    before = one.memory.features.rows
    one.learn(vectors.tasks[1])
    assert torch.equal(before, one.memory.features.rows[:14])


def test_the_classifier_is_the_svm_of_the_whole_balanced_memory(vectors: Stream) -> None:
    one = learner(features_per_class=7)
    for task in vectors:
        one.learn(task)
    memory = one.memory.features
    assert memory.counts.tolist() == [7] * 6
    inputs = vectors.tasks[0].test.batch(torch.arange(10))
    features = F.normalize(extract(one.network_, Samples.of(inputs, torch.zeros(10, dtype=torch.int64))))
    expected = LinearSVM(C=1.0).fit(memory.rows, memory.class_indices).scores(features)
    assert torch.allclose(one.scores(inputs), expected, atol=1e-5)


@pytest.mark.parametrize("balanced", [True, False])
def test_the_classifier_is_fitted_on_the_memory_or_on_old_vectors_and_all_new_features(
    vectors: Stream, balanced: bool
) -> None:
    one = learner(features_per_class=7, balanced=balanced)
    inputs = Samples.of(vectors.tasks[0].test.batch(torch.arange(10)), torch.zeros(10, dtype=torch.int64))
    for seen, task in enumerate(vectors.tasks[:2], start=1):
        one.learn(task)
        memory = one.memory.features
        assert memory.counts.tolist() == [7] * (2 * seen)  # the memory is the same
        old = 7 * 2 * (seen - 1)
        new = F.normalize(extract(one.network_, task.train))
        class_indices = torch.tensor([one.classes_.index(label) for label in task.train.labels.tolist()])
        everything = torch.cat([memory.rows[:old], new]), torch.cat([memory.class_indices[:old], class_indices])
        alone = memory.rows, memory.class_indices
        features = extract(one.network_, inputs)
        expected, other = (
            LinearSVM(C=1.0).fit(*rows).scores(F.normalize(features))
            for rows in ((alone, everything) if balanced else (everything, alone))
        )
        assert torch.allclose(one.classify(features), expected, atol=1e-5)
        assert not torch.allclose(one.classify(features), other, atol=1e-3)


# LDA and nearest means trust the means of adapted classes, and so few steps of an MLP leave those too far off here.
@pytest.mark.parametrize(
    ("adapter", "classifier"),
    [("mlp", "svm"), ("ridge", "ridge"), ("ridge", "nearest-mean"), ("ridge", "lda")],
)
def test_adapters_and_classifiers_are_more_accurate_than_chance(vectors: Stream, adapter: str, classifier: str) -> None:
    one = learner(adapter=adapter, classifier=classifier, features_per_class=20, epochs=15, adapter_steps=60)
    correct = total = 0
    for task in vectors:
        one.learn(task)
    for task in vectors:
        best = one.scores(task.test.batch(torch.arange(len(task.test)))).argmax(1)
        correct += int((torch.tensor(one.classes_)[best] == task.test.labels).sum())
        total += len(task.test)
    assert correct / total > 0.5  # chance is 1/6


def test_weights_are_averaged_with_those_of_the_previous_network(images: Stream) -> None:
    plain, averaged = (learner(features_per_class=10, weight_averaging=share) for share in (0.0, 0.4))
    for one in (plain, averaged):
        one.learn(images.tasks[0])
    before, alone = plain.trained.state_dict(), averaged.trained.state_dict()
    assert all(torch.equal(before[name], alone[name]) for name in before)  # there was nothing to average with
    for one in (plain, averaged):
        one.learn(images.tasks[1])
    after, mixed = plain.trained.state_dict(), averaged.trained.state_dict()
    for name, tensor in mixed.items():
        if name.startswith("extractor.") and tensor.is_floating_point():
            torch.testing.assert_close(tensor, 0.6 * after[name] + 0.4 * before[name])
        else:
            assert torch.equal(tensor, after[name])


@pytest.mark.parametrize(("begin", "held"), [(0.49, True), (0.5, False)])
def test_weights_are_averaged_once_enough_classes_are_old(begin: float, held: bool, images: Stream) -> None:
    plain, other = (
        learner(features_per_class=10),
        learner(features_per_class=10, weight_averaging=0.4, weight_averaging_from=begin),
    )
    for task in images:
        plain.learn(task)
        other.learn(task)
    one, two = (each.trained.state_dict() for each in (plain, other))
    assert all(torch.equal(one[name], two[name]) for name in one) != held  # two old classes and two new


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_a_share_outside_0_and_1_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match="weight_averaging"):
        learner(weight_averaging=share)


def test_features_and_gamma_lwf_train_the_same_network(vectors: Stream) -> None:
    settings = {"epochs": 2, "batch_size": 16, "learning_rate": 0.2, "expected_classes": 6}
    features, lwf = make("features", adapter_steps=1, **settings), make("gamma-lwf", **settings)
    assert isinstance(lwf, Memoryless)
    assert features.training_settings(1) == lwf.training_settings(1)
    with pytest.warns(match="fewer than 250"):
        for task in vectors:
            features.learn(task)
            lwf.learn(task)
    assert isinstance(features.network_, Network) and isinstance(lwf.network_, Network)
    left, right = features.network_.state_dict(), lwf.network_.state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_saved_learner_holds_one_network_and_no_image(images: Stream, tmp_path: Path) -> None:
    one = learner(features_per_class=4)
    for task in images:
        one.learn(task)
    state = one.state()
    assert one.network_ is not None
    parameters = sum(tensor.numel() for tensor in one.network_.state_dict().values())
    assert sum(tensor.numel() for name, tensor in state.items() if name.startswith("network.")) == parameters
    save_tensors(tmp_path / "learner.safetensors", state)
    saved = (tmp_path / "learner.safetensors").read_bytes()
    for task in images:
        for image in task.train.batch(torch.arange(len(task.train))):
            assert image.numpy().tobytes() not in saved
            assert image.float().numpy().tobytes() not in saved
            assert image[0].numpy().tobytes() not in saved  # nor a row of pixels


def test_a_failed_absorb_leaves_the_learner_as_it_was(vectors: Stream) -> None:
    one = learner(features_per_class=7)
    one.learn(vectors.tasks[0])
    before = {name: tensor.clone() for name, tensor in one.state().items()}
    network = one.train(vectors.tasks[1])
    with torch.no_grad():
        network.head.weight.fill_(float("nan"))
    with pytest.raises(TrainingError):
        one.absorb(vectors.tasks[1], network)
    assert all(torch.equal(before[name], tensor) for name, tensor in one.state().items())
