"""What all tests share."""

from __future__ import annotations

import os

import pytest

from tests.launch import NAMES, Installation, require

# Ranks, real or virtual, share few cores; and a sum of floats must not depend on how many
# threads the linear algebra happens to use. Read once, when NumPy is first imported.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")


@pytest.fixture(params=NAMES)
def mpi(request: pytest.FixtureRequest) -> Installation:
    """Each MPI installation in turn; skipped where there is none of that name."""
    return require(request.param)
