"""Texts exchanged between all ranks: to agree before anything depends on it.

Whatever ranks have to have in common (a layout of buckets, the options of a parameter
server) is put into words, and the words are compared; so the error says what differs,
in the same words everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from mpiring.communicator import Communicator
from mpiring.errors import ArgumentError, MismatchError, MpiringError

T = TypeVar("T")

_COMPLAINT = "!"


def everyone(comm: Communicator, text: str) -> list[str]:
    """The ``text`` of every rank, by rank, on every rank. Collective."""
    octets = np.frombuffer(text.encode(), np.uint8)
    lengths = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([octets.size]), lengths)
    everything = np.empty(int(lengths.sum()), np.uint8)
    comm.Allgatherv(octets, [everything, lengths.tolist()])
    ends = lengths.cumsum().tolist()
    return [everything[end - length : end].tobytes().decode() for end, length in zip(ends, lengths)]


def agree(comm: Communicator, what: str, text: str) -> None:
    """Raise MismatchError on every rank unless ``text`` is the same on all. Collective."""
    texts = everyone(comm, text)
    if len(set(texts)) > 1:
        told = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise MismatchError(f"{what} differ between ranks: {told}")


def together(comm: Communicator, action: Callable[[], T]) -> T:
    """Do something on every rank. If it fails on some, ArgumentError, the same on all."""
    failure = None
    try:
        result = action()
    except (MpiringError, OSError) as error:
        failure = error
    told = everyone(comm, f"{_COMPLAINT}{failure}" if failure else "")
    complaints = {rank: text[1:] for rank, text in enumerate(told) if text}
    if not complaints:
        return result
    first = next(iter(complaints.values()))
    ranks = [rank for rank, text in complaints.items() if text == first]
    where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
    raise ArgumentError(first if len(ranks) == comm.size else where + first) from failure
