"""How gradients become updated weights over several ranks: what the trainer runs by name.

A strategy is given each gradient as it is done, and asked once per step for the
update. What it measures is the same for all, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from mpiring.communicator import Communicator
from mpiring.parallel.buckets import HasGradient
from mpiring.parallel.reducer import Reducer


class Optimizer(Protocol):
    """What strategies need of an optimizer over flat arrays."""

    state: dict[str, Any]
    steps: int

    def step(self, values: Any, gradients: Any) -> None: ...

    def update(self, values: Any, gradients: Any, start: int = 0) -> None:
        """A part of a step: the elements from ``start``. ``steps`` counts this one already."""
        ...


class Judge(Protocol):
    """Has an optimizer take those steps whose gradients hold neither inf nor nan."""

    def step(self, values: Any, gradients: Any) -> None: ...

    def skipped(self) -> list[int]:
        """The numbers, from 1, of the steps that were not taken. May wait for the latest."""
        ...


class Checked:
    """Looks at the gradients, then takes the step."""

    def __init__(self, optimizer: Optimizer, is_finite: Callable[[Any], bool]) -> None:
        self._optimizer, self._is_finite = optimizer, is_finite
        self._steps = 0
        self._skipped: list[int] = []

    def step(self, values: Any, gradients: Any) -> None:
        self._steps += 1
        if self._is_finite(gradients):
            self._optimizer.step(values, gradients)
        else:
            self._skipped.append(self._steps)

    def skipped(self) -> list[int]:
        return self._skipped


class Strategy(Protocol):
    """What the trainer runs, by ``name``."""

    name: str
    #: The ranks that compute gradients; others only take part in what is collective.
    workers: tuple[int, ...]
    #: Whether all ranks take their steps together, so that they can meet between two.
    in_step: bool
    #: Whether ``state`` can be asked for between two epochs, not only after ``finish``.
    state_between: bool
    #: This rank's; of how many elements is the strategy's affair.
    optimizer: Optimizer

    @property
    def polling_seconds(self) -> float:
        """Seconds of the caller's that went into starting and moving exchanges so far."""
        ...

    @property
    def waiting_seconds(self) -> float:
        """Seconds that went into waiting for their ends."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, gradients accumulate and nothing is exchanged."""
        ...

    def ready(self, parameter: HasGradient) -> None:
        """The gradient of ``parameter`` is done."""
        ...

    def update(self) -> None:
        """Finish the exchange and update the weights, unless a gradient holds inf or nan."""
        ...

    def skipped(self) -> list[int]:
        """The numbers, from 1, of the steps that no rank has taken, as far as they are told
        before ``report``. May wait for the latest."""
        ...

    def finish(self) -> None:
        """All steps are taken: every rank has the same weights afterwards. Collective."""
        ...

    def state(self, host: Callable[[Any], Any]) -> dict[str, Any]:
        """The optimizer's state for all parameters and its steps, by name, as host arrays (made by
        ``host``) on rank 0; elsewhere nothing. The same whatever the strategy. Collective."""
        ...

    def rehearsal(self) -> AbstractContextManager[Callable[[], None]]:
        """Gives a call that makes one whole exchange with nothing computed, to time it alone.

        Collective, after ``finish``. Changes the gradients and nothing else.
        """
        ...

    def bytes_per_step(self) -> float:
        """What the formula says that a rank sends in a step."""
        ...

    def report(self) -> dict[str, Any]:
        """Results that only this strategy has. Collective, after ``finish``."""
        ...


class AllReduce:
    """Sum gradients over the ring while backward runs; every rank updates all weights.

    ``values`` and ``gradients`` are the flat arrays that the parameters are views
    of. All ranks hold the same sum, so all judge it alike and skip the same steps.
    """

    name = "ring"
    in_step = state_between = True

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[HasGradient],
        values: Any,
        gradients: Any,
        optimizer: Optimizer,
        judge: Judge,
        **reducer_options: Any,
    ) -> None:
        self.workers = tuple(range(comm.size))
        self._reducer = Reducer(comm, parameters, **reducer_options)
        self._comm, self._parameters = comm, parameters
        self._values, self._gradients = values, gradients
        self.optimizer, self._judge = optimizer, judge
        self.skipped = judge.skipped
        self.no_sync = self._reducer.no_sync
        self.ready = self._reducer.ready

    @property
    def polling_seconds(self) -> float:
        return self._reducer.polling_seconds

    @property
    def waiting_seconds(self) -> float:
        return self._reducer.waiting_seconds

    def update(self) -> None:
        self._reducer.finish()
        self._judge.step(self._values, self._gradients)

    def finish(self) -> None: ...

    def state(self, host: Callable[[Any], Any]) -> dict[str, Any]:
        self.skipped()  # the latest step counts only if it was taken
        return whole_state(self._comm, self.optimizer, host)

    def rehearsal(self) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(self._exchange)

    def _exchange(self) -> None:
        for parameter in self._parameters:
            self.ready(parameter)
        self._reducer.finish()

    def bytes_per_step(self) -> float:
        """2(n-1)/n of the gradients' bytes (Patarasu and Yuan, 2009)."""
        n = self._comm.size
        return 2 * (n - 1) / n * self._gradients.nbytes

    def report(self) -> dict[str, Any]:
        return optimizer_bytes(self._comm, self.optimizer, self._values.size, owners=1)


def optimizer_bytes(
    comm: Communicator, optimizer: Optimizer, count: int, owners: int
) -> dict[str, float]:
    """Bytes of optimizer state: those of the rank that has most, and the formula for ``count``
    parameters shared out among so many ``owners``. Collective."""
    state = optimizer.state.values()
    most = np.array([sum(array.nbytes for array in state)])
    comm.Allreduce("in place", most, "max")
    each = sum(array.dtype.itemsize for array in state)
    return {
        "optimizer_bytes_per_rank": int(most[0]),
        "optimizer_bytes_formula": count * each / owners,
    }


def whole_state(
    comm: Communicator, optimizer: Optimizer, host: Callable[[Any], Any]
) -> dict[str, Any]:
    """``Strategy.state`` where rank 0's optimizer has all of it."""
    if comm.rank:
        return {}
    arrays = {name: host(array) for name, array in optimizer.state.items()}
    return {**arrays, "steps": np.asarray(optimizer.steps)}


def broadcast_optimizer(comm: Communicator, optimizer: Optimizer) -> None:
    """State and step count of rank 0's, on every rank."""
    for name in sorted(optimizer.state):
        comm.Bcast(optimizer.state[name])
    optimizer.steps = broadcast_number(comm, optimizer.steps)


def broadcast_number(comm: Communicator, number: int) -> int:
    """Rank 0's number."""
    everyones = np.array([number])
    comm.Bcast(everyones)
    return int(everyones[0])
