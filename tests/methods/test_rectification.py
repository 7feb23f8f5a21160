"""IL2M and threshold moving: what is added to the scores after training, worked out by hand."""

import math

import pytest
import torch
from contexts import context
from learners_made import learned, quick
from torch import Tensor, nn

from engram.data import Samples, Stream
from engram.errors import UsageError
from engram.methods import TrainingContext
from engram.methods.editing import forget, merge
from engram.methods.rectification import IL2M, ThresholdMoving
from engram.network import Network, ShiftedHead


def network(classes: int) -> Network:
    """A network whose scores are the logarithms of its inputs: the inputs are the probabilities."""
    head = ShiftedHead(classes)
    head.grow(classes)
    head.weight.data, head.bias.data = torch.eye(classes), torch.zeros(classes)
    return Network(nn.Identity(), head, torch.zeros(classes), torch.ones(classes))


def after_training(
    student: Network, probabilities: list[list[float]], classes: list[int], old: int, **others: object
) -> TrainingContext:
    samples = Samples.of(torch.tensor(probabilities).log(), torch.tensor(classes))
    in_task = torch.arange(student.classes) >= old
    return context(student, None, in_task, samples=samples, class_indices=torch.tensor(classes), **others)


def head_of(student: Network) -> ShiftedHead:
    assert isinstance(student.head, ShiftedHead)
    return student.head


# IL2M


def test_the_first_state_of_each_class_is_its_mean_score_and_the_confidence() -> None:
    student = network(2)
    IL2M().finish(after_training(student, [[0.9, 0.1], [0.7, 0.3], [0.4, 0.6]], [0, 0, 1], old=0))
    head = head_of(student)
    torch.testing.assert_close(head.first_score, torch.tensor([0.8, 0.6]))
    torch.testing.assert_close(head.first_confidence, torch.full((2,), (0.9 + 0.7 + 0.6) / 3))
    assert not bool(head.shift.any())


def rectified(first_score: float = 0.8) -> ShiftedHead:
    """Class 0 is old, with one exemplar of probability .2; the images of class 1 have .9 and .7."""
    student = network(2)
    head = head_of(student)
    head.first_score, head.first_confidence = torch.tensor([first_score, 0.0]), torch.tensor([0.75, 0.0])
    IL2M().finish(after_training(student, [[0.2, 0.8], [0.1, 0.9], [0.3, 0.7]], [0, 1, 1], old=1, exemplars=1))
    return head


def test_if_a_new_class_is_predicted_probabilities_of_old_ones_are_multiplied_by_the_ratios() -> None:
    head = rectified()
    factor = (0.8 / 0.2) * (0.8 / 0.75)  # the present confidence is (.9 + .7) / 2 = .8
    torch.testing.assert_close(head.shift, torch.tensor([math.log(factor), 0.0]))
    probabilities = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.1, 0.9]])
    expected = [[0.3 * factor, 0.7], [0.6, 0.4], [0.1 * factor, 0.9]]  # in the second an old one is preferred anyway
    torch.testing.assert_close(head(probabilities.log()).exp(), torch.tensor(expected))
    assert head(probabilities.log()).argmax(1).tolist() == [0, 0, 1]
    torch.testing.assert_close(head.first_score, torch.tensor([0.8, 0.8]))  # of the new class, from now on


def test_a_class_without_a_first_score_is_not_rectified() -> None:
    assert rectified(first_score=0.0).shift.tolist() == [0.0, 0.0]


# Threshold moving


def test_scores_are_divided_by_the_share_of_the_class_in_the_targets() -> None:
    student = network(2)
    ThresholdMoving().finish(after_training(student, [[0.5, 0.5]] * 4, [0, 1, 1, 1], old=0))
    probabilities = torch.tensor([[0.4, 0.6]])
    found = head_of(student)(probabilities.log()).exp()
    torch.testing.assert_close(found, torch.tensor([[0.4 / 0.25, 0.6 / 0.75]]))


def test_the_teachers_probabilities_count_too() -> None:
    class TwoOfThree(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs[:, :2]

    teacher, student = network(2), network(3)
    teacher.extractor, teacher.mean, teacher.std = TwoOfThree(), torch.zeros(3), torch.ones(3)
    head_of(teacher).set_shift(torch.tensor([5.0, 0.0]), torch.tensor([True, True]))  # it teaches without its shift
    task = after_training(student, [[0.6, 0.2, 0.2], [0.1, 0.3, 0.6]], [0, 2], old=2)
    task = context(student, teacher.eval(), task.in_task, samples=task.samples, class_indices=task.class_indices)
    ThresholdMoving(distillation=0.5).finish(task)
    sums = [0.6 / 0.8 + 0.1 / 0.4, 0.2 / 0.8 + 0.3 / 0.4]  # of both samples, by class
    totals = torch.tensor([1 + 0.5 * sums[0], 0.5 * sums[1], 1.0])
    torch.testing.assert_close(head_of(student).shift, -(totals / totals.sum()).log())


# Both


@pytest.mark.parametrize("method", ["il2m", "threshold-moving"])
def test_another_head_is_refused_and_shifts_survive_saving_and_editing(method: str, vectors: Stream) -> None:
    with pytest.raises(UsageError, match="shifted"):
        quick(method, head="linear").learn(vectors.tasks[0])
    learner = learned(method, vectors)
    head, before = learner.trained.head, learner.classes_
    assert isinstance(head, ShiftedHead) and bool(head.shift.any())
    forget(learner, before[0])
    merge(learner, before[1], before[2])
    after = learner.trained.head
    assert isinstance(after, ShiftedHead)
    merged = (head.shift[1] + head.shift[2]) / 2
    torch.testing.assert_close(after.shift, torch.stack([merged, *head.shift[3:]]))
    other = quick(method)
    other.restore(learner.state())
    inputs = vectors.tasks[0].test.batch(torch.arange(4))
    assert torch.equal(other.scores(inputs), learner.scores(inputs))
