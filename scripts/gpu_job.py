"""What the GPU check runs under mpirun: ``python scripts/gpu_job.py JOB --out FILE [...]``.

Rank 0 adds one line of JSON to FILE for each thing that was found, at once, so that a crash
loses nothing: ``{"failed": text}`` is a failure, ``{"done": text}`` progress, the rest tables.
All ranks look at their own results and agree on what came of it.

With ``--host`` the same runs on NumPy arrays: to try the check itself where there is no GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

import mpiring
from mpiring.communicator import Communicator

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
MIB = 1 << 20

#: Busy for a while, then writes its last argument everywhere.
SLOW = r"""
extern "C" __global__ void slow(float* x, size_t n, long long cycles, float value) {
    long long start = clock64();
    while (clock64() - start < cycles) {}
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += gridDim.x * (size_t)blockDim.x) x[i] = value;
}
"""


class Gpu:
    """CuPy's arrays on this rank's GPU."""

    def __init__(self) -> None:
        import cupy

        from mpiring.device.cuda import select_gpu

        node = WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.device = select_gpu(node.Get_rank())
        self.xp = cupy
        self.empty = self.device.empty
        self._slow = cupy.RawKernel(SLOW, "slow")

    def finish(self) -> None:
        self.xp.cuda.Device().synchronize()

    def fill_slowly(self, array: Any, value: float) -> None:
        arguments = (array, np.uint64(array.size), np.int64(30_000_000), np.float32(value))
        self._slow((64,), (256,), arguments)

    def side_stream(self) -> Any:
        return self.xp.cuda.Stream(non_blocking=True)

    def forget(self) -> None:
        self.xp.get_default_memory_pool().free_all_blocks()

    def used(self) -> int:
        """Bytes of the GPU's memory in use, by all processes."""
        free, total = self.xp.cuda.runtime.memGetInfo()
        return total - free


class Host:
    """NumPy's arrays, to try this program."""

    xp: Any = np

    def empty(self, count: int, dtype: Any) -> Any:
        return np.empty(count, dtype)

    def finish(self) -> None: ...

    def fill_slowly(self, array: Any, value: float) -> None:
        array.fill(value)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        yield

    def forget(self) -> None:
        gc.collect()

    def used(self) -> int:
        return 0


def tell(**found: Any) -> None:
    if RANK == 0:
        with open(OPTIONS.out, "a") as file:
            file.write(json.dumps(found) + "\n")
        told = (f"{v:.4g}" if isinstance(v, float) else v for v in found.values())
        print("   ", *(f"{name}: {value}" for name, value in zip(found, told)), flush=True)


def agreed(what: str, right: bool) -> bool:
    """Whether it is right on all ranks; told where it is not."""
    wrong = [rank for rank, fine in enumerate(WORLD.allgather(bool(right))) if not fine]
    if wrong:
        tell(failed=f"{what}: wrong on ranks {wrong}")
    return not wrong


def same(found: Any, expected: Any) -> bool:
    return found.shape == expected.shape and bool((found == expected).all())


def memory_of_host() -> int:
    """Bytes of this process's memory that are in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


# -- every collective against NumPy


def collectives() -> None:
    """Numbers are small and whole: their sums are exact in every dtype and order."""
    for path in OPTIONS.paths:
        for dtype in ("float32", "float64", "float16", "int32", "complex64", "uint8"):
            begin, wrong = time.perf_counter(), 0
            with Communicator(WORLD, gpu_path=path) as comm:
                for count in counts(np.dtype(dtype).itemsize, dtype == "float32"):
                    wrong += not one_size(comm, f"{path} {dtype} {count}", count, dtype)
            seconds = time.perf_counter() - begin
            tell(done=f"{SIZE} ranks, {path}, {dtype}: {seconds:.1f} s", wrong=wrong)


def counts(itemsize: int, large: bool) -> list[int]:
    """0, 1, 3 and 1023 elements, 1 MiB and 64 MiB; the largest for one dtype only."""
    return [0, 1, 3, 1023, MIB // itemsize, *([OPTIONS.largest * MIB // itemsize] if large else [])]


def one_size(comm: Communicator, name: str, count: int, dtype: str) -> bool:
    xp, n = PLACE.xp, SIZE
    ones = n * (n - 1) // 2
    base = np.arange(count) % 7
    mine = xp.asarray((base + RANK).astype(dtype))
    total = xp.asarray((n * base + ones).astype(dtype))
    right = []

    def check(method: str, found: Any, expected: Any) -> None:
        right.append(agreed(f"{name}: {method}", same(found, expected)))

    result = xp.empty(count, dtype)
    comm.Allreduce(mine, result)
    check("Allreduce", result, total)
    result = mine.copy()
    request = comm.Iallreduce(MPI.IN_PLACE, result)
    request.Wait()
    check("Iallreduce in place", result, total)
    owned = PLACE.empty(count, dtype)
    request = comm.Allreduce_init(MPI.IN_PLACE, owned)
    for _ in range(2):
        owned[...] = mine
        request.Start().Wait()
        check("Allreduce_init on memory of the library's", owned, total)
    if dtype not in ("complex64",):
        result = mine.copy()
        comm.Allreduce(MPI.IN_PLACE, result, MPI.MAX)
        check("Allreduce of MAX", result, xp.asarray((base + n - 1).astype(dtype)))
    if dtype.startswith("float"):
        result = xp.empty(count, dtype)
        comm.Allreduce(mine, result, mpiring.MEAN)
        mean = (base + (n - 1) / 2).astype(dtype)
        check("Allreduce of MEAN", xp.round(result * 16), xp.asarray(np.round(mean * 16)))
    whole = count // n * n
    part = xp.empty(whole // n, dtype)
    comm.Reduce_scatter_block(mine[:whole].copy(), part)
    own = slice(RANK * (whole // n), (RANK + 1) * (whole // n))
    check("Reduce_scatter_block", part, total[:whole][own])
    gathered = xp.empty(n * count, dtype)
    if count * n < 1 << 24:
        comm.Allgather(mine, gathered)
        expected = np.concatenate([base + peer for peer in range(n)]).astype(dtype)
        check("Allgather", gathered, xp.asarray(expected))
    result = mine.copy()
    comm.Bcast(result, root=n - 1)
    check("Bcast", result, xp.asarray((base + n - 1).astype(dtype)))
    return all(right)


# -- what must not go wrong however streams and memory are used


def safety() -> None:
    warnings.simplefilter("ignore", RuntimeWarning)  # requests are left alone on purpose
    for path in OPTIONS.paths:
        with Communicator(WORLD, gpu_path=path) as comm:
            race(comm, path)
            drop(comm, path)
            flat(comm, path)
            half_waited(comm, path)


def race(comm: Communicator, path: str) -> None:
    """A slow kernel on a stream of its own writes x, then Allreduce(x) at once."""
    expected = SIZE * (SIZE + 1) / 2
    for count in (1, 1024, MIB // 4, 4 * MIB):
        for turn in range(3):
            x = PLACE.xp.zeros(count, np.float32)
            PLACE.finish()
            with PLACE.side_stream():
                PLACE.fill_slowly(x, RANK + 1)
                if turn == 0:
                    comm.Allreduce(MPI.IN_PLACE, x)
                elif turn == 1:
                    comm.Iallreduce(MPI.IN_PLACE, x).Wait()
                else:
                    comm.Allreduce_init(MPI.IN_PLACE, x).Start().Wait()
            with PLACE.side_stream():  # any stream sees the result
                right = bool((x == expected).all())
            agreed(f"{path}: race of a slow kernel with a sum of {count} elements", right)
    tell(done=f"{path}: slow kernels on streams of their own")


def drop(comm: Communicator, path: str) -> None:
    """An array dropped in flight, its memory given to another one that is filled at once."""
    for turn in range(20):
        keep = PLACE.empty(MIB, np.float32)
        keep.fill(RANK)
        requests = [comm.Iallreduce(MPI.IN_PLACE, keep)]
        x = PLACE.xp.full(MIB, RANK, np.float32)
        y = PLACE.xp.empty(MIB, np.float32)
        requests.append(comm.Iallreduce(x, y))
        del x
        gc.collect()
        other = PLACE.xp.full(MIB, 1000.0, np.float32)
        mpiring.Request.Waitall(requests)
        expected = SIZE * (SIZE - 1) / 2
        right = bool((y == expected).all()) and bool((keep == expected).all())
        agreed(
            f"{path}: array dropped in flight, turn {turn}", right and bool((other == 1000).all())
        )
    tell(done=f"{path}: arrays dropped in flight")


def flat(comm: Communicator, path: str) -> None:
    """Memory after thousands of calls on fresh arrays of random sizes."""
    chance = np.random.default_rng(0)  # the same on every rank
    before = (0, 0)
    for call in range(OPTIONS.calls):
        if call == OPTIONS.calls // 5:
            before = settled()
        count = int(chance.integers(1, 1 << 16))
        x = PLACE.xp.ones(count, np.float32)
        if call % 2:
            comm.Iallreduce(MPI.IN_PLACE, x).Wait()
        else:
            comm.Allreduce(MPI.IN_PLACE, x)
        if call % 100 == 0:
            PLACE.forget()
    after = settled()
    grown = [(now - then) / MIB for now, then in zip(after, before)]
    agreed(f"{path}: memory grew by {grown} MiB (GPU, host)", max(grown) < 64)
    tell(done=f"{path}: {OPTIONS.calls} calls on fresh arrays", gpu_mib=grown[0], host_mib=grown[1])


def settled() -> tuple[int, int]:
    gc.collect()
    PLACE.forget()
    PLACE.finish()
    WORLD.Barrier()
    used = PLACE.used(), memory_of_host()
    WORLD.Barrier()
    return used


def half_waited(comm: Communicator, path: str) -> None:
    """Handles of which half are never waited for."""
    arrays = [PLACE.xp.ones(1000, np.float32) for _ in range(100)]
    requests = [comm.Iallreduce(MPI.IN_PLACE, each) for each in arrays]
    for request in requests[::2]:
        request.Wait()
    del request, requests
    comm.Allreduce(MPI.IN_PLACE, PLACE.xp.ones(1, np.float32))
    while not all(bool((each == SIZE).all()) for each in arrays):
        comm.poll()
    tell(done=f"{path}: handles that nobody waited for")


def leave() -> None:
    """The program ends while a collective is under way: exit code 0 is the check's to see."""
    comm = Communicator(WORLD, gpu_path=OPTIONS.paths[0])
    x = PLACE.xp.ones(16 * MIB, np.float32)
    comm.Iallreduce(MPI.IN_PLACE, x)
    tell(done="ending with a collective under way")


# -- time


def timing() -> None:
    """Time, bus bandwidth and what bounds it, per path; contenders take turns within a size."""
    bound = memory_rate()
    contenders: dict[str, Callable[[Any], None]] = {}
    comms = {path: Communicator(WORLD, gpu_path=path) for path in OPTIONS.paths}
    for path, comm in comms.items():
        contenders[path] = lambda x, comm=comm: comm.Allreduce(MPI.IN_PLACE, x)
    if OPTIONS.direct_mpi:
        contenders["comm.Allreduce"] = lambda x: WORLD.Allreduce(MPI.IN_PLACE, x)
    contenders["through host by hand"] = through_host
    for mib in (1 / 16, 1, 16, 64, 256):
        if mib > 4 * OPTIONS.largest:
            continue
        count = int(mib * MIB / 4)
        x = PLACE.empty(count, np.float32)
        times = measured(x, contenders, repetitions=7 if mib < 100 else 3)
        for name, seconds in times.items():
            tell(
                table="time",
                ranks=SIZE,
                mib=mib,
                contender=name,
                ms=seconds * 1e3,
                busbw_gb=2 * (SIZE - 1) / SIZE * 4 * count / seconds / 1e9,
                of_bound=2 * SIZE * 4 * count / bound / seconds if bound else None,
            )
    for comm in comms.values():
        comm.Free()


def measured(
    x: Any, contenders: dict[str, Callable[[Any], None]], repetitions: int
) -> dict[str, float]:
    """The median over repetitions of the slowest rank's seconds; every result is verified."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions + 1):
        for name, call in contenders.items():
            x.fill(RANK + 1)
            PLACE.finish()
            WORLD.Barrier()
            begin = time.perf_counter()
            call(x)
            PLACE.finish()
            seconds = WORLD.allreduce(time.perf_counter() - begin, MPI.MAX)
            times[name].append(seconds)
            right = bool((x == SIZE * (SIZE + 1) / 2).all())
            agreed(f"timed {name}, {x.nbytes} bytes", right)
    return {name: statistics.median(each[1:]) for name, each in times.items()}


_HOST: dict[int, Any] = {}


def through_host(x: Any) -> None:
    """What an MPI that knows no GPUs makes a program do."""
    host = _HOST.setdefault(x.size, np.empty(x.size, x.dtype))
    if PLACE.xp is np:
        np.copyto(host, x)
    else:
        x.get(out=host)
    WORLD.Allreduce(MPI.IN_PLACE, host)
    x[...] = PLACE.xp.asarray(host)


def memory_rate() -> float:
    """Bytes a second, read and written together, of copies inside the GPU: one rank alone."""
    rate = 0.0
    if RANK == 0 and PLACE.xp is not np:
        x = PLACE.xp.zeros(256 * MIB // 4, np.float32)
        y = PLACE.xp.empty_like(x)
        rate = 2 * x.nbytes / best(lambda: PLACE.xp.copyto(y, x))
        down, up = PLACE.device.staging(16 * MIB, np.float32), PLACE.device.staging(16 * MIB, "f4")
        one, two = PLACE.side_stream(), PLACE.side_stream()
        runtime = PLACE.xp.cuda.runtime

        def both() -> None:
            for target, source, stream in (
                (down.ctypes.data, x.data.ptr, one),
                (y.data.ptr, up.ctypes.data, two),
            ):
                runtime.memcpyAsync(target, source, down.nbytes, 4, stream.ptr)

        bus = 2 * down.nbytes / best(both)
        tell(table="machine", memory_gb=rate / 1e9, bus_both_ways_gb=bus / 1e9)
    return WORLD.bcast(rate)


def best(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(8):
        PLACE.finish()
        begin = time.perf_counter()
        call()
        PLACE.finish()
        times.append(time.perf_counter() - begin)
    return min(times[2:])


def nccl() -> None:
    """NCCL with several ranks on one GPU, which it allows from 2.30 on when told so."""
    from cupy.cuda import nccl as library

    if not library.available or library.get_version() < 23000:
        version = library.get_version() if library.available else "missing"
        tell(done=f"NCCL {version}: not compared, ranks share a GPU from 2.30 on")
        return
    tell(done=f"NCCL {library.get_version()}")
    ident = WORLD.bcast(library.get_unique_id() if RANK == 0 else None)
    comm = library.NcclCommunicator(SIZE, ident, RANK)

    def call(x: Any) -> None:
        stream = PLACE.xp.cuda.get_current_stream()
        comm.allReduce(
            x.data.ptr, x.data.ptr, x.size, library.NCCL_FLOAT32, library.NCCL_SUM, stream.ptr
        )

    for mib in (1 / 16, 1, 16, 64, 256):
        x = PLACE.xp.empty(int(mib * MIB / 4), np.float32)
        seconds = measured(x, {"NCCL": call}, 7 if mib < 100 else 3)["NCCL"]
        busbw = 2 * (SIZE - 1) / SIZE * x.nbytes / seconds / 1e9
        tell(table="time", ranks=SIZE, mib=mib, contender="NCCL", ms=seconds * 1e3, busbw_gb=busbw)


JOBS = (collectives, safety, leave, timing, nccl)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", choices=[job.__name__ for job in JOBS])
    parser.add_argument("--out", required=True)
    parser.add_argument("--paths", type=lambda text: text.split(","), default=["staged"])
    parser.add_argument("--largest", type=int, default=64, help="MiB")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--direct-mpi", action="store_true", help="MPI takes CuPy arrays")
    parser.add_argument("--host", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    OPTIONS = options()
    PLACE: Any = Host() if OPTIONS.host else Gpu()
    next(job for job in JOBS if job.__name__ == OPTIONS.job)()
    sys.exit(0)
