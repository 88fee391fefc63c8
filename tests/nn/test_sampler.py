from __future__ import annotations

import numpy as np
import pytest

from mpiring.errors import ArgumentError
from mpiring.nn.sampler import Sampler


def all_ranks(samples, batch, ranks, epoch=0, accumulate=1, seed=0):
    """For each step what every rank does."""
    samplers = [
        Sampler(samples, batch, ranks=ranks, rank=r, seed=seed, accumulate=accumulate)
        for r in range(ranks)
    ]
    steps = list(zip(*(sampler.epoch(epoch) for sampler in samplers), strict=True))
    assert {len(steps)} == {len(sampler) for sampler in samplers}
    return steps


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(("samples", "batch"), [(101, 16), (64, 8), (10, 100), (17, 9), (8, 8)])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_every_sample_once_and_the_same_steps_for_any_number_of_ranks(
    ranks, samples, batch, accumulate
):
    steps = all_ranks(samples, batch, ranks, accumulate=accumulate)
    single = all_ranks(samples, batch, 1)
    for shares, (alone,) in zip(steps, single, strict=True):
        sizes = [share.samples for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert {share.count for share in shares} == {sum(sizes)} == {alone.count}
        together = np.concatenate([m for share in shares for m in share.micro_batches])
        assert (together == alone.micro_batches[0]).all()
    counts = [shares[0].count for shares in steps]
    assert counts[:-1] == [batch] * (len(counts) - 1) and sum(counts) == samples
    seen = np.concatenate([m for shares in steps for share in shares for m in share.micro_batches])
    assert sorted(seen) == list(range(samples))


def test_each_epoch_and_each_seed_has_another_order():
    orders = set()
    for seed in (0, 1):
        for epoch in range(3):
            steps = all_ranks(101, 101, 4, epoch, seed=seed)
            assert sorted(np.concatenate([s.micro_batches[0] for s in steps[0]])) == list(
                range(101)
            )
            orders.add(tuple(np.concatenate([s.micro_batches[0] for s in steps[0]])))
    assert len(orders) == 6
    assert tuple(range(101)) not in orders


def test_an_order_can_be_made_again():
    sampler = Sampler(20, 20, seed=3)
    first, again = (next(sampler.epoch(5)).micro_batches[0] for _ in range(2))
    assert (first == again).all()


def test_short_last_batch_of_ten_samples_on_three_ranks():
    steps = all_ranks(10, 6, 3)
    assert [[share.samples for share in shares] for shares in steps] == [[2, 2, 2], [2, 1, 1]]
    assert [shares[0].count for shares in steps] == [6, 4]


def test_a_rank_without_samples_still_takes_part():
    steps = all_ranks(10, 8, 4, accumulate=3)
    assert [share.samples for share in steps[1]] == [1, 1, 0, 0]
    assert [[len(m) for m in share.micro_batches] for share in steps[1]] == [[1], [1], [0], [0]]
    idle = steps[1][3].micro_batches[0]
    assert idle.dtype.kind == "i" and np.arange(3)[idle].shape == (0,)


@pytest.mark.parametrize(
    ("samples", "accumulate", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (10, 4, [3, 3, 2, 2]),
        (3, 4, [1, 1, 1]),
        (5, 1, [5]),
    ],
)
def test_micro_batches_are_even_and_never_empty(samples, accumulate, sizes):
    step = next(Sampler(samples, samples, accumulate=accumulate).epoch(0))
    assert [len(m) for m in step.micro_batches] == sizes
    assert step.samples == step.count == samples


def test_the_leftover_of_accumulation_is_a_step_of_its_own():
    # Micro-batches of 5 on each of 2 ranks, 4 to a step: 10 of them are steps of 4, 4 and a rest.
    steps = all_ranks(samples=100, batch=40, ranks=2, accumulate=4)
    assert [shares[0].count for shares in steps] == [40, 40, 20]
    assert [[len(m) for m in shares[1].micro_batches] for shares in steps] == [
        [5, 5, 5, 5], [5, 5, 5, 5], [3, 3, 2, 2],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, "samples: 0 given; allowed are numbers from 2"),
        ({"samples": 1}, "samples: 1 given; allowed are numbers from 2, one sample for each rank"),
        ({"batch_size": 1}, "batch_size: 1 given; allowed are numbers from 2"),
        ({"ranks": 0, "rank": 0}, "ranks: 0 given"),
        ({"rank": 2}, "rank: 2 given; allowed are numbers from 0 to 1"),
        ({"rank": -1}, "rank: -1 given"),
        ({"seed": -1}, "seed: -1 given"),
        ({"accumulate": 0}, "accumulate: 0 given; allowed are numbers from 1"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Sampler(**{"samples": 10, "batch_size": 4, "ranks": 2, "rank": 1, **arguments})
