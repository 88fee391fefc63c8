"""Recursive doubling: all-reduce in log2(n) exchanges of the whole array.

At step k a rank exchanges what it has with the rank that differs in bit k, and
adds. It sends log2(n) times the array, where the ring sends less than twice,
but waits for log2(n) messages, where the ring waits for 2(n-1): the better
choice for short arrays (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005).

Ranks beyond the largest power of two hand their part to a partner first and
receive the result at the end. Both partners of an exchange put the lower rank's
part first: the same bits, also where the order of operands shows in them (the
larger of 0.0 and -0.0, the sign of a NaN).
"""

from __future__ import annotations

from collections.abc import Iterator

from mpiring.schedule.ops import Buffer, Copy, Recv, Reduce, Round, Scale, Send, Span


def all_reduce(
    rank: int, size: int, count: int, *, in_place: bool, scaled: bool = False
) -> Iterator[Round]:
    """Sum (or another reduction) of all ranks' arrays, everywhere."""
    data, scratch = Span(Buffer.DATA, 0, count), Span(Buffer.SCRATCH, 0, count)
    core = 1 << (size.bit_length() - 1)
    extra = size - core
    if not in_place:
        yield (Copy(Span(Buffer.INPUT, 0, count), data),)
    if rank >= core:
        yield (Send(rank - core, data),)
        yield (Recv(rank - core, data),)
        return
    if rank < extra:
        yield (Recv(rank + core, scratch),)
        yield (Reduce(scratch, data),)
    for k in range(core.bit_length() - 1):
        peer = rank ^ (1 << k)
        yield (Send(peer, data), Recv(peer, scratch))
        if peer < rank:
            yield (Reduce(scratch, data),)
        else:
            yield (Reduce(data, scratch),)
            yield (Copy(scratch, data),)
    if scaled:
        yield (Scale(data),)
    if rank < extra:
        yield (Send(rank + core, data),)
