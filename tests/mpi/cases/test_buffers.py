"""Buffers in every way in which mpi4py takes them, and the views that it does not take."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiring import Communicator
from mpiring.errors import ArgumentError, DtypeError, MpiringError

BASE = np.arange(6, dtype="i4")


class Exported:
    """What another library's array looks like: DLPack, of the old or the new kind."""

    def __init__(self, owner: np.ndarray, *, versioned: bool) -> None:
        self.owner, self._versioned = owner, versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.owner.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if not self._versioned and options:
            raise TypeError("no options are known")
        return self.owner.__dlpack__(**options)


def through_ctypes(values: np.ndarray) -> Any:
    made = (ctypes.c_int * len(values))()
    made[:] = values.tolist()
    return made


#: Ways to hold six C integers; ``np.array`` of what is made shows them (or its owner's).
HOLDERS: dict[str, Callable[[np.ndarray], Any]] = {
    "array": np.array,
    "matrix of rows": lambda values: np.array(values).reshape(2, 3),
    "np.matrix": lambda values: np.array(values).view(np.matrix),
    "array.array": lambda values: array.array("i", values.tolist()),
    "memoryview": lambda values: memoryview(np.array(values)),
    "ctypes": through_ctypes,
    "DLPack": lambda values: Exported(np.array(values), versioned=True),
    "old DLPack": lambda values: Exported(np.array(values), versioned=False),
}


def shown(holder: Any) -> np.ndarray:
    return np.asarray(getattr(holder, "owner", holder)).reshape(-1)


@pytest.mark.parametrize("holder", HOLDERS)
def test_whatever_holds_an_array(ring: Communicator, holder: str) -> None:
    hold, n = HOLDERS[holder], ring.size
    sent, result = hold(BASE + ring.rank), hold(BASE * 0)
    ring.Allreduce(sent, result)
    np.testing.assert_array_equal(shown(result), BASE * n + n * (n - 1) // 2)
    ring.Iallreduce(MPI.IN_PLACE, sent).Wait()
    np.testing.assert_array_equal(shown(sent), BASE * n + n * (n - 1) // 2)
    ring.Bcast(result, n - 1)
    gathered = hold(np.zeros(6 * n, "i4")) if "matrix" not in holder else np.zeros(6 * n, "i4")
    ring.Allgather(hold(BASE), gathered)
    np.testing.assert_array_equal(shown(gathered), np.tile(BASE, n))


#: mpi4py's ways to say what part of an array is meant, of which datatype.
SPECIFICATIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "array": lambda a: a,
    "[array, type]": lambda a: [a, MPI.INT],
    "(array, type)": lambda a: (a, MPI.INT),
    "[array, code]": lambda a: [a, "i"],
    "[array, count]": lambda a: [a, 4],
    "[array, count, type]": lambda a: [a, 4, MPI.INT],
    "(array, count, type)": lambda a: (a, 4, MPI.INT),
    "[array, NumPy's count, None]": lambda a: [a, np.int64(4), None],
    "[array, 0, type]": lambda a: [a, 0, MPI.INT],
    "[array, (count, displ)]": lambda a: [a, (3, 2)],
    "[array, [count, displ], type]": lambda a: [a, [3, 2], MPI.INT],
    "[array, (None, displ), type]": lambda a: [a, (None, 2), MPI.INT],
    "[array, count, displ, type]": lambda a: [a, 3, 2, MPI.INT],
    "[array, another type]": lambda a: [a, MPI.SHORT],
    "[array, count, another type]": lambda a: [a, 5, MPI.SHORT],
    "[array, (count, displ), another type]": lambda a: [a, (5, 3), MPI.SHORT],
    "[None, type]": lambda a: [None, MPI.INT],
    "[None, 0, type]": lambda a: [None, 0, MPI.INT],
}


@pytest.mark.parametrize("how", SPECIFICATIONS)
def test_specifications_as_mpi4py_reads_them(
    ring: Communicator, comm: MPI.Intracomm, how: str
) -> None:
    specify = SPECIFICATIONS[how]
    sent = BASE * 3 + comm.rank
    for method, size, more in (("Allreduce", 6, (MPI.SUM,)), ("Bcast", 6, (0,))):
        results = [np.full(size, -1, "i4") + comm.rank for _ in range(2)]
        for each, result in zip((comm, ring), results):
            first = () if method == "Bcast" else (specify(sent),)
            getattr(each, method)(*first, specify(result), *more)
        np.testing.assert_array_equal(results[1], results[0], method)


@pytest.mark.parametrize("how", SPECIFICATIONS)
def test_a_count_is_that_of_one_block(ring: Communicator, comm: MPI.Intracomm, how: str) -> None:
    """Where an array holds a block for each rank, as MPI counts."""
    specify = SPECIFICATIONS[how]
    n = comm.size
    sent, blocks = BASE * 3 + comm.rank, np.tile(BASE * 5, n) + comm.rank
    gathered = [np.full(6 * n, -1, "i4") for _ in range(2)]
    scattered = [np.full(6, -1, "i4") for _ in range(2)]
    in_place = [blocks.copy() for _ in range(2)]
    # With a displacement the rest of an array is no multiple of the ranks unless a count says so.
    rest = "None, displ" in how
    for each, g, s, p in zip((comm, ring), gathered, scattered, in_place):
        if not rest:
            each.Allgather(specify(sent), specify(g))
            each.Reduce_scatter_block(specify(blocks), specify(s))
            each.Reduce_scatter_block(MPI.IN_PLACE, specify(p))
    np.testing.assert_array_equal(gathered[1], gathered[0])
    np.testing.assert_array_equal(scattered[1], scattered[0])
    # MPI leaves the blocks behind the first undefined.
    np.testing.assert_array_equal(in_place[1][:3], in_place[0][:3])


def test_vector_specifications_as_mpi4py_reads_them(
    ring: Communicator, comm: MPI.Intracomm
) -> None:
    n = comm.size
    counts = [rank % 3 + 1 for rank in range(n)]
    displs = [4 * (n - 1 - rank) for rank in range(n)]
    mine = np.full(counts[comm.rank], comm.rank, "i4")
    two = np.full(2, comm.rank, "i4")
    for sent, specify in (
        (mine, lambda a: [a, counts]),
        (mine, lambda a: [a, counts, MPI.INT]),
        (mine, lambda a: [a, np.array(counts), None]),
        (mine, lambda a: [a, (counts, displs)]),
        (mine, lambda a: [a, (counts, None), MPI.INT]),
        (mine, lambda a: [a, counts, displs, MPI.INT]),
        (mine, lambda a: [a, (np.array(counts), np.array(displs)), "i"]),
        (two, lambda a: [a, 2]),
        (two, lambda a: [a, (2, 3)]),
        (two, lambda a: [a, (2, displs), MPI.INT]),
        ([two.repeat(3), 2 * counts[comm.rank], MPI.SHORT], lambda a: [a, counts, MPI.INT]),
    ):
        results = [np.full(4 * n, -1, "i4") for _ in range(2)]
        for each, result in zip((comm, ring), results):
            each.Allgatherv(sent if each is comm else _as_integers(sent), specify(result))
        np.testing.assert_array_equal(results[1], results[0])
    even = np.full(2 + (comm.rank == 0), comm.rank, "i4")
    results = [np.full(2 * n + 1, -1, "i4") for _ in range(2)]
    comm.Allgatherv(even, results[0])
    ring.Allgatherv(even, [results[1]])
    np.testing.assert_array_equal(results[1], results[0])


def _as_integers(sent: Any) -> Any:
    """MPI matches sizes only; we ask for the same dtype on both sides."""
    if isinstance(sent, list):
        return [sent[0], sent[1] // 2, MPI.INT]
    return sent


def test_each_rank_may_put_the_blocks_where_it_likes(ring: Communicator) -> None:
    n = ring.size
    displs = [(rank + ring.rank) % n * 3 for rank in range(n)]
    result = np.full(3 * n, -1.0)
    ring.Allgatherv(np.full(2, float(ring.rank)), [result, ([2] * n, displs)])
    for rank in range(n):
        assert result[displs[rank] : displs[rank] + 3].tolist() == [rank, rank, -1]


def test_a_scalar_and_an_array_without_dimensions(ring: Communicator) -> None:
    result = np.array(0.0)
    ring.Allreduce(np.float64(ring.rank + 1), result)
    assert result == ring.size * (ring.size + 1) / 2
    with pytest.raises(ArgumentError, match="recvbuf: the array is read-only"):
        ring.Allreduce(result, np.float64(0))


def test_bytes_of_any_kind(ring: Communicator) -> None:
    n = ring.size
    result = bytearray(3 * n)
    ring.Allgather(b"abc", result)
    assert result == b"abc" * n
    for datatype in (MPI.BYTE, MPI.CHAR, MPI.UNSIGNED_CHAR):
        result = bytearray(3 * n)
        ring.Allgather([b"xyz", datatype], [result, datatype])
        assert result == b"xyz" * n
    text = np.array([*"cab"], "U1")
    ring.Bcast(text, 0)
    assert "".join(text) == "cab"


def test_datatypes_made_by_the_caller(ring: Communicator, comm: MPI.Intracomm) -> None:
    row = MPI.INT.Create_contiguous(3).Commit()
    data = BASE.reshape(2, 3) + comm.rank
    ring.Bcast([data[1], 1, row], comm.size - 1)
    np.testing.assert_array_equal(data[1], BASE[3:] + comm.size - 1)
    rows = np.zeros((comm.size, 3), "i4")
    ring.Allgather([data[1], row], [rows, 1, row])
    assert (rows == data[1]).all()
    record = np.dtype([("mass", "f8"), ("charge", "f8"), ("kind", "i8")])
    struct = MPI.Datatype.Create_struct([2, 1], [0, 16], [MPI.DOUBLE, MPI.INT64_T]).Commit()
    particles = np.zeros(4, record)
    particles["kind"] = comm.rank
    ring.Bcast([particles, struct], comm.size - 1)
    assert (particles["kind"] == comm.size - 1).all()
    gaps = MPI.INT.Create_vector(2, 1, 3).Commit()
    with pytest.raises(DtypeError, match="has gaps"):
        ring.Bcast([np.zeros(8, "i4"), 1, gaps], 0)
    with pytest.raises(DtypeError, match="buf: "):
        ring.Bcast([np.zeros(8, "i4"), MPI.DATATYPE_NULL], 0)
    for datatype in (row, struct, gaps):
        datatype.Free()


def test_specifications_that_are_none(ring: Communicator) -> None:
    data = np.zeros(12)
    read_only = np.zeros(12)
    read_only.flags.writeable = False
    for spec in (
        None,
        3,
        "text",
        [],
        [1, 2, 3],
        [data, 3, MPI.DOUBLE, 4, 5],
        [data, 13],
        [data, -1],
        [data, 1.5],
        [data, (4, 9)],
        [data, (4, -1)],
        [data, (1, 2, 3)],
        [data, "no type"],
        [data, 3, 4],
        [data[:5], MPI.LONG_DOUBLE],
        read_only,
        b"twelve bytes",
        object(),
        [np.zeros((4, 3)).T, 2],
        [np.zeros((4, 3)).T, MPI.INT],
    ):
        for call in (
            lambda spec=spec: ring.Allreduce(MPI.IN_PLACE, spec),
            lambda spec=spec: ring.Iallreduce(MPI.IN_PLACE, spec),
            lambda spec=spec: ring.Allreduce_init(MPI.IN_PLACE, spec),
        ):
            with pytest.raises(MpiringError, match=r"recvbuf: ") as caught:
                call()
            assert isinstance(caught.value, ArgumentError | DtypeError)
    ring.Allreduce(MPI.IN_PLACE, data)


def test_counts_that_do_not_fit(ring: Communicator) -> None:
    n = ring.size
    data = np.zeros(4 * n)
    with pytest.raises(ArgumentError, match=f"recvbuf: {4 * n} elements, but sendbuf has 3"):
        ring.Allreduce(np.zeros(3), data)
    with pytest.raises(ArgumentError, match="recvbuf: dtype float64, but sendbuf has float32"):
        ring.Allreduce(np.zeros(4 * n, "f4"), data)
    with pytest.raises(ArgumentError, match="sendbuf: 3 elements, but recvbuf has 4 for each"):
        ring.Allgather(np.zeros(3), data)
    with pytest.raises(ArgumentError, match="recvbuf: 3 elements; 4 are needed"):
        ring.Reduce_scatter_block(data, np.zeros(3))
    for counts in ([4] * (n + 1), [-1] + [5] * (n - 1), "text", 3.5, [None] * n):
        with pytest.raises(ArgumentError, match="recvcounts: "):
            ring.Reduce_scatter(data, np.zeros(4), counts)
        with pytest.raises(ArgumentError, match="recvbuf: "):
            ring.Allgatherv(np.zeros(4), [data, counts, None])
    with pytest.raises(ArgumentError, match="recvcounts: needed with"):
        ring.Reduce_scatter(MPI.IN_PLACE, data)
    with pytest.raises(ArgumentError, match=r"recvbuf: blocks .* leave its"):
        ring.Allgatherv(np.zeros(4), [data, ([4] * n, [4 * r + 1 for r in range(n)])])
    for root in (-1, n, 1.5, "0", None):
        with pytest.raises(ArgumentError, match="root: "):
            ring.Bcast(data, root)
    if n > 1:
        with pytest.raises(ArgumentError, match="no multiple of the"):
            ring.Allgather(np.zeros(4), np.zeros(4 * n + 1))
        with pytest.raises(ArgumentError, match="no multiple of the"):
            ring.Reduce_scatter_block(np.zeros(4 * n + 1), np.zeros(4))
        with pytest.raises(ArgumentError, match=r"recvbuf: blocks .* overlap"):
            ring.Allgatherv(np.zeros(4), [data, ([4] * n, [0] * n)])


VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "transposed": lambda a: a.T,
    "every second row": lambda a: a[::2],
    "every second column": lambda a: a[:, ::2],
    "reversed": lambda a: a[::-1],
    "reversed columns": lambda a: a[:, ::-1],
    "offset": lambda a: a[1:, 2:],
    "a column": lambda a: a[:, 1],
    "rows from the second": lambda a: a[1:],
    "permuted": lambda a: a.reshape(2, 3, 8).transpose(2, 0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_hold_the_result_and_nothing_around_them_changes(
    ring: Communicator, view: str
) -> None:
    take, n = VIEWS[view], ring.size
    numbers = np.arange(48.0).reshape(6, 8)
    for form in ("Allreduce", "Iallreduce", "Allreduce_init"):
        for in_place in (False, True):
            sent, result = numbers + ring.rank, np.full((6, 8), -1.0)
            expected, before = result.copy(), sent.copy()
            take(expected)[:] = take(numbers) * n + n * (n - 1) / 2
            if in_place:
                take(result)[:] = take(sent)
            arguments = (MPI.IN_PLACE if in_place else take(sent), take(result))
            request = getattr(ring, form)(*arguments)
            if form == "Allreduce_init":
                request.Start().Wait()
            elif form == "Iallreduce":
                request.Wait()
            np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(sent, before)
    count = take(numbers).size
    gathered = np.full((n * count, 2), -1.0)
    ring.Allgather(take(numbers) + ring.rank, gathered[:, 1])
    everyone = np.concatenate([take(numbers).reshape(-1) + rank for rank in range(n)])
    np.testing.assert_array_equal(gathered[:, 1], everyone)
    assert (gathered[:, 0] == -1).all()
    received = np.full((6, 8), -1.0) + ring.rank
    expected = received.copy()
    take(expected)[:] = take(np.full((6, 8), n - 2.0))
    ring.Bcast(take(received), n - 1)
    np.testing.assert_array_equal(received, expected)
    mine = np.full((count, 2), -1.0)
    ring.Reduce_scatter_block(
        np.tile(take(numbers), (n, *[1] * (take(numbers).ndim - 1))), mine[:, 0]
    )
    np.testing.assert_array_equal(mine[:, 0], take(numbers).reshape(-1) * n)
    assert (mine[:, 1] == -1).all()


def test_fortran_order_on_one_rank_only(ring: Communicator) -> None:
    numbers = np.arange(35.0).reshape(5, 7)
    order = "F" if ring.rank == ring.size - 1 else "C"
    result = np.zeros((5, 7), order=order)
    ring.Allreduce(np.array(numbers, order=order), result)
    np.testing.assert_array_equal(result, numbers * ring.size)
    received = np.array(numbers + ring.rank, order=order)
    ring.Bcast(received, ring.size - 1)
    np.testing.assert_array_equal(received, numbers + ring.size - 1)


def test_arrays_that_are_not_aligned(ring: Communicator) -> None:
    octets = np.zeros(8 * 9 + 1, "u1")
    odd = octets[1:].view("f8")
    odd[:] = np.arange(9)
    result = np.zeros(8 * 9 + 3, "u1")[3:].view("f8")
    ring.Allreduce(odd, result)
    np.testing.assert_array_equal(result, np.arange(9.0) * ring.size)


@pytest.mark.parametrize("count", [5, 40_000])
def test_the_same_array_for_both_arguments(ring: Communicator, count: int) -> None:
    n = ring.size
    data = np.arange(count, dtype="f4")
    ring.Allreduce(data, data)
    np.testing.assert_array_equal(data, np.arange(count) * n)
    ring.Allreduce(data[:], data.reshape(1, -1))
    np.testing.assert_array_equal(data, np.arange(count) * n * n)
    blocks = np.full((n, count), -1.0)
    blocks[ring.rank] = ring.rank
    ring.Allgather(blocks[ring.rank], blocks)
    np.testing.assert_array_equal(blocks, np.arange(n)[:, None] * np.ones(count))


@pytest.mark.parametrize("count", [5, 40_000])
def test_arrays_that_overlap_in_part(ring: Communicator, count: int) -> None:
    n = ring.size
    data = np.zeros(count + 3)
    for call in (
        lambda: ring.Allreduce(data[:-3], data[3:]),
        lambda: ring.Iallreduce(data[3:], data[:-3]),
        lambda: ring.Allreduce_init(data[1:-1], data[2:]),
    ):
        with pytest.raises(ArgumentError, match=r"sendbuf and recvbuf: overlap .*MPI\.IN_PLACE"):
            call()
    blocks = np.zeros(count * n + 1)
    with pytest.raises(ArgumentError, match=r"sendbuf and recvbuf: overlap.*MPI\.IN_PLACE"):
        ring.Reduce_scatter_block(blocks[:-1], blocks[:count])
    with pytest.raises(ArgumentError, match=r"sendbuf and recvbuf: overlap.*MPI\.IN_PLACE"):
        ring.Allgather(blocks[1 : count + 1], blocks[:-1])
    # What is packed first may overlap as it likes.
    square = np.arange(25.0).reshape(5, 5)
    ring.Allreduce(square, square.T)
    np.testing.assert_array_equal(square, np.arange(25.0).reshape(5, 5).T * n)


def test_one_array_freed_and_another_in_its_place(ring: Communicator) -> None:
    """What is remembered of an address must not outlive the array that had it."""
    for dtype in ("f8", "i8", "f4", "f8"):
        for count in (4, 8, 4):
            for value in range(3):
                data = np.full(count, value, dtype)
                ring.Allreduce(MPI.IN_PLACE, data)
                np.testing.assert_array_equal(data, np.full(count, value * ring.size))
                data.flags.writeable = False
                with pytest.raises(ArgumentError, match="read-only"):
                    ring.Allreduce(MPI.IN_PLACE, data)
                del data
