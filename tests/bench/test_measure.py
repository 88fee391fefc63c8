"""What a repetition costs, what is made of the times, and what counts as wrong."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from bench.allreduce import COLLECTIVE
from bench.arrays import HostArrays
from bench.case import Case, Problem, World
from bench.measure import FEWEST, MOST, Clock, next_batch, statistic


class Alone:
    """The communicator of a single rank, without MPI."""

    def __init__(self) -> None:
        self.barriers = 0

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def Barrier(self) -> None:
        self.barriers += 1

    def bcast(self, value: Any) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def test_the_slowest_rank_counts_and_then_the_median() -> None:
    # Each rank's own median is 1, as is the median of all times: only the maximum
    # over ranks, taken for each repetition, is 5 in two of three repetitions.
    times = np.array([[5.0, 1.0, 1.0], [1.0, 5.0, 1.0]])
    result = statistic(times, wrong=3)
    assert (result.median, result.minimum, result.repeats, result.wrong) == (5.0, 1.0, 3, 3)


def test_quartiles() -> None:
    result = statistic(np.array([[1.0, 2.0, 3.0, 4.0, 5.0]]), wrong=0)
    assert (result.lower_quartile, result.median, result.upper_quartile) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("done", "elapsed", "budget", "expected"),
    [
        (0, 0.0, 1.0, FEWEST),  # never less, however short the time
        (0, 0.0, -1.0, FEWEST),
        (FEWEST, 1.0, 0.5, 0),
        (FEWEST, 0.001, 1.0, FEWEST),  # at most as many again
        (100, 1.0, 1.5, 50),
        (100, 1.0, 1.005, 0),
        (MOST - 10, 0.001, 9.0, 10),
        (MOST, 0.001, 9.0, 0),
    ],
)
def test_batches(done: int, elapsed: float, budget: float, expected: int) -> None:
    assert next_batch(done, elapsed, budget) == expected


def test_contenders_take_turns_each_behind_a_barrier_and_verified() -> None:
    log: list[str] = []

    def case(name: str) -> Case:
        return Case(
            run=lambda: log.append(f"run {name}"),
            prepare=lambda: log.append(f"prepare {name}"),
            wrong=lambda: log.append(f"check {name}") or 0,
        )

    comm = Alone()
    result = Clock(comm, {"a": case("a"), "b": case("b")}).run(2, budget=0.0)
    turns = [f"{what} {name}" for name in "abba" for what in ("prepare", "run", "check")]
    assert log == turns
    assert comm.barriers == 4
    assert result["a"].repeats == result["b"].repeats == 2


def test_wrong_elements_add_up_over_repetitions() -> None:
    case = Case(run=lambda: None, wrong=lambda: 2)
    assert Clock(Alone(), {"a": case}).run(3, budget=0.0)["a"].wrong == 6


def test_the_number_of_repetitions_follows_the_budget() -> None:
    case = Case(run=lambda: None, wrong=lambda: 0)
    assert Clock(Alone(), {"a": case}).run(None, budget=0.0)["a"].repeats == FEWEST
    assert Clock(Alone(), {"a": case}).run(None, budget=10.0)["a"].repeats == MOST


def test_garbage_collection_is_off_while_the_clock_runs_and_on_afterwards() -> None:
    seen = []
    case = Case(run=lambda: seen.append(gc.isenabled()), wrong=lambda: 0)
    Clock(Alone(), {"a": case}).run(2, budget=0.0)
    assert seen == [False, False]
    assert gc.isenabled()


def bind(**changes: Any) -> tuple[Any, dict[str, Case]]:
    """The plain all-reduce of one rank, without MPI but for the name of its wait-all."""
    pytest.importorskip("mpi4py.MPI", exc_type=ImportError)
    options = {"count": 10, "dtype": np.dtype("float32"), "op": "sum", "in_place": True}
    problem = Problem(World(Alone(), HostArrays()), **{**options, **changes})
    return problem, COLLECTIVE.cases(problem, ["plain"])


@pytest.mark.parametrize("in_place", [True, False])
def test_one_rank_is_right(in_place: bool) -> None:
    _, cases = bind(in_place=in_place)
    assert Clock(Alone(), cases).run(3, budget=0.0)["plain"].wrong == 0


def test_a_result_of_an_earlier_run_does_not_count() -> None:
    _, cases = bind(in_place=False)
    case = cases["plain"]
    case.run()
    assert case.wrong() == 0
    case.prepare()
    assert case.wrong() == 10
