"""A data set that is small, learnable, and fits nothing evenly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpiring.nn.data import Dataset, load


def write_npz(path: Path, samples: int, test_samples: int = 30) -> Path:
    """Points around three corners of a cube in six dimensions."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, samples + test_samples)
    points = random.normal(size=(len(labels), 6)) + 3 * np.eye(6)[labels]
    np.savez(
        path,
        x_train=points[:samples],
        y_train=labels[:samples],
        x_test=points[samples:],
        y_test=labels[samples:],
    )
    return path


@pytest.fixture
def small(tmp_path: Path) -> Dataset:
    """45 samples: with batches of 14 the last has 3, fewer than five ranks."""
    return load(write_npz(tmp_path / "small.npz", 45))
