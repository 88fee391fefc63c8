"""Every dtype and every reduction that NumPy and MPI share, beside MPI's own collectives."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import Communicator
from mpiring.errors import ArgumentError, DtypeError

INTEGERS = "bBhHiIlLqQ"
FLOATS = "fdg"
COMPLEX = "FDG"
OPS = {
    "SUM": INTEGERS + FLOATS + COMPLEX,
    "PROD": INTEGERS + FLOATS + COMPLEX,
    "MAX": INTEGERS + FLOATS,
    "MIN": INTEGERS + FLOATS,
    "LAND": "?" + INTEGERS,
    "LOR": "?" + INTEGERS,
    "LXOR": "?" + INTEGERS,
    "BAND": INTEGERS,
    "BOR": INTEGERS,
    "BXOR": INTEGERS,
}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SIXTEEN = [np.dtype("f2"), BFLOAT16]


@pytest.fixture(params=["auto", "ring"])
def family(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Any:
    with Communicator(comm, algorithm=request.param) as ring:
        yield ring


def values(rank: int, dtype: Any, count: int = 11) -> np.ndarray:
    """Small, 0 and 1 among them, negative ones where the dtype has them; sums are exact."""
    some = (np.arange(count) * (rank + 3) + rank) % 4
    if np.dtype(dtype).kind not in "u?":
        some = some - 1
    array = some.astype(dtype)
    return array * dtype(1 + 1j) if np.dtype(dtype).kind == "c" else array


def test_allreduce_as_mpi_does_it(family: Communicator, comm: MPI.Intracomm) -> None:
    for name, kinds in OPS.items():
        op = getattr(MPI, name)
        for char in kinds:
            sent = values(comm.rank, np.dtype(char).type)
            expected, result = np.empty_like(sent), np.empty_like(sent)
            comm.Allreduce(sent, expected, op)
            family.Allreduce(sent, result, op)
            np.testing.assert_array_equal(result, expected, f"{name} of {sent.dtype}")
            if char == "i":
                family.Allreduce(MPI.IN_PLACE, sent, name.lower())
                np.testing.assert_array_equal(sent, expected, f"{name}, in place")


@pytest.mark.parametrize("char", "?" + INTEGERS + FLOATS + COMPLEX)
def test_the_other_collectives_as_mpi_does_them(
    ring: Communicator, comm: MPI.Intracomm, char: str
) -> None:
    dtype, n = np.dtype(char).type, comm.size
    op = MPI.LXOR if char == "?" else MPI.SUM
    sent = values(comm.rank, dtype, 4 * n)
    counts = [5 if rank == 0 else 3 if rank == n - 1 else 4 for rank in range(n)]
    counts[0] += 4 * n - sum(counts)
    for each, method, arguments, count in (
        (sent, "Reduce_scatter_block", (op,), 4),
        (sent, "Reduce_scatter", (counts, op), counts[comm.rank]),
        (sent[:4], "Allgather", (), 4 * n),
    ):
        expected, result = np.empty(count, dtype), np.empty(count, dtype)
        getattr(comm, method)(each, expected, *arguments)
        getattr(ring, method)(each, result, *arguments)
        np.testing.assert_array_equal(result, expected, method)
    expected, result = np.empty(4 * n, dtype), np.empty(4 * n, dtype)
    comm.Allgatherv(sent[: counts[comm.rank]], [expected, counts])
    ring.Allgatherv(sent[: counts[comm.rank]], [result, counts])
    np.testing.assert_array_equal(result, expected)
    data = sent.copy()
    ring.Bcast(data, n - 1)
    np.testing.assert_array_equal(data, values(n - 1, dtype, 4 * n))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_sixteen_bits(family: Communicator, dtype: np.dtype) -> None:
    """MPI need not know them. The sum is exact while it fits, and so shows each contribution."""
    ring, n = family, family.size
    for count in (0, 1, 7, 5000):
        sent = values(ring.rank, dtype.type, count)
        result = np.empty(count, dtype)
        everyone = [values(rank, dtype.type, count).astype("f4") for rank in range(n)]
        for op, ufunc in ((MPI.SUM, np.add), (MPI.MAX, np.maximum), (MPI.PROD, np.multiply)):
            ring.Allreduce(sent, result, op)
            np.testing.assert_array_equal(
                result.astype("f4"), functools.reduce(ufunc, everyone), str(op)
            )
        whole = np.resize(sent, count * n)
        ring.Reduce_scatter_block(whole, result)
        mine = [np.resize(each, count * n)[ring.rank * count :][:count] for each in everyone]
        np.testing.assert_array_equal(result.astype("f4"), sum(mine))
        gathered = np.empty(count * n, dtype)
        ring.Allgather(sent, gathered)
        np.testing.assert_array_equal(gathered.astype("f4"), np.concatenate(everyone))
        ring.Bcast(sent, 0)
        np.testing.assert_array_equal(sent.astype("f4"), everyone[0])


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
def test_the_mean_of_sixteen_bits_never_overflows(family: Communicator, dtype: np.dtype) -> None:
    large = np.array(30000 if dtype == np.dtype("f2") else 3e38, dtype)
    for count in (1, 5, 20_000):
        sent, result = np.full(count, large), np.empty(count, dtype)
        for _ in range(3):  # with what was bound for the first, if anything was
            family.Allreduce(sent, result, mpiring.MEAN)
            np.testing.assert_allclose(result.astype("f8"), float(large), rtol=2**-7)
            others = [np.zeros(count, dtype) for _ in range(8)]  # where freed memory was
        assert not np.any(others)
        assert (sent == large).all()
        block = np.empty(count, dtype)
        family.Reduce_scatter_block(np.full(count * family.size, large), block, mpiring.MEAN)
        np.testing.assert_allclose(block.astype("f8"), float(large), rtol=2**-7)
        family.Allreduce(MPI.IN_PLACE, sent, "mean")
        np.testing.assert_allclose(sent.astype("f8"), float(large), rtol=2**-7)
    strided = np.full((6, 4), large)
    family.Allreduce(strided[::2].T, strided[1::2].T, mpiring.MEAN)
    np.testing.assert_allclose(strided.astype("f8"), float(large), rtol=2**-7)


@pytest.mark.parametrize("char", FLOATS + COMPLEX)
def test_mean(family: Communicator, char: str) -> None:
    n = family.size
    for count in (1, 7, 20_000):
        sent = np.full(count, family.rank, char)
        result = np.empty(count, char)
        for op in (mpiring.MEAN, "mean"):
            family.Allreduce(sent, result, op)
            np.testing.assert_allclose(result, (n - 1) / 2)
        family.Reduce_scatter_block(np.full(count * n, family.rank, char), result, mpiring.MEAN)
        np.testing.assert_allclose(result, (n - 1) / 2)


@pytest.mark.parametrize("char", [">f4", ">f8", ">i2", ">c8"])
def test_the_other_byte_order(family: Communicator, char: str) -> None:
    sent = np.arange(9).astype(char)
    result = np.empty(9, char)
    family.Allreduce(sent, result)
    np.testing.assert_array_equal(result, np.arange(9) * family.size)


PAIRS = ["FLOAT_INT", "DOUBLE_INT", "LONG_INT", "TWOINT", "SHORT_INT", "LONG_DOUBLE_INT"]


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("op", ["MAXLOC", "MINLOC"])
def test_where_the_largest_is(
    family: Communicator, comm: MPI.Intracomm, name: str, op: str
) -> None:
    from mpi4py.util.dtlib import to_numpy_dtype

    datatype, how = getattr(MPI, name), getattr(MPI, op)
    dtype = to_numpy_dtype(datatype)
    for count in (0, 1, 6, 3000):
        sent = np.zeros(count, dtype)
        sent["f0"] = (np.arange(count) * (comm.rank + 2)) % 5  # equal values among them
        sent["f1"] = comm.rank
        expected, result = np.zeros_like(sent), np.zeros_like(sent)
        comm.Allreduce([sent, datatype], [expected, datatype], how)
        family.Allreduce([sent, datatype], [result, datatype], how)
        for field in dtype.names:
            np.testing.assert_array_equal(result[field], expected[field])
        family.Allreduce(MPI.IN_PLACE, sent, op.lower())
        np.testing.assert_array_equal(sent["f1"], expected["f1"])


def test_an_operation_of_the_callers(family: Communicator) -> None:
    """The complex product of pairs: commutative, and none of MPI's own."""

    def multiply(source: MPI.buffer, target: MPI.buffer, datatype: MPI.Datatype) -> None:
        a, b = (np.frombuffer(each, "f8").reshape(-1, 2) for each in (source, target))
        real = a[:, 0] * b[:, 0] - a[:, 1] * b[:, 1]
        b[:, 1] = a[:, 0] * b[:, 1] + a[:, 1] * b[:, 0]
        b[:, 0] = real

    op = MPI.Op.Create(multiply, commute=True)
    # Chunks of the ring must not cut a pair: as many pairs as ranks.
    sent = np.tile([0.0, 1.0], family.size * 2)
    result = np.empty_like(sent)
    family.Allreduce(sent, result, op)
    power = 1j**family.size
    np.testing.assert_array_equal(result.reshape(-1, 2)[:, 0], power.real)
    np.testing.assert_array_equal(result.reshape(-1, 2)[:, 1], power.imag)
    op.Free()


def test_an_operation_of_the_callers_on_every_dtype(
    family: Communicator, comm: MPI.Intracomm
) -> None:
    for char in INTEGERS + FLOATS + COMPLEX:

        def add(source: MPI.buffer, target: MPI.buffer, datatype: MPI.Datatype) -> None:
            a, b = np.frombuffer(source, char), np.frombuffer(target, char)
            b += a

        op = MPI.Op.Create(add, commute=True)
        sent = values(comm.rank, np.dtype(char).type, 40)
        expected, result = np.empty_like(sent), np.empty_like(sent)
        comm.Allreduce(sent, expected)
        family.Allreduce(sent, result, op)
        np.testing.assert_array_equal(result, expected)
        op.Free()


def test_operations_that_no_ring_can_do(ring: Communicator) -> None:
    def first(source: MPI.buffer, target: MPI.buffer, datatype: MPI.Datatype) -> None:
        target[:] = source[:]

    data = np.ones(4)
    op = MPI.Op.Create(first, commute=False)
    with pytest.raises(ArgumentError, match="not commutative"):
        ring.Allreduce(MPI.IN_PLACE, data, op)
    op.Free()
    for nothing in (MPI.OP_NULL, MPI.REPLACE, MPI.NO_OP, "average", 3, None, np.add):
        with pytest.raises(ArgumentError, match="op: "):
            ring.Allreduce(MPI.IN_PLACE, data, nothing)
    ring.Allreduce(MPI.IN_PLACE, data)
    np.testing.assert_array_equal(data, ring.size)


def test_operations_that_a_dtype_does_not_have(ring: Communicator) -> None:
    pair = np.zeros(3, [("value", "f8"), ("index", "i4")])
    user = MPI.Op.Create(lambda source, target, datatype: None, commute=True)
    for data, op in (
        (np.ones(3, "c8"), MPI.MAX),
        (np.ones(3, "c16"), MPI.MIN),
        (np.ones(3, "f4"), MPI.BAND),
        (np.ones(3, "f8"), MPI.LOR),
        (np.ones(3, "?"), MPI.SUM),
        (np.ones(3, BFLOAT16), MPI.LAND),
        (np.ones(3, "f4"), MPI.MAXLOC),
        (np.ones(3, "i4"), mpiring.MEAN),
        (np.ones(3, "?"), "mean"),
        (np.ones(3, BFLOAT16), user),
        (pair, MPI.SUM),
        (np.zeros(3, [("a", "f4"), ("b", "f4"), ("c", "f4")]), MPI.MAXLOC),
    ):
        with pytest.raises(DtypeError, match="op: "):
            ring.Allreduce(MPI.IN_PLACE, data, op)
    user.Free()


@pytest.mark.parametrize("method", ["Allreduce", "Allgather", "Bcast"])
def test_dtypes_that_are_not_numeric(ring: Communicator, method: str) -> None:
    for data in (
        np.array([None] * 4),
        np.array(["some", "text"]),
        np.zeros(4, "M8[s]"),
        np.zeros(4, "V3"),
        np.zeros(4, [("a", object), ("b", "i4")]),
    ):
        arguments = (data,) if method == "Bcast" else (data, np.concatenate([data] * ring.size))
        with pytest.raises(DtypeError, match="not numeric; allowed are"):
            getattr(ring, method)(*arguments)


def test_small_integers_wrap_around_alike_everywhere(ring: Communicator) -> None:
    data = np.full(1000, 100, "i1")
    ring.Allreduce(MPI.IN_PLACE, data)
    np.testing.assert_array_equal(data, np.array(100 * ring.size).astype("i1"))


def test_every_rank_sees_one_ranks_nan_and_infinity(family: Communicator) -> None:
    data = np.ones(100, "f4")
    if family.rank == family.size - 1:
        data[[3, 98]] = np.nan, np.inf
    for op in (MPI.SUM, MPI.MAX, mpiring.MEAN):
        result = np.empty_like(data)
        family.Allreduce(data, result, op)
        assert np.isnan(result[3]) and np.isinf(result[98])
        assert np.isfinite(np.delete(result, [3, 98])).all()
