"""Ranks compare what they were called with, so that a mistake ends in one error, not a hang.

Every collective call of a communicator has a number, the same on every rank, and
a *record*: method, count, dtype, op. Ranks that call something for the first
time send their record to all others before any data moves, and go on when all
records are in and equal. A rank whose own arguments are wrong sends its
complaint as its record; one that frees the communicator, or ends, says so.

A call seen before is not compared: it costs nothing. If ranks differ there, some
of them stand still, and a rank that stands still looks at the records that have
come, then sends its own: so ranks which wait for different things find out.

Records travel point-to-point on a communicator of their own. A record that
nobody asked for is answered with one's own for that number, once.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from mpiring.errors import ArgumentError, DtypeError, MismatchError, MpiringError, StallError

#: Seconds without movement after which a rank tells the others what it is in.
TELL_AFTER = 1.0
#: Seconds for which a rank that knows of a mistake waits to hear from the others.
HEAR_WITHIN = 5.0
_KEPT = 1024  # records of ended calls that can still be asked for
_COMPLAINT = "!"


class Agreement:
    """The comparison of one communicator's calls over its ranks."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self.rank, self.size = control.Get_rank(), control.Get_size()
        self._mine: dict[int, str] = {}
        self._theirs: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self._told: dict[int, set[int]] = {}
        self._sending: list[Any] = []
        self._last: int | None = None  # the call after which this rank makes none
        self._oldest = 0  # records of calls before this one are forgotten
        #: Ranks that make no call any more, and how they said it.
        self.gone: dict[int, str] = {}

    def open(self, number: int, record: str) -> None:
        """Call ``number`` has begun here, with this record."""
        self._mine[number] = record
        if number in self._theirs:
            self._answer(number, list(self._theirs[number]))

    def close(self, number: int, how: str) -> None:
        """This rank makes no call any more; ``how`` it ended is its last record."""
        self._last = number
        self.open(number, how)

    def forget(self, before: int) -> None:
        """Calls before this number have ended here; all but the last of them are forgotten."""
        while self._oldest < before - _KEPT:
            self._mine.pop(self._oldest, None)
            self._theirs.pop(self._oldest, None)
            self._told.pop(self._oldest, None)
            self._oldest += 1

    def tell(self, number: int) -> None:
        """Send the record of call ``number`` to every rank that has not got it."""
        for peer in range(self.size):
            self._tell(number, peer)

    def _tell(self, number: int, peer: int) -> None:
        told = self._told.setdefault(number, {self.rank})
        if peer not in told:
            told.add(peer)
            message = (number, self._mine[number], number == self._last)
            self._sending.append(self._control.isend(message, peer))

    def listen(self) -> None:
        """Take in the records that have come; answer those that were not asked for."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        while (message := self._control.improbe()) is not None:
            from mpi4py import MPI

            status = MPI.Status()
            number, record, last = message.recv(status)
            peer = status.Get_source()
            if last:
                self.gone[peer] = record
            if number < self._oldest:
                continue
            self._theirs[number][peer] = record
            if number in self._mine:  # if not, ``open`` will find it
                self._answer(number, [peer])

    def _answer(self, number: int, peers: list[int]) -> None:
        """Those whose records differ from this rank's concern all; others want this one's only."""
        if self.doubtful(number):
            self.tell(number)
        for peer in peers:
            self._tell(number, peer)

    def heard(self, number: int) -> bool:
        """Whether the records of all ranks are in."""
        return len(self._theirs[number]) >= self.size - 1

    def doubtful(self, number: int) -> bool:
        """Whether some rank's record differs from this one's."""
        return any(record != self._mine[number] for record in self._theirs[number].values())

    def records(self, number: int) -> dict[int, str]:
        """The record of each rank that is known, in order of ranks."""
        return dict(sorted({**self._theirs[number], self.rank: self._mine[number]}.items()))

    def verdict(self, number: int) -> Exception | None:
        """The error that the records of call ``number`` amount to, in words that are the
        same on every rank; None if they are equal.
        """
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, record in self.records(number).items():
            ranks[record].append(rank)
        complaints = [record for record in ranks if record.startswith(_COMPLAINT)]
        if complaints:
            kind, _, text = complaints[0][1:].partition(":")
            where = name_ranks(ranks[complaints[0]])
            return (DtypeError if kind == "DtypeError" else ArgumentError)(f"{where}: {text}")
        if len(ranks) == 1:
            return None
        told = "; ".join(f"{name_ranks(where)}: {record}" for record, where in ranks.items())
        return MismatchError(f"ranks disagree about the same call: {told}")

    def silent(self, number: int) -> list[int]:
        """Ranks that have not said that they are in call ``number``."""
        return [r for r in range(self.size) if r != self.rank and r not in self._theirs[number]]


def complaint(error: Exception) -> str:
    """The record of a rank whose own arguments are wrong."""
    kind = "DtypeError" if isinstance(error, DtypeError) else "ArgumentError"
    what = "" if isinstance(error, MpiringError) else f"{type(error).__name__}: "
    return f"{_COMPLAINT}{kind}:{what}{error}"


class Agreed:
    """A completion: over when all ranks have sent equal records; raises when they differ."""

    def __init__(self, agreement: Agreement, number: int) -> None:
        self._agreement, self._number = agreement, number
        agreement.tell(number)

    def done(self) -> bool:
        self._agreement.listen()
        if not self._agreement.heard(self._number):
            return False
        error = self._agreement.verdict(self._number)
        if error is not None:
            raise error
        return True


class Patience:
    """What a rank does that stands still: warns, and gives up where it may.

    ``MPIRING_STALL_SECONDS`` (30) is when it says on stderr what it waits for;
    ``MPIRING_TIMEOUT`` (unset: never) when the wait ends with StallError.
    """

    def __init__(self) -> None:
        self.warn_after = _seconds("MPIRING_STALL_SECONDS") or 30.0
        self.limit = _seconds("MPIRING_TIMEOUT")
        self._warned = float("-inf")

    def check(self, seconds: float, tell: Callable[[], str]) -> None:
        """``tell()`` says in words what is waited for."""
        if self.limit is not None and seconds > self.limit:
            raise StallError(f"nothing moved for {seconds:.0f} s: {tell()}")
        now = time.monotonic()
        if seconds > self.warn_after and now - self._warned > self.warn_after:
            self._warned = now
            print(f"mpiring: nothing moved for {seconds:.0f} s: {tell()}", file=sys.stderr)


def _seconds(name: str) -> float | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ArgumentError(f"{name}: {text!r} given; allowed are seconds above 0")
    return seconds


def name_ranks(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}"
