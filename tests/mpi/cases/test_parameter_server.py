"""The parameter server on real ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiring import Communicator, ParameterServer
from mpiring.errors import ArgumentError
from mpiring.parallel.placement import roles
from mpiring.parallel.protocol import staleness_bound

SIZE = MPI.COMM_WORLD.size
MODES = [("sync", None), ("async", None), ("ssp", 0), ("ssp", 2)]


def places() -> Iterator[int | str]:
    yield from ("colocated", "colocated:1")
    yield from range(1, min(3, SIZE))


class Plain:
    """Learning rate 1."""

    def __init__(self, count: int, dtype: Any) -> None: ...

    def step(self, values: np.ndarray, gradients: np.ndarray) -> None:
        values -= gradients


def parameters(count: int) -> list[np.ndarray]:
    return [np.full(count, 50, "f4"), np.full((3, 5), 50, "f8")]


@pytest.mark.parametrize("servers", list(places()))
@pytest.mark.parametrize(("mode", "staleness"), MODES)
# Short messages; and such that MPI sends only when the receive has been posted.
@pytest.mark.parametrize(("count", "smallest"), [(101, 64), (300_001, 64 << 10)])
def test_every_push_counts_once(
    comm: MPI.Intracomm,
    mode: str,
    staleness: int | None,
    servers: int | str,
    count: int,
    smallest: int,
) -> None:
    """Rate 1, everybody pushes ones: the start minus all steps. Ranks take 0 to 3 of them."""
    mine = parameters(count)
    with ParameterServer(
        comm,
        mine,
        optimizer=Plain,
        mode=mode,
        staleness=staleness,
        servers=servers,
        smallest=smallest,
        largest=128 << 10,
    ) as server:
        for step in range(comm.rank % 4 if server.is_worker else 0):
            # Pushed in another order at each step, from other arrays.
            for number in (step % 2, 1 - step % 2):
                server.push(number, np.ones_like(mine[number]))
            server.step()
    workers = roles(comm.size, servers).workers
    total = sum(worker % 4 for worker in workers)
    if server.is_worker:
        for array in mine:
            np.testing.assert_array_equal(array, 50 - total)


@pytest.mark.parametrize("servers", list(places()))
def test_bytes_are_those_of_the_formula(ring: Communicator, servers: int | str) -> None:
    mine = parameters(100_003)
    with ParameterServer(ring, mine, optimizer=Plain, mode="async", servers=servers) as server:
        for _ in range(3 if server.is_worker else 0):
            for number, array in enumerate(mine):
                server.push(number, array)
            server.step()
    summary = server.summary()
    for rank, link in server.traffic().items():
        assert (summary.bytes_in[rank], summary.bytes_out[rank]) == (3 * link.into, 3 * link.out)
    assert summary.updates_lost == 0
    assert summary.steps == dict.fromkeys(server.workers, 3)
    bound = staleness_bound("async", len(server.workers))
    assert max(summary.staleness) <= bound


@pytest.mark.parametrize("servers", list(places()))
def test_sync_is_the_sum_in_the_order_of_workers(comm: MPI.Intracomm, servers: int | str) -> None:
    def gradient(worker: int, step: int) -> np.ndarray:
        return np.random.default_rng((worker, step)).normal(size=70_001).astype("f4")

    mine = np.zeros(70_001, "f4")
    with ParameterServer(comm, {"all": mine}, optimizer=Plain, servers=servers) as server:
        for step in range(4 if server.is_worker else 0):
            server.push("all", gradient(comm.rank, step))
            server.pull("all")
            server.step()
    expected = np.zeros(70_001, "f4")
    for step in range(4):
        total = gradient(server.workers[0], step)
        for worker in server.workers[1:]:
            total += gradient(worker, step)
        expected -= total
    if server.is_worker:
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.parametrize("servers", list(places()))
@pytest.mark.parametrize(("mode", "staleness"), MODES)
def test_a_worker_that_raises_holds_nobody_up(
    comm: MPI.Intracomm, mode: str, staleness: int | None, servers: int | str
) -> None:
    """Rank 0 gives up in the middle of its second step; what it serves, it serves to the end."""
    mine = parameters(20_000)
    raised = False
    try:
        with ParameterServer(
            comm, mine, optimizer=Plain, mode=mode, staleness=staleness, servers=servers
        ) as server:
            for step in range(3 if server.is_worker else 0):
                server.push(0, np.ones_like(mine[0]))
                if comm.rank == 0 and step == 1:
                    raise ZeroDivisionError
                server.push(1, np.ones_like(mine[1]))
                server.step()
    except ZeroDivisionError:
        raised = True
    assert raised == (comm.rank == 0)
    others = 3 * (len(server.workers) - 1)
    if server.is_worker and comm.rank:
        for array in mine:
            assert set((50 - array).reshape(-1)) <= {others + 1.0, others + 2.0}


@pytest.mark.parametrize("servers", ["colocated", "colocated:1"])
def test_a_replayed_run_has_the_same_bits(
    comm: MPI.Intracomm, tmp_path: Path, servers: str
) -> None:
    log = tmp_path / "log"  # rank 0's folder; the others never look

    def train(**options: Any) -> np.ndarray:
        mine = np.ones(40_000, "f4")
        with ParameterServer(
            comm, [mine], optimizer=Plain, mode="async", servers=servers, **options
        ) as server:
            for step in range(5):
                time.sleep(0.001 * np.random.default_rng().random())
                server.push(0, np.sin(mine * (comm.rank + 1) + step))
                server.step()
        return mine

    first = train(record=log)
    for _ in range(2):
        np.testing.assert_array_equal(train(replay=log), first)
    assert log.exists() == (comm.rank == 0)


def test_served_by_a_thread(comm: MPI.Intracomm) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI was initialised without threads")
    ring = Communicator(comm, progress="thread")
    mine = parameters(50_000)
    with ParameterServer(ring, mine, optimizer=Plain, mode="async") as server:
        for _ in range(10):
            for number, array in enumerate(mine):
                server.push(number, np.ones_like(array))
            server.step()
    for array in mine:
        np.testing.assert_array_equal(array, 50 - 10 * comm.size)
    assert server.summary().updates_lost == 0
    ring.Free()


def test_newest_parameters_without_a_push(comm: MPI.Intracomm) -> None:
    mine = [np.zeros(30_000)]
    with ParameterServer(comm, mine, optimizer=Plain, mode="async") as server:
        if comm.rank == 0:
            server.push(0, np.full(30_000, -1.0))
            server.step()
        while not mine[0].all():
            server.refresh()
    np.testing.assert_array_equal(mine[0], 1)


def test_no_worker_left(comm: MPI.Intracomm) -> None:
    with pytest.raises(ArgumentError, match="leaves no worker among"):
        ParameterServer(comm, parameters(10), optimizer=Plain, servers=comm.size)
