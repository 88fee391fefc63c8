"""Whether ranks may read each other's memory: tried by all of them, when they first meet.

On a ring a rank reads from its left neighbour alone, so that is what it tries: a word that
the neighbour has made up must come, and not merely some bytes, since ranks in different
containers may have equal process numbers. Either all read, or none does.

It works only within one machine, and costs two small collectives of MPI, or five where it does
not work at once.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mpiring.communicator.agreement import name_ranks
from mpiring.communicator.paths import asked
from mpiring.device.remote import Remote, RemoteHostDevice, may_be_read_by, reading
from mpiring.errors import DeviceError, TransportError

#: The environment's word, where the program has none.
VARIABLE = "MPIRING_HOST_PATH"

PATHS = ("auto", "direct", "peer")


def wish(given: str | None) -> str:
    """The path of host arrays that is asked for, of ``PATHS``. ArgumentError."""
    return asked("host_path", given, VARIABLE, PATHS)


def reader(comm: Any, wish: str, alone: bool) -> RemoteHostDevice | None:
    """What reads the memory of the other ranks; None where messages carry host arrays.

    ``comm`` is an mpi4py communicator, ``alone`` tells whether all of it is on one machine.
    ``wish`` is the same on all ranks. Collective. DeviceError if "peer" does not work here.
    """
    if wish == "direct" or comm.Get_size() == 1:
        return None
    wrong = "the ranks are on several machines"
    if alone:
        failed = failures(comm)
        if not failed:
            return RemoteHostDevice()
        who, why = name_ranks(list(failed)), next(iter(failed.values()))
        wrong = f"{who} cannot read the memory of the rank before: {why}"
    if wish == "peer":
        raise DeviceError(f"host_path: 'peer' given, but {wrong}; allowed here are auto, direct")
    return None


def failures(comm: Any) -> dict[int, str]:
    """The ranks of one machine that cannot read their left neighbour's memory, and why.

    Collective over the mpi4py communicator ``comm``.
    """
    found = _tried(comm)
    if found and _may_be_allowed():
        # Linux may let a process be read by those whom it names. The parent of all is the
        # launcher's, and what is allowed to it is allowed to the processes it has started.
        may_be_read_by(os.getppid())
        comm.Barrier()
        found = _tried(comm)
        if found:
            may_be_read_by(0)
    return found


def _may_be_allowed() -> bool:
    """Whether processes decide by themselves who may read them; the same on all of a machine."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as scope:
            return scope.read().strip() == "1"
    except OSError:
        return False


def _tried(comm: Any) -> dict[int, str]:
    word = np.frombuffer(os.urandom(16), np.uint8).copy()
    everyone = comm.allgather((Remote.of(word), word.tobytes()))
    left, told = everyone[comm.Get_rank() - 1]
    seen, failure = np.empty_like(word), ""
    try:
        reading(left, seen)()
    except TransportError as error:
        failure = str(error)
    else:
        if seen.tobytes() != told:
            failure = "another process has its number here"
    all_told = comm.allgather(failure)  # and nobody lets go of its word before all have read
    return {rank: each for rank, each in enumerate(all_told) if each}
