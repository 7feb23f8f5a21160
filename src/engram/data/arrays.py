"""Arrays of one's own in one .npz file, read without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engram.data.samples import Dataset, Samples, hold_out
from engram.errors import DataError
from engram.text import printable

Array = npt.NDArray[Any]

SPLIT_KEYS = ("train_inputs", "train_labels", "test_inputs", "test_labels")
WHOLE_KEYS = ("inputs", "labels")
NAMES_KEY = "class_names"


def load(path: Path) -> Dataset:
    """The images or vectors of an .npz file, named after it.

    It holds `train_inputs, train_labels, test_inputs, test_labels`, or `inputs, labels`, of which a fixed fifth of each
    class is then for testing; labels are whole numbers or text, and `class_names` may name the numbers.
    """
    arrays = _read(path)
    names = _names(arrays, path)
    if "inputs" in arrays:
        labels, class_names = _labels(arrays, ("labels",), names, path)
        train, test = _held_out(_samples(arrays, "inputs", labels["labels"], path), path)
    else:
        labels, class_names = _labels(arrays, ("train_labels", "test_labels"), names, path)
        train = _samples(arrays, "train_inputs", labels["train_labels"], path)
        test = _samples(arrays, "test_inputs", labels["test_labels"], path)
    if train.shape != test.shape:
        raise DataError(f"{path}: training samples are {train.shape}, test samples {test.shape}. Make them alike.")
    return Dataset(printable(path.stem), train, test, class_names)


def _read(path: Path) -> dict[str, Array]:
    if not path.is_file():
        raise DataError(f"There is no file {path}. Name an .npz file with --data FILE.npz.")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not an .npz file. Write one with numpy.savez, which takes several arrays by name.")
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: _array(file, key, path) for key in _keys(file.files, path)}
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read: {error}. Write it again with numpy.savez.") from error


def _keys(found: list[str], path: Path) -> list[str]:
    """The keys to read, of those found; others are left alone."""
    needed = WHOLE_KEYS if set(WHOLE_KEYS) & set(found) and not set(SPLIT_KEYS) & set(found) else SPLIT_KEYS
    missing = [key for key in needed if key not in found]
    if missing:
        raise DataError(
            f"{path} lacks {', '.join(missing)}; it holds {', '.join(found) or 'nothing'}. "
            f"Save {', '.join(SPLIT_KEYS)}, or just {' and '.join(WHOLE_KEYS)}."
        )
    return [*needed, *(key for key in (NAMES_KEY,) if key in found)]


def _array(file: Mapping[str, Any], key: str, path: Path) -> Array:
    try:
        array = file[key]
    except Exception as error:  # what is raised over damaged, encrypted or odd members is not limited to any list
        if "Object arrays" in str(error):
            raise DataError(
                f"{path}: '{key}' is an array of Python objects, which only pickle could read. "
                "Save it as numbers or text, for example with .astype(str)."
            ) from error
        raise DataError(f"{path}: '{key}' cannot be read: {error}. Write it again with numpy.savez.") from error
    if not isinstance(array, np.ndarray):  # numpy hands out the bytes of a member that is no array
        raise DataError(f"{path}: '{key}' is not an array. Write it again with numpy.savez.")
    return _native(array, key, path)


def _native(array: Array, key: str, path: Path) -> Array:
    """In this machine's byte order, and text as str."""
    try:
        if array.dtype.kind == "S":
            return np.char.decode(array, "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: '{key}' holds text that is not UTF-8. Save it with .astype(str).") from error
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _names(arrays: Mapping[str, Array], path: Path) -> list[str] | None:
    if NAMES_KEY not in arrays:
        return None
    array = arrays[NAMES_KEY]
    names = [str(name) for name in array.ravel()]
    if array.ndim != 1 or array.dtype.kind != "U" or len(set(names)) != len(names):
        raise DataError(
            f"{path}: '{NAMES_KEY}' must be a list of different texts; found {array.dtype} {array.shape}, "
            f"{len(set(names))} different."
        )
    return names


def _labels(
    arrays: Mapping[str, Array], keys: tuple[str, ...], names: list[str] | None, path: Path
) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The labels under each of `keys` as 0 to K - 1, and the K names. The first of `keys` says which classes exist."""
    given = {key: _whole_numbers_or_text(arrays[key], key, names, path) for key in keys}
    if len({array.dtype.kind for array in given.values()}) > 1:
        raise DataError(f"{path}: {' and '.join(keys)} must both be whole numbers or both text. Save them alike.")
    known = np.unique(given[keys[0]])
    if not len(known):
        raise DataError(f"{path}: '{keys[0]}' is empty: there is nothing to learn.")
    for key, array in given.items():
        if strange := np.setdiff1d(array, known).tolist():
            raise DataError(f"{path}: '{key}' has {strange[0]!r}, which '{keys[0]}' lacks: it could never be learned.")
    class_names = (names[int(value)] if names else str(value) for value in known)
    return {key: np.searchsorted(known, array) for key, array in given.items()}, tuple(class_names)


def _whole_numbers_or_text(array: Array, key: str, names: list[str] | None, path: Path) -> Array:
    """Labels as int64 or text; where there are names, always as positions among them."""
    if array.ndim != 1 or array.dtype.kind not in "iuU":
        raise DataError(
            f"{path}: '{key}' must be one whole number or text per sample, of shape (n,); "
            f"found {array.dtype} {array.shape}."
        )
    text = array.dtype.kind == "U"
    if array.dtype == np.uint64 and len(array) and int(array.max()) > np.iinfo(np.int64).max:
        raise DataError(f"{path}: '{key}' has {int(array.max())}, which is too large for a label.")
    if names is None:
        return array if text else array.astype(np.int64)
    positions = {name if text else position: position for position, name in enumerate(names)}
    if strange := set(array.tolist()) - set(positions):
        raise DataError(f"{path}: '{key}' has {min(strange)!r}, which is not among the {len(names)} of '{NAMES_KEY}'.")
    return np.array([positions[value] for value in array.tolist()], dtype=np.int64)


def _samples(arrays: Mapping[str, Array], key: str, labels: Array, path: Path) -> Samples:
    array = arrays[key]
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise DataError(f"{path}: '{key}' must be numbers; found {array.dtype}.")
    try:
        return Samples.of(array, labels)
    except DataError as error:
        raise DataError(f"{path}: '{key}': {error}") from error


def _held_out(samples: Samples, path: Path) -> tuple[Samples, Samples]:
    train, test = hold_out(samples, share=0.2, seed=0, purpose="test")
    if not len(test):
        raise DataError(
            f"{path} has one sample per class, so none can be held out for testing. "
            f"Add samples, or save {', '.join(SPLIT_KEYS)}."
        )
    return train, test
