"""EWC and MAS: the importance of every weight, the penalty, and what is carried from task to task."""

import pytest
import torch
from contexts import context
from learners_made import quick

from engram.data import Samples, Stream
from engram.methods import METHODS, TrainingContext
from engram.methods.importance import EWC, MAS, WeightImportance
from engram.network import Carried, Network, make_network

IN_TASK = torch.tensor([True, True])
OBJECTIVES = [EWC(importance=2.0, expected_classes=10), MAS(importance=2.0, expected_classes=10)]

every_objective = pytest.mark.parametrize("objective", OBJECTIVES, ids=["ewc", "mas"])


@pytest.fixture
def trained(vectors: Stream) -> TrainingContext:
    samples = vectors.tasks[0].train.select(torch.arange(6))
    student = make_network("mlp", "linear", samples, seed=0).grown(2, 0, "head")
    class_indices = torch.tensor([0, 1, 0, 1, 1, 0])
    return context(student, None, IN_TASK, samples=samples, class_indices=class_indices)


def outputs(
    objective: WeightImportance, network: Network, samples: Samples, row: int, class_index: int
) -> torch.Tensor:
    """The number whose change the importance measures, for one sample, by definition."""
    scores = network(samples.batch(torch.tensor([row])))[1][0]
    if isinstance(objective, MAS):
        return scores.square().sum()
    targets = torch.eye(2)[class_index]
    return -(targets * scores.sigmoid().log() + (1 - targets) * (1 - scores.sigmoid()).log()).sum()


@every_objective
def test_importance_is_that_of_finite_differences(objective: WeightImportance, trained: TrainingContext) -> None:
    objective.finish(trained)
    network, samples = trained.student.double(), trained.samples
    samples = Samples.of(samples.batch(torch.arange(6)).double(), samples.labels)
    name, weight = next(iter(network.extractor.named_parameters()))
    expected, step = 0.0, 1e-5
    with torch.no_grad():
        for row, class_index in enumerate(trained.class_indices.tolist()):
            sides = []
            for shift in (step, -step):
                weight[1, 2] += shift
                sides.append(float(outputs(objective, network, samples, row, class_index)))
                weight[1, 2] -= shift
            slope = (sides[0] - sides[1]) / (2 * step)
            expected += (abs(slope) if isinstance(objective, MAS) else slope**2) / 6
    assert float(network.carried.tensors()[name][1, 2]) == pytest.approx(expected, rel=1e-3)


@every_objective
def test_the_penalty_is_half_the_weighted_square_of_the_change(
    objective: WeightImportance, trained: TrainingContext
) -> None:
    student = trained.student
    omega = {name: torch.full_like(weight, 0.1) for name, weight in student.extractor.named_parameters()}
    student.carried = Carried(omega)
    loss = objective.loss(trained)
    inputs = trained.samples.batch(torch.arange(6))
    before = float(loss(inputs, trained.class_indices).detach())
    with torch.no_grad():
        scores = student(inputs)[1]
        assert before == pytest.approx(float(objective.classification(scores, trained.class_indices, IN_TASK)))
        for weight in student.extractor.parameters():
            weight += 0.01
        scores = student(inputs)[1]
    count = sum(weight.numel() for weight in student.extractor.parameters())
    plain = float(objective.classification(scores, trained.class_indices, IN_TASK))
    expected = plain + 2.0 / 2 * 0.1 * 0.01**2 * count
    assert float(loss(inputs, trained.class_indices).detach()) == pytest.approx(expected, rel=1e-4)


def test_importance_of_tasks_adds_up_and_decays(trained: TrainingContext) -> None:
    objective = EWC(importance_decay=0.5, expected_classes=10)
    objective.finish(trained)
    once = trained.student.carried.tensors()
    objective.finish(trained)
    for name, omega in trained.student.carried.tensors().items():
        torch.testing.assert_close(omega, 1.5 * once[name])


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_importance_is_saved_and_counted(method: str, vectors: Stream) -> None:
    learner = quick(method)
    predicted = learner.memory_bytes(torch.tensor([24, 24]), vectors.tasks[0].train)
    learner.learn(vectors.tasks[0])
    weights = sum(weight.nbytes for weight in learner.trained.extractor.parameters())
    assert learner.memory.nbytes == predicted == weights
    other = quick(method)
    other.restore(learner.state())
    assert other.memory.nbytes == weights
    for one in (learner, other):
        one.learn(vectors.tasks[1])
    inputs = vectors.tasks[0].test.batch(torch.arange(8))
    assert torch.equal(learner.scores(inputs), other.scores(inputs))


@pytest.mark.parametrize("method", ["ewc", "mas"])
def test_important_weights_move_less(method: str, vectors: Stream) -> None:
    def moved(importance: float) -> float:
        learner = quick(method, importance=importance, epochs=4)
        learner.learn(vectors.tasks[0])
        before = [weight.clone() for weight in learner.trained.extractor.parameters()]
        learner.learn(vectors.tasks[1])
        after = learner.trained.extractor.parameters()
        return sum(float((a - b).square().sum()) for a, b in zip(after, before, strict=True))

    assert moved(1e8) < 0.7 * moved(0.0)
    assert METHODS[method].keeps == "importance of weights"
