"""What each idea brings: ``mpirun -n 4 python -m bench.steps``.

One optimizer step, taken in all the ways that this library knows, in the order in which one
would come upon them: gradients exchanged after backward, behind it, one by one, in buckets; after
the last of several micro-batches; by a server, by servers on all ranks; with the optimizer's state
shared out. All compute the same micro-batches and must end with the same values.

The network is emulated (``network``), the exchange is not. Every mode runs twice by turns: as it
is, and *alone*, with nothing to compute, which tells how much there is to hide.

When all runs are over, what each rank has sent is compared with a count message by message. The
formulas in the table are those of the ring and of equal shares: gradients that are short by
themselves are summed by recursive doubling, which sends more.
"""

from __future__ import annotations

import os
import sys
import time
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from bench.case import Array, Case
from bench.entry import enter, files_complaint, hosts, library, place
from bench.measure import Clock, Statistic
from bench.network import DTYPE, Network, Parameter, gradient_sizes
from bench.options import Parser, Stop, at_least
from bench.report import size, write_json
from bench.steps_report import Row, draw, heading, tables
from mpiring import Communicator
from mpiring.engine.progress import ProgressEngine
from mpiring.parallel.buckets import BUCKET, FIRST_BUCKET, MIB, layout
from mpiring.parallel.placement import placement, roles, shard_bytes, traffic
from mpiring.parallel.reducer import Reducer
from mpiring.parallel.server_strategy import ServerStrategy
from mpiring.parallel.sharded import ShardedReducer
from mpiring.schedule.catalog import choose
from mpiring.trace import Ledger
from mpiring.train.loop import hidden_percent

# -- the modes --------------------------------------------------------------------------------


class Assign:
    """In the place of an optimizer: values become the summed gradients, by way of a state.

    One array of state, as momentum is, and a result that can be verified after every step.
    """

    def __init__(self, count: int) -> None:
        self.state = {"latest": np.zeros(count, DTYPE)}
        self.steps = 0
        self.seconds = 0.0

    def step(self, values: Array, gradients: Array) -> None:
        self.update(values, gradients)

    def update(self, values: Array, gradients: Array, start: int = 0) -> None:
        begin = time.perf_counter()
        latest = self.state["latest"][start : start + values.size]
        np.copyto(latest, gradients)
        np.copyto(values, latest)
        self.seconds += time.perf_counter() - begin


class Exchange(Protocol):
    """What reducers and strategies have in common."""

    @property
    def polling_seconds(self) -> float: ...
    @property
    def waiting_seconds(self) -> float: ...
    @property
    def no_sync(self) -> Callable[[], AbstractContextManager[None]]: ...
    def ready(self, parameter: Any) -> None: ...


class Nothing:
    """No exchange."""

    polling_seconds = waiting_seconds = 0.0
    no_sync = staticmethod(nullcontext)

    def ready(self, parameter: Parameter) -> None: ...


@dataclass(frozen=True)
class Bound:
    """A mode, bound to a network on this rank."""

    exchange: Exchange
    update: Callable[[], object]  #: what follows backward: the rest of the exchange, the update
    optimizer: Assign
    sent: int = 0  #: bytes that this rank has to send in an exchange
    finish: Callable[[], object] | None = None  #: ends an exchange in the middle of a step
    close: Callable[[], object] = lambda: None
    served: bool = False  #: updates are made while others wait for them: they are exposed


class Limits(NamedTuple):
    """Bytes of a bucket, at most."""

    first_bucket_bytes: int
    bucket_bytes: int


def sequential(comm: Communicator, network: Network, limits: Limits) -> Bound:
    optimizer = Assign(network.values.size)
    return Bound(Nothing(), lambda: optimizer.step(network.values, network.gradients), optimizer)


def all_reduced(
    comm: Communicator, network: Network, limits: Limits, *, overlap: bool = True
) -> Bound:
    reducer = Reducer(comm, network.parameters, overlap=overlap, **limits._asdict())
    optimizer = Assign(network.values.size)

    def update() -> None:
        reducer.finish()
        optimizer.step(network.values, network.gradients)

    buckets = [bucket.gradient.nbytes for bucket in reducer.buckets]
    sent = sum(all_reduce_bytes(nbytes, comm.size, comm.rank) for nbytes in buckets)
    return Bound(reducer, update, optimizer, sent, reducer.finish, reducer.free)


def one_by_one(comm: Communicator, network: Network, limits: Limits) -> Bound:
    return all_reduced(comm, network, Limits(1, 1))


def sharded(comm: Communicator, network: Network, limits: Limits) -> Bound:
    reducer = ShardedReducer(comm, network.parameters, **limits._asdict())
    optimizer = Assign(reducer.count)

    def update() -> None:
        reducer.finish()
        reducer.update(optimizer.update)

    sent = 2 * (comm.size - 1) * network.nbytes // comm.size
    return Bound(reducer, update, optimizer, sent, close=reducer.free)


def served(comm: Communicator, network: Network, limits: Limits, *, servers: str) -> Bound:
    optimizer = Assign(network.values.size)
    strategy = ServerStrategy(
        comm,
        network.parameters,
        network.values,
        network.gradients,
        optimizer,
        lambda gradient: True,
        servers=servers,
        **limits._asdict(),
    )
    gradients = [parameter.gradient for parameter in network.parameters]
    buckets = layout(gradients, limits.bucket_bytes, limits.first_bucket_bytes)
    who = roles(comm.size, servers)
    keys = placement([bucket.gradient.nbytes for bucket in buckets], len(who.servers))
    sent = traffic(who, shard_bytes(keys, len(who.servers)))[comm.rank].out
    return Bound(strategy, strategy.update, optimizer, sent, close=strategy.finish, served=True)


def all_reduce_bytes(nbytes: int, ranks: int, rank: int) -> int:
    """What ``rank`` sends in an all-reduce of ``nbytes``, a multiple of as many elements.

    Around the ring two times all chunks but one. In the recursive doubling of a short array all
    of it, to log2(n) ranks. There a rank beyond the largest power of two has one partner, for
    which it is one more.
    """
    if choose("allreduce", ranks, nbytes) == "ring":
        return 2 * (ranks - 1) * nbytes // ranks
    core = 1 << (ranks.bit_length() - 1)
    return nbytes * (1 if rank >= core else core.bit_length() - 1 + (rank < ranks - core))


class Formula(NamedTuple):
    """Bytes over S, the bytes of all gradients, of n ranks with K micro-batches each."""

    text: str
    share: Callable[[int, int], float]


NOTHING = Formula("", lambda n, k: 0.0)
RING = Formula("2(n-1)/n S", lambda n, k: 2 * (n - 1) / n)
EVERY = Formula("K 2(n-1)/n S", lambda n, k: k * 2 * (n - 1) / n)
SERVER = Formula("(n-1) S", lambda n, k: n - 1.0)
WHOLE = Formula("S", lambda n, k: 1.0)
SHARD = Formula("S/n", lambda n, k: 1 / n)

#: For (rank, n, K): the numbers of the micro-batches that are computed as one, one after the other.
Division = Callable[[int, int, int], Sequence[Sequence[int]]]


def at_once(rank: int, n: int, k: int) -> list[range]:
    return [range(rank * k, (rank + 1) * k)]


def one_after_the_other(rank: int, n: int, k: int) -> list[range]:
    return [range(i, i + 1) for i in range(rank * k, (rank + 1) * k)]


def all_ranks(rank: int, n: int, k: int) -> list[range]:
    return [range(i * k, (i + 1) * k) for i in range(n)]


@dataclass(frozen=True)
class Mode:
    """A way to take the step. Formulas are of bytes, per rank and step."""

    name: str
    idea: str
    bind: Callable[[Communicator, Network, Limits], Bound]
    sent: Formula = RING  #: the mean over ranks
    busiest: Formula = RING  #: the rank that sends most
    state: Formula = WHOLE
    division: Division = at_once
    every: bool = False  #: whether to exchange after every micro-batch


MODES = (
    Mode(
        "accumulation",
        "one rank computes the shares of all n, one after the other",
        sequential,
        sent=NOTHING,
        busiest=NOTHING,
        division=all_ranks,
    ),
    Mode(
        "naive",
        "a share each; gradients are summed over ranks after backward",
        partial(all_reduced, overlap=False),
    ),
    Mode(
        "per-gradient",
        "each gradient is summed as soon as it is there, behind backward",
        one_by_one,
    ),
    Mode("buckets", "the same, with many gradients in one collective", all_reduced),
    Mode(
        "sync-every",
        "K micro-batches in a share, gradients summed behind each",
        all_reduced,
        sent=EVERY,
        busiest=EVERY,
        division=one_after_the_other,
        every=True,
    ),
    Mode(
        "no-sync",
        "K micro-batches in a share, gradients summed behind the last",
        all_reduced,
        division=one_after_the_other,
    ),
    Mode(
        "server",
        "as buckets, but rank 0 sums and updates for all, and works too",
        partial(served, servers="colocated:1"),
        busiest=SERVER,
    ),
    Mode(
        "colocated",
        "the same, with every rank the server of its part",
        partial(served, servers="colocated"),
    ),
    Mode(
        "zero",
        "as buckets, but each rank sums and updates its part; all gather",
        sharded,
        state=SHARD,
    ),
)


# -- a step -----------------------------------------------------------------------------------


class Traffic(Ledger):
    """A ledger that knows what is not over yet."""

    under_way = 0

    def started(self, label: str, key: int) -> None:
        self.under_way += 1

    def ended(self, label: str, key: int, nbytes_sent: int) -> None:
        self.under_way -= 1
        super().ended(label, key, nbytes_sent)


class Contender:
    """A mode with an engine of its own: nothing else is polled meanwhile."""

    def __init__(
        self, mode: Mode, world: Any, network: Network, limits: Limits, accumulate: int
    ) -> None:
        self.mode, self._world, self._network = mode, world, network
        self._engine = ProgressEngine()
        self._comm = Communicator(world, engine=self._engine)
        self._bound = mode.bind(self._comm, network, limits)
        division = mode.division(world.rank, world.size, accumulate)
        self._batches = [network.batch(numbers) for numbers in division]
        self._ledger = Traffic()
        self._engine.instruments.append(self._ledger)
        self._runs = 0

    def case(self, seconds: float) -> tuple[Case, list[Times]]:
        """A step whose computing takes ``seconds``; and what each run of it is made of."""
        times: list[Times] = []

        def prepare() -> None:
            self._network.values.fill(0)
            self._network.gradients.fill(0)

        def run() -> None:
            before = self._times()
            self._step(seconds)
            times.append(Times(*np.subtract(self._times(), before)))
            self._runs += 1

        def wrong() -> int:
            # A rank that is done may owe something to others, as a server does: go on polling.
            self._engine.wait(self._world.Ibarrier().Test)
            self._engine.wait(lambda: not self._ledger.under_way)
            return self._network.wrong()

        return Case(run, wrong, prepare), times

    def _times(self) -> Times:
        """Up to now."""
        exchange, optimizer = self._bound.exchange, self._bound.optimizer
        return Times(
            time.perf_counter(),
            exchange.polling_seconds + exchange.waiting_seconds,
            0.0 if self._bound.served else optimizer.seconds,
        )

    def _step(self, seconds: float) -> None:
        mode, bound, batches = self.mode, self._bound, self._batches
        exchange, last = bound.exchange, len(batches) - 1
        for number, batch in enumerate(batches):
            # After an exchange all ranks hold the sum so far; one carries it into the next.
            accumulate = number > 0 and not (mode.every and self._world.rank)
            silent = number < last and not mode.every
            with exchange.no_sync() if silent else nullcontext():
                for parameter in self._network.run(
                    batch, seconds / len(batches), accumulate, self._comm.poll
                ):
                    exchange.ready(parameter)
            if mode.every and number < last and bound.finish:
                bound.finish()
        bound.update()

    def account(self) -> Account:
        return Account(
            self._ledger.collectives / self._runs,
            self._ledger.nbytes_sent / self._runs,
            self._bound.sent * (len(self._batches) if self.mode.every else 1),
            sum(array.nbytes for array in self._bound.optimizer.state.values()),
        )

    def close(self) -> None:
        self._bound.close()
        self._comm.Free()


class Times(NamedTuple):
    """Of a step, in seconds."""

    step: float
    exposed: float
    update: float


class Account(NamedTuple):
    """Of a rank, per step."""

    started: float  #: collectives, or messages to and from servers
    sent: float  #: bytes
    expected: int  #: of these, counted message by message
    state: int  #: bytes of the optimizer's


# -- the whole --------------------------------------------------------------------------------


def measure(world: Any, options: Namespace) -> list[Row]:
    """Run everything; the rows, the same on every rank. Collective."""
    n, k = world.size, options.accumulate
    network = Network(gradient_sizes(int(options.mib * MIB), options.layers, n), n * k)
    limits = bucket_limits(options.bucket_mb, network.nbytes)
    contenders = [Contender(mode, world, network, limits, k) for mode in MODES]
    cases: dict[str, Case] = {}
    parts: dict[str, list[Times]] = {}
    for each in contenders:
        for name, seconds in ((each.mode.name, options.compute_ms / 1e3), (alone(each.mode), 0.0)):
            # What one rank does for all takes n times as long.
            shares = len(each.mode.division(0, n, 1))
            cases[name], parts[name] = each.case(shares * seconds)
    clock = Clock(world, cases)
    clock.warm_up(options.warmup)
    steps = clock.run(options.repeats, options.budget)
    typicals = {
        name: typical(np.array(world.allgather(times[-steps[name].repeats :])))
        for name, times in parts.items()
    }
    accounts = [world.allgather(each.account()) for each in contenders]
    for each in contenders:
        each.close()
    for each, ranks in zip(contenders, accounts):
        check(each.mode.name, ranks)
    first = steps[MODES[0].name].median
    return [
        row(each.mode, ranks, steps, typicals, first, network.nbytes, k)
        for each, ranks in zip(contenders, accounts)
    ]


def typical(times: Array) -> Times:
    """What the slowest rank's step is made of: the mean over the middle half of repetitions.

    ``times``: of shape (ranks, repetitions, 3). Means add up, as medians of each part would not.
    """
    repetitions = np.arange(times.shape[1])
    slowest = times[times[:, :, 0].argmax(axis=0), repetitions]
    quarter = len(repetitions) // 4
    middle = slowest[:, 0].argsort()[quarter : len(repetitions) - quarter]
    return Times(*slowest[middle].mean(axis=0).tolist())


def alone(mode: Mode) -> str:
    return f"{mode.name}, alone"


def bucket_limits(wish: float | None, nbytes: int) -> Limits:
    """From MiB asked for, or the library's own; then of all gradients an eighth at most."""
    if wish is not None:
        return Limits(*[max(1, int(wish * MIB))] * 2)
    return Limits(*(max(1, min(limit, nbytes // 8)) for limit in (FIRST_BUCKET, BUCKET)))


def check(name: str, ranks: Sequence[Account]) -> None:
    """Raise Stop, the same on every rank, unless all have sent what they had to."""
    for rank, account in enumerate(ranks):
        if account.sent != account.expected:
            raise Stop(
                f"{name}: rank {rank} sent {account.sent:,.10g} bytes a step; by the formula it is "
                f"{account.expected:,}\n",
                1,
            )


def row(
    mode: Mode,
    ranks: Sequence[Account],
    steps: dict[str, Statistic],
    parts: dict[str, Times],
    first: float,
    nbytes: int,
    accumulate: int,
) -> Row:
    n = len(ranks)
    step, (whole, exposed, update) = steps[mode.name], parts[mode.name]
    communication = parts[alone(mode)].exposed
    sent = [account.sent for account in ranks]

    def formula(which: Formula) -> float:
        return which.share(n, accumulate) * nbytes

    return Row(
        mode=mode.name,
        idea=mode.idea,
        step_ms=step.median * 1e3,
        exposed_ms=exposed * 1e3,
        update_ms=update * 1e3,
        compute_ms=(whole - exposed - update) * 1e3,
        alone_ms=communication * 1e3,
        hidden_percent=hidden_percent(communication, whole - exposed, whole),
        speedup=first / step.median,
        started=max(account.started for account in ranks),
        sent=sum(sent) / n,
        sent_formula=formula(mode.sent),
        sent_text=mode.sent.text,
        busiest=max(sent),
        busiest_formula=formula(mode.busiest),
        busiest_text=mode.busiest.text,
        state=max(account.state for account in ranks),
        state_formula=formula(mode.state),
        state_text=mode.state.text,
        wrong=step.wrong + steps[alone(mode)].wrong,
        repeats=step.repeats,
        min_ms=step.minimum * 1e3,
        q1_ms=step.lower_quartile * 1e3,
        q3_ms=step.upper_quartile * 1e3,
    )


def parse(arguments: Sequence[str]) -> Namespace:
    listed = "\n".join(f"  {mode.name:<13} {mode.idea}" for mode in MODES)
    parser = Parser(
        prog="python -m bench.steps",
        description="One optimizer step in all ways that this library knows, each measured beside "
        "its formula.\nStart two ranks or more: mpirun -n 4 python -m bench.steps",
        epilog=f"modes, in the order of the table:\n{listed}\n\nexit code: 0, 1 if an element or a "
        "number of bytes was wrong, 2 for bad arguments",
        formatter_class=RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--mib",
        type=at_least(1e-3, float),
        default=16.0,
        help="MiB of all gradients (default: 16)",
    )
    add(
        "--layers",
        type=at_least(1, int),
        default=32,
        metavar="N",
        help="of the network, a weight and a bias each (default: 32)",
    )
    add(
        "--compute-ms",
        type=at_least(0, float),
        default=60.0,
        metavar="MS",
        help="to compute a rank's share of the step, a third of it forward (default: 60)",
    )
    add(
        "--accumulate",
        type=at_least(1, int),
        default=4,
        metavar="K",
        help="micro-batches in a share, for sync-every and no-sync (default: 4)",
    )
    add(
        "--bucket-mb",
        type=at_least(1e-3, float),
        metavar="MIB",
        help="MiB of a bucket (default: the library's 1, then 25; at most an eighth of all)",
    )
    add(
        "--repeats",
        type=at_least(1, int),
        metavar="N",
        help="repetitions (default: as many as the budget allows)",
    )
    add(
        "--warmup",
        type=at_least(1, int),
        default=2,
        metavar="N",
        help="repetitions before those that count (default: 2)",
    )
    add(
        "--budget",
        type=at_least(0, float),
        default=20.0,
        metavar="SECONDS",
        help="aim at this much time in all (default: 20)",
    )
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    add("--plot", type=Path, metavar="FILE.png", help="draw them (matplotlib)")
    return parser.parse_args(arguments)


def complaint(options: Namespace, ranks: int, crowd: int) -> str | None:
    """What stands against measuring; ``crowd``: ranks on a host."""
    if ranks < 2:
        return "one rank has nobody to exchange with; start at least two"
    # Gradients, values, their sum, a state for each mode, and what servers hold for workers.
    needed = int((len(MODES) + 8 + ranks) * options.mib * MIB * crowd)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        return (
            f"--mib {options.mib:g} needs about {size(needed)} for the ranks of a host; this one "
            f"has {size(memory)}"
        )
    return files_complaint(options)


def run(options: Namespace, MPI: Any) -> int:
    world = MPI.COMM_WORLD.Dup()
    found = hosts(world, MPI)
    trouble = None
    if world.rank == 0:
        trouble = complaint(options, world.size, max(host.ranks for host in found))
    if trouble := world.bcast(trouble):
        raise Stop(f"python -m bench.steps: error: {trouble}\n", 2)
    rows = measure(world, options)
    if world.rank == 0:
        setting = {
            "ranks": world.size,
            "place": place(found),
            "mpi": library(MPI),
            "layers": options.layers,
            "bytes": int(rows[0].state_formula),
            "share_ms": options.compute_ms,
            "micro_batches": options.accumulate,
        }
        print(heading(setting))
        print(tables(rows), flush=True)
        if options.json:
            write_json(options.json, [{**setting, **asdict(row)} for row in rows])
        if options.plot:
            draw(rows, setting, options.plot)
    wrong = [row.mode for row in rows if row.wrong]
    world.Free()
    if wrong:
        raise Stop(f"WRONG RESULTS from {', '.join(wrong)}\n", 1)
    return 0


def main(arguments: Sequence[str]) -> int:
    return enter(lambda: parse(arguments), run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
