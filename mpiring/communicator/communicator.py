"""``Communicator``: a drop-in for an mpi4py intracommunicator whose collectives are ours.

One call walks straight down: understand it (``understanding``), compare it with
the other ranks' where it is new (``agreement``), bind it to arrays, hand it to the
engine. Blocking, non-blocking and persistent forms differ only in
what happens to the request afterwards.

Traffic runs on a duplicate of the caller's communicator, so that the caller's
own receives never see it. Every other attribute (``Get_rank``, ``Send``,
``bcast``...) is the caller's communicator's own.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from mpiring.communicator import ending, neighbours, paths
from mpiring.communicator.agreement import (
    HEAR_WITHIN,
    TAG,
    TELL_AFTER,
    Agreed,
    Agreement,
    Farewell,
    Patience,
    complaint,
    name_ranks,
)
from mpiring.communicator.arguments import Operand, is_in_place, operand
from mpiring.communicator.call import Call, Memory, borrowing
from mpiring.communicator.operations import SUM
from mpiring.communicator.understanding import Understanding
from mpiring.device.base import Device
from mpiring.device.host import HostDevice
from mpiring.device.remote import RemoteHostDevice
from mpiring.engine.execution import Binding, Execution
from mpiring.engine.progress import ProgressEngine, default_engine
from mpiring.engine.request import Request
from mpiring.errors import (
    ArgumentError,
    MismatchError,
    MpiringError,
    StallError,
    TransportError,
)
from mpiring.schedule import catalog
from mpiring.task import Completion, Task
from mpiring.transport.base import Transport

#: Collectives under way at which a new one first gives the old ones time to end.
_CROWD, _CHANCES = 256, 2
_SEEN = 4096  # signatures remembered as agreed
_MEETING = -1  # in the place of a slot


class Communicator:
    """Collectives made of point-to-point messages, on NumPy or CuPy arrays.

    ``comm`` is an mpi4py intracommunicator, or a transport (virtual ranks). The
    constructor and ``Free`` are collective.

    ``progress``: "poll" moves collectives on whenever any mpiring call runs;
    "thread" also runs a thread that polls (needs MPI_THREAD_MULTIPLE).
    ``algorithm``: "auto", or the name of one family where it exists.
    ``segment``: bytes that travel at once within a chunk; the default depends on where
    arrays live.
    ``gpu_path``: how device arrays travel, "auto", "direct", "staged" or "peer" (see
    ``paths``); the default is ``MPIRING_GPU_PATH``, or "auto".
    ``host_path``: how long host arrays travel: "direct", as messages of MPI, or "peer", by
    ranks of one machine reading each other's memory (see ``neighbours``); "auto", the default,
    is the latter where it works. Or ``MPIRING_HOST_PATH``.

    ``MPIRING_CHECK=1`` compares the arguments of every call over the ranks, 0 of
    none; the default compares each signature when it is first seen, and later where
    ranks stand still. ``MPIRING_STALL_SECONDS`` and ``MPIRING_TIMEOUT``: see ``Patience``.

    What is wrong with a call is one error, in the same words on every rank, and the
    communicator may be used afterwards. Not after an error that only some ranks met:
    StallError or Ctrl-C in the middle of a blocking call (which stays under way, and
    keeps its arrays), bytes that were not agreed under ``MPIRING_CHECK=0``, or a
    disagreement of which a rank noticed nothing, such as the root of a Bcast that had
    sent everything. An error that nobody catches ends all ranks (see ``ending``).
    """

    def __init__(
        self,
        comm: Any,
        *,
        progress: str = "poll",
        algorithm: str = "auto",
        segment: int | None = None,
        gpu_path: str | None = None,
        host_path: str | None = None,
        engine: ProgressEngine | None = None,
    ) -> None:
        self._engine = engine or default_engine()
        self._algorithm, self._segment = algorithm, segment
        self._alone = True  # on one machine
        self._check = os.environ.get("MPIRING_CHECK") or "first"
        self._comm: Any = None
        self._private: list[Any] = []
        self._lent: list[Transport] = []
        self._agreement: Agreement | None = None
        self._host = HostDevice()
        self._reader: RemoteHostDevice | None = None  # of the other ranks' memory
        self._path: paths.Choice
        if isinstance(comm, Communicator):
            comm = comm.comm
        if hasattr(comm, "Get_rank"):
            self._open_mpi(comm, progress, gpu_path, host_path)
        else:
            self._check_options(progress)
            if neighbours.wish(host_path) == "peer":
                self._reader = RemoteHostDevice()
            self._path = paths.choose([paths.Standing(paths.wish(gpu_path))])
            self._transport, self._answers = comm, comm.duplicate()
        self.rank: int = self._transport.rank
        self.size: int = self._transport.size
        self._understand = Understanding(
            self.rank,
            self.size,
            algorithm=self._algorithm,
            segment=self._segment,
            alone=self._alone,
            path=self._path.path,
            reader=self._reader,
            device_of=self._device,
        )
        # Half of the tags are for collectives that keep theirs. The others are taken in turn by
        # one-shot ones, and hold a trace of the signature: calls that differ do not match.
        half = self._transport.slots // 2
        self._traces = 1 << half.bit_length() // 2
        self._turns = half // self._traces
        self._kept_slots = range(half, self._transport.slots)
        self._calls = 0
        self._flying: dict[int, Flight] = {}  # by slot
        self._pruned = 0
        self._unwaited = 0
        self._starts: dict[int, int] = {}  # of persistent collectives, by slot
        self._path_told = False
        self._peers: dict[Device, Transport] = {}
        self._damaged = False  # an error may have left messages that nobody will take
        self._seen: OrderedDict[str, int] = OrderedDict()  # record -> slot of blocking calls
        self._memory = Memory()
        self._freed = False
        self._engine.watch(self._stalled)

    def _check_options(self, progress: str) -> None:
        catalog.check_algorithm(self._algorithm)
        if progress not in ("poll", "thread"):
            raise ArgumentError(f"progress: {progress!r} given; allowed are 'poll' and 'thread'")
        if self._segment is not None and not (
            isinstance(self._segment, int) and self._segment >= 1
        ):
            raise ArgumentError(f"segment: {self._segment!r} given; allowed are bytes above 0")
        if self._check not in ("first", "0", "1"):
            raise ArgumentError(f"MPIRING_CHECK: {self._check!r} given; allowed are 0 and 1")
        self._patience = Patience()

    def _open_mpi(
        self, comm: Any, progress: str, gpu_path: str | None, host_path: str | None
    ) -> None:
        from mpi4py import MPI

        from mpiring.transport.mpi import MpiTransport, node_of

        ending.check_launch(MPI.COMM_WORLD)
        if comm == MPI.COMM_NULL or comm.Is_inter():
            raise ArgumentError(f"comm: {comm!r} given; an intracommunicator is needed")
        error, wish, host_wish = None, "auto", "auto"
        try:
            self._check_options(progress)
            wish, host_wish = paths.wish(gpu_path), neighbours.wish(host_path)
            if progress == "thread" and MPI.Query_thread() < MPI.THREAD_MULTIPLE:
                raise ArgumentError(
                    "progress: 'thread' needs MPI_THREAD_MULTIPLE, and this MPI was initialised "
                    "with less; use progress='poll'"
                )
        except ArgumentError as mistake:
            error = mistake
        options = (self._algorithm, self._segment, wish, host_wish, self._check)
        standing = paths.stand(
            wish, comm.Get_rank(), MPI.Get_processor_name(), MPI.Get_library_version()
        )
        everyone = comm.allgather((complaint(error) if error else None, options, standing))
        for rank, (wrong, theirs, _) in enumerate(everyone):
            if wrong:
                raise ArgumentError(f"rank {rank}: {wrong.partition(':')[2]}") from error
            if theirs != everyone[0][1]:
                raise ArgumentError(
                    "algorithm, segment, gpu_path, host_path, MPIRING_CHECK: differ between ranks: "
                    f"rank 0: {everyone[0][1]}; rank {rank}: {theirs}"
                )
        # Whatever may be refused comes before the duplicates, of which MPI has not many.
        self._path = paths.choose([standing for *_, standing in everyone])
        node = node_of(comm)
        self._reader = neighbours.reader(comm, host_wish, node.alone)
        self._engine.yields |= node.crowded
        self._alone = node.alone
        self._comm = comm
        self._private = [comm.Dup(), comm.Dup()]
        for private in self._private:
            private.Set_errhandler(MPI.ERRORS_RETURN)
        self._transport, self._answers = (
            MpiTransport(private, reserved=TAG + 1) for private in self._private
        )
        self._agreement = Agreement(self._private[1], self._engine)
        ending.attend(self, comm.Get_size())
        if progress == "thread":
            self._engine.start_thread()

    # -- the methods of mpi4py ------------------------------------------------------------

    def Allreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """Reduce all ranks' arrays, element by element; the result everywhere.

        ``sendbuf``: array of any shape, or MPI.IN_PLACE (then ``recvbuf`` holds
        the contribution). ``recvbuf``: as many elements of the same dtype.
        """
        self._block("Allreduce", self._understand.allreduce, (sendbuf, recvbuf), op)

    def Iallreduce(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Request:
        """As Allreduce, returning a request."""
        return self._run("Iallreduce", self._understand.allreduce, (sendbuf, recvbuf), op)

    def Allreduce_init(
        self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: Any = None
    ) -> Request:
        """A persistent Allreduce: bound once to its arrays, started with ``Start`` many times.

        Here and in its siblings ``info`` stands where mpi4py has it, and is ignored.
        """
        return self._bind("Allreduce_init", self._understand.allreduce, (sendbuf, recvbuf), op)

    def Reduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> None:
        """Reduce all ranks' arrays of n equal blocks; rank r gets block r.

        In place, ``recvbuf`` holds all n blocks, and the result is in its first.
        """
        self._block(
            "Reduce_scatter_block", self._understand.reduce_scatter_block, (sendbuf, recvbuf), op
        )

    def Ireduce_scatter_block(self, sendbuf: Any, recvbuf: Any, op: Any = SUM) -> Request:
        """As Reduce_scatter_block, returning a request."""
        return self._run(
            "Ireduce_scatter_block", self._understand.reduce_scatter_block, (sendbuf, recvbuf), op
        )

    def Reduce_scatter_block_init(
        self, sendbuf: Any, recvbuf: Any, op: Any = SUM, info: Any = None
    ) -> Request:
        """A persistent Reduce_scatter_block."""
        return self._bind(
            "Reduce_scatter_block_init",
            self._understand.reduce_scatter_block,
            (sendbuf, recvbuf),
            op,
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
            "Reduce_scatter", self._understand.reduce_scatter, (sendbuf, recvbuf), counts, op
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
            "Ireduce_scatter", self._understand.reduce_scatter, (sendbuf, recvbuf), counts, op
        )

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: Any = SUM,
        info: Any = None,
    ) -> Request:
        """A persistent Reduce_scatter."""
        counts = self._counts(sendbuf, recvbuf, recvcounts)
        return self._bind(
            "Reduce_scatter_init", self._understand.reduce_scatter, (sendbuf, recvbuf), counts, op
        )

    def Allgather(self, sendbuf: Any, recvbuf: Any) -> None:
        """Every rank's block, in order of ranks, everywhere.

        ``recvbuf`` has n times the elements of ``sendbuf``; in place, each rank's
        block is there already.
        """
        self._block("Allgather", self._understand.allgather, (sendbuf, recvbuf))

    def Iallgather(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As Allgather, returning a request."""
        return self._run("Iallgather", self._understand.allgather, (sendbuf, recvbuf))

    def Allgather_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> Request:
        """A persistent Allgather."""
        return self._bind("Allgather_init", self._understand.allgather, (sendbuf, recvbuf))

    def Allgatherv(self, sendbuf: Any, recvbuf: Any) -> None:
        """As Allgather with blocks of different sizes.

        ``recvbuf``: ``[array, counts]``, ``[array, (counts, displs)]``, with or
        without a datatype; without counts, n blocks that differ by at most one.
        """
        self._block("Allgatherv", self._understand.allgatherv, (sendbuf, recvbuf))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any) -> Request:
        """As Allgatherv, returning a request."""
        return self._run("Iallgatherv", self._understand.allgatherv, (sendbuf, recvbuf))

    def Allgatherv_init(self, sendbuf: Any, recvbuf: Any, info: Any = None) -> Request:
        """A persistent Allgatherv."""
        return self._bind("Allgatherv_init", self._understand.allgatherv, (sendbuf, recvbuf))

    def Bcast(self, buf: Any, root: int = 0) -> None:
        """The array of ``root``, everywhere."""
        self._block("Bcast", self._understand.bcast, (buf,), root)

    def Ibcast(self, buf: Any, root: int = 0) -> Request:
        """As Bcast, returning a request."""
        return self._run("Ibcast", self._understand.bcast, (buf,), root)

    def Bcast_init(self, buf: Any, root: int = 0, info: Any = None) -> Request:
        """A persistent Bcast."""
        return self._bind("Bcast_init", self._understand.bcast, (buf,), root)

    # -- life -----------------------------------------------------------------------------

    def poll(self) -> bool:
        """Move everything under way in this process; whether anything moved. Never blocks."""
        return self._engine.poll()

    @property
    def engine(self) -> ProgressEngine:
        """What moves this communicator's collectives, and whatever is attached to it."""
        return self._engine

    def device_of(self, array: Any) -> Device:
        """Where a one-dimensional array of this communicator's kind lives."""
        return self._device(Operand("array", array))

    def gpu_path(self) -> str:
        """How device arrays travel (see ``paths``). Rank 0 tells it, once."""
        self._tell_path()
        return self._path.path

    def private_transport(self) -> Transport:
        """Point-to-point messages between the same ranks that meet no others. Collective.

        It is freed when it is given back, or with the communicator, and must be idle then.
        """
        self._number()
        self._lent.append(self._transport.duplicate())
        return self._lent[-1]

    def give_back(self, transport: Transport) -> None:
        """Free what ``private_transport`` returned. Collective."""
        if transport in self._lent:
            self._lent.remove(transport)
            transport.free()

    @property
    def comm(self) -> Any:
        """The mpi4py communicator that was given, for calls that need its type."""
        if self._comm is None:
            raise AttributeError("comm: virtual ranks have no mpi4py communicator")
        return self._comm

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Barrier(self) -> None:
        """As mpi4py's, and moves collectives on meanwhile: a peer may wait for one of them."""
        self._engine.wait(self.comm.Ibarrier().Test)

    barrier = Barrier

    def Free(self) -> None:
        """End what is under way, say what was never waited for, free the private duplicates.

        Collective. The caller's communicator stays as it is.
        """
        if self._freed:
            return
        number = self._number()
        self._engine.wait(lambda: not self._under_way())
        failed = [f.execution for f in self._flying.values() if f.execution.error is not None]
        damaged = self._damaged = self._damaged or bool(failed)
        if self._agreement is not None and self._check != "0":
            self._agreement.close(Farewell(number, "Free", self._starts))
            self._meet(number, "Free")
            damaged = self._part(self._number())
        self._leave()
        if self._unwaited:
            warnings.warn(
                f"Communicator.Free: {self._unwaited} requests of rank {self.rank} were never "
                "waited for; their collectives have been finished"
                + "".join(f", but for {each.label}: {each.error}" for each in failed),
                RuntimeWarning,
                stacklevel=2,
            )
        for transport in self._lent:
            transport.free()
        if not damaged:
            for private in self._private:
                private.Free()

    def _part(self, number: int) -> bool:
        """Wait until nothing is on its way between the ranks; whether any met an error.

        Then messages may lie on the private communicators that nobody will take: they are
        not freed, as MPI would give their tag space to the next one.
        """
        agreement = self._agreement
        assert agreement is not None
        agreement.part(number, "damaged" if self._damaged else "whole")
        with self._waiting(number, "Free"):
            self._engine.wait(lambda: agreement.parted(number))
        return "damaged" in agreement.records(number).values()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self.Free()
        elif not self._freed:
            # Peers may be anywhere when this rank fails: waiting for them would hide the error.
            self._say_farewell(f"with block left by {kind.__name__}")
            self._leave()

    def depart(self) -> None:
        """The program ends: tell the others, and finish what is under way if they come too.

        Waits for no longer than it would take to say that nothing moves.
        """
        self._engine.stop_thread()
        agreement = self._agreement
        if self._freed or agreement is None:
            return
        number = self._number()
        agreement.close(Farewell(number, "end of the program", self._starts))
        agreement.tell(number)
        begin = time.monotonic()

        def over() -> bool:
            agreement.listen()
            seconds = time.monotonic() - begin
            if self._under_way():
                return seconds > self._patience.warn_after
            return (agreement.heard(number) and agreement.sent()) or seconds > HEAR_WITHIN

        flights = self._under_way()
        with suppress(StallError):
            self._engine.wait(over)
        for _, execution in flights:
            if not execution.finished:
                self._engine.fail(execution, StallError("the other ranks did not come"))
            if execution.error is not None:
                print(
                    f"mpiring: rank {self.rank} ends, and {execution.label} with it: "
                    f"{execution.error}",
                    file=sys.stderr,
                )
        self._leave()

    def __getattr__(self, name: str) -> Any:
        comm = self.__dict__.get("_comm")
        if comm is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(comm, name)

    def _say_farewell(self, how: str) -> None:
        """Tell the others that this rank makes no call any more, without waiting for them."""
        if self._agreement is not None:
            number = self._number()
            self._agreement.close(Farewell(number, how, self._starts))
            self._agreement.tell(number)

    def _leave(self) -> None:
        self._freed = True
        self._engine.unwatch(self._stalled)
        if self._agreement is not None:
            self._agreement.end_wait(of_all=True)

    # -- from a call to the engine --------------------------------------------------------

    def _counts(
        self, sendbuf: Any, recvbuf: Any, recvcounts: Sequence[int] | None
    ) -> Sequence[int]:
        """``recvcounts``, or how many elements each rank's ``recvbuf`` has: a call of its own."""
        if recvcounts is not None:
            # The caller may change its own; what cannot be counts is told later, to all.
            if isinstance(recvcounts, np.ndarray):
                recvcounts = recvcounts.tolist()
            return tuple(recvcounts) if isinstance(recvcounts, list) else recvcounts
        counts = np.empty(self.size, np.int64)

        def understand() -> Call:
            if is_in_place(sendbuf):
                raise ArgumentError("recvcounts: needed with MPI.IN_PLACE")
            own = operand(recvbuf, "recvbuf", writable=True).count
            return self._understand.allgather(np.array([own]), counts)

        self._run("counts of Reduce_scatter", understand, ()).Wait()
        return tuple(counts.tolist())

    def _run(
        self,
        label: str,
        understand: Callable[..., Call],
        buffers: tuple[Any, ...],
        *parameters: Any,
    ) -> Request:
        """Begin a one-shot collective.

        What a call means is kept by the addresses that it was made with, as for blocking ones;
        but each is bound anew, since several may be under way.
        """
        number = self._number()
        key = self._memory.key(label, buffers, parameters) if buffers else None
        understood = self._memory.understood(key)
        call, gates = self._agreed(
            number, lambda: understood or understand(*buffers, *parameters), "non-blocking"
        )
        if understood is None and self._can_come_again(call):
            self._memory.remember(key, borrowing(call))
        slot = number % self._turns * self._traces + crc32(call.record.encode()) % self._traces
        self._make_room(slot)
        execution = self._execution(call, slot, label, once=True, keep=buffers)
        self._flying[slot] = Flight(number, execution)
        self._unwaited += 1
        entry = self._entry(call)
        request = Request(
            self._engine, execution, lambda: entry, on_end=lambda error: self._ended(number, error)
        )
        self._engine.start(execution, [*gates, *entry])
        return request

    def _bind(
        self,
        label: str,
        understand: Callable[..., Call],
        buffers: tuple[Any, ...],
        *parameters: Any,
    ) -> Request:
        """Make a persistent collective: compared over the ranks now, never when it starts."""
        number = self._number()
        self._prune()
        call, gates = self._agreed(number, lambda: understand(*buffers, *parameters), "persistent")
        if gates:
            self._meet(number, f"{label} ({call.record})")
        slot = self._own_slot(number)
        execution = self._execution(call, slot, label)
        flight = Flight(None, execution)
        starts, on_device = self._starts, call.data.on_device
        starts[slot] = 0

        def begin() -> Sequence[Completion]:
            if self._freed:
                raise ArgumentError("Start: the request's communicator has been freed")
            self._flying[slot] = flight
            starts[slot] += 1
            return self._entry(call) if on_device else ()

        return Request(
            self._engine, execution, begin, persistent=True, on_free=lambda: self._landed(slot)
        )

    def _landed(self, slot: int) -> None:
        """Forget what has ended in a slot, and with it the caller's arrays."""
        flight = self._flying.get(slot)
        if flight is not None and flight.execution.finished:
            del self._flying[slot]

    def _block(
        self,
        label: str,
        understand: Callable[..., Call],
        buffers: tuple[Any, ...],
        *parameters: Any,
    ) -> None:
        """Run a collective to its end.

        Programs call with the same arrays again and again, so what was bound for
        these addresses is kept and used again; it borrows the memory, and holds
        no array alive. All blocking calls of one signature share a slot: on one
        rank they follow each other, so their messages match in order.
        """
        number = self._number()
        key = self._memory.key(label, buffers, parameters)
        bound = self._memory.get(key) if self._check != "1" else None
        # All ranks have forgotten the signature where they met an error with it.
        if bound is not None and self._seen.get(bound[0]) == bound[1].binding.slot:
            record, execution = bound
            device = execution.binding.device
            on_host = device.kind == self._host.kind
            gates = [] if on_host else _recorded(device, execution.binding.callers)
            self._seen.move_to_end(record)
            if self._agreement is not None:
                self._agreement.open(number, record)
        else:
            call, gates = self._agreed(number, lambda: understand(*buffers, *parameters))
            record = call.record
            if not self._can_come_again(call):
                key = None
            if key is not None:
                call = borrowing(call)
            execution = self._execution(call, self._seen[record], label)
            gates += self._entry(call)
            self._memory.put(key, record, execution)
        slot = execution.binding.slot
        if slot in self._flying:  # left in the middle
            self._make_room(slot)
        self._flying[slot] = Flight(number, execution)
        try:
            self._engine.start(execution, gates)
            self._engine.finish(execution)
        except BaseException:
            # Left in the middle (Ctrl-C, StallError): it is still under way.
            self._memory.drop(key)
            self._engine.keep(buffers)
            raise
        del self._flying[slot]
        if number % _CROWD == 0:
            self._prune()
        if execution.error is not None:
            self._memory.drop(key)
            self._engine.keep(buffers)
            raise self._explained(number, execution.error)

    def _own_slot(self, number: int) -> int:
        """A slot that stays with what call ``number`` has made: the same on every rank."""
        return self._kept_slots[number % len(self._kept_slots)]

    def _number(self) -> int:
        if self._freed:
            raise ArgumentError("Communicator: already freed")
        self._calls += 1
        return self._calls

    def _tell_path(self) -> None:
        if not self._path_told and self.rank == 0:
            print(f"mpiring: {self._path}", file=sys.stderr, flush=True)
        self._path_told = True

    def _can_come_again(self, call: Call) -> bool:
        """Whether the same addresses always mean the same work."""
        if call.before or call.after:
            return False  # what is copied lives in memory of the call's own
        # Another array at an address may be of another kind, which MPI must not be handed.
        return not (call.data.on_device and self._path.path == "direct")

    def _execution(
        self, call: Call, slot: int, label: str, *, once: bool = False, keep: Any = None
    ) -> Execution:
        assert call.schedule is not None and call.device is not None
        binding = Binding(
            {**call.buffers, **call.memory},
            call.device,
            self._carrier(call.device),
            slot,
            call.operation.reduction if call.operation else None,
            1.0 / self.size,
            persistent=not once,
        )
        return Execution(
            call.schedule,
            binding,
            before=_copies(call.device, call.before),
            after=_copies(call.device, call.after),
            label=f"{label} ({call.record})",
            once=once,
            keep=keep,
        )

    def _entry(self, call: Call) -> list[Completion]:
        """The hand-over from the caller's streams: recorded once, at the start."""
        return _recorded(call.device, call.given) if call.data.on_device else []

    def _device(self, data: Operand) -> Device:
        if not data.on_device:
            return self._host
        from mpiring.device.cuda import device_of

        return device_of(data.flat)

    def _carrier(self, device: Device) -> Transport:
        """What moves the arrays of a device."""
        reads = device is self._reader or (
            self._path.path == "peer" and device.kind != self._host.kind
        )
        if not reads:
            return self._transport
        if device not in self._peers:
            self._peers[device] = self._peer_transport(device)
        return self._peers[device]

    def _peer_transport(self, device: Any) -> Transport:
        from mpiring.transport.peer import PeerTransport

        return PeerTransport(self._transport, self._answers, device)

    def _make_room(self, slot: int) -> None:
        """A slot is used again only after its last collective has ended here."""
        holder = self._flying.get(slot)
        if holder is not None:
            self._engine.finish(holder.execution)
            self._landed(slot)
        if len(self._flying) >= 2 * self._pruned + 64:
            self._prune()
        # Many under way: give them a chance to end first, but never wait for a rank that has not
        # called. A poll asks each of them, so the more there are, the rarer it is.
        active = self._engine.active
        if active > _CROWD and self._calls % (active // _CROWD) == 0:
            for _ in range(_CHANCES):
                os.sched_yield()
                self._engine.poll()

    def _prune(self) -> None:
        """Forget what has ended."""
        self._flying = {
            slot: flight
            for slot, flight in self._flying.items()
            if not flight.execution.finished or flight.execution.error is not None
        }
        self._pruned = len(self._flying)
        if self._agreement is not None:
            numbers = [f.number for f in self._flying.values() if f.number is not None]
            self._agreement.forget(before=min(numbers, default=self._calls))

    def _ended(self, number: int, error: BaseException | None) -> BaseException | None:
        """A request's end: what it raises."""
        self._unwaited -= 1
        return error and self._explained(number, error)

    def _under_way(self) -> list[Flight]:
        flights = list(self._flying.values())  # at once: another thread may be calling
        return [flight for flight in flights if not flight.execution.finished]

    # -- agreement over ranks -------------------------------------------------------------

    def _agreed(
        self, number: int, understand: Callable[[], Call], kind: str = ""
    ) -> tuple[Call, list[Completion]]:
        """Understand a call; what must be over before its data moves."""
        try:
            call = self._understand.ready(understand(), kind)
            if call.data.on_device:
                self._tell_path()
        except Exception as error:
            self._complain(number, error)
            raise
        known = call.record in self._seen
        if known:
            self._seen.move_to_end(call.record)
        elif call.kind != "persistent":
            self._seen[call.record] = self._own_slot(number)
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)
        agreement = self._agreement
        if agreement is None or self.size == 1 or self._check == "0":
            return call, []
        agreement.open(number, call.record)
        if known and self._check != "1":
            return call, []
        return call, [_Remembered(Agreed(agreement, number), lambda: self._forget(number))]

    def _meet(self, number: int, label: str) -> None:
        """Wait until all ranks have made call ``number``; raises if they made different ones."""
        assert self._agreement is not None
        agreed = Agreed(self._agreement, number)
        with self._waiting(number, label):
            try:
                self._engine.wait(agreed.done)
            except MismatchError:
                self._forget(number)
                raise

    @contextmanager
    def _waiting(self, number: int, label: str) -> Iterator[None]:
        """Inside, waiting for the other ranks counts as something under way."""
        meeting = Meeting(label)
        self._flying[_MEETING] = Flight(number, meeting)
        self._engine.attach(meeting)
        try:
            yield
        finally:
            self._engine.detach(meeting)
            del self._flying[_MEETING]

    def _complain(self, number: int, error: Exception) -> None:
        """Tell all ranks what is wrong here, hear what is wrong there, raise the same."""
        if self._agreement is None or self.size == 1 or self._check == "0":
            return
        self._agreement.open(number, complaint(error))
        verdict = self._heard_verdict(number)
        assert verdict is not None
        raise verdict from error

    def _explained(self, number: int, error: BaseException) -> BaseException:
        """What all ranks say of a call in which this one met bytes that were not agreed."""
        agreement = self._agreement
        self._damaged = True
        if agreement is None or self._check == "0" or not isinstance(error, TransportError):
            return error
        verdict = self._heard_verdict(number)
        if verdict is None:  # all called the same, and it went wrong here: others may wait for it
            agreement.amend(number, complaint(error))
        return verdict or error

    def _heard_verdict(self, number: int) -> Exception | None:
        """The verdict on a call in which something is wrong, once the others have spoken."""
        agreement = self._agreement
        assert agreement is not None
        agreement.tell(number)
        until = time.monotonic() + HEAR_WITHIN

        def heard() -> bool:
            agreement.listen()
            return agreement.heard(number) or time.monotonic() > until

        self._engine.wait(heard)
        self._forget(number)
        return agreement.verdict(number)

    def _forget(self, number: int) -> None:
        """Every rank compares anew, with other slots, what any rank called as ``number``.

        Data of the failed call may be on its way in the slots of now.
        """
        assert self._agreement is not None
        self._damaged = True
        for record in self._agreement.records(number).values():
            self._seen.pop(record, None)

    def _stalled(self, seconds: float) -> None:
        """Called now and then while something is under way here and nothing moves."""
        agreement = self._agreement
        under_way = self._under_way()
        if agreement is None or not under_way:
            return
        agreement.listen()
        late = seconds > HEAR_WITHIN
        number, execution = min(under_way, key=lambda flight: flight.number or self._calls)
        if isinstance(execution, Meeting):
            pass  # it asks for itself
        elif number is None:
            slot = execution.binding.slot
            deserters = agreement.deserters(slot, self._starts[slot])
            if deserters and seconds > TELL_AFTER:
                self._damaged = True
                self._engine.fail(execution, _deserted(deserters, execution.label))
        elif self._check != "0":
            if seconds > TELL_AFTER or agreement.doubtful(number):
                agreement.tell(number)
            if agreement.doubtful(number) and (agreement.heard(number) or late):
                error = agreement.verdict(number)
                assert error is not None
                self._forget(number)
                self._engine.fail(execution, error)
        if execution.finished:
            return
        self._patience.check(seconds, lambda: self._plight(number, execution))

    def _plight(self, number: int | None, execution: Any) -> str:
        """What is waited for, in words."""
        assert self._agreement is not None
        told = f"rank {self.rank} waits in {execution.tell()}"
        if number is None or self._check == "0":
            return told
        silent = self._agreement.silent(number)
        return f"{told}; {'not there yet: ' + name_ranks(silent) if silent else 'so do all'}"


class Flight(NamedTuple):
    """What is under way; ``number`` is None for starts of persistent collectives."""

    number: int | None
    execution: Any


class Meeting:
    """Waiting for all ranks to make a call; stands where an execution does."""

    finished = False
    error = None

    def __init__(self, label: str) -> None:
        self.label = label

    def advance(self) -> bool:
        return False

    def tell(self) -> str:
        return self.label


class _Remembered:
    """An agreement that is forgotten if it fails."""

    def __init__(self, agreed: Agreed, forget: Callable[[], None]) -> None:
        self._agreed, self._forget = agreed, forget

    def done(self) -> bool:
        try:
            return self._agreed.done()
        except MpiringError:
            self._forget()
            raise


def _deserted(deserters: dict[int, str], label: str) -> MismatchError:
    left = "; ".join(f"rank {rank}: {how}" for rank, how in deserters.items())
    return MismatchError(f"ranks wait in {label}, but not all are left: {left}")


def _recorded(device: Any, arrays: Iterable[Any]) -> list[Completion]:
    return [device.record(each) for each in arrays]


def _copies(device: Device, pairs: tuple[tuple[Any, Any], ...]) -> list[Task]:
    return [device.copy(*_shaped(source, target)) for source, target in pairs]


def _shaped(source: Any, target: Any) -> tuple[Any, Any]:
    """Give the flat one of the two the other's shape."""
    if np.ndim(source) < np.ndim(target):
        return source.reshape(target.shape), target
    return source, target.reshape(source.shape)
