"""What the trainer does about ranks that start, run or compute differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpiring.nn.data import Dataset
from mpiring.trace import Trace
from mpiring.train.loop import Trainer, hidden_percent
from mpiring.train.replica import Replica
from tests.train.virtual import alone, assert_identical, train

GIVEN = ("--epochs", "2", "--batch-size", "14", "--dtype", "float64")


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("strategy", ["ring", "zero"])
def test_every_rank_starts_from_what_rank_0_has(
    small: Dataset, strategy: str, optimizer: str
) -> None:
    given = (*GIVEN, "--optimizer", optimizer, "--strategy", strategy)

    def scramble(replica: Replica, rank: int) -> None:
        """Ranks seeded otherwise, with an optimizer that has been used, and an epoch behind."""
        if rank:
            random = np.random.default_rng(rank)
            values = replica.model.parameters.values
            values[...] = random.random(values.shape)
            state = replica.optimizer(values.size).state_dict()
            replica.optimizer_state = {name: random.random(x.shape) for name, x in state.items()}
            replica.epochs = rank

    seen = []

    def look(trainer: Trainer, rank: int) -> None:
        replica, optimizer = trainer.replica, trainer.strategy.optimizer
        used = any(array.any() for array in optimizer.state.values())
        weights = replica.model.parameters.values.tobytes()
        seen.append((replica.epochs, optimizer.steps, used, weights))

    outcomes = train(small, 3, *given, prepare=scramble, watch=look)
    assert len(seen) == 3 and seen.count(seen[0]) == 3
    assert seen[0][:3] == (0, 0, False)
    assert_identical(outcomes)
    np.testing.assert_allclose(outcomes[0].values, alone(small, *given)[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_ready_in_another_order_on_one_rank(small: Dataset, seed: int) -> None:
    def shuffle(trainer: Trainer, rank: int) -> None:
        if rank == 1:
            backward = trainer.model.backward

            def backwards(gradient: Any, accumulate: bool = False) -> Iterator[Any]:
                return reversed(list(backward(gradient, accumulate)))

            trainer.model.backward = backwards  # type: ignore[method-assign]

    given = (*GIVEN, "--accumulate", "2")
    outcomes = train(small, 3, *given, watch=shuffle, seed=seed)
    assert_identical(outcomes)
    np.testing.assert_array_equal(outcomes[0].values, train(small, 3, *given)[0].values)


def spoil(value: float, rank: int, *numbers: int) -> Any:
    """A watcher that puts ``value`` into a gradient of ``rank`` in the backward passes
    ``numbers``, counted from 1."""

    def watch(trainer: Trainer, here: int) -> None:
        backward = trainer.model.backward
        passes = iter(range(1, 1 << 30))

        def spoilt(gradient: Any, accumulate: bool = False) -> Iterator[Any]:
            number = next(passes)
            for parameter in backward(gradient, accumulate):
                if here == rank and number in numbers and parameter.name == "linear1.bias":
                    parameter.gradient[-1] = value
                yield parameter

        trainer.model.backward = spoilt  # type: ignore[method-assign]

    return watch


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("ranks", [1, 3])
def test_inf_or_nan_on_one_rank_skips_that_step_on_all(
    small: Dataset, value: float, ranks: int
) -> None:
    outcomes = train(small, ranks, *GIVEN, watch=spoil(value, ranks - 1, 3, 8))
    assert_identical(outcomes)
    assert outcomes[0].results["steps_skipped"] == [3, 8]
    losses, values = alone(small, *GIVEN, skip=(3, 8))
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-12)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=1e-9, atol=1e-12)


def test_inf_in_a_micro_batch_that_is_not_exchanged_by_itself(small: Dataset) -> None:
    outcomes = train(small, 2, *GIVEN, "--accumulate", "2", watch=spoil(np.inf, 0, 5))
    assert_identical(outcomes)
    assert outcomes[0].results["steps_skipped"] == [3]


def test_half_precision_200_steps_with_overflows(small: Dataset) -> None:
    # A sum over ranks that overflows float16 though no rank's own gradient does, too.
    given = ("--epochs", "50", "--batch-size", "14", "--dtype", "float16", "--hidden", "9")

    def watch(trainer: Trainer, rank: int) -> None:
        spoil(np.inf, 1, 10, 60)(trainer, rank)
        spoil(40000.0, rank, 100)(trainer, rank)

    outcomes = train(small, 2, *given, watch=watch)
    assert_identical(outcomes)
    results = outcomes[0].results
    assert results["steps"] == 200
    assert results["steps_skipped"] == [10, 60, 100]
    assert np.isfinite(outcomes[0].values).all()


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_training_that_diverges_ends_and_says_so(small: Dataset) -> None:
    given = ("--epochs", "2", "--dtype", "float16", "--hidden", "none", "--lr", "6e4")
    outcomes = train(small, 2, *given)
    for outcome in outcomes:
        assert np.isnan(outcome.losses[-1])
        assert outcome.results["steps_skipped"] == outcomes[0].results["steps_skipped"] != []
        assert outcome.results["replicas_identical"]


@pytest.mark.parametrize("overlap", [True, False])
def test_exchanges_begin_behind_backward_or_after_it(small: Dataset, overlap: bool) -> None:
    traces = {}

    def watch(trainer: Trainer, rank: int) -> None:
        traces[rank] = Trace(rank)
        trainer.watch(traces[rank])

    given = ("--epochs", "1", "--batch-size", "45", "--overlap" if overlap else "--no-overlap")
    train(small, 2, *given, watch=watch)
    for trace in traces.values():
        events = [event["name"] for event in trace.events if event["ph"] in "bX"]
        begun = [i for i, name in enumerate(events) if name.startswith("Allreduce_init")]
        last = events.index("backward linear0.weight")
        assert (begun[0] < last) is overlap
        assert sum(i < events.index("finish and update") for i in begun) > 2


def test_replicas_that_differ_are_found(small: Dataset) -> None:
    def drift(trainer: Trainer, rank: int) -> None:
        accuracy = trainer.accuracy

        def drifted() -> float:
            if rank == 2:  # one bit of one weight
                trainer.model.parameters.values.view(np.uint8)[7] ^= 1
            return accuracy()

        trainer.accuracy = drifted  # type: ignore[method-assign]

    for outcome in train(small, 3, "--epochs", "1", watch=drift):
        assert outcome.results["replicas_identical"] is False


KEYS = {
    "ranks", "strategy", "epochs", "params", "test_accuracy", "final_loss", "samples_per_second",
    "step_ms", "compute_ms", "comm_ms", "exposed_ms", "hidden_percent",
    "bytes_sent_per_rank_per_step", "bytes_formula", "replicas_identical",
}  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results(small: Dataset, ranks: int) -> None:
    # Large enough for the ring: small arrays go by fewer messages with more bytes.
    given = ("--epochs", "2", "--batch-size", "14", "--hidden", "300,300", "--bucket-mb", "25")
    outcomes = train(small, ranks, *given, "--first-bucket-mb", "25")
    assert_identical(outcomes)
    outcome = outcomes[0]
    r = outcome.results
    assert r.keys() >= KEYS
    assert (r["ranks"], r["epochs"], r["steps"]) == (ranks, 2, 2 * 4)
    assert r["params"] == outcome.values.size
    assert r["final_loss"] == outcome.losses[-1]
    assert r["bytes_formula"] == 2 * (ranks - 1) / ranks * 4 * outcome.values.size
    assert r["bytes_sent_per_rank_per_step"] == pytest.approx(r["bytes_formula"], rel=1e-12)
    assert r["step_ms"] == pytest.approx(r["compute_ms"] + r["exposed_ms"], rel=1e-12)
    assert 0 < r["exposed_ms"] < r["step_ms"]
    assert (r["hidden_percent"] is None) is (ranks == 1)
    x, labels = small.test_batch(slice(None))
    assert r["test_accuracy"] == outcome.replica.model.accuracy(x, labels)


def test_more_ranks_than_test_samples(small: Dataset) -> None:
    few = replace(small, x_test=small.x_test[:2], y_test=small.y_test[:2])
    outcomes = train(few, 3, "--epochs", "1")
    assert_identical(outcomes)
    assert outcomes[0].results["test_accuracy"] in (0, 0.5, 1)


@pytest.mark.parametrize(
    ("communication", "compute", "both", "hidden"),
    [
        (2, 10, 10, 100),  # all of it behind the computing
        (2, 10, 12, 0),  # none of it
        (2, 10, 11, 50),
        (10, 2, 10, 100),  # all of the computing behind it
        (10, 2, 11, 50),
        (2, 10, 15, 0),  # slower than one after the other: not below 0
        (2, 10, 9, 100),  # faster than computing alone, by chance: not above 100
        (0, 10, 10, None),
        (2, 0, 2, None),
    ],
)
def test_hidden_percent(
    communication: float, compute: float, both: float, hidden: float | None
) -> None:
    assert hidden_percent(communication, compute, both) == hidden
