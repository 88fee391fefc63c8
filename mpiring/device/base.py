"""What the engine asks of the place where arrays live."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from mpiring.task import Completion, Task

#: A one-dimensional contiguous array of the device's array module.
Array = Any


@dataclass(frozen=True, slots=True)
class Reduction:
    """A reduction by name: sum, prod, max, min, land, band, lor, bor, lxor, bxor,
    maxloc, minloc, or ``user``, which carries ``function(src, dst)`` doing
    ``dst = src (op) dst`` in place, on host arrays only.
    """

    name: str
    function: Callable[[Array, Array], None] | None = None
    commutative: bool = True


class Device(Protocol):
    """Memory of one kind, and the work that can be done in it.

    Tasks are bound to their arrays once and started many times. On a device
    that runs asynchronously ``start`` only launches; ``done`` tells when the
    host has observed the end.
    """

    @property
    def kind(self) -> str:
        """Of memory: host, cuda..."""
        ...

    @property
    def xp(self) -> ModuleType:
        """numpy, or a module that follows it."""
        ...

    def empty(self, count: int, dtype: Any) -> Array:
        """``count`` uninitialised elements that this library may hand to MPI."""
        ...

    def scratch(self, count: int, dtype: Any) -> Array:
        """As ``empty``, for whoever keeps it until all work on it has been seen to end."""
        ...

    def staging(self, count: int, dtype: Any) -> Array:
        """As ``scratch``, on the host (pinned where it helps): for messages on their way."""
        ...

    def borrow(self, array: Array) -> Array:
        """The same memory, without keeping it alive."""
        ...

    def record(self, array: Array) -> Completion:
        """Over when all work on ``array`` that the caller has launched so far is over."""
        ...

    def reduce(self, src: Array, dst: Array, op: Reduction) -> Task:
        """``dst = src (op) dst``."""
        ...

    def reduced(
        self, src: Array, dst: Array, op: Reduction, factor: float | None = None
    ) -> list[Task]:
        """``dst = src (op) dst``, then times ``factor`` if there is one."""
        tasks = [self.reduce(src, dst, op)]
        return tasks if factor is None else [*tasks, self.scale(dst, factor)]

    def combine(
        self, src: Array, own: Array | None, dst: Array, op: Reduction, factor: float | None
    ) -> list[Task]:
        """The tasks, one after the other, of ``dst = src (op) dst`` for a ``src`` of another rank
        that this one can read; with ``own``, of ``dst = own (op) src``."""
        if own is None:
            return self.reduced(src, dst, op, factor)
        return [self.copy(src, dst), *self.reduced(own, dst, op, factor)]

    def copy(self, src: Array, dst: Array) -> Task:
        """``dst = src``; either may be a staging array."""
        ...

    def scale(self, dst: Array, factor: float) -> Task:
        """``dst = dst * factor``."""
        ...
