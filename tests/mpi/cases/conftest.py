"""What tests that run on every rank of an MPI job share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi4py import MPI

from mpiring import Communicator


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """All ranks, on a communicator of this test's own: no test sees another's messages."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


@pytest.fixture
def ring(comm: MPI.Intracomm) -> Iterator[Communicator]:
    """The same ranks, with our collectives."""
    ring = Communicator(comm)
    yield ring
    ring.Free()
