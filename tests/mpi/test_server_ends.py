"""How programs with a parameter server end, as the launcher sees it."""

from __future__ import annotations

import textwrap

import pytest

from tests.launch import Installation, launch

PROGRAM = """
import sys
import numpy as np
from mpi4py import MPI
import mpiring

class Plain:
    def __init__(self, count, dtype): pass
    def step(self, values, gradients): values -= gradients

rank, array, ones = MPI.COMM_WORLD.rank, np.zeros(200_000), np.ones(200_000)

def say(text):
    sys.stdout.write(f"rank {rank} {text}\\n")
    sys.stdout.flush()

def server(**options):
    return mpiring.ParameterServer(MPI.COMM_WORLD, [array], optimizer=Plain, **options)
"""


def program(text: str) -> list[str]:
    return ["-c", PROGRAM + textwrap.dedent(text)]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("servers", ["'colocated'", "1"])
def test_a_worker_that_raises(mpi: Installation, mode: str, servers: str) -> None:
    """The others come to their end, then the job ends with the error: nothing hangs or stays."""
    done = launch(
        3,
        program(f"""
            with server(mode="{mode}", servers={servers}) as it:
                for step in range(6 if it.is_worker else 0):
                    it.push(0, ones)
                    if rank == 0 and step == 2:
                        raise ValueError("on purpose")
                    it.step()
                if it.is_worker:
                    say("took its steps")
            """),
        mpi=mpi,
    )
    assert done.returncode != 0
    assert "rank 1 took its steps" in done.stdout and "rank 0 took" not in done.stdout
    assert "mpiring: rank 0 leaves its parameter server by ValueError: on purpose" in done.stderr
    assert "ValueError: on purpose\n" in done.stderr


def test_nobody_closes_it(mpi: Installation) -> None:
    """The end of the program is the end of the server too."""
    done = launch(
        3,
        program("""
            it = server(mode="async")
            for _ in range(2):
                it.push(0, ones)
                it.step()
            say("is here")
            """),
        mpi=mpi,
    ).check()
    assert done.stdout.count("is here") == 3


def test_an_interrupt_is_not_waited_for(mpi: Installation) -> None:
    done = launch(
        2,
        program("""
            with server() as it:
                it.push(0, ones)
                it.step()
                if rank == 0:
                    raise KeyboardInterrupt
                it.push(0, ones)
                it.step()
            """),
        mpi=mpi,
        timeout=30,
    )
    assert done.returncode != 0
