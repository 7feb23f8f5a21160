"""LwM: maps of attention by Grad-CAM, and the distance between two of them."""

import pytest
import torch
from contexts import context
from torch import Tensor, nn

from engram.data import Samples
from engram.methods.lwm import AttentionDistillation, attention, attention_distance, last_map
from engram.methods.objectives import Distillation
from engram.network import Network, make_network

RANDOM = torch.Generator().manual_seed(0)
IMAGES = Samples.of(torch.randint(0, 256, (6, 8, 8, 1), dtype=torch.uint8, generator=RANDOM), torch.arange(6) % 2)


def network(head: str = "cosine", seed: int = 0, kind: str | nn.Module = "small") -> Network:
    return make_network(kind, head, IMAGES, seed=seed).grown(3, seed, "head").eval()


@pytest.mark.parametrize("kind", ["small", "resnet32"])
@pytest.mark.parametrize("head", ["cosine", "linear"])
def test_the_map_is_grad_cam_from_the_definition(kind: str, head: str) -> None:
    one, classes = network(head, kind=kind), torch.tensor([0, 2, 1, 0, 1, 2])
    inputs = IMAGES.batch(torch.arange(6))
    with last_map(one) as maps:
        _, scores = one(inputs)
    gradient = torch.autograd.grad(scores.gather(1, classes[:, None]).sum(), maps[0], retain_graph=True)[0]
    weights = gradient.mean((2, 3), keepdim=True) * gradient[0, 0].numel()  # α: up to a factor that normalising removes
    expected = (weights * maps[0]).sum(1).relu()
    torch.testing.assert_close(attention(one, maps[0], classes), expected, rtol=1e-3, atol=1e-5)
    assert torch.allclose(maps[0].mean((2, 3)), one.features(inputs), atol=1e-6)
    assert not any(module._forward_hooks for module in one.modules())


def test_the_distance_of_two_maps_is_worked_out_by_hand() -> None:
    maps = torch.tensor([[[3.0, 4.0]], [[1.0, 0.0]]])  # (.6, .8) and (1, 0)
    others = torch.tensor([[[8.0, 6.0]], [[0.0, 5.0]]])  # (.8, .6) and (0, 1)
    assert float(attention_distance(maps, others)) == pytest.approx((0.4 + 2.0) / 2)


def test_the_loss_adds_the_distance_for_the_class_that_the_teacher_prefers() -> None:
    teacher, student = network(seed=0).frozen(), network(seed=1)
    labels, in_task = torch.full((6,), 2), torch.tensor([False, False, True])
    training = context(student, teacher, in_task, samples=IMAGES, class_indices=labels)
    inputs = IMAGES.batch(torch.arange(6))

    def value(objective: Distillation) -> Tensor:
        return objective.loss(training)(inputs, labels)

    plain = value(Distillation(feature_distillation=0.0, expected_classes=10))
    found = value(AttentionDistillation(attention=5.0, expected_classes=10))
    with last_map(student) as own, last_map(teacher) as before, torch.no_grad():
        student(inputs)
        best = teacher(inputs)[1].argmax(1)
    distance = attention_distance(attention(student, own[0], best), attention(teacher, before[0], best))
    torch.testing.assert_close(found, plain + 5.0 * distance / 10)
    assert float(distance.detach()) > 0.1
    found.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in student.extractor.parameters())


def test_minimising_the_distance_moves_attention_to_that_of_the_teacher() -> None:
    teacher, student = network(seed=0).frozen(), network(seed=1)
    inputs, classes = IMAGES.batch(torch.arange(6)), torch.arange(6) % 3

    def distance() -> Tensor:
        with last_map(student) as own, last_map(teacher) as before:
            student(inputs), teacher(inputs)
        return attention_distance(attention(student, own[0], classes), attention(teacher, before[0], classes).detach())

    optimiser, first = torch.optim.SGD(student.parameters(), lr=0.05), float(distance().detach())
    for _ in range(20):
        optimiser.zero_grad()
        distance().backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert float(distance().detach()) < 0.7 * first
