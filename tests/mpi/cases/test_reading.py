"""Ranks that read each other's memory: whether they may is tried when they first meet."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
from mpi4py import MPI

from mpiring import Communicator
from mpiring.communicator import neighbours
from mpiring.device import remote
from mpiring.errors import ArgumentError, DeviceError
from mpiring.schedule import catalog


@pytest.fixture(autouse=True)
def allowed(comm: MPI.Intracomm) -> None:
    try:
        Communicator(comm, host_path="peer").Free()
    except DeviceError as error:
        pytest.skip(f"not allowed here: {error}")


def test_as_by_messages(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """All forms at once, over arrays that are read and arrays that are not."""
    monkeypatch.setattr(catalog, "READ_FROM", 4096)
    results = []
    for path in ("peer", "direct"):
        with Communicator(comm, host_path=path, algorithm="ring") as ring:
            n, rank, found = ring.size, ring.rank, []
            for count in (100, 5000, 120_000):
                sent = np.random.default_rng(rank).standard_normal(count * n, "f4")
                whole, block = np.empty_like(sent), np.empty(count, "f4")
                for _ in range(2):
                    ring.Allreduce(sent, whole)
                    ring.Reduce_scatter_block(sent, block)
                gathered = np.empty_like(sent)
                requests = [
                    ring.Iallgather(block, gathered),
                    ring.Iallreduce(MPI.IN_PLACE, largest := sent.copy(), MPI.MAX),
                ]
                mean = ring.Allreduce_init(MPI.IN_PLACE, average := sent.copy(), "mean")
                mean.Start().Wait()
                for request in requests:
                    request.Wait()
                assert (gathered == whole).all()  # the same sums, in the same order
                found += [whole, block, largest, average]
            results.append(found)
    for read, sent_and_received in zip(*results):
        np.testing.assert_array_equal(read, sent_and_received)


def test_memory_that_was_reused(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is dropped, and wherever the next arrays lie, what was meant is read."""
    monkeypatch.setattr(catalog, "READ_FROM", 4096)
    with Communicator(comm, host_path="peer") as ring:
        total = ring.size * (ring.size - 1) / 2
        for turn in range(30):
            data = np.full(2000 + turn % 3, float(ring.rank + turn))
            request = ring.Iallreduce(data, result := np.empty_like(data))
            del data
            ring.Allreduce(np.full(4000, float(ring.rank)), other := np.empty(4000))
            ring.Allreduce(MPI.IN_PLACE, np.full(2000 + turn % 3, 1.0))
            assert (other == total).all()
            request.Wait()
            assert (result == total + turn * ring.size).all()


def test_ranks_that_want_different_paths(comm: MPI.Intracomm) -> None:
    wish = "direct" if comm.rank == comm.size - 1 else "peer"
    if comm.size == 1:
        Communicator(comm, host_path=wish).Free()
        return
    with pytest.raises(ArgumentError, match=r"host_path, .* differ between ranks"):
        Communicator(comm, host_path=wish)
    os.environ["MPIRING_HOST_PATH"] = "nonsense"
    try:
        with pytest.raises(
            ArgumentError, match="rank 0: MPIRING_HOST_PATH: 'nonsense' given; allowed are auto"
        ):
            Communicator(comm)
    finally:
        del os.environ["MPIRING_HOST_PATH"]


def test_memory_that_cannot_be_read_travels_as_messages(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some of the ranks, and of an array only some of the blocks."""
    readv, calls = remote._readv, itertools.count(comm.rank)
    with Communicator(comm, host_path="peer") as ring:
        if comm.rank != 1:
            monkeypatch.setattr(
                remote, "_readv", lambda *given: -1 if next(calls) % 3 == 0 else readv(*given)
            )
        for turn in range(3):
            for count in (1_100_003, 2_000_000):
                data = np.full(count, float(comm.rank + turn), "f4")
                ring.Allreduce(MPI.IN_PLACE, data)
                total = comm.size * (comm.size - 1) / 2 + turn * comm.size
                np.testing.assert_array_equal(data, total)
                result = np.empty(count, "f4")
                ring.Iallreduce(np.full(count, 1.0, "f4"), result).Wait()
                np.testing.assert_array_equal(result, comm.size)


def test_a_constructor_that_fails_leaves_nothing_behind(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI has some thousand communicators, and would have no more."""
    if comm.size != 2:
        return
    monkeypatch.setattr(neighbours, "failures", lambda comm: {0: "not permitted"})
    for _ in range(1100):
        with pytest.raises(DeviceError, match=r"rank 0 cannot read .*: not permitted"):
            Communicator(comm, host_path="peer")
    monkeypatch.undo()
    Communicator(comm).Free()
