"""Which samples each rank sees, step by step; no communication needed.

Every rank makes the same permutation of all samples from (seed, epoch). A step
takes the next ``batch_size`` of them, the *global* batch, and cuts it into one
run for each rank, sizes differing by at most one. So no sample is seen twice,
none is left out, and the samples of a step do not depend on the number of ranks:
n ranks compute the step that one would.

Leftovers. The last batch of an epoch may be short. It is a step of its own, and
the mean is over the samples that it has; where it has fewer samples than there
are ranks, some ranks get none and contribute zero. With ``accumulate`` = K the
run of a rank is cut into K micro-batches, again of sizes that differ by at most
one, or into single samples where it has fewer than K; a step never takes
micro-batches from two batches, so nothing is carried from one epoch into the
next. A rank without samples has one empty micro-batch: every rank runs backward
at least once in every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpiring.errors import ArgumentError
from mpiring.nn.arrays import Array


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one rank does for one step of the optimizer."""

    micro_batches: tuple[Array, ...]  #: indices of this rank's samples; at least one array
    count: int  #: samples in the global batch, the denominator of the mean

    @property
    def samples(self) -> int:
        """Samples of this rank, in all micro-batches."""
        return sum(map(len, self.micro_batches))


class Sampler:
    """The steps of one rank. ``batch_size`` is global: samples per step over all ranks."""

    def __init__(
        self,
        samples: int,
        batch_size: int,
        *,
        ranks: int = 1,
        rank: int = 0,
        seed: int = 0,
        accumulate: int = 1,
    ) -> None:
        def allow(name: str, value: int, allowed: bool, rule: str) -> None:
            if not allowed:
                raise ArgumentError(f"{name}: {value} given; allowed are numbers {rule}")

        allow("ranks", ranks, ranks >= 1, "from 1")
        allow("rank", rank, 0 <= rank < ranks, f"from 0 to {ranks - 1}")
        allow("samples", samples, samples >= ranks, f"from {ranks}, one sample for each rank")
        allow(
            "batch_size", batch_size, batch_size >= ranks,
            f"from {ranks}, one sample for each rank: the batch is global",
        )  # fmt: skip
        allow("seed", seed, seed >= 0, "from 0")
        allow("accumulate", accumulate, accumulate >= 1, "from 1")
        self.samples, self.batch_size = samples, batch_size
        self.ranks, self.rank = ranks, rank
        self.seed, self.accumulate = seed, accumulate

    def __len__(self) -> int:
        """Steps in an epoch, the short one included."""
        return -(-self.samples // self.batch_size)

    def epoch(self, number: int) -> Iterator[Step]:
        """The steps of an epoch, counted from 0; each has an order of its own."""
        order = np.random.default_rng((self.seed, number)).permutation(self.samples)
        for start in range(0, self.samples, self.batch_size):
            batch = order[start : start + self.batch_size]
            mine = np.array_split(batch, self.ranks)[self.rank]
            pieces = max(1, min(self.accumulate, len(mine)))
            yield Step(tuple(np.array_split(mine, pieces)), len(batch))
