from __future__ import annotations

import math

import numpy as np
import pytest

from mpiring.errors import ArgumentError
from mpiring.nn.loss import softmax_cross_entropy

LABELS = np.array([2, 0, 1, 1])


def logits(dtype):
    return np.random.default_rng(1).normal(0, 2, (4, 3)).astype(dtype)


def test_loss_is_the_sum_and_the_gradient_is_over_the_denominator(xp):
    z = logits("float64")
    loss, gradient = softmax_cross_entropy(z, LABELS, 10, xp)
    probability = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    expected = -sum(math.log(probability[i, label]) for i, label in enumerate(LABELS))
    assert float(loss) == pytest.approx(expected, rel=1e-14)
    np.testing.assert_allclose(gradient, (probability - np.eye(3)[LABELS]) / 10, atol=1e-16)


def test_gradient_is_the_slope_of_the_loss():
    z, step = logits("float64"), 1e-6
    _, gradient = softmax_cross_entropy(z, LABELS, 1)
    for place in np.ndindex(z.shape):
        ends = []
        for sign in (1, -1):
            moved = z.copy()
            moved[place] += sign * step
            ends.append(float(softmax_cross_entropy(moved, LABELS, 1)[0]))
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(gradient[place], abs=1e-8)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_large_logits_do_not_overflow(dtype):
    z = np.array([[6e4, 0, -6e4], [-6e4, -6e4, -6e4]], dtype)
    loss, gradient = softmax_cross_entropy(z, np.array([2, 0]), 1)
    assert float(loss) == pytest.approx(2 * float(z[0, 0]) + math.log(3), rel=1e-6)
    np.testing.assert_allclose(gradient[0], [1, 0, -1])
    np.testing.assert_allclose(gradient[1], [-2 / 3, 1 / 3, 1 / 3], rtol=1e-3)


@pytest.mark.parametrize(
    ("dtype", "loss_dtype"),
    [("float16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_dtypes_and_the_callers_logits_stay_as_they_are(dtype, loss_dtype):
    z = logits(dtype)
    before = z.copy()
    loss, gradient = softmax_cross_entropy(z, LABELS, 4)
    assert loss.dtype == loss_dtype and gradient.dtype == dtype
    assert (z == before).all()


def test_no_samples_have_no_loss_and_no_gradient(xp):
    loss, gradient = softmax_cross_entropy(np.empty((0, 3)), np.empty(0, np.int64), 5, xp)
    assert float(loss) == 0 and gradient.shape == (0, 3)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_is_seen():
    z = logits("float32")
    z[1, 1] = np.nan
    assert np.isnan(softmax_cross_entropy(z, LABELS, 4)[0])


def test_wrong_arguments():
    with pytest.raises(ArgumentError, match="denominator: 0 given"):
        softmax_cross_entropy(logits("float32"), LABELS, 0)
    with pytest.raises(ArgumentError, match=r"labels: shape \(3,\) given"):
        softmax_cross_entropy(logits("float32"), LABELS[:3], 4)
