"""A network that is not there: gradients of its sizes, and the time that computing them takes.

``layers`` layers, each a weight and a bias, in flat arrays, in the order of the backward pass.
A third of the time goes into the forward pass, two thirds into backward, shared out by size: a
layer's backward pass multiplies two matrices where forward multiplies one.

Time is emulated: the rank sleeps, and polls in between, as the host of a GPU could. What has
been slept too long, or polled meanwhile, is taken off the next layer; what is spent in calls of
the exchange is not, since a program that computes itself is kept from it by them.

The gradients of a step's micro-batches are integers, and all different (see ``values``): their
sum is exact, and right only if each of them is in it once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench import values
from bench.case import Array

FORWARD = 1 / 3  # of the time of a micro-batch

#: Seconds between two polls, as long as there is time.
PAUSE = 1e-4

DTYPE = np.dtype(np.float32)


def gradient_sizes(nbytes: int, layers: int, ranks: int) -> list[int]:
    """Elements of each gradient, a layer's bias before its weight; about ``nbytes`` in all.

    Multiples of ``ranks``, so that all chunks are alike and formulas hold to the byte.
    """
    width = (math.sqrt(1 + 4 * nbytes / DTYPE.itemsize / layers) - 1) / 2  # w^2 + w per layer
    return [ranks * max(1, round(count / ranks)) for count in (width, width**2)] * layers


@dataclass(frozen=True, eq=False)
class Parameter:
    """Views of the flat arrays; ``start`` is where they begin."""

    value: Array
    gradient: Array
    start: int
    share: float  #: of the time of the whole backward pass


class Network:
    """Parameters, in the order of backward, as views of ``values`` and ``gradients``.

    ``sizes``: elements of each. A step is made of so many ``micro_batches``, over all ranks.
    """

    def __init__(self, sizes: Sequence[int], micro_batches: int) -> None:
        self._micro_batches = micro_batches
        count = sum(sizes)
        self.values, self.gradients = np.zeros((2, count), DTYPE)
        self.parameters = []
        start = 0
        for size in sizes:
            where = slice(start, start + size)
            self.parameters.append(
                Parameter(self.values[where], self.gradients[where], start, size / count)
            )
            start += size
        self._longest = max(sizes) + values.PERIOD
        self._sum = values.repeat(values.reduction(micro_batches, DTYPE, "sum"), 0, count)

    @property
    def nbytes(self) -> int:
        return self.gradients.nbytes

    def batch(self, numbers: Sequence[int]) -> Array:
        """The gradients of these micro-batches together, for ``run``."""
        each = [values.contribution(i, self._micro_batches, DTYPE, "sum") for i in numbers]
        return values.repeat(np.sum(each, axis=0, dtype=DTYPE), 0, self._longest)

    def wrong(self) -> int:
        """How many elements of ``values`` are not the sum of all micro-batches' gradients."""
        return int(np.count_nonzero(self.values != self._sum))

    def run(
        self, batch: Array, seconds: float, accumulate: bool, poll: Callable[[], object]
    ) -> Iterator[Parameter]:
        """Forward and backward: each parameter when its gradient is there."""
        free = time.perf_counter() + FORWARD * seconds  # when the next layer can begin
        _wait(free, poll)
        for parameter in self.parameters:
            gradient = batch[parameter.start % values.PERIOD :][: parameter.gradient.size]
            if accumulate:
                np.add(parameter.gradient, gradient, parameter.gradient)
            else:
                parameter.gradient[...] = gradient
            free += (1 - FORWARD) * seconds * parameter.share
            _wait(free, poll)
            begin = time.perf_counter()
            yield parameter
            free += time.perf_counter() - begin


def _wait(until: float, poll: Callable[[], object]) -> None:
    while (left := until - time.perf_counter()) > 0:
        time.sleep(min(left, PAUSE))
        poll()
