"""Labelled data sets from files that people already have.

Samples stay as they are stored: pixels are bytes, a quarter of their size in
float32, and an uncompressed file is mapped rather than read, so the ranks of a
machine share one copy. What the network sees is made per batch: (x - mean) /
deviation, two numbers for the whole set, taken from the training samples. So
bytes from 0 to 255, pixels from 0 to 16 and ready-made floats all arrive with
mean 0 and variance 1.

Everything that can be wrong with the files is said here, before training starts.
"""

from __future__ import annotations

import gzip
import importlib.util
import math
import re
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from mpiring.errors import ArgumentError
from mpiring.nn.arrays import Array, all_finite

#: A larger label is taken for a mistake (an identifier, a price): a class costs a row of weights.
MAX_CLASSES = 1 << 16

#: Training samples, evenly spaced, from which mean and deviation are taken.
STATISTICS_SAMPLES = 10_000

#: Of each class of the digits, every sample of which the number (from 0) leaves 4 mod 5 is a test.
_TEST_EVERY = 5

_PARTS = ("x_train", "y_train", "x_test", "y_test")
_ALLOWED = (
    "'digits', a folder of IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, "
    "t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte, each possibly .gz), or a .npz file "
    f"with {', '.join(_PARTS)}"
)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples [samples, features] as stored, and labels [samples] as int64, below ``classes``."""

    name: str
    classes: int
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    mean: float
    deviation: float

    @property
    def features(self) -> int:
        return self.x_train.shape[1]

    def train_batch(
        self, which: Any, dtype: Any = np.float32, xp: ModuleType = np
    ) -> tuple[Array, Array]:
        """Inputs [n, features] of ``dtype`` and labels [n] of the training samples ``which``
        (an array of host indices, or a slice), as arrays of ``xp``. They travel as stored."""
        return self._inputs(xp.asarray(self.x_train[which]), dtype), xp.asarray(self.y_train[which])

    def test_batch(
        self, which: Any, dtype: Any = np.float32, xp: ModuleType = np
    ) -> tuple[Array, Array]:
        """The same of the test samples."""
        return self._inputs(xp.asarray(self.x_test[which]), dtype), xp.asarray(self.y_test[which])

    def _inputs(self, stored: Array, dtype: Any) -> Array:
        # Not in a lower precision than stored: large numbers may differ in their last digits only.
        inputs = stored.astype(np.result_type(stored.dtype, dtype, np.float32))
        inputs -= self.mean
        inputs *= 1 / self.deviation
        return inputs.astype(dtype, copy=False)


def load(name: str | Path) -> Dataset:
    """The data set called ``digits``, or the one at a path.

    ``digits``: the 1,797 handwritten digits (8x8 pixels) that come with scikit-learn.
    Of each class every fifth sample, in the order of the set, is a test sample: 1,442
    for training and 355 for test, the same for everybody.

    A folder: IDX files as MNIST, Fashion-MNIST and EMNIST ship them, also ``.gz``. If
    it holds several splits of EMNIST, the path names one: ``folder/emnist-letters``.

    A ``.npz`` file: ``x_train``, ``y_train``, ``x_test``, ``y_test``; samples along the
    first axis, all others are flattened.

    Raises ArgumentError, naming the file and what is allowed, if anything is missing,
    broken or does not fit together.
    """
    if str(name) == "digits":
        return _digits()
    path = Path(name)
    if path.is_dir():
        return _load_idx(path, None)
    if path.suffix == ".npz":
        return _load_npz(path)
    if path.parent.is_dir() and path.name in _idx_sets(path.parent):
        return _load_idx(path.parent, path.name)
    raise ArgumentError(f"data: {str(name)!r} given; allowed are {_ALLOWED}")


def _digits() -> Dataset:
    rows = np.loadtxt(_digits_file(), np.uint8, delimiter=",")  # whole numbers from 0 to 16
    images, labels = rows[:, :-1], rows[:, -1]
    test = np.zeros(len(labels), bool)
    for label in range(10):
        test[np.flatnonzero(labels == label)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    arrays = (images[~test], labels[~test], images[test], labels[test])
    return _checked("digits", dict(zip(_PARTS, arrays, strict=True)), {})


def _digits_file() -> Path:
    """Where scikit-learn keeps the digits: importing it would take each rank more than a second."""
    spec = importlib.util.find_spec("sklearn")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    raise ArgumentError(
        "data: 'digits' comes with scikit-learn, which is not installed; "
        "pip install 'mpiring[train]', or give a folder of IDX files or a .npz file"
    )


# IDX: 0, 0, the type of an element, the number of dimensions, the dimensions, each a big-endian
# 32-bit number, then the elements. http://yann.lecun.com/exdb/mnist/
_UBYTE = 8
_IDX_NAME = re.compile(
    r"(?:(?P<split>.+)-)?(?P<part>train|test|t10k)-(?P<kind>images|labels)[-.]idx[13]-ubyte(?:\.gz)?"
)


def _idx_sets(folder: Path) -> dict[str, dict[str, Path]]:
    """The IDX files of a folder: by the name of their set (empty for MNIST), then by part."""
    sets: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):  # a plain file sorts, and is taken, before its .gz
        match = _IDX_NAME.fullmatch(path.name)
        if match:
            part = "train" if match["part"] == "train" else "test"
            key = f"{'x' if match['kind'] == 'images' else 'y'}_{part}"
            sets.setdefault(match["split"] or "", {}).setdefault(key, path)
    return sets


def _load_idx(folder: Path, name: str | None) -> Dataset:
    """The set called ``name`` in a folder, or the only one."""
    sets = _idx_sets(folder)
    if not sets:
        raise ArgumentError(f"data: no IDX files in {folder}; allowed are {_ALLOWED}")
    if name is None:
        if len(sets) > 1:
            choices = ", ".join(str(folder / choice) for choice in sorted(sets) if choice)
            raise ArgumentError(f"data: {folder} holds several sets; name one of them: {choices}")
        (name,) = sets
    files = sets[name]
    missing = [key for key in _PARTS if key not in files]
    if missing:
        kinds = {"x": "images-idx3-ubyte", "y": "labels-idx1-ubyte"}
        parts = {"train": "train", "test": "test" if name else "t10k"}
        names = (f"{name}-{parts[key[2:]]}-{kinds[key[0]]}".lstrip("-") for key in missing)
        raise ArgumentError(f"data: {folder} lacks {', '.join(names)}; allowed are {_ALLOWED}")
    arrays = {key: _read_idx(path, 3 if key[0] == "x" else 1) for key, path in files.items()}
    return _checked(name or folder.resolve().name, arrays, {k: str(p) for k, p in files.items()})


def _read_idx(path: Path, dimensions: int) -> Array:
    """The array of bytes in an IDX file; mapped, not read, unless it is compressed."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                content = np.frombuffer(file.read(), np.uint8)
        elif path.stat().st_size:
            content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        else:
            content = np.empty(0, np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise ArgumentError(
            f"data: {path} cannot be read, it is damaged or cut short: {error}"
        ) from error
    magic = bytes((0, 0, _UBYTE, dimensions))
    given = content[:4].tobytes()
    if given != magic:
        raise ArgumentError(
            f"data: {path} starts with the bytes {given.hex(' ') or 'of no content'}; allowed is "
            f"{magic.hex(' ')}, an IDX file of bytes in {dimensions} dimensions"
        )
    header = 4 + 4 * dimensions
    shape = [int(n) for n in content[4:header].view(">u4")] if content.size >= header else []
    size = header + math.prod(shape)
    if not shape or content.size != size:
        raise ArgumentError(
            f"data: {path} holds {content.size} bytes; its header of {header} bytes "
            + (f"promises {shape} elements, allowed are {size} bytes" if shape else "is cut short")
        )
    return content[header:].reshape(shape)


def _load_npz(path: Path) -> Dataset:
    arrays = {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in _PARTS if key not in archive]
            if missing:
                raise ArgumentError(
                    f"data: {path} lacks {', '.join(missing)}; it holds "
                    f"{', '.join(archive) or 'nothing'}; needed are {', '.join(_PARTS)}"
                )
            for key in _PARTS:
                arrays[key] = archive[key]
    except ArgumentError:
        raise
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ArgumentError(
            f"data: {path} cannot be read as a .npz file of numbers: {error}"
        ) from error
    return _checked(path.stem, arrays, {key: f"{path}: {key}" for key in _PARTS})


def _checked(name: str, arrays: Mapping[str, Array], origins: Mapping[str, str]) -> Dataset:
    """A data set out of arrays that fit together; ``origins`` says where each came from."""
    where = {key: origins.get(key, f"{name}: {key}") for key in _PARTS}
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        at_x, at_y = f"data: {where[f'x_{part}']}", f"data: {where[f'y_{part}']}"
        if x.dtype.kind not in "buif":
            raise ArgumentError(f"{at_x} has dtype {x.dtype}; allowed are real numbers")
        if y.dtype.kind not in "ui":
            raise ArgumentError(f"{at_y} has dtype {y.dtype}; allowed are integers, from 0")
        if x.size == 0 or y.size == 0:
            empty = at_x if x.size == 0 else at_y
            raise ArgumentError(f"{empty} is empty; allowed is at least one sample")
        if x.ndim < 2 or y.shape != x.shape[:1]:
            raise ArgumentError(
                f"{at_x} has shape {x.shape} and {where[f'y_{part}']} has shape {y.shape}; allowed "
                "are [samples, ...] and [samples], with as many labels as samples"
            )
        if x.dtype.kind == "f" and not all_finite(x):
            raise ArgumentError(f"{at_x} holds inf or nan; allowed are finite numbers")
        if y.min() < 0 or y.max() >= MAX_CLASSES:
            raise ArgumentError(
                f"{at_y} holds labels from {y.min()} to {y.max()}; allowed are 0 to "
                f"{MAX_CLASSES - 1}"
            )
    x_train, y_train, x_test, y_test = (arrays[key] for key in _PARTS)
    if x_train.shape[1:] != x_test.shape[1:]:
        raise ArgumentError(
            f"data: {where['x_train']} has samples of shape {x_train.shape[1:]}, {where['x_test']} "
            f"of {x_test.shape[1:]}; allowed is one shape for both"
        )
    x_train, x_test = x_train.reshape(len(x_train), -1), x_test.reshape(len(x_test), -1)
    some = x_train[:: -(-len(x_train) // STATISTICS_SAMPLES)]
    return Dataset(
        name=name,
        classes=int(max(y_train.max(), y_test.max())) + 1,
        x_train=x_train,
        y_train=y_train.astype(np.int64),
        x_test=x_test,
        y_test=y_test.astype(np.int64),
        mean=float(some.mean(dtype=np.float64)),
        deviation=float(some.std(dtype=np.float64)) or 1.0,
    )
