"""Inputs that are loaded on request behave like a tensor in `Samples`."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from lazy_made import IMAGES, LABELS, Counted, lazy
from torch import Tensor

from engram.data import Samples, concatenate
from engram.data.files import fill
from engram.data.samples import Joined


def content(samples: Samples) -> Tensor:
    return samples.batch(torch.arange(len(samples)))


def test_views_of_lazy_samples_give_the_same_rows_as_of_a_tensor_and_load_no_others() -> None:
    samples, resident = lazy(), Samples.of(IMAGES, LABELS)
    chosen = samples.of_classes((1, 3)).select(torch.tensor([7, 0, 0]))
    assert samples.shape == (4, 5, 3) and samples.sample_bytes == 60 == resident.sample_bytes
    assert torch.equal(content(chosen), content(resident.of_classes((1, 3)).select(torch.tensor([7, 0, 0]))))
    assert sorted(samples.inputs.made) == [1, 1, 15]  # type: ignore[union-attr]


def test_concatenated_parts_of_one_lazy_source_stay_views() -> None:
    samples = lazy()
    together = concatenate(samples.of_classes((2,)), samples.of_classes((0,)))
    assert together.inputs is samples.inputs
    assert torch.equal(content(together), torch.cat([IMAGES[LABELS == 2], IMAGES[LABELS == 0]]))


def test_tensors_and_lazy_images_are_concatenated_without_loading() -> None:
    exemplars, files = Samples.of(IMAGES[:3] + 1, torch.tensor([9, 9, 8])), lazy()
    together = concatenate(exemplars, files.select(torch.tensor([19, 4])), exemplars.select(torch.tensor([2])))
    assert files.inputs.made == []  # type: ignore[union-attr]
    expected = torch.cat([IMAGES[:3] + 1, IMAGES[[19, 4]], IMAGES[2:3] + 1])
    assert together.labels.tolist() == [9, 9, 8, 3, 0, 8]
    assert together.shape == (4, 5, 3) and len(together) == 6
    assert torch.equal(content(together), expected)
    assert torch.equal(together.batch(torch.tensor([5, 3, 0, 3])), expected[[5, 3, 0, 3]])
    assert torch.equal(content(concatenate(together, exemplars)), torch.cat([expected, IMAGES[:3] + 1]))


def test_a_batch_without_positions_is_empty() -> None:
    joined = Joined([Samples(images, torch.arange(2), torch.arange(2)) for images in (IMAGES, Counted())])
    assert joined[torch.empty(0, dtype=torch.int64)].shape == (0, 4, 5, 3)


def test_fingerprints_of_lazy_samples_load_nothing_and_depend_on_rows_and_labels() -> None:
    samples = lazy()
    prints = {
        samples.fingerprint(),
        samples.select(torch.arange(19)).fingerprint(),
        samples.select(torch.arange(20).flip(0)).fingerprint(),
        Samples(samples.inputs, samples.rows, LABELS.flip(0)).fingerprint(),
        concatenate(samples, Samples.of(IMAGES, LABELS)).fingerprint(),
        concatenate(samples, Samples.of(IMAGES + 1, LABELS)).fingerprint(),
    }
    assert len(prints) == 6
    assert lazy().fingerprint() == samples.fingerprint()
    assert samples.inputs.made == []  # type: ignore[union-attr]


@pytest.mark.parametrize("workers", [1, 2, 5, None])
def test_any_number_of_workers_gives_the_same_images(workers: int | None) -> None:
    def make(number: int, pixels: np.ndarray) -> None:
        pixels[:] = IMAGES[number].numpy()

    assert torch.equal(fill(20, (4, 5, 3), make, workers), IMAGES)
    assert fill(0, (4, 5, 3), make, workers).shape == (0, 4, 5, 3)


def test_an_error_of_a_worker_is_raised_and_leaves_no_thread() -> None:
    before = threading.active_count()

    def make(number: int, pixels: np.ndarray) -> None:
        if number == 7:
            raise ValueError("seven")

    for workers in (1, 3):
        with pytest.raises(ValueError, match="seven"):
            fill(20, (4, 5, 3), make, workers)
    assert threading.active_count() == before
