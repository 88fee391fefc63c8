"""One training step, by mpiring's pieces and by torch's DistributedDataParallel over gloo.

Both do the same: forward, softmax cross-entropy, backward with the gradients summed
over ranks meanwhile, SGD with momentum. Same network, same first weights, same
samples, one thread a rank, float32. They run in one launch and take turns, a block
of steps each.

That they do the same is checked, not assumed: before anything is timed both make a
few steps from the same weights and have to arrive at the same parameters to within
rounding, and after each timed block the replicas of all ranks have to be equal bit
by bit.

Two ways of using DDP take part: as its documentation introduces it, and with the
options that spare it copies; the better one counts. Of mpiring there are two as well:
every rank updates all weights, or its shard of them. Started by ``bench/peers/run``.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import mpiring
from bench.case import Array, Case
from bench.measure import Clock, Statistic
from bench.options import Parser, Stop, at_least
from bench.report import aligned, duration, write_json
from mpiring.nn.loss import softmax_cross_entropy
from mpiring.nn.model import MLP
from mpiring.nn.optim import SGD
from mpiring.parallel.reducer import Reducer
from mpiring.parallel.sharded import ShardedReducer

SIZES = (784, 1024, 1024, 10)
SAMPLES = 64  #: on each rank
PEERS = ("ddp", "ddp-tuned")
LR, MOMENTUM = 0.001, 0.9
#: Steps before timing, after which parameters have to agree, relative to the largest.
CHECKED_STEPS, TOLERANCE = 5, 1e-5


@dataclass(frozen=True)
class Trainer:
    """A network being trained: one step at a time, and its parameters now."""

    step: Callable[[], object]
    #: One flat array, in the order of torch: weights [outputs, inputs], then bias, by layer.
    parameters: Callable[[], Array]
    close: Callable[[], object]


def with_mpiring(comm: MPI.Intracomm, x: Array, labels: Array, *, sharded: bool) -> Trainer:
    """The pieces of ``mpiring.train``, and nothing of its bookkeeping."""
    ring = mpiring.Communicator(comm)
    model = MLP(SIZES)
    flat = model.parameters
    reducer = (ShardedReducer if sharded else Reducer)(ring, list(flat))
    count = reducer.count if isinstance(reducer, ShardedReducer) else flat.size
    optimizer = SGD(count, lr=LR, momentum=MOMENTUM)

    def step() -> None:
        _, gradient = softmax_cross_entropy(model.forward(x), labels, SAMPLES * comm.size)
        for parameter in model.backward(gradient):
            reducer.ready(parameter)
        reducer.finish()
        if isinstance(reducer, ShardedReducer):
            optimizer.steps += 1
            reducer.update(optimizer.update)
        else:
            optimizer.step(flat.values, flat.gradients)

    def parameters() -> Array:
        parts = [array for layer in weights(model) for array in layer]
        return np.concatenate([part.ravel() for part in parts])

    def close() -> None:
        reducer.free()
        ring.Free()

    return Trainer(step, parameters, close)


def weights(model: MLP) -> list[tuple[Array, Array]]:
    """Weights [outputs, inputs] and bias of each layer, the first layer first."""
    named = [(f"linear{number}.weight", f"linear{number}.bias") for number in range(len(SIZES) - 1)]
    return [
        (model.parameters[weight].value.T, model.parameters[bias].value) for weight, bias in named
    ]


def with_ddp(x: Array, labels: Array, *, tuned: bool) -> Trainer:
    """torch's DistributedDataParallel; ``tuned`` spares the copies that can be spared."""
    linears = [torch.nn.Linear(*shape) for shape in pairwise(SIZES)]
    with torch.no_grad():
        for linear, (weight, bias) in zip(linears, weights(MLP(SIZES))):
            linear.weight.copy_(torch.from_numpy(np.ascontiguousarray(weight)))
            linear.bias.copy_(torch.from_numpy(bias))
    layers = [layer for linear in linears for layer in (linear, torch.nn.ReLU())][:-1]
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "static_graph": True}
    model = DistributedDataParallel(torch.nn.Sequential(*layers), **(options if tuned else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM, fused=tuned or None)
    loss, inputs, targets = (
        torch.nn.CrossEntropyLoss(),
        torch.from_numpy(x),
        torch.from_numpy(labels),
    )

    def step() -> None:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()

    def parameters() -> Array:
        return np.concatenate([p.detach().numpy().ravel() for p in model.parameters()])

    return Trainer(step, parameters, close=lambda: None)


def start_gloo(comm: MPI.Intracomm) -> None:
    """torch's process group over the same ranks: rank 0 keeps the store, on a free port."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host, master = "127.0.0.1", None
    if comm.rank == 0:
        master = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    port = comm.bcast(master.port if master else None)
    store = master or torch.distributed.TCPStore(host, port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def spread(trainers: Mapping[str, Trainer]) -> float:
    """The largest difference between any two trainers' parameters, over the largest parameter."""
    arrays = [trainer.parameters().astype(np.float64) for trainer in trainers.values()]
    return float(max(np.max(np.abs(array - arrays[0])) for array in arrays)) / float(
        np.max(np.abs(arrays[0]))
    )


def replicas_differ(comm: MPI.Intracomm, trainer: Trainer) -> int:
    """1 unless all ranks hold the same parameters, bit by bit, and these are finite."""
    parameters = trainer.parameters()
    digests = comm.allgather(hashlib.sha256(parameters.tobytes()).digest())
    return int(len(set(digests)) > 1 or not np.isfinite(parameters).all())


def rows(
    comm: MPI.Intracomm, steps: int, nbytes: int, results: Mapping[str, Statistic]
) -> list[dict[str, Any]]:
    """One object for each contender, with the names of ``bench.case.Row``; times of one step."""
    name, version = MPI.get_vendor()
    best = min(results[name].median for name in PEERS)
    return [
        {
            "collective": "training step",
            "contender": contender,
            "ranks": comm.size,
            "bytes": nbytes,  # of gradients, exchanged in every step
            "time_us": times.median / steps * 1e6,
            "q1_us": times.lower_quartile / steps * 1e6,
            "q3_us": times.upper_quartile / steps * 1e6,
            "repeats": times.repeats,
            "correct": times.wrong == 0,
            "mpi": f"{name} {'.'.join(map(str, version))}",
            "torch": torch.__version__,
            "dtype": "float32",
            "op": "sum",
            "in_place": True,
            "speedup": None if contender in PEERS else best / times.median,
            "share": times.median / best,
        }
        for contender, times in results.items()
    ]


def heading(first: Mapping[str, Any], steps: int, differences: tuple[float, float]) -> str:
    return (
        f"training step, MLP {'-'.join(map(str, SIZES))}, {SAMPLES} samples a rank, "
        f"{first['ranks']} rank{'s' * (first['ranks'] > 1)}, float32, SGD with momentum, "
        "one thread a rank\n"
        f"torch {first['torch']} over gloo; mpiring {mpiring.__version__} over {first['mpi']}; "
        f"NumPy {np.__version__}\n"
        f"time: median over blocks of {steps} steps, each that of its slowest rank, per step\n"
        "replicas: the parameters of all ranks after each block, compared bit by bit\n"
        f"share: of the time of {' or '.join(PEERS)}, whichever is faster\n"
        f"parameters differ by {differences[0]:.1e} (relative) after {CHECKED_STEPS} steps, by "
        f"{differences[1]:.1e} at the end\n"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [("", "time", "quartiles", "blocks", "share", "replicas")]
    for row in rows:
        quartiles = " - ".join(duration(row[name]) for name in ("q1_us", "q3_us"))
        verdict = "equal" if row["correct"] else "DIFFER"
        cells = (duration(row["time_us"]), quartiles, str(row["repeats"]), f"{row['share']:.2f}")
        lines.append((row["contender"], *cells, verdict))
    return "\n".join(aligned({"": list(zip(*lines))})[1:])


def main() -> int:
    parser = Parser(
        prog="bench/peers/run",
        description="Compare a training step with torch's DistributedDataParallel.",
    )
    add = parser.add_argument
    add("--steps", type=at_least(1, int), default=10, help="steps in a block (default: 10)")
    add("--budget", type=at_least(0, float), default=30.0, help="seconds to aim at (default: 30)")
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    try:
        options = parser.parse_args()
    except Stop as stop:
        if MPI.COMM_WORLD.rank == 0:
            print(stop.text, end="", file=sys.stderr if stop.code else sys.stdout)
        return stop.code

    comm = MPI.COMM_WORLD
    torch.set_num_threads(1)
    start_gloo(comm)
    random = np.random.default_rng(comm.rank)
    x = random.normal(size=(SAMPLES, SIZES[0])).astype(np.float32)
    labels = random.integers(0, SIZES[-1], SAMPLES)
    trainers = {
        "mpiring": with_mpiring(comm, x, labels, sharded=False),
        "mpiring-zero": with_mpiring(comm, x, labels, sharded=True),
        "ddp": with_ddp(x, labels, tuned=False),
        "ddp-tuned": with_ddp(x, labels, tuned=True),
    }
    for _ in range(CHECKED_STEPS):
        for trainer in trainers.values():
            trainer.step()
    before = comm.allreduce(spread(trainers), MPI.MAX)
    if not before <= TOLERANCE:  # nor if it is nan
        if comm.rank == 0:
            print(f"not the same step: parameters differ by {before:.1e}", file=sys.stderr)
        return 1

    def case(trainer: Trainer) -> Case:
        def run() -> None:
            for _ in range(options.steps):
                trainer.step()

        return Case(run=run, wrong=lambda: replicas_differ(comm, trainer))

    clock = Clock(comm, {name: case(trainer) for name, trainer in trainers.items()})
    clock.warm_up(1)
    results = clock.run(None, options.budget)
    after = comm.allreduce(spread(trainers), MPI.MAX)
    nbytes = trainers["mpiring"].parameters().nbytes
    measured = rows(comm, options.steps, nbytes, results)
    if comm.rank == 0:
        print(heading(measured[0], options.steps, (before, after)))
        print(table(measured), flush=True)
        if options.json:
            write_json(options.json, measured)
    torch.distributed.destroy_process_group()
    for trainer in trainers.values():
        trainer.close()
    return 0 if all(row["correct"] for row in measured) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)
