"""Messages by reading each other's memory: ranks of one node.

The receiver does the work. A send tells where its data lies: in memory that another process
can find by a handle. A receive finds it, copies out of it, or adds what is there to what it
has, and answers when it has seen the end of that; then the send is over. MPI carries only
what is told, less than a hundred bytes, and the answer, one byte. A receive that cannot read
what it was told of answers so, and gets it as a message.

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
  their order alone. What is sent after an answer that asks for it keeps that order too.
"""

from __future__ import annotations

import struct
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from mpiring.errors import TransportError, Unread
from mpiring.task import Task
from mpiring.transport.base import Receive, Transport

#: What a send tells: the handle of an allocation, where in it the data begins, and its bytes.
_NOTE = struct.Struct("<64sQQ")

#: Answers: the message has been taken; it is to be sent after all.
_TAKEN, _SEND = 0, 1


class PeerMemory(Protocol):
    """What the device can do with memory of other processes; see ``device.streams.Driver``.

    Tasks on what ``mapped`` returns may raise Unread, from the first of them.
    """

    def export(self, array: Any) -> tuple[bytes, int] | None: ...

    def mapped(self, handle: bytes, start: int, count: int, dtype: Any) -> Any: ...

    def copy(self, src: Any, dst: Any) -> Task: ...

    def scratch(self, count: int, dtype: Any) -> Any: ...


#: ``combine(source, start)``: the tasks that join what the sender has from element ``start`` on,
#: ``source``, with what is in the receive's view, to be started one after the other.
Combine = Callable[[Any, int], Sequence[Task]]


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
        #: Sends that are not over. Whoever waits for a receive may be asked for one meanwhile.
        self._sending: dict[_Send, None] = {}

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        exported = self._device.export(view)
        if exported is None:
            raise TransportError("send: other ranks cannot read this memory")
        note = np.frombuffer(_NOTE.pack(*exported, view.nbytes), np.uint8)
        answer = np.empty(1, np.uint8)
        return _Send(
            self._notes.send(note, peer, slot, persistent=persistent),
            answer,
            self._answers.recv(answer, peer, slot, persistent=persistent),
            lambda: self._sent_after_all(view, peer, slot),
            self._sending,
        )

    def _sent_after_all(self, view: Any, peer: int, slot: int) -> Task:
        """What ``peer`` could not read, as a message: a copy, since MPI may read as we did."""
        readable = self._device.scratch(view.size, view.dtype)
        self._device.copy(view, readable).start()
        return self._notes.send(readable, peer, slot)

    def recv(
        self,
        view: Any,
        peer: int,
        slot: int,
        *,
        persistent: bool = False,
        combine: Combine | None = None,
    ) -> Receive:
        """``combine`` tells what to do with what the sender has; without it that is a copy."""
        note, answer = np.empty(_NOTE.size, np.uint8), np.empty(1, np.uint8)

        def copy(source: Any, start: int) -> Sequence[Task]:
            return [self._device.copy(source, view[start:])]

        return _Recv(
            view,
            note,
            answer,
            self._device,
            combine or copy,
            self._notes.recv(note, peer, slot, persistent=persistent),
            self._answers.send(answer, peer, slot, persistent=persistent),
            lambda landing: self._notes.recv(landing, peer, slot),
            self._open[peer, slot],
            self._sending,
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
    _error: Exception | None = None

    def done(self) -> bool:
        if self._error is not None:  # for whoever asks, also after another has
            raise self._error
        try:
            return next(self._steps, self) is self
        except Exception as error:
            self._error = error
            raise


class _Send(_Steps):
    def __init__(
        self,
        note: Task,
        octet: np.ndarray,
        answer: Receive,
        message: Callable[[], Task],
        sending: dict[_Send, None],
    ) -> None:
        self._note, self._octet, self._answer, self._message = note, octet, answer, message
        self._sending = sending
        self._unanswered = False

    def start(self) -> None:
        self._error, self._unanswered = None, True
        self._sending[self] = None
        self._answer.start()
        self._note.start()
        self._steps = self._run()

    def _run(self) -> Iterator[None]:
        while not self._note.done():
            yield
        while not self._answer.done():
            yield
        self._unanswered = False
        if self._octet[0] == _SEND:
            message = self._message()
            message.start()
            while not message.done():
                yield
        del self._sending[self]

    def cancel(self) -> None:
        """Expect no answer any more."""
        self._sending.pop(self, None)
        if self._unanswered:
            self._answer.cancel()
            self._unanswered = False


class _Recv(_Steps):
    def __init__(
        self,
        view: Any,
        told: np.ndarray,
        octet: np.ndarray,
        device: PeerMemory,
        combine: Combine,
        note: Receive,
        answer: Task,
        message: Callable[[Any], Task],
        queue: deque[_Recv],
        sending: dict[_Send, None],
    ) -> None:
        self._view, self._device, self._combine = view, device, combine
        self._note, self._octets = note, told
        self._answer, self._octet = answer, octet
        self._message, self._queue, self._sending = message, queue, sending
        self._untold = False
        self._told = b""
        self._tasks: Sequence[Task] = ()

    def start(self) -> None:
        self._octets.fill(0)
        self._error, self._untold = None, True
        self._note.start()
        self._queue.append(self)
        self._steps = self._run()

    def done(self) -> bool:
        if super().done():
            return True
        for send in tuple(self._sending):
            with suppress(Exception):  # whose send it is will hear of it
                send.done()
        return False

    def _run(self) -> Iterator[None]:
        while not self._note.done():
            yield
        self._untold = False
        unread: Unread | None = None
        try:
            yield from _one_by_one(self._reading())
        except Unread as error:
            unread = error
        while self._queue[0] is not self:
            yield
        if unread is not None:
            landing = self._device.scratch(self._view.size, self._view.dtype)
            message = self._message(landing)
            message.start()
        self._octet[0] = _TAKEN if unread is None else _SEND
        self._answer.start()
        self._queue.popleft()
        while not self._answer.done():
            yield
        if unread is not None:
            while not message.done():
                yield
            yield from _one_by_one(self._combine(landing[unread.done :], unread.done))

    def _reading(self) -> Sequence[Task]:
        """What the note asks for; from the same place as before these are the same tasks."""
        told = self._octets.tobytes()
        if told != self._told:
            handle, start, nbytes = _NOTE.unpack(told)
            if nbytes != self._view.nbytes:
                raise TransportError(f"{self._view.nbytes} bytes were agreed, but: {nbytes} came")
            source = self._device.mapped(handle, start, self._view.size, self._view.dtype)
            self._tasks, self._told = self._combine(source, 0), told
        return self._tasks

    def cancel(self) -> None:
        """Take back the latest start, which nothing will match any more."""
        if self._untold:
            self._note.cancel()
            self._untold = False
        if self in self._queue:
            self._queue.remove(self)


def _one_by_one(tasks: Sequence[Task]) -> Iterator[None]:
    for task in tasks:
        task.start()
        while not task.done():
            yield
