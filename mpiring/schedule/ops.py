"""The language of schedules: what one rank does, round by round, as plain data.

A schedule names no arrays, no dtype and no library. Its spans count elements in
symbolic buffers, which an execution binds to arrays later; so the same schedule
is printed, proved, simulated and run.

Rules that every schedule keeps, and that ``verify`` proves:

* all ops of a round may run at the same time: nothing in a round reads or
  writes what another op of the round writes;
* a round starts when every op of the round before it is over;
* between two ranks messages match in the order in which they are posted;
* nothing depends on a message being buffered.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Buffer(enum.Enum):
    """A symbolic array."""

    INPUT = "in"  #: what the caller contributes; never written
    DATA = "data"  #: the result; holds the contribution too when in place
    SCRATCH = "scratch"  #: working memory beside the data, on the same device
    HOST = "host"  #: pinned host memory, for messages that are staged


class Span(NamedTuple):
    """The elements ``start <= i < stop`` of a buffer."""

    buffer: Buffer
    start: int
    stop: int

    @property
    def count(self) -> int:  # type: ignore[override]
        """Elements; a tuple's own ``count`` has no use here."""
        return self.stop - self.start

    def overlaps(self, other: Span) -> bool:
        return self.buffer is other.buffer and max(self.start, other.start) < min(
            self.stop, other.stop
        )

    def __str__(self) -> str:
        return f"{self.buffer.value}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``src`` to ``peer``."""

    peer: int
    src: Span


@dataclass(frozen=True, slots=True)
class Recv:
    """Receive exactly ``dst.count`` elements from ``peer``."""

    peer: int
    dst: Span


@dataclass(frozen=True, slots=True)
class RecvReduce:
    """A Recv and the Reduce of what it brought, as one: ``dst = what peer sends (op) dst``, or
    with ``src``, ``dst = src (op) what peer sends``.
    """

    peer: int
    dst: Span
    scaled: bool = False
    src: Span | None = None


@dataclass(frozen=True, slots=True)
class Reduce:
    """``dst = src (op) dst``, element by element: MPI's order of operands.

    ``scaled`` multiplies the result by a factor (one over the ranks), bound later.
    """

    src: Span
    dst: Span
    scaled: bool = False


@dataclass(frozen=True, slots=True)
class Copy:
    """``dst = src``."""

    src: Span
    dst: Span


@dataclass(frozen=True, slots=True)
class Scale:
    """``dst = dst * factor``, with the same factor as a scaled Reduce."""

    dst: Span


Op = Send | Recv | RecvReduce | Reduce | Copy | Scale
Round = tuple[Op, ...]


def reads(op: Op) -> tuple[Span, ...]:
    """The spans that an op reads."""
    match op:
        case Send(_, src) | Copy(src, _):
            return (src,)
        case Reduce(src, dst):
            return (src, dst)
        case RecvReduce(_, _, _, src) if src is not None:
            return (src,)
        case Scale(dst) | RecvReduce(_, dst):
            return (dst,)
    return ()


def writes(op: Op) -> tuple[Span, ...]:
    """The spans that an op writes."""
    match op:
        case Recv(_, dst) | RecvReduce(_, dst) | Reduce(_, dst) | Copy(_, dst) | Scale(dst):
            return (dst,)
    return ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """What ``rank`` of ``size`` does: rounds of ops over symbolic buffers.

    ``count`` is the number of elements of the whole array, over all chunks;
    ``scratch`` and ``staging`` how many elements of SCRATCH and HOST it uses; ``sent`` how
    many it sends.
    """

    rank: int
    size: int
    count: int
    rounds: tuple[Round, ...]
    scratch: int
    staging: int
    sent: int

    @classmethod
    def of(cls, rank: int, size: int, count: int, rounds: Iterable[Round]) -> Schedule:
        """Keep what an algorithm yields; ops on no elements and empty rounds are dropped."""
        kept = (tuple(op for op in ops if _moves(op)) for ops in rounds)
        full = tuple(ops for ops in kept if ops)
        sent = sum(op.src.count for ops in full for op in ops if isinstance(op, Send))
        scratch, staging = (_extent(full, each) for each in (Buffer.SCRATCH, Buffer.HOST))
        return cls(rank, size, count, full, scratch, staging, sent)

    def extent(self, buffer: Buffer) -> int:
        """How many elements of ``buffer`` the schedule touches, counted from its start."""
        return _extent(self.rounds, buffer)


def _extent(rounds: Iterable[Round], buffer: Buffer) -> int:
    spans = (span for ops in rounds for op in ops for span in (*reads(op), *writes(op)))
    return max((span.stop for span in spans if span.buffer is buffer), default=0)


def _moves(op: Op) -> bool:
    return any(span.count for span in (*reads(op), *writes(op)))
