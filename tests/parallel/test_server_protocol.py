"""The parameter server's state machines, joined by links that delay every message at random.

Arrays are single numbers here: the protocol does not look inside. A worker's gradient depends on
who computes it, when, and on the parameters it was sent, so a wrong version or order shows up
in the bits of the result.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from mpiring.errors import ArgumentError, MismatchError
from mpiring.parallel import server as server_module
from mpiring.parallel.arrivals import Arrival, Arrivals, format_logs, parse_logs
from mpiring.parallel.protocol import (
    TRANSITIONS,
    Accumulate,
    Apply,
    Command,
    Done,
    Failed,
    Finish,
    Pull,
    Push,
    Reply,
    lead_of,
    staleness_bound,
)
from mpiring.parallel.server import ServerState
from mpiring.parallel.worker import WorkerState

CONTROL = -1  # the slot of all that is not a gradient
RATE = 0.1


def gradient(worker: int, step: int, key: int, parameter: float) -> float:
    return math.sin(7 * worker + 3 * step + key + parameter)


class World:
    """Workers and servers in one process, their messages delayed at random.

    Messages of one pair under one slot keep their order, and nothing else does: as in MPI.
    ``steps`` says how many steps each worker takes; ``failures`` that a worker gives up at a step,
    having pushed so many keys of it. ``slow`` multiplies the time a worker needs.
    """

    def __init__(
        self,
        seed: int,
        steps: Sequence[int],
        servers: int = 1,
        mode: str = "sync",
        staleness: int | None = None,
        *,
        keys: int = 3,
        failures: dict[int, tuple[int, int]] | None = None,
        replay: Sequence[Sequence[Arrival]] | None = None,
        final: bool = False,
        slow: dict[int, float] | None = None,
        gradient: Callable[[int, int, int, float], float] = gradient,
        rate: float = RATE,
    ) -> None:
        self.random = random.Random(seed)
        self.steps, self.failures, self.slow = list(steps), failures or {}, slow or {}
        self.gradient, self.rate, self.final = gradient, rate, final
        self.lead = lead_of(mode, staleness)
        n = len(self.steps)
        self.keys = list(range(keys))
        self.shards = [self.keys[s::servers] for s in range(servers)]
        replay = replay or [()] * servers
        self.servers = [
            ServerState(range(n), shard, mode, staleness, log)
            for shard, log in zip(self.shards, replay)
        ]
        self.workers = [WorkerState(w, self.shards) for w in range(n)]

        self.parameters = {key: (1.0, 0) for key in self.keys}  # value, version
        self.sums: dict[int, list[tuple[int, float]]] = {}
        self.buffers: dict[tuple[int, int], float] = {}
        self.inbox: list[dict[int, deque[Any]]] = [defaultdict(deque) for _ in self.servers]
        self.pushed: Counter[tuple[int, int]] = Counter()
        self.used: Counter[tuple[int, int]] = Counter()
        self.copies: list[dict[int, tuple[float, int]]] = [{} for _ in self.workers]

        self.now = 0.0
        self.events: list[Any] = []
        self.serial = itertools.count()
        self.last: dict[Any, float] = defaultdict(float)
        self.programs = [self.program(w) for w in range(n)]
        self.asleep: set[int] = set()
        self.alive = set(range(n))
        self.ended = [0.0] * n

    def run(self) -> World:
        for worker in range(len(self.workers)):
            self.at(0.0, self.resume, worker)
        while self.events:
            self.now, _, call, arguments = heapq.heappop(self.events)
            call(*arguments)
        assert not self.alive, f"workers that never end: {self.alive}"
        assert all(server.finished for server in self.servers)
        return self

    def at(self, delay: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.serial), call, arguments))

    def send(self, link: Any, call: Callable[..., None], *arguments: Any) -> None:
        arrival = max(self.last[link], self.now + self.random.expovariate(1.0))
        self.last[link] = arrival
        self.at(arrival - self.now, call, *arguments)

    # A worker.

    def program(self, w: int) -> Iterator[float | None]:
        """Yields how long it computes, or None to wait for a message."""
        state, copies = self.workers[w], self.copies[w]
        self.tell(w, state.pull())
        while not state.ready:
            yield None
        for step in range(self.steps[w]):
            self.check_start(w, step)
            for pushed, key in enumerate([*reversed(self.keys), None]):
                if self.failures.get(w) == (step, pushed):
                    self.tell(w, state.fail())
                    while state.owed:
                        yield None
                    return
                if key is None:
                    break
                yield self.random.random() * self.slow.get(w, 1.0)
                server, message = state.push(key)
                value = self.gradient(w, step, key, copies[key][0])
                self.pushed[w, key] += 1
                self.send((w, server, key), self.arrive, server, message, value)
            while not state.ready:
                yield None
            assert state.step == step + 1
        self.tell(w, state.done(self.final))
        while state.owed:
            yield None

    def check_start(self, w: int, step: int) -> None:
        for shard in self.shards:
            versions = {self.copies[w][key][1] for key in shard}
            assert len(versions) <= 1, f"worker {w} starts step {step} with {versions}"
        for other in self.workers:
            if not other.left:
                behind = step - min(self.pushed[other.worker, key] for key in self.keys)
                assert behind <= self.lead, (
                    f"worker {w} starts {step}, {other.worker} is {behind} behind"
                )

    def tell(self, w: int, messages: Sequence[tuple[int, Any]]) -> None:
        for server, message in messages:
            self.send((w, server, CONTROL), self.arrive, server, message, None)

    def resume(self, w: int) -> None:
        self.asleep.discard(w)
        try:
            delay = next(self.programs[w])
        except StopIteration:
            self.alive.remove(w)
            self.ended[w] = self.now
            return
        if delay is None:
            self.asleep.add(w)
        else:
            self.at(delay, self.resume, w)

    def deliver(self, w: int, key: int, copy: tuple[float, int]) -> None:
        self.copies[w][key] = copy
        self.workers[w].receive(key)
        if w in self.asleep:
            self.resume(w)

    # A server.

    def arrive(self, server: int, message: Any, value: float | None) -> None:
        if isinstance(message, Push):
            place = (message.worker, message.key)
            assert place not in self.buffers, "the push before it is still there"
            self.buffers[place] = value
        if not any(self.inbox[server].values()):
            self.at(self.random.random() * 0.2, self.serve, server)
        self.inbox[server][message.worker].append(message)

    def serve(self, server: int) -> None:
        inbox = self.inbox[server]
        worker = self.servers[server].select({w for w, queue in inbox.items() if queue})
        for command in self.servers[server].handle(inbox[worker].popleft()):
            self.carry_out(server, command)
        assert self.servers[server].updates_lost == 0
        if any(inbox.values()):
            self.at(self.random.random() * 0.2, self.serve, server)

    def carry_out(self, server: int, command: Command) -> None:
        match command:
            case Accumulate(key, worker, first):
                assert first == (key not in self.sums)
                # A second use of the same push fails here.
                entry = (worker, self.buffers.pop((worker, key)))
                self.sums.setdefault(key, []).append(entry)
            case Apply(key, worker, version):
                value, before = self.parameters[key]
                assert version == before + 1
                if worker is None:
                    entries = self.sums.pop(key)
                else:
                    entries = [(worker, self.buffers.pop((worker, key)))]
                total = entries[0][1]
                for _, other in entries[1:]:
                    total += other
                self.used.update((contributor, key) for contributor, _ in entries)
                self.parameters[key] = (value - self.rate * total, version)
            case Reply(worker, key, version):
                assert self.parameters[key][1] == version
                copy = self.parameters[key]
                self.send((server, worker, "reply", key), self.deliver, worker, key, copy)
            case Finish():
                assert not any(self.inbox[server].values())


def plan(seed: int, n: int) -> dict[str, Any]:
    """Random steps (some workers have none, or end early) and, now and then, a failure."""
    rng = random.Random(seed)
    keys = rng.randint(1, 4)
    steps = [rng.choice((0, 1, 2, 3, 3)) for _ in range(n)]
    failures = {
        w: (rng.randrange(steps[w]), rng.randint(0, keys))
        for w in range(n)
        if steps[w] and rng.random() < 0.2
    }
    return {"steps": steps, "failures": failures, "keys": keys, "final": rng.random() < 0.5}


MODES = [("sync", None), ("async", None), ("ssp", 0), ("ssp", 1), ("ssp", 3)]


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("mode, staleness", MODES)
def test_any_delays(mode: str, staleness: int | None, n: int) -> None:
    """Everybody ends, every push is used once or (half a push) never, within the staleness."""
    for servers, repetition in itertools.product(range(1, 5), range(2)):
        seed = 1000 * n + 10 * servers + repetition
        world = World(seed, servers=servers, mode=mode, staleness=staleness, **plan(seed, n)).run()
        left_over = Counter(dict.fromkeys(world.buffers, 1))
        assert world.used + left_over == world.pushed
        for (worker, key), _ in left_over.items():
            assert worker in world.failures and mode != "sync", f"lost: {worker}, {key}"
        assert sum(server.discarded for server in world.servers) == left_over.total()
        assert not world.sums
        for server in world.servers:
            assert server.pending == server.updates_lost == 0
            assert max(server.staleness, default=0) <= staleness_bound(mode, n, staleness)


def test_final_parameters_are_everybodys() -> None:
    for seed in range(20):
        world = World(seed, [3, 1, 0, 2], 2, "async", final=True).run()
        for copies in world.copies:
            assert copies == world.parameters


def in_one_process(world: World) -> dict[int, float]:
    """What sync has to give: per step and key, the sum over workers in order, one update."""
    values = dict.fromkeys(world.keys, 1.0)
    for step in range(max(world.steps)):
        for key in world.keys:
            parts = [
                gradient(w, step, key, values[key])
                for w in range(len(world.steps))
                if step < world.pushed[w, key]
            ]
            if parts:
                total = parts[0]
                for part in parts[1:]:
                    total += part
                values[key] -= RATE * total
    return values


def test_sync_is_the_plain_sum_to_the_bit() -> None:
    for seed in range(60):
        world = World(seed, servers=1 + seed % 3, **plan(seed, 2 + seed % 5)).run()
        assert {key: value for key, (value, _) in world.parameters.items()} == in_one_process(world)


def test_a_straggler_holds_up_sync_and_not_async() -> None:
    """The virtual time in which the others take their steps beside one that is 50 times slower."""

    def end(mode: str, staleness: int | None) -> float:
        worlds = [World(s, [6] * 4, 2, mode, staleness, slow={3: 50.0}).run() for s in range(5)]
        return sum(max(world.ended[:3]) for world in worlds)

    sync, ssp, free = end("sync", None), end("ssp", 2), end("async", None)
    assert 2 * free < ssp < sync


def test_async_adds_up_exactly() -> None:
    """Learning rate 1, everybody pushes ones K times: the start minus K times the workers."""
    for mode, staleness in MODES:
        for n, k in ((1, 4), (3, 5), (8, 2)):
            world = World(n, [k] * n, 2, mode, staleness, gradient=lambda *_: 1.0, rate=1.0).run()
            assert {value for value, _ in world.parameters.values()} == {1.0 - k * n}


@pytest.mark.parametrize("mode, staleness", [("async", None), ("ssp", 1)])
def test_a_replayed_run_has_the_same_bits(mode: str, staleness: int | None) -> None:
    otherwise = set()
    for seed in range(20):
        task = plan(seed, 5)
        first = World(seed, servers=2, mode=mode, staleness=staleness, **task).run()
        logs = parse_logs(format_logs([server.log for server in first.servers]))
        arguments = {"servers": 2, "mode": mode, "staleness": staleness, **task}
        again = World(seed + 1000, replay=logs, **arguments).run()
        assert again.parameters == first.parameters
        assert again.copies == first.copies or task["failures"]
        assert [tuple(server.log) for server in again.servers] == list(logs)
        assert [s.staleness for s in again.servers] == [s.staleness for s in first.servers]
        free = World(seed + 1000, **arguments).run()
        otherwise.add(free.parameters == first.parameters)
    assert False in otherwise  # without the log, the delays do make a difference


def test_a_run_that_departs_from_its_log_is_reported() -> None:
    log = World(1, [2, 2], mode="async", keys=1).run().servers[0].log
    with pytest.raises(MismatchError, match=r"departs.*done by worker 1 at step 1.*push by worker"):
        World(2, [2, 1], mode="async", keys=1, replay=[log]).run()
    with pytest.raises(
        MismatchError, match=r"departs.*push by worker 0 at step 2.*the log has done"
    ):
        World(2, [3, 2], mode="async", keys=1, replay=[log]).run()
    with pytest.raises(MismatchError, match=r"by worker 1 at step 0; the workers are \[0\]"):
        World(2, [2], mode="async", keys=1, replay=[log]).run()
    with pytest.raises(ArgumentError, match="sync"):
        World(2, [2, 2], mode="sync", keys=1, replay=[log])


def test_past_the_end_of_a_log_arrival_decides() -> None:
    arguments = {"steps": [3, 3, 3], "mode": "async"}
    log = World(1, **arguments).run().servers[0].log
    again = World(2, replay=[log[: len(log) // 2]], **arguments).run().servers[0].log
    assert again[: len(log) // 2] == log[: len(log) // 2]
    assert sorted(again) == sorted(log)


def test_arrivals_wait_for_their_turn() -> None:
    a, b, c = (Arrival("push", worker, 0) for worker in range(3))
    arrivals = Arrivals(range(3), replay=[b, c, a])
    assert [list(arrivals.offer(arrival)) for arrival in (a, c, b)] == [[], [], [b, c, a]]


@pytest.mark.parametrize(
    "text, complaint",
    [
        ("", "not a log"),
        ("# mpiring arrivals, servers: x\n", "not a log"),
        ("# mpiring arrivals, servers: 1\n0 push 1 0\n0 shove 1 0\n", "line 3"),
        ("# mpiring arrivals, servers: 1\n1 push 1 0\n", "line 2"),
        ("# mpiring arrivals, servers: 1\n0 push one 0\n", "line 2"),
        ("# mpiring arrivals, servers: 1\n0 push 1\n", "line 2"),
    ],
)
def test_a_damaged_log_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        parse_logs(text)


# Small worlds, every order of arrival.


def every_order(
    n: int, steps: int, keys: int, mode: str, staleness: int | None = None
) -> Iterator[tuple[ServerState, list[Command]]]:
    """All orders in which one server can receive the messages of workers that run freely."""
    choices: list[int] = []
    while True:
        server = ServerState(range(n), range(keys), mode, staleness)
        workers = [WorkerState(w, [range(keys)]) for w in range(n)]
        next_key = [0] * n
        done: list[Command] = []
        options: list[int] = []
        while not server.finished:
            able = [w for w in workers if not w.left and (w.ready or next_key[w.worker] % keys)]
            assert able, "deadlock"
            depth = len(options)
            if depth == len(choices):
                choices.append(0)
            options.append(len(able))
            worker = able[choices[depth]]
            if worker.step == steps:
                message: Any = worker.done()[0][1]
            else:
                message = worker.push(next_key[worker.worker] % keys)[1]
                next_key[worker.worker] += 1
            for command in server.handle(message):
                done.append(command)
                if isinstance(command, Reply):
                    workers[command.worker].receive(command.key)
        yield server, done
        while choices and choices[-1] + 1 == options[len(choices) - 1]:
            choices.pop()
        if not choices:
            return
        choices[-1] += 1


@pytest.mark.parametrize("mode, staleness", MODES)
@pytest.mark.parametrize("n, steps, keys", [(2, 2, 2), (3, 1, 1), (2, 3, 1)])
def test_every_order_of_arrival(
    mode: str, staleness: int | None, n: int, steps: int, keys: int
) -> None:
    orders = 0
    for server, commands in every_order(n, steps, keys, mode, staleness):
        orders += 1
        assert server.received == server.applied == n * steps * keys
        applied = Counter(
            (c.worker, c.key)
            for c in commands
            if isinstance(c, Accumulate) or (isinstance(c, Apply) and c.worker is not None)
        )
        assert applied == dict.fromkeys(itertools.product(range(n), range(keys)), steps)
        replies = Counter((c.worker, c.key) for c in commands if isinstance(c, Reply))
        assert replies == applied
        assert isinstance(commands[-1], Finish) and commands.count(Finish()) == 1
        if mode == "sync":
            for key in range(keys):
                summed = [c.worker for c in commands if isinstance(c, Accumulate) and c.key == key]
                assert summed == list(range(n)) * steps
    assert orders > 1


@pytest.mark.parametrize(
    "mode, staleness, steps, worst", [("sync", None, 3, 0), ("ssp", 0, 3, 1), ("ssp", 1, 4, 3)]
)
def test_the_staleness_bound_is_sharp(
    mode: str, staleness: int | None, steps: int, worst: int
) -> None:
    seen = max(max(s.staleness) for s, _ in every_order(2, steps, 1, mode, staleness))
    assert seen == worst == staleness_bound(mode, 2, staleness)


def test_every_transition_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table has no row that no run needs."""
    seen = set()
    signal = server_module._Unit.signal

    def spy(unit: Any, worker: int, what: Any) -> None:
        seen.add((unit.phase[worker], what))
        signal(unit, worker, what)

    monkeypatch.setattr(server_module._Unit, "signal", spy)
    for mode, staleness in MODES:
        for seed in range(15):
            World(seed, mode=mode, staleness=staleness, **plan(seed, 4)).run()
    assert seen == {(phase, signal) for phase in TRANSITIONS for signal in TRANSITIONS[phase]}


# One rule at a time.


def replies(commands: Sequence[Command]) -> list[tuple[int, int, int]]:
    return [(c.worker, c.key, c.version) for c in commands if isinstance(c, Reply)]


def test_sync_answers_a_key_as_soon_as_its_sum_is_complete() -> None:
    server = ServerState([0, 1], [5, 6])
    assert server.handle(Push(1, 6)) == ()  # held: worker 0 comes first in the sum
    assert server.handle(Push(0, 6)) == (
        Accumulate(6, 0, first=True),
        Accumulate(6, 1, first=False),
        Apply(6, None, version=1, staleness=0),
        Reply(1, 6, 1),
        Reply(0, 6, 1),
    )
    assert server.pending == 0 and not server.finished
    assert server.handle(Push(0, 5)) == (Accumulate(5, 0, first=True),)
    assert server.pending == 1 and server.slowest == (1,)


def test_sync_goes_on_without_those_who_left() -> None:
    server = ServerState([0, 1, 2], [0])
    assert server.handle(Done(0)) == ()
    assert server.handle(Push(1, 0)) == (Accumulate(0, 1, first=True),)
    assert server.handle(Done(2)) == (Apply(0, None, 1, 0), Reply(1, 0, 1))
    assert server.handle(Done(1)) == (Finish(),)
    assert server.finished and server.updates_lost == 0


def test_async_applies_and_answers_a_shard_as_a_whole() -> None:
    server = ServerState([0, 1], [0, 1], "async")
    assert server.handle(Push(0, 1)) == ()
    assert server.handle(Push(1, 0)) == ()
    commands = server.handle(Push(0, 0))
    assert commands == (Apply(0, 0, 1, 0), Apply(1, 0, 1, 0), Reply(0, 0, 1), Reply(0, 1, 1))
    commands = server.handle(Push(1, 1))
    assert commands == (Apply(0, 1, 2, 1), Apply(1, 1, 2, 1), Reply(1, 0, 2), Reply(1, 1, 2))
    assert server.staleness == {0: 1, 1: 1}
    assert replies(server.handle(Pull(0))) == [(0, 0, 2), (0, 1, 2)]


@pytest.mark.parametrize(
    "mode, staleness, alone", [("sync", None, 1), ("ssp", 0, 1), ("ssp", 2, 3)]
)
def test_nobody_runs_further_ahead_than_allowed(
    mode: str, staleness: int | None, alone: int
) -> None:
    """Beside a silent worker, one can push s + 1 times and is answered s times; then it waits."""
    server = ServerState([0, 1], [0], mode, staleness)
    for step in range(1, alone + 1):
        answered = replies(server.handle(Push(0, 0)))
        assert answered == ([(0, 0, step)] if step < alone else [])
    assert server.slowest == (1,)
    assert (0, 0) in [answer[:2] for answer in replies(server.handle(Push(1, 0)))]


def test_async_never_waits() -> None:
    server = ServerState([0, 1], [0], "async")
    for step in range(1, 50):
        assert replies(server.handle(Push(0, 0))) == [(0, 0, step)]
    assert replies(server.handle(Push(1, 0))) == [(1, 0, 50)]
    assert server.staleness[49] == 1


@pytest.mark.parametrize("leave", [Done(1), Failed(1, 0)])
def test_who_leaves_holds_nobody_up(leave: Done | Failed) -> None:
    server = ServerState([0, 1], [0], "ssp", 0)
    assert replies(server.handle(Push(0, 0))) == []
    assert replies(server.handle(leave)) == [(0, 0, 1)]


def test_half_a_push_is_answered_and_never_applied() -> None:
    server = ServerState([0, 1], [0, 1], "async")
    server.handle(Push(0, 1))
    assert server.handle(Failed(0, 1)) == (Reply(0, 1, 0),)
    assert (server.received, server.applied, server.discarded) == (1, 0, 1)
    assert server.updates_lost == server.pending == 0
    with pytest.raises(MismatchError, match="LEFT"):
        server.handle(Push(0, 0))


def test_a_failure_waits_for_the_pushes_that_it_overtook() -> None:
    server = ServerState([0, 1], [0, 1])
    assert server.handle(Failed(1, 1)) == ()
    assert server.handle(Push(0, 0)) == (Accumulate(0, 0, first=True),)
    commands = server.handle(Push(1, 0))
    assert commands[:3] == (Accumulate(0, 1, False), Apply(0, None, 1, 0), Reply(0, 0, 1))
    assert server.handle(Push(0, 1))[1:] == (Apply(1, None, 1, 0), Reply(0, 1, 1))
    with pytest.raises(MismatchError, match=r"after 0 pushes, but 2 have come"):
        server.handle(Failed(0, 0))


def test_one_worker_is_served_by_itself() -> None:
    for mode, staleness in MODES:
        world = World(0, [4], mode=mode, staleness=staleness).run()
        assert {value for value, _ in world.parameters.values()} == set(
            in_one_process(world).values()
        )


def test_a_server_without_keys_ends_with_its_workers() -> None:
    for mode, staleness in MODES:
        server = ServerState([0, 1], [], mode, staleness)
        assert server.handle(Pull(0)) == ()
        assert server.handle(Done(0, final=True)) == ()
        assert server.handle(Failed(1, 0)) == (Finish(),)


# Service.


def test_service_goes_round() -> None:
    server = ServerState([4, 5, 6, 7], [0])
    everybody = {4, 5, 6, 7}
    assert [server.select(everybody) for _ in range(9)] == [4, 5, 6, 7, 4, 5, 6, 7, 4]


def test_first_come_first_served() -> None:
    server = ServerState([0, 1, 2, 3], [0])
    assert server.select({0, 3}) == 0
    assert server.select({1, 3}) == 3  # waits since the call before
    assert server.select({0, 1}) == 1
    with pytest.raises(ArgumentError, match="ready"):
        server.select(set())


def test_of_two_that_come_together_each_is_first_at_times() -> None:
    server = ServerState([0, 1, 2, 3], [0])
    firsts = []
    for _ in range(4):
        firsts.append(server.select({1, 3}))
        server.select({4 - firsts[-1]})
    assert firsts == [1, 3, 1, 3]


def test_nobody_starves() -> None:
    """Whatever the others do, who stays ready is served after at most n - 1 others."""
    rng = random.Random(0)
    for n in range(2, 9):
        server = ServerState(range(n), [0])
        waited = dict.fromkeys(range(n), 0)
        ready: set[int] = set()
        for _ in range(400):
            ready |= {0} | {w for w in range(n) if rng.random() < 0.5}
            served = server.select(ready)
            ready.discard(served)
            waited = {w: waited[w] + 1 if w in ready else 0 for w in waited}
            assert max(waited.values()) <= n - 1


# What breaks the protocol.


@pytest.mark.parametrize(
    "mode, before, message, complaint",
    [
        ("sync", [], Push(9, 0), "a message from 9"),
        ("sync", [], Push(0, 7), r"key 7; this shard: \[0, 1\]"),
        ("sync", [Push(0, 0)], Push(0, 0), "while PUSHED"),
        ("async", [Push(0, 0)], Push(0, 0), "twice in one step"),
        ("async", [Push(0, 0)], Done(0), "in the middle of a step"),
        ("async", [Push(0, 0)], Pull(0), "pushed 1 of 2 keys"),
        ("sync", [Push(0, 0), Push(0, 1)], Done(0), "while PUSHED"),
        ("sync", [Push(0, 0), Push(1, 0)], Push(0, 0), "twice in one step"),
        ("sync", [Done(0)], Done(0), "was done while LEFT"),
        ("async", [Done(0, True)], Failed(0, 0), "failed while LEAVING"),
    ],
)
def test_a_server_refuses(mode: str, before: list[Any], message: Any, complaint: str) -> None:
    server = ServerState([0, 1], [0, 1], mode)
    for earlier in before:
        server.handle(earlier)
    with pytest.raises(MismatchError, match=complaint):
        server.handle(message)


def test_a_step_ends_with_its_last_answer() -> None:
    worker = WorkerState(0, [[0], [1]])
    worker.push(0)
    worker.receive(0)
    assert not worker.ready
    worker.push(1)
    assert worker.step == 0
    worker.receive(1)
    assert worker.ready and worker.step == 1
    worker.push(0)
    worker.push(1)
    worker.receive(1)
    assert (worker.step, worker.ready, worker.owed) == (1, False, {0})


def test_a_worker_refuses() -> None:
    worker = WorkerState(3, [[0], [1]])
    assert worker.pull() == ((0, Pull(3)), (1, Pull(3)))
    with pytest.raises(MismatchError, match="a pull is under way"):
        worker.push(0)
    worker.receive(0)
    worker.receive(1)
    assert worker.ready
    with pytest.raises(MismatchError, match="did not expect"):
        worker.receive(1)
    assert worker.push(1) == (1, Push(3, 1))
    with pytest.raises(MismatchError, match="pushed before"):
        worker.push(1)
    with pytest.raises(MismatchError, match=r"cannot leave at step 0: keys pushed \[1\]"):
        worker.done()
    with pytest.raises(ArgumentError, match="key is 5"):
        worker.push(5)
    assert worker.fail() == ((0, Failed(3, 0)), (1, Failed(3, 1)))
    with pytest.raises(MismatchError, match="it has left"):
        worker.push(0)
    assert worker.owed == {1}


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        ({"mode": "lazy"}, "'lazy'; allowed are sync, async, ssp"),
        ({"mode": "ssp"}, "staleness is None"),
        ({"mode": "ssp", "staleness": -1}, "staleness is -1"),
        ({"mode": "async", "staleness": 2}, "only mode 'ssp'"),
        ({"workers": []}, "workers are"),
        ({"workers": [1, 1]}, "workers are"),
        ({"keys": [2, 2]}, "keys are"),
    ],
)
def test_settings_that_do_not_fit(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ArgumentError, match=complaint):
        ServerState(**{"workers": [0], "keys": [0], **arguments})


def test_a_key_lives_on_one_server() -> None:
    with pytest.raises(ArgumentError, match="share a key"):
        WorkerState(0, [[0, 1], [1]])
