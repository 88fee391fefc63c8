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
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpiring.device.base import Reduction
from mpiring.device.host import HostDevice
from mpiring.device.streams import Launch
from mpiring.errors import HazardError
from mpiring.task import Task
from mpiring.transport.base import Transport


class VirtualMemory(np.ndarray):
    """Device memory. (It is told from the host's by its type, which slices keep.)"""


class Region(NamedTuple):
    """Bytes ``start <= address < stop``."""

    start: int
    stop: int

    @classmethod
    def of(cls, array: np.ndarray) -> Region:
        start = array.__array_interface__["data"][0]
        return cls(start, start + array.nbytes)

    def overlaps(self, other: Region) -> bool:
        return max(self.start, other.start) < min(self.stop, other.stop)


@dataclass(eq=False)
class Access:
    """A kernel, a message or the host at work, and what it touches."""

    name: str
    reads: tuple[Region, ...]
    writes: tuple[Region, ...]
    #: Arrays stay alive as long as something may touch them.
    arrays: tuple[np.ndarray, ...] = field(repr=False)
    observed: bool = False

    @classmethod
    def to(cls, name: str, reads: Iterable[np.ndarray], writes: Iterable[np.ndarray]) -> Access:
        reads, writes = tuple(reads), tuple(writes)
        return cls(
            name, tuple(map(Region.of, reads)), tuple(map(Region.of, writes)), (*reads, *writes)
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

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.default = VirtualStream("default")
        self._current = self.default
        self._streams: dict[tuple[str, int], VirtualStream] = {}
        self._loaded: list[VirtualStream] = []
        self._kernels: list[Access] = []  # launched and still open
        self._messages: list[Access] = []  # under way
        self._host = HostDevice()
        self._memory: weakref.WeakValueDictionary[str, np.ndarray] = weakref.WeakValueDictionary()

    # -- memory

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        return self._filled(VirtualMemory((count,), dtype), "device")

    def pinned(self, count: int, dtype: Any) -> np.ndarray:
        return self._filled(np.empty(count, dtype), "pinned")

    def _filled(self, array: np.ndarray, kind: str) -> np.ndarray:
        """Uninitialised memory, made recognisable: NaN as floats."""
        array.view(np.uint8).fill(0xFF)
        self._memory[f"{kind} memory {len(self._memory) + 1}"] = array
        return array

    def on_host(self, array: np.ndarray) -> bool:
        return not isinstance(array, VirtualMemory)

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
            for kernel in record.before:
                kernel.observed = True
            self._kernels = [kernel for kernel in self._kernels if not kernel.observed]
            record.before = frozenset()
        return record.reached

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
                f"kernel {name} on stream {stream.name}", known.reads, known.writes, known.arrays
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

    def end(self, message: Access) -> None:
        """The host has observed that the message is over."""
        self._messages.remove(message)

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
        for name, array in self._memory.items():
            whole = Region.of(array)
            if whole.start <= region.start < whole.stop:
                size = array.itemsize
                start, stop = ((at - whole.start) // size for at in region)
                return f"elements {start} to {stop} of {name}"
        return f"bytes {region.start:#x} to {region.stop:#x}"


class StreamTransport:
    """A transport that tells the virtual device which memory its messages touch, and when."""

    def __init__(self, transport: Transport, driver: VirtualDriver) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport
        self._driver = driver

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        task = self._transport.send(view, peer, slot, persistent=persistent)
        begin = partial(self._driver.begin, f"a send to rank {peer}", view, writes=False)
        return WatchedMessage(task, begin, self._driver.end)

    def recv(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        task = self._transport.recv(view, peer, slot, persistent=persistent)
        begin = partial(self._driver.begin, f"a receive from rank {peer}", view, writes=True)
        return WatchedMessage(task, begin, self._driver.end)


class WatchedMessage:
    """A message that is under way for the device from its start to its observed end."""

    immediate = False

    def __init__(
        self, task: Task, begin: Callable[[], Access], end: Callable[[Access], None]
    ) -> None:
        self._task, self._begin, self._end = task, begin, end
        self._open: Access | None = None

    def start(self) -> None:
        self._open = self._begin()
        self._task.start()

    def done(self) -> bool:
        if not self._task.done():
            return False
        if self._open is not None:
            self._end(self._open)
            self._open = None
        return True
