"""``Communicator``: a drop-in for an mpi4py intracommunicator whose collectives are ours.

One call walks straight down: understand the arguments, compare them with the
other ranks' where they are new, pick and build the schedule, bind it to arrays,
hand it to the engine. Blocking, non-blocking and persistent forms differ only in
what happens to the request afterwards.

Traffic runs on a duplicate of the caller's communicator, so that the caller's
own receives never see it. Every other attribute (``Get_rank``, ``Send``,
``bcast``...) is the caller's communicator's own.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from mpiring.communicator import operations
from mpiring.communicator.agreement import (
    HEAR_WITHIN,
    TELL_AFTER,
    Agreed,
    Agreement,
    Patience,
    complaint,
)
from mpiring.communicator.arguments import Operand, is_in_place, operand, overlap
from mpiring.communicator.call import Call, Memory, borrowing
from mpiring.communicator.operations import SUM, Operation
from mpiring.device.base import Device
from mpiring.device.host import HostDevice, check_reduction
from mpiring.engine.execution import Binding, Execution
from mpiring.engine.progress import ProgressEngine, default_engine
from mpiring.engine.request import Request
from mpiring.errors import ArgumentError, MpiringError
from mpiring.schedule import catalog
from mpiring.schedule.catalog import Mean, Plan
from mpiring.schedule.chunks import Range, consecutive, split
from mpiring.schedule.ops import Buffer
from mpiring.task import Completion, Task
from mpiring.transport.base import Transport

#: Tags used in turn by one-shot collectives; persistent ones have a tag each, above.
SLOTS = 1 << 14
#: Collectives under way at which a new one first gives the old ones time to end.
_CROWD = 256
_SEEN = 4096  # signatures remembered as agreed


class Communicator:
    """Collectives made of point-to-point messages, on NumPy or CuPy arrays.

    ``comm`` is an mpi4py intracommunicator, or a transport (virtual ranks). The
    constructor and ``Free`` are collective.

    ``progress``: "poll" moves collectives on whenever any mpiring call runs;
    "thread" also runs a thread that polls (needs MPI_THREAD_MULTIPLE).
    ``algorithm``: "auto", or the name of one family where it exists.
    ``segment``: bytes that travel at once within a chunk.

    ``MPIRING_CHECK=1`` compares the arguments of every call over the ranks, 0 of
    none; the default compares each signature when it is first seen.
    """

    def __init__(
        self,
        comm: Any,
        *,
        progress: str = "poll",
        algorithm: str = "auto",
        segment: int = catalog.SEGMENT,
        engine: ProgressEngine | None = None,
    ) -> None:
        catalog.check_algorithm(algorithm)
        if progress not in ("poll", "thread"):
            raise ArgumentError(f"progress: {progress!r} given; allowed are 'poll' and 'thread'")
        if segment < 1:
            raise ArgumentError(f"segment: {segment} given; allowed are bytes above 0")
        self._engine = engine or default_engine()
        self._algorithm, self._segment = algorithm, segment
        self._comm: Any = None
        self._private: list[Any] = []
        self._lent: list[Transport] = []
        self._agreement: Agreement | None = None
        self._host = HostDevice()
        if hasattr(comm, "Get_rank"):
            self._open_mpi(comm, progress)
        else:
            self._transport = comm
        self.rank: int = self._transport.rank
        self.size: int = self._transport.size
        self._calls = 0
        self._flying: dict[int, tuple[int, Execution]] = {}  # slot -> number, execution
        self._pruned = 0
        self._unwaited = 0
        self._seen: OrderedDict[str, int] = OrderedDict()  # record -> slot of blocking calls
        self._memory = Memory()
        self._check = os.environ.get("MPIRING_CHECK", "first")
        self._patience = Patience()
        self._freed = False
        self._engine.watch(self._stalled)

    def _open_mpi(self, comm: Any, progress: str) -> None:
        from mpi4py import MPI

        from mpiring.transport.mpi import MpiTransport, more_ranks_than_cores

        if isinstance(comm, Communicator):
            comm = comm._comm
        if comm == MPI.COMM_NULL or comm.Is_inter():
            raise ArgumentError(f"comm: {comm!r} given; an intracommunicator is needed")
        if progress == "thread" and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ArgumentError(
                "progress: 'thread' needs MPI_THREAD_MULTIPLE, and this MPI was initialised "
                "with less; use progress='poll'"
            )
        self._comm = comm
        self._private = [comm.Dup(), comm.Dup()]
        for private in self._private:
            private.Set_errhandler(MPI.ERRORS_RETURN)
        self._transport = MpiTransport(self._private[0])
        self._engine.yields |= more_ranks_than_cores(self._private[1])
        options = (self._algorithm, self._segment, os.environ.get("MPIRING_CHECK", "first"))
        everyone = self._private[1].allgather(options)
        if len(set(everyone)) > 1:
            raise ArgumentError(
                f"algorithm, segment, MPIRING_CHECK: differ between ranks: {everyone}"
            )
        self._agreement = Agreement(self._private[1])
        if progress == "thread":
            self._engine.start_thread()

    # -- the methods of mpi4py ------------------------------------------------------------

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """Reduce all ranks' arrays, element by element; the result everywhere.

        ``sendbuf``: array of any shape, or MPI.IN_PLACE (then ``recvbuf`` holds
        the contribution). ``recvbuf``: as many elements of the same dtype.
        """
        self._block(
            lambda: self._allreduce(sendbuf, recvbuf, op), "Allreduce", sendbuf, recvbuf, op
        )

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Request:
        """As Allreduce, returning a request."""
        return self._run(lambda: self._allreduce(sendbuf, recvbuf, op), "Iallreduce")

    def Allreduce_init(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Request:
        """A persistent Allreduce: bound once to its arrays, started with ``Start`` many times."""
        return self._bind(lambda: self._allreduce(sendbuf, recvbuf, op), "Allreduce_init")

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """Reduce all ranks' arrays of n equal blocks; rank r gets block r.

        In place, ``recvbuf`` holds all n blocks, and the result is in its first.
        """
        self._block(
            lambda: self._reduce_scatter_block(sendbuf, recvbuf, op),
            "Reduce_scatter_block",
            *(sendbuf, recvbuf, op),
        )

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Request:
        """As Reduce_scatter_block, returning a request."""
        return self._run(
            lambda: self._reduce_scatter_block(sendbuf, recvbuf, op), "Ireduce_scatter_block"
        )

    def Reduce_scatter_block_init(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Request:
        """A persistent Reduce_scatter_block."""
        return self._bind(
            lambda: self._reduce_scatter_block(sendbuf, recvbuf, op), "Reduce_scatter_block_init"
        )

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = SUM,
    ) -> None:
        """As Reduce_scatter_block with blocks of ``recvcounts[rank]`` elements.

        Without ``recvcounts`` each rank gets as many as its ``recvbuf`` has.
        """
        counts = self._counts(sendbuf, recvbuf, recvcounts)
        self._block(
            lambda: self._reduce_scatter(sendbuf, recvbuf, counts, op),
            "Reduce_scatter",
            *(sendbuf, recvbuf, op, tuple(counts)),
        )

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = SUM,
    ) -> Request:
        """As Reduce_scatter, returning a request."""
        counts = self._counts(sendbuf, recvbuf, recvcounts)
        return self._run(
            lambda: self._reduce_scatter(sendbuf, recvbuf, counts, op), "Ireduce_scatter"
        )

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = SUM,
    ) -> Request:
        """A persistent Reduce_scatter."""
        counts = self._counts(sendbuf, recvbuf, recvcounts)
        return self._bind(
            lambda: self._reduce_scatter(sendbuf, recvbuf, counts, op), "Reduce_scatter_init"
        )

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Every rank's block, in order of ranks, everywhere.

        ``recvbuf`` has n times the elements of ``sendbuf``; in place, each rank's
        block is there already.
        """
        self._block(lambda: self._allgather(sendbuf, recvbuf), "Allgather", sendbuf, recvbuf)

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As Allgather, returning a request."""
        return self._run(lambda: self._allgather(sendbuf, recvbuf), "Iallgather")

    def Allgather_init(self, sendbuf: Any, recvbuf: Any) -> Request:
        """A persistent Allgather."""
        return self._bind(lambda: self._allgather(sendbuf, recvbuf), "Allgather_init")

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """As Allgather with blocks of different sizes.

        ``recvbuf``: ``[array, counts]``, ``[array, (counts, displs)]``, with or
        without a datatype; without counts, n blocks that differ by at most one.
        """
        self._block(lambda: self._allgatherv(sendbuf, recvbuf), "Allgatherv", sendbuf, recvbuf)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As Allgatherv, returning a request."""
        return self._run(lambda: self._allgatherv(sendbuf, recvbuf), "Iallgatherv")

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any) -> Request:
        """A persistent Allgatherv."""
        return self._bind(lambda: self._allgatherv(sendbuf, recvbuf), "Allgatherv_init")

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """The array of ``root``, everywhere."""
        self._block(lambda: self._bcast(buf, root), "Bcast", buf, root)

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """As Bcast, returning a request."""
        return self._run(lambda: self._bcast(buf, root), "Ibcast")

    def Bcast_init(self, buf: Any, root: int = 0) -> Request:
        """A persistent Bcast."""
        return self._bind(lambda: self._bcast(buf, root), "Bcast_init")

    # -- life -----------------------------------------------------------------------------

    def poll(self) -> bool:
        """Move everything under way in this process; whether anything moved. Never blocks."""
        return self._engine.poll()

    @property
    def engine(self) -> ProgressEngine:
        """What moves this communicator's collectives, and whatever is attached to it."""
        return self._engine

    def private_transport(self) -> Transport:
        """Point-to-point messages between the same ranks that meet no others. Collective.

        It is freed with the communicator, and must be idle then.
        """
        self._number()
        self._lent.append(self._transport.duplicate())
        return self._lent[-1]

    def Free(self) -> None:
        """End what is under way, say what was never waited for, free the private duplicates.

        Collective. The caller's communicator stays as it is.
        """
        if self._freed:
            return
        self._engine.wait(lambda: not self._under_way())
        self._leave()
        if self._unwaited:
            warnings.warn(
                f"Communicator.Free: {self._unwaited} requests of rank {self.rank} were never "
                "waited for; their collectives have been finished",
                RuntimeWarning,
                stacklevel=2,
            )
        if self._agreement is not None:
            self._agreement.listen()
        for transport in self._lent:
            transport.free()
        for private in self._private:
            private.Free()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        # Peers may be anywhere when this rank fails: waiting for them here would hide the error.
        if kind is None:
            self.Free()
        else:
            self._leave()

    def __getattr__(self, name: str) -> Any:
        comm = self.__dict__.get("_comm")
        if comm is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(comm, name)

    def _leave(self) -> None:
        self._freed = True
        self._engine.unwatch(self._stalled)

    # -- understanding a call -------------------------------------------------------------

    def _allreduce(self, sendbuf: Any, recvbuf: Any, op: Any) -> Call:
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

    def _reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any) -> Call:
        data, source, operation = self._reducible(sendbuf, recvbuf, op)
        whole = source or data
        block, rest = divmod(whole.count, self.size)
        name = whole.name
        if rest:
            raise ArgumentError(
                f"{name}: {whole.count} elements are no multiple of the {self.size} ranks"
            )
        return self._scatter([block] * self.size, data, source, operation)

    def _counts(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None
    ) -> Sequence[int]:
        """``recvcounts``, or how many elements each rank's ``recvbuf`` has: a call of its own."""
        if recvcounts is not None:
            return recvcounts
        counts = np.empty(self.size, np.int64)

        def understand() -> Call:
            if is_in_place(sendbuf):
                raise ArgumentError("recvcounts: needed with MPI.IN_PLACE")
            own = operand(recvbuf, "recvbuf", writable=True).count
            return self._allgather(np.array([own]), counts)

        self._block(understand, "counts of Reduce_scatter")
        return counts.tolist()

    def _reduce_scatter(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int], op: Any
    ) -> Call:
        data, source, operation = self._reducible(sendbuf, recvbuf, op)
        counts = [int(count) for count in recvcounts]
        if len(counts) != self.size or min(counts) < 0:
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

    def _allgather(self, sendbuf: Any, recvbuf: Any) -> Call:
        data = operand(recvbuf, "recvbuf", writable=True)
        block, rest = divmod(data.count, self.size)
        if rest:
            raise ArgumentError(
                f"recvbuf: {data.count} elements are no multiple of the {self.size} ranks"
            )
        return self._gather(sendbuf, data, consecutive([block] * self.size))

    def _allgatherv(self, sendbuf: Any, recvbuf: Any) -> Call:
        data = operand(recvbuf, "recvbuf", writable=True)
        if data.counts is None:
            return self._gather(sendbuf, data, split(0, data.count, self.size))
        counts = data.counts
        chunks = consecutive(counts)
        if data.displs is not None:
            chunks = tuple((d, d + c) for d, c in zip(data.displs, counts))
        if len(chunks) != self.size or len(counts) != self.size or min(counts) < 0:
            raise ArgumentError(
                f"recvbuf: counts {counts} given; {self.size} counts from 0 are needed"
            )
        filled = sorted(chunk for chunk in chunks if chunk[0] < chunk[1])
        if any(a[1] > b[0] for a, b in pairwise(filled)):
            raise ArgumentError(f"recvbuf: blocks {chunks} overlap")
        if filled and (filled[0][0] < 0 or filled[-1][1] > data.count):
            raise ArgumentError(f"recvbuf: blocks {chunks} leave its {data.count} elements")
        return self._gather(sendbuf, data, chunks)

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

    def _bcast(self, buf: Any, root: int) -> Call:
        data = operand(buf, "buf", writable=self.rank != root)
        if not 0 <= root < self.size:
            raise ArgumentError(f"root: {root} given; allowed are ranks 0 to {self.size - 1}")
        plan = self._plan("bcast", split(0, data.count, self.size), data, None)._replace(root=root)
        record = f"bcast of {data.count} x {data.dtype} from rank {root}"
        return self._packed(plan, data, None, None, record)

    def _reducible(
        self, sendbuf: Any, recvbuf: Any, op: Any
    ) -> tuple[Operand, Operand | None, Operation]:
        data = operand(recvbuf, "recvbuf", writable=True)
        operation = operations.resolve(op)
        operations.check_mean(operation, data.dtype)
        operations.check_user(operation, data.dtype)
        check_reduction(operation.reduction, data.dtype)
        if is_in_place(sendbuf):
            return data, None, operation
        source = operand(sendbuf, "sendbuf", writable=False)
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
        device = self._device(data)
        whole = Operand("copy", device.empty(source.count, data.dtype))
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
        segment = max(1, self._segment // itemsize)
        return Plan(collective, algorithm, chunks, source is None, segment)

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

    # -- from a call to the engine --------------------------------------------------------

    def _run(self, understand: Callable[[], Call], label: str) -> Request:
        """Begin a one-shot collective."""
        number = self._number()
        call, gates = self._agreed(number, understand)
        slot = number % SLOTS
        self._make_room(slot)
        execution = self._execution(call, slot, label, persistent=False)
        self._flying[slot] = (number, execution)
        self._unwaited += 1
        entry = self._entry(call)
        request = Request(self._engine, execution, lambda: entry, on_end=self._ended)
        self._engine.start(execution, [*gates, *entry])
        return request

    def _bind(self, understand: Callable[[], Call], label: str) -> Request:
        """Make a persistent collective."""
        number = self._number()
        call, gates = self._agreed(number, understand)
        for gate in gates:
            self._engine.wait(gate.done)
        execution = self._execution(call, self._own_slot(number), label, persistent=True)
        gates = (lambda: self._entry(call)) if call.data.on_device else tuple
        return Request(self._engine, execution, gates, persistent=True)

    def _block(self, understand: Callable[[], Call], label: str, *arguments: Any) -> None:
        """Run a collective to its end.

        Programs call with the same arrays again and again, so what was bound for
        these addresses is kept and used again; it borrows the memory, and holds
        no array alive. All blocking calls of one signature share a slot: on one
        rank they follow each other, so their messages match in order.
        """
        number = self._number()
        key = self._memory.key(label, arguments)
        bound = self._memory.get(key) if self._check != "1" else None
        if bound is not None:
            record, execution = bound
            gates: list[Completion] = []
            self._seen.move_to_end(record)
            if self._agreement is not None:
                self._agreement.open(number, record)
        else:
            call, gates = self._agreed(number, understand)
            record = call.record
            if key is not None:
                call = borrowing(call)
            execution = self._execution(call, self._seen[record], label, persistent=True)
            gates += self._entry(call)
            self._memory.put(key, record, execution)
        slot = execution.binding.slot
        self._flying[slot] = (number, execution)
        try:
            self._engine.start(execution, gates)
            self._engine.finish(execution)
        except BaseException:
            # Left in the middle (Ctrl-C): MPI may still write there.
            self._engine.keep(arguments)
            raise
        del self._flying[slot]
        if execution.error is not None:
            self._memory.drop(key)
            raise execution.error

    def _own_slot(self, number: int) -> int:
        """A slot that stays with what call ``number`` has made: the same on every rank."""
        return SLOTS + number % (self._transport.slots - SLOTS)

    def _number(self) -> int:
        if self._freed:
            raise ArgumentError("Communicator: already freed")
        self._calls += 1
        return self._calls

    def _execution(self, call: Call, slot: int, label: str, *, persistent: bool) -> Execution:
        device = self._device(call.data)
        schedule = catalog.schedule(call.plan, self.rank)
        buffers = {Buffer.DATA: call.data.flat}
        if call.input is not None:
            buffers[Buffer.INPUT] = call.input.flat
        scratch = schedule.scratch
        if scratch:
            buffers[Buffer.SCRATCH] = device.empty(scratch, call.data.dtype)
        binding = Binding(
            buffers,
            device,
            self._transport,
            slot,
            call.operation.reduction if call.operation else None,
            1.0 / self.size,
            persistent,
        )
        return Execution(
            schedule,
            binding,
            before=_copies(device, call.before),
            after=_copies(device, call.after),
            label=f"{label} ({call.record})",
        )

    def _entry(self, call: Call) -> list[Completion]:
        """The hand-over from the caller's streams: recorded once, at the start."""
        if not call.data.on_device:
            return []
        device = self._device(call.data)
        arrays = [call.data, *([call.input] if call.input else [])]
        return [device.record(each.flat) for each in arrays]

    def _device(self, data: Operand) -> Device:
        if not data.on_device:
            return self._host
        from mpiring.device.cuda import device_of

        return device_of(data.flat)

    def _make_room(self, slot: int) -> None:
        """A slot is used again only after its last collective has ended here."""
        holder = self._flying.get(slot)
        if holder is not None:
            self._engine.wait(lambda: holder[1].finished)
        if len(self._flying) >= 2 * self._pruned + 64:
            self._flying = {s: f for s, f in self._flying.items() if not f[1].finished}
            self._pruned = len(self._flying)
        # Many under way: let them end first, but never wait for a rank that has not called.
        for _ in range(_CROWD if self._engine.active > _CROWD else 0):
            self._engine.poll()
            os.sched_yield()

    def _ended(self, request: Request) -> None:
        self._unwaited -= 1

    def _under_way(self) -> list[tuple[int, Execution]]:
        return [f for f in self._flying.values() if not f[1].finished]

    # -- agreement over ranks -------------------------------------------------------------

    def _agreed(self, number: int, understand: Callable[[], Call]) -> tuple[Call, list[Completion]]:
        """Understand a call; what must be over before its data moves."""
        try:
            call = understand()
        except MpiringError as error:
            self._complain(number, error)
            raise
        known = call.record in self._seen
        if known:
            self._seen.move_to_end(call.record)
        else:
            self._seen[call.record] = self._own_slot(number)
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        agreement = self._agreement
        if agreement is None or self.size == 1 or self._check == "0":
            return call, []
        agreement.open(number, call.record)
        if known and self._check != "1":
            return call, []
        return call, [_Forgetting(Agreed(agreement, number), self._seen, call.record)]

    def _complain(self, number: int, error: MpiringError) -> None:
        """Tell all ranks what is wrong here, hear what is wrong there, raise the same."""
        agreement = self._agreement
        if agreement is None or self.size == 1:
            return
        agreement.open(number, complaint(error))
        agreement.tell(number)
        until = time.monotonic() + HEAR_WITHIN

        def heard() -> bool:
            agreement.listen()
            return agreement.heard(number) or time.monotonic() > until

        self._engine.wait(heard)
        verdict = agreement.verdict(number)
        assert verdict is not None
        raise verdict from error

    def _stalled(self, seconds: float) -> None:
        """Called now and then while this rank waits and nothing moves."""
        agreement = self._agreement
        under_way = self._under_way()
        if agreement is None or not under_way:
            return
        agreement.listen()
        number, execution = min(under_way, key=lambda flight: flight[0])
        if self._check != "0":
            if seconds > TELL_AFTER or agreement.doubtful(number):
                agreement.tell(number)
            if agreement.doubtful(number) and (agreement.heard(number) or seconds > HEAR_WITHIN):
                error = agreement.verdict(number)
                assert error is not None
                self._engine.fail(execution, error)
                return
        self._patience.check(
            seconds,
            lambda: (
                f"rank {self.rank} waits in {execution.tell()}; "
                f"not there yet: ranks {agreement.silent(number)}"
            ),
        )


class _Forgetting:
    """An agreement that is not remembered if it fails: all ranks compare again next time."""

    def __init__(self, agreed: Agreed, seen: OrderedDict[str, int], record: str) -> None:
        self._agreed, self._seen, self._record = agreed, seen, record

    def done(self) -> bool:
        try:
            return self._agreed.done()
        except MpiringError:
            self._seen.pop(self._record, None)
            raise


def _same_dtype(source: Operand, data: Operand) -> None:
    if source.dtype != data.dtype:
        raise ArgumentError(
            f"recvbuf: dtype {data.dtype}, but sendbuf has {source.dtype}; equal is needed"
        )


def _layout(chunks: tuple[Range, ...]) -> str:
    counts = [stop - start for start, stop in chunks]
    even = split(0, sum(counts), len(counts)) == chunks
    return str(sum(counts)) if even else f"{sum(counts)} as {list(chunks)}"


def _copies(device: Device, pairs: tuple[tuple[Any, Any], ...]) -> list[Task]:
    return [device.copy(*_shaped(source, target)) for source, target in pairs]


def _shaped(source: Any, target: Any) -> tuple[Any, Any]:
    """Give the flat one of the two the other's shape."""
    if np.ndim(source) < np.ndim(target):
        return source.reshape(target.shape), target
    return source, target.reshape(source.shape)
