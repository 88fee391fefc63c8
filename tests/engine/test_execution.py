"""Schedules on virtual ranks, with messages in any order that the network allows."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from mpiring.device.base import Reduction
from mpiring.device.host import HostDevice
from mpiring.engine.execution import Binding, Execution
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import StallError, TransportError
from mpiring.schedule.catalog import Plan, schedule
from mpiring.schedule.chunks import split
from mpiring.schedule.ops import Buffer
from mpiring.simulation.world import VirtualTransport, World

SUM = Reduction("sum")


def all_reduce(transport: VirtualTransport, engine: ProgressEngine, plan: Plan, starts: int = 1):
    """Each rank contributes rank + element; returns the results of all starts."""
    count = plan.chunks[-1][1]
    own = schedule(plan, transport.rank)
    contribution = transport.rank + np.arange(count, dtype="f4")
    buffers = {
        Buffer.INPUT: contribution,
        Buffer.DATA: np.full(count, np.nan, "f4"),
        Buffer.SCRATCH: np.full(own.scratch, np.nan, "f4"),
    }
    binding = Binding(buffers, HostDevice(), transport, slot=1, reduction=SUM)
    execution = Execution(own, binding)
    results = []
    for _ in range(starts):
        if plan.in_place:
            buffers[Buffer.DATA][:] = contribution
        engine.start(execution)
        engine.wait(lambda: execution.finished)
        if execution.error:
            raise execution.error
        results.append(buffers[Buffer.DATA].copy())
    return results


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_all_reduce_in_any_order_of_arrival(algorithm: str, size: int) -> None:
    for seed in range(6):
        for count, in_place, segment in ((0, 1, None), (1, 0, 1), (23, 1, 2), (23, 0, None)):
            plan = Plan("allreduce", algorithm, split(0, count, size), bool(in_place), segment)
            results = World(size, seed).run(lambda t, e: all_reduce(t, e, plan, starts=2))
            expected = size * np.arange(count) + size * (size - 1) / 2
            for mine in results:
                for result in mine:
                    np.testing.assert_array_equal(result, expected)


def test_a_rank_that_never_comes_is_a_stall_not_a_hang() -> None:
    plan = Plan("allreduce", "ring", split(0, 8, 3))
    with pytest.raises(StallError, match=r"ranks \[0, 1\] wait"):
        World(3).run(lambda t, e: all_reduce(t, e, plan) if t.rank < 2 else None)


def test_ranks_that_disagree_on_bytes_get_an_error() -> None:
    plans = [Plan("allreduce", "ring", split(0, 8, 2)), Plan("allreduce", "ring", split(0, 4, 2))]
    with pytest.raises(TransportError, match=r"16 bytes were agreed|8 bytes were agreed"):
        World(2).run(lambda t, e: all_reduce(t, e, plans[t.rank]))


def test_an_error_of_one_rank_ends_all() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        if transport.rank == 1:
            raise ZeroDivisionError("at step 3")
        all_reduce(transport, engine, Plan("allreduce", "ring", split(0, 8, 2)))

    with pytest.raises(ZeroDivisionError, match="at step 3"):
        World(2).run(program)


def test_what_runs_once_lets_go_of_its_memory_when_it_is_over() -> None:
    """Collectives that have ended are remembered for a while; their scratch is wanted again."""

    def program(transport: VirtualTransport, engine: ProgressEngine) -> list[bool]:
        own = schedule(Plan("allreduce", "ring", split(0, 8, 2)), transport.rank)
        buffers = {Buffer.DATA: np.ones(8, "f4"), Buffer.SCRATCH: np.empty(own.scratch, "f4")}
        scratch = weakref.ref(buffers[Buffer.SCRATCH])
        binding = Binding(buffers, HostDevice(), transport, slot=1, reduction=SUM)
        execution = Execution(own, binding, once=True)
        engine.start(execution)
        before = scratch() is not None
        engine.wait(lambda: execution.finished)
        return [before, scratch() is not None]

    assert World(2).run(program) == [[True, False]] * 2
