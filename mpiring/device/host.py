"""NumPy arrays: work is over when the call returns.

Tasks are ``functools.partial`` objects around a ufunc, so that starting one runs
no Python of ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mpiring.device.base import Device, Reduction
from mpiring.device.pool import SLAB, Pool
from mpiring.errors import DtypeError
from mpiring.task import READY, Completion, Task

_CACHE_LINE = 64  # bytes

_UFUNCS: dict[str, np.ufunc] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}


class HostTask:
    """A call that does its work at once."""

    __slots__ = ("start",)
    immediate = True

    def __init__(self, call: Callable[[], Any]) -> None:
        self.start = call

    def done(self) -> bool:
        return True


class HostDevice(Device):
    """The host's memory, through NumPy."""

    kind = "host"
    xp = np

    def __init__(self) -> None:
        # Short pieces are lent again: the system takes its time to give one anew, page by page.
        self._pool = Pool(_aligned, settle=lambda: None, kept=SLAB)

    def empty(self, count: int, dtype: Any) -> np.ndarray:
        """As numpy.empty, starting on a cache line: ufuncs are slower elsewhere."""
        return _aligned(count * np.dtype(dtype).itemsize).view(dtype)

    def scratch(self, count: int, dtype: Any) -> np.ndarray:
        lease = self._pool.take(max(1, count * np.dtype(dtype).itemsize), private=True)
        address = address_of(lease.piece.memory) + lease.piece.start
        return window(np.ndarray, address, count, dtype, lease)

    def staging(self, count: int, dtype: Any) -> np.ndarray:
        return self.scratch(count, dtype)

    def borrow(self, array: np.ndarray) -> np.ndarray:
        return window(np.ndarray, address_of(array), array.size, array.dtype)

    def record(self, array: np.ndarray) -> Completion:
        return READY

    def reduce(self, src: np.ndarray, dst: np.ndarray, op: Reduction) -> Task:
        """``dst = src (op) dst``. Integers wrap around, as in NumPy; max and min keep a NaN."""
        return HostTask(_reducer(src, dst, op))

    def copy(self, src: np.ndarray, dst: np.ndarray) -> Task:
        return HostTask(partial(np.copyto, dst, src))

    def scale(self, dst: np.ndarray, factor: float) -> Task:
        return HostTask(partial(np.multiply, dst, dst.dtype.type(factor), dst))


def _aligned(nbytes: int) -> np.ndarray:
    raw = np.empty(nbytes + _CACHE_LINE, np.uint8)
    start = -address_of(raw) % _CACHE_LINE
    return raw[start : start + nbytes]


def _reducer(src: np.ndarray, dst: np.ndarray, op: Reduction) -> Callable[[], Any]:
    if op.function is not None:
        return partial(op.function, src, dst)
    if op.name in ("maxloc", "minloc"):
        return partial(_locate, src, dst, np.greater if op.name == "maxloc" else np.less)
    ufunc = _UFUNCS[op.name]
    # Logical ops make booleans of numbers; the result is to be zeros and ones of their dtype.
    casting = {"casting": "unsafe"} if op.name in ("land", "lor", "lxor") else {}
    return partial(ufunc, src, dst, out=dst, **casting)


def _locate(src: np.ndarray, dst: np.ndarray, better: np.ufunc) -> None:
    """MPI's MAXLOC and MINLOC on (value, index) pairs: of equal values, the lower index."""
    assert dst.dtype.names is not None
    value, index = dst.dtype.names
    take = better(src[value], dst[value]) | ((src[value] == dst[value]) & (src[index] < dst[index]))
    dst[take] = src[take]


Kind = TypeVar("Kind", bound=np.ndarray)


def window(kind: type[Kind], address: int, count: int, dtype: Any, owner: object = None) -> Kind:
    """An array over memory at an address; of the owner of the memory it keeps this one alive."""
    octets = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    octets.owner = owner
    return kind((count,), dtype, octets)


def address_of(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


_ARITHMETIC, _REAL, _INTEGER = "iufcV", "iufV", "iub"


def check_reduction(op: Reduction, dtype: np.dtype) -> None:
    """Raise DtypeError unless ``op`` is defined for ``dtype``: as MPI defines it, plus
    float16 and ml_dtypes' bfloat16.
    """
    if op.function is not None:
        return
    kind = "V" if dtype.name == "bfloat16" else dtype.kind if dtype.kind != "V" else "pair"
    if op.name in ("maxloc", "minloc"):
        allowed, words = "pair" if kind == "pair" else "", "(value, index) pairs"
    elif op.name in ("sum", "prod"):
        allowed, words = _ARITHMETIC, "integer, real or complex numbers"
    elif op.name in ("max", "min"):
        allowed, words = _REAL, "integer or real numbers"
    else:
        allowed, words = _INTEGER, "integers or booleans"
    if kind not in (allowed if allowed != "pair" else ("pair",)):
        raise DtypeError(f"op: {op.name} is not defined for dtype {dtype}; it takes {words}")
