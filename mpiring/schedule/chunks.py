"""How an array is cut: a *chunk* for each rank, *segments* inside a chunk.

Both are element ranges ``(start, stop)``. A chunk is what one rank owns after a
reduce-scatter; a segment is what travels at once, so that the reduction of one
overlaps the transfer of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

Range = tuple[int, int]


def split(start: int, stop: int, parts: int) -> tuple[Range, ...]:
    """Cut a range into ``parts`` whose sizes differ by at most one, larger ones first."""
    size, larger = divmod(stop - start, parts)
    bounds = [start + i * size + min(i, larger) for i in range(parts + 1)]
    return tuple(pairwise(bounds))


def consecutive(counts: Sequence[int]) -> tuple[Range, ...]:
    """Ranges of the given sizes, one after the other from 0."""
    bounds = list(accumulate(counts, initial=0))
    return tuple(pairwise(bounds))


def largest(chunks: Sequence[Range]) -> int:
    """Elements in the largest chunk."""
    return max((stop - start for start, stop in chunks), default=0)


def segments_per_chunk(chunks: Sequence[Range], segment: int | None) -> int:
    """Into how many segments each chunk is cut so that none is longer than ``segment``.

    The same for all chunks and all ranks: both sides of a message must agree.
    """
    return max(1, -(-largest(chunks) // segment)) if segment else 1
