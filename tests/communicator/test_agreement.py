"""Records of ranks compared, over a fake wire that keeps the order between two ranks."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import pytest

from mpiring.communicator import agreement
from mpiring.communicator.agreement import (
    TAG,
    Agreed,
    Agreement,
    Farewell,
    Patience,
    complaint,
    name_ranks,
)
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import ArgumentError, DtypeError, MismatchError, StallError, TransportError


class Sent:
    def test(self) -> tuple[bool, None]:
        return True, None


class Wire:
    """What an Agreement needs of an mpi4py communicator."""

    def __init__(self, size: int) -> None:
        self.inboxes: list[deque[tuple[int, Any]]] = [deque() for _ in range(size)]

    def rank(self, rank: int) -> Agreement:
        return Agreement(_End(self, rank), ProgressEngine())


class _End:
    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire, self.rank = wire, rank

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return len(self.wire.inboxes)

    def isend(self, message: Any, peer: int, tag: int = TAG) -> Sent:
        assert tag == TAG
        self.wire.inboxes[peer].append((self.rank, message))
        return Sent()

    def improbe(self, tag: int) -> Any:
        assert tag == TAG
        inbox = self.wire.inboxes[self.rank]
        return _Message(*inbox.popleft()) if inbox else None


class _Message:
    def __init__(self, source: int, content: Any) -> None:
        self.source, self.content = source, content

    def recv(self, status: Any) -> Any:
        status.source = self.source  # as mpi4py's Status has it
        return self.content


@pytest.fixture
def ranks() -> list[Agreement]:
    pytest.importorskip("mpi4py.MPI", exc_type=RuntimeError)
    wire = Wire(4)
    return [wire.rank(rank) for rank in range(4)]


def settle(ranks: list[Agreement]) -> None:
    while any([rank.listen() for rank in ranks]):
        pass


def verdicts(ranks: list[Agreement], number: int) -> set[tuple[type, str]]:
    return {(type(v), str(v)) for v in (rank.verdict(number) for rank in ranks)}


def test_equal_records_are_no_error(ranks: list[Agreement]) -> None:
    for rank in ranks:
        rank.open(1, "a call")
    agreed = [Agreed(rank, 1) for rank in ranks[:3]]
    settle(ranks[:3])
    assert not any(each.done() for each in agreed)
    assert ranks[0].silent(1) == [3]
    agreed.append(Agreed(ranks[3], 1))
    settle(ranks)
    assert all(each.done() for each in agreed)


def test_a_rank_that_was_not_asked_answers_once(ranks: list[Agreement]) -> None:
    """One that knows the call goes on without comparing it."""
    for rank in ranks:
        rank.open(7, "a call")
    agreed = Agreed(ranks[2], 7)
    settle(ranks)
    assert agreed.done()
    ranks[2].tell(7)
    settle(ranks)
    assert all(len(rank._told[7]) <= 4 for rank in ranks)


def test_one_that_calls_later_answers_when_it_calls(ranks: list[Agreement]) -> None:
    for rank in ranks[:3]:
        rank.open(1, "a call")
        rank.tell(1)
    settle(ranks)
    assert not ranks[0].heard(1)
    ranks[3].open(1, "a call")
    settle(ranks)
    assert all(rank.heard(1) for rank in ranks)


def test_different_records_are_one_error_for_all(ranks: list[Agreement]) -> None:
    for rank, record in zip(ranks, ("a", "b", "a", "a")):
        rank.open(1, record)
    agreed = Agreed(ranks[0], 1)  # the others are not asked, and hear of it all the same
    settle(ranks)
    assert all(rank.heard(1) and rank.doubtful(1) for rank in ranks)
    words = "ranks disagree about the same call: ranks 0, 2, 3: a; rank 1: b"
    assert verdicts(ranks, 1) == {(MismatchError, words)}
    with pytest.raises(MismatchError):
        agreed.done()


def test_a_complaint_comes_before_a_disagreement(ranks: list[Agreement]) -> None:
    ranks[0].open(1, "a")
    ranks[1].open(1, complaint(DtypeError("buf: no numbers")))
    ranks[2].open(1, complaint(ArgumentError("buf: too short")))
    ranks[3].open(1, complaint(DtypeError("buf: no numbers")))
    for rank in ranks:
        rank.tell(1)
    settle(ranks)
    assert verdicts(ranks, 1) == {(DtypeError, "ranks 1, 3: buf: no numbers")}


def test_what_was_no_error_of_ours_keeps_its_name() -> None:
    assert complaint(ArgumentError("x: y")).endswith(":x: y")
    assert complaint(KeyError("x")).endswith(":KeyError: 'x'")


def test_a_rank_that_has_gone_made_its_last_call(ranks: list[Agreement]) -> None:
    for rank in ranks:
        rank.open(1, "a")
    for rank in ranks[:3]:
        rank.open(2, "b")
    ranks[3].close(Farewell(2, "Free", {30: 2}))
    ranks[3].tell(2)
    settle(ranks)
    assert not any(rank.doubtful(1) for rank in ranks)
    ranks[0].open(3, "c")
    assert ranks[0].records(3) == {0: "c", 3: "Free"}
    for rank in ranks[:3]:
        rank.tell(2)
    settle(ranks)
    words = "ranks disagree about the same call: ranks 0-2: b; rank 3: Free"
    assert verdicts(ranks, 2) == {(MismatchError, words)}
    assert ranks[0].deserters(30, 2) == {}
    assert ranks[0].deserters(30, 3) == {3: "Free"}
    assert ranks[0].deserters(31, 1) == {3: "Free"}


def test_ranks_part_when_nothing_is_on_its_way(ranks: list[Agreement]) -> None:
    for rank in ranks:
        rank.open(1, "a")
    ranks[0].tell(1)
    for rank in ranks[:3]:
        rank.part(2, "whole")
    assert not any(rank.parted(2) for rank in ranks[:3])
    ranks[3].part(2, "damaged")
    assert all(rank.parted(2) for rank in ranks)
    assert ranks[0].records(2) == {0: "whole", 1: "whole", 2: "whole", 3: "damaged"}
    # Not even an answer follows.
    ranks[1].tell(1)
    assert not any(rank._control.wire.inboxes[rank.rank] for rank in ranks)


def test_old_records_are_forgotten(ranks: list[Agreement], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_KEPT", 10)
    for number in range(1, 101):
        for rank in ranks:
            rank.open(number, "a")
        ranks[0].tell(number)
    settle(ranks)
    for rank in ranks:
        rank.forget(before=101)
        assert len(rank._mine) == len(rank._theirs) == 10
    ranks[0]._control.isend((5, "long ago", None), 1)
    settle(ranks)
    assert len(ranks[1]._theirs) == 10


@pytest.mark.parametrize(
    "ranks, words",
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 2, 3, 4, 7, 8], "ranks 0, 2-4, 7, 8"),
    ],
)
def test_ranks_by_name(ranks: list[int], words: str) -> None:
    assert name_ranks(ranks) == words


def test_patience(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("MPIRING_TIMEOUT", raising=False)
    monkeypatch.delenv("MPIRING_STALL_SECONDS", raising=False)
    patience = Patience()
    patience.check(29, lambda: "rank 1 waits")
    assert capsys.readouterr().err == ""
    patience.check(31, lambda: "rank 1 waits")
    assert capsys.readouterr().err == "mpiring: nothing moved for 31 s: rank 1 waits\n"
    patience.check(32, lambda: "rank 1 waits")  # said a moment ago
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("MPIRING_TIMEOUT", "60")
    with pytest.raises(StallError, match="nothing moved for 61 s: rank 1 waits"):
        Patience().check(61, lambda: "rank 1 waits")
    for text in ("-1", "0", "soon", "nan"):
        monkeypatch.setenv("MPIRING_STALL_SECONDS", text)
        with pytest.raises(ArgumentError, match=f"MPIRING_STALL_SECONDS: '{text}' given"):
            Patience()


def test_what_a_call_came_to_after_all_is_told_to_all(ranks: list[Agreement]) -> None:
    """All made the same call, and it went wrong on one of them."""
    for rank in ranks:
        rank.open(7, "allreduce")
    ranks[1].tell(7)
    settle(ranks)
    assert not any(rank.doubtful(7) for rank in ranks)
    ranks[1].amend(7, complaint(TransportError("a message was lost")))
    settle(ranks)
    for rank in ranks:
        assert rank.heard(7)
        error = rank.verdict(7)
        assert type(error) is TransportError and str(error) == "rank 1: a message was lost"


def test_a_wait_does_not_end_while_another_thread_begins_one(ranks: list[Agreement]) -> None:
    """It would be counted, and nobody would listen for it."""
    rank = ranks[0]
    rank.open(1, "a call")
    rank.wait_for(1)
    with rank._engine.lock:
        thread = threading.Thread(target=rank.end_wait)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive()
        rank.wait_for(1)
    thread.join()
    assert rank._engine._actors == [rank]
    rank.end_wait()
    assert rank._engine._actors == []
