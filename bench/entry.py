"""From the shell into MPI and back: what every benchmark's command does before it measures.

However many ranks there are, a mistake is told once, and before anything has been measured.
An error on one rank ends all of them: the others may be waiting for it.
"""

from __future__ import annotations

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from bench.options import Stop
from mpiring.transport.launcher import disagreement, launched

Options = TypeVar("Options")


def enter(parse: Callable[[], Options], program: Callable[[Options, Any], int]) -> int:
    """``program(parse(), mpi4py.MPI)``; the exit code, the same on every rank."""
    try:
        return _in_mpi(program, parse())
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


def _in_mpi(program: Callable[[Options, Any], int], options: Options) -> int:
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
        return program(options, MPI)
    except Stop:
        raise
    except BaseException:
        # The other ranks may be waiting for this one: only an abort ends them.
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
        raise


class Host(NamedTuple):
    ranks: int
    cores: int  #: that one rank or another may run on: each may be bound to its own


def hosts(comm: Any, MPI: Any) -> list[Host]:
    """Those of the ranks of ``comm``. Collective."""
    found: dict[str, list[set[int]]] = {}
    for name, cores in comm.allgather((MPI.Get_processor_name(), _cores())):
        found.setdefault(name, []).append(cores)
    return [Host(len(each), len(set().union(*each))) for each in found.values()]


def _cores() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def place(hosts: Sequence[Host]) -> str:
    """How many ranks and hosts, in words."""
    ranks = sum(host.ranks for host in hosts)
    crowded = any(host.ranks > host.cores for host in hosts)
    return (
        f"{ranks} rank{'s' * (ranks > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)}"
        + " (more ranks than cores)" * crowded
    )


def library(MPI: Any) -> str:
    """Name and version of the MPI library."""
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


def files_complaint(options: Namespace) -> str | None:
    """What stands against writing ``--json`` and ``--plot``, found before measuring."""
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
        try:
            from bench.plot import formats
        except ImportError:
            return "--plot needs matplotlib; install it with: pip install matplotlib"
        if options.plot.suffix not in formats():
            return f"--plot {options.plot}: the name has to end in one of {' '.join(formats())}"
    return None
