"""Gradients summed into shards, weights updated shard by shard: stage 1 of ZeRO.

An all-reduce is a reduce-scatter and an all-gather. Between the two each rank has
its part of the sum, and may update its part of the weights there and then: what
is gathered are updated weights instead of gradients. No more bytes travel, and a
rank needs the optimizer's state for its part only, 1/n of all (Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020).

Every bucket is cut into one chunk per rank, as the ring's all-reduce cuts it: the
sums have its bits. A rank's chunks of all buckets, one after the other, are its
*shard*. Chunks of a bucket differ by one element at most; of a bucket with fewer
elements than there are ranks, some own nothing.

The reduce-scatters run behind backward, as the all-reduces of ``Reducer`` do; the
gather of one bucket runs behind the update of the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mpiring.communicator import SUM, Communicator
from mpiring.errors import ArgumentError
from mpiring.parallel.buckets import BUCKET, FIRST_BUCKET, Bucket, HasValue, layout
from mpiring.parallel.exchange import Exchange
from mpiring.schedule.chunks import consecutive, split

#: Updates, in place, the elements of a shard that begin at the third argument: ``(values,
#: gradients, start)``. An optimizer's ``update`` (see ``nn.optim``) is one.
Update = Callable[[Any, Any, int], Any]


@dataclass(frozen=True, slots=True)
class Chunk:
    """What this rank owns of a bucket, as views; ``counts`` are those of all ranks."""

    counts: list[int]
    inside: slice  #: of the bucket
    owned: slice  #: of the shard
    values: Any


class ShardedReducer(Exchange):
    """Reduce-scatter of gradients behind backward, and all-gather of the values updated by them.

    ``parameters`` in the order in which their gradients become ready; all of one dtype.
    The constructor is collective: all ranks compare their layout. ``op`` as in ``Reducer``.

    ``count`` is the number of elements that this rank owns, of ``total``; ``gradients`` the
    array of their sums after ``finish``. The parameters' own gradients stay as they were. A
    step is

        for parameter in backward: sharded.ready(parameter)
        sharded.finish()
        optimizer.steps += 1
        sharded.update(optimizer.update)  # of ``nn.optim``, over ``count`` elements

    after which every rank has the same values.
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[HasValue],
        *,
        bucket_bytes: int = BUCKET,
        first_bucket_bytes: int = FIRST_BUCKET,
        op: Any = SUM,
        overlap: bool = True,
    ) -> None:
        gradients = [parameter.gradient for parameter in parameters]
        values = [parameter.value for parameter in parameters]
        buckets = layout(gradients, bucket_bytes, first_bucket_bytes, values)
        super().__init__(comm, parameters, buckets, overlap)
        dtypes = sorted({str(gradient.dtype) for gradient in gradients})
        if len(dtypes) != 1:
            raise ArgumentError(
                f"parameters: gradients of {', '.join(dtypes) or 'no dtype'} given; allowed is "
                "one dtype, and at least one parameter"
            )
        self._chunks = list(_chunks(buckets, comm.size, comm.rank))
        self.count: int = self._chunks[-1].owned.stop
        self.total: int = sum(bucket.gradient.size for bucket in buckets)
        self._device = comm.device_of(buckets[0].gradient)
        self.gradients = self._device.empty(self.count, gradients[0].dtype)
        self._mine = [self.gradients[chunk.owned] for chunk in self._chunks]
        self._requests = [
            comm.Reduce_scatter_init(bucket.gradient, mine, chunk.counts, op)
            for bucket, mine, chunk in zip(buckets, self._mine, self._chunks)
        ]
        self._gathers = [
            comm.Allgatherv_init("in place", [bucket.value, chunk.counts])
            for bucket, chunk in zip(buckets, self._chunks)
        ]

    def update(self, optimize: Update) -> None:
        """Update this rank's shard, bucket by bucket, and gather everyone's. After ``finish``."""
        for chunk, gradients, gather in zip(self._chunks, self._mine, self._gathers):
            if gradients.size:
                optimize(chunk.values, gradients, chunk.owned.start)
            begin = time.perf_counter()
            gather.Start()
            self._comm.poll()
            self.polling_seconds += time.perf_counter() - begin
        begin = time.perf_counter()
        for gather in self._gathers:
            gather.Wait()
        self.waiting_seconds += time.perf_counter() - begin

    def wholes(self, shard: Any) -> Iterator[tuple[slice, Any]]:
        """What the shards of all ranks are together, for a file: bucket after bucket.

        ``shard``: an array of ``count`` elements, such as an optimizer's state. Gives
        (the place in the order of parameters, an array that is overwritten when the next
        is asked for). Collective, to the end.
        """
        for place, scratch, chunk in self._scratches(shard):
            scratch[chunk.inside] = shard[chunk.owned]
            self._comm.Allgatherv("in place", [scratch, chunk.counts])
            yield place, scratch

    def share_out(self, whole: Any, shard: Any) -> None:
        """The other way: fill each rank's ``shard`` from rank 0's ``whole``, a host array in the
        order of parameters; that of the others is not looked at. Collective."""
        for place, scratch, chunk in self._scratches(shard):
            if self._comm.rank == 0:
                scratch[...] = self._device.xp.asarray(whole[place])
            self._comm.Bcast(scratch)
            shard[chunk.owned] = scratch[chunk.inside]

    def _scratches(self, shard: Any) -> Iterator[tuple[slice, Any, Chunk]]:
        """For each bucket: its place, memory for as many elements, and what this rank owns."""
        sizes = [bucket.gradient.size for bucket in self.buckets]
        memory = self._device.empty(max(sizes), shard.dtype)
        for (start, stop), chunk in zip(consecutive(sizes), self._chunks):
            yield slice(start, stop), memory[: stop - start], chunk

    def free(self) -> None:
        super().free()
        for gather in self._gathers:
            gather.Free()


def _chunks(buckets: Sequence[Bucket], size: int, rank: int) -> Iterator[Chunk]:
    owned = 0
    for bucket in buckets:
        ranges = split(0, bucket.gradient.size, size)
        inside = slice(*ranges[rank])
        values = bucket.value[inside]
        yield Chunk(
            [stop - start for start, stop in ranges],
            inside,
            slice(owned, owned + values.size),
            values,
        )
        owned += values.size
