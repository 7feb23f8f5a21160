"""A user's arrays as a data set: one .npz file, read without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.data.samples import Dataset, DecodeOptions, Samples, Source, hold_out
from engram.errors import DataError
from engram.progress import Progress
from engram.storage import check_file, machine_memory
from engram.text import printable

Array = npt.NDArray[Any]

SPLIT_KEYS = ("train_inputs", "train_labels", "test_inputs", "test_labels")
WHOLE_KEYS = ("inputs", "labels")
NAMES_KEY = "class_names"


def load(path: Path, options: DecodeOptions | None = None, progress: Progress | None = None) -> Dataset:
    """The images or vectors of an .npz file, named after it.

    It holds `train_inputs, train_labels, test_inputs, test_labels`, or just `inputs, labels`: then a fixed fifth of
    each class is the test split. Labels are integers or text; `class_names` may name the integers.
    """
    check_file(path)
    try:
        arrays = _read(path)
        labels, names = _labels(arrays)
        if "inputs" in arrays:
            train, test = hold_out(_samples(arrays, "inputs", labels["labels"]), share=0.2, seed=0, purpose="test")
            if not len(test):
                raise DataError(
                    f"It has one sample per class, so none can be held out. Add some, or save {SPLIT_KEYS}."
                )
        else:
            train, test = (_samples(arrays, f"{part}_inputs", labels[f"{part}_labels"]) for part in ("train", "test"))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (MemoryError, RuntimeError) as error:  # torch raises the second if it cannot allocate
        raise DataError(f"{path} needs more memory than there is: {error}") from error
    return Dataset(printable(path.stem), train, test, names)


def _read(path: Path) -> dict[str, Array]:
    # Not by np.load: it looks at the first bytes, and takes a damaged file for a pickle.
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name.removesuffix(".npy"): archive.getinfo(name) for name in archive.namelist()}
            keys = _keys(list(members))
            size = sum(members[key].file_size for key in keys)
            memory = machine_memory()
            if size > memory:
                raise DataError(f"Its arrays take {size:,} bytes; this machine has {memory:,} bytes of memory.")
            return {key: _array(archive, members[key], key) for key in keys}
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"It is not an .npz file, or damaged: {error}. Write it with numpy.savez.") from error


def _keys(found: list[str]) -> list[str]:
    """The keys to read; others are ignored."""
    needed = WHOLE_KEYS if set(WHOLE_KEYS) & set(found) and not set(SPLIT_KEYS) & set(found) else SPLIT_KEYS
    if missing := [key for key in needed if key not in found]:
        raise DataError(
            f"It lacks {', '.join(missing)}; found {', '.join(found) or 'nothing'}. "
            f"Save {', '.join(SPLIT_KEYS)}, or just {' and '.join(WHOLE_KEYS)}."
        )
    return [*needed, NAMES_KEY] if NAMES_KEY in found else list(needed)


def _array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, key: str) -> Array:
    """One array, in this machine's byte order, and text as str."""
    try:
        with archive.open(member) as file:
            array: Array = np.lib.format.read_array(file, allow_pickle=False)
        if array.dtype.kind == "S":
            return np.char.decode(array, "utf-8")
        return array.astype(array.dtype.newbyteorder("="), copy=False)
    except UnicodeDecodeError as error:
        raise DataError(f"'{key}' holds text that is not UTF-8. Save it with .astype(str).") from error
    except Exception as error:  # damaged, encrypted or odd members raise errors of any type
        if "Object arrays" in str(error):
            advice = "Save it as numbers or text, for example with .astype(str)."
            raise DataError(f"'{key}' is an array of Python objects, which only pickle could read. {advice}") from error
        raise DataError(f"'{key}' cannot be read: {error}. Write it again with numpy.savez.") from error


def _labels(arrays: Mapping[str, Array]) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The labels by key, as 0 to K - 1, and the K names. The labels of the first key define the classes."""
    names = None
    if NAMES_KEY in arrays:
        array, names = arrays[NAMES_KEY], arrays[NAMES_KEY].ravel().tolist()
        if array.ndim != 1 or array.dtype.kind != "U" or len(set(names)) != len(names):
            raise DataError(f"'{NAMES_KEY}' must be a list of distinct texts; found {array.dtype} {array.shape}.")
    keys = [key for key in arrays if key.endswith("labels")]
    given = {key: _integers_or_text(arrays[key], key, names) for key in keys}
    if len({array.dtype.kind for array in given.values()}) > 1:
        raise DataError(f"{' and '.join(keys)} must both be integers or both text.")
    known = np.unique(given[keys[0]])
    if not len(known):
        raise DataError(f"'{keys[0]}' is empty.")
    for key, array in given.items():
        if strange := np.setdiff1d(array, known).tolist():
            raise DataError(f"'{key}' has {strange[0]!r}, which '{keys[0]}' lacks: it could never be learned.")
    class_names = (names[int(value)] if names else str(value) for value in known)
    return {key: np.searchsorted(known, array) for key, array in given.items()}, tuple(class_names)


def _integers_or_text(array: Array, key: str, names: list[str] | None) -> Array:
    """Labels as int64 or text; where there are names, as positions among them."""
    text = array.dtype.kind == "U"
    if array.ndim != 1 or array.dtype.kind not in "iuU":
        raise DataError(f"'{key}' must be integers or text of shape (n,); found {array.dtype} {array.shape}.")
    if array.dtype == np.uint64 and len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"'{key}' has {int(array.max())}, which is too large for a label.")
    if names is None:
        return array if text else array.astype(np.int64)
    positions = {name if text else position: position for position, name in enumerate(names)}
    if strange := set(array.tolist()) - set(positions):
        raise DataError(f"'{key}' has {min(strange)!r}, which is not among the {len(names)} of '{NAMES_KEY}'.")
    return np.array([positions[value] for value in array.tolist()], dtype=np.int64)


def _samples(arrays: Mapping[str, Array], key: str, labels: Array) -> Samples:
    array = arrays[key]
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(f"'{key}' must be numbers; found {array.dtype}.")
    try:
        return Samples.of(array, labels)
    except DataError as error:
        raise DataError(f"'{key}': {error}") from error


SOURCE = Source(summary="images or vectors of your own, in one .npz file: --data FILE.npz", load=load, location="file")
