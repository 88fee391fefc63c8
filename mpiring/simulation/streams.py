"""A virtual GPU that finds missing dependencies, not by their luck but by their absence.

``VirtualDriver`` is a driver of ``device.streams``, as CuPy's is: the tasks, the
engine and the schedules above it are those of a real run. Its memory is NumPy's.

Launching only queues. A seeded scheduler runs what is queued later, in any order
that streams and events allow; so wrong order shows as wrong values, sometimes. It
shows always as a ``HazardError``, for each access is checked when it is asked for:

* A kernel declares what it reads and writes. Until the host has observed its end
  (``query`` of an event recorded behind it said yes) it is *open*.
* Two accesses conflict if they overlap and one of them writes.
* A kernel may conflict with an open kernel only if that one comes before it: by
  the order of its stream, or through an event that its stream waits for.
* A message, or the host itself, may conflict with no open kernel at all: MPI knows
  no streams.
* A message is under way from its start until the host has observed its end;
  meanwhile nothing may conflict with it.

The check looks at what was observed, not at what has run, so it does not depend
on the seed: whether a kernel happens to be over is nobody's excuse. It is the
happens-before relation of Lamport ("Time, clocks, and the ordering of events in a
distributed system", 1978) with sets of open kernels as clocks.

Every target of the library's work gets a stream of its own, which is more freedom
than a GPU takes, so that nothing rests on two tasks sharing a stream by chance.

The ranks of a ``VirtualNode`` open each other's memory, as processes do through CUDA
IPC. No stream orders one rank's kernels with another's, so an open kernel that
reads somebody's memory conflicts with whatever writes there, on every rank; and it
may read only what its owner has offered: what lies in a send that is under way, as
long as it is.
"""

from __future__ import annotations

import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpiring.device.base import Reduction
from mpiring.device.host import HostDevice, address_of, window
from mpiring.device.pool import Lease
from mpiring.device.streams import Launch
from mpiring.errors import HazardError
from mpiring.task import Task
from mpiring.transport.base import Transport


class VirtualMemory(np.ndarray):
    """Device memory. (It is told from the host's by its type, which slices keep.)"""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """As of a GPU's array: this is how the library tells one."""
        return {**self.__array_interface__, "stream": None}


class Mapped(VirtualMemory):
    """Device memory of another rank."""


class Region(NamedTuple):
    """Bytes ``start <= address < stop``."""

    start: int
    stop: int

    @classmethod
    def of(cls, array: np.ndarray) -> Region:
        start = address_of(array)
        return cls(start, start + array.nbytes)

    def overlaps(self, other: Region) -> bool:
        return max(self.start, other.start) < min(self.stop, other.stop)

    def holds(self, other: Region) -> bool:
        return self.start <= other.start and other.stop <= self.stop


@dataclass(eq=False)
class Access:
    """A kernel, a message or the host at work, and what it touches."""

    name: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    #: Arrays stay alive as long as something may touch them.
    arrays: tuple[np.ndarray, ...] = field(repr=False)
    #: What it reads of other ranks' memory.
    visits: tuple[Region, ...] = ()
    observed: bool = False

    @classmethod
    def to(cls, name: str, reads: Iterable[np.ndarray], writes: Iterable[np.ndarray]) -> Access:
        reads, writes = tuple(reads), tuple(writes)
        visits = tuple(Region.of(each) for each in reads if isinstance(each, Mapped))
        return cls(
            name,
            tuple(map(Region.of, reads)),
            tuple(map(Region.of, writes)),
            (*reads, *writes),
            visits,
        )

    def conflict(self, other: Access) -> Region | None:
        """A region that both touch and one writes."""
        for mine, theirs in (
            (self.writes, other.writes),
            (self.writes, other.reads),
            (self.reads, other.writes),
        ):
            for one in mine:
                for two in theirs:
                    if one.overlaps(two):
                        return Region(max(one.start, two.start), min(one.stop, two.stop))
        return None


class VirtualNode:
    """What the ranks of one node have in common: whom exported memory belongs to."""

    def __init__(self) -> None:
        self.drivers: list[VirtualDriver] = []
        self.exports: dict[bytes, tuple[VirtualDriver, np.ndarray]] = {}


class VirtualStream:
    """A queue of work; ``before`` holds the open kernels that come before the next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queue: deque[Callable[[], bool]] = deque()
        self.before: set[Access] = set()


class Record:
    """A place in a stream: what comes before it, and whether that has run."""

    def __init__(self, before: frozenset[Access]) -> None:
        self.before = before
        self.reached = False


class VirtualEvent:
    """An event: its latest record."""

    record: Record | None = None


class VirtualDriver:
    """One virtual GPU and its host. See ``device.streams.Driver`` for what is not told here."""

    kind = "virtual"
    xp = np

    def __init__(self, seed: int = 0, node: VirtualNode | None = None) -> None:
        self.node = node or VirtualNode()
        self.node.drivers.append(self)
        self.random = random.Random(seed)
        self.default = VirtualStream("default")
        self._current = self.default
        self._streams: dict[tuple[str, int], VirtualStream] = {}
        self._loaded: list[VirtualStream] = []
        self._kernels: list[Access] = []  # launched and still open
        self._messages: list[Access] = []  # under way
        self._visits: list[Access] = []  # open kernels that read memory of other ranks
        self._host = HostDevice()
        self._memory: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()
        self._names = itertools.count(1)
        self._allocated: weakref.WeakValueDictionary[int, np.ndarray] = (
            weakref.WeakValueDictionary()
        )

    # -- memory

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        array = self.hidden(count, dtype)
        self._allocated[Region.of(array).start] = array
        return array

    def hidden(self, count: int, dtype: Any) -> np.ndarray:
        """Device memory of the caller's, of a kind that neither MPI nor other ranks see."""
        return self._named(VirtualMemory((count,), dtype), "device")

    def pinned(self, count: int, dtype: Any) -> np.ndarray:
        return self._named(np.empty(count, dtype), "pinned")

    def _named(self, array: np.ndarray, kind: str) -> np.ndarray:
        self._memory[f"{kind} memory {next(self._names)}"] = array
        return array

    def part(self, lease: Lease, count: int, dtype: Any) -> np.ndarray:
        memory, start = lease.piece.memory, lease.piece.start
        on_host = self.on_host(memory)
        kind = np.ndarray if on_host else VirtualMemory
        array = window(kind, address_of(memory) + start, count, dtype, lease)
        self.host(array, writes=True)  # lent while anything is under way: a hazard
        array.view(np.uint8).fill(0xFF)  # recognisable as never written: NaN
        return self._named(array, "pinned" if on_host else "device")

    def borrow(self, array: np.ndarray) -> np.ndarray:
        return window(VirtualMemory, address_of(array), array.size, array.dtype)

    def settle(self) -> None:
        while self.step():
            pass
        self._observed(self._kernels)

    def on_host(self, array: np.ndarray) -> bool:
        return not isinstance(array, VirtualMemory)

    def plain(self, array: np.ndarray) -> bool:
        return self.owns(array)

    def owns(self, array: np.ndarray) -> bool:
        return self._allocation(array) is not None

    def _allocation(self, array: np.ndarray) -> np.ndarray | None:
        """The allocation in which ``array`` lies, if it is one of the library's."""
        region = Region.of(array)
        for memory in self._allocated.values():
            if Region.of(memory).holds(region):
                return memory
        return None

    def shared(self, memory: np.ndarray) -> bool:
        return _handle(memory) in self.node.exports

    def export(self, array: np.ndarray) -> tuple[bytes, int] | None:
        memory = self._allocation(array)
        if memory is None:
            return None
        self.node.exports[_handle(memory)] = self, memory
        return _handle(memory), Region.of(array).start - Region.of(memory).start

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> np.ndarray:
        owner, memory = self.node.exports[handle]
        assert owner is not self, "CUDA opens no handle in the process that made it"
        return window(Mapped, address_of(memory) + start, count, dtype, self)

    # -- streams and events

    def stream(self, role: str, target: np.ndarray) -> VirtualStream:
        key = role, Region.of(target).start
        if key not in self._streams:
            self._streams[key] = VirtualStream(f"{role} {len(self._streams) + 1}")
        return self._streams[key]

    def producer(self, array: np.ndarray) -> VirtualStream:
        return self._current

    @contextmanager
    def use(self, stream: VirtualStream) -> Iterator[None]:
        """Make a stream the caller's current one, as CuPy's ``with stream:`` does."""
        previous, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = previous

    def event(self) -> VirtualEvent:
        return VirtualEvent()

    def record(self, event: VirtualEvent, stream: VirtualStream) -> None:
        stream.before = {kernel for kernel in stream.before if not kernel.observed}
        record = event.record = Record(frozenset(stream.before))

        def reach() -> bool:
            record.reached = True
            return True

        self._queue(stream, reach)

    def wait(self, stream: VirtualStream, event: VirtualEvent) -> None:
        """What is put on ``stream`` from now on comes after the event's latest record."""
        record = event.record
        if record is not None:
            stream.before |= record.before
            self._queue(stream, lambda: record.reached)

    def query(self, event: VirtualEvent) -> bool:
        record = event.record
        if record is None:
            return True  # as CUDA says of an event that was never recorded
        for _ in range(self.random.randrange(6) if self._loaded else 0):
            self.step()
        if record.reached and record.before:
            self._observed(record.before)
            record.before = frozenset()
        return record.reached

    def _observed(self, kernels: Iterable[Access]) -> None:
        for kernel in kernels:
            kernel.observed, kernel.arrays = True, ()
        self._kernels = [kernel for kernel in self._kernels if not kernel.observed]
        self._visits = [kernel for kernel in self._visits if not kernel.observed]

    # -- work

    def launch(
        self,
        stream: VirtualStream,
        name: str,
        run: Callable[[], Any],
        *,
        reads: Sequence[np.ndarray] = (),
        writes: Sequence[np.ndarray] = (),
    ) -> None:
        """Queue a kernel, the caller's or the library's. HazardError if its order is open."""
        kernel = Access.to(f"kernel {name} on stream {stream.name}", reads, writes)
        self._launch(stream, kernel, run)

    def _launch(self, stream: VirtualStream, kernel: Access, run: Callable[[], Any]) -> None:
        for other in self._kernels:
            if other not in stream.before:
                self._check(kernel, other, "no stream, event or observed completion orders them")
        self._check_messages(kernel)
        if kernel.visits:
            self._visit(kernel)
        stream.before.add(kernel)
        self._kernels.append(kernel)

        def runs() -> bool:
            run()
            return True

        self._queue(stream, runs)

    def _bound(
        self,
        name: str,
        task: Task,
        reads: Sequence[np.ndarray],
        writes: Sequence[np.ndarray],
    ) -> Launch:
        known = Access.to(name, reads, writes)

        def launch(stream: VirtualStream) -> None:
            kernel = Access(
                f"kernel {name} on stream {stream.name}",
                known.reads,
                known.writes,
                known.arrays,
                known.visits,
            )
            self._launch(stream, kernel, task.start)

        return launch

    def reduction(self, src: np.ndarray, dst: np.ndarray, op: Reduction) -> Launch:
        return self._bound(op.name, self._host.reduce(src, dst, op), (src, dst), (dst,))

    def scaling(self, dst: np.ndarray, factor: float) -> Launch:
        return self._bound("scale", self._host.scale(dst, factor), (dst,), (dst,))

    def transfer(self, src: np.ndarray, dst: np.ndarray) -> Launch:
        return self._bound("copy", self._host.copy(src, dst), (src,), (dst,))

    def _queue(self, stream: VirtualStream, entry: Callable[[], bool]) -> None:
        if not stream.queue:
            self._loaded.append(stream)
        stream.queue.append(entry)

    @property
    def busy(self) -> bool:
        """Whether anything is queued."""
        return bool(self._loaded)

    def step(self) -> bool:
        """Run the head of a random stream that can go on; whether there was one."""
        waiting = list(self._loaded)
        while waiting:
            stream = waiting.pop(self.random.randrange(len(waiting)))
            if stream.queue[0]():
                stream.queue.popleft()
                if not stream.queue:
                    self._loaded.remove(stream)
                return True
        return False

    # -- the host's own accesses

    def host(self, array: np.ndarray, *, writes: bool = False) -> None:
        """The host reads (or writes) ``array`` now. HazardError if anything may conflict."""
        self._check_host(Access.to("the host", () if writes else (array,), (array,) * writes))

    def begin(self, name: str, array: np.ndarray, *, writes: bool) -> Access:
        """A message is started on ``array``. HazardError if anything may conflict."""
        message = Access.to(name, () if writes else (array,), (array,) * writes)
        self._check_host(message)
        self._messages.append(message)
        return message

    @contextmanager
    def inside(self, message: Access) -> Iterator[None]:
        """What is launched now is done by the message itself: by a receive, where it writes."""
        if not message.writes:
            yield
            return
        self._messages.remove(message)
        try:
            yield
        finally:
            self._messages.append(message)

    def end(self, message: Access) -> None:
        """The host has observed that the message is over."""
        self._messages.remove(message)
        for driver in self.node.drivers:
            for kernel in driver._visits:
                for region in kernel.visits:
                    if not driver._offered(region):
                        raise HazardError(
                            f"{message.name} is taken for over, while {kernel.name} of the other "
                            f"rank reads {self._tell(region)}: the host has observed no end of it"
                        )

    def _visit(self, kernel: Access) -> None:
        for region in kernel.visits:
            if not self._offered(region):
                raise HazardError(
                    f"{kernel.name} reads {self._tell(region)} of another rank, which is in no "
                    "send that is under way there"
                )
        self._visits.append(kernel)

    def _offered(self, region: Region) -> bool:
        """Whether it lies in what another rank is sending."""
        return any(
            read.holds(region)
            for driver in self.node.drivers
            for message in driver._messages
            for read in message.reads
        )

    def _check_host(self, access: Access) -> None:
        for kernel in self._kernels:
            self._check(access, kernel, "the host has observed no event recorded behind that")
        self._check_messages(access)

    def _check_messages(self, access: Access) -> None:
        for message in self._messages:
            self._check(access, message, "the host has not observed its end")

    def _check(self, access: Access, other: Access, missing: str) -> None:
        region = access.conflict(other)
        if region is not None:
            verb = "writes" if any(region.overlaps(each) for each in access.writes) else "reads"
            also = "writes" if any(region.overlaps(each) for each in other.writes) else "reads"
            raise HazardError(
                f"{access.name} {verb} {self._tell(region)}, which {other.name} {also}: {missing}"
            )

    def _tell(self, region: Region) -> str:
        # A piece lies in an allocation, and was named later.
        for name, array in reversed(list(self._memory.items())):
            whole = Region.of(array)
            if whole.holds(region):
                size = array.itemsize
                start, stop = ((at - whole.start) // size for at in region)
                return f"elements {start} to {stop} of {name}"
        return f"bytes {region.start:#x} to {region.stop:#x}"


def _handle(memory: np.ndarray) -> bytes:
    return Region.of(memory).start.to_bytes(64, "little")


class StreamTransport:
    """A transport that tells the virtual device which memory its messages touch, and when."""

    def __init__(self, transport: Transport, driver: VirtualDriver) -> None:
        self.rank, self.size, self.slots = transport.rank, transport.size, transport.slots
        self._transport = transport
        self._driver = driver

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> WatchedMessage:
        task = self._transport.send(view, peer, slot, persistent=persistent)
        return WatchedMessage(task, self._driver, f"a send to rank {peer}", view, writes=False)

    def recv(self, view: Any, peer: int, slot: int, **options: Any) -> WatchedMessage:
        task = self._transport.recv(view, peer, slot, **options)
        return WatchedMessage(task, self._driver, f"a receive from rank {peer}", view, writes=True)

    def duplicate(self) -> StreamTransport:
        return StreamTransport(self._transport.duplicate(), self._driver)

    def free(self) -> None:
        self._transport.free()


class WatchedMessage:
    """A message that is under way for the device from its start to its observed end."""

    immediate = False

    def __init__(
        self, task: Any, driver: VirtualDriver, name: str, view: np.ndarray, *, writes: bool
    ) -> None:
        self._task, self._driver = task, driver
        self._name, self._view, self._writes = name, view, writes
        self._open: Access | None = None

    def start(self) -> None:
        self._open = self._driver.begin(self._name, self._view, writes=self._writes)
        self._task.start()

    def done(self) -> bool:
        if self._open is None:
            return True
        with self._driver.inside(self._open):
            finished = self._task.done()
        if finished:
            self._driver.end(self._open)
            self._open = None
        return finished

    def cancel(self) -> None:
        if hasattr(self._task, "cancel"):
            self._task.cancel()
