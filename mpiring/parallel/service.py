"""A server at work: the arrays and messages around the books that ``ServerState`` keeps.

Whatever comes goes into the books; what these command is done to one key after the other,
in a *lane* for each, so that a key which waits for a device or a message holds up no other.

Buffers are made once: the parameters, one for each push of each key by another rank, and,
except in sync, one for each worker's answer. There a push of somebody else may be applied
while the answer is still under way, so a copy is sent. The sum of a key is built in the push
buffer of the first worker that is added; never in the gradient of this rank's own worker,
which is read where it is.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from mpiring.device.base import Array, Device, Reduction
from mpiring.parallel.links import Links, Loan, Outbox, Parcel
from mpiring.parallel.protocol import (
    Accumulate,
    Apply,
    Command,
    Done,
    Failed,
    Message,
    Pull,
    Push,
    Reply,
)
from mpiring.parallel.server import ServerState
from mpiring.task import Completion, Task
from mpiring.transport.base import Receive

_SUM = Reduction("sum")

#: In the place of a key: all that is not a gradient.
CONTROL = -1


def push_slot(key: int) -> int:
    """What a worker sends to a server: slot 0 for what is no gradient, odd ones for these."""
    return 2 * key + 1 if key != CONTROL else 0


def answer_slot(key: int) -> int:
    """What a server sends to a worker."""
    return 2 * key + 2


def encode(message: Pull | Done | Failed) -> Array:
    """A message without gradient, in two numbers."""
    match message:
        case Pull():
            pair = 0, 0
        case Done(_, final):
            pair = 1, int(final)
        case Failed(_, pushes):
            pair = 2, pushes
    return np.array(pair, np.int64)


def decode(worker: int, pair: Array) -> Pull | Done | Failed:
    """The inverse of ``encode``."""
    kind, number = map(int, pair)
    if kind == 0:
        return Pull(worker)
    return Done(worker, bool(number)) if kind == 1 else Failed(worker, number)


class Optimizer(Protocol):
    """What a server needs of an optimizer, which owns the elements of one key."""

    def step(self, values: Array, gradients: Array) -> None:
        """Update ``values`` in place by one-dimensional ``gradients`` of the same length."""
        ...


class _Lane:
    """One key, and what is to be done to it, one thing after the other."""

    def __init__(
        self, key: int, values: Array, device: Device, optimizer: Optimizer, own: int
    ) -> None:
        self.key, self.values, self.device, self.own = key, values, device, own
        self.pushes: dict[int, Array] = {}
        self.answers: dict[int, Parcel] = {}
        self.copies: dict[int, Array] = {}
        self._optimizer = optimizer
        self._total = -1  # the worker in whose buffer the sum is built
        self._adders: dict[tuple[int, int], tuple[Array, Task]] = {}
        self._todo: deque[Callable[[], Completion | None]] = deque()
        self._waits_for: Completion | None = None

    def add(self, work: Callable[[], Completion | None]) -> None:
        """``work`` begins something, and returns what is to be waited for."""
        self._todo.append(work)

    def advance(self) -> bool:
        """Whether everything is done."""
        while True:
            if self._waits_for is not None:
                if not self._waits_for.done():
                    return False
                self._waits_for = None
            if not self._todo:
                return True
            self._waits_for = self._todo.popleft()()

    def accumulate(self, worker: int, first: bool) -> Completion | None:
        if first:
            self._total = worker
            return None
        total, added = self._total, worker
        if total == self.own:  # a + b has the bits of b + a
            total, added = added, total
        self._total = total
        adder = self._adder(total, added)
        adder.start()
        return adder

    def _adder(self, total: int, added: int) -> Task:
        push = self.pushes[added]
        known = self._adders.get((total, added))
        if known is None or known[0] is not push:
            known = push, self.device.reduce(push, self.pushes[total], _SUM)
            self._adders[total, added] = known
        return known[1]

    def settle(self) -> Completion:
        """The answers have arrived, or there would be no new gradient: MPI has to know it too."""
        return _All([parcel for parcel in self.answers.values() if parcel.under_way])

    def apply(
        self, worker: int | None, accept: Callable[[Array], bool], skipped: Callable[[], None]
    ) -> Completion:
        gradient = self.pushes[self._total if worker is None else worker]
        if accept(gradient):
            self._optimizer.step(self.values, gradient)
        else:
            skipped()
        return self.device.record(self.values)

    def copy(self, worker: int) -> Completion:
        task = self.device.copy(self.values, self.copies[worker])
        task.start()
        return task


class _All:
    def __init__(self, parts: Sequence[Completion]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)


class Service:
    """Serves the keys of ``state``. ``advance`` moves it.

    ``values`` holds for each key the parameters to begin with, which belong to the server from
    now on. ``optimizer(count, dtype)`` makes the optimizer of a key; ``accept`` tells whether a
    gradient may be used. An update whose gradient may not is skipped, and counted in ``skipped``
    by its version.
    """

    def __init__(
        self,
        state: ServerState,
        values: Mapping[int, Array],
        links: Links,
        outbox: Outbox,
        optimizer: Callable[[int, Any], Optimizer],
        accept: Callable[[Array], bool],
    ) -> None:
        self.state = state
        self.skipped: Counter[int] = Counter()
        self.received: Counter[str] = Counter()  # bytes that came over links
        self._links, self._outbox, self._accept = links, outbox, accept
        self._lanes = {
            key: _Lane(
                key, array, links.device(array), optimizer(array.size, array.dtype), links.rank
            )
            for key, array in values.items()
        }
        self._busy: dict[int, _Lane] = {}
        self._inbox: dict[int, deque[Message]] = {worker: deque() for worker in state.workers}
        self._said = {worker: np.zeros(2, np.int64) for worker in state.workers}
        self._receives: list[Receive] = []
        self._loans: dict[int, Loan] = {}  # by key: gradients of this rank's own worker
        self._origin: list[tuple[int, int]] = []  # worker and key of each of these
        self._place: dict[tuple[int, int], int] = {}  # the inverse
        self._came = dict.fromkeys(state.workers, 0)  # pushes of each worker
        self._failing: dict[int, int] = {}  # pushes that a failing worker has sent
        self._gone: set[int] = set()  # workers that send nothing more
        for worker in state.workers:
            said = links.receive(self._said[worker], worker, push_slot(CONTROL))
            self._known(worker, CONTROL, said)
            for lane in self._lanes.values():
                self._bind(lane, worker)
        self._inlet = links.inlet(self._receives)
        for place in self._place:
            self._expect(*place)

    def _known(self, worker: int, key: int, receive: Receive) -> None:
        self._place[worker, key] = len(self._origin)
        self._origin.append((worker, key))
        self._receives.append(receive)

    def _bind(self, lane: _Lane, worker: int) -> None:
        count, dtype = lane.values.size, lane.values.dtype
        receive: Receive
        if worker == self._links.rank:
            receive = self._loans[lane.key] = self._links.borrow(push_slot(lane.key))
        else:
            lane.pushes[worker] = lane.device.empty(count, dtype)
            receive = self._links.receive(lane.pushes[worker], worker, push_slot(lane.key))
        self._known(worker, lane.key, receive)
        source = lane.values
        if self.state.mode != "sync":
            source = lane.copies[worker] = lane.device.empty(count, dtype)
        task = self._links.send(source, worker, answer_slot(lane.key))
        lane.answers[worker] = self._parcel(task, worker, source, f"answer {lane.key}")

    def _parcel(self, task: Any, worker: int, view: Array, label: str) -> Parcel:
        if worker == self._links.rank:
            return Parcel(task)
        return Parcel(task, "pull", view.nbytes, f"{label} to rank {worker}")

    @property
    def finished(self) -> bool:
        """Whether all workers have left, and all that was commanded is done."""
        return self.state.finished and not self._busy

    def advance(self) -> bool:
        moved = self._collect()
        while ready := [worker for worker, queue in self._inbox.items() if queue]:
            worker = self.state.select(ready)
            for command in self.state.handle(self._inbox[worker].popleft()):
                self._carry_out(command)
        for key, lane in tuple(self._busy.items()):
            if lane.advance():
                del self._busy[key]
                moved = True
        return moved

    def _collect(self) -> bool:
        """Put what has come into the inbox."""
        over = self._inlet.ended()
        for worker, key in [self._origin[place] for place in over]:
            if key == CONTROL:
                self._hear(worker)
            else:
                self._came[worker] += 1
                if worker == self._links.rank:
                    self._lanes[key].pushes[worker] = self._loans[key].view
                else:
                    self.received["push"] += self._lanes[key].pushes[worker].nbytes
                self._inbox[worker].append(Push(worker, key))
        for worker, pushes in tuple(self._failing.items()):
            if self._came[worker] == pushes:
                del self._failing[worker]
                self._forget(worker)
        return bool(over)

    def _hear(self, worker: int) -> None:
        message = decode(worker, self._said[worker])
        self._inbox[worker].append(message)
        match message:
            case Pull():
                self._expect(worker, CONTROL)
            case Done():
                self._forget(worker)
                # What it is still sent is what the others leave behind.
                for lane in self._lanes.values():
                    if lane.answers[worker].kind:
                        lane.answers[worker].kind = "final"
            case Failed(_, pushes):
                self._failing[worker] = pushes

    def _expect(self, worker: int, key: int) -> None:
        place = self._place[worker, key]
        if worker not in self._gone and not self._inlet.expects(place):
            self._inlet.start(place)

    def _forget(self, worker: int) -> None:
        """Nothing more will come from there."""
        self._gone.add(worker)
        for place, (sender, _) in enumerate(self._origin):
            if sender == worker and self._inlet.expects(place):
                self._inlet.cancel(place)

    def _carry_out(self, command: Command) -> None:
        match command:
            case Accumulate(key, worker, first):
                self._add(key, partial(self._lanes[key].accumulate, worker, first))
            case Apply(key, worker, version):
                lane = self._lanes[key]
                if self.state.mode == "sync":
                    self._add(key, lane.settle)
                skipped = partial(self.skipped.update, [version])
                self._add(key, partial(lane.apply, worker, self._accept, skipped))
            case Reply(worker, key):
                lane = self._lanes[key]
                parcel = lane.answers[worker]
                self._add(key, lambda: parcel)
                if worker in lane.copies:
                    self._add(key, partial(lane.copy, worker))
                self._add(key, partial(self._answer, worker, key, parcel))

    def _add(self, key: int, work: Callable[[], Completion | None]) -> None:
        self._lanes[key].add(work)
        self._busy[key] = self._lanes[key]

    def _answer(self, worker: int, key: int, parcel: Parcel) -> None:
        # The answer frees its worker to push again: first make room for that.
        self._expect(worker, key)
        self._outbox.start(parcel)
