"""Tasks on a device that runs asynchronously: the order of streams and events.

The one rule of order is the engine's: a task is started after the host has
observed the end of all that it depends on. So there is nothing to wait for on
the device itself. A task launches its work on a stream and records an event
behind it; the task is over when the host sees the event. Nothing synchronises.

What calls the device is a *driver* of a dozen calls: CuPy's, or the simulation's,
which checks that every access is covered by something the host has observed.
Everything in this module is the same for both, so what is tested is what runs.

Invariants:

* work on one target in one round (a reduction and its scaling) goes to one
  stream in the order in which it is started;
* an event is recorded again only after the host has seen its last record;
* a task holds its arrays, so memory outlives the work on it, and is lent to others
  only after it (``pool``);
* copies to the host, copies to the device, copies between GPUs and kernels have streams
  of their own: a GPU has engines for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, Protocol

import numpy as np

from mpiring.device.base import Array, Device, Reduction
from mpiring.device.pool import Lease, Pool
from mpiring.task import READY, Completion, Task

Stream = Any
Event = Any
#: Puts work, bound to its arrays, on a stream.
Launch = Callable[[Stream], None]

#: Bytes of a piece of pinned memory that is kept while nobody uses it.
PINNED_KEPT = 64 << 20

COMPUTE, COPY, TO_HOST, TO_DEVICE = ROLES = ("compute", "copy", "to host", "to device")


class Driver(Protocol):
    """What differs between a GPU and its simulation."""

    kind: str
    xp: ModuleType

    def allocate(self, count: int, dtype: Any) -> Array:
        """Device memory that MPI and other processes may see."""
        ...

    def pinned(self, count: int, dtype: Any) -> Array:
        """Host memory that the device reads and writes by itself."""
        ...

    def part(self, lease: Lease, count: int, dtype: Any) -> Array:
        """An array at the start of a piece of memory, which keeps the lease."""
        ...

    def borrow(self, array: Array) -> Array:
        """The same memory, without keeping it alive."""
        ...

    def owns(self, array: Array) -> bool:
        """Whether the array lies in memory from ``allocate``."""
        ...

    def settle(self) -> None:
        """Return when all work that anybody has launched is over."""
        ...

    def on_host(self, array: Array) -> bool: ...

    def plain(self, array: Array) -> bool:
        """Whether MPI may be handed the device array: what it is on is no special memory."""
        ...

    def shared(self, memory: Array) -> bool:
        """Whether other processes may have mapped the allocation."""
        ...

    def export(self, array: Array) -> tuple[bytes, int] | None:
        """By what another process of this node finds the array: a handle of its allocation,
        and where in it the array begins, in bytes. None if the memory is not the library's.
        """
        ...

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> Array:
        """The array that another process exported, to be read by work launched here."""
        ...

    def stream(self, role: str, target: Array) -> Stream:
        """A stream of the library's own for one of ``ROLES``; the same for the same target."""
        ...

    def producer(self, array: Array) -> Stream:
        """The caller's stream, on which what is in ``array`` is being computed."""
        ...

    def event(self) -> Event: ...

    def record(self, event: Event, stream: Stream) -> None: ...

    def query(self, event: Event) -> bool:
        """Whether all before the latest record is over: never blocks; raises if it failed."""
        ...

    def reduction(self, src: Array, dst: Array, op: Reduction) -> Launch: ...

    def scaling(self, dst: Array, factor: float) -> Launch: ...

    def transfer(self, src: Array, dst: Array) -> Launch: ...


class StreamTask:
    """Work on a stream, with an event behind it."""

    __slots__ = ("_driver", "_event", "_launch", "_stream", "done")
    immediate = False

    def __init__(self, driver: Driver, launch: Launch, stream: Stream) -> None:
        self._driver = driver
        self._launch = launch
        self._stream = stream
        self._event = driver.event()
        self.done: Callable[[], bool] = partial(driver.query, self._event)

    def start(self) -> None:
        self._launch(self._stream)
        self._driver.record(self._event, self._stream)


class Recorded:
    """The end of all that a stream had to do at one moment."""

    __slots__ = ("done",)

    def __init__(self, driver: Driver, stream: Stream) -> None:
        event = driver.event()
        driver.record(event, stream)
        self.done: Callable[[], bool] = partial(driver.query, event)


class StreamDevice(Device):
    """A ``Device`` over a driver. Host arrays that it meets are over when the call is."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self._memory = Pool(
            lambda nbytes: driver.allocate(nbytes, "u1"), driver.settle, driver.shared
        )
        self._pinned = Pool(
            lambda nbytes: driver.pinned(nbytes, "u1"), driver.settle, kept=PINNED_KEPT
        )

    @property
    def kind(self) -> str:
        return self.driver.kind

    @property
    def xp(self) -> ModuleType:
        return self.driver.xp

    def empty(self, count: int, dtype: Any) -> Array:
        """``count`` uninitialised elements in memory that MPI and other processes may see.

        Once dropped the memory is lent again, and is not the array module's own.
        """
        return self._lent(self._memory, count, dtype, private=False)

    def scratch(self, count: int, dtype: Any) -> Array:
        return self._lent(self._memory, count, dtype, private=True)

    def staging(self, count: int, dtype: Any) -> Array:
        return self._lent(self._pinned, count, dtype, private=True)

    def _lent(self, pool: Pool, count: int, dtype: Any, *, private: bool) -> Array:
        lease = pool.take(max(1, count * np.dtype(dtype).itemsize), private=private)
        return self.driver.part(lease, count, dtype)

    def borrow(self, array: Array) -> Array:
        return self.driver.borrow(array)

    def owns(self, array: Array) -> bool:
        """Whether ``array`` lies in memory from ``empty``, which MPI and IPC may see."""
        return self.driver.owns(array)

    def plain(self, array: Array) -> bool:
        """Whether MPI may be handed the device array, if it knows of GPUs at all."""
        return self.driver.plain(array)

    def export(self, array: Array) -> tuple[bytes, int] | None:
        return self.driver.export(array)

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> Array:
        return self.driver.mapped(handle, start, count, dtype)

    def record(self, array: Array) -> Completion:
        if self.driver.on_host(array):
            return READY
        return Recorded(self.driver, self.driver.producer(array))

    def reduce(self, src: Array, dst: Array, op: Reduction) -> Task:
        return self._task(self.driver.reduction(src, dst, op), COMPUTE, dst)

    def scale(self, dst: Array, factor: float) -> Task:
        return self._task(self.driver.scaling(dst, factor), COMPUTE, dst)

    def copy(self, src: Array, dst: Array) -> Task:
        from_host, to_host = self.driver.on_host(src), self.driver.on_host(dst)
        role = COPY if from_host == to_host else TO_HOST if to_host else TO_DEVICE
        return self._task(self.driver.transfer(src, dst), role, dst)

    def _task(self, launch: Launch, role: str, target: Array) -> Task:
        return StreamTask(self.driver, launch, self.driver.stream(role, target))
