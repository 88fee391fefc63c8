"""Run every case in ``cases/`` on real ranks, under each MPI and at each number of ranks.

One launch runs them all: starting MPI costs more than most cases do.
"""

from __future__ import annotations

import os

import pytest

from tests.launch import Installation, launch

CASES = "tests/mpi/cases"

#: Alone, a pair, odd counts that divide nothing evenly, and more ranks than cores.
RANKS = (1, 2, 3, 5, 8)

SECONDS = 300


@pytest.mark.timeout(SECONDS + 30)
@pytest.mark.parametrize("ranks", RANKS)
def test_cases(mpi: Installation, ranks: int) -> None:
    # MPIRING_CASES narrows a run while one writes a case: "-k ring", or a file.
    chosen = os.environ.get("MPIRING_CASES", "").split()
    launch(
        ranks,
        ["-m", "tests.mpi.runner", CASES, "-v", "--color=no", *chosen],
        mpi=mpi,
        timeout=SECONDS,
        env={"MPIRING_TEST_RANKS": str(ranks)},
    ).check()
