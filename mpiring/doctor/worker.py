"""One rank looks at itself and at its MPI: ``python -m mpiring.doctor.worker``.

Started by each process of the doctor, in that process's own environment, so that
it *is* the rank that the launcher meant. It reports what it knows before each
step that may end it: first this process, then the library before it is started,
then the library as started, and at last, on rank 0, all ranks.

With ``--cupy`` it tries CuPy instead, alone.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
from dataclasses import asdict, replace
from typing import Any

from mpiring.doctor.facts import MPI_PACKAGES, THREADS, Mpi, Rank
from mpiring.errors import DeviceError
from mpiring.transport import child, cudriver

_CUPY = re.compile(r"cupy(-(cuda|rocm).*)?")
_LIBMPI = re.compile(r"libmpi(ch)?\.so(\.\d+)*")


def main() -> None:
    child.begin()
    if "--cupy" in sys.argv[1:]:
        _try_cupy()
        return
    rank = look_around()
    child.report(rank=asdict(rank))
    try:
        import mpi4py
    except ImportError as error:
        child.report(trouble="no mpi4py", text=str(error))
        return
    mpi4py.rc.initialize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        child.report(trouble="no library", text=str(error))
        return
    mpi = _library(MPI, mpi4py.__version__)
    child.report(mpi=asdict(mpi))  # known, even if starting it is the last thing we do
    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    mpi = replace(mpi, threads=THREADS[_levels(MPI).index(level)], query=_query(mpi.path))
    world = MPI.COMM_WORLD
    near = world.Split_type(MPI.COMM_TYPE_SHARED)
    rank = replace(
        rank,
        rank=world.Get_rank(),
        local_rank=near.Get_rank(),
        library=mpi.library,
        unread=_unread(near),
    )
    near.Free()
    everyone = world.gather(asdict(rank), root=0)
    child.report(mpi=asdict(mpi), world_rank=rank.rank, world_size=world.Get_size())
    if everyone is not None:
        child.report(ranks=everyone)
    MPI.Finalize()


def _unread(near: Any) -> str | None:
    """Why this rank cannot read the memory of another one of its host."""
    if near.Get_size() == 1:
        return None
    from mpiring.communicator.neighbours import failures

    return failures(near).get(near.Get_rank(), "")


def look_around() -> Rank:
    """What this process knows without MPI."""
    size, free = _shared_memory()
    gpus: list[cudriver.Gpu] = []
    error = ""
    if cudriver.version() is not None:
        try:
            gpus = cudriver.Driver().gpus()
            error = "" if gpus else cudriver.NO_GPU
        except DeviceError as said:
            error = str(said)
    return Rank(
        host=socket.gethostname(),
        cores=_cores(),
        quota=_quota(),
        python=platform.python_version(),
        executable=sys.executable,
        packages=_packages(),
        numpy=_numpy(),
        shm_size=size,
        shm_free=free,
        cuda=cudriver.version(),
        driver=cudriver.kernel_module(),
        gpus=tuple(gpus),
        gpu_error=error,
    )


def _cores() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _quota() -> float | None:
    """How many cores' time the control group (version 2) grants, or None for no limit."""
    folders = ["/sys/fs/cgroup"]
    try:
        with open("/proc/self/cgroup") as lines:
            folders += ["/sys/fs/cgroup" + line.strip()[3:] for line in lines if line[:3] == "0::"]
    except OSError:
        pass
    granted = []
    for folder in folders:
        try:
            with open(f"{folder}/cpu.max") as file:
                quota, period = file.read().split()
            granted.append(int(quota) / int(period))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(granted, default=None)


def _packages() -> dict[str, str]:
    """Installed distributions of CuPy and MPI libraries."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _CUPY.fullmatch(name) or name in MPI_PACKAGES:
            found[name] = distribution.version
    return dict(sorted(found.items()))


def _numpy() -> str:
    try:
        return str(importlib.import_module("numpy").__version__)
    except ImportError:
        return ""


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize


def _library(MPI: Any, mpi4py: str) -> Mpi:
    vendor, version = MPI.get_vendor()
    return Mpi(
        vendor=vendor,
        version=".".join(map(str, version)),
        standard=".".join(map(str, MPI.Get_version())),
        mpi4py=mpi4py,
        library=MPI.Get_library_version().strip().rstrip("\0"),
        path=_path(),
    )


def _path() -> str:
    """The file from which the MPI library was loaded, or an empty string."""
    try:
        with open("/proc/self/maps") as maps:
            loaded = [line.split(maxsplit=5)[-1].strip() for line in maps]
    except OSError:
        return ""
    return next((file for file in loaded if _LIBMPI.fullmatch(os.path.basename(file))), "")


def _query(path: str) -> bool | None:
    """What ``MPIX_Query_cuda_support`` says, an extension that several libraries share."""
    try:
        query = ctypes.CDLL(path or None).MPIX_Query_cuda_support
    except (OSError, AttributeError):
        return None
    return bool(query())


def _levels(MPI: Any) -> list[int]:
    return [getattr(MPI, f"THREAD_{level}") for level in THREADS]


def _try_cupy() -> None:
    """Import CuPy and, where there is a GPU, run a kernel: each fails in ways of its own."""
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:  # a broken installation raises what it likes
        child.report(error=f"import: {_line(error)}")
        return
    child.report(version=cupy.__version__)
    if cudriver.version() is None:
        return
    try:
        total = int((cupy.arange(1000, dtype="f4") * 2).sum())
        if total != 999_000:
            child.report(error=f"a sum on the GPU gave {total}, not 999000")
    except Exception as error:
        child.report(error=f"first kernel: {_line(error)}")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"


if __name__ == "__main__":
    main()
