"""Messages through pinned host memory, as a rewrite of any schedule.

An MPI that cannot read device memory gets its messages from ``HOST`` slots.
``staged`` turns every ``Send`` into copies to slots and sends from them, every
``Recv`` into receives into slots and copies out of them. What it returns is a
schedule like any other: it is printed, proved and run by the same code, and it
knows neither CUDA nor the algorithm that it rewrites.

Theory
------
1. *Cut.* Every op is cut into segments. A message that is cut becomes several
   messages; both sides hold the same count, so both cut it in the same way.
2. *Steps.* The segments of a round's messages form message steps: step ``t``
   holds segment ``t`` of every message, and the messages of a round that go to
   (or come from) the same peer follow one another, so the order in which the
   messages of a pair match stays that of the original schedule. The message
   steps of a rank keep their order and are never merged.
3. *Place.* Walking through the segments in the original order, each local op
   goes into the earliest round that comes after everything that it conflicts
   with (one of the two writes what the other touches); a message step goes after
   the message step before it too. Nothing else orders the result, so the copy to
   the host of one segment, the message of another, the copy to the device and
   the reduction of further ones share a round: a software pipeline, which flows
   on from one original round into the next where the data allows it.
4. *Slots.* Each message step uses one set of slots, and there are two sets,
   used in turn. A slot is memory like any other to step 3, so it is refilled
   only in a round after the one that emptied it. Two sets are enough for a
   message in every round; the memory does not grow with the count.

Why the result is right: two segments that conflict keep their order, hence every
element sees the same reads and writes as in the original. Why it cannot
deadlock, if the messages of two ranks meet in rounds that correspond (there are
numbers, rising along each rank's rounds, that are equal for the two ends of each
message; this holds for rings, trees and pairwise exchanges): then message steps
are numbered (round, t), rising on each rank, and equal for both ends again.
``verify`` proves each result by itself without this assumption.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest

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

#: Sets of slots: one is in a message while the other is filled or emptied.
SETS = 2


def staged(schedule: Schedule, segment: int) -> Schedule:
    """The same work with every message going through ``HOST`` slots.

    ``segment`` is the largest number of elements that travel at once, the same
    on all ranks (ArgumentError below 1). ``extent(Buffer.HOST)`` of the result is
    at most ``2 * segment`` times the largest number of messages in a round of
    ``schedule``. Messages from and into ``HOST`` itself are cut, not copied.
    """
    if segment < 1:
        raise ArgumentError(f"segment must be at least 1 element, got {segment}")
    groups = list(_segments(schedule, segment))
    place = _Places(groups)
    rounds: dict[int, list[Op]] = {}
    last_message = -1
    for group in groups:
        message = isinstance(group[0], (Send, Recv))
        at = place.earliest(group, after=last_message if message else -1)
        if message:
            last_message = at
        place.put(group, at)
        rounds.setdefault(at, []).extend(group)
    return replace(schedule, rounds=tuple(tuple(rounds[at]) for at in sorted(rounds)))


def _segments(schedule: Schedule, segment: int) -> Iterator[Round]:
    """All segments in an order that is right one by one; a message step stays one group."""
    base = schedule.extent(Buffer.HOST)
    turn = 0
    for ops in schedule.rounds:
        local = [op for op in ops if not isinstance(op, (Send, Recv))]
        for op in local:
            yield from ((part,) for part in _cut(op, segment))
        slot = min(segment, max((_count(op) for op in ops), default=0))
        for step in zip_longest(*_queues(ops, segment)):
            out: list[Op] = []
            message: list[Op] = []
            back: list[Op] = []
            start = base + (turn % SETS) * segment * width
            for op in step:
                ...
