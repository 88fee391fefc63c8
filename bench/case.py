"""The types that every benchmark fills in, and nothing else.

A *benchmark* is a record: its names for contenders, the formula of its bus
factor, and ``cases``, which binds contenders to one *problem* (one size, on this
rank). A *case* is a contender so bound: prepare, run, ask for wrong elements,
close. Only ``run`` is timed. A new benchmark is a file that makes a record and
a line in ``__main__``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from bench.bandwidth import BusFactor

Array = Any


class World:
    """The ranks that take part: mpi4py's communicator, and mpiring's over the same ranks."""

    def __init__(self, comm: Any, arrays: Any) -> None:
        self.comm = comm
        self.arrays = arrays  #: ``bench.arrays.Arrays``
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    @cached_property
    def ring(self) -> Any:
        """One ``mpiring.Communicator`` for the whole launch, made when first asked for."""
        from mpiring import Communicator

        return Communicator(self.comm)

    def close(self) -> None:
        if "ring" in vars(self):
            self.ring.Free()


@dataclass(frozen=True)
class Problem:
    """One size of one benchmark, on this rank."""

    world: World
    count: int  #: elements of the whole array, S = count * dtype.itemsize bytes
    dtype: np.dtype
    op: str  #: a key of ``values.OPERATIONS``
    in_place: bool


def nothing() -> None:
    """What a case does that has nothing to do."""


@dataclass(frozen=True)
class Case:
    """One contender, bound to one problem."""

    run: Callable[[], object]  #: the timed part; returns when the result is there
    wrong: Callable[[], int]  #: how many elements of the latest result are wrong on this rank
    prepare: Callable[[], object] = nothing  #: before each run: fresh input, result wiped
    close: Callable[[], object] = nothing
    in_place: bool | None = None  #: None where that means nothing


@dataclass(frozen=True)
class Benchmark:
    """What ``python -m bench NAME`` measures."""

    name: str
    summary: str
    contenders: Mapping[str, str]  #: name -> what it is, for ``--help``
    yardsticks: Sequence[str]  #: contenders against the best of which ratios are taken
    #: Binds contenders, in the order given, to one problem. Collective over the ranks.
    cases: Callable[[Problem, Sequence[str]], dict[str, Case]]
    bus_factor: BusFactor
    #: Ranks -> the number of which the count of elements has to be a multiple.
    granularity: Callable[[int], int] = lambda ranks: 1
    reduces: bool = True  #: whether ``--op`` means anything
    devices: Sequence[str] = ("cpu",)  #: where arrays may live
    #: Options whose default differs from that in ``options``.
    defaults: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One contender at one size: a line of the JSON file.

    Times are over repetitions, each the time of its slowest rank; ``time_us`` is the
    median. Bandwidths come from the median, in GB/s (1e9 bytes a second).
    """

    collective: str
    contender: str
    ranks: int
    bytes: int
    time_us: float
    algbw: float
    busbw: float | None
    correct: bool
    mpi: str
    dtype: str
    op: str
    device: str
    in_place: bool | None
    repeats: int
    min_us: float
    q1_us: float
    q3_us: float
    wrong: int  #: elements, over all ranks and repetitions
    speedup: float | None  #: time of the best yardstick over that of this contender
