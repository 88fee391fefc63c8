"""A receive and the reduction of what it brought, as one: a rewrite of any schedule.

Where the receiver reads the sender's memory by itself, it need not have read all of it
before it begins to add, and need not keep what it has added: there is less to wait for,
and what is added is still in the cache.

A receive is fused with a reduction of a later round that joins just what it brought with
something else: *from* the receive's span, where that is SCRATCH, or *into* it. The reduction
moves to the receive's round, so there must be nothing in between that it would overtake:
nothing that touches the span it writes, or the span that the receive wrote, and nothing
that writes what it reads. So every op still sees the same values; the messages are the
same, so ranks need not agree on what each has fused.
"""

from __future__ import annotations

from collections import defaultdict, deque

from mpiring.schedule.ops import (
    Buffer,
    Op,
    Recv,
    RecvReduce,
    Reduce,
    Round,
    Schedule,
    Span,
    reads,
    writes,
)


def fused(schedule: Schedule) -> Schedule:
    """``schedule`` with receives that reduce; for transports that can."""
    rounds = [list(ops) for ops in schedule.rounds]
    waiting = _reductions(rounds)
    for number, ops in enumerate(rounds):
        for position, op in enumerate(ops):
            if isinstance(op, Recv):
                later = _reduction(rounds, number, op, waiting)
                if later is not None:
                    at, reduce = later
                    ops[position] = _joined(op, reduce)
                    rounds[at].remove(reduce)
    kept: list[Round] = [tuple(ops) for ops in rounds]
    return Schedule.of(schedule.rank, schedule.size, schedule.count, kept)


def _joined(recv: Recv, reduce: Reduce) -> RecvReduce:
    own = reduce.src if reduce.dst == recv.dst else None
    return RecvReduce(recv.peer, reduce.dst, reduce.scaled, own)


def _reductions(rounds: list[list[Op]]) -> dict[Span, deque[tuple[int, Reduce]]]:
    """By the span that a receive may have filled: the reductions that join it with something
    else, and their rounds. (One of SCRATCH may be lost by that: nobody else wants it.)"""
    found: dict[Span, deque[tuple[int, Reduce]]] = defaultdict(deque)
    for number, ops in enumerate(rounds):
        for op in ops:
            if isinstance(op, Reduce):
                found[op.dst].append((number, op))
                if op.src.buffer is Buffer.SCRATCH:
                    found[op.src].append((number, op))
    return found


def _reduction(
    rounds: list[list[Op]],
    number: int,
    recv: Recv,
    waiting: dict[Span, deque[tuple[int, Reduce]]],
) -> tuple[int, Reduce] | None:
    """The reduction to fuse with a receive of round ``number``, and its round."""
    queue = waiting.get(recv.dst)
    while queue and queue[0][0] <= number:
        queue.popleft()
    if not queue:
        return None
    at, reduce = queue[0]
    between = [other for ops in rounds[number : at + 1] for other in ops]
    overtaken = [other for other in between if other is not reduce and other is not recv]
    clash = any(
        _touches(other, recv.dst) or _touches(other, reduce.dst) or _writes(other, reduce.src)
        for other in overtaken
    )
    return None if clash else (at, reduce)


def _touches(op: Op, span: Span) -> bool:
    return any(span.overlaps(each) for each in (*reads(op), *writes(op)))


def _writes(op: Op, span: Span) -> bool:
    return any(span.overlaps(each) for each in writes(op))
