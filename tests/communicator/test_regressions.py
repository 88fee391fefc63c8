"""Mistakes that were made once: keys of kept calls, breaks in a round, what stays alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from mpiring.communicator import Communicator
from mpiring.communicator.call import Memory
from mpiring.device.host import HostDevice, HostTask
from mpiring.engine.progress import ProgressEngine
from mpiring.engine.request import Request
from mpiring.errors import ArgumentError
from mpiring.simulation.world import VirtualTransport, World


def test_counts_in_an_array_count_by_their_values() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        counts, send, recv = np.array([1, 3]), np.arange(4.0), np.zeros(3)
        for own in ((1, 3), (3, 1), (0, 4)):
            counts[:] = own
            recv = np.full(max(own), -1.0)
            comm.Reduce_scatter(send, recv, counts)
            start = own[0] * transport.rank
            np.testing.assert_array_equal(
                recv[: own[transport.rank]], 2 * send[start : start + own[transport.rank]]
            )

    World(2).run(program)


def test_an_array_among_the_parameters_is_never_kept_by_its_address() -> None:
    buffers = np.zeros(3), np.zeros(3)
    assert Memory().key("Reduce_scatter", buffers, ((1, 2),)) is not None
    assert Memory().key("Reduce_scatter", buffers, (np.array([1, 2]),)) is None


def test_none_is_in_place_as_in_mpi4py() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        x = np.ones(5)
        Communicator(transport, engine=engine).Allreduce(None, x)
        np.testing.assert_array_equal(x, np.full(5, transport.size))

    World(3).run(program)


def test_the_root_of_a_broadcast_is_only_read() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        x = np.arange(12.0).reshape(3, 4) * (transport.rank == 1)
        x.flags.writeable = transport.rank != 1
        Communicator(transport, engine=engine).Bcast(x.T, root=1)
        np.testing.assert_array_equal(x, np.arange(12.0).reshape(3, 4))

    World(3).run(program)


def test_a_freed_persistent_collective_lets_go_of_the_array() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        x = np.ones(100)
        alive = weakref.ref(x)
        request = comm.Allreduce_init("in place", x)
        request.Start().Wait()
        request.Free()
        del request, x
        gc.collect()
        assert alive() is None

    World(2).run(program)


def test_a_break_in_the_middle_of_a_round_does_not_end_in_a_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(device: HostDevice, src: np.ndarray, dst: np.ndarray) -> HostTask:
        def start() -> None:
            raise KeyboardInterrupt

        return HostTask(start)

    def program(transport: VirtualTransport, engine: ProgressEngine) -> None:
        comm = Communicator(transport, engine=engine)
        request = comm.Allreduce_init(np.ones(4), np.zeros(4))
        with pytest.raises(KeyboardInterrupt):
            request.Start()
        with pytest.raises(KeyboardInterrupt):  # not a result that was never made
            request.Wait()

    monkeypatch.setattr(HostDevice, "copy", interrupted)
    World(1).run(program)


def test_requests_that_are_not_ours_are_named() -> None:
    with pytest.raises(ArgumentError, match="number 0 is no request of mpiring"):
        Request.Waitany([object()])  # type: ignore[list-item]


def test_the_larger_of_two_zeros_is_the_same_everywhere() -> None:
    def program(transport: VirtualTransport, engine: ProgressEngine) -> bytes:
        x = np.array([0.0, -0.0] if transport.rank % 2 else [-0.0, 0.0])
        Communicator(transport, engine=engine, algorithm="doubling").Allreduce(None, x, "max")
        return x.tobytes()

    for size in (2, 3, 4, 7, 8):
        assert len(set(World(size).run(program))) == 1
