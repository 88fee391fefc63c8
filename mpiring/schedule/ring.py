"""Ring collectives: each rank sends to its right neighbour, receives from its left.

The array is cut into one chunk per rank. *Reduce-scatter*: a chunk travels once
around, every rank adding its part, and ends complete at its owner: n-1 steps.
*All-gather*: complete chunks travel once around: n-1 steps. *All-reduce* is one
after the other, so a rank sends 2(n-1)/n of the array, whatever n: the least
that any algorithm can (Patarasu and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009).

Every chunk is reduced once, in one order, then copied: all ranks hold the same
bits.

Segments make it a pipeline. Each chunk is cut into m segments, numbered through
all steps by t = step * m + segment. What is sent at t is what was received at
t - m. With m >= 2 a round holds the transfer t beside the reduction of t - 1:
the reduction is over in time, since t - m < t - 1 + 1. With m = 1 it is not, and
the reduction has a round of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mpiring.schedule.chunks import Range, largest, segments_per_chunk, split
from mpiring.schedule.ops import Buffer, Copy, Op, Recv, Reduce, Round, Send, Span

Chunks = Sequence[Range]


class Transfer(NamedTuple):
    """One message each way, and what to do afterwards, one op after the other."""

    send: Send
    recv: Recv
    then: tuple[Reduce | Copy, ...] = ()


def all_reduce(
    rank: int, chunks: Chunks, *, in_place: bool, segment: int | None = None, scaled: bool = False
) -> Iterator[Round]:
    """Sum (or another reduction) of all ranks' arrays, everywhere.

    ``scaled`` multiplies each chunk, once it is complete, by the bound factor.
    """
    m = segments_per_chunk(chunks, segment)
    if len(chunks) == 1:
        yield from _alone(chunks, in_place)
        return
    scatter = _scatter_in_place if in_place else _scatter_into_data
    transfers = [
        *scatter(rank, chunks, m, scaled),
        *_gather(rank, chunks, m, Buffer.DATA, chunks[rank][0]),
    ]
    yield from _pipeline(transfers, m)


def reduce_scatter(
    rank: int, chunks: Chunks, *, in_place: bool, segment: int | None = None, scaled: bool = False
) -> Iterator[Round]:
    """Chunk ``rank`` of the reduction of all ranks' arrays, at the start of DATA.

    In place, the whole of DATA is the contribution and is overwritten.
    """
    m = segments_per_chunk(chunks, segment)
    if len(chunks) == 1:
        yield from _alone(chunks, in_place)
        return
    if not in_place:
        yield from _pipeline(_scatter_into_scratch(rank, chunks, m, scaled), m)
        return
    transfers = _scatter_in_place(rank, chunks, m, scaled)
    if _front_is_free(rank, chunks):
        yield from _pipeline([_to_front(transfer, chunks[rank]) for transfer in transfers], m)
    else:
        yield from _pipeline(transfers, m)
        yield from _move_to_front(*chunks[rank])


def all_gather(
    rank: int, chunks: Chunks, *, in_place: bool, segment: int | None = None
) -> Iterator[Round]:
    """Every rank's chunk, everywhere. INPUT holds one chunk, DATA all of them."""
    m = segments_per_chunk(chunks, segment)
    start, stop = chunks[rank]
    own = Span(Buffer.DATA, start, stop)
    copy = () if in_place else (Copy(Span(Buffer.INPUT, 0, stop - start), own),)
    if in_place:
        rounds = _pipeline(_gather(rank, chunks, m, Buffer.DATA, start), m)
    else:
        rounds = _pipeline(_gather(rank, chunks, m, Buffer.INPUT, 0), m)
    # The caller's own chunk is copied while the first message travels.
    yield (*next(rounds, ()), *copy)
    yield from rounds


def broadcast(
    rank: int, size: int, count: int, *, root: int, segment: int | None = None
) -> Iterator[Round]:
    """DATA of ``root``, everywhere: down the ring as a chain, segment after segment.

    Takes m + n - 2 rounds of one segment each, so with many segments the time of
    sending the array once.
    """
    distance = (rank - root) % size
    left, right = (rank - 1) % size, (rank + 1) % size
    spans = [Span(Buffer.DATA, *r) for r in split(0, count, _pieces(count, segment))]
    receives = [Recv(left, span) for span in spans] if distance else []
    sends = [Send(right, span) for span in spans] if distance < size - 1 else []
    if distance == 0:
        yield from ((send,) for send in sends)
        return
    for i in range(len(spans) + 1):
        yield (*receives[i : i + 1], *(sends[i - 1 : i] if i else ()))


def _pieces(count: int, segment: int | None) -> int:
    return segments_per_chunk([(0, count)], segment)


def _pipeline(transfers: Sequence[Transfer], m: int) -> Iterator[Round]:
    """A transfer to a round, what follows on it in the rounds after: alone where m = 1."""
    later: deque[list[Op]] = deque()
    for send, recv, then in transfers:
        yield (send, recv, *(later.popleft() if later else ()))
        if m == 1:
            yield from ((op,) for op in then)
            continue
        for delay, op in enumerate(then):
            if delay == len(later):
                later.append([])
            later[delay].append(op)
    yield from map(tuple, later)


def _steps(
    rank: int, chunks: Chunks, m: int, first: int
) -> Iterator[tuple[int, int, Range, Range]]:
    """(step, t, sent range, received range), the first chunk sent being ``first``."""
    size = len(chunks)
    for step in range(size - 1):
        sent = split(*chunks[(first - step) % size], m)
        received = split(*chunks[(first - step - 1) % size], m)
        for j in range(m):
            yield step, step * m + j, sent[j], received[j]


def _scatter_in_place(rank: int, chunks: Chunks, m: int, scaled: bool) -> list[Transfer]:
    """Contributions and partial sums both live in DATA; what arrives lands in SCRATCH."""
    size = len(chunks)
    slot = -(-largest(chunks) // m)
    transfers = []
    for step, t, sent, received in _steps(rank, chunks, m, rank - 1):
        landing = _slot(t % 2, slot, received)
        own = Span(Buffer.DATA, *received)
        transfers.append(
            Transfer(
                Send((rank + 1) % size, Span(Buffer.DATA, *sent)),
                Recv((rank - 1) % size, landing),
                (Reduce(landing, own, scaled and step == size - 2),),
            )
        )
    return transfers


def _scatter_into_data(rank: int, chunks: Chunks, m: int, scaled: bool) -> list[Transfer]:
    """Partial sums land in DATA, where the all-gather will want them: no scratch at all."""
    size = len(chunks)
    transfers = []
    for step, _, sent, received in _steps(rank, chunks, m, rank - 1):
        landing = Span(Buffer.DATA, *received)
        source = Buffer.DATA if step else Buffer.INPUT
        transfers.append(
            Transfer(
                Send((rank + 1) % size, Span(source, *sent)),
                Recv((rank - 1) % size, landing),
                (Reduce(Span(Buffer.INPUT, *received), landing, scaled and step == size - 2),),
            )
        )
    return transfers


def _scatter_into_scratch(rank: int, chunks: Chunks, m: int, scaled: bool) -> list[Transfer]:
    """DATA has room for the own chunk only, so partial sums on their way live in SCRATCH.

    The segment received at t is sent at t + m, while t + m + 1 must not land on
    it yet: m + 1 slots, used in turn.
    """
    size = len(chunks)
    slot = -(-largest(chunks) // m)
    landings: list[Span] = []
    transfers = []
    for step, t, sent, received in _steps(rank, chunks, m, rank - 1):
        last = step == size - 2
        if last:
            start = chunks[rank][0]
            landing = Span(Buffer.DATA, received[0] - start, received[1] - start)
        else:
            landing = _slot(t % (m + 1), slot, received)
        source = landings[t - m] if step else Span(Buffer.INPUT, *sent)
        landings.append(landing)
        transfers.append(
            Transfer(
                Send((rank + 1) % size, source),
                Recv((rank - 1) % size, landing),
                (Reduce(Span(Buffer.INPUT, *received), landing, scaled and last),),
            )
        )
    return transfers


def _gather(rank: int, chunks: Chunks, m: int, source: Buffer, offset: int) -> list[Transfer]:
    """The own chunk is sent from ``source``, where it starts at ``offset``."""
    size = len(chunks)
    shift = offset - chunks[rank][0]
    transfers = []
    for step, _, sent, received in _steps(rank, chunks, m, rank):
        src = Span(Buffer.DATA, *sent) if step else Span(source, sent[0] + shift, sent[1] + shift)
        transfers.append(
            Transfer(
                Send((rank + 1) % size, src),
                Recv((rank - 1) % size, Span(Buffer.DATA, *received)),
            )
        )
    return transfers


def _slot(index: int, size: int, received: Range) -> Span:
    start = index * size
    return Span(Buffer.SCRATCH, start, start + received[1] - received[0])


def _alone(chunks: Chunks, in_place: bool) -> Iterator[Round]:
    if not in_place:
        yield (Copy(Span(Buffer.INPUT, *chunks[0]), Span(Buffer.DATA, *chunks[0])),)


def _front_is_free(rank: int, chunks: Chunks) -> bool:
    """Whether segments of the own chunk may go to the start of DATA while the last step goes on.

    What is there must have left: all but the chunk sent in the last step has. Of that one,
    segments leave two rounds before those of the own chunk come, which is enough if it is
    no shorter.
    """
    (start, stop), (sent, end) = chunks[rank], chunks[(rank + 1) % len(chunks)]
    count = stop - start
    return count <= start and (sent >= count or (sent == 0 and end >= count))


def _to_front(transfer: Transfer, own: Range) -> Transfer:
    """With a copy to the start of DATA, from the cache, if what comes completes the own chunk."""
    start, stop = own
    done = transfer.then[-1].dst
    if not start <= done.start <= done.stop <= stop:
        return transfer
    front = Span(Buffer.DATA, done.start - start, done.stop - start)
    return transfer._replace(then=(*transfer.then, Copy(done, front)))


def _move_to_front(start: int, stop: int) -> Iterator[Round]:
    """Copy DATA[start:stop] to DATA[0:]: in pieces where source and target overlap."""
    for at in range(start, stop, start) if start else ():
        end = min(at + start, stop)
        yield (Copy(Span(Buffer.DATA, at, end), Span(Buffer.DATA, at - start, end - start)),)
