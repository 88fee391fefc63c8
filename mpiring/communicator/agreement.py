"""Ranks compare what they were called with, so that a mistake ends in one error, not a hang.

Every collective call of a communicator has a number, the same on every rank, and
a *record*: method, count, dtype, op. Ranks that call something for the first
time send their record to all others before any data moves, and go on when all
records are in and equal. A rank whose own arguments are wrong sends its
complaint as its record; one that frees the communicator, or ends, says so.

A call seen before is not compared: it costs nothing. If ranks differ there, some
of them stand still, and a rank that stands still looks at the records that have
come, then sends its own: so ranks which wait for different things find out.

Records travel point-to-point, with a tag and a communicator that no array does. A record that
nobody asked for is answered with one's own for that number, once. Before that
communicator is freed, ``part`` sees to it that no record is left on its way:
MPI gives its tag space to the next communicator that is made.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

from mpiring.engine.progress import ProgressEngine
from mpiring.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    MismatchError,
    MpiringError,
    StallError,
    TransportError,
)

#: Seconds without movement after which a rank tells the others what it is in.
TELL_AFTER = 1.0
#: Seconds for which a rank that knows of a mistake waits to hear from the others.
HEAR_WITHIN = 5.0
#: Of all messages here; others of the communicator may carry something else.
TAG = 0
_KEPT = 1024  # records of ended calls that can still be asked for
_COMPLAINT = "!"
#: Errors that stay what they are when all ranks raise them; others become ArgumentError.
_COMPLAINTS = {each.__name__: each for each in (DtypeError, DeviceError, TransportError)}


class Farewell(NamedTuple):
    """The last call of a rank: how it ended, and how often it had started what is persistent."""

    number: int
    how: str
    starts: dict[int, int]


class Agreement:
    """The comparison of one communicator's calls over its ranks."""

    def __init__(self, control: Any, engine: ProgressEngine) -> None:
        self._control, self._engine = control, engine
        self._awaited = 0  # calls whose records are not all in
        self.rank, self.size = control.Get_rank(), control.Get_size()
        self._mine: dict[int, str] = {}
        self._theirs: defaultdict[int, dict[int, str]] = defaultdict(dict)
        self._told: dict[int, set[int]] = {}
        self._sending: list[Any] = []
        self._oldest = 0  # records of calls before this one are forgotten
        self._farewell: Farewell | None = None
        self._quiet = False
        self._gone: dict[int, Farewell] = {}

    def open(self, number: int, record: str) -> None:
        """Call ``number`` has begun here, with this record."""
        with self._engine.lock:  # another thread may be listening
            self._mine[number] = record
            if number in self._theirs:
                self._answer(number, list(self._theirs[number]))

    def amend(self, number: int, record: str) -> None:
        """What has become of call ``number`` here after all: told to every rank, once more."""
        with self._engine.lock:
            self._mine[number] = record
            self._told.pop(number, None)
            self.tell(number)

    def close(self, farewell: Farewell) -> None:
        """This rank makes no call any more."""
        self._farewell = farewell
        self.open(farewell.number, farewell.how)

    def forget(self, before: int) -> None:
        """Calls before this number have ended here; all but the last of them are forgotten."""
        self._oldest = max(self._oldest, before - _KEPT)
        while self._mine and (number := next(iter(self._mine))) < self._oldest:
            del self._mine[number]
            self._theirs.pop(number, None)
            self._told.pop(number, None)

    def tell(self, number: int) -> None:
        """Send the record of call ``number`` to every rank that has not got it."""
        for peer in range(self.size):
            self._tell(number, peer)

    def _tell(self, number: int, peer: int) -> None:
        with self._engine.lock:
            told = self._told.setdefault(number, {self.rank})
            if peer in told or self._quiet:
                return
            told.add(peer)
            last = self._farewell is not None and self._farewell.number == number
            message = (number, self._mine[number], self._farewell if last else None)
            self._sending.append(self._control.isend(message, peer, TAG))

    def wait_for(self, number: int) -> None:
        """Tell the others of call ``number``, and listen in every poll until they have told."""
        self.tell(number)
        with self._engine.lock:  # another thread's poll may be ending such a wait
            if not self._awaited:
                self._engine.attach(self)
            self._awaited += 1

    def end_wait(self, *, of_all: bool = False) -> None:
        with self._engine.lock:
            if self._awaited:
                self._awaited -= self._awaited if of_all else 1
                if not self._awaited:
                    self._engine.detach(self)

    def advance(self) -> bool:
        """An actor's part in a poll."""
        return self.listen()

    def listen(self) -> bool:
        """Take in the records that have come; answer those that were not asked for."""
        moved = False
        with self._engine.lock:
            self.sent()
            while (message := self._control.improbe(tag=TAG)) is not None:
                from mpi4py import MPI

                status = MPI.Status()
                number, record, farewell = message.recv(status)
                peer = status.Get_source()
                if farewell:
                    self._gone[peer] = farewell
                if number >= self._oldest:
                    self._theirs[number][peer] = record
                if number in self._mine:  # if not, ``open`` will find it
                    self._answer(number, [peer])
                moved = True
        return moved

    def _answer(self, number: int, peers: list[int]) -> None:
        """Those whose records differ from this rank's concern all; others want this one's only."""
        if self.doubtful(number):
            self.tell(number)
        for peer in peers:
            self._tell(number, peer)

    def sent(self) -> bool:
        """Whether all that was told is on its way, so that nothing need be kept for it."""
        with self._engine.lock:
            self._sending = [request for request in self._sending if not request.test()[0]]
            return not self._sending

    def heard(self, number: int) -> bool:
        """Whether the records of all ranks are in."""
        if not self._gone:  # asked in every poll of a wait
            return len(self._theirs[number]) == self.size - 1
        return len(self.records(number)) == self.size

    def doubtful(self, number: int) -> bool:
        """Whether some rank's record differs from this one's."""
        return len(set(self.records(number).values())) > 1

    def records(self, number: int) -> dict[int, str]:
        """The record of each rank that is known, in order of ranks.

        A rank that had gone before this call has its last record for it.
        """
        known = {self.rank: self._mine[number], **self._theirs[number]}
        for peer, farewell in self._gone.items():
            if farewell.number <= number:
                known.setdefault(peer, farewell.how)
        return dict(sorted(known.items()))

    def deserters(self, slot: int, starts: int) -> dict[int, str]:
        """Ranks that went before they started the persistent collective ``slot`` so often."""
        return {
            peer: farewell.how
            for peer, farewell in sorted(self._gone.items())
            if farewell.starts.get(slot, 0) < starts
        }

    def part(self, number: int, word: str) -> None:
        """Say a last ``word``, as call ``number``: messages between two ranks keep their order,
        so that when all have come nothing else is on its way.
        """
        self.open(number, word)
        self.tell(number)
        self._quiet = True

    def parted(self, number: int) -> bool:
        """Whether all ranks have said their last word."""
        self.listen()
        return len(self._theirs[number]) == self.size - 1 and self.sent()

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
            return _COMPLAINTS.get(kind, ArgumentError)(f"{where}: {text}")
        if len(ranks) == 1:
            return None
        told = "; ".join(f"{name_ranks(where)}: {record}" for record, where in ranks.items())
        return MismatchError(f"ranks disagree about the same call: {told}")

    def silent(self, number: int) -> list[int]:
        """Ranks that have not said that they are in call ``number``."""
        known = self.records(number)
        return [rank for rank in range(self.size) if rank not in known]


def complaint(error: Exception) -> str:
    """The record of a rank whose own arguments are wrong, or that lacks what they take."""
    kind = next((name for name, each in _COMPLAINTS.items() if isinstance(error, each)), "")
    what = "" if isinstance(error, MpiringError) else f"{type(error).__name__}: "
    return f"{_COMPLAINT}{kind}:{what}{error}"


class Agreed:
    """A completion: over when all ranks have sent equal records; raises when they differ."""

    def __init__(self, agreement: Agreement, number: int) -> None:
        self._agreement, self._number = agreement, number
        agreement.wait_for(number)

    def done(self) -> bool:
        if not self._agreement.heard(self._number):
            return False
        self._agreement.end_wait()
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
    if not seconds > 0:  # nan is not
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
