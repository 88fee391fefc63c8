"""A thread that polls, and threads of the caller's own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpiring import Communicator, Request
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import ArgumentError, MismatchError

IN_PLACE = MPI.IN_PLACE


@pytest.fixture
def threaded(comm: MPI.Intracomm) -> Iterator[Communicator]:
    """Collectives that move while the caller computes, on an engine of this test's own."""
    engine = ProgressEngine()
    ring = Communicator(comm, progress="thread", engine=engine)
    yield ring
    ring.Free()
    engine.stop_thread()


@pytest.mark.parametrize("count", [3, 100_000])
def test_the_thread_finishes_what_the_caller_only_begins(
    threaded: Communicator, comm: MPI.Intracomm, count: int
) -> None:
    data = [np.full(count, float(comm.rank)) for _ in range(5)]
    bound = threaded.Allreduce_init(IN_PLACE, data[0])
    requests = [threaded.Iallreduce(IN_PLACE, each) for each in data[1:]]
    bound.Start()
    while threaded.engine.active:
        time.sleep(0.0005)  # and no call of ours
    for each in data:
        np.testing.assert_array_equal(each, sum(range(comm.size)))
    assert all(request.Test() for request in [*requests, bound])


def test_results_are_right_beside_the_thread(threaded: Communicator) -> None:
    n = threaded.size
    for turn in range(40):
        count = (1, 7, 3000, 40_000)[turn % 4]
        data = np.full(count, float(threaded.rank + turn))
        gathered = np.empty(count * n)
        request = threaded.Iallgather(data.copy(), gathered)
        threaded.Allreduce(IN_PLACE, data)
        np.testing.assert_array_equal(data, sum(range(n)) + n * turn)
        request.Wait()
        np.testing.assert_array_equal(gathered, np.repeat(np.arange(n) + turn, count))


def test_an_error_that_the_thread_meets_is_raised_by_who_waits(threaded: Communicator) -> None:
    if threaded.size == 1:
        pytest.skip("one rank agrees with itself")
    for _ in range(2):
        request = threaded.Iallreduce(IN_PLACE, np.ones(3 + (threaded.rank == 1)))
        time.sleep(0.01)
        with pytest.raises(MismatchError, match="ranks disagree"):
            request.Wait()
    data = np.ones(3)
    threaded.Allreduce(IN_PLACE, data)
    np.testing.assert_array_equal(data, threaded.size)


def test_the_thread_can_be_stopped_and_started(comm: MPI.Intracomm) -> None:
    engine = ProgressEngine()
    for _ in range(3):
        with Communicator(comm, progress="thread", engine=engine) as ring:
            thread = engine._thread
            assert thread is not None and thread.is_alive()
            ring.Allreduce(IN_PLACE, np.ones(3))
        engine.stop_thread()
        assert not thread.is_alive()
    with Communicator(comm, engine=engine) as ring:
        ring.Allreduce(IN_PLACE, np.ones(3))


def test_several_threads_each_with_a_communicator(comm: MPI.Intracomm) -> None:
    """MPI allows one collective at a time on a communicator, whichever thread calls it."""
    rings = [Communicator(comm, progress=("poll", "thread")[i % 2]) for i in range(4)]
    failures: list[BaseException] = []

    def work(ring: Communicator, seed: int) -> None:
        try:
            for turn in range(30):
                data = np.full((3, 5000)[turn % 2], float(comm.rank + seed))
                if turn % 3:
                    ring.Allreduce(IN_PLACE, data)
                else:
                    Request.Waitall([ring.Iallreduce(IN_PLACE, data)])
                np.testing.assert_array_equal(data, sum(range(comm.size)) + comm.size * seed)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(ring, i)) for i, ring in enumerate(rings)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for ring in rings:
        ring.Free()
    rings[0].engine.stop_thread()


def test_a_thread_may_wait_for_what_another_began(ring: Communicator) -> None:
    data = np.full(20_000, float(ring.rank))
    requests = [ring.Iallreduce(IN_PLACE, data)]
    thread = threading.Thread(target=requests[0].Wait)
    thread.start()
    requests[0].Wait()
    thread.join()
    np.testing.assert_array_equal(data, sum(range(ring.size)))


def test_progress_is_one_of_two_words(comm: MPI.Intracomm) -> None:
    with pytest.raises(ArgumentError, match="'thread'"):
        Communicator(comm, progress="threads")
