"""The network against finite differences, against a plain formula, and its promises to callers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from mpiring.errors import ArgumentError, DtypeError
from mpiring.nn.loss import softmax_cross_entropy
from mpiring.nn.model import MLP

SIZES = (5, 7, 6, 3)


def batch(samples, dtype="float64", seed=0):
    random = np.random.default_rng(seed)
    return random.normal(size=(samples, 5)).astype(dtype), random.integers(0, 3, samples)


def gradients(model, x, labels, denominator, accumulate=False):
    loss, gradient = softmax_cross_entropy(model.forward(x), labels, denominator, model.xp)
    names = [p.name for p in model.backward(gradient, accumulate)]
    assert len(names) == len(model.parameters)
    return float(loss)


def test_gradients_are_the_slopes_of_the_loss(xp):
    model = MLP(SIZES, xp=xp, dtype="float64", seed=3)
    model.parameters.values[...] += np.random.default_rng(4).normal(0, 0.1, model.parameters.size)
    x, labels = batch(9)
    gradients(model, x, labels, 9)
    values, exact = model.parameters.values, model.parameters.gradients.copy()
    step = 1e-6
    for place in range(model.parameters.size):
        ends = []
        kept = values[place]
        for moved in (kept + step, kept - step):
            values[place] = moved
            ends.append(float(softmax_cross_entropy(model.forward(x), labels, 9)[0]) / 9)
        values[place] = kept
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(exact[place], abs=1e-8)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("float32", 1e-5)])
def test_lower_precision_follows_the_plain_formula(xp, dtype, tolerance):
    model = MLP(SIZES, xp=xp, dtype=dtype, seed=3)
    x, labels = batch(20, dtype)
    loss = gradients(model, x, labels, 20)
    w = [model.parameters[f"linear{i}.weight"].value.astype("float64") for i in range(3)]
    inputs = [x.astype("float64")]
    for weight in w[:2]:
        inputs.append(np.maximum(inputs[-1] @ weight, 0))
    z = inputs[2] @ w[2]
    probability = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    assert loss == pytest.approx(-np.log(probability[range(20), labels]).sum(), rel=tolerance)
    gradient = (probability - np.eye(3)[labels]) / 20
    for i in (2, 1, 0):
        dw, db = model.parameters[f"linear{i}.weight"], model.parameters[f"linear{i}.bias"]
        np.testing.assert_allclose(dw.gradient, inputs[i].T @ gradient, atol=tolerance)
        np.testing.assert_allclose(db.gradient, gradient.sum(axis=0), atol=tolerance)
        gradient = (gradient @ w[i].T) * (inputs[i] > 0)


def test_backward_yields_in_flat_order_and_writes_nothing_ahead():
    model = MLP(SIZES)
    x, labels = batch(4, "float32")
    _, gradient = softmax_cross_entropy(model.forward(x), labels, 4)
    for _ in model.backward(gradient):
        pass
    final = model.parameters.gradients.copy()
    model.parameters.gradients.fill(99)
    _, gradient = softmax_cross_entropy(model.forward(x), labels, 4)
    for index, parameter in enumerate(model.backward(gradient)):
        assert parameter is model.parameters[index]
        assert (model.parameters.gradients[: parameter.stop] == final[: parameter.stop]).all()
        assert (model.parameters.gradients[parameter.stop :] == 99).all()
    assert [p.name for p in model.parameters] == [
        "linear2.bias", "linear2.weight", "linear1.bias", "linear1.weight",
        "linear0.bias", "linear0.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(4, 4), (1, 7, 0, 4), (8,)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_accumulated_micro_batches_equal_one_batch(xp, short_blocks, sizes, dtype):
    x, labels = batch(sum(sizes), dtype)
    whole, parts = MLP(SIZES, xp=xp, dtype=dtype), MLP(SIZES, xp=xp, dtype=dtype)
    loss = gradients(whole, x, labels, 50)
    summed, start = 0.0, 0
    for number, size in enumerate(sizes):
        part = slice(start, start + size)
        summed += gradients(parts, x[part], labels[part], 50, accumulate=number > 0)
        start += size
    tolerance = 1e-6 if dtype == "float32" else 1e-15
    assert summed == pytest.approx(loss, rel=10 * tolerance)
    np.testing.assert_allclose(
        parts.parameters.gradients, whole.parameters.gradients, atol=tolerance
    )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_no_samples_write_zeros_and_add_nothing(xp, dtype):
    model = MLP(SIZES, xp=xp, dtype=dtype)
    model.parameters.gradients.fill(5)
    assert gradients(model, *batch(0, dtype), 3, accumulate=True) == 0
    assert (model.parameters.gradients == 5).all()
    assert gradients(model, *batch(0, dtype), 3) == 0
    assert not model.parameters.gradients.any()


@pytest.mark.parametrize("accumulate", [False, True])
def test_half_precision_gradients_are_summed_in_single(accumulate):
    # In float16 a sum of ones would stop at 2048, where 2048 + 1 rounds to 2048.
    model = MLP((1, 2), dtype="float16")
    model.forward(np.ones((4096, 1), np.float16))
    list(model.backward(np.ones((4096, 2), np.float16), accumulate))
    assert model.parameters.gradients.tolist() == [4096] * 4


def test_the_gradient_of_the_data_is_not_computed(monkeypatch):
    model = MLP(SIZES)
    asked = []
    for number, layer in enumerate(model.layers):
        original = layer.input_gradient
        monkeypatch.setattr(
            layer, "input_gradient", lambda g, n=number, f=original: (asked.append(n), f(g))[1]
        )
    gradients(model, *batch(4, "float32"), 4)
    assert asked == [4, 3, 2, 1]


def test_a_warm_step_allocates_nothing_of_the_size_of_a_layer():
    model = MLP((300, 200, 200, 3))
    x = np.ones((64, 300), np.float32)
    labels = np.zeros(64, np.int64)
    for accumulate in (False, True):
        gradients(model, x, labels, 64, accumulate)
    tracemalloc.start()
    try:
        for accumulate in (False, True):
            gradients(model, x, labels, 64, accumulate)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * 200 * 4


def test_batches_of_changing_size_do_not_disturb_each_other():
    model = MLP(SIZES)
    for size in (4, 9, 1, 4):
        x, labels = batch(size, "float32", seed=size)
        gradients(model, x, labels, size)
        fresh = MLP(SIZES)
        gradients(fresh, x, labels, size)
        assert (model.parameters.gradients == fresh.parameters.gradients).all()


def test_initial_weights_follow_he_and_the_seed_alone(xp):
    model = MLP((400, 300, 10), xp=xp, dtype="float64", seed=5)
    for number, fan_in in enumerate((400, 300)):
        weight = model.parameters[f"linear{number}.weight"].value
        assert weight.std() == pytest.approx((2 / fan_in) ** 0.5, rel=0.05)
        assert abs(weight.mean()) < 3 * weight.std() / weight.size**0.5
        assert not model.parameters[f"linear{number}.bias"].value.any()
    again = MLP((400, 300, 10), dtype="float64", seed=5)
    assert (again.parameters.values == model.parameters.values).all()
    other = MLP((400, 300, 10), dtype="float64", seed=6)
    assert not (other.parameters.values == model.parameters.values).any(
        where=other.parameters.values != 0
    )
    single = MLP((400, 300, 10), dtype="float32", seed=5)
    assert (single.parameters.values == model.parameters.values.astype("float32")).all()


def test_prediction_goes_in_batches():
    model = MLP(SIZES)
    x, labels = batch(11, "float32")
    expected = model.forward(x).argmax(axis=1)
    assert (model.predict(x, batch=4) == expected).all()
    hits = int((expected == labels).sum())
    assert model.correct(x, labels) == hits and model.accuracy(x, labels) == hits / 11
    assert model.correct(x[:0], labels[:0]) == 0


@pytest.mark.parametrize("sizes", [(), (3,), (3, 0, 2), (3, -1)])
def test_impossible_sizes(sizes):
    with pytest.raises(ArgumentError, match=r"sizes: .* given; allowed are at least two numbers"):
        MLP(sizes)


def test_wrong_arguments():
    model = MLP(SIZES)
    x, _ = batch(4, "float32")
    with pytest.raises(ArgumentError, match=r"x: shape \(4, 4\) given; allowed is \[batch, 5\]"):
        model.forward(x[:, :4])
    with pytest.raises(DtypeError, match="x: dtype float64 given; allowed is float32"):
        model.forward(x.astype("float64"))
    with pytest.raises(ArgumentError, match="seed: -1 given"):
        MLP(SIZES, seed=-1)
    with pytest.raises(DtypeError, match="dtype: 'int32' given"):
        MLP(SIZES, dtype="int32")
    with pytest.raises(ArgumentError, match="no samples given"):
        model.accuracy(x[:0], np.empty(0, np.int64))


def test_backward_needs_a_forward_of_its_own():
    model = MLP(SIZES)
    x, _ = batch(4, "float32")
    gradient = np.zeros((4, 3), np.float32)
    with pytest.raises(ArgumentError, match="gradient: shape"):
        next(model.backward(gradient))
    model.forward(x)
    with pytest.raises(ArgumentError, match=r"gradient: shape \(3, 3\) given; .* \(4, 3\)"):
        next(model.backward(gradient[:3]))
    list(model.backward(gradient))
    with pytest.raises(ArgumentError, match="gradient: shape"):
        next(model.backward(gradient))
    model.forward(x)
    model.predict(x)
    with pytest.raises(ArgumentError, match="gradient: shape"):
        next(model.backward(gradient))
