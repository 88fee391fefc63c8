"""``mpirun -n 4 python -m bench allreduce``: from the command line to the table."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

import numpy as np

from bench import allgather, allreduce, exchange, persistent, reduce_scatter, report
from bench.arrays import arrays_of
from bench.case import Benchmark, Problem, Row, World
from bench.entry import Host, enter, files_complaint, hosts, library, place
from bench.measure import Clock
from bench.options import Stop, counts, parse
from mpiring.transport.probe import cached_probe

BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (allreduce, reduce_scatter, allgather, persistent, exchange)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit code, the same on every rank."""
    given = sys.argv[1:] if arguments is None else arguments
    return enter(lambda: parse(BENCHMARKS, given), _measure_and_report)


def _measure_and_report(chosen: tuple[Benchmark, Namespace], MPI: Any) -> int:
    benchmark, options = chosen
    comm = MPI.COMM_WORLD.Dup()
    found = hosts(comm, MPI)
    # Files, packages and memory may differ between hosts: rank 0 looks, all obey.
    complaint = _complaint(options, found, MPI) if comm.Get_rank() == 0 else None
    complaint = comm.bcast(complaint)
    arrays = complaint or arrays_of(options.device, comm, MPI)
    if isinstance(arrays, str):
        raise Stop(f"python -m bench {benchmark.name}: error: {arrays}\n", 2)

    world = World(comm, arrays)
    mpi = library(MPI)
    rows = list(measure(benchmark, options, world, mpi))
    world.close()
    world.comm.Free()
    if world.rank == 0:
        print(_heading(benchmark, options, found, mpi))
        print(report.table(rows), flush=True)
        if options.json:
            report.write_json(options.json, [asdict(row) for row in rows])
        if options.plot:
            from bench.plot import draw

            draw(rows, options.plot)
    wrong = [row for row in rows if not row.correct]
    if wrong:
        who = ", ".join(dict.fromkeys(row.contender for row in wrong))
        raise Stop(f"WRONG RESULTS from {who}: see the columns 'right'\n", 1)
    return 0


def measure(benchmark: Benchmark, options: Namespace, world: World, mpi: str) -> Iterator[Row]:
    """Time every size; the rows, on every rank. Collective over the ranks."""
    dtype = np.dtype(options.dtype)
    sizes = counts(options, world.size, benchmark.granularity(world.size))
    start = perf_counter()
    for done, count in enumerate(sizes):
        nbytes = count * dtype.itemsize
        elapsed = perf_counter() - start
        if world.rank == 0 and elapsed >= 1:  # a short run needs no news
            print(
                f"{elapsed:.0f} s: {done} of {len(sizes)} sizes done, {report.size(nbytes)} next",
                file=sys.stderr,
                flush=True,
            )
        problem = Problem(world, count, dtype, options.op, options.in_place)
        cases = benchmark.cases(problem, options.contenders)
        clock = Clock(world.comm, cases)
        clock.warm_up(options.warmup)
        # Each size may take an equal share of what the ones before have left.
        left = options.budget - (perf_counter() - start)
        statistics = clock.run(options.repeats, left / (len(sizes) - done))
        for case in cases.values():
            case.close()
        yield from report.rows(
            benchmark,
            cases,
            statistics,
            ranks=world.size,
            nbytes=nbytes,
            dtype=dtype.name,
            op=options.op,
            device=options.device,
            mpi=mpi,
        )


def _complaint(options: Namespace, hosts: Sequence[Host], MPI: Any) -> str | None:
    """What stands against measuring, found before it starts and not after half an hour."""
    if options.device == "cuda" and {"mpi", "mpi-out"} & {*options.contenders}:
        probed = cached_probe(MPI.Get_library_version())
        if probed is None or not probed.works("direct"):
            return (
                "--contenders mpi: this MPI was not seen to read GPU memory, and may crash where "
                "it cannot; python -m mpiring.doctor tries it. by-host takes part without"
            )
    if options.plot and MPI.COMM_WORLD.Get_size() == 1:
        return "--plot draws bus bandwidth, which one rank has not; start at least two"
    if complaint := files_complaint(options):
        return complaint
    try:
        MPI.Datatype.fromcode(np.dtype(options.dtype).char)
    except ValueError:
        return f"--dtype {options.dtype}: this MPI library has no such datatype"
    # Contribution, work and expected result, and the scratch of the contenders.
    needed = 4 * options.max * max(host.ranks for host in hosts)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > memory:
        return (
            f"--max {report.size(options.max)} needs about {report.size(needed)} for the ranks "
            f"of a host; this one has {report.size(memory)}"
        )
    return None


def _heading(benchmark: Benchmark, options: Namespace, hosts: Sequence[Host], mpi: str) -> str:
    """What was measured, and how to read it."""
    ranks = sum(host.ranks for host in hosts)
    operation = [options.op] if benchmark.reduces else []
    on = ["GPU arrays"] if options.device == "cuda" else []
    what = [benchmark.name, options.dtype, *operation, *on, mpi, place(hosts)]
    factor = benchmark.bus_factor(ranks)
    bus = "n/a for one rank"
    if factor is not None:
        bus = f"algbw x {benchmark.bus_factor} = algbw x {factor:.4g}"
    measured = [name for name in benchmark.yardsticks if name in options.contenders]
    lines = [
        ", ".join(what),
        "time: median over repetitions, each that of its slowest rank; "
        "right: every element of every repetition",
        f"GB/s (1e9 bytes): algbw = size / time, busbw = {bus}",
    ]
    if measured and set(measured) != set(options.contenders):
        best = " or ".join(measured)
        faster = ", whichever is faster," if len(measured) > 1 else ""
        lines.append(f"speedup: time of {best}{faster} over the contender's")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
