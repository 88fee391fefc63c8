"""All parts together: n ranks, played one after the other, train what one process trains."""

from __future__ import annotations

import numpy as np
import pytest

from mpiring.nn.data import load
from mpiring.nn.loss import softmax_cross_entropy
from mpiring.nn.model import MLP
from mpiring.nn.optim import SGD
from mpiring.nn.sampler import Sampler


def train(data, model, epochs, batch, ranks=1, accumulate=1, **hyper):
    """Train as ``ranks`` ranks would, whose gradients are summed; the mean loss of each epoch."""
    flat = model.parameters
    optimizer = SGD(flat.size, flat.dtype, **hyper)
    samplers = [
        Sampler(len(data.y_train), batch, ranks=ranks, rank=rank, accumulate=accumulate)
        for rank in range(ranks)
    ]
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for shares in zip(*(sampler.epoch(epoch) for sampler in samplers)):
            summed = np.zeros_like(flat.gradients)
            for share in shares:
                for number, which in enumerate(share.micro_batches):
                    x, labels = data.train_batch(which, flat.dtype)
                    loss, gradient = softmax_cross_entropy(model.forward(x), labels, share.count)
                    total += float(loss)
                    for _ in model.backward(gradient, accumulate=number > 0):
                        pass
                summed += flat.gradients
            optimizer.step(flat.values, summed)
        losses.append(total / len(data.y_train))
    return losses


@pytest.fixture
def small(tmp_path):
    """101 samples: no batch size divides them, and the last batch is below the rank count."""
    random = np.random.default_rng(0)
    labels = random.integers(0, 3, 101)
    samples = random.normal(size=(101, 6)) + 2 * np.eye(6)[labels]
    np.savez(tmp_path / "small.npz", x_train=samples, y_train=labels, x_test=samples, y_test=labels)
    return load(tmp_path / "small.npz")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_ranks_and_micro_batches_change_nothing_but_rounding(small, ranks, accumulate):
    hyper = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}
    alone, split = (MLP((6, 8, 3), dtype="float64") for _ in range(2))
    expected = train(small, alone, 3, 14, **hyper)
    losses = train(small, split, 3, 14, ranks, accumulate, **hyper)
    assert losses == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(split.parameters.values, alone.parameters.values, atol=1e-13)
    assert losses[-1] < losses[0] / 2


def test_batches_of_three_and_one_give_the_gradient_of_four(small):
    model = MLP((6, 8, 3), dtype="float64")

    def gradient(which):
        x, labels = small.train_batch(which, "float64")
        list(model.backward(softmax_cross_entropy(model.forward(x), labels, 4)[1]))
        return model.parameters.gradients.copy()

    whole = gradient(slice(0, 4))
    np.testing.assert_allclose(gradient(slice(0, 3)) + gradient(slice(3, 4)), whole, atol=1e-16)


@pytest.mark.parametrize(("dtype", "hidden"), [("float32", 512), ("float16", 64)])
def test_digits_are_learnt(dtype, hidden):
    data = load("digits")
    model = MLP((data.features, hidden, hidden, data.classes), dtype=dtype)
    losses = train(data, model, epochs=12, batch=128, lr=0.05, momentum=0.9, weight_decay=1e-4)
    assert losses[-1] < 0.02
    assert model.accuracy(*data.test_batch(slice(None), dtype)) >= 0.97
