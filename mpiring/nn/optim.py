"""Optimizers over flat arrays, or over any slice of them.

An update is local to each element, so an optimizer does not know parameters: it
owns ``count`` elements of state and updates whatever run of them it is given.
One rank may own everything, or a shard (a parameter server), or update each
bucket as it arrives.

On the host an update is bound by memory, not by arithmetic. A formula of several
ufuncs over whole arrays would stream them from memory once per ufunc; so the
pass is made in blocks that stay in the cache, and memory is read and written
once. A device would rather have the formula in one kernel: ``kernel`` replaces
the block pass. It is called as ``kernel(values, gradients, state, scalars)``,
where ``state`` maps names to arrays of the same length and ``scalars`` maps the
names listed at each optimizer to numbers; it updates values and state in place.

Half precision: state and arithmetic are float32, values are rounded once per
step. There is no float32 copy of the values, so updates below their precision
are lost.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from mpiring.errors import ArgumentError
from mpiring.nn.arrays import Array, allocator, block_length, float_dtype, working_dtype

Kernel = Callable[[Array, Array, Mapping[str, Array], Mapping[str, float]], None]

#: Values, gradients, state arrays and temporaries of one block, all of one length.
Block = tuple[Array, Array, list[Array], list[Array]]


class Optimizer(ABC):
    """What SGD and Adam share: state, the count of steps, and the pass in blocks.

    ``state`` (arrays of ``count`` elements by name) and ``steps`` are public, to be
    broadcast or saved; write into the arrays, but do not replace them. Hyperparameters
    are attributes, read anew at each update, so a schedule of learning rates assigns ``lr``.
    """

    _temporaries: int  #: arrays of a block's length that the formula needs

    def __init__(
        self,
        count: int,
        dtype: Any,
        names: tuple[str, ...],
        xp: ModuleType,
        kernel: Kernel | None,
    ) -> None:
        if count < 0:
            raise ArgumentError(f"count: {count} given; allowed are numbers from 0")
        self.count, self.xp, self.kernel = count, xp, kernel
        self.dtype = working_dtype(float_dtype(dtype))
        self.steps = 0
        allocate = allocator(xp)
        self.state: dict[str, Array] = {name: allocate(count, self.dtype) for name in names}
        for array in self.state.values():
            array.fill(0)
        self._block = block_length(xp, count)
        spare = 0 if kernel else self._temporaries
        self._bound: dict[int, tuple[Array, Array, list[Block]]] = {}
        self._spare = [allocate(self._block, self.dtype) for _ in range(spare)]

    @abstractmethod
    def scalars(self) -> dict[str, float]:
        """The numbers of the current step that the formula needs."""

    @abstractmethod
    def _formula(
        self,
        values: Array,
        gradients: Array,
        state: list[Array],
        spare: list[Array],
        scalars: Mapping[str, Array],
    ) -> None:
        """Update one block, in place; every result lands in an operand, so nothing is allocated."""

    def step(self, values: Array, gradients: Array) -> None:
        """One step over all ``count`` elements."""
        if not values.shape == gradients.shape == (self.count,):
            raise ArgumentError(
                f"values, gradients: shapes {values.shape} and {gradients.shape} given; allowed is "
                f"({self.count},), all elements that this optimizer owns; update() takes a part"
            )
        self.steps += 1
        self.update(values, gradients)

    def update(self, values: Array, gradients: Array, start: int = 0) -> None:
        """Update in place the elements that begin at ``start`` among those owned.

        ``values`` and ``gradients`` are one-dimensional and of one length. A step that
        is made of several updates first adds 1 to ``steps``.
        """
        stop = start + values.size
        fits = (
            values.shape == gradients.shape == (values.size,) and 0 <= start <= stop <= self.count
        )
        if not fits:
            raise ArgumentError(
                f"values, gradients: shapes {values.shape} and {gradients.shape} from element "
                f"{start} given; allowed are equal one-dimensional shapes within the "
                f"{self.count} elements that this optimizer owns"
            )
        if self.steps < 1:
            raise ArgumentError("steps: 0 given; add 1 to steps before the updates of a step")
        scalars = self.scalars()
        if self.kernel:
            state = {name: array[start:stop] for name, array in self.state.items()}
            self.kernel(values, gradients, state, scalars)
            return
        # Arrays without dimensions: NumPy converts a Python number anew in every call.
        constants = {name: self.xp.asarray(x, self.dtype) for name, x in scalars.items()}
        for block in self._blocks(values, gradients, start):
            self._formula(*block, constants)

    def _blocks(self, values: Array, gradients: Array, start: int) -> list[Block]:
        """The views of each block. They are kept: a training loop comes back with the same arrays
        at every step, and slicing them anew costs a noticeable part of the pass."""
        bound = self._bound.get(start)
        if bound and bound[0] is values and bound[1] is gradients:
            return bound[2]
        blocks: list[Block] = []
        for at in range(0, values.size, self._block):
            part = slice(at, min(at + self._block, values.size))
            owned = slice(start + part.start, start + part.stop)
            state = [array[owned] for array in self.state.values()]
            spare = [array[: part.stop - part.start] for array in self._spare]
            blocks.append((values[part], gradients[part], state, spare))
        self._bound[start] = (values, gradients, blocks)
        return blocks

    def state_dict(self) -> dict[str, Array]:
        """Copies of the state arrays, and ``steps``, as plain arrays by name."""
        arrays = {name: array.copy() for name, array in self.state.items()}
        return {**arrays, "steps": np.asarray(self.steps)}

    def load_state_dict(self, saved: Mapping[str, Array]) -> None:
        """Take over what ``state_dict`` of a like optimizer returned."""
        wanted = {**{name: (self.count,) for name in self.state}, "steps": ()}
        given = {name: array.shape for name, array in saved.items()}
        if given != wanted:
            raise ArgumentError(f"saved: shapes {given} given; allowed are {wanted}")
        for name, array in self.state.items():
            array[...] = self.xp.asarray(saved[name])
        self.steps = int(saved["steps"])


class SGD(Optimizer):
    """Stochastic gradient descent, as torch.optim.SGD defines it (dampening 0):

        g = gradient + weight_decay * value
        buffer = momentum * buffer + g
        value -= lr * buffer

    State: ``momentum_buffer``, none for momentum 0. Scalars: ``lr``, ``momentum``,
    ``weight_decay``.
    """

    _temporaries = 1

    def __init__(
        self,
        count: int,
        dtype: Any = np.float32,
        *,
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        xp: ModuleType = np,
        kernel: Kernel | None = None,
    ) -> None:
        self.lr = _at_least_zero("lr", lr)
        self.momentum = _below_one("momentum", momentum)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)
        names = ("momentum_buffer",) if momentum else ()
        super().__init__(count, dtype, names, xp, kernel)

    def scalars(self) -> dict[str, float]:
        return {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}

    def _formula(
        self,
        values: Array,
        gradients: Array,
        state: list[Array],
        spare: list[Array],
        scalars: Mapping[str, Array],
    ) -> None:
        xp, (work,) = self.xp, spare
        if state:
            (direction,) = state
            xp.multiply(direction, scalars["momentum"], direction)
            xp.add(direction, gradients, direction)
            if self.weight_decay:
                xp.multiply(values, scalars["weight_decay"], work)
                xp.add(direction, work, direction)
        elif self.weight_decay:
            direction = work
            xp.multiply(values, scalars["weight_decay"], work)
            xp.add(work, gradients, work)
        else:
            direction = gradients
        xp.multiply(direction, scalars["lr"], work)
        xp.subtract(values, work, values)


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015), as torch.optim.Adam defines it; weight decay is an L2 penalty:

        g = gradient + weight_decay * value
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * g^2
        value -= lr * (mean / (1 - beta1^t)) / (sqrt(square / (1 - beta2^t)) + eps)

    t being the number of the step, from 1. State: ``mean``, ``square``. Scalars:
    ``rate`` = lr / (1 - beta1^t), ``root`` = 1 / sqrt(1 - beta2^t), ``beta1``,
    ``beta2``, ``one_minus_beta1``, ``one_minus_beta2``, ``eps``, ``weight_decay``.
    """

    _temporaries = 2

    def __init__(
        self,
        count: int,
        dtype: Any = np.float32,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        xp: ModuleType = np,
        kernel: Kernel | None = None,
    ) -> None:
        self.lr = _at_least_zero("lr", lr)
        self.betas = (_below_one("betas[0]", betas[0]), _below_one("betas[1]", betas[1]))
        self.eps = _at_least_zero("eps", eps)
        self.weight_decay = _at_least_zero("weight_decay", weight_decay)
        super().__init__(count, dtype, ("mean", "square"), xp, kernel)

    def scalars(self) -> dict[str, float]:
        beta1, beta2 = self.betas
        return {
            "rate": self.lr / (1 - beta1**self.steps),
            "root": 1 / math.sqrt(1 - beta2**self.steps),
            "beta1": beta1,
            "beta2": beta2,
            "one_minus_beta1": 1 - beta1,
            "one_minus_beta2": 1 - beta2,
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }

    def _formula(
        self,
        values: Array,
        gradients: Array,
        state: list[Array],
        spare: list[Array],
        scalars: Mapping[str, Array],
    ) -> None:
        xp, (mean, square), (work, decayed) = self.xp, state, spare
        if self.weight_decay:
            xp.multiply(values, scalars["weight_decay"], decayed)
            xp.add(decayed, gradients, decayed)
            gradients = decayed
        xp.multiply(mean, scalars["beta1"], mean)
        xp.multiply(gradients, scalars["one_minus_beta1"], work)
        xp.add(mean, work, mean)
        xp.multiply(square, scalars["beta2"], square)
        # (1 - beta2) * g first: the square of a float16 gradient would underflow.
        xp.multiply(gradients, scalars["one_minus_beta2"], work)
        xp.multiply(work, gradients, work)
        xp.add(square, work, square)
        xp.sqrt(square, work)
        xp.multiply(work, scalars["root"], work)
        xp.add(work, scalars["eps"], work)
        xp.divide(mean, work, work)
        xp.multiply(work, scalars["rate"], work)
        xp.subtract(values, work, values)


def _at_least_zero(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise ArgumentError(f"{name}: {value} given; allowed are finite numbers from 0")
    return value


def _below_one(name: str, value: float) -> float:
    if not 0 <= value < 1:
        raise ArgumentError(f"{name}: {value} given; allowed are numbers from 0, below 1")
    return value
