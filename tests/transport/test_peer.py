"""Messages by reading: between the ranks of a world whose virtual GPUs open each other's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpiring.device.remote import RemoteHostDevice
from mpiring.device.streams import StreamDevice
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import HazardError, TransportError
from mpiring.simulation.streams import StreamTransport, VirtualDriver, VirtualNode
from mpiring.simulation.world import VirtualTransport, World
from mpiring.task import Task
from mpiring.transport.peer import PeerTransport

Program = Callable[[StreamTransport, StreamDevice, ProgressEngine], Any]


def run(size: int, program: Program, seed: int = 0) -> list[Any]:
    node, world = VirtualNode(), World(size, seed)

    def rank(transport: VirtualTransport, engine: ProgressEngine) -> Any:
        driver = VirtualDriver(seed * size + transport.rank, node)

        def idle() -> None:
            (world.pause if driver.busy else world.idle)(transport.rank)

        device = StreamDevice(driver)
        peer = PeerTransport(transport, transport.duplicate(), device)
        return program(StreamTransport(peer, driver), device, ProgressEngine(idle=idle))

    return world.run(rank)


def finish(engine: ProgressEngine, *tasks: Task) -> None:
    """Asked in any order, and never again once they have said yes."""
    rest = list(tasks)

    def over() -> bool:
        rest[:] = [task for task in rest if not task.done()]
        return not rest

    engine.wait(over)


@pytest.mark.parametrize("persistent", [False, True])
def test_a_ring_of_messages_started_many_times(persistent: bool) -> None:
    def program(transport: StreamTransport, device: StreamDevice, engine: Any) -> list[float]:
        rank, size = transport.rank, transport.size
        out, into = device.scratch(5, "f4"), device.scratch(5, "f4")
        send = transport.send(out[1:4], (rank + 1) % size, 7, persistent=persistent)
        recv = transport.recv(into[:3], (rank - 1) % size, 7, persistent=persistent)
        received = []
        for turn in range(4):
            out.fill(10 * rank + turn)
            recv.start()
            send.start()
            finish(engine, send, recv)
            assert send.done() and recv.done()
            received.append(float(into[2]))
        assert np.isnan(into[3:]).all()
        return received

    for seed in range(5):
        assert run(3, program, seed) == [
            [10.0 * left + turn for turn in range(4)] for left in (2, 0, 1)
        ]


def test_several_messages_between_the_same_ranks_match_in_order() -> None:
    def program(transport: StreamTransport, device: StreamDevice, engine: Any) -> Any:
        arrays = [device.scratch(count, "f8") for count in (1, 1000, 2, 500)]
        if transport.rank == 0:
            for number, array in enumerate(arrays):
                array.fill(number)
            tasks = [transport.send(array, 1, 0) for array in arrays]
        else:
            tasks = [transport.recv(array, 0, 0) for array in arrays]
        for task in tasks:
            task.start()
        finish(engine, *reversed(tasks))
        return [float(array[-1]) for array in arrays]

    for seed in range(20):
        assert run(2, program, seed)[1] == [0, 1, 2, 3]


def test_a_message_of_another_length_is_refused() -> None:
    def program(transport: StreamTransport, device: StreamDevice, engine: Any) -> None:
        if transport.rank == 0:
            task: Task = transport.send(device.scratch(3, "f4"), 1, 0)
        else:
            task = transport.recv(device.scratch(4, "f4"), 0, 0)
        task.start()
        finish(engine, task)

    with pytest.raises(TransportError, match="16 bytes were agreed, but: 12 came"):
        run(2, program)


def test_what_was_posted_can_be_taken_back() -> None:
    def program(transport: StreamTransport, device: StreamDevice, engine: Any) -> float:
        array, later = device.scratch(3, "f4"), device.scratch(3, "f4")
        peer = 1 - transport.rank
        unmatched = (transport.recv if transport.rank else transport.send)(array, peer, 0)
        if transport.rank:
            unmatched.start()
            unmatched.cancel()
        later.fill(5)
        task = (transport.recv if transport.rank else transport.send)(later, peer, 0)
        task.start()
        finish(engine, task)
        return float(later[0])

    assert run(2, program) == [5, 5]


def test_the_callers_memory_cannot_be_sent() -> None:
    def program(transport: StreamTransport, device: StreamDevice, engine: Any) -> None:
        with pytest.raises(TransportError, match="other ranks cannot read this memory"):
            transport.send(device.driver.hidden(4, "f4"), 1 - transport.rank, 0)

    run(2, program)


def test_a_send_that_does_not_wait_for_its_answer_is_a_hazard() -> None:
    def program(transport: StreamTransport, device: StreamDevice, engine: Any) -> None:
        array = device.scratch(4, "f4")
        if transport.rank == 0:
            task = transport.send(array, 1, 0)
            task._task.done = lambda: True
        else:
            task = transport.recv(array, 0, 0)
        task.start()
        finish(engine, task)

    with pytest.raises(HazardError, match="of another rank, which is in no send that is under"):
        run(2, program)


class Lost:
    immediate = False

    def start(self) -> None: ...

    def done(self) -> bool:
        raise TransportError("lost")


def test_an_error_of_a_send_is_raised_by_the_send() -> None:
    """Also where a receive that is waited for has moved it."""

    def rank(transport: VirtualTransport, engine: ProgressEngine) -> None:
        peer = PeerTransport(transport, transport.duplicate(), RemoteHostDevice())
        if transport.rank:
            return
        transport.send = lambda *arguments, **options: Lost()  # type: ignore[method-assign]
        send, recv = peer.send(np.zeros(3), 1, 0), peer.recv(np.zeros(3), 1, 0)
        recv.start()
        send.start()
        assert not recv.done()
        for _ in range(2):
            with pytest.raises(TransportError, match="lost"):
                send.done()
        assert not recv.done()
        recv.cancel()

    World(2).run(rank)
