"""Device arrays on real ranks: what is wrong on one rank is an error on all. The device is virtual,
its memory is the host's, so any MPI carries it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpiring.device.streams import StreamDevice
from mpiring.errors import ArgumentError, DeviceError, MismatchError
from mpiring.simulation.streams import VirtualDriver
from tests.communicator.virtual import DeviceCommunicator


class Full(VirtualDriver):
    """A device that has no memory left from some moment on."""

    full = False

    def allocate(self, count: int, dtype: Any) -> np.ndarray:
        if self.full:
            raise DeviceError("GPU 0: no memory left")
        return super().allocate(count, dtype)


@pytest.mark.parametrize("path", ["direct", "staged"])
def test_device_arrays_travel(comm: Any, path: str) -> None:
    driver = VirtualDriver(comm.rank)
    with DeviceCommunicator(comm, StreamDevice(driver), gpu_path=path, segment=64) as ring:
        x = driver.hidden(100, "f4")
        for turn in range(3):
            driver.launch(driver.default, "fill", lambda t=turn: x.fill(comm.rank + t), writes=[x])
            ring.Allreduce("in place", x)
            assert (x == sum(range(comm.size)) + turn * comm.size).all()


def test_arrays_on_another_kind_of_device_on_one_rank(comm: Any) -> None:
    if comm.size < 2:
        return
    device = StreamDevice(VirtualDriver(comm.rank))
    with DeviceCommunicator(comm, device, gpu_path="staged") as ring:
        x = np.zeros(5) if comm.rank == 0 else device.empty(5, "f8")
        with pytest.raises(MismatchError) as caught:
            ring.Allreduce("in place", x)
        told = str(caught.value)
        assert "rank 0: allreduce of 5 x float64, sum;" in told and "sum, on virtual" in told
        assert set(comm.allgather(told)) == {told}


def test_no_memory_for_scratch_on_one_rank(comm: Any) -> None:
    if comm.size < 2:
        return
    driver = Full(comm.rank)
    device = StreamDevice(driver)
    with DeviceCommunicator(comm, device, gpu_path="staged", algorithm="ring") as ring:
        x = driver.hidden(5, "f8")
        ring.Iallreduce("in place", x).Wait()
        for known in (False, True):  # a new signature is compared first, an old one is not
            count = 5 if known else 4 << 20
            x = driver.hidden(count, "f8")
            driver.full = comm.rank == comm.size - 1
            device._memory._long.clear()
            device._memory._short.clear()
            device._memory._back.clear()
            device._memory._slab = None
            with pytest.raises(DeviceError, match=f"rank {comm.size - 1}: GPU 0: no memory left"):
                ring.Iallreduce("in place", x).Wait()
            driver.full = False


def test_ranks_that_ask_for_different_paths(comm: Any) -> None:
    if comm.size < 2:
        return
    device = StreamDevice(VirtualDriver(comm.rank))
    wish = "direct" if comm.rank else "staged"
    with pytest.raises(
        ArgumentError, match="gpu_path, host_path, MPIRING_CHECK: differ between ranks"
    ):
        DeviceCommunicator(comm, device, gpu_path=wish)
