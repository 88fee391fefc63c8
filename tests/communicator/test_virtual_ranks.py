"""Collectives on virtual ranks: the same results in whatever order messages arrive."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpiring import MEAN, Communicator, Request
from mpiring.device.base import Reduction
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import ArgumentError
from mpiring.simulation.world import VirtualTransport, World


def run(
    size: int,
    seed: int,
    program: Callable[[Communicator], Any],
    slots: int = 1 << 20,
    **options: Any,
) -> list[Any]:
    def rank(transport: VirtualTransport, engine: ProgressEngine) -> Any:
        transport.slots = slots
        with Communicator(transport, engine=engine, **options) as ring:
            return program(ring)

    return World(size, seed).run(rank)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_every_collective_in_every_form(size: int) -> None:
    counts = [(rank * 3 + 1) % 5 for rank in range(size)]
    total = size * (size - 1) / 2

    def program(ring: Communicator) -> None:
        own = counts[ring.rank]
        sent, result = np.full(7, float(ring.rank)), np.empty(7)
        ring.Allreduce(sent, result)
        assert (result == total).all()
        requests = [
            ring.Iallreduce("in place", sent, "max"),
            ring.Iallgather(np.full(2, ring.rank), gathered := np.empty(2 * size, int)),
            ring.Ireduce_scatter_block(np.arange(3.0 * size), block := np.empty(3)),
            ring.Ireduce_scatter(np.ones(sum(counts)), part := np.empty(own), counts),
            ring.Iallgatherv(
                np.full(own, ring.rank), [parts := np.empty(sum(counts), int), counts]
            ),
            ring.Ibcast(data := np.full(6, ring.rank), size - 1),
        ]
        bound = ring.Allreduce_init(np.full(5, 2.0 * ring.rank), mean := np.empty(5), MEAN)
        for _ in range(2):
            mean.fill(-1)
            bound.Start().Wait()
            np.testing.assert_allclose(mean, size - 1)
        Request.Waitall(requests)
        assert (sent == size - 1).all() and (data == size - 1).all()
        assert gathered.tolist() == [rank for rank in range(size) for _ in range(2)]
        assert block.tolist() == [(3 * ring.rank + i) * size for i in range(3)]
        assert (part == size).all()
        assert parts.tolist() == np.repeat(np.arange(size), counts).tolist()

    for seed in range(6):
        run(size, seed, program, algorithm=("auto", "ring", "doubling")[seed % 3], segment=8)


@pytest.mark.filterwarnings("ignore:Communicator.Free")
def test_dropped_handles_and_arrays() -> None:
    """The world reads and writes at the last moment: freed memory would hold something else."""

    def program(ring: Communicator) -> None:
        kept = []
        for turn in range(5):
            data = np.full(40, float(turn))
            kept.append(data)
            ring.Iallreduce(data.copy(), np.empty(40))
            ring.Iallreduce("in place", data)
            gc.collect()
            np.full(40, -1.0)
        ring.Free()
        for turn, data in enumerate(kept):
            assert (data == turn * ring.size).all()

    for seed in range(6):
        run(3, seed, program, algorithm="ring", segment=16)


def test_tags_that_come_again() -> None:
    def program(ring: Communicator) -> None:
        datas = [np.full(count % 5 + 1, float(ring.rank)) for count in range(30)]
        requests = [ring.Iallreduce("in place", data) for data in datas]
        for request in requests[:: (-1) ** ring.rank]:
            request.Wait()
        for data in datas:
            assert (data == sum(range(ring.size))).all()

    for seed in range(6):
        run(3, seed, program, slots=16)


def test_the_same_memory_again_and_again() -> None:
    """Blocking calls keep what they bound for an address, whatever array is there now."""

    def program(ring: Communicator) -> None:
        data = np.empty(6)
        for turn in range(8):
            view = (data, data[:3], data[3:], data.view("i8"))[turn % 4]
            view[:] = turn
            ring.Allreduce("in place", view, ("sum", "max")[turn // 4])
            assert (view == turn * (ring.size if turn < 4 else 1)).all()
            own = np.empty(ring.rank + 1)
            whole = ring.size * (ring.size + 1) // 2
            ring.Reduce_scatter(np.full(whole, 1.0 + turn), own)
            assert own.tolist() == [(1 + turn) * ring.size] * (ring.rank + 1)
        assert len(ring._memory._bound) <= 16

    for seed in range(4):
        run(3, seed, program)


def test_what_virtual_ranks_do_not_have() -> None:
    def program(ring: Communicator) -> None:
        assert (ring.Get_rank(), ring.Get_size()) == (ring.rank, ring.size)
        for name in ("comm", "bcast", "Split"):
            with pytest.raises(AttributeError, match=name):
                getattr(ring, name)
        with pytest.raises(AttributeError):
            Communicator(ring)

    run(2, 0, program)


def test_an_error_leaves_the_with_block_at_once() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        with Communicator(transport, engine=engine) as ring:
            if ring.rank:
                raise ZeroDivisionError
            ring.Allreduce("in place", np.ones(3))

    with pytest.raises(ZeroDivisionError):
        World(2).run(program)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"algorithm": "star"}, "algorithm: 'star'"),
        ({"progress": "sometimes"}, "progress: 'sometimes'"),
        ({"segment": 0}, "segment: 0"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        run(2, 0, lambda ring: None, **options)


def test_a_reduction_of_the_callers_may_poll() -> None:
    """As any of its code may: the collective that it is a part of stands still meanwhile."""

    def program(ring: Communicator) -> list[float]:
        def add(src: np.ndarray, dst: np.ndarray) -> None:
            ring.poll()
            np.add(src, dst, out=dst)

        data, other = np.arange(12.0), np.full(3, float(ring.rank))
        requests = [
            ring.Iallreduce("in place", other),
            ring.Iallreduce("in place", data, Reduction("user", add)),
        ]
        Request.Waitall(requests)
        assert (other == 3).all()
        return data.tolist()

    for seed in range(4):
        for path in ("direct", "peer"):
            assert (
                run(3, seed, program, algorithm="ring", segment=8, host_path=path)
                == [[3.0 * i for i in range(12)]] * 3
            )
