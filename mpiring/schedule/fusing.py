"""A receive and the reduction of what it brought, as one: a rewrite of any schedule.

Where the receiver reads the sender's memory by itself, it need not copy what it reads
before it adds it: one pass less over the data, and no memory for it to land in.

A receive into SCRATCH is fused with the reduction of a later round that takes just that
span, if nothing else happens to the span in between, and nothing from the one round to the
other to what the reduction writes. So every op still sees the same values; the messages are
the same, so ranks need not agree on what each has fused.
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
            if isinstance(op, Recv) and op.dst.buffer is Buffer.SCRATCH:
                later = _reduction(rounds, number, op)
                if later is not None:
                    at, reduce = later
                    ops[position] = RecvReduce(op.peer, reduce.dst, reduce.scaled)
                    rounds[at].remove(reduce)
    kept: list[Round] = [tuple(ops) for ops in rounds]
    return Schedule.of(schedule.rank, schedule.size, schedule.count, kept)


def _reduction(rounds: list[list[Op]], number: int, recv: Recv) -> tuple[int, Reduce] | None:
    """The reduction to fuse with a receive of round ``number``, and its round."""
    for at in range(number + 1, len(rounds)):
        using = [op for op in rounds[at] if _touches(op, recv.dst)]
        if not using:
            continue
        (op, *others) = using
        if others or not isinstance(op, Reduce) or op.src != recv.dst:
            return None
        between = (other for ops in rounds[number : at + 1] for other in ops if other is not op)
        return None if any(_touches(other, op.dst) for other in between) else (at, op)
    return None


def _touches(op: Op, span: Span) -> bool:
    return any(span.overlaps(each) for each in (*reads(op), *writes(op)))
