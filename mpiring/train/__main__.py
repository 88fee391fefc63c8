"""The trainer from the first line to each of its ends.

Ends: results (0); a mistake in the arguments or the data, the same on every rank,
said once (2); an exception on one rank, shown with its rank, which ends the job
(1); Ctrl-C (130).
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

# Before NumPy is imported: ranks share the cores, and each would start a thread per core.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

from mpiring.errors import LaunchError, MpiringError
from mpiring.train import options as command_line

T = TypeVar("T")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        wanted = command_line.parse(arguments)
        world = _world()
    except MpiringError as error:
        return _refuse(error, _rank_by_launcher())
    try:
        return _train(world, wanted)
    except MpiringError as error:
        if getattr(error, "everywhere", False):
            return _refuse(error, world.Get_rank())
        return _abort(world)
    except KeyboardInterrupt:
        world.Abort(130)
    except Exception:
        return _abort(world)
    return 1


def _train(world: Any, wanted: Any) -> int:
    from mpiring.communicator import Communicator
    from mpiring.nn import data
    from mpiring.trace import Trace, document
    from mpiring.train import report
    from mpiring.train.loop import Trainer

    dataset = _together(world, lambda: data.load(wanted.data))
    for name in ("json", "trace"):
        _together(world, lambda: _check_writable(name, getattr(wanted, name)))
    comm = _together(world, lambda: Communicator(world, progress=wanted.progress))
    trainer = _together(world, lambda: Trainer(comm, dataset, wanted))
    rank = comm.rank
    if rank == 0:
        report.say(_headline(trainer, wanted))
    trace = Trace(rank, _common_origin(world)) if wanted.trace else None
    if trace:
        trainer.watch(trace)
    shown = report.progress(rank, wanted.epochs, len(dataset.y_train))
    loss = float("nan")
    try:
        for number in range(wanted.epochs):
            loss = trainer.epoch(number, shown.step)
            shown.epoch(number, loss)
    finally:
        shown.close()
    if trace:
        everyone = world.gather(trace.events)
        if rank == 0:
            report.write(wanted.trace, document(everyone))
    results = trainer.results(loss)
    if rank == 0:
        report.say()
        report.say(report.table(results))
        if wanted.json:
            report.write(wanted.json, report.as_json(results))
    comm.Free()
    return 0 if results["replicas_identical"] else 1


def _headline(trainer: Any, wanted: Any) -> str:
    from mpi4py import MPI

    comm, parameters = trainer.comm, trainer.model.parameters
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
    sizes = "-".join(map(str, trainer.model.sizes))
    mode = "behind backward" if wanted.overlap else "after backward"
    return (
        f"{trainer.dataset.name}: {len(trainer.dataset.y_train):,} samples, MLP {sizes} "
        f"({parameters.size:,} parameters, {wanted.dtype})\n"
        f"{comm.size} rank{'s' * (comm.size > 1)}, {library}; batch {wanted.batch_size} over all "
        f"ranks, gradients averaged over it; {wanted.optimizer}, lr {wanted.lr:g}; exchange {mode}"
    )


def _world() -> Any:
    """MPI's world, or LaunchError with what to do."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"no MPI library ({error}): pip install 'mpiring[mpich]', or install your "
            "cluster's mpi4py; python -m mpiring.doctor tells more"
        ) from None
    from mpiring.transport.launcher import disagreement

    wrong = disagreement(MPI.COMM_WORLD.Get_size())
    if wrong:
        raise LaunchError(f"{wrong}; use the mpirun of the environment that holds mpi4py "
                          f"({MPI.get_vendor()[0]}); python -m mpiring.doctor tells more")
    return MPI.COMM_WORLD


def _together(world: Any, action: Callable[[], T]) -> T:
    """Do something on every rank. If it fails on some, one error, the same on all."""
    result, failure = None, None
    try:
        result = action()
    except (MpiringError, OSError, MemoryError) as error:
        failure = error
    told = world.allgather(str(failure) if failure else None)
    if not any(told):
        return result  # type: ignore[return-value]
    first = next(text for text in told if text)
    ranks = [rank for rank, text in enumerate(told) if text == first]
    where = "" if len(ranks) == len(told) else f"rank{'s' * (len(ranks) > 1)} {ranks}: "
    error = MpiringError(where + first.removeprefix(where))
    error.everywhere = True  # type: ignore[attr-defined]
    raise error from failure


def _check_writable(name: str, path: str | None) -> None:
    from mpiring.errors import ArgumentError

    folder = os.path.dirname(os.path.abspath(path)) if path else None
    if folder and not os.access(folder, os.W_OK):
        raise ArgumentError(f"--{name}: {path} given, but {folder} cannot be written")


def _common_origin(world: Any) -> float:
    """A moment that is about the same on all ranks, on this rank's clock."""
    world.Barrier()
    return time.perf_counter()


def _rank_by_launcher() -> int:
    from mpiring.transport.launcher import launched

    launch = launched()
    return launch.rank if launch else 0


def _refuse(error: Exception, rank: int) -> int:
    if rank == 0:
        sys.stderr.write(f"mpiring.train: {error}\n")
        sys.stderr.flush()
    return 2


def _abort(world: Any) -> int:
    """This rank's traceback, whole, and the end of the job."""
    lines = traceback.format_exc().rstrip().split("\n")
    rank = world.Get_rank()
    sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
    sys.stderr.flush()
    world.Abort(1)
    return 1


if __name__ == "__main__":
    sys.exit(main())
