"""Contributions must be exact, and every mixture but the right one must show."""

from __future__ import annotations

import numpy as np
import pytest

from bench.options import DTYPES
from bench.values import OPERATIONS, PERIOD, contribution, reduction, repeat

REAL = [name for name in DTYPES if not name.startswith("complex")]


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_reductions_are_exact(dtype: str, op: str, ranks: int) -> None:
    kind = np.dtype(dtype)
    exact = [[int(value) for value in contribution(rank, ranks, kind, op)] for rank in range(ranks)]
    combine = {"sum": sum, "prod": np.prod, "max": max, "min": min}[op]
    expected = [int(combine([row[i] for row in exact])) for i in range(PERIOD)]
    result = reduction(ranks, kind, op)
    assert result.dtype == kind
    assert [int(value) for value in result] == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_zeros_are_never_right(dtype: str, op: str) -> None:
    if not (dtype.startswith("complex") and op in ("max", "min")):
        assert np.all(reduction(8, np.dtype(dtype), op) != 0)


@pytest.mark.parametrize("dtype", REAL)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_differ_at_every_position(dtype: str, ranks: int) -> None:
    all_ranks = np.array(
        [contribution(rank, ranks, np.dtype(dtype), "sum") for rank in range(ranks)]
    )
    assert all(len(set(column)) == ranks for column in all_ranks.T)


@pytest.mark.parametrize("op", ["sum", "prod"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "float16"])
def test_a_missing_or_doubled_contribution_shows(op: str, dtype: str) -> None:
    kind, ranks = np.dtype(dtype), 4
    right = reduction(ranks, kind, op)
    for rank in range(ranks):
        own = contribution(rank, ranks, kind, op)
        others = [contribution(peer, ranks, kind, op) for peer in range(ranks) if peer != rank]
        missing = OPERATIONS[op].reduce(others)
        doubled = OPERATIONS[op](right, own)
        assert np.any(missing != right) and np.any(doubled != right)


@pytest.mark.parametrize("op", ["max", "min"])
def test_every_rank_is_the_extreme_somewhere(op: str) -> None:
    kind, ranks = np.dtype("float32"), 5
    right = reduction(ranks, kind, op)
    for rank in range(ranks):
        others = [contribution(peer, ranks, kind, op) for peer in range(ranks) if peer != rank]
        assert np.any(OPERATIONS[op].reduce(others) != right)


def test_a_chunk_in_another_place_shows() -> None:
    result = repeat(reduction(4, np.dtype("float32"), "sum"), 0, 4096)
    for shift in (1, 2, 512, 1024, 2048):
        assert np.mean(np.roll(result, shift) != result) > 0.9


def test_repeat_continues_where_it_is_told() -> None:
    period = np.arange(5)
    assert repeat(period, 0, 7).tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert repeat(period, 8, 12).tolist() == [3, 4, 0, 1]
    assert repeat(period, 3, 3).tolist() == []
