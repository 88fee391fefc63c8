"""All collectives in all their forms, beside NumPy: counts that divide nothing, in place or not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiring import Communicator

COUNTS = (0, 1, 2, 3, 7, 100003)
FORMS = ("blocking", "non-blocking", "persistent")
IN_PLACE = MPI.IN_PLACE


def run(ring: Communicator, form: str, method: str, *arguments: Any) -> Iterator[None]:
    """Call ``method`` several times, and come back when each is over.

    The caller fills the arrays anew before each.
    """
    if form == "persistent":
        request = getattr(ring, f"{method}_init")(*arguments)
        for _ in range(3):
            yield
            request.Start()
            request.Wait()
        yield
        request.Free()
        return
    for _ in range(2):
        yield
        if form == "blocking":
            getattr(ring, method)(*arguments)
        else:
            getattr(ring, f"I{method[0].lower()}{method[1:]}")(*arguments).Wait()
    yield


def check(
    ring: Communicator,
    form: str,
    method: str,
    arguments: tuple[Any, ...],
    result: np.ndarray,
    fill: Callable[[int], None],
    expected: Callable[[int], np.ndarray],
) -> None:
    """``fill(t)`` prepares the arrays for call t, ``expected(t)`` is its result."""
    t = -1
    for _ in run(ring, form, method, *arguments):
        # Quicker than numpy.testing, which says more once it is known to differ.
        if t >= 0 and not np.array_equal(result, expected(t)):
            np.testing.assert_array_equal(result, expected(t))
        t += 1
        fill(t)


@functools.cache
def pattern(count: int) -> np.ndarray:
    return (np.arange(count) * 7 % 23).astype("f4")


def contribution(rank: int, count: int, t: int) -> np.ndarray:
    """Small integers: their sums are exact in float32."""
    return pattern(count) + np.float32(3 * rank + t)


def total(size: int, count: int, t: int) -> np.ndarray:
    """The sum of all contributions."""
    return size * pattern(count) + np.float32(3 * (size * (size - 1) // 2) + size * t)


@pytest.fixture(params=["auto", "ring"])
def family(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Iterator[Communicator]:
    """By itself a communicator takes another family for short arrays than for long ones."""
    with Communicator(comm, algorithm=request.param) as ring:
        yield ring


@pytest.mark.parametrize("form", FORMS)
def test_allreduce(family: Communicator, form: str) -> None:
    ring = family
    for count in (*COUNTS, 1100003):
        sent, result = np.empty(count, "f4"), np.empty(count, "f4")

        def fill(t: int) -> None:
            sent[:] = contribution(ring.rank, count, t)
            result.fill(np.nan)

        def fill_in_place(t: int) -> None:
            result[:] = contribution(ring.rank, count, t)

        def expected(t: int) -> np.ndarray:
            return total(ring.size, count, t)

        check(ring, form, "Allreduce", (sent, result), result, fill, expected)
        check(ring, form, "Allreduce", (IN_PLACE, result), result, fill_in_place, expected)


@pytest.mark.parametrize("form", FORMS)
def test_reduce_scatter_block(ring: Communicator, form: str) -> None:
    for count in COUNTS:
        block = -(-count // ring.size)
        whole, mine = block * ring.size, slice(ring.rank * block, (ring.rank + 1) * block)
        sent, result, both = np.empty(whole, "f4"), np.empty(block, "f4"), np.empty(whole, "f4")

        def fill(t: int) -> None:
            sent[:] = both[:] = contribution(ring.rank, whole, t)
            result.fill(np.nan)

        def expected(t: int) -> np.ndarray:
            return total(ring.size, whole, t)[mine]

        check(ring, form, "Reduce_scatter_block", (sent, result), result, fill, expected)
        check(ring, form, "Reduce_scatter_block", (IN_PLACE, both), both[:block], fill, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [True, False], ids=["recvcounts", "no recvcounts"])
def test_reduce_scatter(ring: Communicator, form: str, given: bool) -> None:
    for count in COUNTS:
        counts = uneven(count, ring.size)
        start = sum(counts[: ring.rank])
        mine = slice(start, start + counts[ring.rank])
        sent, both = np.empty(count, "f4"), np.empty(count, "f4")
        result = np.empty(counts[ring.rank], "f4")

        def fill(t: int) -> None:
            sent[:] = both[:] = contribution(ring.rank, count, t)
            result.fill(np.nan)

        def expected(t: int) -> np.ndarray:
            return total(ring.size, count, t)[mine]

        more = (counts,) if given else ()
        check(ring, form, "Reduce_scatter", (sent, result, *more), result, fill, expected)
        if given:
            arguments = (IN_PLACE, both, counts)
            place = both[: counts[ring.rank]]
            check(ring, form, "Reduce_scatter", arguments, place, fill, expected)


@pytest.mark.parametrize("form", FORMS)
def test_allgather(ring: Communicator, form: str) -> None:
    for count in COUNTS:
        block = -(-count // ring.size)
        own = slice(ring.rank * block, (ring.rank + 1) * block)
        sent, result = np.empty(block, "f4"), np.empty(block * ring.size, "f4")

        def fill(t: int) -> None:
            sent[:] = contribution(ring.rank, block, t)
            result.fill(np.nan)

        def fill_in_place(t: int) -> None:
            result.fill(np.nan)
            result[own] = contribution(ring.rank, block, t)

        def expected(t: int) -> np.ndarray:
            return np.concatenate([contribution(rank, block, t) for rank in range(ring.size)])

        check(ring, form, "Allgather", (sent, result), result, fill, expected)
        check(ring, form, "Allgather", (IN_PLACE, result), result, fill_in_place, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["even", "counts", "displacements"])
def test_allgatherv(ring: Communicator, form: str, layout: str) -> None:
    """Blocks of different sizes, next to each other or in any order with gaps between."""
    for count in COUNTS:
        if layout == "even":
            counts = [count // ring.size + (rank < count % ring.size) for rank in range(ring.size)]
        else:
            counts = uneven(count, ring.size)
        if layout == "displacements":
            # The last rank's block first, with an element that nobody writes after each.
            displs = [sum(counts[rank + 1 :]) + ring.size - 1 - rank for rank in range(ring.size)]
            room = count + ring.size
        else:
            displs = [sum(counts[:rank]) for rank in range(ring.size)]
            room = count
        sent, result = np.empty(counts[ring.rank], "f4"), np.empty(room, "f4")
        recvbuf: Any = {
            "even": result,
            "counts": [result, counts],
            "displacements": [result, (counts, displs), MPI.FLOAT],
        }[layout]

        def put(target: np.ndarray, rank: int, t: int) -> None:
            start, stop = displs[rank], displs[rank] + counts[rank]
            target[start:stop] = contribution(rank, counts[rank], t)

        def fill(t: int) -> None:
            sent[:] = contribution(ring.rank, counts[ring.rank], t)
            result.fill(-1)

        def fill_in_place(t: int) -> None:
            result.fill(-1)
            put(result, ring.rank, t)

        def expected(t: int) -> np.ndarray:
            whole = np.full(room, -1, "f4")
            for rank in range(ring.size):
                put(whole, rank, t)
            return whole

        check(ring, form, "Allgatherv", (sent, recvbuf), result, fill, expected)
        check(ring, form, "Allgatherv", (IN_PLACE, recvbuf), result, fill_in_place, expected)


@pytest.mark.parametrize("form", FORMS)
def test_bcast(ring: Communicator, form: str) -> None:
    for count in COUNTS:
        for root in {0, ring.size // 2, ring.size - 1}:
            data = np.empty(count, "f4")

            def fill(t: int) -> None:
                data[:] = contribution(ring.rank, count, t)

            def expected(t: int) -> np.ndarray:
                return contribution(root, count, t)

            check(ring, form, "Bcast", (data, root), data, fill, expected)


def uneven(count: int, size: int) -> list[int]:
    """Sizes that differ a lot, some of them 0."""
    counts = [0] * size
    for rank in range(size - 1):
        counts[rank] = 0 if rank % 3 == 1 else (count - sum(counts)) // 3
    counts[-1] = count - sum(counts)
    return counts


def test_what_is_sent_stays_as_it_is(ring: Communicator) -> None:
    for count in (3, 5000):
        sent = contribution(ring.rank, count, 0)
        ring.Allreduce(sent, np.empty_like(sent))
        ring.Allgather(sent, np.empty(count * ring.size, "f4"))
        ring.Reduce_scatter_block(np.resize(sent, count * ring.size), np.empty(count, "f4"))
        np.testing.assert_array_equal(sent, contribution(ring.rank, count, 0))


def test_some_ranks_may_be_in_place_and_others_not(ring: Communicator) -> None:
    for count in (5, 40_000):
        result = contribution(ring.rank, count, 0)
        sent = IN_PLACE if ring.rank % 2 else result.copy()
        ring.Allreduce(sent, result)
        np.testing.assert_array_equal(result, total(ring.size, count, 0))


def test_chunks_are_cut_into_segments(comm: MPI.Intracomm) -> None:
    """Many messages a chunk; a segment is one element at least."""
    with Communicator(comm, algorithm="ring", segment=64) as ring:
        for segment_count in (1, 1000, 1603):
            result = contribution(ring.rank, segment_count, 0)
            ring.Allreduce(IN_PLACE, result)
            np.testing.assert_array_equal(result, total(ring.size, segment_count, 0))
            data = contribution(ring.rank, segment_count, 0)
            ring.Bcast(data, ring.size - 1)
            np.testing.assert_array_equal(data, contribution(ring.size - 1, segment_count, 0))
    with Communicator(comm, algorithm="ring", segment=1) as ring:
        result = contribution(ring.rank, 13, 0)
        ring.Allreduce(IN_PLACE, result)
        np.testing.assert_array_equal(result, total(ring.size, 13, 0))


@pytest.mark.parametrize("count", [7, 1100003])
def test_every_rank_holds_the_same_bits(ring: Communicator, count: int) -> None:
    """Step after step the rounding errors of each rank would drift apart, if they differed."""
    weights = np.linspace(0.1, 1, count, dtype="f4")
    random = np.random.default_rng(ring.rank)
    gradient, mean = np.empty(count, "f4"), np.empty(count, "f4")
    noise = random.standard_normal(count, "f4")
    for step in range(200 if count < 100 else 5):
        np.multiply(noise, np.float32(1 + step / 7), out=gradient)
        ring.Allreduce(gradient, mean)
        weights -= np.float32(0.01) * mean + np.float32(1e-3) * weights
    everyone = ring.allgather(weights.tobytes())
    assert all(octets == everyone[0] for octets in everyone)
