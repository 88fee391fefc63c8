"""The trainer from the first line to each of its ends.

Ends: results (0), or replicas that differ (1); a mistake in the arguments or the data,
the same on every rank, said once (2); an exception on one rank, shown with its rank,
which ends the job (1); Ctrl-C (130).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

from mpiring.errors import ArgumentError, LaunchError, MismatchError
from mpiring.train import options as command_line
from mpiring.train import ranks
from mpiring.train.ranks import Refused, alike, together

# None of the imports above brings NumPy, which reads these when it is imported: ranks share the
# cores, and each would start a thread for every core.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


def main(arguments: Sequence[str] | None = None) -> int:
    wanted: argparse.Namespace | ArgumentError
    try:
        wanted = command_line.parse(arguments)  # --help ends here, and needs no MPI
    except ArgumentError as error:
        wanted = error  # said once it is known what the other ranks were given
    try:
        world = ranks.world()
    except LaunchError as error:
        return ranks.refuse_alone(error)
    try:
        return _train(world, together(world, lambda: _given(wanted)))
    except Refused as error:
        return ranks.refuse(error, world.Get_rank())
    except KeyboardInterrupt:
        world.Abort(130)
    except BaseException:
        return ranks.abort(world)
    return 1


def _train(world: Any, wanted: argparse.Namespace) -> int:
    from mpiring.communicator import Communicator
    from mpiring.nn import data
    from mpiring.trace import Trace, document
    from mpiring.train import report
    from mpiring.train.loop import Trainer, share
    from mpiring.train.replica import Replica

    rank, size = world.Get_rank(), world.Get_size()
    alike(world, "arguments", vars(wanted))
    together(world, lambda: _check(wanted, rank))
    place = _place(world, wanted)
    dataset = together(world, lambda: data.load(wanted.data))
    alike(world, "data", _fingerprint(dataset))
    part = together(world, lambda: share(wanted, size, rank))
    replica = together(
        world, lambda: Replica(dataset, wanted, ranks=part[0], rank=part[1], place=place)
    )
    if wanted.resume:
        together(world, lambda: _resume(replica, wanted) if rank == 0 else None)
    comm = together(world, lambda: Communicator(world, progress=wanted.progress))

    try:
        trainer = Trainer(comm, replica, wanted)
    except (ArgumentError, MismatchError) as error:  # ranks that were told alike fail alike
        raise Refused(str(error)) from error
    trace = Trace(rank, _common_origin(world)) if wanted.trace else None
    if trace:
        trainer.watch(trace)
    if rank == 0:
        report.say(report.headline(trainer, ranks.library()))
    shown = report.progress(rank, wanted.epochs, replica.epochs, len(dataset.y_train))
    loss = float("nan")
    try:
        while replica.epochs < wanted.epochs:
            skipped = len(trainer.skipped())
            loss = trainer.epoch(shown.step)
            shown.epoch(replica.epochs, loss, len(trainer.skipped()) - skipped)
            if wanted.save and trainer.strategy.state_between:
                _save(trainer, wanted.save)
    finally:
        shown.close()
    trainer.finish()
    if wanted.save and not trainer.strategy.state_between:
        _save(trainer, wanted.save)

    everyone: Any = world.gather(trace.events) if trace else None
    results = trainer.results(loss)
    if rank == 0:
        report.say(report.table(results))
        if wanted.trace:
            report.write(wanted.trace, document(everyone))
        if wanted.json:
            report.write(wanted.json, report.as_json(results))
    comm.Free()
    return 0 if results["replicas_identical"] else 1


def _given(wanted: argparse.Namespace | ArgumentError) -> argparse.Namespace:
    if isinstance(wanted, ArgumentError):
        raise wanted
    return wanted


def _check(wanted: argparse.Namespace, rank: int) -> None:
    """What can be wrong with this machine. Files are written by rank 0 alone."""
    if rank == 0:
        for name in ("json", "trace", "save", "record"):
            command_line.check_writable(name, getattr(wanted, name))


def _place(world: Any, wanted: argparse.Namespace) -> Any:
    """Where this rank computes: on a GPU if all ranks can and nobody asked for another."""
    from mpi4py import MPI

    from mpiring.train import place

    if wanted.device == "cuda":
        together(world, place.check_cuda)
        gpu = True
    else:
        able = wanted.device == "auto" and place.gpu_possible() and not place.cuda_missing()
        gpu = all(ranks.everyones(world, able))
    if not gpu:
        return place.Host()
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    local_rank = node.Get_rank()
    node.Free()
    return together(world, lambda: place.Gpu(local_rank, wanted.gpu))


def _resume(replica: Any, wanted: argparse.Namespace) -> None:
    replica.load(wanted.resume)
    if replica.epochs >= wanted.epochs:
        raise ArgumentError(
            f"--epochs: {wanted.epochs} given, those before the resume included, but "
            f"{wanted.resume} has been trained for {replica.epochs}; allowed are more"
        )


def _save(trainer: Any, path: str) -> None:
    from mpiring.train import report

    content = trainer.save()
    if trainer.comm.rank == 0:
        report.write(path, content)


def _fingerprint(dataset: Any) -> dict[str, Any]:
    """What is the same wherever the same files have been read; of the samples, some."""
    some = dataset.x_train[:: -(-len(dataset.x_train) // 1000)]
    return {
        "samples": len(dataset.y_train),
        "test samples": len(dataset.y_test),
        "features": dataset.features,
        "classes": dataset.classes,
        "checksum": zlib.crc32(some.tobytes(), zlib.crc32(dataset.y_train.tobytes())),
    }


def _common_origin(world: Any) -> float:
    """A moment that is about the same on all ranks, on this rank's clock."""
    world.Barrier()
    return time.perf_counter()


if __name__ == "__main__":
    sys.exit(main())
