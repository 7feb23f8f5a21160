"""Several ranks: what each computes, what they exchange, and that results do not depend on their number."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import pytest
import shared_work
import torch
from processes import together
from torch import Tensor

from engram.features import select
from engram.features.memory import FeatureMemory
from engram.methods import METHODS
from engram.network import Training, parallel
from engram.network.heartbeat import INTERVAL, MISSED_BEATS


def close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 2e-5) -> bool:
    """Whether two states are equal up to rounding, which may change a code by one."""
    return found.keys() == expected.keys() and all(
        torch.allclose(found[name].double(), tensor.double(), rtol=within, atol=1 if name.endswith("codes") else within)
        for name, tensor in expected.items()
    )


# Collective operations


@pytest.fixture(scope="module")
def exchanged() -> list[dict[str, Any]]:
    return together(shared_work.exchanged, size=3)


def test_rank_0_is_the_main_one(exchanged: list[dict[str, Any]]) -> None:
    assert [each["is main"] for each in exchanged] == [True, False, False]
    assert [each["size"] for each in exchanged] == [3, 3, 3]


def test_each_rank_uses_its_share_of_the_cores(exchanged: list[dict[str, Any]]) -> None:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    assert {each["threads"] for each in exchanged} == {max(1, cores // 3)}


def test_parts_are_contiguous_in_order_and_of_equal_size_within_one(exchanged: list[dict[str, Any]]) -> None:
    for count in range(8):
        parts = [range(count)[each["parts"][count]] for each in exchanged]
        assert [row for part in parts for row in part] == list(range(count))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_weighted_means_of_shares_have_the_mean_of_the_batch(exchanged: list[dict[str, Any]]) -> None:
    values = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for count in range(1, 8):
        shares = [each["shares"][count] for each in exchanged]
        means = [share.weight * values[share.rows].mean() for share in shares]
        assert float(sum(means)) / 3 == pytest.approx(float(values[:count].mean()), abs=1e-12)
        assert all(len(values[share.rows]) for share in shares)  # no process is without a sample


def test_a_broadcast_value_is_the_same_on_all_ranks_to_the_last_bit(exchanged: list[dict[str, Any]]) -> None:
    for each in exchanged:
        number, values = each["broadcast"]
        assert number == 0
        assert values["numbers"] == [1, 2.5, None, True, "text"]
        integers, double, empty, yes = values["tensors"]
        assert integers.tolist() == [0, 1, 2] and integers.dtype == torch.int64
        assert double.item() == 0.1 and double.dtype == torch.float64
        assert empty.shape == (0, 4)
        assert yes.tolist() == [True]
        assert values["half"].tolist() == [[1.5, -2.0]] and values["half"].dtype == torch.bfloat16
    assert [each["on main"] for each in exchanged] == [0, None, None]


def test_an_error_of_rank_0_is_raised_on_all_and_they_continue(exchanged: list[dict[str, Any]]) -> None:
    for each in exchanged:
        assert each["broadcast error"] == each["on main error"] == "TrainingError: refused by 0"


def test_rows_are_gathered_in_rank_order_even_if_some_ranks_have_none(exchanged: list[dict[str, Any]]) -> None:
    for each in exchanged:
        assert each["gathered"].tolist() == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
        assert each["mean"].item() == 1.0


def test_a_broadcast_module_equals_that_of_rank_0(exchanged: list[dict[str, Any]]) -> None:
    for each in exchanged:
        assert all(bool((tensor == 0).all()) for tensor in each["module"])


def test_ranks_with_different_values_are_named_in_the_error(exchanged: list[dict[str, Any]]) -> None:
    for each in exchanged:
        assert each["same"] == "nothing was refused"
        assert each["different"].startswith("UsageError: ") and "process 2, 3 of 3 " in each["different"]


def test_local_rank_0_goes_first(exchanged: list[dict[str, Any]]) -> None:
    first, *others = (each["main first"] for each in exchanged)
    assert all(other > first + 0.1 for other in others)


def test_in_a_single_process_every_function_is_a_plain_call() -> None:
    assert (parallel.world_size(), parallel.is_main(), parallel.is_distributed()) == (1, True, False)
    assert parallel.part(7) == slice(0, 7)
    assert parallel.share(7) == (slice(0, 7), 1.0)
    value = torch.randn(3, 2)
    assert parallel.broadcast(lambda: value) is parallel.on_main(lambda: value) is parallel.all_gather(value) is value
    assert parallel.main_first(lambda: value) is parallel.mean(value) is value


def test_the_same_features_give_the_same_memory_to_the_last_bit() -> None:
    draws = torch.Generator().manual_seed(0)
    vectors, class_indices = torch.randn(120, 16, generator=draws), torch.arange(120) % 3
    expected = select(FeatureMemory.empty(16), vectors, class_indices, 10)
    for found in together(shared_work.selected, vectors, class_indices):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_same_vectors_give_the_same_codes_to_the_last_bit() -> None:
    vectors = torch.randn(400, 16, generator=torch.Generator().manual_seed(0))
    expected = shared_work.encoded(vectors)
    for found in together(shared_work.encoded, vectors):
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_rank_0_may_work_alone_for_longer_than_a_rank_may_be_silent() -> None:
    seconds = MISSED_BEATS * INTERVAL + 5
    assert together(shared_work.waited, seconds) == [seconds, seconds]


# Samples


@pytest.mark.parametrize(("size", "count", "batch_size"), [(2, 41, 16), (3, 10, 4)])
def test_ranks_together_see_each_augmented_sample_once_per_epoch(size: int, count: int, batch_size: int) -> None:
    seen = partial(shared_work.batches, count, 2, batch_size=batch_size)
    alone, shares = seen(), together(seen, size=size)
    assert all(len(share) == len(alone) for share in shares)
    for number, (inputs, positions) in enumerate(alone):
        own = [share[number][0] for share in shares]
        assert all(torch.equal(share[number][1], positions) for share in shares)
        assert torch.equal(torch.cat(own), inputs)
        assert max(map(len, own)) - min(map(len, own)) <= 1
    per_epoch = len(alone) // 2
    for epoch in (alone[:per_epoch], alone[per_epoch:]):
        assert torch.cat([positions for _, positions in epoch]).sort().values.tolist() == list(range(count))


# Training


CASES = [
    ("mlp", "plain", {}),
    ("mlp", "twice", {}),
    ("mlp", "head", {}),
    ("mlp", "noise", {}),
    ("small", "plain", {}),
    ("small", "twice", {}),
    ("small", "light", {}),
    ("mlp", "plain", {"batch_size": 2, "count": 7}),  # batches of two and of one, for three processes
]


@pytest.fixture(scope="module")
def trained() -> dict[int, list[Any]]:
    return {
        1: shared_work.trainings(CASES),
        2: together(shared_work.trainings, CASES),
        3: together(shared_work.trainings, CASES[-1:], size=3),
    }


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{kind}-{loss}" for kind, loss, _ in CASES])
def test_two_processes_learn_what_one_does_and_are_equal_after_every_epoch(
    trained: dict[int, list[Any]], case: int
) -> None:
    expected, alone = trained[1][case]
    (first, epochs), (second, others) = (each[case] for each in trained[2])
    assert len(epochs.states) == 3
    assert epochs.states == others.states  # every bit of parameters and statistics, after every epoch
    assert epochs.losses == others.losses == pytest.approx(alone.losses, rel=1e-4)
    assert close(first, expected)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_batch_may_have_fewer_samples_than_there_are_processes(trained: dict[int, list[Any]]) -> None:
    expected, _ = trained[1][-1]
    for state, _ in (each[0] for each in trained[3]):
        assert close(state, expected)


def test_weights_that_a_loss_does_not_use_do_not_change(trained: dict[int, list[Any]]) -> None:
    before = shared_work.NETWORKS["mlp"]().state_dict()
    for each in trained[2]:
        after, _ = each[CASES.index(("mlp", "head", {}))]
        unused = [name for name in before if name.startswith("extractor.")]
        assert unused and all(torch.equal(after[name], before[name]) for name in unused)  # no decay either


def test_without_all_reduce_the_ranks_diverge() -> None:
    (first, epochs), (second, others) = together(partial(shared_work.trained, "mlp", "plain", distributes=False))
    assert all(own != other for own, other in zip(epochs.states, others.states, strict=True))
    assert not close(first, second)


def test_a_loss_that_is_not_finite_in_one_process_ends_all_with_the_same_error() -> None:
    found = together(shared_work.not_finite)
    assert found[0] == found[1] == shared_work.not_finite()
    assert found[0].startswith("TrainingError: ") and "task 1, epoch 1, batch 1" in found[0]


def test_the_gradient_of_a_deep_network_is_as_near_to_the_exact_one_as_that_of_one_process() -> None:
    exact, alone = shared_work.gradients(exactly=True), shared_work.gradients()
    first, second = together(shared_work.gradients)
    assert torch.equal(first, second)
    assert float((first - exact).norm()) < 3 * float((alone - exact).norm())


def test_batch_norms_are_those_of_the_whole_batch() -> None:
    alone, shares = shared_work.normalised_all(), together(shared_work.normalised_all)
    for kind, (answers, gradients, *others) in alone.items():
        # Two batches of seven, of which the first has four samples each and the second three.
        parts = [
            (share[kind][0].split(length), share[kind][1].split(length))
            for share, length in zip(shares, (4, 3), strict=True)
        ]
        for number, expected in enumerate((answers, gradients)):
            found = torch.cat([part[number][batch] for batch in range(2) for part in parts])
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5), kind
        learned = 2 if kind in ("2d", "1d", "untracked", "cumulative") else 0
        for number, expected in enumerate(others):
            found = [share[kind][2 + number] for share in shares]
            if number < learned:  # the gradient of weight and bias: a sum over the shares
                assert torch.allclose(sum(found), expected, rtol=1e-4, atol=1e-4), kind
            else:
                assert torch.allclose(found[0].float(), expected.float(), rtol=1e-5), kind
                assert torch.equal(found[0], found[1]), kind


def test_features_are_the_same_bits_in_all_processes_and_however_many_they_are() -> None:
    counts = (1203, 3)  # three batches; one, so that all but one process have nothing to do
    alone, shares = shared_work.extracted(counts), together(shared_work.extracted, counts)
    for found in shares:
        assert all(torch.equal(own, expected) for own, expected in zip(found, alone, strict=True))


# Methods


@pytest.fixture(scope="module")
def learned() -> tuple[dict[str, Any], list[dict[str, Any]]]:
    methods = list(METHODS)
    return shared_work.learned(methods), together(shared_work.learned, methods)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_same_on_two_ranks(
    method: str, learned: tuple[dict[str, Any], list[dict[str, Any]]]
) -> None:
    alone, (first, second) = learned
    assert all(torch.equal(first[method][name], second[method][name]) for name in first[method])
    assert first[method].keys() == alone[method].keys()
    # A code that becomes the next one moves the classifier a little.
    assert close(first[method], alone[method], within=1e-2 if method == "engram" else 1e-3)


def test_a_method_that_is_trained_in_two_stages_differs_from_one_of_one_stage(
    learned: tuple[dict[str, Any], list[dict[str, Any]]],
) -> None:
    _, (first, _) = learned
    assert float(first["bic"]["network.head.alpha"]) != 1.0  # fitted after training


# Precision


def test_mixed_precision_learns_with_weights_of_full_precision() -> None:
    exact, expected = shared_work.trained("small", "plain")
    mixed, epochs = shared_work.trained("small", "plain", precision="bfloat16")
    assert all(tensor.dtype == exact[name].dtype for name, tensor in mixed.items())
    assert not close(mixed, exact, within=1e-6)
    assert close(mixed, exact, within=0.1)
    assert epochs.losses == pytest.approx(expected.losses, rel=0.02)


@pytest.mark.parametrize(
    ("shape", "has", "expected"),
    [
        ((32, 32, 3), True, "bfloat16"),
        ((32, 32, 3), False, "float32"),
        ((8, 8, 1), True, "float32"),
        ((12,), True, "float32"),
    ],
)
def test_large_images_train_in_bfloat16_where_the_device_computes_in_it(
    shape: tuple[int, ...], has: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram.network.training.has_bfloat16", lambda device: has)
    device = torch.device("cpu")
    assert Training().resolved_precision(shape, device) == expected
    assert Training(precision="float32").resolved_precision(shape, device) == "float32"


def test_mixed_precision_is_the_same_however_many_processes_there_are() -> None:
    mixed = partial(shared_work.trained, "small", "plain", precision="bfloat16")
    alone, _ = mixed()
    for state, _ in together(mixed):
        assert close(state, alone, within=0.05)
