"""The order in which a server's arrivals take effect: recorded, and enforced again.

All that makes a run of async or ssp differ from the next is the order in which whole pushes,
pulls and departures reach each server. ``Arrivals.log`` is that order. Given to another run as
``replay``, it holds early arrivals back until their turn; every version that a worker sees, and
so every bit, is then the same.

It cannot deadlock: the order did happen once, so what an arrival waits for is never waiting for
it. For the same reason the other run must be the same in all else (seeds, batches, number of
workers and servers). Each worker's own arrivals come in a fixed order, so a run that is not the
same is reported by the first arrival that differs, instead of waiting for ever for the right one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mpiring.errors import ArgumentError, MismatchError

#: What a worker can do to a whole shard.
WORDS = ("push", "pull", "done", "final", "failed")


class Arrival(NamedTuple):
    """``worker`` did ``what``, having pushed ``step`` times before."""

    what: str
    worker: int
    step: int

    def __str__(self) -> str:
        return f"{self.what} by worker {self.worker} at step {self.step}"


class Arrivals:
    """Lets arrivals take effect as they come, or in the order of an earlier ``log``."""

    def __init__(self, workers: Sequence[int], replay: Iterable[Arrival] = ()) -> None:
        self.log: list[Arrival] = []
        self._script = deque(replay)
        self._early: list[Arrival] = []
        self._expected: dict[int, deque[Arrival]] = {worker: deque() for worker in workers}
        for line in self._script:
            if line.worker not in self._expected:
                raise MismatchError(f"the log has {line}; the workers are {list(workers)}")
            self._expected[line.worker].append(line)

    def offer(self, arrival: Arrival) -> Iterator[Arrival]:
        """``arrival`` has come: those whose turn it is now, none or several.

        Past the end of the replayed log the order of arrival decides again.
        """
        expected = self._expected[arrival.worker]
        if expected and (line := expected.popleft()) != arrival:
            raise MismatchError(f"this run departs from its log: {arrival}; the log has {line}")
        self._early.append(arrival)
        while self._early:
            turn = self._script[0] if self._script else self._early[0]
            if turn not in self._early:
                return
            self._early.remove(turn)
            if self._script:
                self._script.popleft()
            self.log.append(turn)
            yield turn


def format_logs(logs: Sequence[Iterable[Arrival]]) -> str:
    """The logs of all servers of one run, as text: ``server what worker step`` on each line."""
    lines = [f"# mpiring arrivals, servers: {len(logs)}"]
    for server, log in enumerate(logs):
        lines += [f"{server} {line.what} {line.worker} {line.step}" for line in log]
    return "\n".join(lines) + "\n"


def parse_logs(text: str) -> tuple[tuple[Arrival, ...], ...]:
    """The inverse of ``format_logs``. Raises ArgumentError that names the first wrong line."""
    head, _, body = text.partition("\n")
    title, _, count = head.partition(": ")
    if title != "# mpiring arrivals, servers" or not count.isdecimal():
        raise ArgumentError(f"not a log of arrivals: it begins {head[:60]!r}")
    logs: list[list[Arrival]] = [[] for _ in range(int(count))]
    for number, line in enumerate(body.splitlines(), start=2):
        try:
            server, what, worker, step = line.split()
            if what not in WORDS or not 0 <= int(server) < len(logs):
                raise ValueError(line)
            logs[int(server)].append(Arrival(what, int(worker), int(step)))
        except ValueError:
            raise ArgumentError(
                f"line {number} of the log is {line!r}; needed is: server what worker step"
            ) from None
    return tuple(map(tuple, logs))
