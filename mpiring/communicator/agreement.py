"""Ranks compare what they were called with, so that a mistake ends in one error, not a hang.

Every collective call of a communicator has a number, the same on every rank, and
a *record*: method, count, dtype, op. Ranks that call something for the first
time send their record to all others before any data moves, and go on when all
records are in and equal. A rank whose own arguments are wrong sends its
complaint as its record.

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
from typing import Any

from mpiring.errors import ArgumentError, DtypeError, MismatchError, StallError

#: Seconds without movement after which a rank tells the others what it is in.
TELL_AFTER = 1.0
#: Seconds for which a rank with wrong arguments waits to hear from the others.
HEAR_WITHIN = 5.0
_KEPT = 1024  # records of ended calls that can still be asked for
_COMPLAINT = "!"


class Agreement:
    """The comparison of one communicator's calls over its ranks."""

    def __init__(self, control: Any) -> None:
        self._control = control
        self.rank, self.size = control.Get_rank(), control.Get_size()
        self._mine: list[tuple[int, str]] = [(0, "")] * _KEPT  # by number, the latest ones
        self._theirs: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self._told: dict[int, set[int]] = {}
        self._latest = 0
        self._sending: list[Any] = []

    def open(self, number: int, record: str) -> None:
        """Call ``number`` has begun here, with this record."""
        self._mine[number % _KEPT] = (number, record)
        self._latest = number

    def _record(self, number: int) -> str | None:
        """What this rank called as ``number``, if that is neither to come nor long ago."""
        kept, record = self._mine[number % _KEPT]
        return record if kept == number else None

    def tell(self, number: int) -> None:
        """Send the record of call ``number`` to every rank that has not got it."""
        for peer in range(self.size):
            self._tell(number, peer)

    def _tell(self, number: int, peer: int) -> None:
        told = self._told.setdefault(number, {self.rank})
        if peer not in told:
            told.add(peer)
            message = (number, self._record(number))
            self._sending.append(self._control.isend(message, peer))

    def listen(self) -> None:
        """Take in the records that have come; answer those that were not asked for."""
        self._sending = [request for request in self._sending if not request.test()[0]]
        for old in [number for number in self._theirs if number <= self._latest - _KEPT]:
            del self._theirs[old]
            self._told.pop(old, None)
        while (message := self._control.improbe()) is not None:
            from mpi4py import MPI

            status = MPI.Status()
            number, record = message.recv(status)
            peer = status.Get_source()
            self._theirs[number][peer] = record
            mine = self._record(number)
            if mine is None:
                continue  # not called here yet: ``open`` will find it
            if mine == record:
                self._tell(number, peer)
            else:
                self.tell(number)

    def heard(self, number: int) -> bool:
        """Whether the records of all ranks are in."""
        return len(self._theirs[number]) >= self.size - 1

    def doubtful(self, number: int) -> bool:
        """Whether some rank's record differs from this one's."""
        return any(record != self._record(number) for record in self._theirs[number].values())

    def verdict(self, number: int) -> Exception | None:
        """The error that the records of call ``number`` amount to, in words that are the
        same on every rank; None if they are equal.
        """
        records = {**self._theirs[number], self.rank: self._record(number) or ""}
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank in sorted(records):
            ranks[records[rank]].append(rank)
        complaints = [record for record in ranks if record.startswith(_COMPLAINT)]
        if complaints:
            kind, _, text = complaints[0][1:].partition(":")
            where = _ranks(ranks[complaints[0]])
            return (DtypeError if kind == "DtypeError" else ArgumentError)(f"{where}: {text}")
        if len(ranks) == 1:
            return None
        told = "; ".join(f"{_ranks(where)}: {record}" for record, where in ranks.items())
        return MismatchError(f"ranks disagree about the same call: {told}")

    def silent(self, number: int) -> list[int]:
        """Ranks that have not said that they are in call ``number``."""
        return [r for r in range(self.size) if r != self.rank and r not in self._theirs[number]]


def complaint(error: Exception) -> str:
    """The record of a rank whose own arguments are wrong."""
    kind = "DtypeError" if isinstance(error, DtypeError) else "ArgumentError"
    return f"{_COMPLAINT}{kind}:{error}"


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
    """What a rank does that stands still: tells, listens, warns, and gives up where it may.

    ``MPIRING_STALL_SECONDS`` (30) is when it says on stderr what it waits for;
    ``MPIRING_TIMEOUT`` (unset: never) when the wait ends with StallError.
    """

    def __init__(self) -> None:
        self.warn_after = float(os.environ.get("MPIRING_STALL_SECONDS", 30))
        limit = os.environ.get("MPIRING_TIMEOUT")
        self.limit = float(limit) if limit else None
        self._warned = 0.0

    def check(self, seconds: float, tell: Any) -> None:
        """``tell()`` says in words what is waited for."""
        if self.limit is not None and seconds > self.limit:
            raise StallError(f"nothing moved for {seconds:.0f} s: {tell()}")
        now = time.monotonic()
        if seconds > self.warn_after and now - self._warned > self.warn_after:
            self._warned = now
            print(f"mpiring: nothing moved for {seconds:.0f} s: {tell()}", file=sys.stderr)


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0, 2-7``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(names)}"
