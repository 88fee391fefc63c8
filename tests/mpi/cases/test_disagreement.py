"""Ranks that call different things: one error, the same words on every rank, and life goes on."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpiring
from mpiring import Communicator
from mpiring.communicator import agreement
from mpiring.errors import (
    ArgumentError,
    DtypeError,
    MismatchError,
    MpiringError,
    StallError,
)

IN_PLACE = MPI.IN_PLACE
alone = pytest.mark.skipif(MPI.COMM_WORLD.size == 1, reason="one rank agrees with itself")
pytestmark = alone


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that stands still looks around sooner."""
    monkeypatch.setattr("mpiring.communicator.communicator.TELL_AFTER", 0.02)


def ones(count: int, dtype: str = "f4") -> np.ndarray:
    return np.ones(count, dtype)


def read_only() -> np.ndarray:
    data = ones(4)
    data.flags.writeable = False
    return data


Call = tuple[str, tuple[Any, ...]]

#: What the last rank calls instead of ``Allreduce(IN_PLACE, ones(4))``; the error's kind and words.
ODD: dict[str, tuple[Callable[[], Call], type[MpiringError], str]] = {
    "size": (
        lambda: ("Allreduce", (IN_PLACE, ones(2))),
        MismatchError,
        "allreduce of 4 x float32, sum; rank {last}: allreduce of 2 x float32, sum",
    ),
    "dtype": (
        lambda: ("Allreduce", (IN_PLACE, ones(4, "f8"))),
        MismatchError,
        "allreduce of 4 x float32, sum; rank {last}: allreduce of 4 x float64, sum",
    ),
    "dtype, the same bytes": (
        lambda: ("Allreduce", (IN_PLACE, ones(2, "f8"))),
        MismatchError,
        "allreduce of 4 x float32, sum; rank {last}: allreduce of 2 x float64, sum",
    ),
    "operation": (
        lambda: ("Allreduce", (IN_PLACE, ones(4), MPI.MAX)),
        MismatchError,
        "allreduce of 4 x float32, sum; rank {last}: allreduce of 4 x float32, max",
    ),
    "mean": (
        lambda: ("Allreduce", (IN_PLACE, ones(4), mpiring.MEAN)),
        MismatchError,
        "allreduce of 4 x float32, sum; rank {last}: allreduce of 4 x float32, mean",
    ),
    "byte order": (
        lambda: ("Allreduce", (IN_PLACE, ones(4, ">f4"))),
        MismatchError,
        "allreduce of 4 x float32, sum; rank {last}: allreduce of 4 x >f4, sum",
    ),
    "collective": (
        lambda: ("Allgather", (ones(1), ones(MPI.COMM_WORLD.size))),
        MismatchError,
        "allreduce of 4 x float32, sum; rank {last}: allgather of ",
    ),
    "read-only": (
        lambda: ("Allreduce", (IN_PLACE, read_only())),
        ArgumentError,
        "rank {last}: recvbuf: the array is read-only",
    ),
    "two sizes": (
        lambda: ("Allreduce", (ones(3), ones(4))),
        ArgumentError,
        "rank {last}: recvbuf: 4 elements, but sendbuf has 3",
    ),
    "no dtype for it": (
        lambda: ("Allreduce", (IN_PLACE, np.array([None] * 4))),
        DtypeError,
        "rank {last}: recvbuf: dtype object is not numeric",
    ),
    "no array at all": (
        lambda: ("Allreduce", (IN_PLACE, 3.5)),
        ArgumentError,
        "rank {last}: recvbuf: float is no array",
    ),
    "missing root": (
        lambda: ("Bcast", (ones(4), "zero")),
        ArgumentError,
        "rank {last}: root: 'zero' given",
    ),
}


def attempt(call: Callable[[], Any]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("no error")


def same_everywhere(ring: Communicator, error: Exception) -> None:
    everyone = ring.allgather((type(error), str(error)))
    assert set(everyone) == {everyone[0]}


def works(ring: Communicator, form: str = "blocking") -> None:
    """With the very signatures that failed before."""
    for data in (ones(4), ones(2)):
        for _ in range(2):
            data[:] = ring.rank
            if form == "blocking":
                ring.Allreduce(IN_PLACE, data)
            elif form == "non-blocking":
                ring.Iallreduce(IN_PLACE, data).Wait()
            else:
                ring.Allreduce_init(IN_PLACE, data).Start().Wait()
            np.testing.assert_array_equal(data, sum(range(ring.size)))


@pytest.mark.parametrize("form", ["blocking", "non-blocking", "persistent"])
@pytest.mark.parametrize("seen", [False, True], ids=["first", "seen"])
@pytest.mark.parametrize("odd", ODD)
def test_one_rank_calls_something_else(ring: Communicator, odd: str, seen: bool, form: str) -> None:
    calling, kind, words = ODD[odd]
    last = ring.size - 1
    if seen:
        works(ring, form)
        if kind is MismatchError:
            method, arguments = calling()
            if form == "non-blocking":
                getattr(ring, f"I{method.lower()}")(*arguments).Wait()
            else:
                getattr(ring, method)(*arguments)
    method, arguments = calling() if ring.rank == last else ("Allreduce", (IN_PLACE, ones(4)))
    if form == "persistent":
        method = f"{method}_init"
    elif form == "non-blocking":
        method = f"I{method.lower()}"
    error = attempt(lambda: getattr(ring, method)(*arguments).Wait())
    assert type(error) is kind
    assert words.format(last=last) in re.sub("(persistent|non-blocking) ", "", str(error))
    same_everywhere(ring, error)
    works(ring, form)


def test_a_failed_call_leaves_the_arrays_as_they_were(ring: Communicator) -> None:
    last = ring.rank == ring.size - 1
    for count in (4, 300_000):
        data, result = np.full(count + last, 7.0), np.full(count + last, 8.0)
        for call in (
            lambda: ring.Allreduce(IN_PLACE, data),
            lambda: ring.Allreduce(data, result),
            lambda: ring.Iallreduce(data, result).Wait(),
            lambda: ring.Bcast(data, 0),
            lambda: ring.Reduce_scatter(data, result, [count + last] + [0] * (ring.size - 1)),
        ):
            assert isinstance(attempt(call), MismatchError)
            assert (data == 7).all() and (result == 8).all()


def test_every_rank_calls_something_else(ring: Communicator) -> None:
    error = attempt(lambda: ring.Allreduce(IN_PLACE, ones(ring.rank + 1)))
    assert isinstance(error, MismatchError)
    same_everywhere(ring, error)
    for rank in range(ring.size):
        assert f"rank {rank}: allreduce of {rank + 1} x float32" in str(error)
    works(ring)


def test_ranks_that_agree_are_named_together(ring: Communicator) -> None:
    error = attempt(lambda: ring.Allreduce(IN_PLACE, ones(2 if ring.rank == 1 else 4)))
    others = {2: "rank 0", 3: "ranks 0, 2", 5: "ranks 0, 2-4", 8: "ranks 0, 2-7"}[ring.size]
    assert f"{others}: allreduce of 4" in str(error)
    works(ring)


@pytest.mark.parametrize("count", [4, 300_000])
def test_errors_again_and_again(ring: Communicator, count: int) -> None:
    """Short messages of failed calls have arrived where nobody takes them; none turns up later."""
    last = ring.rank == ring.size - 1
    for turn in range(4):
        data = np.full(count, ring.rank + turn, "f4")
        ring.Allreduce(IN_PLACE, data)
        np.testing.assert_array_equal(data, sum(range(ring.size)) + turn * ring.size)
        ring.Allreduce(IN_PLACE, ones(count - 1))
        assert isinstance(
            attempt(lambda: ring.Allreduce(IN_PLACE, ones(count - last))), MismatchError
        )
        request = ring.Iallreduce(IN_PLACE, ones(count - last))
        assert isinstance(attempt(request.Wait), MismatchError)


@pytest.mark.parametrize("count", [4, 300_000])
def test_errors_with_arrays_whose_calls_are_kept(ring: Communicator, count: int) -> None:
    """What was bound for an array before the error sends and receives elsewhere after it."""
    last = ring.rank == ring.size - 1
    data, twin, other = np.empty(count), np.empty(count), np.empty(count - 1)
    for turn in range(4):
        for each in (data, twin, other):
            each.fill(ring.rank + turn)
            ring.Allreduce(IN_PLACE, each)
            np.testing.assert_array_equal(each, sum(range(ring.size)) + turn * ring.size)
            each.fill(1000)  # what an old message would bring
        error = attempt(lambda: ring.Allreduce(IN_PLACE, other if last else data))
        assert isinstance(error, MismatchError)


def test_a_call_left_in_the_middle_keeps_its_array(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MPI may still write there."""
    monkeypatch.setenv("MPIRING_TIMEOUT", "0.05")
    ring = Communicator(comm)
    ring._patience.limit = None
    arrays = [ones(3000)]
    ring.Allreduce(IN_PLACE, arrays[0])  # bound, and remembered by its address
    if ring.rank != 1:
        ring._patience.limit = 0.05
        error = attempt(lambda: ring.Allreduce(IN_PLACE, arrays[0]))
        assert isinstance(error, StallError)
        error.__traceback__ = None
        ring._patience.limit = None
        alive = weakref.ref(arrays.pop())
        gc.collect()
        assert alive() is not None
    comm.Barrier()
    if ring.rank == 1:
        ring.Allreduce(IN_PLACE, arrays[0])
    while ring.engine.active:
        ring.poll()
    assert ((arrays[0] if ring.rank == 1 else alive()) == ring.size**2).all()
    ring.Free()


def test_persistent_and_not(ring: Communicator) -> None:
    call = ring.Allreduce if ring.rank else ring.Allreduce_init
    error = attempt(lambda: call(IN_PLACE, ones(4)))
    assert "rank 0: persistent allreduce of 4" in str(error)
    same_everywhere(ring, error)
    works(ring)


def test_different_roots_and_block_sizes(ring: Communicator) -> None:
    last = ring.rank == ring.size - 1
    n = ring.size
    error = attempt(lambda: ring.Bcast(ones(4), int(last)))
    assert "bcast of 4 x float32 from rank 0" in str(error)
    assert "bcast of 4 x float32 from rank 1" in str(error)
    same_everywhere(ring, error)
    counts = [2] * n
    if last:
        counts[0], counts[-1] = 3, 1
    error = attempt(lambda: ring.Reduce_scatter(ones(2 * n), ones(counts[ring.rank]), counts))
    assert f"rank {n - 1}: reduce_scatter of {2 * n} as [3, " in str(error)
    same_everywhere(ring, error)
    error = attempt(lambda: ring.Allgatherv(ones(counts[ring.rank]), [ones(2 * n), counts]))
    assert f"rank {n - 1}: allgather of {2 * n} as [3, " in str(error)
    same_everywhere(ring, error)
    works(ring)


def test_an_error_of_several_requests_is_raised_once_each(ring: Communicator) -> None:
    last = ring.rank == ring.size - 1
    counts = (4, 5 + last, 6, 7 - last)
    requests = [ring.Iallreduce(IN_PLACE, ones(count)) for count in counts]
    error = attempt(lambda: mpiring.Request.Waitall(requests))
    assert "allreduce of 5" in str(error)
    assert not any(requests)
    mpiring.Request.Waitall(requests)
    works(ring)


def test_who_only_tests_hears_of_it_too(ring: Communicator) -> None:
    works(ring)
    request = ring.Iallreduce(IN_PLACE, ones(4 if ring.rank else 2))

    def until_over() -> None:
        while not request.Test():
            pass

    def until_polled() -> None:
        while request._execution and not request._execution.finished:
            mpiring.poll()
        request.Wait()

    error = attempt([request.Wait, until_over, until_polled][ring.rank % 3])
    assert isinstance(error, MismatchError)
    same_everywhere(ring, error)
    works(ring)


@pytest.fixture
def checked(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    monkeypatch.setenv("MPIRING_CHECK", "1")
    with Communicator(comm) as ring:
        yield ring


def test_every_call_can_be_compared(checked: Communicator) -> None:
    """Then nothing moves even where both signatures are known."""
    works(checked)
    for _ in range(2):
        data = np.full(4 if checked.rank else 2, 7, "f4")
        error = attempt(lambda: checked.Allreduce(IN_PLACE, data))
        assert isinstance(error, MismatchError)
        same_everywhere(checked, error)
        assert (data == 7).all()
        works(checked)


@pytest.fixture
def unchecked(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    monkeypatch.setenv("MPIRING_CHECK", "0")
    with Communicator(comm) as ring:
        yield ring


def test_no_call_need_be_compared(unchecked: Communicator, monkeypatch: Any) -> None:
    """Byte counts still are; and nobody waits to hear from others about its own mistake."""
    works(unchecked)
    silent = unchecked._agreement
    assert silent is not None and not silent._told
    error = attempt(lambda: unchecked.Allreduce(IN_PLACE, "nothing"))
    assert isinstance(error, ArgumentError) and "rank" not in str(error)
    works(unchecked)


def test_settings_are_compared(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    last = comm.rank == comm.size - 1
    bad: list[dict[str, Any]] = [
        {"algorithm": "star"},
        {"segment": 0},
        {"segment": "large"},
        {"progress": "magic"},
    ]
    for options in bad:
        (name,) = options
        error = attempt(lambda: Communicator(comm, **(options if last else {})))
        assert isinstance(error, ArgumentError)
        assert f"rank {comm.size - 1}: {name}: " in str(error)
        everyone = comm.allgather(str(error))
        assert len(set(everyone)) == 1
    for options in ({"algorithm": "ring"}, {"segment": 4096}):
        error = attempt(lambda: Communicator(comm, **(options if last else {})))
        assert "differ between ranks" in str(error)
    monkeypatch.setenv("MPIRING_CHECK", "1" if last else "0")
    assert "MPIRING_CHECK: differ" in str(attempt(lambda: Communicator(comm)))
    monkeypatch.setenv("MPIRING_CHECK", "yes")
    assert "MPIRING_CHECK: 'yes' given" in str(attempt(lambda: Communicator(comm)))
    monkeypatch.setenv("MPIRING_CHECK", "")
    monkeypatch.setenv("MPIRING_TIMEOUT", "soon" if last else "1")
    assert "MPIRING_TIMEOUT: 'soon' given" in str(attempt(lambda: Communicator(comm)))


@pytest.mark.filterwarnings("ignore:Communicator.Free")
@pytest.mark.parametrize("form", ["Allreduce", "Iallreduce", "persistent", "Free"])
def test_a_rank_that_never_calls(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, capfd: Any, form: str
) -> None:
    """It is said who waits in what for whom, and the wait may end with an error."""
    monkeypatch.setenv("MPIRING_STALL_SECONDS", "0.1")
    monkeypatch.setenv("MPIRING_TIMEOUT", "0.4")
    ring = Communicator(comm)
    data = ones(4)
    request = ring.Allreduce_init(IN_PLACE, data) if form == "persistent" else None
    if ring.rank != 1:
        start = {
            "Allreduce": lambda: ring.Allreduce(IN_PLACE, data),
            "Iallreduce": lambda: ring.Iallreduce(IN_PLACE, data).Wait(),
            "persistent": lambda: request and request.Start().Wait(),
            "Free": ring.Free,
        }[form]
        error = attempt(start)
        assert isinstance(error, StallError)
        waiting = f" s: rank {ring.rank} waits in "
        assert str(error).startswith("nothing moved for ")
        assert waiting in str(error)
        assert f"{waiting}{str(error).partition(waiting)[2]}" in capfd.readouterr().err
        if form in ("Allreduce", "Iallreduce"):
            kind = "non-blocking " if form == "Iallreduce" else ""
            assert f"{form} ({kind}allreduce of 4 x float32, sum)" in str(error)
        if form != "persistent":
            assert str(error).endswith("not there yet: rank 1")
    comm.Barrier()
    # Late is not never: what is still under way ends well.
    if form == "persistent":
        assert request is not None
        if ring.rank == 1:
            request.Start()
        request.Wait()
    elif form == "Iallreduce":
        ring.Iallreduce(IN_PLACE, data).Wait() if ring.rank == 1 else None
    elif form == "Allreduce" and ring.rank == 1:
        ring.Allreduce(IN_PLACE, data)
    if form != "Free":
        ring.Free()
        assert data.tolist() == [ring.size] * 4


def test_a_rank_that_leaves_is_not_waited_for(comm: MPI.Intracomm) -> None:
    ring = Communicator(comm)
    if ring.rank == 1:
        with pytest.raises(ZeroDivisionError), ring:
            raise ZeroDivisionError
    else:
        error = attempt(lambda: ring.Allreduce(IN_PLACE, ones(4)))
        assert isinstance(error, MismatchError)
        assert "rank 1: with block left by ZeroDivisionError" in str(error)


def test_free_is_a_call_too(comm: MPI.Intracomm) -> None:
    ring = Communicator(comm)
    error = attempt(lambda: ring.Allreduce(IN_PLACE, ones(4)) if ring.rank else ring.Free())
    assert isinstance(error, MismatchError)
    assert "rank 0: Free; rank" in str(error)
    everyone = comm.allgather(str(error))
    assert len(set(everyone)) == 1


def test_many_signatures_under_way_before_the_others_come(
    ring: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a rank remembers of calls that have ended."""
    monkeypatch.setattr(agreement, "_KEPT", 20)
    requests = []
    if ring.rank == 0:
        requests = [ring.Iallreduce(IN_PLACE, ones(count)) for count in range(1, 150)]
    ring.Barrier()
    if ring.rank:
        requests = [ring.Iallreduce(IN_PLACE, ones(count)) for count in range(1, 150)]
    mpiring.Request.Waitall(requests)


def test_messages_of_a_call_long_ended_are_ignored(
    ring: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_KEPT", 20)
    works(ring)
    mine = ring._agreement
    assert mine is not None
    for _ in range(300):
        ring.Allreduce(IN_PLACE, ones(4))
    assert len(mine._mine) < 300 and len(mine._theirs) < 300
    if ring.rank == 0:
        for number in (1, 2):
            mine._control.isend((number, "long ago", None), 1).wait()
    ring.Barrier()
    time.sleep(0.01)
    works(ring)
