"""A limited amount of work is started before it is needed, and none is left behind."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import pytest
import torch
from lazy_made import IMAGES, LABELS, lazy

from engram.data import Samples
from engram.data.samples import BATCHES, prefetch


def test_results_are_in_order_whichever_is_ready_first() -> None:
    def work(item: int) -> int:
        time.sleep(0.001 * (item % 3))
        return item * item

    assert list(prefetch(work, range(20), workers=4, ahead=6)) == [item * item for item in range(20)]
    assert list(prefetch(work, [], workers=2, ahead=3)) == []


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_only_so_many_are_started_before_they_are_requested(ahead: int) -> None:
    begun: list[int] = []
    with closing(prefetch(begun.append, range(30), workers=2, ahead=ahead)) as results:
        for number, _ in enumerate(results):
            time.sleep(0.002)
            assert len(begun) <= number + 1 + ahead
    assert sorted(begun) == list(range(30))


def test_the_next_are_computed_while_one_is_used() -> None:
    begun: list[int] = []
    with closing(prefetch(begun.append, range(9), workers=1, ahead=2)) as results:
        next(results)
        for _ in range(500):
            if len(begun) == 3:
                break
            time.sleep(0.01)
        assert begun == [0, 1, 2]


def test_an_error_is_raised_in_the_place_of_its_result_and_leaves_no_thread() -> None:
    before = threading.active_count()

    def work(item: int) -> int:
        if item == 3:
            raise ValueError("three")
        return item

    seen: list[int] = []
    with pytest.raises(ValueError, match="three"):
        seen.extend(prefetch(work, range(100), workers=2, ahead=5))
    results = prefetch(work, range(100), workers=2, ahead=5)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    assert threading.active_count() == before


def test_closing_early_leaves_no_thread_and_no_work() -> None:
    before, begun = threading.active_count(), []

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.005)

    with pytest.raises(KeyboardInterrupt), closing(prefetch(work, range(1000), workers=1, ahead=4)) as results:
        next(results)
        raise KeyboardInterrupt
    assert threading.active_count() == before
    count = len(begun)
    time.sleep(0.03)
    assert len(begun) == count <= 6


def test_prefetched_batches_are_the_same_as_from_memory() -> None:
    parts = torch.randperm(20).split(6)
    for samples in (Samples.of(IMAGES, LABELS), lazy()):
        for part, batch in zip(parts, samples.batches(parts), strict=True):
            assert torch.equal(batch, IMAGES[part])


def test_only_images_outside_of_memory_are_prefetched() -> None:
    before = threading.active_count()
    parts = torch.arange(20).split(2)
    with closing(Samples.of(IMAGES, LABELS).batches(parts)) as batches:
        next(batches)
        assert threading.active_count() == before
    samples = lazy()
    with closing(samples.batches(parts)) as batches:
        next(batches)
        assert threading.active_count() == before + 1
        time.sleep(0.1)
        assert len(samples.inputs.made) == 2 * (1 + BATCHES)  # type: ignore[union-attr]
    assert threading.active_count() == before
