"""Training on virtual ranks, and the same training by nobody's help: one process, plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpiring.communicator import Communicator
from mpiring.engine.progress import ProgressEngine
from mpiring.nn.data import Dataset
from mpiring.nn.loss import softmax_cross_entropy
from mpiring.nn.sampler import Sampler
from mpiring.simulation.world import VirtualTransport, World
from mpiring.train import options as command_line
from mpiring.train.loop import Trainer, share
from mpiring.train.replica import Replica

#: Small, and of very different sizes: with buckets of 100 bytes there are several, one of them
#: a single gradient that is larger.
SMALL = ("--hidden", "5,9,1,7", "--lr", "0.1", "--first-bucket-mb", "2e-5", "--bucket-mb", "1e-4")


class Outcome(NamedTuple):
    """What training came to on one rank."""

    losses: list[float]
    values: Any
    results: dict[str, Any]
    replica: Replica
    saved: bytes  #: on rank 0


def train(
    dataset: Dataset,
    ranks: int,
    *arguments: str,
    seed: int = 0,
    prepare: Callable[[Replica, int], None] = lambda replica, rank: None,
    watch: Callable[[Trainer, int], None] = lambda trainer, rank: None,
) -> list[Outcome]:
    """Train on ``ranks`` virtual ranks. ``prepare(replica, rank)`` runs before they meet,
    ``watch(trainer, rank)`` before the first step; ``seed`` is of the order of messages."""
    options = command_line.parse([*SMALL, *arguments])

    def program(transport: VirtualTransport, engine: ProgressEngine) -> Outcome:
        comm = Communicator(transport, engine=engine)
        parts, part = share(options, ranks, transport.rank)
        replica = Replica(dataset, options, ranks=parts, rank=part)
        prepare(replica, transport.rank)
        trainer = Trainer(comm, replica, options, engine=engine)
        watch(trainer, transport.rank)
        losses = []
        while replica.epochs < options.epochs:
            losses.append(trainer.epoch(lambda samples, loss: None))
        trainer.finish()
        values = replica.model.parameters.values.copy()
        return Outcome(losses, values, trainer.results(losses[-1]), replica, trainer.save())

    return World(ranks, seed).run(program)


def alone(dataset: Dataset, *arguments: str, skip: tuple[int, ...] = ()) -> tuple[list[float], Any]:
    """Losses by epoch and weights of one process that takes each global batch whole, and leaves
    the steps ``skip`` (from 1) without an update."""
    options = command_line.parse([*SMALL, *arguments])
    replica = Replica(dataset, options)
    sampler = Sampler(len(dataset.y_train), options.batch_size, seed=options.seed)
    flat = replica.model.parameters
    optimizer = replica.optimizer(flat.size)
    losses, number = [], 0
    for epoch in range(options.epochs):
        total = 0.0
        for step in sampler.epoch(epoch):
            (batch,) = step.micro_batches
            x, labels = dataset.train_batch(batch, options.dtype)
            loss, gradient = softmax_cross_entropy(replica.model.forward(x), labels, len(batch))
            total += float(loss)
            list(replica.model.backward(gradient))
            number += 1
            if number not in skip:
                optimizer.step(flat.values, flat.gradients)
        losses.append(total / len(dataset.y_train))
    return losses, flat.values


def assert_identical(outcomes: list[Outcome]) -> None:
    """Every rank has the same weights, bit for bit, and reports the same."""
    for outcome in outcomes:
        np.testing.assert_array_equal(
            outcome.values.view(np.uint8), outcomes[0].values.view(np.uint8)
        )
        assert outcome.results == outcomes[0].results
        assert outcome.results["replicas_identical"]
