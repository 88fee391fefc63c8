"""Layers with hand-written gradients, which allocate nothing once they are warm.

A layer keeps its work buffers; what ``forward`` and ``input_gradient`` return
are views of them, good until the next call. The batch runs along the first
axis and may be empty: the gradients of no samples are zero.

For ``y = x W + b`` and ``g`` the gradient of the loss with respect to ``y``:

    dW = x^T g        db = sum of g over the batch        dx = g W^T

The bias comes before the weight, although either could. Its gradient costs next
to nothing, so a weight's gradient completes its layer, and the points at which a
training loop gets control (where it drives the exchange) lie between the big
matrix products: after each ``dW``, and after each ``dx``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Protocol

import numpy as np

from mpiring.nn.arrays import Array, allocator, block_length, matmul, on_host, working_dtype
from mpiring.nn.parameters import Parameter


class Layer(Protocol):
    """A differentiable function of a batch."""

    def forward(self, x: Array) -> Array:
        """The outputs [batch, out] for the inputs [batch, in], which must stay as they are
        until backward is over."""
        ...

    def parameter_gradients(self, gradient: Array, accumulate: bool) -> Iterable[Parameter]:
        """Write, or with ``accumulate`` add to, the gradient of each parameter; yield it when done.

        ``gradient`` is that of the loss with respect to the outputs of the latest forward.
        """
        ...

    def input_gradient(self, gradient: Array) -> Array:
        """The gradient with respect to the inputs of the latest forward."""
        ...


class Rows:
    """A work buffer of ``columns`` columns that grows to the most rows asked for."""

    def __init__(self, columns: int, dtype: np.dtype, xp: ModuleType) -> None:
        self._columns, self._dtype, self._allocate = columns, dtype, allocator(xp)
        self._buffer: Array = None

    def first(self, rows: int) -> Array:
        """A contiguous array [rows, columns], the same memory as long as nothing grows."""
        if self._buffer is None or len(self._buffer) < rows:
            flat = self._allocate(rows * self._columns, self._dtype)
            self._buffer = flat.reshape(rows, self._columns)
        return self._buffer[:rows]


class Linear:
    """``y = x W + b`` with W of shape [in, out] and b of shape [out]."""

    def __init__(self, weight: Parameter, bias: Parameter, xp: ModuleType = np) -> None:
        self.weight, self.bias, self.xp = weight, bias, xp
        inputs, outputs = weight.shape
        dtype = weight.value.dtype
        self._output = Rows(outputs, dtype, xp)
        self._input_gradient = Rows(inputs, dtype, xp)
        self._turned = Rows(inputs, dtype, xp)
        self._product = Rows(outputs, dtype, xp)
        self._input: Array = None

    def forward(self, x: Array) -> Array:
        self._input = x
        y = self._output.first(len(x))
        matmul(self.xp, x, self.weight.value, y)
        self.xp.add(y, self.bias.value, out=y)
        return y

    def parameter_gradients(self, gradient: Array, accumulate: bool) -> Iterator[Parameter]:
        db, sums = self.bias.gradient, working_dtype(gradient.dtype)
        if accumulate:
            self.xp.add(db, gradient.sum(axis=0, dtype=sums).astype(db.dtype), out=db)
        elif db.dtype == sums:
            gradient.sum(axis=0, dtype=sums, out=db)
        else:  # CuPy's sum rounds into no other dtype
            db[...] = gradient.sum(axis=0, dtype=sums)
        yield self.bias

        if accumulate:
            self._add_product(self._input.T, gradient, self.weight.gradient)
        else:
            matmul(self.xp, self._input.T, gradient, self.weight.gradient)
        yield self.weight

    def input_gradient(self, gradient: Array) -> Array:
        dx = self._input_gradient.first(len(gradient))
        if on_host(self.xp):
            # dx^T = W g^T: OpenBLAS packs W as it lies in two thirds of the time of W^T.
            turned = self._turned.first(len(gradient)).reshape(dx.shape[::-1])
            matmul(self.xp, self.weight.value, gradient.T, turned)
            dx[...] = turned.T
        else:
            matmul(self.xp, gradient, self.weight.value.T, dx)
        return dx

    def _add_product(self, a: Array, b: Array, out: Array) -> None:
        """``out += a @ b``. NumPy offers no product that accumulates, so there is a temporary;
        made block by block it is added while it is still in the cache."""
        rows, columns = out.shape
        # Four blocks: each product packs b again, which pays only over enough rows.
        step = max(1, 4 * block_length(self.xp, out.size) // max(1, columns))
        for start in range(0, rows, step):
            target = out[start : start + step]
            product = self._product.first(len(target))
            matmul(self.xp, a[start : start + step], b, product)
            self.xp.add(target, product, out=target)


class ReLU:
    """``y = max(x, 0)``. It works in place, in the work buffers of the layers around it: forward
    overwrites its input, and ``input_gradient`` the gradient that it is given."""

    def __init__(self, width: int, xp: ModuleType = np) -> None:
        self.xp = xp
        self._active = Rows(width, np.dtype(bool), xp)
        self._output: Array = None

    def forward(self, x: Array) -> Array:
        self._output = self.xp.maximum(x, 0, out=x)
        return self._output

    def parameter_gradients(self, gradient: Array, accumulate: bool) -> Iterable[Parameter]:
        return ()

    def input_gradient(self, gradient: Array) -> Array:
        active = self._active.first(len(gradient))
        self.xp.greater(self._output, 0, out=active)
        return self.xp.multiply(gradient, active, out=gradient)
