"""Buffer specifications without MPI; beside mpi4py's own they stand in tests/mpi/cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpiring.communicator.arguments import operand, overlap, vector_operand
from mpiring.errors import ArgumentError, DtypeError


def take(spec: Any, **options: Any) -> np.ndarray:
    return operand(spec, "buf", writable=True, **options).flat


def test_a_contiguous_array_is_taken_as_it_is() -> None:
    data = np.arange(12.0).reshape(3, 4)
    flat = take(data)
    assert flat.shape == (12,) and np.shares_memory(flat, data)
    assert np.shares_memory(take(data[1:]), data)


def test_another_array_is_packed() -> None:
    data = np.arange(12.0).reshape(3, 4)
    for view in (data.T, data[:, 1:], data[::-1], np.asfortranarray(data)):
        packed = operand(view, "buf", writable=True)
        assert packed.strided is not None and packed.count == view.size
        assert np.shares_memory(packed.strided, view)
        assert not np.shares_memory(packed.flat, view)


def test_counts_and_displacements() -> None:
    data = np.arange(12)
    assert take([data, 3]).tolist() == [0, 1, 2]
    assert take([data, 3], blocks=4).tolist() == data.tolist()
    assert take([data, (3, 5), "l"]).tolist() == [5, 6, 7]
    assert take([data, 3, 5, "l"]).tolist() == [5, 6, 7]
    assert take([data, (None, 10)]).tolist() == [10, 11]
    assert take([data, "i4"]).size == 24
    with pytest.raises(ArgumentError, match=r"buf: 4 elements from element 9 asked for, .* 12 *"):
        take([data, (4, 9)])


def chunks(spec: Any, blocks: int = 3) -> Any:
    return vector_operand(spec, "buf", writable=True, blocks=blocks)[1]


def test_blocks() -> None:
    data = np.arange(12)
    assert chunks(data[:8]) == ((0, 3), (3, 6), (6, 8))
    assert chunks([data, [1, 0, 4]]) == ((0, 1), (1, 1), (1, 5))
    assert chunks([data, (2, 4)]) == ((0, 2), (4, 6), (8, 10))
    assert chunks([data, ([1, 0, 4], [11, 99, 0])]) == ((11, 12), (99, 99), (0, 4))
    assert chunks([data, 2, "l"]) == ((0, 2), (2, 4), (4, 6))
    for spec, words in (
        ([data, [1, 2]], "2 integers given; 3 are needed"),
        ([data, [1, 2, -1]], "counts from 0"),
        ([data, [5, 5, 5]], "leave its 12 elements"),
        ([data, ([5, 5, 1], [0, 4, 11])], "overlap"),
        ([data, ([5, 5, 1], [-1, 5, 11])], "leave its"),
        ([data, (None, [0, 1, 2])], "displacements given without counts"),
        ([data, (1, 2, 3)], "a list holds counts alone"),
    ):
        with pytest.raises(ArgumentError, match=words):
            chunks(spec)


def test_overlapping_memory() -> None:
    data = np.arange(12.0)

    def overlapping(one: np.ndarray, other: np.ndarray) -> bool:
        operands = [operand(each, "buf", writable=True) for each in (one, other)]
        return overlap(*operands)

    assert overlapping(data[:6], data[5:])
    assert not overlapping(data[:6], data[6:])
    assert not overlapping(data[:0], data)
    assert not overlapping(data[::2], data)  # one is packed


def test_subclasses_are_taken_as_plain_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "values", "f4", "w+", shape=(3, 3))
    for array in (np.ones((3, 3)).view(np.matrix), np.ma.masked_equal(np.ones((3, 3)), 2), mapped):
        flat = take(array)
        assert type(flat) is np.ndarray and flat.shape == (9,)
        flat[:] = 7
        assert np.asarray(array)[2, 2] == 7


def test_no_arrays() -> None:
    for spec in (None, 1.5, "text", [], {}, [1, 2], object(), (np.zeros(3),) * 2):
        with pytest.raises(ArgumentError, match="buf: "):
            take(spec)
    for array in (np.zeros(3, object), np.zeros(3, "U5"), np.zeros(3, "m8[s]")):
        with pytest.raises(DtypeError, match=r"buf: dtype .* is not numeric"):
            take(array)
    with pytest.raises(ArgumentError, match="read-only"):
        take(b"octets")
    assert operand(b"octets", "buf", writable=False).count == 6
