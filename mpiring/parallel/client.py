"""A worker's side of the parameter server: the arrays and messages around ``WorkerState``.

The answer to a push is received straight into the parameters, and only from the moment the
caller has allowed it (``pull``): backward may still need the old values of a layer whose
gradient is on its way already. Until then the answer waits with its server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from mpiring.device.base import Array
from mpiring.parallel.links import Gated, Links, Outbox, Parcel
from mpiring.parallel.placement import Key
from mpiring.parallel.protocol import Done, Failed, Pull
from mpiring.parallel.service import CONTROL, answer_slot, encode, push_slot
from mpiring.parallel.worker import WorkerState
from mpiring.task import READY


def piece(array: Array, key: Key) -> Array:
    """The elements of a flat array that ``key`` stands for."""
    size = array.dtype.itemsize
    return array[key.start // size : key.stop // size]


class Client:
    """Pushes gradients of, and receives, flat ``parameters``, by their place in the list.

    ``keys`` are the pieces of all parameters, known by their place; ``servers`` the ranks that
    hold them. What is asked for is noted, or refused with nothing changed; ``begin`` begins it as
    far as it can begin at once, ``advance`` moves everything.
    """

    def __init__(
        self,
        state: WorkerState,
        parameters: Sequence[Array],
        keys: Sequence[Key],
        servers: Sequence[int],
        links: Links,
        outbox: Outbox,
    ) -> None:
        self.state = state
        self.pushed: set[int] = set()
        self.received: Counter[str] = Counter()  # bytes that came over links
        self._parameters, self._keys, self._servers = parameters, keys, servers
        self._links, self._outbox = links, outbox
        self._pieces: list[list[int]] = [[] for _ in parameters]
        receives = []
        for number, key in enumerate(keys):
            self._pieces[key.bucket].append(number)
            view = piece(parameters[key.bucket], key)
            receives.append(links.receive(view, servers[key.server], answer_slot(number)))
        self._inlet = links.inlet(receives)
        self._bound: dict[int, tuple[Array, list[Parcel]]] = {}
        self._pulled: set[int] = set()
        self._gated = Gated()

    @property
    def idle(self) -> bool:
        """Whether all that was allowed to come has come, and all has begun that was asked for."""
        return self._inlet.empty and self._gated.empty

    @property
    def sending(self) -> bool:
        """Whether MPI still reads a gradient that was pushed."""
        return any(each.under_way for _, parcels in self._bound.values() for each in parcels)

    @property
    def missing(self) -> list[int]:
        """Parameters whose gradients have not been pushed in this step."""
        return [number for number in range(len(self._parameters)) if number not in self.pushed]

    def push(self, number: int, gradient: Array) -> None:
        """Send a flat gradient. It must stay as it is until the step is over."""
        for key in self._pieces[number]:
            self.state.push(key)
        self.pushed.add(number)
        parcels = self._parcels(number, gradient)
        gate = self._links.device(gradient).record(gradient)
        self._gated.add(gate, partial(self._start, parcels))

    def pull(self, number: int) -> None:
        """From now on the parameters may change: receive the answers to what was pushed."""
        if number not in self._pulled:
            self._pulled.add(number)
            self._open(number)

    def pull_all(self) -> None:
        for number in range(len(self._parameters)):
            if self.state.owed.intersection(self._pieces[number]):
                self.pull(number)

    def end_step(self) -> None:
        """All answers are there."""
        self.pushed.clear()
        self._pulled.clear()

    def refresh(self) -> None:
        """Ask for the newest parameters of everything."""
        self._tell(self.state.pull())
        self.pull_all()

    def leave(self, final: bool) -> None:
        """Take no further step; ``final`` asks for what the last worker leaves behind."""
        self._tell(self.state.done(final))
        self.pull_all()

    def fail(self) -> None:
        """Give up in the middle of a step. What is owed is received, and means nothing."""
        self._tell(self.state.fail())
        self.pull_all()

    def begin(self) -> bool:
        return self._gated.advance()

    def advance(self) -> bool:
        moved = self.begin()
        over = self._inlet.ended()
        for key in over:
            self.state.receive(key)
            if self._servers[self._keys[key].server] != self._links.rank:
                self.received["final" if self.state.left else "pull"] += self._keys[key].size
        return moved or bool(over)

    def _parcels(self, number: int, gradient: Array) -> list[Parcel]:
        """The messages of a gradient. They are kept: most come from the same array each time."""
        bound = self._bound.get(number)
        if bound is not None and bound[0] is gradient:
            return bound[1]
        parcels = []
        for key in self._pieces[number]:
            server = self._servers[self._keys[key].server]
            view = piece(gradient, self._keys[key])
            task = self._links.send(view, server, push_slot(key))
            if server == self._links.rank:
                parcels.append(Parcel(task))
            else:
                label = f"push {key} to rank {server}"
                parcels.append(Parcel(task, "push", view.nbytes, label))
        self._bound[number] = gradient, parcels
        return parcels

    def _start(self, parcels: Sequence[Parcel]) -> None:
        for parcel in parcels:
            self._outbox.start(parcel)

    def _open(self, number: int) -> None:
        parameter = self._parameters[number]
        gate = self._links.device(parameter).record(parameter)
        self._gated.add(gate, partial(self._receive, self._pieces[number]))

    def _receive(self, keys: Sequence[int]) -> None:
        for key in keys:
            if key in self.state.owed:
                self._inlet.start(key)

    def _tell(self, messages: Sequence[tuple[int, Pull | Done | Failed]]) -> None:
        for server, message in messages:
            task = self._links.send(
                encode(message), self._servers[server], push_slot(CONTROL), persistent=False
            )
            self._gated.add(READY, partial(self._outbox.start, Parcel(task)))
