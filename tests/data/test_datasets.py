"""Data sets are loaded by name; digits are always installed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engram.data import DATASETS, DecodeOptions, load
from engram.errors import UsageError


def test_digits_are_complete_and_a_fifth_of_each_class_is_the_test_split() -> None:
    from sklearn.datasets import load_digits

    reference = load_digits()
    dataset = load("digits")
    counts = np.bincount(reference.target)
    assert (dataset.train.labels.bincount() + dataset.test.labels.bincount()).tolist() == counts.tolist()
    assert dataset.test.labels.bincount().tolist() == np.rint(counts / 5).tolist()
    assert (len(dataset.train), len(dataset.test)) == (1438, 359)
    assert dataset.train.shape == dataset.test.shape == (8, 8, 1)
    assert dataset.class_names == tuple("0123456789")


def test_digits_are_scikit_learns_pixels_scaled_to_bytes() -> None:
    from sklearn.datasets import load_digits

    reference = load_digits()
    dataset = load("digits")
    for samples in (dataset.train, dataset.test):
        images = samples.batch(torch.arange(len(samples)))
        assert images.dtype == torch.uint8
        original = reference.images[samples.rows.numpy()]
        assert np.abs(images[..., 0].numpy() - original * 255 / 16).max() <= 0.5
        assert samples.labels.tolist() == reference.target[samples.rows.numpy()].tolist()
    together = torch.cat([dataset.train.rows, dataset.test.rows])
    assert together.sort().values.tolist() == list(range(1797))


def test_digits_do_not_depend_on_global_generators() -> None:
    np.random.seed(1)
    torch.manual_seed(1)
    first = load("digits")
    np.random.seed(2)
    torch.manual_seed(2)
    assert load("digits").test.rows.tolist() == first.test.rows.tolist()
    # The split that every result on digits stands on: a change of it must be a decision.
    assert first.test.rows[:8].tolist() == [2, 6, 11, 17, 35, 37, 40, 53]


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'cifar1000'.* 'cifar100'.*engram datasets"):
        load("cifar1000")


def test_every_data_set_is_described_in_one_line() -> None:
    assert {"digits", "cifar100", "cifar10", "arrays"} <= set(DATASETS)
    for source in DATASETS.values():
        assert source.summary and "\n" not in source.summary and len(source.summary) < 100


def test_digits_are_the_same_if_scikit_learn_stores_the_file_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = load("digits")
    monkeypatch.setattr("engram.data.digits.FILE", "nowhere")
    for part, other in ((usual.train, load("digits").train), (usual.test, load("digits").test)):
        assert torch.equal(part.inputs, other.inputs) and torch.equal(part.labels, other.labels)


def test_digits_take_no_folder() -> None:
    with pytest.raises(UsageError, match=r"digits .*--data .*cifar100, .*folder"):
        load("digits", "photos")


def test_decode_options_are_checked() -> None:
    with pytest.raises(UsageError, match=r"'strech'.* 'stretch'"):
        DecodeOptions(fit="strech")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"cache .* -5"):
        DecodeOptions(cache=-5)
    assert DecodeOptions(class_list="classes.txt").to_json() == {"class_list": "classes.txt"}  # type: ignore[arg-type]
