"""The parameter server on virtual devices: every access is covered by an observed completion.

Backward, sums, updates and forward are kernels that run whenever the scheduler pleases. A
kernel or message that is not ordered with what it conflicts with raises HazardError, whatever
the scheduler did (see ``mpiring.simulation.streams``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpiring.errors import HazardError
from mpiring.parallel import client, links, service
from mpiring.parallel.parameter_server import ParameterServer
from mpiring.parallel.placement import roles
from mpiring.simulation.streams import VirtualStream
from mpiring.task import READY
from tests.communicator.virtual import DeviceCommunicator, run

SIZES = (40, 7)
STEPS = 3


def train(
    ranks: int, servers: int | str, mode: str, path: str, *, hidden: bool = False, seed: int = 0
) -> list[Any]:
    """Ones at rate 1; what the kernels of each worker have seen after each step. ``hidden``
    memory is such that MPI cannot see it."""

    def program(comm: DeviceCommunicator) -> list[list[float]]:
        driver = comm.device.driver
        empty = driver.hidden if hidden else comm.device.empty

        class Plain:
            def __init__(self, count: int, dtype: Any) -> None: ...

            def step(self, values: Any, gradients: Any) -> None:
                def update() -> None:
                    np.subtract(values, gradients, values)

                stream = driver.producer(values)
                driver.launch(stream, "update", update, reads=[gradients], writes=[values])

        def filled(value: float) -> list[Any]:
            arrays = [empty(size, "f4") for size in SIZES]
            for array in arrays:
                driver.launch(driver.default, "fill", lambda a=array: a.fill(value), writes=[array])
            return arrays

        parameters, gradients = filled(10), filled(0)
        seen: list[list[float]] = []
        with ParameterServer(
            comm, parameters, optimizer=Plain, mode=mode, servers=servers, smallest=64, largest=64
        ) as server:
            for _ in range(STEPS if server.is_worker else 0):
                mine = VirtualStream("backward")
                with driver.use(mine):
                    for number, (array, gradient) in enumerate(zip(parameters, gradients)):
                        driver.launch(
                            mine,
                            "backward",
                            lambda gradient=gradient: gradient.fill(1),
                            reads=[array],
                            writes=[gradient],
                        )
                        server.push(number, gradient)
                        # The weights are read once more, for the gradient of the inputs.
                        driver.launch(mine, "of inputs", lambda: None, reads=[array])
                        if number == 0:
                            server.pull(0)
                    server.step()
                for array in parameters:
                    driver.launch(
                        VirtualStream("forward"),
                        "forward",
                        lambda array=array: seen.append(sorted(set(array.tolist()))),
                        reads=[array],
                    )
                driver.settle()
        return seen

    return run(ranks, program, seed, gpu_path=path)


CASES = [(1, "colocated"), (2, "colocated"), (3, "colocated:1"), (3, 1), (4, 2)]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("path", ["direct", "staged", "peer"])
@pytest.mark.parametrize(("ranks", "servers"), CASES)
def test_nothing_is_touched_too_early(ranks: int, servers: int | str, mode: str, path: str) -> None:
    workers = roles(ranks, servers).workers
    for seed in range(4):
        results = train(ranks, servers, mode, path, hidden=seed % 2 == 1, seed=seed)
        for worker in workers:
            seen = results[worker]
            assert len(seen) == STEPS * len(SIZES)
            if mode == "sync":
                n = len(workers)
                assert seen == [[10.0 - n * step] for step in (1, 1, 2, 2, 3, 3)]


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("forgotten", ["push", "pull", "sum", "update", "copy"])
def test_a_completion_that_is_forgotten_is_found(
    monkeypatch: pytest.MonkeyPatch, forgotten: str, path: str
) -> None:
    """Without one of the waits for the device the run is not silently lucky."""
    at_once = {"push": client.Client._start, "pull": client.Client._receive}
    lane = {"sum": "accumulate", "update": "apply", "copy": "copy"}
    if forgotten in at_once:
        add = links.Gated.add

        def hasty(gated: links.Gated, gate: Any, call: Any) -> None:
            add(gated, READY if call.func.__func__ is at_once[forgotten] else gate, call)

        monkeypatch.setattr(links.Gated, "add", hasty)
    else:
        work = getattr(service._Lane, lane[forgotten])
        monkeypatch.setattr(service._Lane, lane[forgotten], lambda *given: work(*given) and READY)
    with pytest.raises(HazardError):
        for seed in range(8):  # whether a gate is all that orders two things depends on arrival
            train(3, 1, "async" if forgotten == "copy" else "sync", path, seed=seed)
