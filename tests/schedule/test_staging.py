"""The staged rewrite is proved like the algorithms that it rewrites, and is a pipeline."""

from __future__ import annotations

import itertools

import pytest

from mpiring.errors import ArgumentError, ScheduleError
from mpiring.schedule import staging
from mpiring.schedule.catalog import Mean, Plan, schedule
from mpiring.schedule.chunks import consecutive, split
from mpiring.schedule.ops import Buffer, Copy, Recv, Reduce, Schedule, Send, Span, writes
from mpiring.schedule.staging import Detour, staged
from mpiring.schedule.verify import Value, prove, prove_collective

RING = ("allreduce", "reduce_scatter", "allgather")


def proved(plan: Plan, segment: int) -> list[Schedule]:
    """All ranks' staged schedules, proved, and their messages checked to be in HOST."""
    schedules = [staged(schedule(plan, rank), segment) for rank in range(len(plan.chunks))]
    prove_collective(
        plan.collective,
        schedules,
        plan.chunks,
        in_place=plan.in_place,
        mean=plan.mean is not None,
        root=plan.root,
    )
    for rank, each in enumerate(schedules):
        original = schedule(plan, rank)
        assert each.sent == original.sent
        for op in itertools.chain.from_iterable(each.rounds):
            if isinstance(op, Send):
                assert op.src.buffer is Buffer.HOST
            if isinstance(op, Recv):
                assert op.dst.buffer is Buffer.HOST
    return schedules


@pytest.mark.parametrize("collective", RING)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
def test_ring(collective: str, size: int) -> None:
    for count, in_place, pieces in itertools.product((0, 1, 19), (True, False), (None, 3)):
        largest = -(-count // size)
        plan = Plan(
            collective,
            "ring",
            split(0, count, size),
            in_place,
            pieces and max(1, -(-largest // pieces)),
        )
        for segment in (1, 2, 64):
            proved(plan, segment)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_other_families(size: int) -> None:
    for count, in_place, segment in itertools.product((0, 1, 7), (True, False), (1, 3, 64)):
        chunks = split(0, count, size)
        proved(Plan("allreduce", "doubling", chunks, in_place), segment)
        for root, pieces in itertools.product({0, size - 1}, (None, 2)):
            proved(Plan("bcast", "chain", chunks, True, pieces, root=root), segment)


#: Which memory can be sent, and received into, as it is: what each rank has to see to by itself.
WAYS = {
    "all through scratch": Detour(Buffer.SCRATCH, frozenset(Buffer), frozenset(Buffer)),
    "the caller's sends": Detour(
        Buffer.SCRATCH, frozenset({Buffer.DATA, Buffer.INPUT}), frozenset()
    ),
    "as it is": Detour(Buffer.SCRATCH, frozenset(), frozenset()),
}


@pytest.mark.parametrize("collective", [*RING, "doubling", "bcast"])
def test_every_rank_has_its_own_way(collective: str) -> None:
    """Messages match whichever of their ends take a detour."""
    algorithm = {"doubling": "doubling", "bcast": "chain"}.get(collective, "ring")
    name = "allreduce" if collective == "doubling" else collective
    ways = itertools.cycle(WAYS.values())
    for size, in_place, segment in itertools.product((2, 3, 4), (True, False), (2, 64)):
        plan = Plan(name, algorithm, split(0, 19, size), in_place or name == "bcast", 5)
        detours = [next(ways) for _ in range(size)]
        schedules = [staged(schedule(plan, rank), segment, detours[rank]) for rank in range(size)]
        prove_collective(name, schedules, plan.chunks, in_place=plan.in_place)
        for each, detour in zip(schedules, detours):
            for op in itertools.chain.from_iterable(each.rounds):
                if isinstance(op, Send) and op.src.buffer is not Buffer.SCRATCH:
                    assert op.src.buffer not in detour.sends
                if isinstance(op, Recv) and op.dst.buffer is not Buffer.SCRATCH:
                    assert op.dst.buffer not in detour.receives


def test_memory_that_can_be_sent_takes_no_slots() -> None:
    plan = Plan("allreduce", "ring", split(0, 64, 4), True, 4)
    plain = schedule(plan, 1)
    as_it_is = staged(plain, 4, WAYS["as it is"])
    assert as_it_is.scratch == plain.scratch
    sends = staged(plain, 4, WAYS["the caller's sends"])
    assert sends.scratch == plain.scratch + 2 * 4  # two slots, in turn


@pytest.mark.parametrize("collective", RING)
def test_uneven_chunks(collective: str) -> None:
    for counts in ((0, 5, 0, 2), (7, 0, 0), (0, 0), (1, 2, 3, 4, 5), (9, 1)):
        for in_place, segment in itertools.product((True, False), (1, 64)):
            proved(Plan(collective, "ring", consecutive(counts), in_place, 2), segment)


@pytest.mark.parametrize("first", [True, False])
def test_a_mean_is_still_scaled_once(first: bool) -> None:
    for size, segment in itertools.product((2, 4), (2, 64)):
        proved(Plan("allreduce", "ring", split(0, 23, size), True, 4, Mean(first)), segment)


def test_host_memory_does_not_grow_with_the_count() -> None:
    sizes = set()
    for count in (1 << 10, 1 << 13):
        plan = Plan("allreduce", "ring", split(0, count, 4), True, count // 64)
        sizes.add(staged(schedule(plan, 0), 16).extent(Buffer.HOST))
    assert sizes == {2 * 2 * 16}  # two sets of: one slot out, one slot in


def test_host_memory_is_no_larger_than_short_messages_need() -> None:
    plan = Plan("allreduce", "ring", split(0, 12, 4), True)
    assert staged(schedule(plan, 0), 1 << 20).extent(Buffer.HOST) == 2 * 2 * 3


def test_every_round_has_a_message_and_all_engines_work_at_once() -> None:
    size, pieces = 4, 8
    plan = Plan("allreduce", "ring", split(0, 64 * size * pieces, size), True, 64)
    (first, *_) = proved(plan, 64)
    talking = [ops for ops in first.rounds if any(isinstance(op, Send) for op in ops)]
    assert len(talking) == 2 * (size - 1) * pieces
    # One round to fill the pipeline, one to drain it: no bubble where a step ends.
    assert len(first.rounds) == len(talking) + 2
    full = [
        ops
        for ops in first.rounds
        if {Send, Recv, Copy, Reduce} <= {type(op) for op in ops}
        and {op.dst.buffer is Buffer.HOST for op in ops if isinstance(op, Copy)} == {True, False}
    ]
    assert len(full) >= (size - 1) * pieces - 3


def test_one_long_message_is_cut_into_a_pipeline() -> None:
    """The algorithm itself need not know of segments."""
    plan = Plan("allgather", "ring", split(0, 200, 2), True)
    assert [len(schedule(plan, r).rounds) for r in range(2)] == [1, 1]
    (first, _) = proved(plan, 10)
    assert len(first.rounds) == 10 + 2


DATA = [Span(Buffer.DATA, at, at + n) for at, n in ((0, 5), (5, 2), (7, 4))]


def test_messages_of_a_pair_keep_their_order_however_rounds_group_them() -> None:
    """One rank sends in one round what the other receives in two, of different lengths."""
    sender = Schedule.of(0, 2, 7, [(Send(1, DATA[0]), Send(1, DATA[1]))])
    receiver = Schedule.of(1, 2, 7, [(Recv(0, DATA[0]),), (Recv(0, DATA[1]),)])
    whole = Span(Buffer.DATA, 0, 7)
    for segment in (1, 2, 3, 5):
        prove(
            [staged(sender, segment), staged(receiver, segment)],
            lambda rank: [(whole, Value(0, 1))] if rank == 0 else [],
            lambda rank: [(whole, Value(0, 1))],
        )


def test_a_schedule_that_is_staged_already_is_left_right() -> None:
    plan = Plan("allreduce", "ring", split(0, 12, 3), True)
    twice = [staged(staged(schedule(plan, rank), 2), 3) for rank in range(3)]
    prove_collective("allreduce", twice, plan.chunks, in_place=True)


def test_the_proof_refuses_rounds_that_no_numbering_fits() -> None:
    """Rank 2 receives at once what others can only send one after the other.

    As whole messages this works. Cut, rank 2 would wait in step 0 for rank 0, which
    waits for rank 1, which waits for rank 2's step 1.
    """
    long, short = Span(Buffer.DATA, 0, 3), Span(Buffer.DATA, 3, 4)
    schedules = [
        Schedule.of(0, 3, 4, [(Recv(1, short),), (Send(2, short),)]),
        Schedule.of(1, 3, 4, [(Send(2, long),), (Send(0, short),)]),
        Schedule.of(2, 3, 4, [(Recv(1, long), Recv(0, short))]),
    ]
    whole = Span(Buffer.DATA, 0, 4)

    def check(each: list[Schedule]) -> None:
        prove(
            each,
            lambda rank: [(whole, Value(0, 2))] if rank == 1 else [],
            lambda rank: [(whole, Value(0, 2))] if rank == 2 else [],
        )

    check(schedules)
    with pytest.raises(ScheduleError, match="deadlock"):
        check([staged(each, 1) for each in schedules])


def test_slots_used_without_regard_to_their_last_use_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof sees a slot that is filled while it is being sent."""
    occupy = staging._Ledger.occupy

    def forgetful(self, ops, at) -> None:
        if not any(span.buffer is Buffer.HOST for op in ops for span in writes(op)):
            occupy(self, ops, at)

    monkeypatch.setattr(staging._Ledger, "occupy", forgetful)
    with pytest.raises(ScheduleError):
        proved(Plan("allgather", "ring", split(0, 40, 2), True), 2)


def test_a_segment_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentError, match="segment: 0"):
        staged(Schedule.of(0, 1, 4, []), 0)
