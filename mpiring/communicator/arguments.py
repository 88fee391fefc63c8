"""Buffer specifications, as mpi4py takes them, made into flat arrays.

``array``, ``[array]``, ``[array, MPI.FLOAT]``, ``[array, count, MPI.FLOAT]``,
``[array, (counts, displs), MPI.FLOAT]``; the array being NumPy's or anything
with the buffer protocol, DLPack or ``__cuda_array_interface__``.

An array that is not C-contiguous is packed into one that is, and unpacked at the
end: elements are counted in C order of the *shape*, so that a transposed or
Fortran-ordered array on one rank meets the right elements of the others.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpiring.errors import ArgumentError, DtypeError


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument: ``flat`` is what travels, ``strided`` the caller's array if it differs."""

    name: str
    flat: Any
    strided: Any = None
    counts: tuple[int, ...] | None = None
    displs: tuple[int, ...] | None = None

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.flat.dtype)

    @property
    def count(self) -> int:
        return int(self.flat.size)

    @property
    def on_device(self) -> bool:
        return hasattr(self.flat, "__cuda_array_interface__")

    @property
    def extent(self) -> tuple[int, int]:
        """Addresses of the first byte and of the one behind the last."""
        if self.on_device:
            start = self.flat.__cuda_array_interface__["data"][0]
        else:
            start = self.flat.__array_interface__["data"][0]
        return start, start + self.flat.nbytes


def is_in_place(spec: Any) -> bool:
    """Whether ``spec`` is MPI.IN_PLACE (or the string "in place")."""
    mpi = sys.modules.get("mpi4py.MPI")
    return (mpi is not None and spec is mpi.IN_PLACE) or (
        isinstance(spec, str) and spec == "in place"
    )


def operand(spec: Any, name: str, *, writable: bool) -> Operand:
    """Understand one buffer specification. Raises ArgumentError or DtypeError naming it."""
    array, counts, displs, datatype = _unfold(spec, name)
    array = _as_array(array, name)
    dtype = _numpy_dtype(datatype, name) if datatype is not None else array.dtype
    _check_dtype(np.dtype(dtype), name)
    if writable and not _writable(array):
        raise ArgumentError(f"{name}: the array is read-only, and the result goes there")
    contiguous = _contiguous(array)
    if dtype != array.dtype and not contiguous:
        raise ArgumentError(f"{name}: an array read as another datatype must be C-contiguous")
    if contiguous:
        flat, strided = array.reshape(-1), None
        if dtype != array.dtype:
            flat = _viewed(flat, dtype, name)
    else:
        if not isinstance(array, np.ndarray):
            raise ArgumentError(
                f"{name}: a device array must be C-contiguous (cupy.ascontiguousarray makes one)"
            )
        flat, strided = np.empty(array.size, array.dtype), array
    if isinstance(counts, int | np.integer):
        start = displs if isinstance(displs, int | np.integer) else 0
        _check_count(start, counts, flat.size, name)
        if strided is not None and (start, counts) != (0, flat.size):
            raise ArgumentError(f"{name}: a count needs a C-contiguous array")
        return Operand(name, flat[start : start + counts], strided)
    if counts is None:
        return Operand(name, flat, strided)
    counts = tuple(int(c) for c in counts)
    displs = None if displs is None else tuple(int(d) for d in displs)
    return Operand(name, flat, strided, counts, displs)


def overlap(one: Operand, other: Operand) -> bool:
    """Whether the two share memory that travels (packed arrays share none)."""
    if one.strided is not None or other.strided is not None:
        return False
    (a, b), (c, d) = one.extent, other.extent
    return max(a, c) < min(b, d)


def _unfold(spec: Any, name: str) -> tuple[Any, Any, Any, Any]:
    """(array, count or counts, displacement or displacements, datatype)."""
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    if not 1 <= len(spec) <= 4:
        raise ArgumentError(f"{name}: a buffer specification has 1 to 4 parts, not {len(spec)}")
    array, *rest = spec
    datatype = rest.pop() if rest and _is_datatype(rest[-1]) else None
    if len(rest) == 2:
        counts, displs = rest
    elif rest and isinstance(rest[0], tuple) and len(rest[0]) == 2:
        counts, displs = rest[0]  # as in mpi4py: a pair is counts and displacements
    else:
        counts, displs = (rest[0] if rest else None), None
    if isinstance(array, int | float | complex) or not _countable(counts):
        raise ArgumentError(
            f"{name}: {spec!r} is no buffer specification; allowed are array, [array, datatype], "
            "[array, count, datatype] and [array, (counts, displs), datatype]"
        )
    return array, counts, displs, datatype


def _is_datatype(value: Any) -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return isinstance(value, str) or (mpi is not None and isinstance(value, mpi.Datatype))


def _countable(counts: Any) -> bool:
    if counts is None or isinstance(counts, int | np.integer):
        return True
    return isinstance(counts, Sequence | np.ndarray) and not isinstance(counts, str)


def _as_array(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if hasattr(value, "__cuda_array_interface__"):
        from mpiring.device.cuda import wrap

        return wrap(value)
    try:
        if isinstance(value, np.generic):
            return np.asarray(value)  # read-only in effect: a copy, so it may be only sent
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(value)
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError) as error:
        raise ArgumentError(f"{name}: {type(value).__name__} is no array ({error})") from None


def _from_dlpack(value: Any) -> Any:
    kind = value.__dlpack_device__()[0]
    if int(kind) == 1:  # kDLCPU
        return np.from_dlpack(value)
    from mpiring.device.cuda import wrap

    return wrap(value)


def _numpy_dtype(datatype: Any, name: str) -> np.dtype:
    if isinstance(datatype, str):
        return np.dtype(datatype)
    from mpi4py.util import dtlib

    try:
        return dtlib.to_numpy_dtype(datatype)
    except ValueError as error:
        raise DtypeError(f"{name}: datatype {datatype.Get_name()} has no dtype ({error})") from None


def _check_dtype(dtype: np.dtype, name: str) -> None:
    pair = dtype.names is not None and len(dtype.names) == 2
    if not (dtype.kind in "biufc" or dtype.name == "bfloat16" or pair):
        raise DtypeError(
            f"{name}: dtype {dtype} is not numeric; allowed are booleans, integers, "
            "floating-point and complex numbers, float16 and ml_dtypes.bfloat16 among them"
        )


def _writable(array: Any) -> bool:
    return bool(array.flags.writeable) if isinstance(array, np.ndarray) else True


def _contiguous(array: Any) -> bool:
    return bool(array.flags.c_contiguous)


def _viewed(flat: Any, dtype: np.dtype, name: str) -> Any:
    octets = flat.view("u1")
    whole = octets.size // dtype.itemsize * dtype.itemsize
    if whole != octets.size:
        raise ArgumentError(f"{name}: {octets.size} bytes are no whole number of {dtype} elements")
    return octets.view(dtype)


def _check_count(start: int, count: int, size: int, name: str) -> None:
    if count < 0 or start < 0 or start + count > size:
        at = f" from {start}" if start else ""
        raise ArgumentError(f"{name}: count {count}{at} given, but the array has {size} elements")
