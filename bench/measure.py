"""How a time is taken: fair turns, a barrier, the slowest rank, the median.

One *repetition* runs every contender once, each behind its own barrier. The order
rotates from one repetition to the next, so that nobody always follows the same
neighbour. Python's garbage collector is off meanwhile (as in ``timeit``), and runs
between sizes. A contender's time in a repetition is that of its slowest rank: a
collective is over when everybody has the result.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from bench.case import Array, Case

#: Bounds on the number of repetitions where it isn't given: fewer say nothing about
#: the spread, more don't move the median.
FEWEST, MOST = 5, 1000


@dataclass(frozen=True)
class Statistic:
    """Seconds over repetitions, each repetition counted by its slowest rank."""

    median: float
    minimum: float
    lower_quartile: float
    upper_quartile: float
    repeats: int
    wrong: int  #: wrong elements, over all ranks and repetitions


def statistic(times: Array, wrong: int) -> Statistic:
    """Sum up ``times``, an array of seconds of shape (ranks, repetitions)."""
    slowest = np.max(times, axis=0)
    minimum, lower, median, upper = np.quantile(slowest, (0, 0.25, 0.5, 0.75))
    return Statistic(
        float(median), float(minimum), float(lower), float(upper), slowest.size, int(wrong)
    )


def next_batch(done: int, elapsed: float, budget: float) -> int:
    """How many repetitions to add to the ``done`` ones that took ``elapsed`` seconds.

    Batches at most double what there is: one slow repetition at the start, as happens
    on a shared machine, doesn't decide about all. 0 means enough.
    """
    if done < FEWEST:
        return FEWEST - done
    affordable = int((budget - elapsed) * done / elapsed) if elapsed > 0 else MOST
    return max(0, min(affordable, done, MOST - done))


class Clock:
    """Times the cases of one problem. All methods are collective over ``comm``."""

    def __init__(self, comm: Any, cases: Mapping[str, Case]) -> None:
        self.comm, self.cases = comm, cases

    def warm_up(self, repetitions: int) -> None:
        """Run ``repetitions`` that don't count."""
        with no_garbage_collection():
            self._repeat(repetitions)

    def run(self, repetitions: int | None, budget: float) -> dict[str, Statistic]:
        """Time so many repetitions, or as many as ``budget`` seconds allow (checks included).

        Every rank gets the same statistics.
        """
        batches = []
        with no_garbage_collection():
            for batch in self._batches(repetitions, budget):
                batches.append(self._repeat(batch))
        everyone = self.comm.allgather(batches)
        return {
            name: statistic(
                np.array([np.concatenate([batch[name][0] for batch in rank]) for rank in everyone]),
                sum(batch[name][1] for rank in everyone for batch in rank),
            )
            for name in self.cases
        }

    def _batches(self, repetitions: int | None, budget: float) -> Iterator[int]:
        if repetitions is not None:
            yield repetitions
            return
        start, done = perf_counter(), 0
        # Clocks differ: what rank 0 decides is done by all.
        while batch := self.comm.bcast(next_batch(done, perf_counter() - start, budget)):
            yield batch
            done += batch

    def _repeat(self, repetitions: int) -> dict[str, tuple[Array, int]]:
        """This rank's seconds for each repetition, and its wrong elements, by contender."""
        times = {name: np.zeros(repetitions) for name in self.cases}
        wrong = dict.fromkeys(self.cases, 0)
        order = list(self.cases)
        barrier = self.comm.Barrier
        for repetition in range(repetitions):
            for name in order:
                case = self.cases[name]
                case.prepare()
                barrier()
                start = perf_counter()
                case.run()
                times[name][repetition] = perf_counter() - start
                wrong[name] += case.wrong()
            order.append(order.pop(0))
        return {name: (times[name], wrong[name]) for name in self.cases}


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect now, and not again inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
