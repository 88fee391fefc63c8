"""Algorithm and bus bandwidth, as nccl-tests defines them (its doc/PERFORMANCE.md).

*Algorithm bandwidth* is S/t: what the caller sees. It falls as ranks are added,
since the same S must reach more of them. *Bus bandwidth* multiplies it by the
share of S that each rank has to send over its link at the least, so that it can
be compared with the speed of the link for any number of ranks:

* all-reduce: (n-1)/n S to reduce every element, the same again to spread the
  results: 2(n-1)/n;
* reduce-scatter and all-gather: one of those two halves: (n-1)/n.

S is the size in bytes of the *whole* array: the array itself for all-reduce, what
a rank gives to a reduce-scatter, what a rank ends up with after an all-gather.
One rank sends nothing: its factor is None, printed as n/a.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BusFactor:
    """Bus bandwidth over algorithm bandwidth, for a collective in which each rank sends
    a share (n-1)/n of S in each of ``passes`` passes."""

    passes: int

    def __call__(self, ranks: int) -> float | None:
        """The factor for ``ranks``; None for one."""
        return self.passes * (ranks - 1) / ranks if ranks > 1 else None

    def __str__(self) -> str:
        return f"{self.passes if self.passes > 1 else ''}(n-1)/n"


ALLREDUCE = BusFactor(passes=2)
REDUCE_SCATTER = BusFactor(passes=1)
ALLGATHER = BusFactor(passes=1)


def algorithm_bandwidth(nbytes: int, seconds: float) -> float:
    """S/t in bytes per second."""
    return nbytes / seconds
