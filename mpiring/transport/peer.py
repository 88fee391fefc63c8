"""Messages by reading each other's memory: ranks of one node.

The receiver does the work. A send tells where its data lies: in memory that another process
can find by a handle. A receive finds it, copies out of it, or adds what is there to what it
has, and answers when it has seen the end of that; then the send is over. MPI carries only
what is told, less than a hundred bytes, and the answer, one byte.

A handle of a GPU's memory opens an allocation of the library's; the mapping is kept, and the
receiver's own GPU reads it. So MPI need not know of GPUs, and ranks may share one. A handle
of the host's memory is the number of a process, and the kernel reads it (``device.remote``):
once, where a message through shared memory is copied twice, and without a handshake for
each piece.

Why the receiver: nobody ever writes into another rank's memory, so whoever allocated it
decides alone when it is written; and nothing is copied on the way.

Invariants:

* what is sent lies in memory that ``export`` has a handle for: the caller of ``send`` sees to
  it (``schedule.staging`` puts slots of such memory before other sends);
* a GPU's memory that was read once stays mapped, so exported memory is never freed;
* answers to messages between the same ranks in the same slot are sent in the order in which
  the receives were started, whichever ends first: as MPI, the sender tells them apart by
  their order alone.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from mpiring.errors import TransportError
from mpiring.task import Task
from mpiring.transport.base import Receive, Transport

#: What a send tells: the handle of an allocation, where in it the data begins, and its bytes.
_NOTE = struct.Struct("<64sQQ")


class PeerMemory(Protocol):
    """What the device can do with memory of other processes; see ``device.streams.Driver``.

    What ``mapped`` returns can be sliced, and is the ``src`` of this device's tasks only.
    """

    def export(self, array: Any) -> tuple[bytes, int] | None: ...

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> Any: ...

    def copy(self, src: Any, dst: Any) -> Task: ...


class PeerTransport:
    """Messages of a device's arrays; ``notes`` and ``answers`` carry the signals, apart from each
    other. Views are of memory from the device's ``empty`` or ``scratch`` where they are sent.
    """

    def __init__(self, notes: Transport, answers: Transport, device: PeerMemory) -> None:
        self.rank, self.size, self.slots = notes.rank, notes.size, notes.slots
        self._notes, self._answers = notes, answers
        self._device = device
        #: By peer and slot: receives that have not been answered, in order of their starts.
        self._open: defaultdict[tuple[int, int], deque[_Recv]] = defaultdict(deque)

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        exported = self._device.export(view)
        if exported is None:
            raise TransportError("send: other ranks cannot read this memory")
        note = np.frombuffer(_NOTE.pack(*exported, view.nbytes), np.uint8)
        return _Send(
            self._notes.send(note, peer, slot, persistent=persistent),
            self._answers.recv(np.empty(1, np.uint8), peer, slot, persistent=persistent),
        )

    def recv(
        self,
        view: Any,
        peer: int,
        slot: int,
        *,
        persistent: bool = False,
        combine: Callable[[Any], Sequence[Task]] | None = None,
    ) -> Receive:
        """``combine(source)`` makes the tasks that bring what the sender has into ``view``, to be
        started one after the other; without it that is a copy."""
        note = np.empty(_NOTE.size, np.uint8)

        def copy(source: Any) -> Sequence[Task]:
            return [self._device.copy(source, view)]

        return _Recv(
            view,
            note,
            self._device,
            combine or copy,
            self._notes.recv(note, peer, slot, persistent=persistent),
            self._answers.send(np.empty(1, np.uint8), peer, slot, persistent=persistent),
            self._open[peer, slot],
        )

    def duplicate(self) -> PeerTransport:
        return PeerTransport(self._notes.duplicate(), self._answers.duplicate(), self._device)

    def free(self) -> None:
        self._notes.free()
        self._answers.free()


class _Steps:
    """A task written as a generator: it yields where it waits."""

    immediate = False
    _steps: Iterator[None]

    def done(self) -> bool:
        return next(self._steps, self) is self


class _Send(_Steps):
    def __init__(self, note: Task, answer: Receive) -> None:
        self._note, self._answer = note, answer
        self._unanswered = False

    def start(self) -> None:
        self._unanswered = True
        self._answer.start()
        self._note.start()
        self._steps = self._run()

    def _run(self) -> Iterator[None]:
        while not self._note.done():
            yield
        while not self._answer.done():
            yield
        self._unanswered = False

    def cancel(self) -> None:
        """Expect no answer any more."""
        if self._unanswered:
            self._answer.cancel()
            self._unanswered = False


class _Recv(_Steps):
    def __init__(
        self,
        view: Any,
        octets: np.ndarray,
        device: PeerMemory,
        bring: Callable[[Any], Sequence[Task]],
        note: Receive,
        answer: Task,
        queue: deque[_Recv],
    ) -> None:
        self._view, self._octets, self._device, self._bring = view, octets, device, bring
        self._note, self._answer, self._queue = note, answer, queue
        self._untold = False
        self._told = b""
        self._tasks: Sequence[Task] = ()

    def start(self) -> None:
        self._octets.fill(0)
        self._untold = True
        self._note.start()
        self._queue.append(self)
        self._steps = self._run()

    def _run(self) -> Iterator[None]:
        while not self._note.done():
            yield
        self._untold = False
        for task in self._bringing():
            task.start()
            while not task.done():
                yield
        while self._queue[0] is not self:
            yield
        self._answer.start()
        self._queue.popleft()
        while not self._answer.done():
            yield

    def _bringing(self) -> Sequence[Task]:
        """What the note asks for; from the same place as before these are the same tasks."""
        told = self._octets.tobytes()
        if told != self._told:
            handle, start, nbytes = _NOTE.unpack(told)
            if nbytes != self._view.nbytes:
                raise TransportError(f"{self._view.nbytes} bytes were agreed, but: {nbytes} came")
            source = self._device.mapped(handle, start, self._view.size, self._view.dtype)
            self._tasks, self._told = self._bring(source), told
        return self._tasks

    def cancel(self) -> None:
        """Take back the latest start, which nothing will match any more."""
        if self._untold:
            self._note.cancel()
            self._untold = False
        if self in self._queue:
            self._queue.remove(self)
