"""``ParameterServer``: workers push gradients, servers update parameters and hand them back.

One object on every rank, whatever its part: a *worker* pushes and steps, a *server* updates
its shard, and with co-location a rank is both. The pieces: ``protocol`` the rules, ``placement``
who holds what, ``client`` a worker's arrays and messages, ``service`` a server's. What is here
is the life of the whole: agreement at the start, the actor that the engine polls, the end.

A server moves when its process polls: in any wait of this library, in ``Communicator.poll``,
and in a progress thread where there is one. A rank that computes for long without either is
a server that does not answer.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpiring.communicator import Communicator
from mpiring.communicator.agreement import Patience
from mpiring.communicator.arguments import operand
from mpiring.device.base import Array
from mpiring.errors import ArgumentError
from mpiring.parallel.arrivals import Arrival, Arrivals, format_logs, parse_logs
from mpiring.parallel.client import Client, piece
from mpiring.parallel.consensus import agree, everyone, together
from mpiring.parallel.links import Links, Outbox
from mpiring.parallel.placement import Key, placement, roles, shard_bytes, shards, traffic
from mpiring.parallel.protocol import lead_of
from mpiring.parallel.server import ServerState
from mpiring.parallel.service import Optimizer, Service, answer_slot
from mpiring.parallel.worker import WorkerState


@dataclass(frozen=True)
class Summary:
    """What a whole run came to, over all ranks.

    Bytes are those of gradients and parameters that went over links; the answers to workers
    that had left (the final parameters) are in ``final_bytes`` alone. ``staleness`` counts pushes
    of whole shards (in sync: of keys) by how many versions old their parameters were.
    ``skipped`` counts updates of a key that were not made, by their version.
    """

    bytes_in: dict[int, int]
    bytes_out: dict[int, int]
    final_bytes: int
    steps: dict[int, int]  #: of each worker
    staleness: Counter[int]
    skipped: Counter[int]
    updates_lost: int  #: pushes of a key that are not part of any update


class ParameterServer:
    """Parameters that servers update with the gradients that workers push.

        from functools import partial
        from mpiring.nn.optim import SGD

        with mpiring.ParameterServer(
            comm, {"w": w, "b": b}, mode="async", servers=1, optimizer=partial(SGD, lr=0.1)
        ) as server:
            for x, y in batches if server.is_worker else ():
                dw, db = gradients(w, b, x, y)
                server.push("b", db)
                server.push("w", dw)
                server.step()           # w and b are new now

    ``comm``: an mpi4py intracommunicator or an ``mpiring.Communicator``. Constructor and
    ``close`` are collective; nothing else is.

    ``parameters``: arrays by name, or in a sequence and then known by their place; NumPy's or
    on a GPU, C-contiguous, of the same sizes and dtypes on every rank. Those of rank 0 count.
    Every array is a message of its own or, if large, several; many small ones are better laid
    into one.

    ``optimizer(count, dtype)`` makes an object whose ``step(values, gradients)`` updates flat
    ``values`` in place; there is one for every part of a parameter. In sync it sees the *sum* of
    the workers' gradients, otherwise those of one worker at a time: scale accordingly.

    ``mode``: "sync", "async", or "ssp" with ``staleness`` steps that a worker may be ahead of the
    slowest. ``servers``: a number K of ranks, the last ones, which serve only; "colocated": every
    rank is worker and server; "colocated:K": all work, the first K serve too.

    ``record``: a file that rank 0 writes at the end, the order in which pushes were applied;
    ``replay``: such a file, as rank 0 sees it. All else being equal the run has the same bits.

    ``accept(gradient)`` tells whether an update may be made with a flat gradient (default:
    always); others are skipped on the server and counted. ``smallest`` and ``largest`` bound the
    bytes of a message, see ``placement``.

    Arrays on a GPU are taken over from the stream that is current in the call: ``push`` from
    the work on the gradient, ``pull``, ``step`` and ``refresh`` from that on the old parameters.

    Memory beside the parameters: a server holds its shard, and once for each worker (in async
    and ssp twice) as much again.

    Raises ArgumentError or MismatchError, the same on every rank, for arguments that do not fit.
    """

    def __init__(
        self,
        comm: Any,
        parameters: Mapping[Any, Array] | Sequence[Array],
        *,
        optimizer: Callable[[int, Any], Optimizer],
        mode: str = "sync",
        staleness: int | None = None,
        servers: int | str = "colocated",
        record: str | os.PathLike[str] | None = None,
        replay: str | os.PathLike[str] | None = None,
        accept: Callable[[Array], bool] = lambda gradient: True,
        smallest: int = 64 << 10,
        largest: int = 4 << 20,
    ) -> None:
        self._owns = not isinstance(comm, Communicator)
        self._comm = Communicator(comm) if self._owns else comm
        self.mode, self.staleness_allowed = mode, staleness
        self._record = record

        def understand() -> None:
            lead_of(mode, staleness)
            self._roles = roles(self._comm.size, servers)
            names = parameters if isinstance(parameters, Mapping) else range(len(parameters))
            self._numbers: dict[Any, int] = {name: i for i, name in enumerate(names)}
            self._flat = [_flat(parameters[name], f"parameters[{name!r}]") for name in names]
            if not self._flat:
                raise ArgumentError("parameters: none given; needed is at least one array")
            self.keys: tuple[Key, ...] = placement(
                [array.nbytes for array in self._flat],
                len(self._roles.servers),
                smallest=smallest,
                largest=largest,
            )
            if mode == "sync" and (record or replay):
                raise ArgumentError(
                    "record, replay: given, but sync has the same result in every order"
                )

        together(self._comm, understand)
        agree(
            self._comm,
            "ParameterServer: arguments",
            f"mode {mode}, staleness {staleness}, servers {servers}, messages of {smallest} to "
            f"{largest} bytes, recorded {bool(record)}, replayed {bool(replay)}, parameters "
            + ", ".join(
                f"{name!r}: {array.size} x {array.dtype}"
                for name, array in zip(self._numbers, self._flat)
            ),
        )
        logs = self._logs(replay)
        for array in self._flat:
            self._comm.Bcast(array)

        transport = self._transport = self._comm.private_transport()
        if answer_slot(len(self.keys)) > transport.slots:
            raise ArgumentError(
                f"largest: {largest} given, which makes {len(self.keys)} messages; MPI tells only "
                f"{transport.slots // 2} apart"
            )
        self.rank: int = self._comm.rank
        self._engine = self._comm.engine
        self._outbox = Outbox(self._engine.instruments)
        device = self._comm.device_of
        # Asked only where it matters, since the answer is told to the user.
        on_host = all(device(array).kind == "host" for array in self._flat)
        direct = not on_host and self._comm.gpu_path() == "direct"
        links = Links(transport, device, direct=direct)
        held = shards(self.keys, len(self._roles.servers))
        self._service = self._serve(links, held, logs, optimizer, accept)
        self._client: Client | None = None
        if self.rank in self._roles.workers:
            state = WorkerState(self.rank, held)
            self._client = Client(
                state, self._flat, self.keys, self._roles.servers, links, self._outbox
            )
        self._gradients: dict[int, tuple[Array, Array]] = {}
        self._lock = threading.RLock()  # a progress thread polls too
        self._error: BaseException | None = None
        self._open = True
        self._summary: Summary | None = None
        self._waits_for = ""
        self._patience = Patience()
        self._engine.attach(self)
        self._engine.watch(self._stalled)

    def _logs(self, replay: Any) -> Sequence[Sequence[Arrival]]:
        """The log for each server; nothing where there is none."""
        if not replay:
            return [()] * len(self._roles.servers)
        comm = self._comm
        text = together(comm, lambda: Path(replay).read_text() if comm.rank == 0 else "")
        text = everyone(comm, text)[0]

        def parse() -> Sequence[Sequence[Arrival]]:
            logs = parse_logs(text)
            if len(logs) != len(self._roles.servers):
                raise ArgumentError(
                    f"replay: {replay} was recorded with {len(logs)} servers; here are "
                    f"{len(self._roles.servers)}"
                )
            for log in logs:
                Arrivals(self._roles.workers, log)
            return logs

        return together(comm, parse)

    def _serve(
        self,
        links: Links,
        held: Sequence[Sequence[int]],
        logs: Sequence[Sequence[Arrival]],
        optimizer: Callable[[int, Any], Optimizer],
        accept: Callable[[Array], bool],
    ) -> Service | None:
        if self.rank not in self._roles.servers:
            return None
        number = self._roles.servers.index(self.rank)
        values = {}
        for key in held[number]:
            source = piece(self._flat[self.keys[key].bucket], self.keys[key])
            device = links.device(source)
            values[key] = device.empty(source.size, source.dtype)
            copy = device.copy(source, values[key])
            copy.start()
            self._engine.wait(copy.done)
        state = ServerState(
            self._roles.workers, held[number], self.mode, self.staleness_allowed, logs[number]
        )
        return Service(state, values, links, self._outbox, optimizer, accept)

    # -- a worker's calls -----------------------------------------------------------------

    @property
    def is_worker(self) -> bool:
        """Whether this rank pushes and steps."""
        return self._client is not None

    @property
    def is_server(self) -> bool:
        """Whether this rank holds parameters for others."""
        return self._service is not None

    @property
    def workers(self) -> tuple[int, ...]:
        """The ranks that push."""
        return self._roles.workers

    @property
    def servers(self) -> tuple[int, ...]:
        """The ranks that hold the parameters."""
        return self._roles.servers

    def push(self, key: Hashable, gradient: Array) -> None:
        """Begin to send the gradient of a parameter: once for each in every step, in any order.

        ``gradient``: as many elements of the same dtype, C-contiguous; lent until ``step``
        returns. The same array each time saves binding it anew. Returns at once.
        """
        client, number = self._worker("push"), self._number(key)
        known = self._gradients.get(number)
        if known is None or known[0] is not gradient:
            flat, parameter = _flat(gradient, "gradient", writable=False), self._flat[number]
            if (flat.size, flat.dtype) != (parameter.size, parameter.dtype):
                raise ArgumentError(
                    f"gradient: {flat.size} x {flat.dtype} given for parameter {key!r}, which has "
                    f"{parameter.size} x {parameter.dtype}"
                )
            known = self._gradients[number] = gradient, flat
        with self._asking(client):
            client.push(number, known[1])

    def pull(self, key: Hashable) -> None:
        """Allow the answer to this step's push to be written into the parameter, from now on.

        For whoever knows that the old values are not read any more before ``step``, which
        allows it for all. Returns at once.
        """
        client, number = self._worker("pull"), self._number(key)
        if number not in client.pushed:
            raise ArgumentError(
                f"key: {key!r} has not been pushed in this step; refresh() asks for the newest "
                "parameters between two steps"
            )
        with self._asking(client):
            client.pull(number)

    def step(self) -> None:
        """Return when all pushes of this step are applied and the parameters are new."""
        client = self._worker("step")
        if client.missing:
            names = [name for name, number in self._numbers.items() if number in client.missing]
            raise ArgumentError(f"step: never pushed in this step: {names}; all are needed")
        with self._asking(client):
            client.pull_all()
        # Not for what a server on this rank owes others: a slow one must not hold this one up.
        self._wait(
            lambda: client.idle and not client.sending, f"the end of step {client.state.step}"
        )
        client.end_step()

    def refresh(self) -> None:
        """Fetch the newest parameters without pushing anything; between two steps."""
        client = self._worker("refresh")
        with self._asking(client):
            client.refresh()
        self._wait(lambda: client.idle, "the newest parameters")
        client.end_step()

    # -- life -----------------------------------------------------------------------------

    def close(self, final: bool = True) -> None:
        """Take no further step, and serve the others until all have done so.

        With ``final`` every worker ends with the parameters that the last one left behind; without,
        with those of its own last step, and nothing is sent.
        """
        if not self._open:
            return
        if self._client is not None:
            if self._client.pushed:
                self._give_up()
                raise ArgumentError("close: in the middle of a step; call step() first")
            with self._asking(self._client):
                self._client.leave(final)
        self._end("the end of the other workers")

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is None:
            self.close()
        elif self._open and issubclass(kind, Exception) and self._error is None:
            # The others need not know what went wrong here, but the shard that lives here.
            sys.stderr.write(
                f"mpiring: rank {self.rank} leaves its parameter server by {kind.__name__}: "
                f"{error}; it goes on when the other workers are done\n"
            )
            self._give_up()
        else:
            self._leave()

    def advance(self) -> bool:
        """What the engine polls."""
        with self._lock:
            return self._error is None and self._moved(self._move)

    def _move(self) -> bool:
        moved = self._client is not None and self._client.advance()
        moved |= self._service is not None and self._service.advance()
        return self._outbox.advance() or moved

    @contextmanager
    def _asking(self, client: Client) -> Iterator[None]:
        """What a call asks of the client is checked and noted inside, and begun afterwards."""
        with self._lock:
            yield
            self._moved(client.begin)

    def _moved(self, move: Callable[[], bool]) -> bool:
        """Whoever meets an error here, on whatever way, the server is broken."""
        try:
            return move()
        except BaseException as error:
            self._error = error
            raise

    def _give_up(self) -> None:
        """This rank's worker has failed. Its server goes on until the others are done."""
        if self._client is not None and not self._client.state.left:
            with self._asking(self._client):
                self._client.fail()
        self._end("the end of the other workers, having failed")

    def _end(self, what: str) -> None:
        """What all ranks do together, those that failed too."""
        self._wait(self._over, what)
        self._leave()
        told = [json.loads(text) for text in everyone(self._comm, json.dumps(self._account()))]
        self._summary = _summed(told)
        if self._record and self.rank == 0:
            logs = [parse_logs(told[server]["log"])[0] for server in self._roles.servers]
            _write(Path(self._record), format_logs(logs))
        self._comm.give_back(self._transport)
        if self._owns:
            self._comm.Free()

    def _leave(self) -> None:
        if self._open:
            self._open = False
            self._engine.detach(self)
            self._engine.unwatch(self._stalled)
            if not self._over():
                # Left in the middle: MPI may still write there.
                self._engine.keep(self)

    def _over(self) -> bool:
        served = self._service is None or self._service.finished
        return served and (self._client is None or self._client.idle) and self._outbox.empty

    def _worker(self, verb: str) -> Client:
        if self._error is not None:
            raise self._error
        if not self._open:
            raise ArgumentError(f"{verb}: the parameter server is closed")
        if self._client is None:
            raise ArgumentError(
                f"{verb}: rank {self.rank} serves only; workers are ranks {list(self.workers)}"
            )
        return self._client

    def _number(self, key: Hashable) -> int:
        try:
            return self._numbers[key]
        except KeyError:
            raise ArgumentError(f"key: {key!r} given; allowed are {list(self._numbers)}") from None

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        self._waits_for = what
        self._engine.wait(lambda: self._error is not None or until())
        self._waits_for = ""
        if self._error is not None:
            raise self._error

    def _stalled(self, seconds: float) -> None:
        """Called now and then while this rank waits and nothing moves."""
        if self._waits_for:
            self._patience.check(seconds, self._tell)

    def _tell(self) -> str:
        text = f"rank {self.rank} waits for {self._waits_for} of its parameter server"
        if self._client is not None and self._client.state.owed:
            owed = {self._roles.servers[self.keys[key].server] for key in self._client.state.owed}
            text += f"; answers are owed by ranks {sorted(owed)}"
        if self._service is not None:
            text += f"; furthest behind are ranks {list(self._service.state.slowest)}"
        return text

    # -- what it came to ------------------------------------------------------------------

    def traffic(self) -> dict[int, Any]:
        """The formula: bytes over each rank's link in a step. See ``placement.traffic``."""
        return traffic(self._roles, shard_bytes(self.keys, len(self._roles.servers)))

    def summary(self) -> Summary:
        """What all ranks did, known after ``close``. Not collective."""
        if self._summary is None:
            raise ArgumentError("summary: there is one after close(), and none of a broken run")
        return self._summary

    def _account(self) -> dict[str, Any]:
        """What this rank did, for JSON."""
        mine: dict[str, Any] = {"out": self._outbox.sent, "in": Counter[str]()}
        if self._client is not None:
            mine["in"].update(self._client.received)
            mine["steps"] = self._client.state.step
            mine["pushed"] = self._client.state.pushes
        if self._service is not None:
            state = self._service.state
            mine["in"].update(self._service.received)
            mine["used"] = state.applied + state.discarded
            mine["staleness"], mine["skipped"] = state.staleness, self._service.skipped
            mine["log"] = format_logs([state.log]) if self._record else ""
        return mine


def _summed(ranks: Sequence[dict[str, Any]]) -> Summary:
    def count(name: str) -> Counter[int]:
        total: Counter[int] = Counter()
        for rank in ranks:
            total.update({int(key): n for key, n in rank.get(name, {}).items()})
        return total

    def step_bytes(way: str) -> dict[int, int]:
        return {
            rank: told[way].get("push", 0) + told[way].get("pull", 0)
            for rank, told in enumerate(ranks)
        }

    return Summary(
        bytes_in=step_bytes("in"),
        bytes_out=step_bytes("out"),
        final_bytes=sum(told["out"].get("final", 0) for told in ranks),
        steps={rank: told["steps"] for rank, told in enumerate(ranks) if "steps" in told},
        staleness=count("staleness"),
        skipped=count("skipped"),
        updates_lost=sum(told.get("pushed", 0) - told.get("used", 0) for told in ranks),
    )


def _write(path: Path, text: str) -> None:
    """A file whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _flat(array: Any, name: str, *, writable: bool = True) -> Array:
    known = operand(array, name, writable=writable)
    if known.strided is not None:
        raise ArgumentError(f"{name}: the array is not C-contiguous")
    return known.flat
