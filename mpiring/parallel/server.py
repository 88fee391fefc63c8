"""The state machine of one parameter server. Its rules are those of protocol.py.

Invariants: a worker is in ``queue`` of a unit exactly while it is owed the unit's answer for a
whole push, a pull or its departure; ``held`` and ``summed`` hold the whole pushes that are not
part of an update yet, ``came`` the parts; every push that came is in one of these, in ``applied``
or in ``discarded``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mpiring.errors import ArgumentError, MismatchError
from mpiring.parallel.arrivals import Arrival, Arrivals
from mpiring.parallel.protocol import (
    TRANSITIONS,
    Accumulate,
    Apply,
    Command,
    Done,
    Failed,
    Finish,
    Message,
    Phase,
    Pull,
    Push,
    Reply,
    Signal,
    lead_of,
)

_GONE = (Phase.LEAVING, Phase.LEFT)


#: What an arrival that is not a push does to each unit.
_SIGNALS = {
    "pull": Signal.PULL,
    "done": Signal.DONE,
    "final": Signal.FINAL,
    "failed": Signal.FAILED,
}


@dataclass
class _Unit:
    """The books of a set of keys that changes as a whole."""

    keys: tuple[int, ...]
    phase: dict[int, Phase]
    clock: dict[int, int]  # whole pushes of each worker that have been applied
    seen: dict[int, int]  # the version that each worker holds
    came: dict[int, set[int]]  # keys of each worker's push that is still incomplete
    version: int = 0
    held: set[int] = field(default_factory=set)  # workers whose whole push has not been used
    summed: list[int] = field(default_factory=list)  # sync: workers whose push is in the sum
    turn: int = 0  # sync: how many workers the sum has dealt with
    queue: list[int] = field(default_factory=list)  # workers to be answered, first come first

    def signal(self, worker: int, signal: Signal) -> None:
        phase = self.phase[worker]
        if signal not in TRANSITIONS[phase]:
            allowed = ", ".join(s.value for s in TRANSITIONS[phase])
            raise MismatchError(
                f"worker {worker} {signal.value} while {phase.name} with keys {list(self.keys)}; "
                f"from there a worker: {allowed}"
            )
        self.phase[worker] = TRANSITIONS[phase][signal]

    def active(self, worker: int) -> bool:
        return self.phase[worker] not in _GONE


class ServerState:
    """What one server knows and decides. ``handle`` turns a message into commands.

    ``workers`` are the ranks that push, in the order in which sync adds them up; ``keys`` are the
    keys of this shard, possibly none. ``replay`` is the ``log`` of an earlier run; past its end
    the order of arrival decides again. Raises ArgumentError for settings that do not fit, and
    ``handle`` raises MismatchError for a message that breaks the protocol or departs from the log.
    """

    def __init__(
        self,
        workers: Sequence[int],
        keys: Iterable[int],
        mode: str = "sync",
        staleness: int | None = None,
        replay: Iterable[Arrival] = (),
    ) -> None:
        self.lead = lead_of(mode, staleness)
        self.mode = mode
        self.workers = tuple(workers)
        self.keys = tuple(keys)
        if not self.workers or len(set(self.workers)) < len(self.workers):
            raise ArgumentError(f"workers are {list(workers)}; needed is one or more, each once")
        if len(set(self.keys)) < len(self.keys):
            raise ArgumentError(f"keys are {list(self.keys)}; each may occur once")

        # A shard without keys still has one (empty) unit: it is where its workers say goodbye.
        groups = [(key,) for key in self.keys] if mode == "sync" else [self.keys]
        self._units = tuple(self._unit(group) for group in groups or [()])
        self._unit_of = {key: unit for unit in self._units for key in unit.keys}

        replay = tuple(replay)
        if replay and mode == "sync":
            raise ArgumentError("replay is given, but sync has the same result in every order")
        self._arrivals = Arrivals(self.workers, replay)

        #: The ledger, in pushes of a key.
        self.received = self.applied = self.discarded = 0
        #: How often an update had which staleness, in versions; one entry per push of a unit.
        self.staleness: Counter[int] = Counter()
        self.finished = False
        self._pushes = dict.fromkeys(self.workers, 0)
        self._failing: dict[int, int] = {}  # pushes to come before a failure takes effect
        self._line: list[int] = []  # workers that wait for service
        self._start = 0  # where in workers the next round of newcomers begins

    def _unit(self, keys: tuple[int, ...]) -> _Unit:
        return _Unit(
            keys,
            phase=dict.fromkeys(self.workers, Phase.COMPUTING),
            clock=dict.fromkeys(self.workers, 0),
            seen=dict.fromkeys(self.workers, 0),
            came={worker: set() for worker in self.workers},
        )

    @property
    def log(self) -> list[Arrival]:
        """What took effect, in order, for ``replay``; empty in sync, which does not need it."""
        return self._arrivals.log

    @property
    def pending(self) -> int:
        """Pushes of a key that have come and are not part of an update yet."""
        return sum(
            len(unit.keys) * (len(unit.held) + len(unit.summed)) + sum(map(len, unit.came.values()))
            for unit in self._units
        )

    @property
    def updates_lost(self) -> int:
        """Pushes of a key that came and were neither applied nor are about to be: always 0.

        The parts of a push that its worker did not finish are no update; ``discarded`` counts them.
        """
        return self.received - self.applied - self.pending - self.discarded

    @property
    def slowest(self) -> tuple[int, ...]:
        """The active workers that are furthest behind: those whom a stalled server waits for."""
        active = [worker for worker in self.workers if self._units[0].active(worker)]
        behind = min((self._pushes[worker] for worker in active), default=0)
        return tuple(worker for worker in active if self._pushes[worker] == behind)

    def select(self, ready: Collection[int]) -> int:
        """Which of the workers with a message to be handled is served next.

        First come, first served. Those first seen in the same call go round, from the worker
        after the one that came first in such a call before, so none is always the first. Each is
        served after at most ``len(workers) - 1`` others.
        """
        n = len(self.workers)
        circle = (self.workers[(self._start + i) % n] for i in range(n))
        unseen = [worker for worker in circle if worker in ready and worker not in self._line]
        if unseen:
            self._start = self.workers.index(unseen[0]) + 1
            self._line += unseen
        worker = next((worker for worker in self._line if worker in ready), None)
        if worker is None:
            raise ArgumentError(f"ready is {sorted(ready)}; needed is one or more of the workers")
        self._line.remove(worker)
        return worker

    def handle(self, message: Message) -> tuple[Command, ...]:
        """Take in one message; what is to be done now, in order."""
        worker = message.worker
        if worker not in self._pushes:
            raise MismatchError(f"a message from {worker}; the workers are {list(self.workers)}")
        commands: list[Command] = []
        match message:
            case Push(_, key):
                unit = self._receive(worker, key)
                if not unit.came[worker]:
                    commands += self._offer("push", worker, (unit,))
            case Pull():
                self._between_steps(worker, "pull")
                commands += self._offer("pull", worker)
            case Done(_, final):
                self._between_steps(worker, "leave")
                commands += self._offer("final" if final else "done", worker)
            case Failed(_, pushes):
                if pushes < self._pushes[worker]:
                    raise MismatchError(
                        f"worker {worker} failed after {pushes} pushes, "
                        f"but {self._pushes[worker]} have come"
                    )
                self._failing[worker] = pushes
        # A failure may overtake the pushes before it: it takes effect after them.
        if self._failing.get(worker) == self._pushes[worker]:
            del self._failing[worker]
            commands += self._offer("failed", worker)
        return tuple(commands)

    def _receive(self, worker: int, key: int) -> _Unit:
        """Note that a key has come; the unit has nothing in ``came`` when it is whole."""
        if key not in self._unit_of:
            raise MismatchError(f"worker {worker} pushed key {key}; this shard: {list(self.keys)}")
        unit = self._unit_of[key]
        came = unit.came[worker]
        # Its own last answer is out before a worker goes on: whole steps separate its pushes.
        if key in came or unit.clock[worker] != self._pushes[worker] // len(self.keys):
            raise MismatchError(f"worker {worker} pushed key {key} twice in one step")
        whole = len(came) + 1 == len(unit.keys)
        unit.signal(worker, Signal.WHOLE if whole else Signal.PART)
        came.add(key)
        if whole:
            came.clear()
            unit.held.add(worker)
        self.received += 1
        self._pushes[worker] += 1
        return unit

    def _between_steps(self, worker: int, verb: str) -> None:
        # With one unit per key the phases alone would not show it.
        if self.keys and self._pushes[worker] % len(self.keys):
            raise MismatchError(
                f"worker {worker} wants to {verb} in the middle of a step: it has pushed "
                f"{self._pushes[worker] % len(self.keys)} of {len(self.keys)} keys"
            )

    def _offer(
        self, what: str, worker: int, units: tuple[_Unit, ...] | None = None
    ) -> Iterator[Command]:
        """Let an arrival take effect: at once, or when its turn in the log has come."""
        if self.mode == "sync":
            yield from self._take(what, worker, units or self._units)
            return
        steps = self._pushes[worker] // max(1, len(self.keys))
        arrival = Arrival(what, worker, steps - 1 if what == "push" else steps)
        for turn in self._arrivals.offer(arrival):
            yield from self._take(turn.what, turn.worker, self._units)

    def _take(self, what: str, worker: int, units: tuple[_Unit, ...]) -> Iterator[Command]:
        for unit in units:
            if what == "failed":
                yield from self._release(unit, worker)
            if what != "push":
                unit.signal(worker, _SIGNALS[what])
            if what in ("push", "pull", "final"):
                unit.queue.append(worker)
            if self.mode == "sync":
                yield from self._sum(unit)
            elif what == "push":
                # Only this one: others may be held back, waiting for their turn in a log.
                unit.held.remove(worker)
                yield from self._apply(unit, worker, [worker])
            yield from self._answer(unit)
        departure = what not in ("push", "pull")
        if departure and all(p is Phase.LEFT for u in self._units for p in u.phase.values()):
            self.finished = True
            yield Finish()

    def _release(self, unit: _Unit, worker: int) -> Iterator[Command]:
        """Answer, with whatever there is, all that a failing worker pushed: it can go at once."""
        owed: Iterable[int] = ()
        if unit.came[worker]:
            owed = sorted(unit.came[worker])
            self.discarded += len(unit.came[worker])
            unit.came[worker].clear()
        elif worker in unit.queue:
            owed = unit.keys
            unit.queue.remove(worker)
        for key in owed:
            yield Reply(worker, key, unit.version)

    def _sum(self, unit: _Unit) -> Iterator[Command]:
        """Sync: add up what has come, in the order of workers, and apply the sum of all."""
        while unit.turn < len(self.workers):
            worker = self.workers[unit.turn]
            if worker in unit.held:
                unit.held.remove(worker)
                for key in unit.keys:
                    yield Accumulate(key, worker, first=not unit.summed)
                unit.summed.append(worker)
            elif unit.active(worker):
                return  # its gradient comes next in the sum, so the later ones wait for it
            unit.turn += 1
        unit.turn = 0
        if unit.summed:
            contributors, unit.summed = unit.summed, []
            yield from self._apply(unit, None, contributors)

    def _apply(self, unit: _Unit, source: int | None, contributors: list[int]) -> Iterator[Command]:
        staleness = [unit.version - unit.seen[worker] for worker in contributors]
        self.staleness.update(staleness)
        unit.version += 1
        for key in unit.keys:
            yield Apply(key, source, unit.version, max(staleness))
        for worker in contributors:
            unit.clock[worker] += 1
            self.applied += len(unit.keys)
            unit.signal(worker, Signal.APPLIED)

    def _answer(self, unit: _Unit) -> Iterator[Command]:
        active = [worker for worker in self.workers if unit.active(worker)]
        slowest = min((unit.clock[worker] for worker in active), default=0)
        for worker in tuple(unit.queue):
            phase = unit.phase[worker]
            in_reach = phase is Phase.WAITING and unit.clock[worker] - slowest <= self.lead
            if in_reach or (phase is Phase.LEAVING and not active):
                unit.queue.remove(worker)
                unit.seen[worker] = unit.version
                unit.signal(worker, Signal.ANSWERED)
                for key in unit.keys:
                    yield Reply(worker, key, unit.version)
