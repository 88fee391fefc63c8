"""All-reduce: every rank gives the whole array and gets the whole reduction."""

from __future__ import annotations

from bench.bandwidth import ALLREDUCE
from bench.case import Benchmark
from bench.collectives import CONTENDERS, YARDSTICKS, Collective, whole

COLLECTIVE = Collective(
    method="Allreduce",
    gives=whole,
    gets=whole,
    plain=lambda ring: ring.allreduce,
)

BENCHMARK = Benchmark(
    name="allreduce",
    summary="every rank ends with the reduction of all arrays; S = that array",
    contenders=CONTENDERS,
    yardsticks=YARDSTICKS,
    devices=("cpu", "cuda"),
    cases=COLLECTIVE.cases,
    bus_factor=ALLREDUCE,
)
