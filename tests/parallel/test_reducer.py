"""Buckets and the reducer, on virtual ranks."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from mpiring.communicator import Communicator
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import ArgumentError, MismatchError
from mpiring.parallel.buckets import layout
from mpiring.parallel.reducer import Reducer
from mpiring.simulation.world import VirtualTransport, World


def views(sizes: list[int], dtype: str = "f4") -> tuple[np.ndarray, list[np.ndarray]]:
    flat = np.zeros(sum(sizes), dtype)
    ends = np.cumsum(sizes)
    return flat, [flat[end - size : end] for end, size in zip(ends, sizes)]


def members(buckets) -> list[tuple[int, ...]]:
    return [bucket.members for bucket in buckets]


def test_the_first_bucket_is_small_and_the_others_fill_up() -> None:
    flat, gradients = views([2, 2, 2, 2, 3, 9, 1])
    buckets = layout(gradients, bucket_bytes=20, first_bucket_bytes=12)
    assert members(buckets) == [(0,), (1, 2), (3, 4), (5,), (6,)]
    assert all(np.shares_memory(bucket.gradient, flat) for bucket in buckets)
    assert sum(bucket.gradient.size for bucket in buckets) == flat.size


def test_a_bucket_never_mixes_dtypes_nor_jumps_in_memory() -> None:
    _, singles = views([3, 3])
    _, doubles = views([3, 3], "f8")
    elsewhere = np.zeros(3, "f4")
    order = [singles[0], singles[1], doubles[0], doubles[1], elsewhere]
    assert members(layout(order)) == [(0, 1), (2, 3), (4,)]
    assert members(layout(order[::-1])) == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), (-5, 1)])
def test_limits_below_a_byte_are_refused(limits: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="bucket_bytes"):
        layout([np.zeros(3)], *limits)


def test_one_byte_buckets_hold_one_gradient_each() -> None:
    _, gradients = views([5, 1, 3])
    assert members(layout(gradients, 1, 1)) == [(0,), (1,), (2,)]


def summed(
    transport: VirtualTransport, engine: ProgressEngine, *, overlap: bool, shuffle: bool
) -> np.ndarray:
    """Two steps over odd-sized gradients; in the second, some ranks are ready in other orders."""
    comm = Communicator(transport, engine=engine)
    flat, gradients = views([7, 1, 300, 2, 64])
    parameters = [SimpleNamespace(gradient=gradient) for gradient in gradients]
    reducer = Reducer(comm, parameters, bucket_bytes=256, first_bucket_bytes=16, overlap=overlap)
    for step in range(2):
        flat[:] = np.arange(flat.size) * (transport.rank + 1) + step
        order = list(parameters)
        if shuffle:
            random.Random(transport.rank).shuffle(order)
        with reducer.no_sync():
            for parameter in order:
                reducer.ready(parameter)
        for parameter in order:
            reducer.ready(parameter)
        reducer.finish()
    return flat


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_sum_over_ranks_whatever_the_order(size: int, overlap: bool, shuffle: bool) -> None:
    for seed in range(4):
        results = World(size, seed).run(lambda t, e: summed(t, e, overlap=overlap, shuffle=shuffle))
        expected = np.arange(374) * size * (size + 1) / 2 + size
        for result in results:
            np.testing.assert_array_equal(result, expected)


def test_layouts_that_differ_are_one_error_on_every_rank() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> str:
        comm = Communicator(transport, engine=engine)
        _, gradients = views([4, 4 + (transport.rank == 2)])
        with pytest.raises(MismatchError) as caught:
            Reducer(comm, [SimpleNamespace(gradient=g) for g in gradients])
        return str(caught.value)

    messages = World(3).run(program)
    assert len(set(messages)) == 1
    assert "rank 2: 9 x float32" in messages[0]


def test_misuse_is_named() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        _, gradients = views([4, 4])
        first, second = (SimpleNamespace(gradient=g) for g in gradients)
        reducer = Reducer(comm, [first, second])
        reducer.ready(first)
        with pytest.raises(ArgumentError, match="twice"):
            reducer.ready(first)
        with pytest.raises(ArgumentError, match=r"gradients \[1\] of 2 never became ready"):
            reducer.finish()
        with pytest.raises(ArgumentError, match="not one of"):
            reducer.ready(SimpleNamespace(gradient=gradients[0]))
        with pytest.raises(ArgumentError, match="middle of a step"), reducer.no_sync():
            pass
        reducer.ready(second)
        reducer.finish()

    World(1).run(program)
