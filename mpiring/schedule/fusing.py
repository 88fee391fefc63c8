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
    for number, ops in enumerate(rounds):
        for position, op in enumerate(ops):
            if isinstance(op, Recv):
                later = _reduction(rounds, number, op)
                if later is not None:
                    at, reduce = later
                    ops[position] = _joined(op, reduce)
                    rounds[at].remove(reduce)
    kept: list[Round] = [tuple(ops) for ops in rounds]
    return Schedule.of(schedule.rank, schedule.size, schedule.count, kept)


def _joined(recv: Recv, reduce: Reduce) -> RecvReduce:
    own = reduce.src if reduce.dst == recv.dst else None
    return RecvReduce(recv.peer, reduce.dst, reduce.scaled, own)


def _reduction(rounds: list[list[Op]], number: int, recv: Recv) -> tuple[int, Reduce] | None:
    """The reduction to fuse with a receive of round ``number``, and its round."""
    for at in range(number + 1, len(rounds)):
        using = [op for op in rounds[at] if _touches(op, recv.dst)]
        if not using:
            continue
        (op, *others) = using
        if others or not isinstance(op, Reduce) or not _joins(op, recv.dst):
            return None
        between = (other for ops in rounds[number : at + 1] for other in ops)
        overtaken = (other for other in between if other is not op and other is not recv)
        clash = any(_touches(other, op.dst) or _writes(other, op.src) for other in overtaken)
        return None if clash else (at, op)
    return None


def _joins(reduce: Reduce, came: Span) -> bool:
    """Whether it joins just what came with something else, and nobody misses the rest."""
    return reduce.dst == came or (reduce.src == came and came.buffer is Buffer.SCRATCH)


def _touches(op: Op, span: Span) -> bool:
    return any(span.overlaps(each) for each in (*reads(op), *writes(op)))


def _writes(op: Op, span: Span) -> bool:
    return any(span.overlaps(each) for each in writes(op))
