"""The optimizers against the formulas of their papers, written out element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mpiring.errors import ArgumentError, DtypeError
from mpiring.nn.optim import SGD, Adam

COUNT = 40
STEPS = 4


def start_values(dtype="float64"):
    return np.random.default_rng(0).normal(size=COUNT).astype(dtype)


def gradient(step, dtype="float64"):
    return np.random.default_rng(step + 1).normal(size=COUNT).astype(dtype)


def reference_sgd(value, gradients, lr, momentum, weight_decay):
    buffer = None
    for g in gradients:
        g += weight_decay * value
        buffer = g if buffer is None else momentum * buffer + g
        value -= lr * buffer
    return value


def reference_adam(value, gradients, lr, beta1, beta2, eps, weight_decay):
    mean = square = 0.0
    for t, g in enumerate(gradients, 1):
        g += weight_decay * value
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * g * g
        value -= lr * (mean / (1 - beta1**t)) / (math.sqrt(square / (1 - beta2**t)) + eps)
    return value


CASES = {
    "sgd": (lambda **k: SGD(COUNT, lr=0.1, **k), (reference_sgd, 0.1, 0, 0)),
    "decay": (lambda **k: SGD(COUNT, lr=0.1, weight_decay=0.2, **k), (reference_sgd, 0.1, 0, 0.2)),
    "momentum": (lambda **k: SGD(COUNT, lr=0.1, momentum=0.9, **k), (reference_sgd, 0.1, 0.9, 0)),
    "momentum and decay": (
        lambda **k: SGD(COUNT, lr=0.1, momentum=0.9, weight_decay=0.2, **k),
        (reference_sgd, 0.1, 0.9, 0.2),
    ),
    "adam": (lambda **k: Adam(COUNT, **k), (reference_adam, 1e-3, 0.9, 0.999, 1e-8, 0)),
    "adam with all": (
        lambda **k: Adam(COUNT, lr=0.1, betas=(0.8, 0.7), eps=0.1, weight_decay=0.2, **k),
        (reference_adam, 0.1, 0.8, 0.7, 0.1, 0.2),
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def expected(case, dtype="float64"):
    reference, *hyper = CASES[case][1]
    columns = zip(*(gradient(step, dtype).astype("float64") for step in range(STEPS)))
    values = start_values(dtype).astype("float64")
    return np.array([reference(v, list(g), *hyper) for v, g in zip(values, columns)])


def run(optimizer, dtype="float64", steps=range(STEPS)):
    values = start_values(dtype)
    for step in steps:
        optimizer.step(values, gradient(step, dtype))
    return values


@every_case
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-5), ("float16", 5e-3)]
)
def test_values_follow_the_formula(xp, short_blocks, case, dtype, tolerance):
    optimizer = CASES[case][0](dtype=dtype, xp=xp)
    np.testing.assert_allclose(run(optimizer, dtype), expected(case, dtype), atol=tolerance)
    assert optimizer.steps == STEPS


@every_case
def test_a_step_in_pieces_equals_a_step_at_once(short_blocks, case):
    optimizer = CASES[case][0](dtype="float64")
    values = start_values()
    for step in range(STEPS):
        optimizer.steps += 1
        g = gradient(step)
        for part in (slice(25, 40), slice(0, 3), slice(3, 25)):  # buckets arrive in any order
            optimizer.update(values[part], g[part], part.start)
    np.testing.assert_array_equal(values, run(CASES[case][0](dtype="float64")))


def test_shards_with_their_own_optimizers_equal_one_owner(short_blocks):
    values = start_values()
    shards = [(slice(0, 17), SGD(17, "float64", lr=0.1, momentum=0.9)),
              (slice(17, 40), SGD(23, "float64", lr=0.1, momentum=0.9))]  # fmt: skip
    for step in range(STEPS):
        for part, optimizer in shards:
            optimizer.step(values[part], gradient(step)[part])
    np.testing.assert_array_equal(values, run(SGD(COUNT, "float64", lr=0.1, momentum=0.9)))


def test_other_arrays_are_not_mistaken_for_those_of_the_step_before(short_blocks):
    optimizer = SGD(COUNT, "float64", lr=1)
    a, b, ones = np.zeros(COUNT), np.zeros(COUNT), np.ones(COUNT)
    optimizer.step(a, ones)
    optimizer.step(b, ones)
    optimizer.step(b, 2 * ones)
    assert (a == -1).all() and (b == -3).all()


def test_the_learning_rate_can_change_between_steps():
    optimizer = SGD(COUNT, "float64", lr=1)
    values = np.zeros(COUNT)
    optimizer.step(values, np.ones(COUNT))
    optimizer.lr = 0.5
    optimizer.step(values, np.ones(COUNT))
    assert (values == -1.5).all()


def test_half_precision_keeps_its_state_in_single():
    # The square of 1e-4 is no float16; eps and the rate would vanish as well.
    optimizer = Adam(COUNT, "float16", lr=0.125)
    values = np.zeros(COUNT, "float16")
    optimizer.step(values, np.full(COUNT, 1e-4, "float16"))
    np.testing.assert_allclose(values, -0.125, rtol=1e-3)
    assert {array.dtype for array in optimizer.state.values()} == {np.dtype("float32")}


def test_gradients_are_left_as_they_are():
    for build, _ in CASES.values():
        g = gradient(0)
        build(dtype="float64").step(start_values(), g)
        np.testing.assert_array_equal(g, gradient(0))


@every_case
def test_saved_state_resumes_exactly(tmp_path, case):
    build = CASES[case][0]
    first, values = build(dtype="float64"), start_values()
    for step in range(2):
        first.step(values, gradient(step))
    np.savez(tmp_path / "state.npz", **first.state_dict())
    second = build(dtype="float64")
    with np.load(tmp_path / "state.npz") as saved:
        second.load_state_dict(saved)
    for step in range(2, STEPS):
        second.step(values, gradient(step))
    assert second.steps == STEPS
    np.testing.assert_array_equal(values, run(build(dtype="float64")))


def test_saved_state_is_a_copy():
    optimizer = SGD(COUNT, "float64", lr=0.1, momentum=0.9)
    saved = optimizer.state_dict()
    run(optimizer)
    assert not saved["momentum_buffer"].any() and saved["steps"] == 0


def test_state_that_does_not_fit_is_refused():
    saved = SGD(COUNT, lr=0.1, momentum=0.9).state_dict()
    for other in (SGD(COUNT + 1, lr=0.1, momentum=0.9), SGD(COUNT, lr=0.1), Adam(COUNT)):
        with pytest.raises(
            ArgumentError, match=r"saved: shapes .*momentum_buffer.* given; allowed"
        ):
            other.load_state_dict(saved)


def test_a_kernel_takes_the_place_of_the_block_pass():
    calls = []

    def kernel(values, gradients, state, scalars):
        calls.append((values.size, scalars))
        buffer = state["momentum_buffer"]
        buffer[...] = scalars["momentum"] * buffer + gradients + scalars["weight_decay"] * values
        values -= scalars["lr"] * buffer

    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2}
    fused = SGD(COUNT, "float64", kernel=kernel, **hyper)
    np.testing.assert_allclose(run(fused), expected("momentum and decay"), atol=1e-13)
    assert calls == [(COUNT, hyper)] * STEPS


def test_a_kernel_for_adam_gets_all_that_it_needs():
    def kernel(values, gradients, state, s):
        g = gradients + s["weight_decay"] * values
        state["mean"][...] = s["beta1"] * state["mean"] + s["one_minus_beta1"] * g
        state["square"][...] = s["beta2"] * state["square"] + s["one_minus_beta2"] * g**2
        values -= s["rate"] * state["mean"] / (np.sqrt(state["square"]) * s["root"] + s["eps"])

    np.testing.assert_allclose(
        run(CASES["adam with all"][0](dtype="float64", kernel=kernel)),
        expected("adam with all"),
        atol=1e-13,
    )


def test_nothing_to_own():
    optimizer = SGD(0, lr=0.1, momentum=0.9)
    optimizer.step(np.empty(0, "float32"), np.empty(0, "float32"))
    assert optimizer.steps == 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: SGD(4, lr=-1), "lr: -1 given"),
        (lambda: SGD(4, lr=math.nan), "lr: nan given"),
        (lambda: SGD(4, lr=1, momentum=1), "momentum: 1 given"),
        (lambda: SGD(4, lr=1, weight_decay=-1), "weight_decay: -1 given"),
        (lambda: SGD(-1, lr=1), "count: -1 given"),
        (lambda: Adam(4, lr=math.inf), "lr: inf given"),
        (lambda: Adam(4, betas=(1, 0)), r"betas\[0\]: 1 given"),
        (lambda: Adam(4, betas=(0, -1)), r"betas\[1\]: -1 given"),
        (lambda: Adam(4, eps=-1), "eps: -1 given"),
        (lambda: SGD(4, lr=1).step(np.zeros(3, "f4"), np.zeros(3, "f4")), r"\(3,\).*\(4,\)"),
        (lambda: SGD(4, lr=1).step(np.zeros(4, "f4"), np.zeros(3, "f4")), r"\(4,\) and \(3,\)"),
    ],
)
def test_wrong_arguments(build, message):
    with pytest.raises(ArgumentError, match=message):
        build()


def test_parts_outside_of_what_is_owned():
    optimizer = SGD(4, lr=1)
    two = np.zeros(2, "f4")
    with pytest.raises(ArgumentError, match="steps: 0 given"):
        optimizer.update(two, two)
    optimizer.steps = 1
    for start in (-1, 3):
        with pytest.raises(ArgumentError, match=f"from element {start} given"):
            optimizer.update(two, two, start)
    with pytest.raises(ArgumentError, match=r"\(2,\) and \(1,\)"):
        optimizer.update(two, two[:1])
    with pytest.raises(DtypeError, match="int32"):
        SGD(4, "int32", lr=1)
