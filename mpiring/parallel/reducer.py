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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from mpiring.communicator import SUM, Communicator
from mpiring.errors import ArgumentError
from mpiring.parallel.buckets import BUCKET, FIRST_BUCKET, Bucket, describe, layout
from mpiring.parallel.consensus import agree


class HasGradient(Protocol):
    """What the reducer needs of a parameter: an array of any shape, C-contiguous."""

    @property
    def gradient(self) -> Any: ...


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
        self._positions = {id(parameter): i for i, parameter in enumerate(parameters)}
        if len(self._positions) != len(parameters):
            raise ArgumentError("parameters: one of them is given twice")
        self._parameters = list(parameters)  # ids stay theirs as long as they are alive
        self.buckets: list[Bucket] = layout(
            [parameter.gradient for parameter in parameters], bucket_bytes, first_bucket_bytes
        )
        agree(comm, "parameters: bucket layouts", describe(self.buckets))
        self._home = [bucket for bucket in self.buckets for _ in bucket.members]
        self._requests = [
            comm.Allreduce_init("in place", bucket.gradient, op) for bucket in self.buckets
        ]
        self._synchronised = True
        self.polling_seconds = 0.0  #: spent in ``ready``, starting and moving exchanges
        self.waiting_seconds = 0.0  #: spent in ``finish``
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket.members) for bucket in self.buckets]
        self._seen = [False] * len(self._home)
        self._started = 0

    def ready(self, parameter: HasGradient) -> None:
        """The gradient of ``parameter`` is done, and must not be written until ``finish``."""
        if not self._synchronised:
            return
        begin = time.perf_counter()
        position = self._positions.get(id(parameter))
        if position is None or self._seen[position]:
            raise ArgumentError(
                "parameter: "
                + ("not one of the reducer's" if position is None else "ready twice in one step")
            )
        self._seen[position] = True
        self._missing[self._home[position].index] -= 1
        if self._overlap:
            self._start_full()
            self._comm.poll()
        self.polling_seconds += time.perf_counter() - begin

    def finish(self) -> None:
        """Return when every gradient is the sum over ranks. Every parameter must be ready."""
        begin = time.perf_counter()
        if not all(self._seen):
            missing = [i for i, seen in enumerate(self._seen) if not seen]
            raise ArgumentError(
                f"finish: gradients {missing} of {len(self._seen)} never became ready; "
                "call ready for every parameter in every step"
            )
        self._start_full()
        for request in self._requests:
            request.Wait()
        self._reset()
        self.waiting_seconds += time.perf_counter() - begin

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, ``ready`` does nothing: gradients accumulate, and are exchanged later."""
        if any(self._seen):
            raise ArgumentError("no_sync: entered in the middle of a step; finish it first")
        self._synchronised = False
        try:
            yield
        finally:
            self._synchronised = True

    def free(self) -> None:
        """Let go of the persistent collectives."""
        for request in self._requests:
            request.Free()

    def _start_full(self) -> None:
        while self._started < len(self.buckets) and not self._missing[self._started]:
            self._requests[self._started].Start()
            self._started += 1
