"""Gradients summed over ranks while the backward pass is still running.

``ready`` is called as each gradient is done. When all of a bucket's gradients
are, its all-reduce starts; the call also polls, since MPI moves nothing by
itself. ``finish`` waits for what is left: only that time is *exposed*.

Buckets start in the order of their index on every rank, whatever the order in
which gradients become ready there: a bucket that is full early waits for those
before it. All bindings, one persistent collective per bucket, are made once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mpiring.communicator import SUM, Communicator
from mpiring.parallel.buckets import (
    BUCKET,
    FIRST_BUCKET,
    Bucket,
    Filling,
    HasGradient,
    describe,
    layout,
)
from mpiring.parallel.consensus import agree


class Reducer:
    """All-reduce of gradients, bucket by bucket, overlapping what computes them.

    ``parameters`` in the order in which their gradients become ready. The
    constructor is collective: all ranks compare their layout. ``op`` is what is
    done over ranks: a sum by default, so that a rank whose gradient is a sum over
    its samples, divided by the global number of samples, gets the global mean.

    ``overlap=False`` starts everything in ``finish``: the naive mode, to compare.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[HasGradient],
        *,
        bucket_bytes: int = BUCKET,
        first_bucket_bytes: int = FIRST_BUCKET,
        op: Any = SUM,
        overlap: bool = True,
    ) -> None:
        self._comm = comm
        self._overlap = overlap
        self.buckets: list[Bucket] = layout(
            [parameter.gradient for parameter in parameters], bucket_bytes, first_bucket_bytes
        )
        self._filling = Filling(parameters, self.buckets)
        agree(comm, "parameters: bucket layouts", describe(self.buckets))
        self.no_sync = self._filling.no_sync
        self._requests = [
            comm.Allreduce_init("in place", bucket.gradient, op) for bucket in self.buckets
        ]
        self.polling_seconds = 0.0  #: spent in ``ready``, starting and moving exchanges
        self.waiting_seconds = 0.0  #: spent in ``finish``
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
        """Return when every gradient is the sum over ranks. Every parameter must be ready."""
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
