"""The exchange of gradients behind the backward pass: what all reducers do alike.

``ready`` is called as each gradient is done. When all of a bucket's gradients
are, its collective starts; the call also polls, since MPI moves nothing by
itself. ``finish`` waits for what is left: only that time is *exposed*.

Buckets start in the order of their index on every rank, whatever the order in
which gradients become ready there: a bucket that is full early waits for those
before it. All bindings, one persistent collective per bucket, are made once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from mpiring.communicator import Communicator
from mpiring.engine.request import Request
from mpiring.parallel.buckets import Bucket, Filling, HasGradient, describe
from mpiring.parallel.consensus import agree


class Exchange:
    """Starts a collective for each bucket of gradients; which one is the subclass's affair.

    ``parameters`` in the order in which their gradients become ready. The constructor is
    collective: all ranks compare their layout. ``overlap=False`` starts everything in
    ``finish``: the naive mode, to compare.
    """

    #: Of the buckets, in their order; a subclass fills it.
    _requests: Sequence[Request]

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[HasGradient],
        buckets: list[Bucket],
        overlap: bool,
    ) -> None:
        self._comm = comm
        self._overlap = overlap
        self.buckets = buckets
        self._filling = Filling(parameters, buckets)
        agree(comm, "parameters: bucket layouts", describe(buckets))
        self.no_sync = self._filling.no_sync
        self.polling_seconds = 0.0  #: spent in starting exchanges and moving them
        self.waiting_seconds = 0.0  #: spent in waiting for their ends
        self._started = 0

    def ready(self, parameter: HasGradient) -> None:
        """The gradient of ``parameter`` is done, and must not be written until ``finish``."""
        if self._filling.paused:
            return
        begin = time.perf_counter()
        self._filling.ready(parameter)
        if self._overlap:
            self._start_full()
            self._comm.poll()
        self.polling_seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Return when the sums over ranks are where they belong. Every parameter must be ready."""
        begin = time.perf_counter()
        self._filling.check("finish")
        self._start_full()
        for request in self._requests:
            request.Wait()
        self._filling.reset()
        self._started = 0
        self.waiting_seconds += time.perf_counter() - begin

    def free(self) -> None:
        """Let go of the persistent collectives."""
        for request in self._requests:
            request.Free()

    def _start_full(self) -> None:
        while self._started < len(self.buckets) and self._filling.full(self._started):
            self._requests[self._started].Start()
            self._started += 1
