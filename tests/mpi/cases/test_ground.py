"""The ground that all other cases stand on: MPI itself, and the launch."""

from __future__ import annotations

import os

import numpy as np
from mpi4py import MPI


def test_the_launcher_and_the_library_agree_on_the_number_of_ranks(comm: MPI.Intracomm) -> None:
    assert comm.size == int(os.environ.get("MPIRING_TEST_RANKS", comm.size))
    assert comm.allgather(comm.rank) == list(range(comm.size))


def test_a_sum_over_ranks(comm: MPI.Intracomm) -> None:
    total = np.empty(3)
    comm.Allreduce(np.full(3, comm.rank + 1.0), total)
    np.testing.assert_array_equal(total, comm.size * (comm.size + 1) / 2)


def test_messages_stay_on_their_communicator(comm: MPI.Intracomm) -> None:
    other = comm.Dup()
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sending = other.isend("other", right)
    received = comm.sendrecv("mine", right, source=left)
    assert received == "mine"
    assert other.recv(source=left) == "other"
    sending.wait()
    other.Free()
