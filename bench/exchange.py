"""A synchronous exchange of gradients: summed over all ranks and handed back to each.

The ring, the same bytes by co-located sharded servers, and one server whose link carries
all of it. Rank 0 being that server and a worker too, all three sum the same contributions.
The server's update writes the sum into the parameters, so that every element that a rank is
handed back can be verified; the ring, all-reducing in place, does without that copy.

Servers run on an engine of their own, so that the ring's waits do not poll them. When a
contender ends, what it has moved is compared with the formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bench import values
from bench.bandwidth import ALLREDUCE
from bench.case import Array, Benchmark, Case, Problem, nothing
from bench.report import size

CONTENDERS = {
    "ring": "all-reduce over the ring, bound once",
    "colocated": "a parameter server in sync mode, every rank holding its share",
    "server": "the same with one server, rank 0, which is a worker too",
}

_SERVERS = {"colocated": "colocated", "server": "colocated:1"}


class Assign:
    """The update of an optimizer whose result can be verified: parameters become the sum."""

    def __init__(self, count: int, dtype: np.dtype) -> None: ...

    def step(self, parameters: Array, gradients: Array) -> None:
        parameters[...] = gradients


def cases(problem: Problem, contenders: Sequence[str]) -> dict[str, Case]:
    return {
        name: _ring(problem) if name == "ring" else _server(problem, name) for name in contenders
    }


def _ring(problem: Problem) -> Case:
    gradient = np.empty(problem.count, problem.dtype)
    request = problem.world.ring.Allreduce_init("in place", gradient)

    def run() -> None:
        request.Start()
        request.Wait()

    return _case(problem, run, gradient, gradient, request.Free)


def _server(problem: Problem, name: str) -> Case:
    from mpiring import Communicator, ParameterServer
    from mpiring.engine.progress import ProgressEngine

    comm = Communicator(problem.world.comm, engine=ProgressEngine())
    gradient, parameters = np.empty((2, problem.count), problem.dtype)
    server = ParameterServer(comm, [parameters], optimizer=Assign, servers=_SERVERS[name])

    def run() -> None:
        server.push(0, gradient)
        server.step()

    def close() -> None:
        server.close(final=False)
        summary, links = server.summary(), server.traffic()
        busiest = max(server.servers, key=lambda rank: links[rank].into)
        moved, steps = summary.bytes_out[busiest], summary.steps[0]
        if moved != steps * links[busiest].out:
            raise AssertionError(f"{name} sent {moved} bytes in {steps} steps: {links[busiest]}")
        if comm.rank == 0:
            print(
                f"{size(gradient.nbytes)}, {name}: the busiest server sent and received "
                f"{size(moved // steps)} a step, as the formula says"
            )
        comm.Free()

    return _case(problem, run, gradient, parameters, close)


def _case(
    problem: Problem,
    run: Callable[[], object],
    gradient: Array,
    result: Array,
    close: Callable[[], object] = nothing,
) -> Case:
    rank, ranks, dtype = problem.world.rank, problem.world.size, problem.dtype
    given = values.repeat(values.contribution(rank, ranks, dtype, "sum"), 0, problem.count)
    expected = values.repeat(values.reduction(ranks, dtype, "sum"), 0, problem.count)

    def prepare() -> None:
        result.fill(0)
        gradient[...] = given

    def wrong() -> int:
        return int(np.count_nonzero(result != expected))

    return Case(run, wrong, prepare, close)


BENCHMARK = Benchmark(
    name="exchange",
    summary="gradients summed and handed back, by the ring or by servers; S = the gradients",
    contenders=CONTENDERS,
    yardsticks=("ring",),
    cases=cases,
    bus_factor=ALLREDUCE,
    reduces=False,
    defaults={"min": 2**18, "max": 2**24, "contenders": tuple(CONTENDERS)},
)
