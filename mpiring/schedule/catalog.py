"""Names to algorithms, and the choice among them.

``schedule`` is the one door: it builds (once, then from a cache) what a rank does
for a collective. ``choose`` picks by bytes and ranks, from numbers that every
rank has, so that all ranks pick the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from mpiring.errors import ArgumentError
from mpiring.schedule import doubling, ring
from mpiring.schedule.chunks import Range
from mpiring.schedule.fusing import fused
from mpiring.schedule.ops import Buffer, Round, Scale, Schedule, Span
from mpiring.schedule.staging import Detour, staged

COLLECTIVES = ("allreduce", "reduce_scatter", "allgather", "bcast")
ALGORITHMS = {
    "allreduce": ("ring", "doubling"),
    "reduce_scatter": ("ring",),
    "allgather": ("ring",),
    "bcast": ("chain",),
}

#: Bytes up to which log2(n) messages of the whole array beat 2(n-1) of its chunks.
DOUBLING_LIMIT = 16 << 10

#: Bytes of a segment: small enough that what has arrived is still in the cache
#: when it is reduced, large enough that a message's fixed cost does not show. Between
#: machines that is more: a round ends with a round trip, in which the link is idle.
SEGMENT, NETWORK_SEGMENT = 1 << 20, 2 << 20

#: Where ranks read each other's memory: bytes of an array from which on they do, and of a
#: segment. Below, a message is there before two small ones that arrange a reading are. What is
#: read is worked on block by block in any case; a segment bounds for how long a poll is away.
READ_FROM, READ_SEGMENT = 4 << 20, 16 << 20


class Mean(NamedTuple):
    """When an average divides: each contribution first, or the complete sum last."""

    first: bool


class Plan(NamedTuple):
    """Everything that decides a schedule, but for the rank."""

    collective: str
    algorithm: str
    chunks: tuple[Range, ...]
    in_place: bool = True
    segment: int | None = None  #: elements
    mean: Mean | None = None
    root: int = 0


def choose(collective: str, size: int, nbytes: int, algorithm: str = "auto") -> str:
    """The algorithm for an array of ``nbytes`` (over all chunks) on ``size`` ranks."""
    known = ALGORITHMS[collective]
    if algorithm == "auto":
        short = collective == "allreduce" and nbytes <= DOUBLING_LIMIT
        return "doubling" if short else known[0]
    # One name for the whole communicator: collectives that have no such family keep their own.
    return algorithm if algorithm in known else known[0]


def check_algorithm(algorithm: str) -> None:
    """Raise ArgumentError unless some collective knows the name."""
    known = sorted({name for names in ALGORITHMS.values() for name in names})
    if algorithm not in ("auto", *known):
        raise ArgumentError(f"algorithm: {algorithm!r} is none of auto, {', '.join(known)}")


@lru_cache(maxsize=512)
def schedule(plan: Plan, rank: int) -> Schedule:
    """What ``rank`` does, empty ops dropped. Proved for all ranks by ``verify``."""
    size, count = len(plan.chunks), plan.chunks[-1][1]
    return Schedule.of(rank, size, count, _rounds(plan, rank, size, count))


@lru_cache(maxsize=512)
def diverted(plan: Plan, rank: int, detour: Detour, *, fuse: bool = False) -> Schedule:
    """The same with messages in segments, and through slots where ``detour`` says so; with
    ``fuse`` what is received is reduced at once."""
    own = schedule(plan, rank)
    cut = staged(own, plan.segment or max(1, own.count), detour)
    return fused(cut) if fuse else cut


def _rounds(plan: Plan, rank: int, size: int, count: int) -> Iterator[Round]:
    scaled = plan.mean is not None
    if plan.mean is not None and plan.mean.first:
        # Only in place: the contribution itself is divided, so that no sum overflows.
        yield (Scale(Span(Buffer.DATA, 0, count)),)
        scaled = False
    if plan.collective == "bcast":
        yield from ring.broadcast(rank, size, count, root=plan.root, segment=plan.segment)
    elif plan.collective == "allgather":
        yield from ring.all_gather(rank, plan.chunks, in_place=plan.in_place, segment=plan.segment)
    elif plan.collective == "reduce_scatter":
        yield from ring.reduce_scatter(
            rank, plan.chunks, in_place=plan.in_place, segment=plan.segment, scaled=scaled
        )
    elif plan.algorithm == "doubling":
        yield from doubling.all_reduce(rank, size, count, in_place=plan.in_place, scaled=scaled)
    else:
        yield from ring.all_reduce(
            rank, plan.chunks, in_place=plan.in_place, segment=plan.segment, scaled=scaled
        )
