"""Whether ranks may read each other's memory: tried by all of them, when they first meet.

On a ring a rank reads from its left neighbour alone, so that is what it tries: a word that
the neighbour has made up must come, and not merely some bytes, since ranks in different
containers may have equal process numbers. Either all read, or none does.

It works only within one machine, and costs two small collectives of MPI.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mpiring.communicator.agreement import name_ranks
from mpiring.device.remote import RemoteHostDevice, may_be_read_by
from mpiring.errors import ArgumentError, DeviceError, TransportError

#: The environment's word, where the program has none.
VARIABLE = "MPIRING_HOST_PATH"

PATHS = ("auto", "direct", "peer")


def wish(given: str | None) -> str:
    """What the program, or else the environment, asks for. ArgumentError naming the one of them."""
    name, value = (
        ("host_path", given) if given is not None else (VARIABLE, os.environ.get(VARIABLE))
    )
    value = value or "auto"
    if value not in PATHS:
        raise ArgumentError(f"{name}: {value!r} given; allowed are {', '.join(PATHS)}")
    return value


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
    if found:
        # Linux may let a process be read by those whom it names. The parent of all is the
        # launcher's, and what is allowed to it is allowed to the processes it has started.
        may_be_read_by(os.getppid())
        comm.Barrier()
        found = _tried(comm)
    return found


def _tried(comm: Any) -> dict[int, str]:
    device = RemoteHostDevice()
    word = np.frombuffer(os.urandom(16), np.uint8).copy()
    everyone = comm.allgather((device.export(word), word.tobytes()))
    (handle, start), told = everyone[comm.Get_rank() - 1]
    seen, failure = np.empty_like(word), ""
    try:
        device.copy(device.mapped(handle, start, word.size, word.dtype), seen).start()
    except TransportError as error:
        failure = str(error)
    else:
        if seen.tobytes() != told:
            failure = "another process has its number here"
    all_told = comm.allgather(failure)  # and nobody lets go of its word before all have read
    return {rank: each for rank, each in enumerate(all_told) if each}
