"""Parameters and gradients as views of two flat arrays, in the order of backward.

Backward produces the gradients of the last layer first. The flat arrays are
therefore filled back to front: position 0 belongs to the parameter whose
gradient is ready first. Invariants that the gradient exchange builds on:

* ``parameters[i].start == parameters[i - 1].stop``: gradients that become ready
  one after the other lie side by side, so a bucket is a contiguous run of the
  flat gradient and becomes ready front to back;
* nothing lies between two parameters. Padding would let every weight start on a
  cache line, but BLAS packs its operands anyway, while the padding would travel
  with every exchange and have to be kept zero. Without it the bytes exchanged
  are exactly those of the gradients. Only the flat arrays themselves are aligned;
* a gradient is never copied: layers write into ``Parameter.gradient``, which is
  the memory that is exchanged and that the optimizer reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from mpiring.errors import ArgumentError
from mpiring.nn.arrays import Allocate, Array, allocator, float_dtype


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """One array that is learnt: views of the flat arrays, shaped as the layer wants them."""

    name: str
    index: int  #: position in the order in which gradients become ready
    start: int  #: first element in the flat arrays
    value: Array
    gradient: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def size(self) -> int:
        return self.value.size

    @property
    def stop(self) -> int:
        return self.start + self.size


class FlatParameters:
    """All parameters of a model, indexed by their position in the ready order or by name.

    ``shapes`` gives (name, shape) in the order in which backward finishes the
    gradients. ``values`` and ``gradients`` are one-dimensional, of ``size``
    elements of ``dtype``, and start as zeros. ``allocate(count, dtype)`` supplies
    the memory; it is called for the values first, then for the gradients.
    """

    def __init__(
        self,
        shapes: Iterable[tuple[str, tuple[int, ...]]],
        dtype: Any = np.float32,
        *,
        xp: ModuleType = np,
        allocate: Allocate | None = None,
    ) -> None:
        self.dtype = float_dtype(dtype)
        shapes = list(shapes)
        self.size = sum(math.prod(shape) for _, shape in shapes)
        allocate = allocate or allocator(xp)
        self.values = allocate(self.size, self.dtype)
        self.gradients = allocate(self.size, self.dtype)
        self.values.fill(0)
        self.gradients.fill(0)

        self._parameters: list[Parameter] = []
        self._by_name: dict[str, Parameter] = {}
        start = 0
        for index, (name, shape) in enumerate(shapes):
            if name in self._by_name:
                raise ArgumentError(f"shapes: {name!r} given twice; names must differ")
            span = slice(start, start + math.prod(shape))
            parameter = Parameter(
                name, index, start, self.values[span].reshape(shape),
                self.gradients[span].reshape(shape),
            )  # fmt: skip
            self._parameters.append(parameter)
            self._by_name[name] = parameter
            start = parameter.stop

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients: the S of the formulas for exchanged bytes."""
        return self.size * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self._parameters)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._parameters)

    def __getitem__(self, key: int | str) -> Parameter:
        return self._by_name[key] if isinstance(key, str) else self._parameters[key]
