"""Every algorithm is proved for many ranks, counts and segments; broken ones are refused."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from mpiring.errors import ScheduleError
from mpiring.schedule.catalog import Mean, Plan, schedule
from mpiring.schedule.chunks import consecutive, split
from mpiring.schedule.ops import Buffer, Copy, Recv, Reduce, Schedule, Send, Span
from mpiring.schedule.verify import elements_sent, prove_collective

RANKS = (*range(1, 10), 16)
COUNTS = (0, 1, 2, 7, 1_000_003)
RING = ("allreduce", "reduce_scatter", "allgather")


def prove(plan: Plan) -> list[Schedule]:
    schedules = [schedule(plan, rank) for rank in range(len(plan.chunks))]
    prove_collective(
        plan.collective,
        schedules,
        plan.chunks,
        in_place=plan.in_place,
        mean=plan.mean is not None,
        root=plan.root,
    )
    return schedules


@pytest.mark.parametrize("collective", RING)
@pytest.mark.parametrize("size", RANKS)
def test_ring(collective: str, size: int) -> None:
    for count, in_place, pieces in itertools.product(COUNTS, (True, False), (None, 2, 5)):
        largest = -(-count // size)
        segment = pieces and max(1, -(-largest // pieces))
        chunks = split(0, count, size)
        plan = Plan(collective, "ring", chunks, in_place, segment)
        for each in prove(plan):
            assert each.sent == (elements_sent(collective, each.rank, chunks) if size > 1 else 0)


@pytest.mark.parametrize("collective", RING)
def test_uneven_chunks(collective: str) -> None:
    random_counts = random.Random(1)
    some = [[random_counts.randrange(13) for _ in range(n)] for n in (2, 3, 4, 5, 6) * 8]
    for counts in ((0, 5, 0, 2), (7, 0, 0), (0, 0), (1, 2, 3, 4, 5), (9, 1), (1, 9), *some):
        for in_place, segment in itertools.product((True, False), (None, 1, 2)):
            prove(Plan(collective, "ring", consecutive(counts), in_place, segment))


@pytest.mark.parametrize("size", RANKS)
def test_doubling_and_broadcast(size: int) -> None:
    for count, in_place in itertools.product((0, 1, 7), (True, False)):
        chunks = split(0, count, size)
        prove(Plan("allreduce", "doubling", chunks, in_place))
        prove(Plan("allreduce", "doubling", chunks, in_place, mean=Mean(first=False)))
        for root, segment in itertools.product({0, size // 2, size - 1}, (None, 1, 3)):
            prove(Plan("bcast", "chain", chunks, True, segment, root=root))


@pytest.mark.parametrize("collective", ("allreduce", "reduce_scatter"))
def test_mean_scales_every_element_once(collective: str) -> None:
    for size, segment in itertools.product((2, 3, 4, 8), (None, 1, 2)):
        chunks = split(0, 23, size)
        prove(Plan(collective, "ring", chunks, True, segment, Mean(first=False)))
        prove(Plan(collective, "ring", chunks, False, segment, Mean(first=False)))
        prove(Plan(collective, "ring", chunks, True, segment, Mean(first=True)))


def test_bytes_equal_the_formula_where_ranks_divide_the_count() -> None:
    for size in range(2, 9):
        count = 10 * size
        chunks = split(0, count, size)
        for rank in range(size):
            assert elements_sent("allreduce", rank, chunks) * size == 2 * (size - 1) * count
            assert elements_sent("allgather", rank, chunks) * size == (size - 1) * count


def mutated(plan: Plan, rank: int, number: int, change) -> list[Schedule]:
    """All ranks' schedules with one round of one rank changed."""
    schedules = [schedule(plan, r) for r in range(len(plan.chunks))]
    rounds = list(schedules[rank].rounds)
    rounds[number] = change(rounds[number])
    schedules[rank] = dataclasses.replace(schedules[rank], rounds=tuple(rounds))
    return schedules


PLAN = Plan("allreduce", "ring", split(0, 12, 3), True)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda ops: [op for op in ops if not isinstance(op, Send)], "deadlock|apart"),
        (lambda ops: [op for op in ops if not isinstance(op, Recv)], "deadlock|before it was"),
        (
            lambda ops: [
                dataclasses.replace(op, peer=(op.peer + 1) % 3) if isinstance(op, Send) else op
                for op in ops
            ],
            "no such peer|deadlock",
        ),
        (
            lambda ops: [
                dataclasses.replace(op, src=op.src._replace(stop=op.src.stop - 1))
                if isinstance(op, Send)
                else op
                for op in ops
            ],
            "sends",
        ),
        (
            lambda ops: [
                dataclasses.replace(op, dst=ops[0].src) if isinstance(op, Recv) else op
                for op in ops
            ],
            "may overlap",
        ),
        (lambda ops: [*ops, Copy(Span(Buffer.DATA, 0, 1), Span(Buffer.INPUT, 0, 1))], "input"),
        (
            lambda ops: [*ops, Copy(Span(Buffer.DATA, 0, 1), Span(Buffer.DATA, 0, 1))],
            "overlap",
        ),
    ],
)
def test_broken_first_round_is_refused(change, complaint: str) -> None:
    schedules = mutated(PLAN, 1, 0, lambda ops: tuple(change(list(ops))))
    with pytest.raises(ScheduleError, match=complaint):
        prove_collective("allreduce", schedules, PLAN.chunks, in_place=True)


def test_missing_twice_added_and_misplaced_contributions_are_refused() -> None:
    reduction = 1
    assert isinstance(schedule(PLAN, 0).rounds[reduction][0], Reduce)
    without = mutated(PLAN, 0, reduction, lambda ops: ())
    with pytest.raises(ScheduleError, match="ends with"):
        prove_collective("allreduce", without, PLAN.chunks, in_place=True)
    twice = mutated(PLAN, 0, reduction, lambda ops: ops)
    rounds = list(twice[0].rounds)
    rounds.insert(reduction, rounds[reduction])
    twice[0] = dataclasses.replace(twice[0], rounds=tuple(rounds))
    with pytest.raises(ScheduleError, match="twice"):
        prove_collective("allreduce", twice, PLAN.chunks, in_place=True)
    shifted = mutated(
        PLAN,
        0,
        reduction,
        lambda ops: tuple(
            dataclasses.replace(op, dst=Span(Buffer.DATA, op.dst.start - 1, op.dst.stop - 1))
            for op in ops
        ),
    )
    with pytest.raises(ScheduleError, match="apart"):
        prove_collective("allreduce", shifted, PLAN.chunks, in_place=True)


def test_two_ranks_that_each_send_before_they_receive_deadlock() -> None:
    """MPI would buffer small messages and hide it; the proof does not."""
    data, scratch = Span(Buffer.DATA, 0, 4), Span(Buffer.SCRATCH, 0, 4)
    schedules = [
        Schedule.of(
            rank,
            2,
            4,
            [(Send(1 - rank, data),), (Recv(1 - rank, scratch),), (Reduce(scratch, data),)],
        )
        for rank in range(2)
    ]
    with pytest.raises(ScheduleError, match="deadlock"):
        prove_collective("allreduce", schedules, split(0, 4, 2), in_place=True)
