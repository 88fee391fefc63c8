"""Gradients summed over ranks while the backward pass is still running: every rank gets all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpiring.communicator import SUM, Communicator
from mpiring.parallel.buckets import BUCKET, FIRST_BUCKET, HasGradient, layout
from mpiring.parallel.exchange import Exchange


class Reducer(Exchange):
    """All-reduce of gradients, bucket by bucket, overlapping what computes them.

    ``parameters`` in the order in which their gradients become ready. The
    constructor is collective: all ranks compare their layout. ``op`` is what is
    done over ranks: a sum by default, so that a rank whose gradient is a sum over
    its samples, divided by the global number of samples, gets the global mean.

    After ``finish`` every gradient is the sum over ranks, on every rank.

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
        gradients = [parameter.gradient for parameter in parameters]
        buckets = layout(gradients, bucket_bytes, first_bucket_bytes)
        super().__init__(comm, parameters, buckets, overlap)
        self._requests = [
            comm.Allreduce_init("in place", bucket.gradient, op) for bucket in buckets
        ]
