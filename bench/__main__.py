"""``mpirun -n 4 python -m bench allreduce``: from the command line to the table."""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from bench import allgather, allreduce, exchange, persistent, reduce_scatter, report
from bench.case import Benchmark, Problem, Row, World
from bench.measure import Clock
from bench.options import Stop, counts, parse
from mpiring.transport.launcher import disagreement, launched

BENCHMARKS = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (allreduce, reduce_scatter, allgather, persistent, exchange)
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one benchmark; the exit code, the same on every rank."""
    try:
        benchmark, options = parse(BENCHMARKS, sys.argv[1:] if arguments is None else arguments)
        return _run(benchmark, options)
    except Stop as stop:
        if _rank() == 0:
            print(stop.text, end="", file=sys.stderr if stop.code else sys.stdout, flush=True)
        return stop.code


def _rank() -> int:
    """This process among those that were launched; 0 where there is no launcher and no MPI."""
    if launch := launched():
        return launch.rank
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return 0
    return MPI.COMM_WORLD.Get_rank()


def _run(benchmark: Benchmark, options: Namespace) -> int:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise Stop(
            f"mpi4py or its MPI library is missing ({error}); "
            "install both with: pip install mpi4py mpich\n",
            2,
        ) from None
    if trouble := disagreement(launched(), MPI.COMM_WORLD.Get_size()):
        raise Stop(f"{trouble}\n", 2)
    try:
        return _measure_and_report(benchmark, options, MPI)
    except Stop:
        raise
    except BaseException:
        # The other ranks may be waiting for this one: only an abort ends them.
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        raise


def _measure_and_report(benchmark: Benchmark, options: Namespace, MPI: Any) -> int:
    world = World(MPI.COMM_WORLD.Dup())
    hosts = _hosts(world.comm.allgather((MPI.Get_processor_name(), _cores())))
    # Files, packages and memory may differ between hosts: rank 0 looks, all obey.
    complaint = _complaint(options, world, hosts, MPI) if world.rank == 0 else None
    complaint = world.comm.bcast(complaint)
    if complaint:
        raise Stop(f"python -m bench {benchmark.name}: error: {complaint}\n", 2)

    name, version = MPI.get_vendor()
    mpi = f"{name} {'.'.join(map(str, version))}"
    rows = list(measure(benchmark, options, world, mpi))
    world.close()
    world.comm.Free()
    if world.rank == 0:
        print(_heading(benchmark, options, world.size, hosts, mpi))
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


class Host(NamedTuple):
    ranks: int
    cores: int  #: that one rank or another may run on: each may be bound to its own


def _hosts(everyone: Sequence[tuple[str, set[int]]]) -> list[Host]:
    """From each rank's host and cores."""
    found: dict[str, list[set[int]]] = {}
    for name, cores in everyone:
        found.setdefault(name, []).append(cores)
    return [Host(len(each), len(set().union(*each))) for each in found.values()]


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


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
            mpi=mpi,
        )


def _complaint(options: Namespace, world: World, hosts: Sequence[Host], MPI: Any) -> str | None:
    """What stands against measuring, found before it starts and not after half an hour."""
    for name in ("json", "plot"):
        path = getattr(options, name)
        if path is None:
            continue
        folder = path.absolute().parent
        if path.is_dir():
            return f"--{name} {path}: that is a folder"
        if not (folder.is_dir() and os.access(folder, os.W_OK)):
            return f"--{name} {path}: there is no folder {folder} that can be written to"
    if options.plot:
        if world.size == 1:
            return "--plot draws bus bandwidth, which one rank has not; start at least two"
        try:
            from bench.plot import formats
        except ImportError:
            return "--plot needs matplotlib; install it with: pip install matplotlib"
        if options.plot.suffix not in formats():
            return f"--plot {options.plot}: the name has to end in one of {' '.join(formats())}"
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


def _heading(
    benchmark: Benchmark, options: Namespace, ranks: int, hosts: Sequence[Host], mpi: str
) -> str:
    """What was measured, and how to read it."""
    shared = any(host.ranks > host.cores for host in hosts)
    where = f"{ranks} rank{'s' * (ranks > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
    what = [benchmark.name, options.dtype, *([options.op] if benchmark.reduces else []), mpi, where]
    factor = benchmark.bus_factor(ranks)
    bus = "n/a for one rank"
    if factor is not None:
        bus = f"algbw x {benchmark.bus_factor} = algbw x {factor:.4g}"
    measured = [name for name in benchmark.yardsticks if name in options.contenders]
    lines = [
        ", ".join(what) + (" (more ranks than cores)" if shared else ""),
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
