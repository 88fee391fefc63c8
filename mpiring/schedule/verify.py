"""Proof of a collective over all its ranks, before it runs.

All ranks' schedules are executed symbolically at once. The value of an element
is *which ranks' contributions are in it and of which logical element*, kept for
runs of equal elements rather than one by one, so the proof of a gigabyte takes
no longer than that of a kilobyte.

Proved:

* every send meets its receive, of the same length, and none is left over;
* no deadlock, with sends that are never buffered: a message moves only when
  both sides have posted it;
* no op of a round touches what another op of the same round writes;
* INPUT is never written; nothing is read before it was written;
* every element ends with each contribution exactly once (and scaled once, for a
  mean), where the collective promises it.

The walk is a fixed point: post what can be posted, move what is matched, repeat.
A set of ranks that no longer moves and is not finished is a deadlock, whatever
the timing, since no step can take another's possibility away.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mpiring.errors import ScheduleError
from mpiring.schedule.chunks import Range
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
    reads,
    writes,
)


class Value(NamedTuple):
    """What a run of elements holds: element ``i`` belongs to logical element ``i + shift``."""

    shift: int
    ranks: int  # a bit for each contribution
    scaled: bool = False


class Run(NamedTuple):
    start: int
    stop: int
    value: Value


class Memory:
    """One rank's buffers as sorted runs of equal values."""

    def __init__(self) -> None:
        self._runs: dict[Buffer, list[Run]] = defaultdict(list)

    def write(self, span: Span, runs: Iterable[Run]) -> None:
        """Replace ``span`` by runs given relative to its start."""
        held = self._runs[span.buffer]
        first, last = self._touched(span)
        kept = held[first:last]
        new = [
            Run(run.start + span.start, run.stop + span.start, _moved(run.value, -span.start))
            for run in runs
        ]
        if kept and kept[0].start < span.start:
            new.insert(0, kept[0]._replace(stop=span.start))
        if kept and kept[-1].stop > span.stop:
            new.append(kept[-1]._replace(start=span.stop))
        held[first:last] = new

    def read(self, span: Span) -> list[Run]:
        """The runs of ``span``, relative to its start; all of it must have been written."""
        first, last = self._touched(span)
        found = [
            Run(
                max(run.start, span.start) - span.start,
                min(run.stop, span.stop) - span.start,
                _moved(run.value, span.start),
            )
            for run in self._runs[span.buffer][first:last]
        ]
        at = 0
        for run in found:
            if run.start != at:
                break
            at = run.stop
        if at != span.count:
            raise ScheduleError(f"{span} is read at {span.start + at} before it was written")
        return found

    def _touched(self, span: Span) -> tuple[int, int]:
        """Which runs overlap ``span``, as a slice of those of its buffer."""
        held = self._runs[span.buffer]
        first = bisect_right(held, (span.start,)) - 1
        if first < 0 or held[first].stop <= span.start:
            first += 1
        return first, bisect_left(held, (span.stop,), lo=first)


def _moved(value: Value, by: int) -> Value:
    return value._replace(shift=value.shift + by)


def prove(
    schedules: Sequence[Schedule],
    initial: Callable[[int], Iterable[tuple[Span, Value]]],
    final: Callable[[int], Iterable[tuple[Span, Value]]],
) -> None:
    """Raise ScheduleError unless the schedules, run together, turn initial into final.

    Both functions name, for a rank, spans and the value that their elements have.
    """
    memories = []
    for schedule in schedules:
        _check_rounds(schedule)
        memory = Memory()
        for span, value in initial(schedule.rank):
            memory.write(span, [Run(0, span.count, _moved(value, span.start))])
        memories.append(memory)
    _walk(schedules, memories)
    for schedule in schedules:
        for span, value in final(schedule.rank):
            wanted = _moved(value, span.start)
            for run in memories[schedule.rank].read(span):
                if run.value != wanted:
                    raise ScheduleError(
                        f"rank {schedule.rank} ends with {_tell(run.value, len(schedules))} in "
                        f"{span}[{run.start}:{run.stop}], not {_tell(wanted, len(schedules))}"
                    )


def prove_collective(
    collective: str,
    schedules: Sequence[Schedule],
    chunks: Sequence[Range],
    *,
    in_place: bool,
    mean: bool = False,
    root: int = 0,
) -> None:
    """Prove an ``allreduce``, ``reduce_scatter``, ``allgather`` or ``bcast`` of these chunks."""
    size, count = len(schedules), chunks[-1][1]
    whole = Span(Buffer.DATA, 0, count)
    everyone = Value(0, (1 << size) - 1, mean)

    def own(rank: int) -> Span:
        return Span(Buffer.DATA, *chunks[rank])

    def first(rank: int) -> Span:
        return Span(Buffer.DATA, 0, own(rank).count)

    def contribution(rank: int) -> Iterable[tuple[Span, Value]]:
        if collective == "bcast":
            return [(whole, Value(0, 1))] if rank == root else []
        if collective == "allgather":
            owner = Value(0, 1 << rank)
            if in_place:
                return [(own(rank), owner)]
            return [(first(rank)._replace(buffer=Buffer.INPUT), _moved(owner, own(rank).start))]
        source = Buffer.DATA if in_place else Buffer.INPUT
        return [(whole._replace(buffer=source), Value(0, 1 << rank))]

    def promise(rank: int) -> Iterable[tuple[Span, Value]]:
        if collective == "bcast":
            return [(whole, Value(0, 1))]
        if collective == "allgather":
            return [(own(peer), Value(0, 1 << peer)) for peer in range(size)]
        if collective == "reduce_scatter":
            return [(first(rank), _moved(everyone, own(rank).start))]
        return [(whole, everyone)]

    prove(schedules, contribution, promise)


def elements_sent(collective: str, rank: int, chunks: Sequence[Range]) -> int:
    """What a ring sends, exactly: (n-1)/n of the array where n divides it.

    Reduce-scatter sends every chunk but its own; all-gather every chunk but its
    right neighbour's; all-reduce both.
    """
    counts = [stop - start for start, stop in chunks]
    scattered = sum(counts) - counts[rank]
    gathered = sum(counts) - counts[(rank + 1) % len(counts)]
    return {
        "reduce_scatter": scattered,
        "allgather": gathered,
        "allreduce": scattered + gathered,
    }[collective]


def _check_rounds(schedule: Schedule) -> None:
    for number, ops in enumerate(schedule.rounds):
        for i, op in enumerate(ops):
            _check_op(schedule, number, op)
            for other in ops[i + 1 :]:
                clash = _clash(op, other) or _clash(other, op)
                if clash:
                    raise ScheduleError(
                        f"rank {schedule.rank}, round {number}: {op} and {other} "
                        f"may overlap, and both touch {clash}"
                    )


def _check_op(schedule: Schedule, number: int, op: Op) -> None:
    where = f"rank {schedule.rank}, round {number}: {op}"
    if any(span.buffer is Buffer.INPUT for span in writes(op)):
        raise ScheduleError(f"{where} writes the caller's input")
    if isinstance(op, Reduce | Copy) or (isinstance(op, RecvReduce) and op.src is not None):
        assert op.src is not None
        if op.src.count != op.dst.count:
            raise ScheduleError(f"{where}: source and target differ in length")
        if op.src.overlaps(op.dst):
            raise ScheduleError(f"{where}: source and target overlap")
    if isinstance(op, Send | Recv | RecvReduce) and (
        op.peer == schedule.rank or not 0 <= op.peer < schedule.size
    ):
        raise ScheduleError(f"{where}: no such peer")


def _clash(writer: Op, other: Op) -> Span | None:
    for written in writes(writer):
        for touched in (*reads(other), *writes(other)):
            if written.overlaps(touched):
                return written
    return None


def _walk(schedules: Sequence[Schedule], memories: Sequence[Memory]) -> None:
    """Run all ranks until none moves; messages move only when both sides are posted."""
    channels: dict[tuple[int, int], tuple[deque[Span], deque[Recv | RecvReduce]]] = defaultdict(
        lambda: (deque(), deque())
    )
    at = [0] * len(schedules)
    open_messages = [0] * len(schedules)
    ready = deque(range(len(schedules)))

    def post(rank: int, ops: Round) -> list[tuple[int, int]]:
        """Do the local ops, queue the messages; returns the channels these are on."""
        memory = memories[rank]
        touched = []
        for op in ops:
            match op:
                case Send(peer, src):
                    channels[rank, peer][0].append(src)
                    open_messages[rank] += 1
                    touched.append((rank, peer))
                case Recv(peer) | RecvReduce(peer):
                    channels[peer, rank][1].append(op)
                    open_messages[rank] += 1
                    touched.append((peer, rank))
                case Copy(src, dst):
                    memory.write(dst, memory.read(src))
                case Reduce(src, dst, scaled):
                    both = _reduced(memory.read(src), memory.read(dst), op)
                    memory.write(dst, _scaled(both, op) if scaled else both)
                case Scale(dst):
                    memory.write(dst, _scaled(memory.read(dst), op))
        return touched

    while ready:
        rank = ready.popleft()
        rounds = schedules[rank].rounds
        if open_messages[rank] or at[rank] == len(rounds):
            continue
        at[rank] += 1
        for sender, receiver in post(rank, rounds[at[rank] - 1]):
            sends, receives = channels[sender, receiver]
            while sends and receives:
                src, recv = sends.popleft(), receives.popleft()
                if src.count != recv.dst.count:
                    raise ScheduleError(
                        f"rank {sender} sends {src} where rank {receiver} receives {recv.dst}"
                    )
                _receive(memories[receiver], recv, memories[sender].read(src))
                for end in (sender, receiver):
                    open_messages[end] -= 1
                    ready.append(end)
        ready.append(rank)

    stuck = [r for r, schedule in enumerate(schedules) if at[r] < len(schedule.rounds)]
    unmatched = [
        f"{len(sides[which])} {what} {s}->{d}"
        for (s, d), sides in channels.items()
        for which, what in enumerate(("sends", "receives"))
        if sides[which]
    ]
    if stuck or unmatched:
        raise ScheduleError(
            f"deadlock: ranks {stuck} never finish; without a partner: {', '.join(unmatched)}"
        )


def _receive(memory: Memory, recv: Recv | RecvReduce, came: list[Run]) -> None:
    if isinstance(recv, RecvReduce):
        # It may have waited for the sender; nothing else of its round has touched the span.
        came = _reduced(came, memory.read(recv.src or recv.dst), recv)
        if recv.scaled:
            came = _scaled(came, recv)
    memory.write(recv.dst, came)


def _reduced(left: list[Run], right: list[Run], op: Op) -> list[Run]:
    """Runs of both operands, cut at each other's ends, with their contributions joined."""
    cuts = sorted({end for run in (*left, *right) for end in run[:2]})
    result = []
    for start, stop in itertools.pairwise(cuts):
        a, b = (
            next(r.value for r in runs if r.start <= start and stop <= r.stop)
            for runs in (left, right)
        )
        if a.shift != b.shift:
            raise ScheduleError(f"{op} joins elements {a.shift - b.shift} apart")
        if a.ranks & b.ranks:
            raise ScheduleError(f"{op} adds a contribution twice")
        if a.scaled != b.scaled:
            raise ScheduleError(f"{op} joins a scaled and an unscaled part")
        result.append(Run(start, stop, a._replace(ranks=a.ranks | b.ranks)))
    return result


def _scaled(runs: list[Run], op: Op) -> list[Run]:
    if any(run.value.scaled for run in runs):
        raise ScheduleError(f"{op} scales twice")
    return [run._replace(value=run.value._replace(scaled=True)) for run in runs]


def _tell(value: Value, size: int) -> str:
    ranks = [rank for rank in range(size) if value.ranks >> rank & 1]
    return f"ranks {ranks} of elements shifted by {value.shift}{', scaled' * value.scaled}"
