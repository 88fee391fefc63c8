"""Host arrays that ranks read out of each other's memory: the same results as by messages."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpiring import MEAN, Communicator
from mpiring.communicator import neighbours
from mpiring.device import remote
from mpiring.device.remote import RemoteHostDevice
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import ArgumentError, DeviceError, TransportError
from mpiring.schedule import catalog
from mpiring.schedule.ops import Recv, RecvReduce, Send
from mpiring.simulation.world import VirtualTransport, World


@pytest.fixture(autouse=True)
def short_arrays_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "READ_FROM", 0)
    monkeypatch.setattr(remote, "BLOCK", 64)
    try:
        word = np.zeros(1, "u1")
        device = RemoteHostDevice()
        device.copy(device.mapped(*device.export(word), 1, "u1"), word.copy()).start()
    except TransportError as error:
        pytest.skip(f"not allowed here: {error}")


def run(size: int, seed: int, program: Callable[[Communicator], Any], **options: Any) -> list[Any]:
    def rank(transport: VirtualTransport, engine: ProgressEngine) -> Any:
        with Communicator(
            transport, engine=engine, algorithm="ring", host_path="peer", **options
        ) as ring:
            return program(ring)

    return World(size, seed).run(rank)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("failing", [0, 1, 3], ids=["readable", "not readable", "in part"])
def test_every_collective(size: int, failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read comes as a message: of three blocks one cannot, or none can."""
    readv, calls = remote._readv, itertools.count(1)
    if failing:
        monkeypatch.setattr(
            remote, "_readv", lambda *given: -1 if next(calls) % failing == 0 else readv(*given)
        )
    counts = [(rank * 30 + 1) % 50 for rank in range(size)]
    whole = sum(counts)

    def program(ring: Communicator) -> None:
        own, rank = counts[ring.rank], ring.rank
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        base = np.arange(whole, dtype="f8")
        total = size * base + size * (size - 1) / 2
        for turn in range(2):  # the second time with what was bound the first
            sent, result = base + rank, np.full(whole, np.nan)
            ring.Allreduce(sent, result)
            np.testing.assert_array_equal(result, total)
            np.testing.assert_array_equal(sent, base + rank)
            ring.Allreduce("in place", sent, MEAN)
            np.testing.assert_allclose(sent, total / size)
            part = np.full(own, np.nan)
            ring.Reduce_scatter(base + rank, part, counts)
            np.testing.assert_array_equal(part, total[mine])
            both = base + rank
            ring.Reduce_scatter("in place", both, counts, "max")
            np.testing.assert_array_equal(both[:own], base[mine] + size - 1)
            parts = np.full(whole, np.nan)
            ring.Allgatherv(base[mine] + turn, [parts, counts])
            np.testing.assert_array_equal(parts, base + turn)
            parts = np.where((base >= mine.start) & (base < mine.stop), base, np.nan)
            ring.Allgatherv("in place", [parts, counts])
            np.testing.assert_array_equal(parts, base)
        requests = [ring.Iallreduce(np.full(40, rank), np.empty(40, int), "max") for _ in range(3)]
        bound = ring.Allreduce_init("in place", each := np.empty(60))
        for turn in range(3):
            each[:] = rank + turn
            bound.Start().Wait()
            assert (each == size * (size - 1) / 2 + size * turn).all()
        for request in requests:
            request.Wait()

    for seed, segment in enumerate((48, 160, None)):
        run(size, seed, program, segment=segment)


@pytest.mark.parametrize("dtype", ["f2", "f4", "i2", "c16", "bool"])
def test_dtypes(dtype: str) -> None:
    def program(ring: Communicator) -> list[Any]:
        data = np.resize(np.array([1, 0, 1, 1, 0]), 77).astype(dtype)
        ring.Allreduce("in place", data, "lor" if dtype == "bool" else "sum")
        return data.tolist()

    expected = (np.resize(np.array([1, 0, 1, 1, 0]), 77) * (1 if dtype == "bool" else 3)).tolist()
    assert run(3, 0, program) == [expected] * 3


def kinds(ring: Communicator, count: int) -> set[str]:
    """What the ops of an all-reduce of so many numbers are, and where its messages begin."""
    bound = ring.Allreduce_init(np.zeros(count), np.empty(count))
    ops = [op for ops in bound._execution.schedule.rounds for op in ops]  # type: ignore[union-attr]
    bound.Free()
    found = {type(op).__name__ for op in ops if isinstance(op, (Recv, RecvReduce))}
    return found | {op.src.buffer.name for op in ops if isinstance(op, Send)}


def test_from_how_many_bytes_on_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "READ_FROM", 800)
    assert run(2, 0, lambda ring: kinds(ring, 99)) == [{"Recv", "INPUT", "DATA"}] * 2
    assert run(2, 0, lambda ring: kinds(ring, 100)) == [{"Recv", "RecvReduce", "INPUT", "DATA"}] * 2


class Ranks:
    """The mpi4py communicator of one rank among ranks that all do as it does."""

    def __init__(self, size: int, spoil: Callable[[Any], Any] = lambda told: told) -> None:
        self.size, self.spoil, self.barriers = size, spoil, 0

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return self.size

    def Barrier(self) -> None:
        self.barriers += 1

    def allgather(self, told: Any) -> list[Any]:
        return [self.spoil(told)] * self.size if isinstance(told, tuple) else [told] * self.size


@pytest.mark.parametrize("scope, barriers", [("1", 1), ("0", 0), ("2", 0)])
def test_another_try_once_all_have_allowed_it(
    monkeypatch: pytest.MonkeyPatch, scope: str, barriers: int
) -> None:
    """Where the system leaves it to each process who may read it."""
    allowed: list[int] = []
    monkeypatch.setattr(neighbours, "may_be_read_by", allowed.append)
    monkeypatch.setattr(neighbours, "open", lambda path: io.StringIO(scope), raising=False)
    ranks = Ranks(2, another_word)
    assert neighbours.reader(ranks, "auto", True) is None
    assert ranks.barriers == barriers
    assert allowed == ([os.getppid(), 0] if barriers else [])


def another_word(told: Any) -> Any:
    return told[0], b"of another process"


def test_ranks_read_only_if_all_can() -> None:
    assert neighbours.reader(Ranks(1), "peer", True) is None
    assert neighbours.reader(Ranks(2), "direct", True) is None
    assert isinstance(neighbours.reader(Ranks(2), "auto", True), RemoteHostDevice)
    assert neighbours.reader(Ranks(2), "auto", False) is None
    with pytest.raises(DeviceError, match="'peer' given, but the ranks are on several machines"):
        neighbours.reader(Ranks(2), "peer", False)
    spoilt = Ranks(2, another_word)
    assert neighbours.reader(spoilt, "auto", True) is None
    with pytest.raises(
        DeviceError, match=r"ranks 0, 1 cannot .*: another process has its number here"
    ):
        neighbours.reader(spoilt, "peer", True)


def test_the_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    assert neighbours.wish(None) == "auto"
    monkeypatch.setenv("MPIRING_HOST_PATH", "direct")
    assert (neighbours.wish(None), neighbours.wish("peer")) == ("direct", "peer")
    monkeypatch.setenv("MPIRING_HOST_PATH", "fast")
    with pytest.raises(ArgumentError, match="MPIRING_HOST_PATH: 'fast' given; allowed are auto, d"):
        neighbours.wish(None)
    with pytest.raises(ArgumentError, match="host_path: 'slow' given"):
        neighbours.wish("slow")
