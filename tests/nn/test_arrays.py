from __future__ import annotations

import numpy as np
import pytest

from mpiring.errors import DtypeError
from mpiring.nn.arrays import CACHE_LINE, aligned_empty, all_finite, float_dtype, matmul


@pytest.mark.parametrize("count", [1, 17, 1000])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_aligned_memory_starts_on_a_cache_line(count, dtype):
    array = aligned_empty(count, dtype)
    assert array.shape == (count,) and array.dtype == dtype
    assert array.ctypes.data % CACHE_LINE == 0
    array.fill(1)
    assert array.sum() == count


@pytest.mark.parametrize("dtype", ["int32", "complex64", "longdouble", "text", object])
def test_dtypes_that_cannot_be_trained_are_refused(dtype):
    with pytest.raises(DtypeError, match=r"allowed are float16, float32, float64"):
        float_dtype(dtype)


def test_half_precision_products_are_summed_in_single():
    # In float16 the sum would stop growing at 2048: 2048 + 1 rounds to 2048.
    out = np.empty((1, 1), np.float16)
    matmul(np, np.ones((1, 4096), np.float16), np.ones((4096, 1), np.float16), out)
    assert out[0, 0] == 4096


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("size", [1, 3, 64, 10_001])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_bad_element_anywhere_is_found(dtype, size, bad):
    array = np.zeros(size, dtype)
    assert all_finite(array)
    for place in {0, size // 2, size - 1}:
        array[place] = bad
        assert not all_finite(array)
        array[place] = 0


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.filterwarnings("error")
def test_large_finite_values_are_finite(dtype):
    array = np.full((5, 7), np.finfo(dtype).max, dtype)
    assert all_finite(array)
    array[3, 3] = np.nan
    assert not all_finite(array)


def test_no_elements_are_finite():
    assert all_finite(np.empty(0, np.float32))
