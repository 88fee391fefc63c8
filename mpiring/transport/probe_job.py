"""The sacrificial job: two ranks exchange bytes by one path, at one size after another.

Started by ``probe``, in an MPI job of its own, as ``-m mpiring.transport.probe_job PATH``.
An MPI that is not CUDA-aware ends this process with a segmentation fault when it
is handed a device pointer; nothing else is lost with it. Before each size the job
reports what it is about to try.

Both ranks send and receive at once, as in a ring. Whether the right bytes came is
checked at every size, with another pattern each time; the time of an exchange is
the median over repetitions of the slower rank's mean.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from typing import Any, Protocol

from mpiring.errors import DeviceError
from mpiring.transport import child, cudriver

#: Bytes of one message. MPI libraries change protocol between these.
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20)
_REPETITIONS = 5
#: Bytes exchanged in one repetition, by which small messages are repeated inside it.
_WORK = 1 << 20
_MOST = 50

#: Seconds that a launcher is given to pass on what a rank has said, before that ends the job:
#: what it has not read by then is lost.
_FORWARDING = 0.3


class Path(Protocol):
    """One way for the bytes of this rank to reach the other and the reverse."""

    def fill(self, octets: bytes) -> None:
        """Set what this rank sends."""
        ...

    def exchange(self, size: int) -> None:
        """Send and receive the first ``size`` bytes; they have arrived when this returns."""
        ...

    def received(self, size: int) -> bytes:
        """What has arrived."""
        ...


class Host:
    """Host memory goes to MPI."""

    def __init__(self, comm: Any, room: int) -> None:
        self._comm = comm
        self._peer = 1 - comm.Get_rank()
        self._out, self._in = bytearray(room), bytearray(room)

    def fill(self, octets: bytes) -> None:
        self._out[: len(octets)] = octets

    def exchange(self, size: int) -> None:
        _swap(self._comm, self._peer, memoryview(self._out)[:size], memoryview(self._in)[:size])

    def received(self, size: int) -> bytes:
        return bytes(self._in[:size])


class _OnDevice:
    """Two device arrays, and how a test fills and reads them."""

    def __init__(self, comm: Any, room: int, driver: cudriver.Driver) -> None:
        self._comm, self._driver = comm, driver
        self._peer = 1 - comm.Get_rank()
        self._out, self._in = driver.allocate(room), driver.allocate(room)

    def fill(self, octets: bytes) -> None:
        held = ctypes.create_string_buffer(octets, len(octets))
        self._driver.write(self._out, ctypes.addressof(held), len(octets))

    def received(self, size: int) -> bytes:
        held = ctypes.create_string_buffer(size)
        self._driver.read(ctypes.addressof(held), self._in, size)
        return held.raw


class Staged(_OnDevice):
    """Device to pinned host memory, MPI, and up again."""

    def __init__(self, comm: Any, room: int, driver: cudriver.Driver) -> None:
        super().__init__(comm, room, driver)
        self._up, self._down = driver.allocate_pinned(room), driver.allocate_pinned(room)

    def exchange(self, size: int) -> None:
        self._driver.read(self._down, self._out, size)
        _swap(self._comm, self._peer, _memory(self._down, size), _memory(self._up, size))
        self._driver.write(self._in, self._up, size)


class Direct(_OnDevice):
    """Device pointers go to MPI."""

    def exchange(self, size: int) -> None:
        _swap(self._comm, self._peer, _memory(self._out, size), _memory(self._in, size))


class Peer(_OnDevice):
    """Each rank maps the other's array through CUDA IPC and copies out of it; MPI signals only."""

    def __init__(self, comm: Any, room: int, driver: cudriver.Driver) -> None:
        super().__init__(comm, room, driver)
        mine = driver.export(self._out)
        theirs = comm.sendrecv(mine, dest=self._peer, source=self._peer)
        self._theirs = driver.open(theirs)

    def exchange(self, size: int) -> None:
        self._comm.Barrier()  # the other rank's array is filled
        self._driver.copy(self._in, self._theirs, size)
        self._comm.Barrier()  # the other rank has read ours


DEVICE_PATHS: dict[str, type[Staged] | type[Direct] | type[Peer]] = {
    "staged": Staged,
    "direct": Direct,
    "peer": Peer,
}


def _swap(comm: Any, peer: int, out: Any, into: Any) -> None:
    receive = comm.Irecv(into, peer)
    send = comm.Isend(out, peer)
    receive.Wait()
    send.Wait()


def _memory(address: int, size: int) -> Any:
    """``size`` bytes at an address, as mpi4py takes them: the address itself is handed to MPI."""
    from mpi4py import MPI

    return [MPI.memory.fromaddress(address, size), MPI.BYTE]


def main(name: str) -> None:
    child.begin()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.Get_size() != 2:
        child.report(absent=f"the job has {comm.Get_size()} ranks where 2 were asked for")
        return
    try:
        _measure(comm, _open(comm, name))
    except DeviceError as error:
        child.report(failed=str(error), shared=_shared_memory())
        time.sleep(_FORWARDING)
        comm.Abort(3)  # the other rank may be waiting for this one


def _open(comm: Any, name: str) -> Path:
    if name == "host":
        return Host(comm, max(SIZES))
    driver = cudriver.Driver()
    gpus = driver.gpus()
    if not gpus:
        raise DeviceError(cudriver.NO_GPU)
    gpu = gpus[comm.Get_rank() % len(gpus)]
    driver.use(gpu.index)
    first, second = comm.allgather((gpu.index, gpu.uuid))
    if comm.Get_rank() == 0:
        child.report(access=_access(driver, first, second))
    return DEVICE_PATHS[name](comm, max(SIZES), driver)


def _access(
    driver: cudriver.Driver, first: tuple[int, str], second: tuple[int, str]
) -> bool | None:
    """Whether the ranks' GPUs, by index and identity, can address each other; None: unknown."""
    if first[1] == second[1]:
        return True
    if first[0] == second[0]:
        return None  # each rank sees its own GPU only: the other's index means nothing here
    return driver.can_access(first[0], second[0])


def _measure(comm: Any, path: Path) -> None:
    rank = comm.Get_rank()
    comm.Barrier()
    child.report(shared=_shared_memory())  # for the parent to remove, should we crash
    for turn, size in enumerate(SIZES):
        if rank == 0:
            child.report(trying=size)
        path.fill(_pattern(rank, turn, size))
        path.exchange(size)
        right = path.received(size) == _pattern(1 - rank, turn, size)
        right = all(comm.allgather(right))
        seconds = _time(comm, path, size)
        if rank == 0:
            child.report(size=size, right=right, seconds=seconds)


def _shared_memory() -> list[str]:
    """The files of shared memory that this process has mapped."""
    try:
        with open("/proc/self/maps") as maps:
            return sorted({line.split()[-1] for line in maps if "/dev/shm/" in line})
    except OSError:
        return []


def _pattern(rank: int, turn: int, size: int) -> bytes:
    """Bytes that differ between ranks and sizes, and along the message."""
    step = bytes((index * 7 + rank * 101 + turn * 13 + 1) % 251 for index in range(251))
    return (step * (size // 251 + 1))[:size]


def _time(comm: Any, path: Path, size: int) -> float:
    """Seconds of one exchange."""
    inside = max(1, min(_MOST, _WORK // size))
    means = []
    for _ in range(_REPETITIONS):
        comm.Barrier()
        start = time.perf_counter()
        for _ in range(inside):
            path.exchange(size)
        means.append((time.perf_counter() - start) / inside)
    return statistics.median(max(each) for each in zip(*comm.allgather(means)))


if __name__ == "__main__":
    main(sys.argv[1])
