"""What each rank contributes, so that a wrong result cannot look right.

All values are positive integers that the dtype holds exactly, and so are all
partial results: the order of the additions doesn't matter and the comparison is
for equality. At each position the ranks hold different values (if the dtype has
that many), drawn from strata that rotate from one position to the next: every
rank is the largest somewhere and the smallest somewhere, and a contribution that
is missing, doubled or taken from another position shows. A product has ones and
twos only, no more twos at one position than the dtype can multiply.

The values repeat after ``PERIOD`` elements, a prime: an array shifted by a chunk
or a segment never falls on its own copy. Zero is never a right result, so an
array of zeros is a mark of "not written".
"""

from __future__ import annotations

import numpy as np

from bench.case import Array

#: Operations by name: all that are exact on these values. MPI's name is the same in capitals.
OPERATIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}

PERIOD = 1021


def contribution(rank: int, ranks: int, dtype: np.dtype, op: str) -> Array:
    """The first ``PERIOD`` elements of what ``rank`` of ``ranks`` contributes."""
    draw = np.random.default_rng((PERIOD, rank))
    stratum = (rank + np.arange(PERIOD)) % ranks
    if op == "prod":
        exponents = draw.integers(0, 2, PERIOD) * (stratum < _largest_exponent(dtype))
        return (1 << exponents).astype(dtype)
    # Each of the ranks' summands stays below this, so that their sum is exact too.
    ceiling = max(1, _largest_integer(dtype) // ranks)
    height = ceiling // ranks
    lowest = 1 + (stratum * height if height else stratum * ceiling // ranks)
    return (lowest + draw.integers(0, max(1, height), PERIOD)).astype(dtype)


def reduction(ranks: int, dtype: np.dtype, op: str) -> Array:
    """The first ``PERIOD`` elements of the contributions of all ranks, reduced."""
    result = contribution(0, ranks, dtype, op)
    for rank in range(1, ranks):
        OPERATIONS[op](result, contribution(rank, ranks, dtype, op), out=result)
    return result


def repeat(period: Array, start: int, stop: int) -> Array:
    """The elements ``start <= i < stop`` of an endless repetition of ``period``."""
    return np.resize(np.roll(period, -start), stop - start)


def _largest_integer(dtype: np.dtype) -> int:
    """An integer up to which ``dtype`` holds each one exactly (2**53 is enough for all)."""
    if dtype.kind in "iu":
        return min(int(np.iinfo(dtype).max), 2**53)
    return min(2 ** (np.finfo(dtype).nmant + 1), 2**53)


def _largest_exponent(dtype: np.dtype) -> int:
    """A power of two that ``dtype`` holds, and so a bound on the factors of two in a product."""
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).max).bit_length() - 1
    return int(np.finfo(dtype).maxexp) - 1
