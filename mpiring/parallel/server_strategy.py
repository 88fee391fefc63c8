"""Training by a parameter server: what the trainer runs as ``server``.

A bucket is pushed as soon as its gradients are ready, while backward goes on; its answer may
come in as soon as nobody reads its old weights any more, which is when the next gradient is
ready. What a step waits for at its end is the rest.

The optimizer's state lives with the servers: each updates, for its keys, its part of the
arrays that every rank has. When training is over the parts are put together again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from mpiring.communicator import Communicator
from mpiring.parallel.buckets import BUCKET, FIRST_BUCKET, Filling, HasGradient, layout
from mpiring.parallel.parameter_server import ParameterServer
from mpiring.parallel.placement import placement, roles, shards
from mpiring.parallel.strategies import Optimizer, whole_state


class _Part:
    """A part of an optimizer's elements, with a count of steps of its own."""

    def __init__(self, whole: Optimizer, start: int) -> None:
        self._whole, self._start = whole, start
        self.steps = whole.steps

    def step(self, values: Any, gradients: Any) -> None:
        self.steps += 1
        self._whole.steps = self.steps
        self._whole.update(values, gradients, self._start)


class _Nothing:
    """For timing messages alone."""

    def __init__(self, count: int, dtype: Any) -> None: ...

    def step(self, values: Any, gradients: Any) -> None: ...


class ServerStrategy:
    """Push gradients to parameter servers while backward runs.

    ``values`` and ``gradients`` are the flat arrays that the parameters are views of, the
    parameters in the order in which backward makes their gradients ready. When ``ready`` is
    called the values of those that were ready before must not be read any more in this step.
    ``is_finite`` tells whether a gradient may be used; an update is skipped, key by key, if not.

    Constructor and ``finish`` are collective. Between them ranks need not be at the same step,
    except in sync; a rank that serves only has nothing to do but to wait somewhere.
    """

    name = "server"
    state_between = False

    def __init__(
        self,
        comm: Communicator,
        parameters: Sequence[HasGradient],
        values: Any,
        gradients: Any,
        optimizer: Optimizer,
        is_finite: Callable[[Any], bool],
        *,
        mode: str = "sync",
        staleness: int | None = None,
        servers: int | str = "colocated",
        record: str | None = None,
        replay: str | None = None,
        bucket_bytes: int = BUCKET,
        first_bucket_bytes: int = FIRST_BUCKET,
        overlap: bool = True,
    ) -> None:
        self._comm, self._parameters, self.optimizer = comm, parameters, optimizer
        self._values, self._gradients = values, gradients
        self._overlap = overlap
        self._mode, self._staleness = mode, staleness
        self._make = partial(ParameterServer, comm, mode=mode, staleness=staleness, servers=servers)
        buckets = layout(
            [parameter.gradient for parameter in parameters], bucket_bytes, first_bucket_bytes
        )
        self._filling = Filling(parameters, buckets)
        self.no_sync = self._filling.no_sync
        stops = np.cumsum([bucket.gradient.size for bucket in buckets]).tolist()
        self._spans = [slice(start, stop) for start, stop in zip([0, *stops], stops)]
        self._buckets = [bucket.gradient for bucket in buckets]
        self._parts: list[_Part] = []
        starts = iter(self._starts(roles(comm.size, servers).servers))

        def part(count: int, dtype: Any) -> _Part:
            self._parts.append(_Part(optimizer, next(starts)))
            return self._parts[-1]

        self._server = self._make(
            [values[span] for span in self._spans],
            optimizer=part,
            accept=is_finite,
            record=record,
            replay=replay,
        )
        self.workers = self._server.workers
        self.in_step = mode == "sync"
        self.polling_seconds = 0.0
        self.waiting_seconds = 0.0
        self._answers: list[int] = []  # buckets pushed, whose old values are still needed

    def _starts(self, servers: Sequence[int]) -> list[int]:
        """Where the parts that this rank serves begin in the flat arrays, in their order."""
        if self._comm.rank not in servers:
            return []
        keys = placement([bucket.nbytes for bucket in self._buckets], len(servers))
        mine = shards(keys, len(servers))[servers.index(self._comm.rank)]
        return [self._start(keys[number]) for number in mine]

    def _start(self, key: Any) -> int:
        return self._spans[key.bucket].start + key.start // self._values.dtype.itemsize

    def ready(self, parameter: HasGradient) -> None:
        """The gradient of ``parameter`` is done; the weights ready before it are not needed."""
        if self._filling.paused:
            return
        begin = time.perf_counter()
        for number in self._answers:
            self._server.pull(number)
        self._answers.clear()
        bucket = self._filling.ready(parameter)
        if self._overlap:
            if bucket is not None:
                self._push(bucket.index)
                self._answers.append(bucket.index)
            self._comm.poll()
        self.polling_seconds += time.perf_counter() - begin

    def update(self) -> None:
        begin = time.perf_counter()
        self._filling.check("update")
        if not self._overlap:
            for number in range(len(self._buckets)):
                self._push(number)
        self._server.step()
        self._answers.clear()
        self._filling.reset()
        self.waiting_seconds += time.perf_counter() - begin

    def skipped(self) -> list[int]:
        return []  # servers skip, key by key, and tell it at the end

    def _push(self, number: int) -> None:
        self._server.push(number, self._buckets[number])

    def finish(self) -> None:
        """End the service; every rank has the final weights and the optimizer's whole state."""
        self._server.close()
        root = self._server.workers[0]
        if len(self.workers) < self._comm.size:
            self._comm.Bcast(self._values, root=root)
        steps = np.array([max((part.steps for part in self._parts), default=0)])
        self._comm.Allreduce("in place", steps, "max")
        self.optimizer.steps = int(steps[0])
        for key in self._server.keys:
            start = self._start(key)
            span = slice(start, start + key.size // self._values.dtype.itemsize)
            for name in sorted(self.optimizer.state):
                owner = self._server.servers[key.server]
                self._comm.Bcast(self.optimizer.state[name][span], root=owner)

    def state(self, host: Callable[[Any], Any]) -> dict[str, Any]:
        return whole_state(self._comm, self.optimizer, host)

    @contextmanager
    def rehearsal(self) -> Iterator[Callable[[], None]]:
        """An exchange of the same messages, with no update: by servers of its own."""
        scratch = [self._values[span].copy() for span in self._spans]
        with self._make(scratch, optimizer=_Nothing) as server:

            def exchange() -> None:
                for number in range(len(scratch) if server.is_worker else 0):
                    server.push(number, self._buckets[number])
                if server.is_worker:
                    server.step()

            yield exchange

    def bytes_per_step(self) -> float:
        """What a rank sends in a step, the mean over all ranks. See ``placement.traffic``."""
        links = self._server.traffic().values()
        return sum(link.out for link in links) / len(links)

    def report(self) -> dict[str, Any]:
        """What is told of servers alone. Collective, after ``finish``."""
        summary, formula = self._server.summary(), self._server.traffic()
        steps = max(1, *summary.steps.values())
        moved = {rank: summary.bytes_in[rank] + summary.bytes_out[rank] for rank in formula}
        busiest = max(self._server.servers, key=moved.__getitem__)
        return {
            "bytes_sent_per_rank_per_step": sum(summary.bytes_out.values()) / steps / len(formula),
            "server_mode": self._mode,
            "server_staleness": self._staleness,
            "servers": list(self._server.servers),
            "workers": list(self._server.workers),
            "server_bytes": moved[busiest] / steps,
            "server_bytes_in": summary.bytes_in[busiest] / steps,
            "server_bytes_out": summary.bytes_out[busiest] / steps,
            "server_bytes_formula": float(formula[busiest].into + formula[busiest].out),
            "staleness_histogram": dict(sorted(summary.staleness.items())),
            "updates_lost": summary.updates_lost,
            "steps_skipped": sorted(summary.skipped),
        }
