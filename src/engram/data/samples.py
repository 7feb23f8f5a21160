"""`Samples`: images or vectors with labels, as rows of one source; data sets by name; tasks and streams."""

from __future__ import annotations

import hashlib
import math
import operator
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from torch import Tensor

from engram.data.images import Fit, check_side
from engram.data.scanning import SkippedFile, cache_folder
from engram.errors import DataError, UsageError, unknown
from engram.progress import SILENT, Progress
from engram.randomness import generator
from engram.text import names_in, printable

Item = TypeVar("Item")
Result = TypeVar("Result")

BATCHES = 2  # prefetched while another is used
HASHED_ROWS = 4096  # in memory at a time
FIELD_SEED = 1993  # of the class order in iCaRL's code, which most of the field has used since


class LazyImages(ABC):
    """Images (N, h, w, c) that are in memory only when indexed; `Samples` uses it in place of a tensor."""

    dtype = torch.uint8
    shape: tuple[int, ...]

    @abstractmethod
    def __getitem__(self, rows: Tensor) -> Tensor:
        """The images of these rows, uint8 (len(rows), h, w, c); a new tensor."""

    @abstractmethod
    def identity(self, rows: Tensor) -> Iterator[bytes]:
        """Bytes that identify the images of these rows, without producing them."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows of `inputs` with their labels. Make one with `Samples.of(inputs, labels)`."""

    inputs: Tensor | LazyImages  # uint8 images (N, h, w, c) or float32 vectors (N, d), shared by every view
    rows: Tensor  # int64 (n,): which rows of `inputs` these samples are
    labels: Tensor  # int64 (n,)

    @classmethod
    def of(cls, inputs: Any, labels: Any) -> Samples:
        """From arrays or tensors: uint8 images (n, h, w, c) or (n, h, w), or vectors (n, d) of any real type."""
        inputs, labels = _checked_inputs(_tensor(inputs, "inputs")), _tensor(labels, "labels")
        if labels.shape != (len(inputs),):
            raise DataError(
                f"Expected one label per sample; found {len(inputs)} samples, {tuple(labels.shape)} labels."
            )
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise DataError(f"Labels must be integers; found {labels.dtype}.")
        return cls(inputs.contiguous(), torch.arange(len(inputs)), labels.to(torch.int64))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample: (h, w, c) or (d,)."""
        return tuple(self.inputs.shape[1:])

    @property
    def sample_bytes(self) -> int:
        return math.prod(self.shape) * self.inputs.dtype.itemsize

    def batch(self, positions: Tensor) -> Tensor:
        """The inputs at these positions, (len(positions), *shape)."""
        return self.inputs[self.rows[positions]]

    def batches(self, parts: Iterable[Tensor]) -> Generator[Tensor, None, None]:
        """The inputs at the positions of each part, in order; images that are not in memory are prefetched.

        Close it (`contextlib.closing`) if it may not be exhausted.
        """
        if isinstance(self.inputs, LazyImages):  # one worker: several threads already decode each batch
            yield from prefetch(self.batch, parts, workers=1, ahead=BATCHES)
        else:
            yield from map(self.batch, parts)

    def select(self, positions: Tensor) -> Samples:
        """The samples at these positions, in this order; only row numbers are copied."""
        return Samples(self.inputs, self.rows[positions], self.labels[positions])

    def of_classes(self, classes: tuple[int, ...]) -> Samples:
        """The samples of these classes, in their present order."""
        return self.select(torch.isin(self.labels, torch.tensor(classes)).nonzero().squeeze(1))

    def classes(self) -> tuple[int, ...]:
        """The labels that occur, ascending."""
        return tuple(self.labels.unique().tolist())

    def fingerprint(self) -> str:
        """A SHA-256 over shapes, inputs and labels; of files, over their names and sizes instead of their pixels."""
        digest = hashlib.sha256(repr((self.inputs.dtype, self.shape, len(self))).encode())
        for part in _identity(self.inputs, self.rows):
            digest.update(part)
        digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()


def _identity(inputs: Tensor | LazyImages, rows: Tensor) -> Iterator[bytes]:
    if isinstance(inputs, LazyImages):
        yield from inputs.identity(rows)
    else:
        yield from (inputs[some].numpy().tobytes() for some in rows.split(HASHED_ROWS))


def prefetch(
    work: Callable[[Item], Result], items: Iterable[Item], *, workers: int, ahead: int
) -> Generator[Result, None, None]:
    """`work(item)` for each item, in order; at most `ahead` are started before they are asked for.

    An error is raised in the place of its result. Close the generator if it may not be exhausted: running work is
    waited for, and no more is started.
    """
    started: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, "prefetch") as pool:
        try:
            for item in items:
                started.append(pool.submit(work, item))
                if len(started) > ahead:
                    yield started.popleft().result()
            while started:
                yield started.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _tensor(values: Any, what: str) -> Tensor:
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values)  # torch does not accept negative strides, as of images[..., ::-1]
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"The {what} must be an array or a tensor of numbers: {error}") from error


def _checked_inputs(inputs: Tensor) -> Tensor:
    shape = tuple(inputs.shape)
    if inputs.ndim == 3 and inputs.dtype == torch.uint8:
        inputs = inputs.unsqueeze(-1)
    if inputs.ndim not in (2, 4):
        raise DataError(f"Inputs must be images (n, h, w, c) or vectors (n, d); found {shape}.")
    if 0 in inputs.shape[1:]:
        raise DataError(f"A sample must have at least one number; found {shape}.")
    if inputs.ndim == 4:
        if inputs.dtype != torch.uint8:
            raise DataError(f"Images must be uint8, 0 to 255; found {inputs.dtype}. Convert them.")
        if inputs.shape[-1] not in (1, 3):
            raise DataError(f"Images must be (n, height, width, 1 or 3 channels); found {shape}.")
        return inputs
    if inputs.is_complex():
        raise DataError(f"Vectors must be real numbers; found {inputs.dtype}.")
    inputs = inputs.to(torch.float32)
    if not bool(torch.isfinite(inputs).all()):
        raise DataError("The vectors hold NaN or infinity. Remove or fill those rows.")
    return inputs


class Joined(LazyImages):
    """Rows of several sources, some of them tensors, one after another. Nothing is copied."""

    def __init__(self, parts: Sequence[Samples]) -> None:
        self.parts = parts
        self.ends = torch.tensor([len(part) for part in parts]).cumsum(0)
        self.shape = (int(self.ends[-1]), *parts[0].shape)

    def __getitem__(self, rows: Tensor) -> Tensor:
        images = torch.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        for positions, part, own in self._by_part(rows):
            images[positions] = part.inputs[own]
        return images

    def identity(self, rows: Tensor) -> Iterator[bytes]:
        for positions, part, own in self._by_part(rows):
            yield positions.numpy().tobytes()
            yield from _identity(part.inputs, own)

    def _by_part(self, rows: Tensor) -> Iterator[tuple[Tensor, Samples, Tensor]]:
        """For each part that owns some of the rows: their positions among `rows`, the part, its rows of its inputs."""
        owners = torch.searchsorted(self.ends, rows, right=True)
        for number, part in enumerate(self.parts):
            positions = (owners == number).nonzero().squeeze(1)
            if len(positions):
                yield positions, part, part.rows[rows[positions] - self.ends[number] + len(part)]


def concatenate(*parts: Samples) -> Samples:
    """One `Samples` of all parts, in order. Views of the same inputs stay views; files are not read."""
    labels = torch.cat([part.labels for part in parts])
    if all(part.inputs is parts[0].inputs for part in parts):
        return Samples(parts[0].inputs, torch.cat([part.rows for part in parts]), labels)
    is_lazy = any(isinstance(part.inputs, LazyImages) for part in parts)
    inputs = Joined(parts) if is_lazy else torch.cat([part.inputs[part.rows] for part in parts])
    return Samples(inputs, torch.arange(len(labels)), labels)


def hold_out(samples: Samples, share: float, seed: int, purpose: str, *, smallest: int = 2) -> tuple[Samples, Samples]:
    """Split into (rest, held-out samples), in their present order: of each class `share`, at least one and never all.

    A class of fewer than `smallest` samples gives none.
    """
    held = torch.zeros(len(samples), dtype=torch.bool)
    labels, counts = samples.labels.unique(return_counts=True)
    by_class = samples.labels.argsort(stable=True).split(counts.tolist())
    for label, positions in zip(labels.tolist(), by_class, strict=True):
        count = min(max(round(share * len(positions)), 1), len(positions) - 1)
        count = count if len(positions) >= smallest else 0
        drawn = torch.randperm(len(positions), generator=generator(seed, purpose, label))
        held[positions[drawn[:count]]] = True
    return samples.select((~held).nonzero().squeeze(1)), samples.select(held.nonzero().squeeze(1))


@dataclass(frozen=True, eq=False)
class Dataset:
    """A named data set with a training and a test split."""

    name: str
    train: Samples
    test: Samples
    class_names: tuple[str, ...]  # by label
    skipped: tuple[SkippedFile, ...] = ()  # files that are not among its samples
    published: bool = False  # whether the name identifies the samples, wherever they are loaded
    source: Mapping[str, Any] = field(default_factory=dict)  # the arguments of `load`; empty: made in Python

    def __post_init__(self) -> None:
        labels = torch.cat([self.train.labels, self.test.labels])
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < len(self.class_names):
            raise DataError(
                f"The labels of {self.name} run from {int(labels.min())} to {int(labels.max())}, "
                f"but there are {len(self.class_names)} class names."
            )
        if self.train.shape != self.test.shape:
            raise DataError(f"Training samples of {self.name} are {self.train.shape}, test samples {self.test.shape}.")

    @cached_property
    def identity(self) -> str | None:
        """A hash that distinguishes data sets of the same name; None for published ones."""
        if self.published:
            return None
        parts = (self.class_names, self.train.fingerprint(), self.test.fingerprint())
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How the files of a data set become images. None leaves it to the data set."""

    size: int | None = None  # pixels per side of the square images
    fit: Fit | None = None  # how an image becomes a square
    class_list: Path | None = None  # a file with the names of the classes to load, one per line
    cache: int | None = None  # bytes that decoded images may take on disk; None: no cache
    workers: int | None = None  # threads that read and decode; None: as many as torch may use

    def __post_init__(self) -> None:
        if self.size is not None:
            check_side(self.size)
        if self.fit is not None and self.fit not in get_args(Fit):
            raise unknown("fit", self.fit, get_args(Fit))
        for name, value in (("cache", self.cache), ("workers", self.workers)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1; found {value}.")
        if self.class_list is not None:
            object.__setattr__(self, "class_list", Path(self.class_list))

    def to_json(self) -> dict[str, Any]:
        """The options that determine the images, as plain values; None is left out."""
        name = self.class_list and printable(self.class_list.name)
        options = {"image_size": self.size, "fit": self.fit, "class_list": name}
        return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set that can be loaded by name: an entry of `DATASETS`."""

    summary: str  # one line
    load: Callable[[Path, DecodeOptions, Progress], Dataset]
    location: Literal["installed", "cache", "file", "folder"]  # of its files; the last two must be named with --data
    classes_per_task: int | None = None  # the usual number; None: a fifth of the classes
    # Settings of every preset: which changes of an image keep its class (pad, flip), its usual network, ...
    settings: Mapping[str, Any] = field(default_factory=lambda: {"pad": 0, "flip": False})
    crop: float | None = None  # the usual random crop, as a share of the image's side
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # settings by method, in every preset
    # Settings of the presets: those for "all" objectives, and by objective.
    paper: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    short: Mapping[str, Mapping[str, Any]] = field(
        default_factory=lambda: {"all": {"epochs": 10, "schedule": "one-cycle"}}
    )


DATASETS: dict[str, Source] = {}  # by name; filled by `engram.data`


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    progress: Progress = SILENT,
    options: DecodeOptions | None = None,
) -> Dataset:
    """The data set `name` of `DATASETS`.

    `root` is the .npz file of `arrays`, the folder of a data set of image files (only these have `options`), or the
    folder that has or receives the files of CIFAR (by default $ENGRAM_DATA, or `engram` in the user's cache).
    """
    if name not in DATASETS:
        raise unknown("data set", name, DATASETS, "engram datasets")
    source, options = DATASETS[name], options or DecodeOptions()
    if options != DecodeOptions() and source.location != "folder":
        others = ", ".join(other for other, each in DATASETS.items() if each.location == "folder")
        raise UsageError(
            f"{name} does not consist of image files: image size, fit, class list, cache and workers are for {others}."
        )
    if root is not None and source.location == "installed":
        others = ", ".join(other for other, each in DATASETS.items() if each.location != "installed")
        raise UsageError(f"{name} is installed with engram and has no --data. Data sets with --data are {others}.")
    if root is None and source.location in ("file", "folder"):
        what = "FILE.npz" if source.location == "file" else "DIR"
        raise UsageError(f"The data set '{name}' is a {source.location} of your own. Name it with --data {what}.")
    place = cache_folder() if root is None and source.location == "cache" else Path(root or "").expanduser()
    dataset = source.load(place, options, progress)
    if dataset.published:
        return dataset
    # Data of one's own must not pass for a known data set, and get its settings, because of the name of its file.
    clash = dataset.name in DATASETS and dataset.name != name
    return replace(
        dataset,
        name=f"{dataset.name} ({name})" if clash else dataset.name,
        source={"dataset": name, "data": printable(place.resolve().name), **options.to_json()},
    )


# Tasks


@dataclass(frozen=True, eq=False)
class Task:
    """The classes that arrive together, with their training and test samples."""

    index: int  # counted from 0
    classes: tuple[int, ...]  # labels, in the order of the stream
    train: Samples
    test: Samples

    def __post_init__(self) -> None:
        for part, samples in (("training", self.train), ("test", self.test)):
            if foreign := set(samples.classes()) - set(self.classes):
                raise DataError(f"Task {self.index + 1} has {part} samples of classes {sorted(foreign)}, not its own.")
        if missing := set(self.classes) - set(self.train.classes()):
            raise DataError(f"Task {self.index + 1} has no training samples of its classes {sorted(missing)}.")


@dataclass(frozen=True, eq=False)
class Stream:
    """Tasks in the order of their arrival. Make one with `split`, or from your own tasks."""

    name: str
    tasks: tuple[Task, ...]
    class_names: tuple[str, ...]  # by label
    classes_per_task: int | None = None  # None for a stream of your own tasks
    split: Mapping[str, Any] = field(default_factory=dict)  # the arguments of `split`, for the record

    def __post_init__(self) -> None:
        if [task.index for task in self.tasks] != list(range(len(self.tasks))):
            raise DataError("The tasks of a stream must be counted from 0, in order.")

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def classes(self) -> tuple[int, ...]:
        """Labels in the order in which they first arrive."""
        return tuple(dict.fromkeys(label for task in self.tasks for label in task.classes))

    def first(self, tasks: int) -> Stream:
        if not 1 <= tasks <= len(self):
            raise UsageError(f"This stream has {len(self)} tasks; {tasks} were asked for.")
        return replace(self, tasks=self.tasks[:tasks])

    def fingerprints(self) -> list[str]:
        """A SHA-256 per task over its classes and all its samples, in order."""
        return [
            hashlib.sha256(f"{task.classes} {task.train.fingerprint()} {task.test.fingerprint()}".encode()).hexdigest()
            for task in self.tasks
        ]


def split(
    dataset: Dataset,
    *,
    classes_per_task: int,
    first_task: int | None = None,
    class_order: str | os.PathLike[str] | Sequence[int] = "seed",
    seed: int = 0,
    validation: float = 0.0,
) -> Stream:
    """Split a data set into tasks of `classes_per_task` classes; the last takes the remainder.

    `first_task` is the number of classes of the first task, if it differs. `class_order` is "seed" (drawn from `seed`),
    "1993" (the field's), a file of class names or labels, one per line, or the labels themselves. With `validation`,
    that share of each class's training samples is held out and replaces the test split, which is not used at all.
    """
    present = dataset.train.classes()
    order = _class_order(class_order, present, dataset.class_names, seed)
    first = classes_per_task if first_task is None else first_task
    for option, count in (("classes-per-task", classes_per_task), ("first-task", first)):
        if not 1 <= count <= len(order):
            raise UsageError(f"{dataset.name} has {len(order)} classes; {option} cannot be {count}.")
    if not 0 <= validation < 1:
        raise UsageError(f"The validation share must lie between 0 and 1; found {validation}.")
    train, test = dataset.train, dataset.test
    if validation:
        train, test = hold_out(train, validation, seed, "validation")
    groups = [order[:first], *(order[i : i + classes_per_task] for i in range(first, len(order), classes_per_task))]
    tasks = (Task(index, group, train.of_classes(group), test.of_classes(group)) for index, group in enumerate(groups))
    named = isinstance(class_order, str) and class_order in ("seed", str(FIELD_SEED))
    arguments = {
        "first_task": first_task,
        "class_order": class_order if named else list(order),  # of a file, its content and not its path
        "validation": validation,
        **({"data": dataset.identity} if dataset.identity is not None else {}),
        **({"source": dict(dataset.source)} if dataset.source else {}),
    }
    return Stream(dataset.name, tuple(tasks), dataset.class_names, classes_per_task, arguments)


def _class_order(
    order: str | os.PathLike[str] | Sequence[int], present: tuple[int, ...], names: tuple[str, ...], seed: int
) -> tuple[int, ...]:
    if not isinstance(order, str | os.PathLike):
        labels = tuple(operator.index(label) for label in order)
    elif order == "seed":
        drawn = torch.randperm(len(present), generator=generator(seed, "class order"))
        return tuple(present[i] for i in drawn.tolist())
    elif order == str(FIELD_SEED):
        return tuple(present[i] for i in field_order(len(present)))
    else:  # names, and labels where no class has that name
        label_of = {str(label): label for label in range(len(names))}
        label_of |= {name: label for label, name in enumerate(names)}
        entries = listed_classes(Path(order), label_of, "class order", f"'seed', '{FIELD_SEED}' or a file")
        labels = tuple(label_of[entry] for entry in entries)
    if sorted(labels) != list(present):
        wrong = {
            "missing": sorted(set(present) - set(labels)),
            "unknown": sorted(set(labels) - set(present)),
            "twice": sorted({label for label in labels if labels.count(label) > 1}),
        }
        named = {label: printable(name) for label, name in enumerate(names)}
        found = [f"{what}: {', '.join(named.get(x, str(x)) for x in each)}" for what, each in wrong.items() if each]
        raise UsageError(f"The class order must name each class once; {'; '.join(found)}.")
    return labels


def field_order(count: int) -> list[int]:
    """What "seed 1993" means in published code: a permutation of numpy's legacy generator."""
    order: list[int] = np.random.RandomState(FIELD_SEED).permutation(count).tolist()
    return order


def listed_classes(path: Path, known: Collection[str], what: str, expected: str = "a file") -> list[str]:
    """The classes that the file of this kind lists, one per line; each must be one of `known`."""
    try:
        names = names_in(path)
    except (OSError, UnicodeDecodeError):
        names = []
    if not names:
        raise UsageError(
            f"The {what} {printable(path)} is empty or cannot be read. Expected {expected} with one class per line."
        )
    for name in names:
        if name not in known:
            raise unknown("class", name, known, f"the lines of {path}")
    return names
