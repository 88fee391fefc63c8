"""Communicators on virtual ranks that hold their arrays on virtual devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpiring.communicator import Communicator
from mpiring.communicator.arguments import Operand
from mpiring.device.base import Device
from mpiring.device.streams import StreamDevice
from mpiring.engine.progress import ProgressEngine
from mpiring.simulation.streams import StreamTransport, VirtualDriver, VirtualNode
from mpiring.simulation.world import VirtualTransport, World
from mpiring.transport.base import Transport


class DeviceCommunicator(Communicator):
    """The library's own, with a virtual device in the place of CUDA's."""

    def __init__(self, comm: Any, device: StreamDevice, **options: Any) -> None:
        self.device = device
        super().__init__(comm, **options)

    def _device(self, data: Operand) -> Device:
        return self.device if data.on_device else self._host

    def _peer_transport(self, device: Any) -> Transport:
        return StreamTransport(super()._peer_transport(device), device.driver)


def run(size: int, program: Callable[[DeviceCommunicator], Any], seed: int = 0, **options: Any):
    """What ``program(communicator)`` returns on each rank of a node."""
    node, world = VirtualNode(), World(size, seed)

    def rank(transport: VirtualTransport, _: ProgressEngine) -> Any:
        driver = VirtualDriver(seed * size + transport.rank, node)

        def idle() -> None:
            # A GPU that has work to do is no standstill.
            (world.pause if driver.busy else world.idle)(transport.rank)

        engine = ProgressEngine(idle=idle)
        watched = StreamTransport(transport, driver)
        comm = DeviceCommunicator(watched, StreamDevice(driver), engine=engine, **options)
        result = program(comm)
        comm.Free()
        return result

    return world.run(rank)
