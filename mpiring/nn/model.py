"""A multilayer perceptron whose backward pass hands out gradients one by one.

``backward`` is a generator: between two gradients the caller has control, which
is when it starts the exchange of a bucket and drives the ones in flight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import numpy as np

from mpiring.errors import ArgumentError, DtypeError
from mpiring.nn.arrays import Allocate, Array
from mpiring.nn.layers import Layer, Linear, ReLU
from mpiring.nn.parameters import FlatParameters, Parameter


class MLP:
    """Linear layers with ReLU between them.

    ``sizes`` is (features, hidden..., classes). Weights are drawn from a normal
    distribution with variance 2 / fan-in (He et al., "Delving Deep into Rectifiers",
    2015), on the host and in float64 whatever the dtype, so that the same ``seed``
    gives the same network on every rank and device; biases start at zero.
    ``allocate`` supplies the memory of the flat parameters and gradients.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        xp: ModuleType = np,
        dtype: Any = np.float32,
        seed: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        self.sizes = tuple(sizes)
        if len(self.sizes) < 2 or any(size < 1 for size in self.sizes):
            raise ArgumentError(
                f"sizes: {self.sizes} given; allowed are at least two numbers, each at least 1: "
                "features, hidden sizes, classes"
            )
        if seed < 0:
            raise ArgumentError(f"seed: {seed} given; allowed are numbers from 0")
        self.xp = xp
        shapes = list(pairwise(self.sizes))
        ready_order: list[tuple[str, tuple[int, ...]]] = []
        for number, (inputs, outputs) in reversed(list(enumerate(shapes))):
            ready_order.append((f"linear{number}.bias", (outputs,)))
            ready_order.append((f"linear{number}.weight", (inputs, outputs)))
        self.parameters = FlatParameters(ready_order, dtype, xp=xp, allocate=allocate)

        random = np.random.default_rng(seed)
        self.layers: list[Layer] = []
        for number, (inputs, _) in enumerate(shapes):
            if self.layers:
                self.layers.append(ReLU(inputs, xp))
            weight = self.parameters[f"linear{number}.weight"]
            drawn = random.normal(0.0, math.sqrt(2.0 / inputs), weight.shape)
            weight.value[...] = xp.asarray(drawn.astype(self.parameters.dtype))
            self.layers.append(Linear(weight, self.parameters[f"linear{number}.bias"], xp))
        self._batch: int | None = None  # samples of a forward that backward may follow

    @property
    def features(self) -> int:
        return self.sizes[0]

    @property
    def classes(self) -> int:
        return self.sizes[-1]

    def forward(self, x: Array) -> Array:
        """Logits [batch, classes] for inputs [batch, features], of the model's dtype.

        The result is a work buffer, overwritten by the next forward. ``x`` is kept,
        not copied, until backward is over.
        """
        if x.ndim != 2 or x.shape[1] != self.features:
            raise ArgumentError(
                f"x: shape {x.shape} given; allowed is [batch, {self.features}], the features "
                "of the first layer"
            )
        if x.dtype != self.parameters.dtype:
            raise DtypeError(f"x: dtype {x.dtype} given; allowed is {self.parameters.dtype}")
        self._batch = len(x)
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, gradient: Array, accumulate: bool = False) -> Iterator[Parameter]:
        """Yield each parameter as soon as its gradient is done, in the order of ``parameters``.

        ``gradient`` is that of the loss with respect to the logits of the latest
        forward; every forward can be followed by one backward. With ``accumulate``
        gradients are added to what is there. The caller must take every parameter:
        what has not been yielded has not been computed.
        """
        if self._batch is None or gradient.shape != (self._batch, self.classes):
            raise ArgumentError(
                f"gradient: shape {gradient.shape} given; allowed is that of the logits of a "
                f"forward just before, here "
                f"{None if self._batch is None else (self._batch, self.classes)}"
            )
        self._batch = None
        first = self.layers[0]
        for layer in reversed(self.layers):
            yield from layer.parameter_gradients(gradient, accumulate)
            if layer is not first:  # nobody asks for the gradient of the data
                gradient = layer.input_gradient(gradient)

    def predict(self, x: Array, batch: int = 1024) -> Array:
        """The class [samples] of each of the inputs [samples, features], ``batch`` at a time.

        It uses the buffers of forward, so it must not come between forward and backward.
        """
        classes = self.xp.empty(len(x), np.int64)
        for start in range(0, len(x), batch):
            logits = self.forward(x[start : start + batch])
            classes[start : start + batch] = logits.argmax(axis=1)
        self._batch = None
        return classes

    def correct(self, x: Array, labels: Array) -> int:
        """How many of the samples are classified as labelled; adds up over parts of a set."""
        return int((self.predict(x) == labels).sum())

    def accuracy(self, x: Array, labels: Array) -> float:
        """The share of the samples, of which there must be some, classified as labelled."""
        if len(x) == 0:
            raise ArgumentError("x: no samples given; allowed is at least 1")
        return self.correct(x, labels) / len(x)
