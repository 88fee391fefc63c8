"""Where the arrays of a benchmark live: NumPy's on the host, CuPy's on this rank's GPU."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import numpy as np

from bench.case import Array


class Arrays(Protocol):
    xp: ModuleType

    def finish(self) -> None:
        """Return when all work that was launched is over: none of it is to be timed."""
        ...


class HostArrays:
    xp: ModuleType = np

    def finish(self) -> None: ...


class GpuArrays:
    def __init__(self, local_rank: int) -> None:
        """The first thing in the process that touches a GPU."""
        from mpiring.device.cuda import select_gpu

        self._device = select_gpu(local_rank)
        self.xp: ModuleType = self._device.xp

    def finish(self) -> None:
        self._device.driver.settle()

    def host(self, array: Array) -> Any:
        """An array on the host, as large, to bring ``array`` there and back with the next two."""
        return self._device.staging(array.size, array.dtype)

    def bring(self, array: Array, host: Any) -> None:
        array.get(out=host)

    def take_back(self, host: Any, array: Array) -> None:
        array.set(host)


def arrays_of(device: str, comm: Any, MPI: Any) -> Arrays | str:
    """The arrays that ``--device`` names, or why some rank has none. Collective."""
    if device == "cpu":
        return HostArrays()
    from mpiring.train.place import cuda_missing

    for rank, wrong in enumerate(comm.allgather(cuda_missing())):
        if wrong:
            return f"--device cuda: rank {rank}: {wrong}"
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = node.Get_rank()
    node.Free()
    return GpuArrays(local_rank)
