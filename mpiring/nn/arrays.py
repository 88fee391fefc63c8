"""What the network needs from an array module beyond the functions it already has.

Everything in this package is written against ``xp``, which is numpy or a module
that follows it (cupy). Three things differ on the host and are kept here:

* memory: ufuncs that stream over flat arrays lose much of their speed when the
  arrays do not start on a cache line, and ``numpy.empty`` promises 16 bytes only;
* float16: BLAS has no product for it, and NumPy's own loop is many times slower
  than casting the operands to float32;
* blocks: on the host a pass over long arrays is made block by block, so that the
  temporaries of a formula stay in the cache; a device wants one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from mpiring.errors import DtypeError

#: An array of ``xp``.
Array = Any

#: ``allocate(count, dtype)``: ``count`` uninitialised elements, one-dimensional and contiguous.
Allocate = Callable[[int, Any], Array]

CACHE_LINE = 64  #: bytes

#: Elements in a block. Six float32 arrays of this length fit into a megabyte of cache.
BLOCK = 32 * 1024

_FLOATS = ("float16", "float32", "float64")


def float_dtype(dtype: Any) -> np.dtype:
    """``dtype`` as a NumPy dtype; DtypeError unless it is float16, float32 or float64."""
    try:
        result = np.dtype(dtype)
    except TypeError:
        result = None
    if result is None or result.name not in _FLOATS:
        raise DtypeError(f"dtype: {dtype!r} given; allowed are {', '.join(_FLOATS)}")
    return result


def working_dtype(dtype: Any) -> np.dtype:
    """The dtype in which sums over values of ``dtype`` are made: at least float32."""
    return np.promote_types(dtype, np.float32)


def on_host(xp: ModuleType) -> bool:
    return xp is np


def aligned_empty(count: int, dtype: Any) -> Array:
    """``count`` uninitialised host elements, the first one on a cache line."""
    dtype = np.dtype(dtype)
    raw = np.empty(count * dtype.itemsize + CACHE_LINE, np.uint8)
    start = -raw.ctypes.data % CACHE_LINE
    return raw[start : start + count * dtype.itemsize].view(dtype)


def allocator(xp: ModuleType) -> Allocate:
    """How flat arrays are made where nobody brings their own way."""
    return aligned_empty if on_host(xp) else xp.empty


def block_length(xp: ModuleType, count: int) -> int:
    """Elements to work on at once in a pass over ``count`` elements; at least 1."""
    return max(1, min(BLOCK, count) if on_host(xp) else count)


def matmul(xp: ModuleType, a: Array, b: Array, out: Array) -> None:
    """``out = a @ b``; on the host float16 goes through float32, for the sake of BLAS."""
    if on_host(xp) and out.dtype == np.float16:
        np.matmul(a, b, out=out, dtype=np.float32, casting="same_kind")
    else:
        xp.matmul(a, b, out=out)


def all_finite(array: Array) -> bool:
    """Whether ``array`` holds neither inf nor nan.

    On the host this asks first whether the sum of squares is finite, which one
    BLAS call answers. Only a sum that is not finite, as it may also be when large
    finite values overflow, is followed by a look at every element.
    """
    if isinstance(array, np.ndarray) and array.dtype in (np.float32, np.float64):
        flat = array.reshape(-1)
        with np.errstate(all="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return True
    return bool(np.isfinite(array).all())
