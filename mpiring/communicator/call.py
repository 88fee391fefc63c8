"""A collective call once it is understood, and the memory of those made before."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mpiring.communicator.arguments import Operand
from mpiring.communicator.operations import Operation
from mpiring.device.base import Device, Reduction
from mpiring.engine.execution import Execution
from mpiring.schedule.catalog import Plan
from mpiring.schedule.ops import Buffer, Schedule

#: Bound collectives kept, and bytes of scratch that they may hold together.
KEPT, KEPT_BYTES = 64, 128 << 20


@dataclass(frozen=True)
class Call:
    """A collective call understood: what to run on what."""

    method: str
    plan: Plan
    data: Operand
    input: Operand | None = None
    operation: Operation | None = None
    record: str = ""
    before: tuple[tuple[Any, Any], ...] = ()  #: (source, target) copies around the schedule
    after: tuple[tuple[Any, Any], ...] = ()
    kind: str = ""
    schedule: Schedule | None = None
    memory: Mapping[Buffer, Any] = field(default_factory=dict)  #: what the schedule needs
    device: Device | None = None

    @property
    def buffers(self) -> dict[Buffer, Any]:
        """The arrays that the schedule works on."""
        source = {} if self.input is None else {Buffer.INPUT: self.input.flat}
        return {Buffer.DATA: self.data.flat, **source}

    @property
    def given(self) -> list[Any]:
        """The arrays that the caller's own work may still be writing or reading."""
        copied = [source for source, _ in self.before] + [target for _, target in self.after]
        return [*self.buffers.values(), *copied]


def borrowing(call: Call) -> Call:
    """The same call on the same memory, without keeping the caller's arrays alive."""
    assert call.device is not None
    data = replace(call.data, flat=call.device.borrow(call.data.flat))
    source = call.input and replace(call.input, flat=call.device.borrow(call.input.flat))
    return replace(call, data=data, input=source)


class Memory:
    """Collectives by what they were called with: method, addresses, sizes, dtypes, op.

    Blocking ones are kept bound, others as they were understood.
    """

    def __init__(self) -> None:
        self._understood: OrderedDict[tuple[Any, ...], Call] = OrderedDict()
        self._bound: OrderedDict[tuple[Any, ...], tuple[str, Execution]] = OrderedDict()
        self._scratch = 0
        mpi = sys.modules.get("mpi4py.MPI")
        names = ("IN_PLACE", "SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "BAND", "BOR")
        #: MPI objects that are always the same; others may be gone when their id comes again.
        self._constants = {id(each): each for each in (getattr(mpi, n) for n in names if mpi)}

    def key(
        self, label: str, buffers: tuple[Any, ...], parameters: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        """What the call is kept under; None if it is none that can come again as it is.

        Buffers are told apart by their addresses, parameters by their values.
        """
        parts: list[Any] = [label]
        for buffer in buffers:
            kind = type(buffer)
            if kind is np.ndarray:
                flags = buffer.flags
                if not (flags.c_contiguous and buffer.dtype.names is None):
                    return None
                address = buffer.__array_interface__["data"][0]
                parts += (address, buffer.size, buffer.dtype, flags.writeable)
            elif kind is str or id(buffer) in self._constants:
                parts.append(buffer if kind is str else id(buffer))
            elif kind is self._device_array() and buffer.flags.c_contiguous:
                address = buffer.__cuda_array_interface__["data"][0]
                parts += (address, buffer.size, buffer.dtype, "device")
            else:
                return None
        for parameter in parameters:
            if type(parameter) in (str, int, Reduction) or _is_counts(parameter):
                parts.append(parameter)
            elif id(parameter) in self._constants:
                parts.append(id(parameter))
            else:
                return None
        return tuple(parts)

    @staticmethod
    def _device_array() -> Any:
        """CuPy's type of arrays. (Those of others are handed over by a protocol at every call.)"""
        return getattr(sys.modules.get("cupy"), "ndarray", None)

    def understood(self, key: tuple[Any, ...] | None) -> Call | None:
        if key is None or key not in self._understood:
            return None
        self._understood.move_to_end(key)
        return self._understood[key]

    def remember(self, key: tuple[Any, ...] | None, call: Call) -> None:
        if key is not None:
            self._understood[key] = replace(call, memory={})  # each call has its own
            if len(self._understood) > KEPT:
                self._understood.popitem(last=False)

    def get(self, key: tuple[Any, ...] | None) -> tuple[str, Execution] | None:
        if key is None or key not in self._bound:
            return None
        self._bound.move_to_end(key)
        return self._bound[key]

    def put(self, key: tuple[Any, ...] | None, record: str, execution: Execution) -> None:
        if key is None:
            return
        self.drop(key)
        self._bound[key] = (record, execution)
        self._scratch += _scratch(execution)
        while len(self._bound) > KEPT or (self._scratch > KEPT_BYTES and len(self._bound) > 1):
            self.drop(next(iter(self._bound)))

    def drop(self, key: tuple[Any, ...] | None) -> None:
        if key is not None and key in self._bound:
            _, execution = self._bound.pop(key)
            self._scratch -= _scratch(execution)


def _is_counts(value: Any) -> bool:
    return type(value) is tuple and all(type(each) is int for each in value)


def _scratch(execution: Execution) -> int:
    buffers = execution.binding.buffers
    return sum(buffers[each].nbytes for each in (Buffer.SCRATCH, Buffer.HOST) if each in buffers)
