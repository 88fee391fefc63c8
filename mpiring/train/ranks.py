"""What the ranks of a launch do together around the training: begin, agree, refuse, end.

A mistake may show on one rank only, while the others go on to a collective and wait
there for ever. So whatever can go wrong before training starts is *local*, is done by
``together``, and comes out as one error, the same on every rank: rank 0 says it once,
all exit with 2. What goes wrong later, on whichever rank, ends the job by ``abort``.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from mpiring.errors import LaunchError, MpiringError
from mpiring.transport.launcher import disagreement, launched

T = TypeVar("T")

#: Seconds for which ranks that end in an error let rank 0 be the first.
_TO_SAY_IT = 2.0
#: Seconds between a rank's last words and its end: launchers drop what they have not read by then.
_HEARD_AFTER = 0.2


class Refused(MpiringError):
    """A mistake that every rank knows of, and was told in the same words."""


def world() -> Any:
    """MPI's world, or LaunchError with what to do."""
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True  # a look at the launch comes first
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"no MPI library ({error}): pip install 'mpiring[mpich]', or install your "
            "cluster's mpi4py; python -m mpiring.doctor tells more"
        ) from None
    wrong = _would_abort(MPI.Get_library_version())
    if not wrong:
        if not MPI.Is_initialized():
            level = os.environ.get("MPI4PY_RC_THREAD_LEVEL", mpi4py.rc.thread_level)
            MPI.Init_thread(getattr(MPI, f"THREAD_{level.upper()}"))  # as mpi4py would have
        wrong = disagreement(launched(), MPI.COMM_WORLD.Get_size())
    if wrong:
        raise LaunchError(
            f"{wrong}; use the mpirun of the environment that holds mpi4py "
            f"({library()}); python -m mpiring.doctor tells more"
        )
    return MPI.COMM_WORLD


def _would_abort(library_version: str) -> str | None:
    """Why MPI_Init would end this process without a chance to say why, or None: MPICH does where
    it finds PMIx, the interface of Open MPI's launcher, and was not built for it."""
    launch = launched()
    if launch is None or "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return None
    if "MPICH configure" not in library_version or "pmix" in library_version:
        return None
    return f"{launch.launcher} started {launch.size} processes, and MPICH does not understand it"


def library() -> str:
    """The MPI library for a person: ``MPICH 5.0.2``."""
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def together(comm: Any, action: Callable[[], T]) -> T:
    """Do something local on every rank. If it fails on some, Refused on all."""
    failure: Exception | None = None
    try:
        result = action()
    except (MpiringError, OSError, MemoryError) as error:
        failure = error
    told = everyones(comm, str(failure) if failure else "")
    if not any(told):
        return result
    first = next(text for text in told if text)
    ranks = [str(rank) for rank, text in enumerate(told) if text == first]
    where = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}: " if len(ranks) < len(told) else ""
    raise Refused(where + first) from failure


def alike(comm: Any, what: str, mine: Mapping[str, Any]) -> None:
    """Refused on all ranks, naming the first difference, unless ``mine`` is equal on all."""
    everyone = everyones(comm, dict(mine))
    for rank, theirs in enumerate(everyone):
        for name in {**everyone[0], **theirs}:
            ours, other = everyone[0].get(name), theirs.get(name)
            if ours != other:
                raise Refused(
                    f"{what} differ between ranks: {name} is {ours} on rank 0 "
                    f"and {other} on rank {rank}"
                )


def refuse(error: Exception, rank: int) -> int:
    """Say a mistake once; the exit code for it."""
    if rank == 0:
        sys.stderr.write(f"mpiring.train: {error}\n")
        sys.stderr.flush()
    return 2


def refuse_alone(error: Exception) -> int:
    """The same where ranks cannot meet in MPI_Finalize: rank 0 is given time to say it, as
    launchers end all processes when the first one leaves with an error."""
    launch = launched()
    rank = launch.rank if launch else 0
    if rank:
        time.sleep(_TO_SAY_IT)
    return refuse(error, rank)


def abort(comm: Any) -> int:
    """The traceback of the error at hand, whole, its rank on each line; the end of all ranks."""
    lines = traceback.format_exc().rstrip().split("\n")
    rank = comm.Get_rank()
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
    sys.stderr.flush()
    time.sleep(_HEARD_AFTER)
    comm.Abort(1)
    return 1


def everyones(comm: Any, value: Any) -> list[Any]:
    """Every rank's value. Gives the core away until all are there: MPI's own wait would spin,
    and take it from a rank that is still reading its data."""
    arrived = comm.Ibarrier()
    while not arrived.Test():
        time.sleep(0.001)
    return comm.allgather(value)
