"""One schedule bound to arrays: everything made once, so that a start makes nothing.

Binding turns each round into two tuples of ready-made calls: those that start
its ops, and those that tell whether they are over. Receives are started before
sends, sends before local work, so that the network is busy while the processor
adds. A round starts when the host has *observed* the end of all ops of the
round before: the only rule of order there is, for MPI and for GPU streams alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mpiring.device.base import Device, Reduction
from mpiring.schedule.ops import (
    Buffer,
    Copy,
    Op,
    Recv,
    RecvReduce,
    Reduce,
    Round,
    Scale,
    Schedule,
    Send,
    Span,
)
from mpiring.task import Completion, Task
from mpiring.transport.base import Transport


@dataclass(frozen=True, slots=True)
class Binding:
    """What a schedule leaves open."""

    buffers: dict[Buffer, Any]  #: one-dimensional arrays
    device: Device
    transport: Transport
    slot: int
    reduction: Reduction | None = None
    factor: float = 1.0
    persistent: bool = False

    @property
    def callers(self) -> list[Any]:
        """The arrays that are not the library's own."""
        return [self.buffers[each] for each in (Buffer.DATA, Buffer.INPUT) if each in self.buffers]

    def view(self, span: Span) -> Any:
        return self.buffers[span.buffer][span.start : span.stop]

    def tasks(self, op: Op) -> list[Task]:
        """The tasks of one op; those of a device run in the order in which they are started."""
        match op:
            case Send(peer, src):
                return [
                    self.transport.send(self.view(src), peer, self.slot, persistent=self.persistent)
                ]
            case Recv(peer, dst):
                return [
                    self.transport.recv(self.view(dst), peer, self.slot, persistent=self.persistent)
                ]
            case RecvReduce(peer, dst):
                # Only for transports that let the receiver work on what the sender has.
                return [
                    self.transport.recv(  # type: ignore[call-arg]
                        self.view(dst),
                        peer,
                        self.slot,
                        persistent=self.persistent,
                        combine=lambda source, start: self._combined(op, source, start),
                    )
                ]
            case Reduce(src, dst, scaled):
                assert self.reduction is not None
                factor = self.factor if scaled else None
                return self.device.reduced(self.view(src), self.view(dst), self.reduction, factor)
            case Copy(src, dst):
                return [self.device.copy(self.view(src), self.view(dst))]
            case Scale(dst):
                return [self.device.scale(self.view(dst), self.factor)]

    def _combined(self, op: RecvReduce, source: Any, start: int) -> list[Task]:
        """What joins the sender's elements from ``start`` on, ``source``, with this rank's."""
        assert self.reduction is not None
        own = None if op.src is None else self.view(op.src)[start:]
        factor = self.factor if op.scaled else None
        return self.device.combine(source, own, self.view(op.dst)[start:], self.reduction, factor)


Call = Callable[[], Any]


class Execution:
    """A bound schedule on its way. ``advance`` moves it; nobody else does."""

    def __init__(
        self,
        schedule: Schedule,
        binding: Binding,
        *,
        before: Sequence[Task] = (),
        after: Sequence[Task] = (),
        label: str = "",
        once: bool = False,
        keep: object = None,
    ) -> None:
        """``before`` and ``after`` are local tasks around the schedule: packing and unpacking.

        ``once``: it is never started again, and lets go of all memory at its end, and of
        ``keep``, what is to stay alive until then.
        """
        rounds = [
            list(before),
            *([t for op in _ordered(ops) for t in binding.tasks(op)] for ops in schedule.rounds),
            list(after),
        ]
        # Whatever is in flight is kept alive from here, however the caller drops its arrays.
        self._tasks = _joined(rounds)
        self._rounds = [_calls(tasks) for tasks in self._tasks]
        self.binding = binding
        self.schedule = schedule
        self.label = label
        self._once, self._keep = once, keep
        self.finished = True
        self.error: BaseException | None = None
        self.nbytes_sent = schedule.sent * binding.buffers[Buffer.DATA].dtype.itemsize
        self._next = 0
        self._pending: list[Callable[[], bool]] = []

    def start(self, gates: Iterable[Completion] = ()) -> None:
        """Begin; the first round waits for ``gates``."""
        self.finished = False
        self._next = 0
        self._pending = [gate.done for gate in gates] if gates else []

    def advance(self) -> bool:
        """Move as far as possible without waiting; whether anything moved.

        Raises what a transport or a gate raises; the execution is over then.
        """
        pending = self._pending
        moved = False
        while True:
            while pending:
                if not pending[-1]():
                    return moved
                pending.pop()
                moved = True
            if self._next == len(self._rounds):
                self.finished = True
                if self._once:
                    self._let_go()
                return True
            starts, dones = self._rounds[self._next]
            self._next += 1
            for start in starts:
                start()
            self._pending = pending = list(dones)

    def _let_go(self) -> None:
        """Whoever still holds this asks only how it ended."""
        self._tasks, self._rounds, self._pending, self._keep = [], [], [], None
        self.binding.buffers.clear()

    def cancel(self) -> None:
        """Take back the receives that are open, so that nothing is written any more."""
        if self._next:
            waits = _waits(self._tasks[self._next - 1])
            for task in waits[: len(self._pending)]:
                cancel = getattr(task, "cancel", None)
                if cancel is not None:
                    cancel()

    def tell(self) -> str:
        """Where it stands, for somebody who wonders why it does not end."""
        total = len(self._rounds)
        return (
            f"{self.label or 'collective'} (slot {self.binding.slot}, round {self._next}/{total})"
        )


def _ordered(ops: Round) -> list[Op]:
    rank = {Recv: 0, RecvReduce: 0, Send: 1}
    return sorted(ops, key=lambda op: rank.get(type(op), 2))


def _joined(rounds: Iterable[list[Task]]) -> list[list[Task]]:
    """Rounds to wait for: one that is over as soon as it is started opens the next."""
    joined: list[list[Task]] = []
    opening: list[Task] = []
    for tasks in rounds:
        opening = opening + tasks
        if not all(task.immediate for task in opening):
            joined.append(opening)
            opening = []
    return [*joined, opening] if opening else joined


def _calls(tasks: Sequence[Task]) -> tuple[tuple[Call, ...], tuple[Callable[[], bool], ...]]:
    return tuple(task.start for task in tasks), tuple(task.done for task in _waits(tasks))


def _waits(tasks: Sequence[Task]) -> list[Task]:
    # Reversed, as ``advance`` asks from the end: what was started first is asked first.
    return [task for task in reversed(tasks) if not task.immediate]
