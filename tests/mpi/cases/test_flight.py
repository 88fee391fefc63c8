"""What is under way: handles that are dropped, traffic of others, many at once, the end."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import Communicator, Request
from mpiring.errors import ArgumentError
from mpiring.transport.mpi import MpiTransport

IN_PLACE = MPI.IN_PLACE


def ones(count: int) -> np.ndarray:
    return np.ones(count, "f4")


@pytest.fixture
def dropping(comm: MPI.Intracomm) -> Iterator[Communicator]:
    """A communicator whose requests need not be waited for."""
    ring = Communicator(comm)
    yield ring
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        ring.Free()


@pytest.mark.parametrize("count", [3, 100_000])
def test_a_dropped_handle_of_a_temporary(dropping: Communicator, count: int) -> None:
    """Memory that is given back while MPI writes into it would show in what is made there next."""
    for _ in range(6):
        dropping.Iallreduce(np.full(count, 7.0), np.empty(count))
        dropping.Iallgather(np.full(count, 7.0), np.empty(count * dropping.size))
        gc.collect()
        fresh = [np.zeros(count) for _ in range(4)]
        dropping.Barrier()
        assert not any(each.any() for each in fresh)
    kept = np.full(count, dropping.rank, "f8")
    dropping.Iallreduce(IN_PLACE, kept)
    dropping.Allreduce(IN_PLACE, np.empty(1))  # what came before is over only once all polled
    while dropping.engine.active:
        dropping.poll()
    np.testing.assert_array_equal(kept, sum(range(dropping.size)))


def test_the_callers_own_receives_never_see_our_traffic(
    comm: MPI.Intracomm, ring: Communicator
) -> None:
    landing = np.full(100_000, -1.0)
    mine = comm.Irecv(landing, MPI.ANY_SOURCE, MPI.ANY_TAG)
    for count in (1, 40_000):
        data = np.full(count, ring.rank, "f8")
        ring.Allreduce(IN_PLACE, data)
        np.testing.assert_array_equal(data, sum(range(ring.size)))
        ring.Allreduce_init(IN_PLACE, data).Start().Wait()
        ring.Iallgather(data, np.empty(count * ring.size)).Wait()
    assert not mine.Test() and (landing == -1).all()
    assert comm.iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) is False
    comm.Send(np.full(3, 5.0), comm.rank, 9)
    mine.Wait()
    assert landing[:4].tolist() == [5, 5, 5, -1]


def test_sub_communicators(comm: MPI.Intracomm) -> None:
    parts = [comm.Split(comm.rank % 2, -comm.rank), comm.Split(comm.rank // 2), comm.Dup()]
    rings = [Communicator(part) for part in (*parts, MPI.COMM_SELF)]
    datas = [np.full(1000, float(comm.rank + 1)) for _ in rings]
    requests = [ring.Iallreduce(IN_PLACE, data) for ring, data in zip(rings, datas)]
    Request.Waitall(requests[::-1])
    for ring, data in zip(rings, datas):
        np.testing.assert_array_equal(data, ring.comm.allreduce(comm.rank + 1.0))
    for ring in rings:
        ring.Free()
    for part in parts:
        part.Free()


def test_many_communicators_one_after_another(comm: MPI.Intracomm) -> None:
    """MPI gives the tag space of one that is freed to the next."""
    for turn in range(10):
        with Communicator(comm) as ring, Communicator(ring) as other:
            assert ring.comm is other.comm is comm
            data, more = np.full(5, float(turn)), np.full(7, float(turn))
            request = ring.Iallreduce(IN_PLACE, data)
            other.Allreduce(IN_PLACE, more)
            request.Wait()
            assert (data == turn * ring.size).all() and (more == turn * ring.size).all()


def test_calls_that_are_never_waited_for_leave_nothing_behind(comm: MPI.Intracomm) -> None:
    ring = Communicator(comm)
    data = ones(8)
    grown = []
    for _ in range(4):
        for i in range(150):
            result = data if i % 2 else np.empty_like(data)
            request = ring.Iallreduce(np.full(8, i, "f4"), result)
            if i % 2:
                request.Wait()
                np.testing.assert_array_equal(data, i * ring.size)
        gc.collect()
        assert len(ring._flying) <= 2 * (ring.engine.active + 150)
        grown.append(len(gc.get_objects()))
    # Kept for a call that leaks: tens of objects, for 450 calls.
    assert grown[-1] < grown[0] + 4000
    with pytest.warns(RuntimeWarning, match=f"300 requests of rank {ring.rank} were never waited"):
        ring.Free()


def test_in_flight_all_at_once_and_ended_in_any_order(ring: Communicator) -> None:
    datas = [np.full(count, float(ring.rank)) for count in (1, 50_000, 3, 20_000, 0, 7, 100_000)]
    requests = [ring.Iallreduce(IN_PLACE, data) for data in datas]
    order = [(i * 3 + ring.rank) % 7 for i in range(7)]
    for i in order:
        requests[i].Wait()
        np.testing.assert_array_equal(datas[i], sum(range(ring.size)))


def test_many_calls_with_more_ranks_than_cores(ring: Communicator) -> None:
    data = ones(4)
    for _ in range(1000):
        ring.Allreduce(IN_PLACE, data)
        data /= ring.size
    np.testing.assert_array_equal(data, 1)


def test_tags_that_come_again(comm: MPI.Intracomm) -> None:
    """A tag is used again only after what had it has ended here."""
    transport = MpiTransport(comm)
    transport.slots = 32
    with Communicator(transport, algorithm="ring", segment=32) as ring:
        assert ring._turns == 4
        # Equal signatures, so that tags and messages would match whatever call they belong to.
        datas = [np.full(60, float(comm.rank + turn)) for turn in range(30)]
        requests = [ring.Iallreduce(IN_PLACE, data) for data in datas]
        assert len({execution.binding.slot for execution in ring.engine._active}) <= 4
        for turn, request in enumerate(requests):
            request.Wait()
            np.testing.assert_array_equal(datas[turn], sum(range(comm.size)) + comm.size * turn)
        persistent = [ring.Allreduce_init(IN_PLACE, data) for data in datas]
        for turn, request in enumerate(persistent):
            before = datas[turn] * comm.size
            request.Start().Wait()
            request.Free()
            np.testing.assert_array_equal(datas[turn], before)


def test_every_tag_is_one_that_mpi_allows(ring: Communicator, comm: MPI.Intracomm) -> None:
    highest = comm.Get_attr(MPI.TAG_UB)
    ring._calls = 10 * highest - 3  # ten times around
    for _ in range(3):
        for count in (3, 5):
            data = np.full(count, float(comm.rank))
            ring.Iallreduce(IN_PLACE, data).Wait()
            ring.Allreduce_init(IN_PLACE, data).Start().Wait()
            ring.Allreduce(IN_PLACE, data)
            np.testing.assert_array_equal(data, sum(range(comm.size)) * comm.size**2)


def test_requests_in_lists(ring: Communicator) -> None:
    datas = [np.full(4, float(ring.rank)) for _ in range(6)]
    requests = [ring.Iallreduce(IN_PLACE, data) for data in datas]
    assert all(requests)
    done = set()
    for _ in requests:
        done.add(Request.Waitany(requests))
    assert done == set(range(6)) and not any(requests)
    assert Request.Waitany(requests) == MPI.UNDEFINED
    requests = [ring.Iallreduce(IN_PLACE, data) for data in datas]
    while not Request.Testall(requests):
        pass
    assert not any(requests)
    requests = [ring.Iallreduce(IN_PLACE, data) for data in datas]
    assert Request.waitall(requests) == [None] * 6
    assert Request.testall(requests) == (True, [None] * 6)
    for some in (Request.Waitsome, Request.Testsome, lambda all_: Request.testsome(all_)[0]):
        requests = [ring.Iallreduce(IN_PLACE, data) for data in datas]
        ended: list[int] = []
        while (indices := some(requests)) is not None:
            assert not any(requests[index] for index in indices)
            ended += indices
        assert sorted(ended) == list(range(6)) and not any(requests)
    requests, ended = [ring.Iallreduce(IN_PLACE, data) for data in datas], []
    while any(requests):
        index, one = Request.Testany(requests)
        assert one == (index != MPI.UNDEFINED)
        ended += [index] * one
    assert sorted(ended) == list(range(6))
    assert Request.testany(requests) == (MPI.UNDEFINED, True, None)
    assert Request.waitsome(requests) == (None, None)
    request = ring.Iallreduce(IN_PLACE, datas[0])
    with pytest.raises(ArgumentError, match="cannot be cancelled"):
        request.Cancel()
    while not request.test()[0]:
        pass
    assert request.wait() is None and request.Test() and request.Wait()
    for data in datas:
        np.testing.assert_array_equal(data[1:], data[0])


def test_persistent_requests(ring: Communicator) -> None:
    datas = [np.full(count, 1.0) for count in (3, 30_000)]
    requests = [ring.Allreduce_init(IN_PLACE, data) for data in datas]
    assert all(request.Test() for request in requests)  # inactive ones are over, as in MPI
    assert Request.Waitany(requests) == MPI.UNDEFINED
    for turn in range(3):
        Request.Startall(requests)
        assert {Request.Waitany(requests), Request.Waitany(requests)} == {0, 1}
        for data in datas:
            np.testing.assert_array_equal(data, ring.size ** (turn + 1))
    if ring.size > 1:
        ring.Barrier()
        if ring.rank == 0:
            requests[1].Start()
            with pytest.raises(ArgumentError, match="still under way"):
                requests[1].Start()
        ring.Barrier()
        if ring.rank:
            requests[1].Start()
        requests[1].Wait()
    for request in requests:
        request.Free()
        with pytest.raises(ArgumentError, match="not a persistent request, or already freed"):
            request.Start()
    request = ring.Iallreduce(IN_PLACE, datas[0])
    with pytest.raises(ArgumentError, match="not a persistent request"):
        request.Start()
    request.Wait()


def test_mpi_does_not_take_our_requests(ring: Communicator) -> None:
    request = ring.Iallreduce(IN_PLACE, ones(3))
    for call in (MPI.Request.Waitall, MPI.Request.Testall, MPI.Request.Waitany):
        with pytest.raises(TypeError, match="Request"):
            call([request])
    request.Wait()


def test_nothing_is_on_its_way_when_a_communicator_is_freed(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next communicator gets its tag space, and would take what comes late for its own."""
    ring = Communicator(comm)
    ring.Allreduce(IN_PLACE, ones(4))
    agreement = ring._agreement
    assert agreement is not None
    meet, leave = ring._meet, ring._leave

    def meet_and_answer_late(number: int, label: str) -> None:
        meet(number, label)
        agreement._told.clear()
        agreement.tell(1)

    def look_and_leave() -> None:
        comm.Barrier()
        assert not any(each.iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG) for each in ring._private)
        leave()

    monkeypatch.setattr(ring, "_meet", meet_and_answer_late)
    monkeypatch.setattr(ring, "_leave", look_and_leave)
    ring.Free()


def test_free(comm: MPI.Intracomm) -> None:
    ring = Communicator(comm)
    data, more = np.full(50_000, 1.0), np.full(3, 1.0)
    request = ring.Iallreduce(IN_PLACE, data)
    persistent = ring.Allreduce_init(IN_PLACE, more).Start()
    with pytest.warns(RuntimeWarning, match=f"1 requests of rank {comm.rank} were never waited"):
        ring.Free()
    np.testing.assert_array_equal(data, comm.size)
    np.testing.assert_array_equal(more, comm.size)
    request.Wait()
    persistent.Wait()
    ring.Free()
    for call in (
        lambda: ring.Allreduce(IN_PLACE, data),
        lambda: ring.Iallreduce(IN_PLACE, data),
        lambda: ring.Allreduce_init(IN_PLACE, data),
        lambda: ring.Reduce_scatter(data, data),
        persistent.Start,
        ring.private_transport,
    ):
        with pytest.raises(ArgumentError, match="freed"):
            call()
    assert comm.allreduce(1) == comm.size  # the caller's own is as it was


def test_requests_may_outlive_the_communicator(comm: MPI.Intracomm) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with Communicator(comm) as ring:
            requests = [ring.Iallreduce(IN_PLACE, ones(5)) for _ in range(5)]
            bound = ring.Allreduce_init(IN_PLACE, ones(5))
    Request.Waitall(requests)
    bound.Free()
    del bound, requests, ring
    gc.collect()


def test_a_program_for_mpi4py_runs_as_it_is(comm: MPI.Intracomm) -> None:
    """``comm = Communicator(comm)``, and nothing else."""
    given = comm
    comm = Communicator(comm)
    assert (comm.rank, comm.size) == (given.rank, given.size)
    assert (comm.Get_rank(), comm.Get_size()) == (given.rank, given.size)
    assert comm.name == given.name and comm.group.size == given.size
    assert comm.Get_attr(MPI.TAG_UB) == given.Get_attr(MPI.TAG_UB)
    assert comm.bcast({"a": 1} if comm.rank == 0 else None) == {"a": 1}
    assert comm.allreduce(comm.rank, MPI.MAX) == comm.size - 1
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    landing = np.empty(2)
    comm.Sendrecv(np.full(2, float(comm.rank)), right, 5, landing, left, 5)
    assert (landing == left).all()
    gathered = comm.gather(comm.rank, root=0)
    assert gathered == (list(range(comm.size)) if comm.rank == 0 else None)
    part = comm.Split(comm.rank % 2)
    part.Barrier()
    part.Free()
    comm.Barrier()
    comm.barrier()
    info = MPI.Info.Create()
    data = np.full(3, 1.0)
    comm.Allreduce_init(IN_PLACE, data, MPI.SUM, info).Start().Wait()
    comm.Bcast_init(data, 0, info).Start().Wait()
    np.testing.assert_array_equal(data, comm.size)
    info.Free()
    with pytest.raises(AttributeError, match="no_such_method"):
        comm.no_such_method()
    comm.Free()


def test_a_barrier_moves_what_others_wait_for(ring: Communicator) -> None:
    """MPI makes its own progress in a barrier, so a program may rely on it."""
    data = np.full(100_000, 1.0)
    request = ring.Iallreduce(IN_PLACE, data)
    if ring.rank == 0:
        ring.Barrier()
        request.Wait()
    else:
        request.Wait()
        ring.Barrier()
    np.testing.assert_array_equal(data, ring.size)


def test_communicators_that_are_none(comm: MPI.Intracomm) -> None:
    with pytest.raises(ArgumentError, match="an intracommunicator is needed"):
        Communicator(MPI.COMM_NULL)
    if comm.size > 1:
        half = comm.Split(comm.rank % 2)
        between = half.Create_intercomm(0, comm, (comm.rank + 1) % 2)
        with pytest.raises(ArgumentError, match="an intracommunicator is needed"):
            Communicator(between)
        between.Free()
        half.Free()


def test_polling_is_for_everybody(ring: Communicator) -> None:
    data = np.full(40_000, 1.0)
    request = ring.Iallreduce(IN_PLACE, data)
    while ring.engine.active:
        mpiring.poll()
    np.testing.assert_array_equal(data, ring.size)
    assert request.Test()
    assert ring.poll() is False
