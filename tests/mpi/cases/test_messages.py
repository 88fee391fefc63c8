"""Messages over MPI: split where they are long, counted where they arrive, taken back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpiring import Communicator
from mpiring.errors import TransportError
from mpiring.task import Task
from mpiring.transport.mpi import MpiTransport


def finish(*tasks: Task) -> None:
    waiting = list(tasks)
    while waiting:
        waiting = [task for task in waiting if not task.done()]


def neighbours(comm: MPI.Intracomm) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("limit", [1, 7, 8, 1000, 1 << 30])
def test_a_long_view_travels_as_several_messages(
    comm: MPI.Intracomm, limit: int, persistent: bool
) -> None:
    transport = MpiTransport(comm, limit)
    right, left = neighbours(comm)
    for count in (1, 9, 100):
        sent, landing = np.empty(count), np.empty(count + 2)
        receive = transport.recv(landing[1:-1], left, 3, persistent=persistent)
        send = transport.send(sent, right, 3, persistent=persistent)
        assert not (receive.immediate or send.immediate)
        for turn in range(3 if persistent else 1):
            sent[:] = np.arange(count) + comm.rank + turn
            landing.fill(-1)
            receive.start()
            send.start()
            finish(receive, send)
            np.testing.assert_array_equal(landing[1:-1], np.arange(count) + left + turn)
            assert landing[0] == landing[-1] == -1
            comm.Barrier()


@pytest.mark.parametrize("limit", [5, 8])
@pytest.mark.parametrize("segment", [1 << 20, 16])
def test_collectives_of_split_messages(comm: MPI.Intracomm, limit: int, segment: int) -> None:
    """As if ``limit`` were MPI's own: the last element is right, and every other."""
    for algorithm in ("auto", "ring"):
        transport = MpiTransport(comm, limit)
        with Communicator(transport, algorithm=algorithm, segment=segment) as ring:
            for count in (0, 1, 7, 55):
                data = np.arange(count) * (comm.rank + 1.0)
                ring.Allreduce(MPI.IN_PLACE, data)
                expected = np.arange(count) * comm.size * (comm.size + 1) / 2
                np.testing.assert_array_equal(data, expected)
                request = ring.Allreduce_init(MPI.IN_PLACE, data)
                for turn in range(2):
                    request.Start().Wait()
                    np.testing.assert_array_equal(data, expected * comm.size ** (turn + 1))
                gathered = np.empty(count * comm.size)
                ring.Iallgather(data, gathered).Wait()
                np.testing.assert_array_equal(gathered, np.tile(data, comm.size))


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("came", [0, 8, 24, 160])
def test_a_message_of_another_length_is_an_error(
    comm: MPI.Intracomm, came: int, persistent: bool
) -> None:
    if comm.size == 1:
        pytest.skip("Open MPI cuts off a long message to oneself; we send none")
    with_errors = comm.Dup()
    with_errors.Set_errhandler(MPI.ERRORS_RETURN)
    transport = MpiTransport(with_errors)
    right, left = neighbours(comm)
    receive = transport.recv(np.zeros(2), left, 5, persistent=persistent)
    receive.start()
    with_errors.Send(np.zeros(came, "u1"), right, 5)
    with pytest.raises(TransportError) as caught:
        finish(receive)
    assert f"message from rank {left} (tag 5): 16 bytes were agreed, but: " in str(caught.value)
    assert str(came) in str(caught.value) or came > 16
    receive.cancel()  # over already: nothing happens
    comm.Barrier()
    del receive
    with_errors.Free()


@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
@pytest.mark.parametrize("limit", [8, 1 << 30])
def test_a_receive_that_is_taken_back(comm: MPI.Intracomm, limit: int, persistent: bool) -> None:
    """What comes later is for the next one."""
    transport = MpiTransport(comm, limit)
    right, left = neighbours(comm)
    first, second = np.zeros(4), np.zeros(4)
    receive = transport.recv(first, left, 1, persistent=persistent)
    receive.start()
    receive.cancel()
    comm.Barrier()
    other = transport.recv(second, left, 1, persistent=persistent)
    send = transport.send(np.full(4, 7.0), right, 1)
    other.start()
    send.start()
    finish(send, other)
    assert not first.any() and (second == 7).all()
    if persistent:
        comm.Barrier()
        receive.start()
        again = transport.send(np.full(4, 8.0), right, 1)
        again.start()
        finish(again, receive)
        assert (first == 8).all()


def test_a_failed_collective_gives_up_its_arrays(comm: MPI.Intracomm) -> None:
    """What was posted for it must not be written into them later."""
    if comm.size == 1:
        pytest.skip("one rank receives nothing")
    ring = Communicator(comm)
    data = np.full(4, 7.0)
    ring.Iallreduce(MPI.IN_PLACE, data.copy()).Wait()
    if comm.rank:
        request = ring.Iallreduce(MPI.IN_PLACE, data)
        execution = request._execution
        assert execution is not None
        ring.engine.fail(execution, TransportError("on purpose"))
        with pytest.raises(TransportError, match="on purpose"):
            ring._check = "0"  # and nobody else is asked about it
            request.Wait()
        before: Any = data.copy()
    comm.Barrier()
    if comm.rank == 0:
        ring.Iallreduce(MPI.IN_PLACE, data)
        for _ in range(100):
            ring.poll()
    comm.Barrier()
    if comm.rank:
        for _ in range(100):
            ring.poll()
        np.testing.assert_array_equal(data, before)
    ring._leave()
