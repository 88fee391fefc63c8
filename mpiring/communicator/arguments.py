"""Buffer specifications, as mpi4py takes them, made into flat arrays.

``array``, ``[array, MPI.FLOAT]``, ``[array, count, MPI.FLOAT]``, and in vector
collectives ``[array, (counts, displs), MPI.FLOAT]``; the array being NumPy's or
anything with the buffer protocol, DLPack or ``__cuda_array_interface__``.

An array that is not C-contiguous is packed into one that is, and unpacked at the
end: elements are counted in C order of the *shape*, so that a transposed or
Fortran-ordered array on one rank meets the right elements of the others.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mpiring.errors import ArgumentError, DtypeError
from mpiring.schedule.chunks import Range, consecutive, split


@dataclass(frozen=True, slots=True)
class Operand:
    """One argument: ``flat`` is what travels, ``strided`` the caller's array if it differs."""

    name: str
    flat: Any
    strided: Any = None

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
    """Whether ``spec`` is MPI.IN_PLACE, as mpi4py says it None, or the string "in place"."""
    mpi = sys.modules.get("mpi4py.MPI")
    return (
        spec is None
        or (mpi is not None and spec is mpi.IN_PLACE)
        or (isinstance(spec, str) and spec == "in place")
    )


def operand(spec: Any, name: str, *, writable: bool, blocks: int = 1) -> Operand:
    """Understand one buffer specification. Raises ArgumentError or DtypeError naming it.

    A count that is given counts elements of one block, as in MPI; without one the
    whole array is meant, of ``blocks`` blocks together.
    """
    array, count, displ, datatype = _unfold(spec, name, pairs=(tuple, list))
    whole, unit = _whole(array, datatype, name, writable)
    if count is None and displ is None:
        return whole
    start = 0 if displ is None else unit * integer(displ, name)
    stop = whole.count if count is None else start + unit * blocks * integer(count, name)
    if not 0 <= start <= stop <= whole.count:
        at = f" from element {start}" if start else ""
        raise ArgumentError(
            f"{name}: {stop - start} elements{at} asked for, but the array has {whole.count}"
        )
    if whole.strided is None:
        return Operand(name, whole.flat[start:stop])
    if (start, stop) != (0, whole.count):
        raise ArgumentError(f"{name}: a count needs a C-contiguous array")
    return whole


def vector_operand(
    spec: Any, name: str, *, writable: bool, blocks: int
) -> tuple[Operand, tuple[Range, ...]]:
    """As ``operand``, for ``blocks`` blocks of different sizes; and where they lie.

    As in mpi4py, one number for the counts means equal ones, one for the
    displacements that many elements from block to block; without counts the
    blocks differ by at most one element and follow each other.
    """
    array, counts, displs, datatype = _unfold(spec, name, pairs=(tuple,))
    whole, unit = _whole(array, datatype, name, writable)
    if counts is None:
        if displs is not None:
            raise ArgumentError(f"{name}: displacements given without counts")
        return whole, split(0, whole.count, blocks)
    sizes = [unit * size for size in integers(counts, blocks, name)]
    if displs is None:
        chunks = consecutive(sizes)
    else:
        starts = integers(displs, blocks, name, lambda i, stride: i * stride)
        chunks = tuple((unit * start, unit * start + size) for start, size in zip(starts, sizes))
    if min(sizes) < 0:
        raise ArgumentError(f"{name}: counts {sizes} given; allowed are counts from 0")
    filled = sorted(chunk for chunk in chunks if chunk[0] < chunk[1])
    if filled and (filled[0][0] < 0 or max(stop for _, stop in filled) > whole.count):
        raise ArgumentError(f"{name}: blocks {chunks} leave its {whole.count} elements")
    if any(a[1] > b[0] for a, b in pairwise(filled)):
        raise ArgumentError(f"{name}: blocks {chunks} overlap")
    return whole, chunks


def overlap(one: Operand, other: Operand) -> bool:
    """Whether the two share memory that travels (packed arrays share none)."""
    if one.strided is not None or other.strided is not None:
        return False
    (a, b), (c, d) = one.extent, other.extent
    return max(a, c) < min(b, d)


def integers(
    value: Any, number: int, name: str, spread: Callable[[int, int], int] = lambda i, it: it
) -> list[int]:
    """``number`` integers; one alone stands for ``spread(i, it)`` for each i."""
    try:
        listed = list(value)
    except TypeError:
        return [spread(i, integer(value, name)) for i in range(number)]
    if len(listed) != number:
        raise ArgumentError(f"{name}: {len(listed)} integers given; {number} are needed")
    return [integer(each, name) for each in listed]


def _unfold(spec: Any, name: str, *, pairs: tuple[type, ...]) -> tuple[Any, Any, Any, Any]:
    """(array, count or counts, displacement or displacements, datatype).

    What has one of the types ``pairs`` in the place of a count is the pair of
    counts and displacements.
    """
    if not isinstance(spec, list | tuple):
        return spec, None, None, None
    array, counts, displs, datatype = None, None, None, None
    if len(spec) == 1:
        (array,) = spec
    elif len(spec) == 2 and _is_datatype(spec[1]):
        array, datatype = spec
    elif len(spec) == 2:
        array, counts = spec
    elif len(spec) == 3:
        array, counts, datatype = spec
    elif len(spec) == 4:
        array, counts, displs, datatype = spec
    if len(spec) < 4 and isinstance(counts, pairs):
        pair: Any = counts
        if len(pair) != 2:
            raise ArgumentError(
                f"{name}: {pair} given where (counts, displacements) are expected; "
                "a list holds counts alone"
            )
        counts, displs = pair
    known = datatype is None or _is_datatype(datatype)
    if not 1 <= len(spec) <= 4 or not known or isinstance(array, int | float | complex):
        raise ArgumentError(
            f"{name}: {spec!r} is no buffer specification; allowed are array, [array, datatype], "
            "[array, count, datatype] and [array, (counts, displs), datatype]"
        )
    return array, counts, displs, datatype


def _is_datatype(value: Any) -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return isinstance(value, str) or (mpi is not None and isinstance(value, mpi.Datatype))


def integer(value: Any, name: str) -> int:
    """``value`` as an int; ArgumentError if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}: {value!r} given where an integer is needed") from None


def _whole(array: Any, datatype: Any, name: str, writable: bool) -> tuple[Operand, int]:
    """The whole array as an operand, and how many of its elements one datatype holds."""
    if array is None and datatype is not None:  # mpi4py's empty buffer
        array = np.empty(0, _numpy_dtype(datatype, name)[0])
    array = _as_array(array, name)
    dtype, unit = (array.dtype, 1) if datatype is None else _numpy_dtype(datatype, name)
    _check_dtype(np.dtype(dtype), name)
    if writable and not _writable(array):
        raise ArgumentError(f"{name}: the array is read-only, and the result goes there")
    if array.flags.c_contiguous:
        flat = array.reshape(-1)
        return Operand(name, flat if dtype == array.dtype else _viewed(flat, dtype, name)), unit
    if not isinstance(array, np.ndarray) or hasattr(array, "__cuda_array_interface__"):
        raise ArgumentError(
            f"{name}: a device array must be C-contiguous (cupy.ascontiguousarray makes one)"
        )
    if dtype != array.dtype:
        raise ArgumentError(f"{name}: an array read as another datatype must be C-contiguous")
    return Operand(name, np.empty(array.size, array.dtype), array), unit


def _as_array(value: Any, name: str) -> Any:
    if isinstance(value, np.ndarray):
        # Of the base class: a matrix stays two-dimensional for ever. But what stands for device
        # memory keeps telling so.
        return value if hasattr(value, "__cuda_array_interface__") else np.asarray(value)
    if hasattr(value, "__cuda_array_interface__"):
        from mpiring.device.cuda import wrap

        return wrap(value)
    try:
        if isinstance(value, np.generic):
            copy = np.asarray(value)
            copy.flags.writeable = False  # a result would be lost
            return copy
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(value)
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, BufferError) as error:
        raise ArgumentError(f"{name}: {type(value).__name__} is no array ({error})") from None


def _from_dlpack(value: Any) -> Any:
    kind = value.__dlpack_device__()[0]
    if int(kind) != 1:  # kDLCPU
        from mpiring.device.cuda import wrap

        return wrap(value)
    array = np.from_dlpack(value)
    return array if array.flags.writeable or _is_versioned(value) else _Writable(array).array


def _is_versioned(value: Any) -> bool:
    """Whether the exporter says what may be written: DLPack does since its version 1.0."""
    try:
        return "versioned" in repr(value.__dlpack__(max_version=(1, 0)))
    except TypeError:
        return False


class _Writable:
    """NumPy takes what an older DLPack exports for read-only; mpi4py, and we, do not."""

    def __init__(self, array: np.ndarray) -> None:
        self._owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}

    @property
    def array(self) -> np.ndarray:
        return np.asarray(self)  # keeps self, and so the owner, alive


def _numpy_dtype(datatype: Any, name: str) -> tuple[np.dtype, int]:
    """The dtype of a datatype's elements, and how many there are in one."""
    if isinstance(datatype, str):
        try:
            return np.dtype(datatype), 1
        except TypeError:
            raise DtypeError(f"{name}: {datatype!r} names no datatype") from None
    if not datatype or not (datatype.is_predefined or datatype.size == datatype.extent):
        raise DtypeError(
            f"{name}: datatype {datatype.name or 'made by the caller'} has gaps or no elements; "
            "allowed are predefined datatypes and those without gaps"
        )
    from mpi4py.util import dtlib

    try:
        dtype = dtlib.to_numpy_dtype(datatype)
    except (ValueError, AttributeError) as error:
        raise DtypeError(f"{name}: datatype {datatype.name} has no dtype ({error})") from None
    if dtype.kind == "U":
        return np.dtype("U1"), 1
    return dtype.base, math.prod(dtype.shape)


def _check_dtype(dtype: np.dtype, name: str) -> None:
    """What may travel: what MPI knows, and 16-bit floats. What may be reduced, the device says."""
    known = dtype.kind in "biufc" or dtype.name == "bfloat16" or dtype.str[1:] in ("S1", "U1")
    if not known and (dtype.names is None or dtype.hasobject):
        raise DtypeError(
            f"{name}: dtype {dtype} is not numeric; allowed are booleans, integers, "
            "floating-point and complex numbers, float16 and ml_dtypes.bfloat16 among them"
        )


def _writable(array: Any) -> bool:
    return bool(array.flags.writeable) if isinstance(array, np.ndarray) else True


def _viewed(flat: Any, dtype: np.dtype, name: str) -> Any:
    octets = flat.view("u1")
    whole = octets.size // dtype.itemsize * dtype.itemsize
    if whole != octets.size:
        raise ArgumentError(f"{name}: {octets.size} bytes are no whole number of {dtype} elements")
    return octets.view(dtype)
