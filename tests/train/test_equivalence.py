"""Whatever the number of ranks, the same network is learnt: that of one process."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from mpiring.nn.data import Dataset, load
from tests.train.conftest import write_npz
from tests.train.virtual import alone, assert_identical, train

SGD = ("--momentum", "0.9", "--weight-decay", "1e-3")
ADAM = ("--optimizer", "adam", "--lr", "0.01", "--weight-decay", "1e-3")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
def test_n_ranks_train_what_one_process_trains(
    small: Dataset, ranks: int, accumulate: int, optimizer: tuple[str, ...], overlap: str
) -> None:
    # Batches of 14 over five ranks are of 3 and 2 samples; the last of 3 leaves two ranks none.
    given = ("--epochs", "2", "--batch-size", "14", "--dtype", "float64", *optimizer)
    losses, values = alone(small, *given)
    outcomes = train(small, ranks, *given, "--accumulate", str(accumulate), overlap)
    assert_identical(outcomes)
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-12)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=1e-9, atol=1e-12)
    results = outcomes[0].results
    assert results["steps"] == 2 * math.ceil(45 / 14)
    assert results["steps_skipped"] == []


@pytest.mark.parametrize(("dtype", "near"), [("float32", 1e-5), ("float16", 2e-2)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_lower_precision_they_differ_by_rounding(
    small: Dataset, dtype: str, near: float, ranks: int
) -> None:
    given = ("--epochs", "2", "--batch-size", "14", "--dtype", dtype, *SGD)
    losses, values = alone(small, *given)
    outcomes = train(small, ranks, *given, "--accumulate", "2")
    assert_identical(outcomes)
    assert outcomes[0].losses == pytest.approx(losses, rel=near)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=near, atol=near)


@pytest.mark.parametrize("seed", range(8))
def test_the_order_of_messages_does_not_matter(small: Dataset, seed: int) -> None:
    given = ("--epochs", "1", "--batch-size", "14")
    first, other = (train(small, 3, *given, seed=each)[0].values for each in (1000, seed))
    np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("megabytes", ["0", "1e-6", "25"])
def test_the_size_of_buckets_does_not_matter(small: Dataset, megabytes: str) -> None:
    given = ("--epochs", "1", "--batch-size", "14", "--dtype", "float64")
    buckets = ("--bucket-mb", megabytes, "--first-bucket-mb", megabytes)
    outcomes = train(small, 3, *given, *buckets)
    assert_identical(outcomes)
    np.testing.assert_allclose(outcomes[0].values, alone(small, *given)[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("samples", "steps"), [(32, 2), (40, 3)])
def test_micro_batches_left_over_make_a_step_of_their_own(
    tmp_path: Path, samples: int, steps: int
) -> None:
    # Two ranks, micro-batches of 2: each rank has 8 of them, or 10, and four make a step.
    dataset = load(write_npz(tmp_path / "data.npz", samples))
    given = ("--epochs", "2", "--batch-size", "16", "--dtype", "float64", *SGD)
    losses, values = alone(dataset, *given)
    outcomes = train(dataset, 2, *given, "--accumulate", "4")
    assert_identical(outcomes)
    assert outcomes[0].results["steps"] == 2 * steps
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-12)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=1e-9, atol=1e-12)


def test_more_micro_batches_than_samples(small: Dataset) -> None:
    given = ("--epochs", "1", "--batch-size", "14", "--dtype", "float64")
    outcomes = train(small, 3, *given, "--accumulate", "1000")
    assert_identical(outcomes)
    np.testing.assert_allclose(outcomes[0].values, alone(small, *given)[1], rtol=1e-9, atol=1e-12)


def test_ten_samples_in_batches_over_three_ranks(tmp_path: Path) -> None:
    # Ranks run out of samples at different times; training ends, and every sample counts once.
    dataset = load(write_npz(tmp_path / "ten.npz", 10))
    given = ("--epochs", "3", "--batch-size", "6", "--dtype", "float64")
    outcomes = train(dataset, 3, *given)
    assert_identical(outcomes)
    assert outcomes[0].results["steps"] == 3 * 2
    np.testing.assert_allclose(outcomes[0].values, alone(dataset, *given)[1], rtol=1e-9, atol=1e-12)


def test_it_learns(small: Dataset) -> None:
    outcome = train(small, 2, "--epochs", "12", "--batch-size", "9", "--hidden", "16")[0]
    assert outcome.losses[-1] < outcome.losses[0] / 3
    assert outcome.results["test_accuracy"] >= 0.9


def test_without_hidden_layers(small: Dataset) -> None:
    outcomes = train(small, 2, "--hidden", "none", "--epochs", "1")
    assert_identical(outcomes)
    assert outcomes[0].results["params"] == 6 * 3 + 3
