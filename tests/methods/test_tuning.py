"""On which tasks the network is trained, which of its weights, and the trial that decides for a pretrained one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learners_made import quick
from torch import Tensor, nn

from engram.data import Samples, Stream, Task
from engram.errors import UsageError
from engram.methods import Learner
from engram.methods.tuning import FEWEST_CLASSES, FEWEST_IMAGES, Tune, decide, judge
from engram.network import CosineHead, Network
from engram.network.registry import NETWORKS
from engram.progress import SILENT
from engram.storage import save_tensors

ENOUGH = [FEWEST_IMAGES] * FEWEST_CLASSES


# The decision before any trial


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("tune", "on_first", "later"), [("none", False, False), ("first", True, False), ("every", True, True)]
)
def test_a_setting_other_than_auto_decides(
    tune: Tune, on_first: bool, later: bool, first: bool, pretrained: bool
) -> None:
    for images in ([1], ENOUGH):
        decided = decide(tune, images, first=first, pretrained=pretrained)
        assert decided is not None and decided.tunes is (on_first if first else later)
        assert "as asked for" in decided.reason


@pytest.mark.parametrize("first", [False, True])
def test_auto_always_trains_a_network_from_scratch(first: bool) -> None:
    for images in ([1], ENOUGH):
        decided = decide("auto", images, first=first, pretrained=False)
        assert decided is not None and decided.tunes and "random weights" in decided.reason


@pytest.mark.parametrize(
    ("images", "tried"),
    [
        (ENOUGH, True),
        ([FEWEST_IMAGES] * 50, True),
        ([FEWEST_IMAGES] * (FEWEST_CLASSES - 1), False),
        ([*ENOUGH, FEWEST_IMAGES - 1], False),
        ([5, 5], False),
    ],
)
def test_auto_tries_to_tune_a_pretrained_network_only_on_a_large_first_task(images: list[int], tried: bool) -> None:
    decided = decide("auto", images, first=True, pretrained=True)
    assert (decided is None) is tried
    if decided is not None:
        assert not decided.tunes and f"{FEWEST_CLASSES} classes of {FEWEST_IMAGES} images" in decided.reason
    later = decide("auto", images, first=False, pretrained=True)
    assert later is not None and not later.tunes and "older classes are gone" in later.reason


# When a learner trains


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of weights to start from, which makes any network a pretrained one."""
    path = tmp_path_factory.mktemp("weights") / "small.safetensors"
    torch.manual_seed(0)
    save_tensors(path, NETWORKS["small"].make(3).state_dict())
    return str(path)


def extractor(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.trained.extractor.state_dict().items()}


def changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    assert before.keys() == after.keys()
    return {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}


@pytest.mark.parametrize(("method", "network"), [("features", "small"), ("icarl", "auto"), ("sdc", "resnet32")])
def test_a_network_from_scratch_must_be_trained(network: str, method: str, images: Stream) -> None:
    learner = quick(method, network=network, tune="none")
    with pytest.raises(UsageError, match=f"'{network}'"):
        learner.check(2)
    with pytest.raises(UsageError, match=f"'{network}'"):
        learner.learn(images.tasks[0])
    assert learner.network_ is None and learner.tasks_ == 0


@pytest.mark.parametrize(
    ("tune", "trained"), [("none", (False, False)), ("first", (True, False)), ("every", (True, True))]
)
@pytest.mark.parametrize("method", ["features", "icarl"])
def test_the_network_is_trained_on_the_tasks_that_the_setting_names(
    method: str, tune: Tune, trained: tuple[bool, bool], images: Stream, weights: str
) -> None:
    learner = quick(method, network="small", weights=weights, tune=tune)
    state = learner.initial_network(images.tasks[0].train).extractor.state_dict()
    for task, expected in zip(images, trained, strict=True):
        learner.learn(task)
        assert bool(changed(state, extractor(learner))) is expected, task.index
        state = extractor(learner)
    assert learner.trained.classes == len(learner.classes_) == 4


def test_an_untrained_network_leaves_stored_features_as_they_are(images: Stream, weights: str) -> None:
    learner = quick("features", network="small", weights=weights, tune="none", codec="float32")
    learner.learn(images.tasks[0])
    before, network = learner.memory.features.rows.clone(), learner.trained
    learner.learn(images.tasks[1])
    assert torch.equal(learner.memory.features.rows[: len(before)], before)
    assert learner.trained.extracts_like(network)


# Which weights


def is_norm(name: str, module: nn.Module) -> bool:
    return isinstance(module.get_submodule(name.rpartition(".")[0]), nn.BatchNorm2d)


def trained_by(tuned_weights: str, images: Stream, **settings: Any) -> tuple[Network, Network]:
    """A network before and after it was trained on the first task."""
    learner = quick("features", tuned_weights=tuned_weights, **settings)
    before = learner.initial_network(images.tasks[0].train)
    return before, learner.fit(images.tasks[0], SILENT, None, start=before)


@pytest.mark.parametrize("network", ["small", "resnet32"])
def test_of_norm_layers_only_scales_and_shifts_are_trained(network: str, images: Stream) -> None:
    before, after = trained_by("norms", images, network=network)
    moved = changed(before.extractor.state_dict(), after.extractor.state_dict())
    parameters = {name for name, _ in before.extractor.named_parameters()}
    norms = {name for name in parameters if is_norm(name, before.extractor)}
    assert moved == norms < parameters
    assert {name.rpartition(".")[2] for name in moved} == {"weight", "bias"}
    assert after.classes == 2  # its head is new
    grown = before.grown(2, 0, "head", 0)  # as training started from
    assert not torch.equal(after.head.weight, grown.head.weight)


def test_training_all_weights_changes_the_statistics_of_norm_layers_too(images: Stream) -> None:
    before, after = trained_by("all", images, network="small")
    moved = changed(before.extractor.state_dict(), after.extractor.state_dict())
    assert moved == set(before.extractor.state_dict())
    assert any(name.endswith("running_mean") for name in moved)


def test_auto_trains_all_weights_of_a_network_from_scratch(images: Stream) -> None:
    before, after = trained_by("auto", images, network="small")
    assert changed(before.extractor.state_dict(), after.extractor.state_dict()) == set(before.extractor.state_dict())


def test_auto_trains_the_norms_of_a_pretrained_network(images: Stream) -> None:
    few = images.tasks[0].train.select(torch.tensor([0, 1, 12, 13]))
    learner = quick("features", network="efficientnet-lite0", epochs=1, batch_size=4)
    before = learner.initial_network(few)
    after = learner.fit(Task(0, few.classes(), few, few), SILENT, None, start=before)
    moved = changed(before.extractor.state_dict(), after.extractor.state_dict())
    norms = {name for name, _ in before.extractor.named_parameters() if is_norm(name, before.extractor)}
    assert moved <= norms and len(moved) > 0.9 * len(norms)  # the gradient of a few may be zero


def test_only_the_head_of_an_untuned_network_is_trained(images: Stream, weights: str) -> None:
    learner = quick("lwf", network="small", weights=weights, tune="none", epochs=40)
    before = learner.initial_network(images.tasks[0].train)
    learner.learn(images.tasks[0])
    assert changed(before.extractor.state_dict(), extractor(learner)) == set()
    right = learner.scores(images.tasks[0].test.batch(torch.arange(24))).argmax(1) == learner.class_indices(
        images.tasks[0], images.tasks[0].test.labels
    )
    assert right.double().mean() > 0.9


# The trial

CLASSES, EACH = 8, 25
UNSEEN = (0, 4)  # every fourth class is not tuned on in a trial


def task() -> Task:
    """Vectors that show their class by a single dimension, beside noise."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    inputs = 0.3 * torch.randn(len(labels), 2 * CLASSES, generator=draws)
    inputs[torch.arange(len(labels)), labels] += 3
    samples = Samples.of(inputs, labels)
    return Task(0, samples.classes(), samples, samples)


def network_of(*dimensions: int) -> Network:
    """A network whose features are these dimensions of its inputs, and a constant."""
    layer = nn.Linear(2 * CLASSES, len(dimensions) + 1)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
        layer.bias[-1] = 1
        for row, dimension in enumerate(dimensions):
            layer.weight[row, dimension] = 1
    size = 2 * CLASSES
    return Network(layer, CosineHead(len(dimensions) + 1), torch.zeros(size), torch.ones(size)).eval()


EVERY = network_of(*range(CLASSES))
NOISE = network_of(*range(CLASSES, 2 * CLASSES))


def test_a_clear_win_is_accepted() -> None:
    decided = judge(task(), NOISE, lambda some: EVERY, seed=0)
    assert decided.tunes
    assert "trial on 40 held-out images" in decided.reason  # a fifth of 8 · 25
    gained = float(decided.reason.rpartition(" ")[2])
    assert 0.7 < gained <= 1


def test_a_loss_and_no_difference_are_rejected() -> None:
    assert not judge(task(), EVERY, lambda some: NOISE, seed=0).tunes
    same = judge(task(), EVERY, lambda some: EVERY, seed=0)
    assert not same.tunes and same.reason.endswith("+0.000")


def test_a_win_on_a_few_images_may_be_chance_and_is_rejected() -> None:
    whole = task()
    inputs, labels = whole.train.batch(torch.arange(CLASSES * EACH)).clone(), whole.train.labels
    for label in (5, 6):  # of every fifth image of these, another dimension shows the class
        some = (labels == label).nonzero().squeeze(1)[::5]
        inputs[some, label + CLASSES], inputs[some, label] = inputs[some, label], inputs[some, label + CLASSES]
    samples = Samples.of(inputs, labels)
    decided = judge(
        Task(0, samples.classes(), samples, samples), EVERY, lambda some: network_of(*range(2 * CLASSES)), seed=0
    )
    assert 0 < float(decided.reason.rpartition(" ")[2]) <= 4 / 40 and not decided.tunes


def test_a_network_that_harms_classes_it_was_not_tuned_on_is_rejected() -> None:
    """Six classes of eight are recognised only after tuning; the two others only before it."""
    seen = [label for label in range(CLASSES) if label not in UNSEEN]
    decided = judge(task(), network_of(*UNSEEN), lambda some: network_of(*seen), seed=0)
    gained = float(decided.reason.partition("changed by ")[2].partition(",")[0])
    assert gained > 0.3 and not decided.tunes
    assert decided.reason.endswith("and fell for classes that were not tuned on")


def test_a_trial_tunes_on_most_classes_and_on_none_of_the_images_it_judges_by() -> None:
    given: list[Task] = []

    def tuned(some: Task) -> Network:
        given.append(some)
        return EVERY

    whole = task()
    judge(whole, NOISE, tuned, seed=0)
    (some,) = given
    assert set(some.classes) == set(range(CLASSES)) - set(UNSEEN)
    assert len(some.train) == 6 * 20 and set(some.train.rows.tolist()) < set(whole.train.rows.tolist())


def test_a_learner_holds_a_trial_on_a_large_first_task(weights: str, images: Stream) -> None:
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(FEWEST_CLASSES).repeat_interleave(FEWEST_IMAGES)
    inputs = torch.randint(0, 256, (len(labels), 8, 8, 3), generator=draws, dtype=torch.uint8)
    samples = Samples.of(inputs, labels)  # noise
    large = Task(0, samples.classes(), samples, samples)
    learner = quick("features", network="small", weights=weights, epochs=1)
    decided = learner.tuning(large)
    assert not decided.tunes and f"trial on {len(samples) // 5} held-out images" in decided.reason
    assert learner.tasks_ == 0 and learner.network_ is None  # a trial leaves the learner as it was
    assert "classes of" in learner.tuning(images.tasks[0]).reason  # too small for a trial


@pytest.mark.parametrize(("name", "values"), [("tune", ("none", "every")), ("tuned_weights", ("norms", "all"))])
def test_networks_tuned_with_other_settings_are_not_shared(name: str, values: tuple[str, str]) -> None:
    one, other = (quick("features", network="efficientnet-lite0", **{name: value}) for value in values)
    assert one.training_settings(0) != other.training_settings(0)
