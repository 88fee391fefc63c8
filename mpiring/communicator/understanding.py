"""What a call means: from the arguments of a method to what is to run on which arrays.

Whatever a rank can find wrong by itself is found here, before anything is sent. In the
order of a call: its arguments become operands and an operation; bytes and ranks decide the
plan; where the arrays live, and how they are to travel, decides the schedule, and with it
the memory that it works in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mpiring.communicator import operations, paths
from mpiring.communicator.arguments import (
    Operand,
    integer,
    integers,
    is_in_place,
    operand,
    overlap,
    vector_operand,
)
from mpiring.communicator.call import Call
from mpiring.communicator.operations import Operation
from mpiring.device.base import Device
from mpiring.device.remote import RemoteHostDevice
from mpiring.errors import ArgumentError
from mpiring.schedule import catalog
from mpiring.schedule.catalog import Mean, Plan
from mpiring.schedule.chunks import Range, consecutive, split
from mpiring.schedule.ops import Buffer
from mpiring.schedule.staging import NO_DETOUR


class Understanding:
    """Calls of ``rank`` among ``size``. Methods raise ArgumentError, DtypeError or DeviceError.

    ``path`` is how device arrays travel; ``reader`` reads the other ranks' host memory, where
    it may; ``alone`` tells whether all ranks are on one machine; ``device_of(operand)`` where
    its array lives. ``algorithm`` and ``segment``: see ``Communicator``.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        algorithm: str,
        segment: int | None,
        alone: bool,
        path: str,
        reader: RemoteHostDevice | None,
        device_of: Callable[[Operand], Device],
    ) -> None:
        self.rank, self.size = rank, size
        self._algorithm, self._segment, self._alone = algorithm, segment, alone
        self._path, self._reader, self._device_of = path, reader, device_of

    def allreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> Call:
        data, source, operation = self._reducible(sendbuf, recvbuf, op)
        if source is not None and source.count != data.count:
            raise ArgumentError(
                f"recvbuf: {data.count} elements, but sendbuf has {source.count}; equal is needed"
            )
        if source is not None and overlap(source, data):
            if source.extent != data.extent:
                raise ArgumentError("sendbuf and recvbuf: overlap in part; use MPI.IN_PLACE")
            source = None
        return self._reduction(
            "allreduce", split(0, data.count, self.size), data, source, operation
        )

    def reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any) -> Call:
        data, source, operation = self._reducible(sendbuf, recvbuf, op, blocks=self.size)
        whole = source or data
        block, rest = divmod(whole.count, self.size)
        name = whole.name
        if rest:
            raise ArgumentError(
                f"{name}: {whole.count} elements are no multiple of the {self.size} ranks"
            )
        return self._scatter([block] * self.size, data, source, operation)

    def reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int], op: Any
    ) -> Call:
        data, source, operation = self._reducible(sendbuf, recvbuf, op)
        counts = integers(recvcounts, self.size, "recvcounts")
        if min(counts) < 0:
            raise ArgumentError(f"recvcounts: {counts} given; {self.size} counts from 0 are needed")
        return self._scatter(counts, data, source, operation)

    def _scatter(
        self, counts: list[int], data: Operand, source: Operand | None, operation: Operation
    ) -> Call:
        whole, own = source or data, counts[self.rank]
        if whole.count != sum(counts):
            raise ArgumentError(
                f"{whole.name}: {whole.count} elements, but the ranks' blocks have {sum(counts)}"
            )
        if data.count < own:
            raise ArgumentError(f"recvbuf: {data.count} elements; {own} are needed")
        if source is not None:
            if overlap(source, data):
                raise ArgumentError("sendbuf and recvbuf: overlap; use MPI.IN_PLACE")
            if data.strided is not None and data.count != own:
                raise ArgumentError(f"recvbuf: a strided array must have {own} elements")
            data = replace(data, flat=data.flat[:own])
        return self._reduction("reduce_scatter", consecutive(counts), data, source, operation)

    def allgather(self, sendbuf: Any, recvbuf: Any) -> Call:
        data = operand(recvbuf, "recvbuf", writable=True, blocks=self.size)
        block, rest = divmod(data.count, self.size)
        if rest:
            raise ArgumentError(
                f"recvbuf: {data.count} elements are no multiple of the {self.size} ranks"
            )
        return self._gather(sendbuf, data, consecutive([block] * self.size))

    def allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        return self._gather(
            sendbuf, *vector_operand(recvbuf, "recvbuf", writable=True, blocks=self.size)
        )

    def _gather(self, sendbuf: Any, data: Operand, chunks: tuple[Range, ...]) -> Call:
        start, stop = chunks[self.rank]
        source = None
        if not is_in_place(sendbuf):
            source = operand(sendbuf, "sendbuf", writable=False)
            _same_dtype(source, data)
            if source.count != stop - start:
                raise ArgumentError(
                    f"sendbuf: {source.count} elements, but recvbuf has {stop - start} for each "
                    f"of {self.size} ranks"
                )
            if overlap(source, data):
                own = replace(data, flat=data.flat[start:stop])
                if source.extent != own.extent:
                    raise ArgumentError("sendbuf and recvbuf: overlap; use MPI.IN_PLACE")
                source = None
        plan = self._plan("allgather", chunks, data, source)
        record = f"{plan.collective} of {_layout(chunks)} x {data.dtype}"
        return self._packed(plan, data, source, None, record)

    def bcast(self, buf: Any, root: int) -> Call:
        root = integer(root, "root")
        data = operand(buf, "buf", writable=self.rank != root)
        if not 0 <= root < self.size:
            raise ArgumentError(f"root: {root} given; allowed are ranks 0 to {self.size - 1}")
        plan = self._plan("bcast", split(0, data.count, self.size), data, None)._replace(root=root)
        record = f"bcast of {data.count} x {data.dtype} from rank {root}"
        call = self._packed(plan, data, None, None, record)
        return replace(call, after=()) if self.rank == root else replace(call, before=())

    def _reducible(
        self, sendbuf: Any, recvbuf: Any, op: Any, blocks: int = 1
    ) -> tuple[Operand, Operand | None, Operation]:
        """A contribution of ``blocks`` blocks, and where the result goes."""
        in_place = is_in_place(sendbuf)
        data = operand(recvbuf, "recvbuf", writable=True, blocks=blocks if in_place else 1)
        operation = operations.resolve(op)
        operations.check(operation, data.dtype)
        if in_place:
            return data, None, operation
        source = operand(sendbuf, "sendbuf", writable=False, blocks=blocks)
        _same_dtype(source, data)
        return data, source, operation

    def _reduction(
        self,
        collective: str,
        chunks: tuple[Range, ...],
        data: Operand,
        source: Operand | None,
        operation: Operation,
    ) -> Call:
        plan = self._plan(collective, chunks, data, source)
        record = f"{collective} of {_layout(chunks)} x {data.dtype}, {operation.name}"
        if operation.mean:
            first = operations.is_half(data.dtype)
            plan = plan._replace(mean=Mean(first))
            if first and source is not None:
                return self._divided_first(plan, data, source, operation, record)
        return self._packed(plan, data, source, operation, record)

    def _divided_first(
        self, plan: Plan, data: Operand, source: Operand, operation: Operation, record: str
    ) -> Call:
        """A mean of 16-bit numbers divides the contribution itself, so it works on a copy."""
        device = self._device_of(data)
        whole = Operand("copy", device.scratch(source.count, data.dtype))
        call = self._packed(plan._replace(in_place=True), whole, None, operation, record)
        target = data.flat if data.strided is None else data.strided
        origin = source.flat if source.strided is None else source.strided
        result = whole.flat[: data.count]
        return replace(call, before=((origin, whole.flat),), after=((result, target),))

    def _plan(
        self, collective: str, chunks: tuple[Range, ...], data: Operand, source: Operand | None
    ) -> Plan:
        itemsize = data.dtype.itemsize
        count = sum(stop - start for start, stop in chunks)
        algorithm = catalog.choose(collective, self.size, count * itemsize, self._algorithm)
        plan = Plan(collective, algorithm, chunks, source is None)
        if data.on_device:
            usual = paths.SEGMENTS[self._path]
        elif self._reads(plan, data):
            usual = catalog.READ_SEGMENT
        else:
            usual = catalog.SEGMENT if self._alone else catalog.NETWORK_SEGMENT
        return plan._replace(segment=max(1, (self._segment or usual) // itemsize))

    def _packed(
        self,
        plan: Plan,
        data: Operand,
        source: Operand | None,
        operation: Operation | None,
        record: str,
    ) -> Call:
        """Copies in and out for arrays that are not contiguous."""
        before, after = [], []
        if source is not None and source.strided is not None:
            before.append((source.strided, source.flat))
        if data.strided is not None:
            after.append((data.flat, data.strided))
            if source is None:
                before.append((data.strided, data.flat))
        return Call(
            plan.collective, plan, data, source, operation, record, tuple(before), tuple(after)
        )

    def ready(self, call: Call, kind: str) -> Call:
        """The call with its schedule, if it has none yet, and memory of its own for it.

        As in MPI, ``kind`` of it (non-blocking, persistent) matches itself only.
        """
        if call.schedule is None:
            call = self._scheduled(call, kind)
        schedule, device = call.schedule, call.device
        assert schedule is not None and device is not None
        memory = {}
        if schedule.scratch:
            memory[Buffer.SCRATCH] = device.scratch(schedule.scratch, call.data.dtype)
        if schedule.staging:
            memory[Buffer.HOST] = device.staging(schedule.staging, call.data.dtype)
        return replace(call, memory=memory) if memory else call

    def _scheduled(self, call: Call, kind: str) -> Call:
        device = self._device_of(call.data)
        if call.input is not None and self._device_of(call.input) is not device:
            raise ArgumentError(
                f"{call.input.name}: on {self._device_of(call.input).kind}, but {call.data.name} "
                f"is on {device.kind}; both on one device are needed"
            )
        record = f"{kind} {call.record}".lstrip()
        if call.data.on_device:
            record = f"{record}, on {device.kind}"
            detour = paths.detour(self._path, device, call.buffers)
            fuse = self._path == "peer"
            schedule = catalog.diverted(call.plan, self.rank, detour, fuse=fuse)
        elif self._reads(call.plan, call.data):
            assert self._reader is not None
            device = self._reader
            schedule = catalog.diverted(call.plan, self.rank, NO_DETOUR, fuse=True)
        else:
            schedule = catalog.schedule(call.plan, self.rank)
        return replace(call, record=record, kind=kind, schedule=schedule, device=device)

    def _reads(self, plan: Plan, data: Operand) -> bool:
        """Whether ranks read each other's host memory. (On a ring: from the left neighbour's.)"""
        nbytes = plan.chunks[-1][1] * data.dtype.itemsize
        return self._reader is not None and plan.algorithm == "ring" and nbytes >= catalog.READ_FROM


def _same_dtype(source: Operand, data: Operand) -> None:
    if source.dtype != data.dtype:
        raise ArgumentError(
            f"recvbuf: dtype {data.dtype}, but sendbuf has {source.dtype}; equal is needed"
        )


def _layout(chunks: tuple[Range, ...]) -> str:
    """How many elements, and how they are shared out; where they lie is each rank's own affair."""
    counts = [stop - start for start, stop in chunks]
    total = sum(counts)
    even = split(0, total, len(counts)) == consecutive(counts)
    return str(total) if even else f"{total} as {counts}"
