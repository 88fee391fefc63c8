"""Training with the optimizer's state shared out over the ranks: what the trainer runs as ``zero``.

Gradients are reduce-scattered behind backward, each rank updates its shard, updated
weights are gathered (``sharded`` has the theory). A rank sees its part of the sum only,
but all have to take the same steps. So before any weight is changed they vote: one
element is exchanged, and one rank that found inf or nan in its shard has all of them
skip the step.

The vote is the host's, also where a GPU computes. The host has to be there for every
message anyway: it hears what the GPU has found (one small copy, as for ``ring``), and
needs no more trips for a vote among hosts than for one among GPUs by way of them. It
then knows the verdict, so that steps skipped launch nothing, and are counted at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mpiring.communicator import Communicator
from mpiring.parallel.buckets import HasValue
from mpiring.parallel.sharded import ShardedReducer
from mpiring.parallel.strategies import Optimizer, broadcast_number, optimizer_bytes


class Zero:
    """Every rank updates its shard of the weights, with an optimizer over that many elements.

    ``optimizer(count)`` makes it; ``is_finite`` tells whether a gradient may be used.
    ``state``, of rank 0: what ``Strategy.state`` told when training was left, or nothing.
    """

    name = "zero"
    in_step = state_between = True

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[HasValue],
        optimizer: Callable[[int], Optimizer],
        is_finite: Callable[[Any], bool],
        state: Mapping[str, Any],
        **reducer_options: Any,
    ) -> None:
        self.workers = tuple(range(comm.size))
        self._comm, self._parameters = comm, parameters
        self._sharded = ShardedReducer(comm, parameters, **reducer_options)
        self.optimizer = optimizer(self._sharded.count)
        self._is_finite = is_finite
        self._spoilt = np.zeros(1, np.uint8)
        self._vote = comm.Allreduce_init("in place", self._spoilt, "max")
        self._voting_seconds = 0.0
        self._steps = 0
        self._skipped: list[int] = []
        self.no_sync = self._sharded.no_sync
        self.ready = self._sharded.ready
        self._take_over(state)

    @property
    def polling_seconds(self) -> float:
        return self._sharded.polling_seconds

    @property
    def waiting_seconds(self) -> float:
        return self._sharded.waiting_seconds + self._voting_seconds

    def update(self) -> None:
        self._sharded.finish()
        self._steps += 1
        shard = self._sharded.gradients
        if self._all(shard.size == 0 or self._is_finite(shard)):
            self.optimizer.steps += 1
            self._sharded.update(self.optimizer.update)
        else:
            self._skipped.append(self._steps)

    def skipped(self) -> list[int]:
        return self._skipped

    def finish(self) -> None: ...

    def state(self, host: Callable[[Any], Any]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        for name, shard in self.optimizer.state.items():
            if self._comm.rank == 0:
                whole[name] = np.empty(self._sharded.total, shard.dtype)
            for place, part in self._sharded.wholes(shard):
                if self._comm.rank == 0:
                    whole[name][place] = host(part)
        if self._comm.rank == 0:
            whole["steps"] = np.asarray(self.optimizer.steps)
        return whole

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Rank 0's ``state``, shared out. Collective."""
        if broadcast_number(self._comm, len(state)):
            self.optimizer.steps = broadcast_number(self._comm, int(state.get("steps", 0)))
            for name, shard in self.optimizer.state.items():
                self._sharded.share_out(state.get(name), shard)

    def _all(self, fine: bool) -> bool:
        """Whether all ranks are ``fine``. Collective."""
        begin = time.perf_counter()
        self._spoilt[0] = not fine
        self._vote.Start().Wait()
        self._voting_seconds += time.perf_counter() - begin
        return not self._spoilt[0]

    def rehearsal(self) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(self._exchange)

    def _exchange(self) -> None:
        for parameter in self._parameters:
            self.ready(parameter)
        self._sharded.finish()
        self._all(True)
        self._sharded.update(lambda values, gradients, start: None)

    def bytes_per_step(self) -> float:
        """2(n-1)/n of the gradients' bytes, as for the ring; the vote's few are left out."""
        n, itemsize = self._comm.size, self._sharded.gradients.dtype.itemsize
        return 2 * (n - 1) / n * self._sharded.total * itemsize

    def report(self) -> dict[str, Any]:
        n = self._comm.size
        return optimizer_bytes(self._comm, self.optimizer, self._sharded.total, owners=n)
