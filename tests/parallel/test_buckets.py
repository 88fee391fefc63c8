"""Wherever gradients lie, a bucket is their memory, or it is refused."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpiring.errors import ArgumentError
from mpiring.nn.model import MLP
from mpiring.parallel.buckets import layout

#: Twelve numbers each, which a base somewhere below owns.
MAKERS: dict[str, Callable[[], np.ndarray]] = {
    "array": lambda: np.zeros(12),
    "column of a Fortran array": lambda: np.zeros((12, 3), order="F")[:, 1],
    "column of a transposed array": lambda: np.zeros((3, 12)).T[:, 2],
    "bytes seen as numbers": lambda: np.zeros(96, "u1").view("f8"),
    "bytearray": lambda: np.frombuffer(bytearray(96)),
    "mapped memory": lambda: np.frombuffer(mmap.mmap(-1, 96)),
    "slice of a slice": lambda: np.zeros(50)[5:30][3:15],
    "subclass": lambda: np.zeros(12).view(np.matrix).A1,
}


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("limit", [1, 40, 1000])
def test_a_bucket_is_the_memory_of_its_gradients(
    maker: Callable[[], np.ndarray], limit: int
) -> None:
    flat = maker()
    gradients = [flat[:4].reshape(2, 2), flat[4:5], flat[5:].reshape(1, 7)]
    buckets = layout(gradients, limit, limit)
    assert [i for bucket in buckets for i in bucket.members] == [0, 1, 2]
    for number, bucket in enumerate(buckets, 1):
        assert bucket.gradient.ndim == 1
        bucket.gradient[...] = number
    for bucket in buckets:
        for member in bucket.members:
            assert (gradients[member] == bucket.index + 1).all()
    if limit == 1 or maker is MAKERS["column of a Fortran array"]:
        assert (
            len(buckets) == 3
        )  # the array at the bottom is in another order: no two can be joined
    else:
        assert len(buckets) == (2 if limit == 40 else 1)


def test_the_gradients_of_a_model_are_joined() -> None:
    model = MLP((64, 512, 512, 10))
    gradients = [parameter.gradient for parameter in model.parameters]
    assert [bucket.members for bucket in layout(gradients)] == [(0, 1, 2), (3, 4, 5)]
    small = layout([parameter.gradient for parameter in MLP((6, 7, 3)).parameters])
    assert [bucket.members for bucket in small] == [(0, 1, 2, 3)]


def test_columns_side_by_side() -> None:
    whole = np.zeros((5, 3), order="F")
    buckets = layout([whole[:, i] for i in range(3)])
    for bucket in buckets:
        bucket.gradient[...] = 1
    assert (whole == 1).all()


def test_gradients_without_elements() -> None:
    flat = np.zeros(7)
    gradients = [flat[:0], flat[:3], flat[3:3].reshape(0, 5), flat[3:]]
    buckets = layout(gradients)
    assert [i for bucket in buckets for i in bucket.members] == [0, 1, 2, 3]
    for bucket in buckets:
        bucket.gradient[...] = 1
    assert flat.all()


@pytest.mark.parametrize("limit", [1, 1000])
@pytest.mark.parametrize(
    "spans", [((0, 6), (4, 10)), ((0, 5), (0, 5)), ((0, 10), (3, 4)), ((9, 10), (0, 10))]
)
def test_gradients_that_share_memory_are_refused(
    spans: tuple[tuple[int, int], ...], limit: int
) -> None:
    flat = np.zeros(10)
    other: list[Any] = [np.zeros(3)]
    with pytest.raises(ArgumentError, match=r"gradients: numbers \d and \d share memory"):
        layout(other + [flat[start:stop] for start, stop in spans], limit, limit)


def test_values_are_cut_and_joined_as_gradients_are() -> None:
    flat, near, far = np.zeros(12), np.zeros(9, "f4"), np.zeros(3, "f4")
    gradients = [flat[:4].reshape(2, 2), flat[4:5], flat[5:8], flat[8:9], flat[9:]]
    values = [near[:4], near[4:5].reshape(1, 1), far, near[5:6], near[6:]]
    buckets = layout(gradients, 1000, 40, values)
    assert [bucket.members for bucket in buckets] == [(0, 1), (2,), (3, 4)]
    for bucket in buckets:
        bucket.value[...] = bucket.index + 1
    assert near.tolist() == [1] * 5 + [3] * 4 and far.tolist() == [2] * 3


def test_values_that_do_not_fit_are_refused() -> None:
    flat, other = np.zeros(10), np.zeros((5, 2))
    gradients = [flat[:5], flat[5:]]
    for values, wrong in [
        (
            [flat[:4], flat[5:]],
            r"values: sizes \[4, 5\] given; allowed are the gradients' \[5, 5\]",
        ),
        ([other[:, 0], other[:, 1]], "values: number 0 is not C-contiguous"),
        ([flat[:5], flat[3:8]], "values: numbers 0 and 1 share memory"),
    ]:
        with pytest.raises(ArgumentError, match=wrong):
            layout(gradients, values=values)
