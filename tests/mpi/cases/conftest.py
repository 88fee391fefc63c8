"""What tests that run on every rank of an MPI job share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mpi4py import MPI


@pytest.fixture
def comm() -> Iterator[MPI.Intracomm]:
    """All ranks, on a communicator of this test's own: no test sees another's messages."""
    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()
