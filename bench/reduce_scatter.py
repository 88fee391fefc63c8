"""Reduce-scatter in equal blocks: a rank gives the whole array and gets its chunk, reduced."""

from __future__ import annotations

from bench.bandwidth import REDUCE_SCATTER
from bench.case import Benchmark
from bench.collectives import CONTENDERS, YARDSTICKS, Collective, chunk, whole

COLLECTIVE = Collective(
    method="Reduce_scatter_block",
    gives=whole,
    gets=chunk,
    plain=lambda ring: ring.reduce_scatter,
)

BENCHMARK = Benchmark(
    name="reduce_scatter",
    summary="rank r ends with chunk r of the reduction; S = the array that a rank gives",
    contenders=CONTENDERS,
    yardsticks=YARDSTICKS,
    devices=("cpu", "cuda"),
    cases=COLLECTIVE.cases,
    bus_factor=REDUCE_SCATTER,
    granularity=lambda ranks: ranks,
)
