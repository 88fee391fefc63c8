"""Roles, placement and the formulas for what goes over each link."""

from __future__ import annotations

import random

import pytest

from mpiring.errors import ArgumentError
from mpiring.parallel.placement import (
    ALIGNMENT,
    Roles,
    placement,
    roles,
    shard_bytes,
    shards,
    time_bound,
    traffic,
)


@pytest.mark.parametrize(
    "ranks, servers, workers, serving",
    [
        (1, "colocated", (0,), (0,)),
        (3, "colocated", (0, 1, 2), (0, 1, 2)),
        (3, "colocated:2", (0, 1, 2), (0, 1)),
        (4, 1, (0, 1, 2), (3,)),
        (5, "2", (0, 1, 2), (3, 4)),
        (2, 1, (0,), (1,)),
    ],
)
def test_roles(
    ranks: int, servers: int | str, workers: tuple[int, ...], serving: tuple[int, ...]
) -> None:
    assert roles(ranks, servers) == Roles(workers, serving)


@pytest.mark.parametrize(
    "ranks, servers, complaint",
    [
        (1, 1, "servers is 1, which leaves no worker among 1 rank: .*colocated"),
        (4, 4, "no worker among 4 ranks"),
        (4, 0, "servers is 0; allowed"),
        (4, -1, "servers is -1; allowed"),
        (4, "everywhere", "servers is 'everywhere'; allowed"),
        (4, "colocated:", "servers is 'colocated:'; allowed"),
        (4, "colocated:0", "'colocated:0'; allowed"),
        (4, "colocated:5", "only 4 ranks"),
    ],
)
def test_roles_that_cannot_be(ranks: int, servers: int | str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        roles(ranks, servers)


def test_keys_tile_the_buckets_and_servers_are_balanced() -> None:
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.choice((1, 40, 3000, 70_000, 1 << 20, 5_000_001)) for _ in range(8)]
        servers = rng.randint(1, 9)
        smallest = rng.choice((1, 1000))
        keys = placement(sizes, servers, smallest=smallest, largest=400_000)
        for bucket, size in enumerate(sizes):
            pieces = [key for key in keys if key.bucket == bucket]
            assert [key.start for key in pieces] == [0, *(key.stop for key in pieces[:-1])]
            assert pieces[-1].stop == size
            assert all(key.start % ALIGNMENT == 0 and key.size > 0 for key in pieces)
            assert max(key.size for key in pieces) <= 400_000 + ALIGNMENT
            if len(pieces) > 1:
                assert min(key.size for key in pieces) >= smallest - ALIGNMENT
        held = shard_bytes(keys, servers)
        assert sum(held) == sum(sizes)
        assert max(held) - min(held) <= max(key.size for key in keys)
        assert sorted(number for shard in shards(keys, servers) for number in shard) == list(
            range(len(keys))
        )


def test_bytes_count_and_not_keys() -> None:
    keys = placement([20_000, 20_000, 20_000, 60_000], 2)
    assert shard_bytes(keys, 2) == (60_000, 60_000)
    assert shards(keys, 2) == ((3,), (0, 1, 2))


def test_every_server_has_an_equal_part_of_a_large_bucket() -> None:
    """A bucket uses all servers' links at once, as a ring's chunks do."""
    for servers in range(1, 9):
        keys = placement([25 << 20, 1 << 20], servers)
        for bucket, size in enumerate((25 << 20, 1 << 20)):
            held = shard_bytes([key for key in keys if key.bucket == bucket], servers)
            assert max(held) - min(held) <= len(keys) * ALIGNMENT
            assert sum(held) == size


@pytest.mark.parametrize(
    "sizes, options, complaint",
    [
        ([4, 0], {}, "bucket 1 has 0 bytes"),
        ([4], {"servers": 0}, "servers is 0"),
        ([4], {"smallest": 0}, "smallest is 0"),
        ([4], {"smallest": 9, "largest": 8}, "smallest is 9 and largest 8"),
    ],
)
def test_placement_refuses(sizes: list[int], options: dict[str, int], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        placement(sizes, **{"servers": 2, **options})


S, B = 840_000, 1e6  # bytes; bytes per second. 840 is divisible by 1..8.


@pytest.mark.parametrize("n", range(1, 9))
def test_one_server_that_is_a_worker_too(n: int) -> None:
    links = traffic(roles(n, "colocated:1"), [S])
    assert links[0].into == links[0].out == (n - 1) * S
    for worker in range(1, n):
        assert links[worker].into == links[worker].out == S
    assert time_bound(links, B) == pytest.approx(2 * (n - 1) * S / B)


@pytest.mark.parametrize("n, k", [(1, 1), (4, 1), (4, 2), (3, 6), (8, 8)])
def test_servers_apart_from_workers(n: int, k: int) -> None:
    links = traffic(roles(n + k, k), [S // k] * k)
    for server in range(n, n + k):
        assert links[server].into == links[server].out == n * S // k
    for worker in range(n):
        assert links[worker].into == links[worker].out == S
    assert time_bound(links, B) == pytest.approx(2 * max(S, n * S / k) / B)
    assert time_bound(links, B, overlap=True) == pytest.approx(max(S, n * S / k) / B)


@pytest.mark.parametrize("n", range(1, 9))
def test_every_rank_serves_as_the_ring_does(n: int) -> None:
    links = traffic(roles(n, "colocated"), [S // n] * n)
    for link in links.values():
        assert link.into == link.out == 2 * (n - 1) * S // n
    for overlap in (False, True):
        assert time_bound(links, B, overlap=overlap) == pytest.approx(2 * (n - 1) / n * S / B)


def test_shards_and_servers_must_be_as_many() -> None:
    with pytest.raises(ArgumentError, match="1 shards for 2 servers"):
        traffic(roles(3, "colocated:2"), [S])
