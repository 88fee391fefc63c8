"""How gradients become updated weights over several ranks: what the trainer runs by name.

A strategy is given each gradient as it is done, and asked once per step for the
update. What it measures is the same for all, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from mpiring.communicator import Communicator
from mpiring.parallel.buckets import HasGradient
from mpiring.parallel.reducer import Reducer


class Optimizer(Protocol):
    """What a strategy needs of an optimizer over flat arrays."""

    state: dict[str, Any]
    steps: int

    def step(self, values: Any, gradients: Any) -> None: ...


class Strategy(Protocol):
    """What the trainer runs, by ``name``."""

    name: str

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

    def update(self) -> bool:
        """Finish the exchange, update the weights; False if the step was skipped everywhere."""
        ...

    def exchange(self) -> None:
        """One whole exchange with nothing computed in between, to time it alone."""
        ...

    def bytes_per_step(self) -> float:
        """What the formula says that a rank sends in a step."""
        ...


class AllReduce:
    """Sum gradients over the ring while backward runs; every rank updates all weights.

    ``values`` and ``gradients`` are the flat arrays that the parameters are views
    of; ``is_finite`` tells whether a gradient may be used. All ranks hold the
    same sum, so all skip the same steps.
    """

    name = "ring"

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[HasGradient],
        values: Any,
        gradients: Any,
        optimizer: Optimizer,
        is_finite: Any,
        **reducer_options: Any,
    ) -> None:
        self._reducer = Reducer(comm, parameters, **reducer_options)
        self._comm, self._parameters = comm, parameters
        self._values, self._gradients = values, gradients
        self._optimizer, self._is_finite = optimizer, is_finite
        self.no_sync = self._reducer.no_sync
        self.ready = self._reducer.ready

    @property
    def polling_seconds(self) -> float:
        return self._reducer.polling_seconds

    @property
    def waiting_seconds(self) -> float:
        return self._reducer.waiting_seconds

    def update(self) -> bool:
        self._reducer.finish()
        if not self._is_finite(self._gradients):
            return False
        self._optimizer.step(self._values, self._gradients)
        return True

    def exchange(self) -> None:
        for parameter in self._parameters:
            self.ready(parameter)
        self._reducer.finish()

    def bytes_per_step(self) -> float:
        """2(n-1)/n of the gradients' bytes (Patarasu and Yuan, 2009)."""
        n = self._comm.size
        return 2 * (n - 1) / n * self._gradients.nbytes


def broadcast_state(comm: Communicator, values: Any, optimizer: Optimizer) -> None:
    """Weights, optimizer state and step count of rank 0, on every rank."""
    comm.Bcast(values)
    for name in sorted(optimizer.state):
        comm.Bcast(optimizer.state[name])
    optimizer.steps = broadcast_number(comm, optimizer.steps)


def broadcast_number(comm: Communicator, number: int) -> int:
    """Rank 0's number."""
    everyones = np.array([number])
    comm.Bcast(everyones)
    return int(everyones[0])
