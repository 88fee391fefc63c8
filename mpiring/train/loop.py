"""Training itself: epochs of steps, each a forward, a backward and an update.

Time is split by the caller's clock: *exposed* communication is what the process
spends in the exchange, polling between layers and waiting at the end; the rest
of a step is compute.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpiring.communicator import Communicator
from mpiring.engine.progress import ProgressEngine, default_engine
from mpiring.errors import ArgumentError
from mpiring.nn.arrays import all_finite
from mpiring.nn.loss import softmax_cross_entropy
from mpiring.nn.sampler import Step
from mpiring.parallel.buckets import BUCKET, FIRST_BUCKET, MIB
from mpiring.parallel.placement import roles
from mpiring.parallel.server_strategy import ServerStrategy
from mpiring.parallel.strategies import (
    AllReduce,
    Strategy,
    broadcast_number,
    broadcast_optimizer,
)
from mpiring.parallel.zero import Zero
from mpiring.trace import Instrument, Ledger
from mpiring.train.replica import Replica

#: Exchanges timed alone, after training.
_REPEATS = 7


@dataclass
class Clock:
    """What each step took on this rank, in seconds."""

    steps: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    samples: int = 0  #: of all ranks


class Trainer:
    """Replicas that learn together. The constructor and all methods are collective.

    Every rank starts with rank 0's weights, state of the optimizer and count of epochs,
    whatever the others were seeded with or read from a file. ``engine`` is the communicator's.
    """

    def __init__(
        self,
        comm: Communicator,
        replica: Replica,
        options: argparse.Namespace,
        *,
        engine: ProgressEngine | None = None,
    ) -> None:
        self.comm, self.replica, self.options = comm, replica, options
        self.engine = engine or default_engine()
        self.dataset, self.model, self.place = replica.dataset, replica.model, replica.place
        comm.Bcast(self.model.parameters.values)
        replica.epochs = broadcast_number(comm, replica.epochs)
        self.strategy = _strategy(comm, replica, options)
        self.works = comm.rank in self.strategy.workers
        self.clock = Clock()
        self.ledger = Ledger()
        self._watchers: list[Instrument] = []
        self._loss = self.place.xp.zeros(1)  # summed over the samples of the latest epoch
        self._samples = 0
        self._finished = False
        slow, factor = options.slow_rank or (-1, 1.0)
        self._slowness = factor - 1 if slow == comm.rank else 0.0

    def watch(self, instrument: Instrument) -> None:
        """Tell ``instrument`` about the parts of each step."""
        self._watchers.append(instrument)
        self.engine.instruments.append(instrument)

    def epoch(self, progress: Callable[[int, float], None]) -> float:
        """One pass over the training samples; the mean loss over all of them, or over this
        rank's where ranks don't meet after an epoch.

        ``progress(samples of the step, loss)`` is called after each step, with this rank's
        mean loss over the steps since it was read last, every ``--log-every`` steps.
        """
        self.engine.instruments.append(self.ledger)
        self._loss = self.place.xp.zeros(1)
        self._samples = 0
        log_every = self.options.log_every or self.place.log_every
        loss, before, samples = float("nan"), 0.0, 0
        steps = self.replica.sampler.epoch(self.replica.epochs) if self.works else ()
        with _quiet():
            for number, step in enumerate(steps, 1):
                self._timed(step)
                self._samples += step.samples
                if number % log_every == 0:
                    now = float(self._loss[0])
                    loss = (now - before) / max(1, self._samples - samples)
                    before, samples = now, self._samples
                progress(step.count, loss)
        self.engine.instruments.remove(self.ledger)
        self.replica.epochs += 1
        return self._mean_loss(everyones=self.strategy.in_step)

    def _mean_loss(self, everyones: bool) -> float:
        losses = np.array([float(self._loss[0]), self._samples])
        if everyones:
            self.comm.Allreduce("in place", losses)
        return float(losses[0]) / max(1.0, float(losses[1]))

    def finish(self) -> None:
        """All epochs are over: every rank has the same weights afterwards."""
        if not self._finished:
            self._finished = True
            self.strategy.finish()

    def save(self) -> bytes:
        """The content of a file from which training goes on, whatever strategy it will have; on
        rank 0, elsewhere nothing. Between epochs only if ``strategy.state_between``."""
        state = self.strategy.state(self.place.host)
        return b"" if self.comm.rank else self.replica.save(state)

    def skipped(self) -> list[int]:
        """The numbers, from 1, of the steps skipped so far; those of servers come at the end."""
        return self.strategy.skipped()

    def _timed(self, step: Step) -> None:
        clock, strategy = self.clock, self.strategy
        begin = time.perf_counter()
        exposed = strategy.polling_seconds + strategy.waiting_seconds
        self._step(step)
        clock.exposed.append(strategy.polling_seconds + strategy.waiting_seconds - exposed)
        clock.steps.append(time.perf_counter() - begin)
        clock.samples += step.count

    def _step(self, step: Step) -> None:
        last = len(step.micro_batches) - 1
        begin = time.perf_counter()
        for number, indices in enumerate(step.micro_batches):
            x, labels = self.dataset.train_batch(indices, self.options.dtype, self.place.xp)
            with nullcontext() if number == last else self.strategy.no_sync():
                logits = self.model.forward(x)
                loss, gradient = softmax_cross_entropy(logits, labels, step.count, self.place.xp)
                self._loss += loss
                begin = self._computed("forward", begin)
                for parameter in self.model.backward(gradient, accumulate=number > 0):
                    begin = self._computed(f"backward {parameter.name}", begin)
                    self.strategy.ready(parameter)
                    begin = self._tell("start and poll", begin)
        self.strategy.update()
        self._tell("finish and update", begin)

    def _computed(self, label: str, begin: float) -> float:
        """Something has been computed since ``begin``; a slow rank is not ready with it yet."""
        now = time.perf_counter()
        until = now + self._slowness * (now - begin)
        while (left := until - time.perf_counter()) > 0:
            time.sleep(min(left, 1e-3))
            self.comm.poll()
        return self._tell(label, begin)

    def _tell(self, label: str, begin: float) -> float:
        end = time.perf_counter()
        for watcher in self._watchers:
            watcher.span(label, begin, end)
        return end

    def accuracy(self) -> float:
        """The share of the test samples that are classified rightly; each rank does a part."""
        samples = len(self.dataset.y_test)
        mine = np.array_split(np.arange(samples), self.comm.size)[self.comm.rank]
        right = np.zeros(1, np.int64)
        for start in range(0, len(mine), 1024):
            part = mine[start : start + 1024]
            x, labels = self.dataset.test_batch(part, self.options.dtype, self.place.xp)
            with _quiet():
                right += self.model.correct(x, labels)
        self.comm.Allreduce("in place", right)
        return int(right[0]) / samples

    def exchange_seconds(self) -> float:
        """An exchange with nothing to hide behind: median of several, of the slowest rank.

        Overwrites the gradients.
        """
        self.model.parameters.gradients.fill(0)
        times = np.zeros(_REPEATS)
        meeting = np.zeros(1)
        with self.strategy.rehearsal() as exchange:
            for i in range(_REPEATS):
                self.comm.Allreduce("in place", meeting)
                begin = time.perf_counter()
                exchange()
                times[i] = time.perf_counter() - begin
        self.comm.Allreduce("in place", times, "max")
        return float(np.median(times))

    def identical(self) -> bool:
        """Whether the weights have the same bits on every rank, by a digest."""
        octets = self.place.host(self.model.parameters.values).view(np.uint8)
        digest = np.frombuffer(hashlib.blake2b(octets, digest_size=8).digest(), np.uint64)
        everyone = np.empty(self.comm.size, np.uint64)
        self.comm.Allgather(digest, everyone)
        return bool((everyone == everyone[0]).all())

    def results(self, final_loss: float) -> dict[str, Any]:
        """Everything that is reported, the same on every rank.

        A step's times are medians over the steps (a mean would tell of the few that the
        system interrupted, and the exchange alone is a median too) and means over the ranks
        that took them. Updates are counted as steps of a rank, each rank's over its own time.
        """
        self.finish()
        clock, comm = self.clock, self.comm
        accuracy, identical = self.accuracy(), self.identical()
        if not self.strategy.in_step:
            final_loss = self._mean_loss(everyones=True)
        mine = np.zeros(4)
        most = np.array([sum(clock.steps), len(clock.steps), clock.samples], np.float64)
        if self.works:
            steps = len(clock.steps)
            mine[:3] = np.median(clock.steps), np.median(clock.exposed), steps / most[0]
            mine[3] = self.ledger.nbytes_sent / steps
        comm.Allreduce("in place", mine)
        comm.Allreduce("in place", most, "max")
        updates = float(mine[2])
        step, exposed, _, sent = (mine / len(self.strategy.workers)).tolist()
        slowest, steps, samples = float(most[0]), int(most[1]), float(most[2])
        exchange = self.exchange_seconds()
        compute = step - exposed
        return {
            "ranks": comm.size,
            "strategy": self.strategy.name,
            "device": self.place.name,
            "overlap": self.options.overlap,
            "dataset": self.dataset.name,
            "epochs": self.options.epochs,
            "steps": steps,
            "params": self.model.parameters.size,
            "test_accuracy": accuracy,
            "final_loss": final_loss,
            "samples_per_second": samples / slowest,
            "updates_per_second": updates,
            "step_ms": step * 1e3,
            "compute_ms": compute * 1e3,
            "comm_ms": exchange * 1e3,
            "exposed_ms": exposed * 1e3,
            "hidden_percent": hidden_percent(exchange, compute, step) if comm.size > 1 else None,
            "more_ranks_than_cores": self.engine.yields,
            "bytes_sent_per_rank_per_step": sent,
            "bytes_formula": self.strategy.bytes_per_step(),
            "steps_skipped": self.skipped(),
            "replicas_identical": identical,
            **self.strategy.report(),
        }


def share(options: argparse.Namespace, size: int, rank: int) -> tuple[int, int]:
    """Among how many ranks the samples are shared out, and which part is this rank's.

    A rank that only serves gets one too, and leaves it. Raises ArgumentError where there is
    no worker or no server.
    """
    if options.slow_rank and options.slow_rank[0] >= size:
        raise ArgumentError(
            f"--slow-rank: rank {options.slow_rank[0]} given; allowed are ranks below {size}"
        )
    if options.strategy != "server":
        return size, rank
    workers = roles(size, options.servers).workers
    return len(workers), workers.index(rank) if rank in workers else 0


def _strategy(comm: Communicator, replica: Replica, options: argparse.Namespace) -> Strategy:
    parameters, place = replica.model.parameters, replica.place
    buckets = {
        "bucket_bytes": _bytes(options.bucket_mb, BUCKET, parameters.nbytes),
        "first_bucket_bytes": _bytes(options.first_bucket_mb, FIRST_BUCKET, parameters.nbytes),
        "overlap": options.overlap,
    }
    state, replica.optimizer_state = replica.optimizer_state, {}
    if options.strategy == "zero":
        return Zero(comm, list(parameters), replica.optimizer, place.is_finite, state, **buckets)
    optimizer = replica.optimizer(parameters.size)
    if state:
        optimizer.load_state_dict(state)
    broadcast_optimizer(comm, optimizer)
    given = comm, list(parameters), parameters.values, parameters.gradients, optimizer
    if options.strategy == "ring":
        return AllReduce(*given, place.judge(optimizer), **buckets)
    return ServerStrategy(
        *given,
        all_finite,
        mode=options.server_mode,
        staleness=options.staleness,
        servers=options.servers,
        record=options.record,
        replay=options.replay,
        **buckets,
    )


def _bytes(wish: float | None, default: int, gradients: int) -> int:
    """Of a bucket: what was asked for in MiB, or the default, with no fewer than four of all."""
    return max(1, min(default, gradients // 4) if wish is None else int(wish * MIB))


def hidden_percent(communication: float, compute: float, both: float) -> float | None:
    """100 (t_comm + t_comp - t_both) / min(t_comm, t_comp), as the Intel MPI Benchmarks define
    overlap, within 0 and 100; None where one of the two took no time.
    """
    smaller = min(communication, compute)
    if smaller <= 0:
        return None
    return min(100.0, max(0.0, 100 * (communication + compute - both) / smaller))


def _quiet() -> AbstractContextManager[None]:
    """Numbers too large for the dtype are looked for in the gradient, and the step is said to be
    skipped; a warning of NumPy's from every rank would tell nothing more."""
    return np.errstate(over="ignore", invalid="ignore")
