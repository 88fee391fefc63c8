"""The bus factors against nccl-tests' definitions, written out in numbers."""

from __future__ import annotations

import pytest

from bench import allgather, allreduce, reduce_scatter
from bench.bandwidth import algorithm_bandwidth


@pytest.mark.parametrize(
    ("ranks", "allreduce_factor", "half_factor"),
    [(2, 1.0, 0.5), (3, 4 / 3, 2 / 3), (4, 1.5, 0.75), (8, 1.75, 0.875)],
)
def test_bus_factors(ranks: int, allreduce_factor: float, half_factor: float) -> None:
    assert allreduce.BENCHMARK.bus_factor(ranks) == pytest.approx(allreduce_factor)
    assert reduce_scatter.BENCHMARK.bus_factor(ranks) == pytest.approx(half_factor)
    assert allgather.BENCHMARK.bus_factor(ranks) == pytest.approx(half_factor)


def test_one_rank_has_no_bus() -> None:
    for module in (allreduce, reduce_scatter, allgather):
        assert module.BENCHMARK.bus_factor(1) is None


def test_formulas_are_printed_as_they_are_computed() -> None:
    assert str(allreduce.BENCHMARK.bus_factor) == "2(n-1)/n"
    assert str(allgather.BENCHMARK.bus_factor) == "(n-1)/n"


def test_algorithm_bandwidth() -> None:
    assert algorithm_bandwidth(4_000_000_000, 2.0) == 2e9
