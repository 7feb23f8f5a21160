"""Classes arrive in the requested order and groups, with their own samples and no others."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from engram.data import Dataset, Samples, Stream, Task, hold_out, split
from engram.errors import DataError, UsageError

NAMES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kea")


def vectors(labels: list[int], offset: int = 0) -> Samples:
    """Samples numbered `offset`, `offset` + 1, …"""
    return Samples.of(
        torch.arange(offset, offset + len(labels), dtype=torch.float32)[:, None],
        torch.tensor(labels, dtype=torch.int64),
    )


def numbers(samples: Samples) -> list[int]:
    return [int(value) for value in samples.batch(torch.arange(len(samples)))[:, 0]]


def animals(per_class: int = 20) -> Dataset:
    """Eleven classes; classes are interleaved, and test samples are numbered from 1000."""
    return Dataset("animals", vectors([*range(11)] * per_class), vectors([*range(11)] * 3, 1000), NAMES)


def sizes(stream: Stream) -> list[int]:
    return [len(task.classes) for task in stream]


# Groups


@pytest.mark.parametrize(
    ("classes_per_task", "first_task", "expected"),
    [
        (4, None, [4, 4, 3]),
        (11, None, [11]),
        (1, None, [1] * 11),
        (2, 5, [5, 2, 2, 2]),
        (4, 5, [5, 4, 2]),
        (3, 11, [11]),
        (5, 1, [1, 5, 5]),
    ],
)
def test_tasks_have_the_requested_classes_and_the_last_the_remainder(
    classes_per_task: int, first_task: int | None, expected: list[int]
) -> None:
    stream = split(animals(), classes_per_task=classes_per_task, first_task=first_task)
    assert sizes(stream) == expected
    assert [task.index for task in stream] == list(range(len(expected)))
    assert sorted(stream.classes) == list(range(11))
    assert stream.classes == tuple(itertools.chain.from_iterable(task.classes for task in stream))
    assert stream.classes_per_task == classes_per_task
    assert stream.class_names == NAMES


def test_a_task_has_all_samples_of_its_classes_and_no_others() -> None:
    dataset = animals()
    for task in split(dataset, classes_per_task=4):
        assert set(task.train.classes()) == set(task.test.classes()) == set(task.classes)
        assert numbers(task.train) == [i for i in range(220) if i % 11 in task.classes]
        assert numbers(task.test) == [1000 + i for i in range(33) if i % 11 in task.classes]
        assert task.train.inputs is dataset.train.inputs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"classes_per_task": 0}, "animals .* 11 .*classes-per-task .* 0"),
        ({"classes_per_task": 12}, "animals .* 11 .*classes-per-task .* 12"),
        ({"classes_per_task": 2, "first_task": 0}, "first-task .* 0"),
        ({"classes_per_task": 2, "first_task": 12}, "first-task .* 12"),
        ({"classes_per_task": 2, "validation": 1.0}, "validation .* 1.0"),
        ({"classes_per_task": 2, "validation": -0.1}, "validation .* -0.1"),
        ({"classes_per_task": 2, "validation": float("nan")}, "validation .* nan"),
    ],
)
def test_impossible_splits_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split(animals(), **settings)  # type: ignore[arg-type]


# Class orders


def test_the_class_order_is_a_function_of_the_seed() -> None:
    orders = [split(animals(), classes_per_task=2, seed=seed).classes for seed in (0, 1, 2, 0)]
    assert orders[0] == orders[3]
    assert len(set(orders)) == 3
    assert all(sorted(order) == list(range(11)) for order in orders)


def test_the_class_order_of_a_seed_is_the_same_for_every_size_of_task() -> None:
    assert len({split(animals(), classes_per_task=size, seed=4).classes for size in (1, 3, 11)}) == 1


def test_class_order_1993_is_that_of_published_code_for_every_seed() -> None:
    hundred = vectors([*range(100)])
    dataset = Dataset("hundred", hundred, hundred, tuple(map(str, range(100))))
    # The first ten classes of iCaRL's, PODNet's and PyCIL's CIFAR-100.
    published = [68, 56, 78, 8, 23, 84, 90, 65, 74, 76]
    for seed in (0, 7):
        stream = split(dataset, classes_per_task=10, class_order="1993", seed=seed)
        assert list(stream.tasks[0].classes) == published
        assert list(stream.classes) == np.random.RandomState(1993).permutation(100).tolist()


def test_a_class_order_skips_classes_without_training_samples() -> None:
    labels = [0, 2, 5, 9]
    dataset = Dataset("few", vectors(labels), vectors([*range(11)]), NAMES)
    assert sorted(split(dataset, classes_per_task=2).classes) == labels
    expected = [labels[i] for i in np.random.RandomState(1993).permutation(4)]
    assert list(split(dataset, classes_per_task=2, class_order="1993").classes) == expected


def test_a_class_order_may_be_given_as_labels() -> None:
    order = tuple(reversed(range(11)))
    assert split(animals(), classes_per_task=3, class_order=order).classes == order
    assert split(animals(), classes_per_task=3, class_order=np.array(order)).classes == order  # type: ignore[arg-type]


def test_a_file_of_names_and_labels_gives_the_class_order(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("kea\n 9 \nhen\n\n0\nbee\ncat\ndog\neel\nfox\n6\nibis\n")
    stream = split(animals(), classes_per_task=3, class_order=str(file))
    assert stream.classes == (10, 9, 7, 0, 1, 2, 3, 4, 5, 6, 8)
    assert stream.split["class_order"] == list(stream.classes)  # the record is of the order, whatever the file's name


def test_a_class_order_file_may_have_any_line_ends_and_be_a_path(tmp_path: Path) -> None:
    three = vectors([0, 1, 2])
    accented = Dataset("three", three, three, ("caf\u00e9", "bar", "pub"))
    file = tmp_path / "order.txt"
    file.write_bytes("\ufeffpub\r\ncafe\u0301\r\nbar\r\n".encode())
    assert split(accented, classes_per_task=1, class_order=file).classes == (2, 0, 1)


def test_a_class_order_of_fractions_is_refused() -> None:
    with pytest.raises(TypeError):
        split(animals(), classes_per_task=3, class_order=[label + 0.5 for label in range(11)])  # type: ignore[list-item]


def test_a_line_is_a_class_name_or_else_a_label(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("2\n1\n0\n")
    three = vectors([0, 1, 2])
    named_by_others = Dataset("three", three, three, ("1", "2", "zero"))
    with pytest.raises(UsageError, match="missing: zero; twice: 1"):  # "2" is 1, "1" is 0, "0" is 0
        split(named_by_others, classes_per_task=1, class_order=str(file))
    file.write_text("2\nzero\n1\n")
    assert split(named_by_others, classes_per_task=1, class_order=str(file)).classes == (1, 2, 0)


def test_an_invalid_class_order_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "order.txt"
    file.write_text("ant\nbeee\n")
    with pytest.raises(UsageError, match=r"'beee'.* 'bee'.*order\.txt"):
        split(animals(), classes_per_task=2, class_order=str(file))
    with pytest.raises(UsageError, match="missing: kea"):
        split(animals(), classes_per_task=2, class_order=range(10))
    with pytest.raises(UsageError, match="missing: kea; unknown: 11; twice: ant"):
        split(animals(), classes_per_task=2, class_order=[*range(10), 11, 0])
    file.write_bytes(b"\xff\xff")
    for order in ("sead", str(file), str(tmp_path)):
        with pytest.raises(UsageError, match=r"'seed'.*'1993'"):
            split(animals(), classes_per_task=2, class_order=order)


# Validation


def test_validation_is_held_out_of_training_and_the_test_split_is_not_used() -> None:
    stream = split(animals(per_class=20), classes_per_task=4, validation=0.1, seed=3)
    for task in stream:
        train, held_out = numbers(task.train), numbers(task.test)
        assert Counter(task.test.labels.tolist()) == {label: 2 for label in task.classes}
        assert Counter(task.train.labels.tolist()) == {label: 18 for label in task.classes}
        assert not set(train) & set(held_out)
        assert sorted(train + held_out) == [i for i in range(220) if i % 11 in task.classes]


def test_the_test_samples_may_be_anything_when_a_validation_share_is_held_out() -> None:
    dataset = animals()
    other = Dataset("animals", dataset.train, vectors([3], 5000), NAMES)
    streams = [split(data, classes_per_task=4, validation=0.2, seed=1) for data in (dataset, other)]
    assert streams[0].fingerprints() == streams[1].fingerprints()


def test_the_held_out_share_is_a_function_of_the_seed() -> None:
    held = [
        numbers(split(animals(), classes_per_task=11, validation=0.2, seed=seed).tasks[0].test) for seed in (0, 1, 0)
    ]
    assert held[0] == held[2] != held[1]


@pytest.mark.parametrize(
    ("size", "share", "count"), [(20, 0.1, 2), (7, 0.5, 4), (3, 0.01, 1), (2, 0.9, 1), (1, 0.5, 0)]
)
def test_at_least_one_of_a_class_is_held_out_but_never_its_last(size: int, share: float, count: int) -> None:
    rest, held = hold_out(vectors([5] * size), share, 0, "validation")
    assert (len(rest), len(held)) == (size - count, count)
    assert numbers(rest) == sorted(numbers(rest))
    assert sorted(numbers(rest) + numbers(held)) == list(range(size))


def test_the_held_out_samples_of_a_class_do_not_depend_on_other_classes() -> None:
    samples = animals().train
    _, of_all = hold_out(samples, 0.25, 0, "validation")
    _, of_one = hold_out(samples.of_classes((4,)), 0.25, 0, "validation")
    assert numbers(of_all.of_classes((4,))) == numbers(of_one)
    places = {tuple(number // 11 for number in numbers(of_all.of_classes((label,)))) for label in range(11)}
    assert len(places) > 5  # each class is drawn for itself
    _, otherwise = hold_out(samples, 0.25, 0, "correction")
    assert numbers(otherwise) != numbers(of_all)


# Tasks and streams


def test_a_task_refuses_foreign_labels_and_classes_without_samples() -> None:
    with pytest.raises(DataError, match=r"Task 3 .*training .*\[7\]"):
        Task(2, (0, 1), vectors([0, 1, 7]), vectors([0]))
    with pytest.raises(DataError, match=r"Task 1 .*test .*\[2, 3\]"):
        Task(0, (0, 1), vectors([0, 1]), vectors([3, 2]))
    with pytest.raises(DataError, match=r"Task 1 .*training .*\[1\]"):
        Task(0, (0, 1), vectors([0, 0]), vectors([1]))


def test_the_first_tasks_of_a_stream_are_those_of_the_whole() -> None:
    stream = split(animals(), classes_per_task=4)
    first = stream.first(2)
    assert len(first) == 2
    assert list(first) == list(stream)[:2]
    assert first.fingerprints() == stream.fingerprints()[:2]
    assert (first.name, first.class_names, first.classes_per_task) == ("animals", NAMES, 4)
    for tasks in (0, 4):
        with pytest.raises(UsageError, match=f"3 .*{tasks} "):
            stream.first(tasks)


def test_a_class_that_comes_back_counts_from_its_first_arrival() -> None:
    test = vectors([])
    tasks = (Task(0, (3, 1), vectors([1, 3]), test), Task(1, (1, 2), vectors([1, 2]), test))
    assert Stream("own", tasks, NAMES).classes == (3, 1, 2)


def test_fingerprints_depend_on_the_class_order_and_every_sample() -> None:
    train, test = vectors([0, 1]), vectors([0, 1], 10)

    def fingerprint(task: Task) -> str:
        return Stream("own", (task,), NAMES).fingerprints()[0]

    fingerprints = {
        fingerprint(Task(0, (0, 1), train, test)),
        fingerprint(Task(0, (1, 0), train, test)),
        fingerprint(Task(0, (0, 1), vectors([0, 1], 1), test)),
        fingerprint(Task(0, (0, 1), train, vectors([0, 1], 11))),
        fingerprint(Task(0, (0, 1), test, train)),
    }
    assert len(fingerprints) == 5
    assert fingerprint(Task(0, (0, 1), vectors([0, 1]), vectors([0, 1], 10))) in fingerprints
