"""Training as on a GPU: arrays on a (virtual) device, steps judged there, the loss seldom read."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mpiring.device.streams import StreamDevice
from mpiring.nn.arrays import all_finite
from mpiring.nn.data import Dataset
from mpiring.nn.optim import SGD, Optimizer
from mpiring.simulation.streams import VirtualMemory
from mpiring.train import options as command_line
from mpiring.train import place
from mpiring.train.loop import Trainer
from mpiring.train.place import Deferred, Host
from mpiring.train.replica import Replica
from tests.communicator.virtual import DeviceCommunicator, run
from tests.train.test_trainer import spoil
from tests.train.virtual import SMALL, alone

GIVEN = ("--epochs", "2", "--batch-size", "14", "--dtype", "float64")


class Flag:
    """What a GPU finds out, told to kernels at once and to the host when it asks."""

    def __init__(self) -> None:
        self.fine = True
        self.looks = 0

    def look(self, values: Any) -> None:
        self.fine = all_finite(values)
        self.looks += 1

    def seen(self) -> bool:
        return self.fine


class VirtualGpu(Host):
    """NumPy's functions on a virtual device's memory, with kernels that obey a flag."""

    log_every = 3

    def __init__(self, device: StreamDevice) -> None:
        self.allocate = device.empty
        self.flag = Flag()

    def kernel(self, optimizer: str) -> Any:
        def sgd(values: Any, g: Any, state: Mapping[str, Any], s: Mapping[str, float]) -> None:
            buffer = state["momentum_buffer"]
            buffer[:] = s["momentum"] * buffer + g
            values -= s["lr"] * buffer

        def adam(values: Any, g: Any, state: Mapping[str, Any], s: Mapping[str, float]) -> None:
            mean, square = state["mean"], state["square"]
            mean[:] = s["beta1"] * mean + s["one_minus_beta1"] * g
            square[:] = s["beta2"] * square + s["one_minus_beta2"] * g * g
            values -= s["rate"] * mean / (np.sqrt(square) * s["root"] + s["eps"])

        def kernel(values: Any, gradients: Any, state: Any, scalars: Any) -> None:
            if self.flag.fine:
                decayed = gradients + scalars["weight_decay"] * values
                {"sgd": sgd, "adam": adam}[optimizer](values, decayed, state, scalars)

        return kernel

    def judge(self, optimizer: Optimizer) -> Deferred:
        return Deferred(optimizer, self.flag)

    def is_finite(self, array: Any) -> bool:
        self.flag.look(array)
        return self.flag.seen()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("path", ["staged", "peer"])
@pytest.mark.parametrize("strategy", ["ring", "zero"])
def test_training_on_a_device_is_that_of_one_process(
    small: Dataset, optimizer: str, path: str, strategy: str
) -> None:
    """Two steps are skipped, one of them the last: what is known late is not lost."""
    given = [*SMALL, *GIVEN, "--optimizer", optimizer, "--strategy", strategy]
    options = command_line.parse(given)
    told: list[float] = []

    def program(comm: DeviceCommunicator) -> Any:
        gpu = VirtualGpu(comm.device)
        replica = Replica(small, options, ranks=comm.size, rank=comm.rank, place=gpu)
        gradients = replica.model.parameters.gradients
        assert type(gradients) is VirtualMemory and comm.device.owns(gradients)
        trainer = Trainer(comm, replica, options, engine=comm.engine)
        spoil(np.nan, 1, 3, 8)(trainer, comm.rank)
        losses = []
        while replica.epochs < 2:
            losses.append(trainer.epoch(lambda samples, loss: told.append(loss)))
        saved = trainer.save()
        results = trainer.results(losses[-1])
        assert gpu.flag.looks == 8 and trainer.strategy.optimizer.steps == 6
        return losses, np.array(replica.model.parameters.values), results, saved

    outcomes = run(2, program, gpu_path=path)
    with np.load(io.BytesIO(outcomes[0][-1])) as file:
        assert file["optimizer.steps"] == 6
        assert all(file[name].any() for name in file if name.startswith("optimizer."))
    for losses, values, results, _ in outcomes:
        expected_losses, expected = alone(small, *GIVEN, "--optimizer", optimizer, skip=(3, 8))
        assert results["steps_skipped"] == [3, 8] and results["replicas_identical"]
        assert losses == pytest.approx(expected_losses, rel=1e-12)
        np.testing.assert_allclose(values, expected, rtol=1e-9, atol=1e-12)
    # Of four steps an epoch the loss was read after the third, on each of two ranks.
    assert np.isnan(told).sum() == 2 * 2 * 2


def test_the_loss_that_is_told_is_the_mean_since_it_was_told_last(small: Dataset) -> None:
    def losses(log_every: int) -> list[tuple[int, float]]:
        options = command_line.parse([*SMALL, *GIVEN, "--log-every", str(log_every)])

        def program(comm: DeviceCommunicator) -> list[tuple[int, float]]:
            trainer = Trainer(comm, Replica(small, options), options, engine=comm.engine)
            found: list[tuple[int, float]] = []
            trainer.epoch(lambda samples, loss: found.append((samples, loss)))
            return found

        return run(1, program)[0]

    each, pairs = losses(1), losses(2)
    (n, one), (m, two) = each[:2]
    assert pairs[1][1] == pairs[2][1] == pytest.approx((n * one + m * two) / (n + m))
    assert np.isnan(pairs[0][1])


def test_steps_are_counted_by_what_was_taken() -> None:
    optimizer, flag = SGD(3, lr=0.1), Flag()
    judge = Deferred(optimizer, flag)
    values, fine, bad = np.zeros(3, "f4"), np.ones(3, "f4"), np.full(3, np.inf, "f4")
    counts = []
    for gradients in (fine, bad, fine, bad):
        judge.step(values, gradients)
        counts.append(optimizer.steps)
    assert counts == [1, 2, 2, 3]  # each before the step itself was heard of
    assert judge.skipped() == judge.skipped() == [2, 4] and optimizer.steps == 2


def test_a_machine_without_nvidias_driver_does_not_import_cupy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place.os.path, "exists", lambda path: False)
    monkeypatch.setattr(place.importlib.util, "find_spec", lambda name: object())
    assert not place.gpu_possible()
