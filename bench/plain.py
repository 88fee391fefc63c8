"""The ring as anybody would write it with mpi4py: the baseline without mpiring.

Rank r's neighbours are r-1 and r+1. In each of n-1 steps every rank passes one
chunk to the right: while reducing, the sum so far, to which the receiver adds its
own; while gathering, a chunk that is complete. Rank r ends the first half with
chunk r. (Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for
clusters of workstations".) Views and the spare chunk are made once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.case import Array


class PlainRing:
    """A ring over ``comm`` for ``data``, reduced by the ufunc ``add`` in place."""

    def __init__(self, comm: Any, data: Array, add: np.ufunc) -> None:
        from mpi4py import MPI

        self.comm, self.add, self.waitall = comm, add, MPI.Request.Waitall
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self.chunks = np.array_split(data, self.size)
        self.spare = np.empty_like(self.chunks[0])  # no chunk is longer than the first

    def _pass(self, give: Array, take: Array) -> None:
        received = self.comm.Irecv(take, self.left)
        self.waitall([received, self.comm.Isend(give, self.right)])

    def reduce_scatter(self) -> None:
        for step in range(1, self.size):
            own = self.chunks[(self.rank - step - 1) % self.size]
            spare = self.spare[: own.size]
            self._pass(self.chunks[(self.rank - step) % self.size], spare)
            self.add(own, spare, out=own)

    def allgather(self) -> None:
        for step in range(self.size - 1):
            give, take = (self.rank - step) % self.size, (self.rank - step - 1) % self.size
            self._pass(self.chunks[give], self.chunks[take])

    def allreduce(self) -> None:
        self.reduce_scatter()
        self.allgather()
