"""Where servers live, which keys they hold, and what that costs.

A *key* is a piece of a bucket. Every bucket that is large enough is cut into as many equal
pieces as there are servers (or a multiple), so that a bucket travels over all servers' links
at once, and each server's link carries the same: with every rank a server this is the ring's
traffic. Pieces are then dealt out by bytes, not by count, the largest first, each to the server
with the least so far.

Bound: the busiest server holds less than the least busy one plus the largest piece. For when
the busiest was given its last piece it was the least busy, and loads only grow.

All functions are pure and depend on nothing but their arguments, so every rank computes the
same answer by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from mpiring.errors import ArgumentError

#: Pieces start at multiples of this many bytes: whole elements of every dtype, whole cache lines.
ALIGNMENT = 64


class Roles(NamedTuple):
    """Which ranks compute gradients and which hold parameters; with co-location some do both."""

    workers: tuple[int, ...]
    servers: tuple[int, ...]


class Key(NamedTuple):
    """The bytes ``start <= i < stop`` of a bucket, held by server number ``server``."""

    bucket: int
    start: int
    stop: int
    server: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class Traffic(NamedTuple):
    """Bytes of parameters and gradients over one rank's link in a step; what stays there is free.

    A step: every worker pushes every key once, and is answered once.
    """

    push_in: int
    push_out: int
    pull_in: int
    pull_out: int

    @property
    def into(self) -> int:
        return self.push_in + self.pull_in

    @property
    def out(self) -> int:
        return self.push_out + self.pull_out


def roles(ranks: int, servers: int | str) -> Roles:
    """Share ``ranks`` ranks between workers and servers.

    ``servers`` is a number K: the last K ranks serve and do nothing else (rank 0 stays a worker);
    ``"colocated"``: every rank is worker and server; ``"colocated:K"``: every rank is a worker, the
    first K are servers too. Digits in a string count as a number, as they come from a command
    line. Raises ArgumentError where no worker or no server would be left.
    """
    everyone = tuple(range(ranks))
    text = str(servers).strip()
    kind, colon, count = text.partition(":")
    if kind == "colocated" and not colon:
        return Roles(everyone, everyone)
    number = count if kind == "colocated" else text
    if not number.isdecimal() or int(number) < 1:
        raise ArgumentError(
            f"servers is {servers!r}; allowed are a number of ranks >= 1, 'colocated' "
            f"and 'colocated:K'"
        )
    k = int(number)
    if kind == "colocated":
        if k > ranks:
            raise ArgumentError(f"servers is {servers!r}, but there are only {ranks} ranks")
        return Roles(everyone, everyone[:k])
    if k >= ranks:
        raise ArgumentError(
            f"servers is {k}, which leaves no worker among {ranks} rank{'s' * (ranks != 1)}: "
            f"start more ranks, or use servers='colocated'"
        )
    return Roles(everyone[: ranks - k], everyone[ranks - k :])


def placement(
    sizes: Sequence[int], servers: int, *, smallest: int = 64 << 10, largest: int = 4 << 20
) -> tuple[Key, ...]:
    """Cut buckets of ``sizes`` bytes into keys and deal these out to ``servers`` servers.

    No bucket is cut into pieces of less than ``smallest`` bytes, where the latency of a message
    outweighs its bytes, and no piece has more than ``largest`` (both up to ``ALIGNMENT``): several
    keys on a server let one be updated while the next is under way. Keys come in the order of
    buckets, then of bytes; a key is known by its place in this order. A server may get nothing.
    """
    if servers < 1:
        raise ArgumentError(f"servers is {servers}; needed is at least 1")
    if not 1 <= smallest <= largest:
        raise ArgumentError(
            f"smallest is {smallest} and largest {largest}; 1 <= smallest <= largest"
        )
    for bucket, size in enumerate(sizes):
        if size < 1:
            raise ArgumentError(f"bucket {bucket} has {size} bytes; needed is at least 1")

    pieces = [
        (bucket, start, stop)
        for bucket, size in enumerate(sizes)
        for start, stop in _cut(size, _pieces(size, servers, smallest, largest))
    ]
    load = [0] * servers
    owner = {}
    # Sorting is stable and ties go to the lowest number: the same on every rank.
    for piece in sorted(pieces, key=lambda piece: piece[1] - piece[2]):
        owner[piece] = min(range(servers), key=load.__getitem__)
        load[owner[piece]] += piece[2] - piece[1]
    return tuple(Key(*piece, owner[piece]) for piece in pieces)


def _pieces(size: int, servers: int, smallest: int, largest: int) -> int:
    if size < servers * smallest:
        return max(1, size // smallest)
    return servers * -(-size // (servers * largest))


def _cut(size: int, pieces: int) -> list[tuple[int, int]]:
    """``pieces`` ranges, equal up to ``ALIGNMENT`` bytes; none is empty."""
    blocks = -(-size // ALIGNMENT)
    pieces = min(pieces, blocks)
    edges = [blocks * i // pieces * ALIGNMENT for i in range(pieces)] + [size]
    return list(pairwise(edges))


def shards(keys: Sequence[Key], servers: int) -> tuple[tuple[int, ...], ...]:
    """For each server the keys that it holds, by their place in ``keys``."""
    return tuple(
        tuple(number for number, key in enumerate(keys) if key.server == server)
        for server in range(servers)
    )


def shard_bytes(keys: Sequence[Key], servers: int) -> tuple[int, ...]:
    """Bytes of parameters on each server."""
    return tuple(sum(keys[number].size for number in shard) for shard in shards(keys, servers))


def traffic(roles: Roles, held: Sequence[int]) -> dict[int, Traffic]:
    """Bytes over each rank's link in one step; ``held`` are the bytes of each server's shard.

    Counted message by message: a worker pushes to, and is answered by, every server that is not
    itself. With equal shards, n workers, k servers and S bytes in all this gives the well-known
    figures (Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
    for the arrangement; Patarasuk and Yuan, JPDC 2009, for the ring's 2(n-1)/n S):

    ======================================= ===================================================
    one server that is a worker too         server (n-1)S in and out; another worker S each way
    k servers apart from n workers          a server nS/k in and out; a worker S each way
    every rank is worker and server         2(n-1)/n S each way, as the ring
    ======================================= ===================================================
    """
    if len(held) != len(roles.servers):
        raise ArgumentError(f"held has {len(held)} shards for {len(roles.servers)} servers")
    total = sum(held)
    own = dict(zip(roles.servers, held))
    result = {}
    for rank in sorted({*roles.workers, *roles.servers}):
        shard = own.get(rank, 0)
        serves = shard * sum(worker != rank for worker in roles.workers)
        works = total - shard if rank in roles.workers else 0
        result[rank] = Traffic(push_in=serves, push_out=works, pull_in=works, pull_out=serves)
    return result


def time_bound(links: dict[int, Traffic], bandwidth: float, *, overlap: bool = False) -> float:
    """Seconds that a step's messages take at least, over links of ``bandwidth`` bytes/s each way.

    Links are full duplex. One after the other, pushes and pulls each take as long as the busiest
    link needs; with ``overlap`` (the answer to one key while another is pushed) only the sums
    over both count: half for servers that do nothing else, no gain where every rank serves.
    """
    busiest = links.values()
    if overlap:
        return max(max(link.into, link.out) for link in busiest) / bandwidth
    push = max(max(link.push_in, link.push_out) for link in busiest)
    pull = max(max(link.pull_in, link.pull_out) for link in busiest)
    return (push + pull) / bandwidth
