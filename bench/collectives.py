"""The contenders that all-reduce, reduce-scatter and all-gather have in common.

The three differ in which part of the whole array a rank *gives* and which part it
*gets*; everything else follows. MPI lays both into one array when in place: the
given part stands where it stands in the whole, the got part begins at 0. For
reduce-scatter that means that rank r's chunk moves to the front.

All contenders of one size use the same arrays, so that none has the better
alignment or the warmer pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import values
from bench.case import Array, Case, Problem, nothing
from bench.plain import PlainRing

CONTENDERS = {
    "ring": "mpiring, blocking call",
    "persistent": "mpiring, bound once by *_init, then Start and Wait",
    "plain": "the same ring in plain Isend/Irecv, without mpiring",
    "mpi": "MPI's own collective, in place",
    "mpi-out": "MPI's own collective, out of place",
    "by-host": "copies of a GPU's arrays to the host and back, and mpi in between",
}

#: Against the best of which ratios are taken.
YARDSTICKS = ("mpi", "mpi-out", "by-host")

#: (rank, ranks, count) -> a part of the whole array.
Part = Callable[[int, int, int], slice]


def whole(rank: int, ranks: int, count: int) -> slice:
    return slice(0, count)


def chunk(rank: int, ranks: int, count: int) -> slice:
    """One of ``ranks`` equal parts."""
    return slice(rank * count // ranks, (rank + 1) * count // ranks)


@dataclass(frozen=True)
class Collective:
    """What tells one collective from another."""

    method: str  #: its name in mpi4py
    gives: Part  #: the part of the whole array that a rank contributes
    gets: Part  #: the part that a rank receives
    plain: Callable[[PlainRing], Callable[[], None]]  #: the plain ring's method
    reduces: bool = True

    def cases(self, problem: Problem, contenders: Sequence[str]) -> dict[str, Case]:
        """The contenders bound to one problem."""
        binder = Binder(self, problem)
        return {name: getattr(binder, name.replace("-", "_"))() for name in contenders}


class Binder:
    """Binds contenders, each by the method of its name, to the arrays of one problem."""

    def __init__(self, collective: Collective, problem: Problem) -> None:
        self.collective, self.problem = collective, problem
        rank, ranks, count = problem.world.rank, problem.world.size, problem.count
        self.arrays = problem.world.arrays
        xp = self.arrays.xp
        #: Where this rank's contribution and its result stand in the whole array.
        self.given_at = collective.gives(rank, ranks, count)
        self.got_at = collective.gets(rank, ranks, count)
        #: This rank's contribution, which nobody writes to.
        self.given = xp.asarray(self._contribution(rank))
        #: The whole array: input of those in place, output of all.
        self.work = xp.zeros(count, problem.dtype)
        self.expected = xp.asarray(self._expected())
        self.result = self.work[: self.expected.size]
        self.flags = xp.empty(self.expected.size, bool)

    def ring(self) -> Case:
        return self._blocking(self.problem.world.ring, self.problem.in_place)

    def mpi(self) -> Case:
        return self._blocking(self.problem.world.comm, in_place=True)

    def mpi_out(self) -> Case:
        return self._blocking(self.problem.world.comm, in_place=False)

    def by_host(self) -> Case:
        call = getattr(self.problem.world.comm, self.collective.method)
        arrays, work = self.arrays, self.work
        host = arrays.host(work)
        in_place, _, *operation = self._arguments(in_place=True)

        def run() -> None:
            arrays.bring(work, host)
            call(in_place, host, *operation)
            arrays.take_back(host, work)
            arrays.finish()

        return self._case(run, self.result, in_place=True)

    def persistent(self) -> Case:
        bind = getattr(self.problem.world.ring, f"{self.collective.method}_init")
        request = bind(*self._arguments(self.problem.in_place))

        def run() -> None:
            request.Start()
            request.Wait()

        return self._case(run, self.result, self.problem.in_place, close=request.Free)

    def plain(self) -> Case:
        add = values.OPERATIONS[self.problem.op]
        in_place = self.collective.plain(PlainRing(self.problem.world.comm, self.work, add))

        def out_of_place() -> None:
            self.work[self.given_at] = self.given
            in_place()

        # This ring leaves a chunk where it stands in the whole array.
        result = self.work[self.got_at]
        run = in_place if self.problem.in_place else out_of_place
        return self._case(run, result, self.problem.in_place)

    def _blocking(self, communicator: Any, in_place: bool) -> Case:
        call, arguments = getattr(communicator, self.collective.method), self._arguments(in_place)
        return self._case(lambda: call(*arguments), self.result, in_place)

    def _arguments(self, in_place: bool) -> tuple[Any, ...]:
        from mpi4py import MPI

        buffers = (MPI.IN_PLACE, self.work) if in_place else (self.given, self.result)
        if not self.collective.reduces:
            return buffers
        return (*buffers, getattr(MPI, self.problem.op.upper()))

    def _case(
        self,
        run: Callable[[], object],
        result: Array,
        in_place: bool,
        close: Callable[[], object] = nothing,
    ) -> Case:
        def prepare() -> None:
            if not in_place or self.given.size < self.work.size:
                self.work.fill(0)  # no result of the run before may pass for one of this
            if in_place:
                self.work[self.given_at] = self.given
            self.arrays.finish()

        def wrong() -> int:
            xp = self.arrays.xp
            return int(xp.count_nonzero(xp.not_equal(result, self.expected, out=self.flags)))

        return Case(run, wrong, prepare, close, in_place)

    def _contribution(self, rank: int) -> Array:
        problem = self.problem
        part = self.collective.gives(rank, problem.world.size, problem.count)
        period = values.contribution(rank, problem.world.size, problem.dtype, problem.op)
        return values.repeat(period, part.start, part.stop)

    def _expected(self) -> Array:
        """Every element that this rank has to get, computed here from what all ranks give."""
        ranks, dtype = self.problem.world.size, self.problem.dtype
        if not self.collective.reduces:
            return np.concatenate([self._contribution(rank) for rank in range(ranks)])
        period = values.reduction(ranks, dtype, self.problem.op)
        return values.repeat(period, self.got_at.start, self.got_at.stop)
