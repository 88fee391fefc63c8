"""Messages through memory that can carry them, as a rewrite of any schedule.

An MPI that cannot read device memory gets its messages from slots in pinned host
memory: ``staged`` puts a copy to a slot before every send and a copy from a slot
behind every receive. One that reads device memory, but not the caller's kind of it,
gets them from slots in ``SCRATCH``, and so does another process that reads this
rank's memory by itself. What it returns is a schedule like any other, to be printed,
proved and run; it knows neither CUDA nor the algorithm that it rewrites.

Theory
------
1. *Cut.* Every op is cut into segments of the same length on all ranks. Both ends
   of a message hold the same count, so both cut it into the same messages. Which of
   them go through slots is each rank's own affair.
2. *Message steps.* Step t of a round holds segment t of each of its messages;
   messages of one round with the same peer follow one another, so those of a pair
   still match in the order of the original. A rank's message steps keep their
   order and are never merged.
3. *Place.* In the order of the original, each copy and each piece of local work
   goes into the earliest round behind all that it conflicts with (one of the two
   writes what the other touches); so does a message step, and behind the message
   step before it. Nothing else is ordered. So the copy to a slot of one segment,
   the message of another, the copy from a slot of a third and the reduction of a
   fourth share a round, and the pipeline flows on from one original round into
   the next wherever the data allows it.
4. *Slots.* There are two sets of slots, used by the message steps in turn. A slot
   is memory like any other to rule 3: it is filled again only in a round behind
   the one that emptied it. Two sets suffice for a message in every round, and
   their size does not grow with the count.

Why the result is right: what conflicts keeps its order, so every element sees the
reads and writes of the original. Why it cannot deadlock: let the rounds of the
original have numbers that rise along each rank and are equal at both ends of each
message (the algorithms of this package have: the number of the step). Then
(number, t) rises along each rank's message steps and is equal at both ends again,
so the lowest open step can always be completed. ``verify`` proves each result
without this assumption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, TypeVar

from mpiring.errors import ArgumentError
from mpiring.schedule.ops import (
    Buffer,
    Copy,
    Op,
    Recv,
    Round,
    Schedule,
    Send,
    Span,
    reads,
    writes,
)

AnyOp = TypeVar("AnyOp", bound=Op)

#: One set of slots is in a message while the other is being filled or emptied.
_SETS = 2


@dataclass(frozen=True, slots=True)
class Detour:
    """Which messages go through slots in ``through``: those from and to these buffers."""

    through: Buffer
    sends: frozenset[Buffer]
    receives: frozenset[Buffer]

    def takes(self, op: Send | Recv) -> bool:
        return _span(op).buffer in (self.sends if isinstance(op, Send) else self.receives)


#: All messages through pinned host memory.
THROUGH_HOST = Detour(Buffer.HOST, frozenset(Buffer), frozenset(Buffer))

#: All messages from and to where the data lies.
NO_DETOUR = Detour(Buffer.SCRATCH, frozenset(), frozenset())


def staged(schedule: Schedule, segment: int, detour: Detour = THROUGH_HOST) -> Schedule:
    """``schedule`` with its messages in segments of at most ``segment`` elements, and those that
    take the detour through slots.

    All ranks give the same ``segment`` (ArgumentError below 1). The slots take twice a segment
    for each such message of the round that has the most of them, behind what the schedule
    itself uses of that buffer.
    """
    if segment < 1:
        raise ArgumentError(f"segment: {segment} elements; it takes at least 1")
    steps = list(_steps(schedule, segment, detour))
    ledger = _Ledger(steps)
    rounds: dict[int, list[Op]] = defaultdict(list)
    message_free = 0
    for ops in steps:
        message = isinstance(ops[0], (Send, Recv))
        at = ledger.free(ops)
        if message:
            at = max(at, message_free)
            message_free = at + 1
        ledger.occupy(ops, at)
        rounds[at] += ops
    in_order = (tuple(rounds[at]) for at in range(len(rounds)))
    return Schedule.of(schedule.rank, schedule.size, schedule.count, in_order)


def _steps(schedule: Schedule, segment: int, detour: Detour) -> Iterator[Round]:
    """All segments in an order in which they could run one by one.

    Each local op stands alone; the messages of a message step stand together.
    """
    messages = [[op for op in ops if isinstance(op, (Send, Recv))] for ops in schedule.rounds]
    diverted = [[op for op in ops if detour.takes(op)] for ops in messages]
    slot = min(segment, max((_span(op).count for ops in diverted for op in ops), default=0))
    slots = max(map(len, diverted), default=0)
    base = schedule.extent(detour.through)
    turn = 0
    for ops, talk in zip(schedule.rounds, messages):
        for op in ops:
            if not isinstance(op, (Send, Recv)):
                yield from ((part,) for part in _cut(op, segment))
        for step in zip_longest(*_queues(talk, segment)):
            first = base + turn * slots * slot
            turn = (turn + 1) % _SETS
            fill: list[Op] = []
            move: list[Op] = []
            drain: list[Op] = []
            start = first
            for op in filter(None, step):
                if not detour.takes(op):
                    move.append(op)
                    continue
                through = Span(detour.through, start, start + _span(op).count)
                start += slot
                match op:
                    case Send(peer, src):
                        fill.append(Copy(src, through))
                        move.append(Send(peer, through))
                    case Recv(peer, dst):
                        move.append(Recv(peer, through))
                        drain.append(Copy(through, dst))
            yield from ((op,) for op in fill)
            yield tuple(move)
            yield from ((op,) for op in drain)


def _queues(talk: list[Send | Recv], segment: int) -> list[list[Send | Recv]]:
    """The segments of a round's messages, one queue for each peer and direction."""
    queues: dict[tuple[type, int], list[Send | Recv]] = defaultdict(list)
    for op in talk:
        queues[type(op), op.peer] += _cut(op, segment)
    return list(queues.values())


def _span(op: Send | Recv) -> Span:
    return op.src if isinstance(op, Send) else op.dst


def _cut(op: AnyOp, segment: int) -> list[AnyOp]:
    """The op in pieces; all spans of an op have the same length."""
    spans = {name: getattr(op, name) for name in ("src", "dst") if hasattr(op, name)}

    def piece(at: int) -> dict[str, Any]:
        return {
            name: span._replace(
                start=span.start + at, stop=min(span.start + at + segment, span.stop)
            )
            for name, span in spans.items()
        }

    count = next(iter(spans.values())).count
    return [replace(op, **piece(at)) for at in range(0, count, segment)]


class _Ledger:
    """For each element the first round in which it may be read, and may be written.

    Kept for runs of elements between the ends of all spans that occur, so that
    the cost of an op does not depend on the count.
    """

    def __init__(self, steps: list[Round]) -> None:
        ends: dict[Buffer, set[int]] = defaultdict(set)
        for ops in steps:
            for op in ops:
                for span in (*reads(op), *writes(op)):
                    ends[span.buffer] |= {span.start, span.stop}
        self._ends = {buffer: sorted(found) for buffer, found in ends.items()}
        self._readable = {buffer: [0] * len(found) for buffer, found in ends.items()}
        self._writable = {buffer: [0] * len(found) for buffer, found in ends.items()}

    def free(self, ops: Round) -> int:
        """The first round behind all that ``ops`` conflict with."""
        after = [
            max(free[span.buffer][i] for i in self._runs(span))
            for op in ops
            for free, spans in ((self._readable, reads(op)), (self._writable, writes(op)))
            for span in spans
        ]
        return max(after)

    def occupy(self, ops: Round, at: int) -> None:
        """Note that ``ops`` run in round ``at``."""
        for op in ops:
            for span in reads(op):
                writable = self._writable[span.buffer]
                for i in self._runs(span):
                    writable[i] = max(writable[i], at + 1)
            for span in writes(op):
                for i in self._runs(span):
                    self._readable[span.buffer][i] = self._writable[span.buffer][i] = at + 1

    def _runs(self, span: Span) -> range:
        ends = self._ends[span.buffer]
        return range(bisect_left(ends, span.start), bisect_left(ends, span.stop))
