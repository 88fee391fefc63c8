from __future__ import annotations

import numpy as np
import pytest

from mpiring.errors import ArgumentError
from mpiring.nn.arrays import CACHE_LINE
from mpiring.nn.parameters import FlatParameters

SHAPES = [("b2", (3,)), ("w2", (5, 3)), ("b1", (5,)), ("w1", (4, 5))]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_parameters_are_adjacent_views_in_ready_order(xp, dtype):
    flat = FlatParameters(SHAPES, dtype, xp=xp)
    assert flat.size == 43 and flat.nbytes == 43 * np.dtype(dtype).itemsize
    assert [p.name for p in flat] == ["b2", "w2", "b1", "w1"]
    assert [p.index for p in flat] == [0, 1, 2, 3]
    stop = 0
    for parameter, (_, shape) in zip(flat, SHAPES):
        assert parameter.start == stop and parameter.shape == shape
        stop = parameter.stop
        for view, whole in ((parameter.value, flat.values), (parameter.gradient, flat.gradients)):
            assert view.dtype == dtype and view.flags.c_contiguous
            view[...] = parameter.index + 1
            assert (whole[parameter.start : parameter.stop] == parameter.index + 1).all()
            assert np.count_nonzero(whole == parameter.index + 1) == parameter.size
    assert stop == flat.size


def test_values_and_gradients_start_as_zeros_in_separate_memory():
    flat = FlatParameters(SHAPES)
    assert not flat.values.any() and not flat.gradients.any()
    assert not np.shares_memory(flat.values, flat.gradients)
    assert flat.values.ctypes.data % CACHE_LINE == flat.gradients.ctypes.data % CACHE_LINE == 0


def test_lookup_by_index_and_by_name():
    flat = FlatParameters(SHAPES)
    assert len(flat) == 4
    assert flat["b1"] is flat[2] and flat["w1"] is flat[-1]


def test_memory_can_come_from_elsewhere():
    window = np.full(86, 7, np.float32)
    pieces = iter((window[:43], window[43:]))
    flat = FlatParameters(SHAPES, allocate=lambda count, dtype: next(pieces))
    flat["w1"].value[...] = 1
    flat["b2"].gradient[...] = 2
    assert window[23:43].sum() == 20 and window[43:46].sum() == 6 and window.sum() == 26


def test_names_must_differ():
    with pytest.raises(ArgumentError, match=r"'a' given twice"):
        FlatParameters([("a", (1,)), ("a", (2,))])
