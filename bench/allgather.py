"""All-gather of equal blocks: a rank gives its chunk and gets the whole array."""

from __future__ import annotations

from bench.bandwidth import ALLGATHER
from bench.case import Benchmark
from bench.collectives import CONTENDERS, YARDSTICKS, Collective, chunk, whole

COLLECTIVE = Collective(
    method="Allgather",
    gives=chunk,
    gets=whole,
    plain=lambda ring: ring.allgather,
    reduces=False,
)

BENCHMARK = Benchmark(
    name="allgather",
    summary="every rank ends with the chunks of all; S = the array that a rank ends with",
    contenders=CONTENDERS,
    yardsticks=YARDSTICKS,
    devices=("cpu", "cuda"),
    cases=COLLECTIVE.cases,
    bus_factor=ALLGATHER,
    granularity=lambda ranks: ranks,
    reduces=False,
)
