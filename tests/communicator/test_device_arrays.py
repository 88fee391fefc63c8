"""Device arrays through every method, on every path, between kernels of the caller's.

The device is virtual: it raises HazardError for whatever is not ordered, so that a result
that is right is right for good.
"""

from __future__ import annotations

import gc
import sys
import types
from typing import Any

import numpy as np
import pytest

from mpiring.communicator import MEAN
from mpiring.errors import ArgumentError
from mpiring.schedule.ops import Buffer
from mpiring.simulation.streams import VirtualMemory, VirtualStream
from tests.communicator.virtual import DeviceCommunicator, run

PATHS = ("direct", "staged", "peer")


class Caller:
    """A program's own arrays and kernels."""

    def __init__(self, comm: DeviceCommunicator, *, hidden: bool) -> None:
        self.comm, self.driver = comm, comm.device.driver
        self.empty = self.driver.hidden if hidden else comm.device.empty

    def array(self, values: Any, stream: VirtualStream | None = None) -> np.ndarray:
        """A new array that a kernel, launched and not over, fills with ``values``."""
        values = np.asarray(values)
        array = self.empty(values.size, values.dtype)
        self.driver.launch(
            stream or self.driver.default, "fill", lambda: np.copyto(array, values), writes=[array]
        )
        return array

    def value(self, array: np.ndarray) -> np.ndarray:
        """What a kernel on a stream that nobody has heard of finds in ``array``."""
        found: list[np.ndarray] = []
        stream = VirtualStream("later")
        self.driver.launch(stream, "read", lambda: found.append(np.array(array)), reads=[array])
        self.driver.settle()
        return found[0]


def every_collective(comm: DeviceCommunicator, hidden: bool) -> None:
    rank, size = comm.rank, comm.size
    caller = Caller(comm, hidden=hidden)
    everyones = size * (size - 1) // 2

    def check(found: np.ndarray, expected: Any) -> None:
        np.testing.assert_array_equal(caller.value(found), np.asarray(expected))

    for count in (0, 1, 3 * size + 1):
        base = np.arange(count, dtype="f4")
        x, y = caller.array(base + rank), caller.empty(count, "f4")
        comm.Allreduce(x, y)
        check(y, size * base + everyones)
        side = VirtualStream("side")
        x = caller.array(base + rank, side)
        with caller.driver.use(side):
            request = comm.Iallreduce("in place", x, "max")
        del x
        gc.collect()
        request.Wait()
    block = np.arange(5, dtype="i8")
    x = caller.array(np.concatenate([block + 10 * rank + peer for peer in range(size)]))
    y = caller.empty(5, "i8")
    comm.Reduce_scatter_block(x, y)
    check(y, size * (block + rank) + 10 * everyones)
    counts = [peer % 3 for peer in range(size)]
    x = caller.array(np.full(sum(counts), rank + 1.0))
    comm.Reduce_scatter("in place", x, counts)
    check(x[: counts[rank]], np.full(counts[rank], size + everyones))
    x, y = caller.array(block + rank), caller.empty(5 * size, "i8")
    comm.Allgather(x, y)
    check(y, np.concatenate([block + peer for peer in range(size)]))
    x, y = caller.array(np.full(counts[rank], rank)), caller.empty(sum(counts), int)
    comm.Allgatherv(x, [y, counts])
    check(y, np.repeat(np.arange(size), counts))
    x = caller.array(block + 7 if rank == size - 1 else block)
    comm.Bcast(x, root=size - 1)
    check(x, block + 7)
    halves = caller.array(np.full(9, 30000, "f2"))
    mean = caller.empty(9, "f2")
    comm.Allreduce(halves, mean, MEAN)
    check(mean, np.full(9, 30000, "f2"))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_collective(path: str, size: int) -> None:
    """The caller's memory is of either kind, or of another one on every other rank."""
    hidden = {1: {0, 1}, 2: {0, 1}, 4: {1, 2}, 8: {2}}[size]
    for kind in hidden:
        for segment in (None, 16)[size > 2 :]:
            run(
                size,
                lambda comm: every_collective(comm, hidden=(kind, comm.rank % 2)[kind == 2]),
                gpu_path=path,
                segment=segment,
            )


@pytest.mark.parametrize("path", PATHS)
def test_a_persistent_collective_takes_an_event_at_each_start(path: str) -> None:
    def program(comm: DeviceCommunicator) -> None:
        caller = Caller(comm, hidden=True)
        x = caller.empty(11, "f8")
        request = comm.Allreduce_init("in place", x)
        for turn in range(3):
            stream = VirtualStream(f"turn {turn}")
            value = float(comm.rank + turn)
            caller.driver.launch(stream, "fill", lambda v=value: x.fill(v), writes=[x])
            with caller.driver.use(stream):
                request.Start()
            request.Wait()
            np.testing.assert_array_equal(caller.value(x), np.full(11, 3.0 + 3 * turn))

    for seed in range(5):
        run(3, program, seed, gpu_path=path, segment=32)


def test_what_is_handed_to_mpi_is_only_what_mpi_can_see() -> None:
    """Direct: the caller's special memory takes a detour."""

    def program(comm: DeviceCommunicator) -> None:
        seen: list[bool] = []
        for name in ("send", "recv"):
            make = getattr(comm._transport, name)

            def watched(view: Any, *more: Any, make: Any = make, **options: Any) -> Any:
                seen.append(comm.device.plain(view))
                return make(view, *more, **options)

            setattr(comm._transport, name, watched)
        for hidden in (False, True):
            comm.Allreduce("in place", Caller(comm, hidden=hidden).array(np.ones(5)))
        assert len(seen) >= 8 and all(seen)

    run(2, program, gpu_path="direct", algorithm="ring")


def test_every_array_of_a_call_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may be on a stream of its own. A mean of halves works on a copy of what is given."""

    def program(comm: DeviceCommunicator) -> None:
        recorded: list[int] = []
        record = comm.device.record

        def noted(array: np.ndarray) -> Any:
            recorded.append(array.ctypes.data)
            return record(array)

        monkeypatch.setattr(comm.device, "record", noted)
        for dtype, op in (("f4", "sum"), ("f2", MEAN)):
            x, y = comm.device.empty(5, dtype), comm.device.empty(5, dtype)
            x.fill(1)
            y.fill(1)
            comm.Allreduce(x, y, op)
            assert {x.ctypes.data, y.ctypes.data} <= set(recorded)
            comm.Iallreduce("in place", y, op).Wait()
            assert recorded.count(y.ctypes.data) == 2
            recorded.clear()

    run(1, program)


def test_memory_stays_flat_over_staged_calls_of_random_sizes() -> None:
    def program(comm: DeviceCommunicator) -> tuple[int, int]:
        driver, allocated = comm.device.driver, {"allocate": 0, "pinned": 0}
        for name in allocated:
            method = getattr(driver, name)

            def counted(count: int, dtype: Any, name: str = name, method: Any = method) -> Any:
                allocated[name] += count
                return method(count, dtype)

            setattr(driver, name, counted)
        chance = np.random.default_rng(1)  # the same on all ranks
        x = driver.hidden(40_000, "f8")
        x[:] = 1
        early = {}
        for call in range(120):
            part = x[: chance.integers(1, x.size)]
            if call % 3:
                comm.Iallreduce("in place", part, "max").Wait()
            else:
                comm.Allreduce("in place", part, "max")
            if call == 40:
                early = dict(allocated)
        assert (x == 1).all() and early["pinned"]
        return allocated["allocate"] - early["allocate"], allocated["pinned"] - early["pinned"]

    assert run(2, program, gpu_path="staged") == [(0, 0)] * 2


def test_blocking_calls_on_cupys_arrays_are_bound_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are borrowed: what was bound holds none of the caller's arrays."""
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(ndarray=VirtualMemory))

    def program(comm: DeviceCommunicator, hidden: bool) -> int:
        caller = Caller(comm, hidden=hidden)
        bound = []
        x = caller.empty(6, "f8")
        for turn in range(4):
            stream = VirtualStream(f"turn {turn}")
            caller.driver.launch(stream, "fill", lambda t=turn: x.fill(t), writes=[x])
            with caller.driver.use(stream):
                comm.Allreduce("in place", x)
            assert (caller.value(x) == 2 * turn).all()
            bound.append({id(execution) for _, execution in comm._memory._bound.values()})
        (_, execution), *_ = comm._memory._bound.values() or [(0, None)]
        assert execution is None or execution.binding.buffers[Buffer.DATA].base is not x
        return len(set.union(*bound))

    for hidden in (False, True):
        for path, times in (("staged", 1), ("peer", 1), ("direct", 0)):
            assert run(2, lambda comm: program(comm, hidden), gpu_path=path) == [times] * 2


def test_where_the_two_arrays_of_a_call_live_must_agree() -> None:
    def program(comm: DeviceCommunicator) -> None:
        device, host = comm.device.empty(4, "f4"), np.zeros(4, "f4")
        with pytest.raises(ArgumentError, match="sendbuf: on host, but recvbuf is on virtual"):
            comm.Allreduce(host, device)
        with pytest.raises(ArgumentError, match="sendbuf: on virtual, but recvbuf is on host"):
            comm.Allreduce(device, host)

    run(2, program)


def test_a_device_array_must_be_contiguous() -> None:
    def program(comm: DeviceCommunicator) -> None:
        array = comm.device.empty(8, "f4")
        with pytest.raises(ArgumentError, match="recvbuf: a device array must be C-contiguous"):
            comm.Allreduce("in place", array[::2])

    run(1, program)


def test_the_path_is_said_once_by_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def program(comm: DeviceCommunicator) -> None:
        comm.Allreduce("in place", np.ones(3))
        assert "GPU" not in capsys.readouterr().err
        comm.Allreduce("in place", comm.device.empty(3, "f4"))
        comm.Allreduce("in place", comm.device.empty(3, "f4"))

    run(2, program)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("mpiring: GPU arrays travel through pinned host memory (staged): ")
