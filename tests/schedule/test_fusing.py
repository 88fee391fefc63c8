"""Receives that reduce: proved, and with less to do."""

from __future__ import annotations

import itertools

import pytest

from mpiring.errors import ScheduleError
from mpiring.schedule import fusing
from mpiring.schedule.catalog import Mean, Plan, diverted, schedule
from mpiring.schedule.chunks import split
from mpiring.schedule.fusing import fused
from mpiring.schedule.ops import Buffer, Copy, Op, Recv, RecvReduce, Reduce, Schedule, Send, Span
from mpiring.schedule.staging import NO_DETOUR, Detour, staged
from mpiring.schedule.verify import prove_collective

#: As on the peer path: the caller's memory cannot be read by others, or can.
DETOURS = [
    Detour(Buffer.SCRATCH, frozenset({Buffer.DATA, Buffer.INPUT}), frozenset()),
    Detour(Buffer.SCRATCH, frozenset(), frozenset()),
]


def ops(each: Schedule, kind: type) -> list[Op]:
    return [op for op in itertools.chain.from_iterable(each.rounds) if isinstance(op, kind)]


@pytest.mark.parametrize("collective", ["allreduce", "reduce_scatter", "allgather", "doubling"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_collective(collective: str, size: int) -> None:
    """Any mixture of ranks that fuse and ranks that do not."""
    name = "allreduce" if collective == "doubling" else collective
    algorithm = "doubling" if collective == "doubling" else "ring"
    for count, in_place, segment in itertools.product((1, 19), (True, False), (2, 5, 64)):
        means = [None] if name == "allgather" else [None, Mean(False)]
        for mean, detour in itertools.product(means, DETOURS):
            plan = Plan(name, algorithm, split(0, count, size), in_place, segment, mean)
            for mixture in (lambda rank: True, lambda rank: rank % 2 == 0):
                schedules = [
                    diverted(plan, rank, detour, fuse=mixture(rank)) for rank in range(size)
                ]
                prove_collective(
                    name, schedules, plan.chunks, in_place=in_place, mean=mean is not None
                )


@pytest.mark.parametrize("pieces", [1, 4])
def test_an_all_reduce_in_place_copies_nothing_and_needs_no_memory(pieces: int) -> None:
    size, count = 4, 64
    plan = Plan("allreduce", "ring", split(0, count, size), True, count // size // pieces)
    own = diverted(plan, 0, DETOURS[1], fuse=True)
    assert not ops(own, Reduce) and not ops(own, Copy)
    assert (own.scratch, own.staging) == (0, 0)
    assert len(ops(own, RecvReduce)) == len(ops(own, Recv)) == (size - 1) * pieces
    assert len(own.rounds) == 2 * (size - 1) * pieces
    assert own.sent == schedule(plan, 0).sent


S, D = (lambda a, b, buffer=buffer: Span(buffer, a, b) for buffer in (Buffer.SCRATCH, Buffer.DATA))


@pytest.mark.parametrize(
    "rounds",
    [
        [(Recv(1, S(0, 2)),), (Reduce(S(0, 1), D(0, 1)),)],  # a part of what came
        [(Recv(1, S(0, 2)),), (Reduce(S(0, 2), D(0, 2)), Send(1, S(0, 2)))],  # used twice
        [(Recv(1, S(0, 2)),), (Copy(S(0, 2), D(0, 2)),)],
        [(Recv(1, S(0, 2)), Send(1, D(1, 3))), (Reduce(S(0, 2), D(0, 2)),)],  # still being sent
        [(Recv(1, S(0, 2)),), (Copy(D(4, 6), D(0, 2)),), (Reduce(S(0, 2), D(0, 2)),)],
        [(Recv(1, D(0, 2)),), (Reduce(D(0, 2), D(4, 6)),)],  # the caller wants it
        [(Recv(1, S(0, 2)),)],
    ],
)
def test_what_would_change_the_result_is_left_alone(rounds: list[tuple[Op, ...]]) -> None:
    own = Schedule.of(0, 2, 6, rounds)
    assert fused(own) == own


def test_a_contribution_that_is_added_twice_is_found() -> None:
    plan = Plan("allreduce", "ring", split(0, 12, 3), True)
    schedules = [fused(schedule(plan, rank)) for rank in range(3)]
    rounds = list(schedules[1].rounds)
    (recv,) = [op for op in rounds[0] if isinstance(op, RecvReduce)]
    rounds[0] = tuple(op for op in rounds[0] if op is not recv)
    rounds.insert(0, (Recv(recv.peer, recv.dst),))
    schedules[1] = Schedule.of(1, 3, 12, rounds)
    with pytest.raises(ScheduleError):
        prove_collective("allreduce", schedules, plan.chunks, in_place=True)


def test_the_work_grows_with_the_segments_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def counted(op: Op, span: Span) -> bool:
        nonlocal looks
        looks += 1
        return touches(op, span)

    touches = fusing._touches
    monkeypatch.setattr(fusing, "_touches", counted)
    found = []
    for segments in (64, 256):
        looks = 0
        plan = Plan("allreduce", "ring", split(0, 2 * segments, 2), True)
        fused(staged(schedule(plan, 0), 1, NO_DETOUR))
        found.append(looks)
    assert found[0] > 64 and found[1] < 5 * found[0]
