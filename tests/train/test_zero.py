"""Training with a sharded optimizer: on virtual ranks, and the command under its launchers."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpiring.nn.data import Dataset
from mpiring.train.loop import Trainer
from mpiring.train.replica import Replica
from tests.launch import ROOT, Installation, launch
from tests.train.conftest import write_npz
from tests.train.test_trainer import spoil
from tests.train.virtual import SMALL, alone, assert_identical, train

ZERO = ("--strategy", "zero")
GIVEN = ("--epochs", "2", "--batch-size", "14", "--dtype", "float64")
ADAM = ("--optimizer", "adam", "--lr", "0.01", "--weight-decay", "1e-3")
SGD = ("--momentum", "0.9", "--weight-decay", "1e-3")
#: Two buckets that are large enough for the ring: smaller ones are summed in another order.
LARGE = (
    "--hidden", "300,300,300", "--first-bucket-mb", "0.36", "--bucket-mb", "1",
    "--batch-size", "14",
)  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("how", [(), ("--no-overlap", "--accumulate", "4")], ids=["", "naive"])
def test_n_ranks_train_what_one_process_trains(
    small: Dataset, ranks: int, optimizer: tuple[str, ...], how: tuple[str, ...]
) -> None:
    losses, values = alone(small, *GIVEN, *optimizer)
    outcomes = train(small, ranks, *ZERO, *GIVEN, *optimizer, *how)
    assert_identical(outcomes)
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-12)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=1e-9, atol=1e-12)
    assert outcomes[0].results["steps_skipped"] == []


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
def test_the_bits_are_those_of_the_ring(
    small: Dataset, ranks: int, dtype: str, optimizer: tuple[str, ...]
) -> None:
    given = (*LARGE, "--epochs", "1", "--dtype", dtype, *optimizer)
    ring, zero = (train(small, ranks, *given, "--strategy", name) for name in ("ring", "zero"))
    assert_identical(zero)
    np.testing.assert_array_equal(zero[0].values, ring[0].values)
    assert zero[0].saved == ring[0].saved
    assert [outcome.losses for outcome in zero] == [outcome.losses for outcome in ring]


@pytest.mark.parametrize("value", [np.inf, np.nan])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_what_one_rank_finds_in_its_shard_skips_the_step_on_all(
    small: Dataset, value: float, ranks: int
) -> None:
    outcomes = train(small, ranks, *ZERO, *GIVEN, *ADAM, watch=spoil(value, ranks - 1, 3, 8))
    assert_identical(outcomes)
    assert outcomes[0].results["steps_skipped"] == [3, 8]
    losses, values = alone(small, *GIVEN, *ADAM, skip=(3, 8))
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-12)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=1e-9, atol=1e-12)
    with np.load(io.BytesIO(outcomes[0].saved)) as file:
        assert file["optimizer.steps"] == 6


@pytest.mark.parametrize(("optimizer", "arrays"), [(SGD, 1), (ADAM, 2), (("--momentum", "0"), 0)])
def test_each_rank_keeps_its_share_of_the_optimizer(
    small: Dataset, optimizer: tuple[str, ...], arrays: int
) -> None:
    given = ("--epochs", "1", *optimizer)
    for ranks in (1, 3, 5):
        ring, zero = (
            train(small, ranks, *given, "--strategy", name)[0].results for name in ("ring", "zero")
        )
        whole = arrays * 4 * zero["params"]
        assert ring["optimizer_bytes_per_rank"] == ring["optimizer_bytes_formula"] == whole
        assert zero["optimizer_bytes_formula"] == whole / ranks
        # A bucket's chunks differ by an element; the formula's share is no larger than the most.
        most = arrays * 4 * 10  # parameters, and so buckets at most
        assert 0 <= zero["optimizer_bytes_per_rank"] - whole / ranks <= most
        assert zero["bytes_formula"] == ring["bytes_formula"]


def test_no_more_bytes_travel(small: Dataset) -> None:
    for ranks in (1, 2, 3):
        results = train(small, ranks, *ZERO, *LARGE, "--epochs", "1")[0].results
        votes = results["bytes_sent_per_rank_per_step"] - results["bytes_formula"]
        assert results["bytes_formula"] == pytest.approx(
            2 * (ranks - 1) / ranks * 4 * results["params"]
        )
        assert 0 <= votes <= ranks and (votes > 0) is (ranks > 1)


@pytest.mark.parametrize("optimizer", [SGD, ADAM, ("--momentum", "0")], ids=["sgd", "adam", "bare"])
@pytest.mark.parametrize(
    ("before", "after"), [("zero", "zero"), ("zero", "ring"), ("ring", "zero"), ("zero", "server")]
)
def test_another_strategy_goes_on_with_the_file(
    small: Dataset, tmp_path: Path, before: str, after: str, optimizer: tuple[str, ...]
) -> None:
    path = tmp_path / "saved"
    first = train(small, 2, *LARGE, "--epochs", "2", *optimizer, "--strategy", before)
    path.write_bytes(first[0].saved)

    def resume(replica: Replica, rank: int) -> None:
        if rank == 0:  # the others have no file, and other weights
            replica.load(str(path))
        else:
            replica.model.parameters.values[...] = 9

    given = ("--epochs", "3", *optimizer)
    whole = train(small, 2, *LARGE, *given)[0]
    rest = train(small, 2, *LARGE, *given, "--strategy", after, prepare=resume)
    assert_identical(rest)
    assert rest[0].losses == pytest.approx(whole.losses[2:], rel=1e-6)
    np.testing.assert_allclose(rest[0].values, whole.values, rtol=1e-4, atol=1e-6)
    if after != "server":
        assert rest[0].saved == whole.saved


def test_other_ranks_go_on_with_the_file(small: Dataset, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    path.write_bytes(train(small, 3, *ZERO, *GIVEN, *ADAM)[0].saved)

    def resume(replica: Replica, rank: int) -> None:
        if rank == 0:
            replica.load(str(path))

    more = (*GIVEN, *ADAM, "--epochs", "4")
    losses, values = alone(small, *more)
    outcomes = train(small, 5, *ZERO, *more, prepare=resume)
    assert_identical(outcomes)
    assert outcomes[0].losses == pytest.approx(losses[2:], rel=1e-9)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=1e-9, atol=1e-12)


def test_what_is_saved_between_epochs_is_what_a_shorter_training_ends_with(small: Dataset) -> None:
    saved: dict[int, list[bytes]] = {0: [], 1: []}

    def watch(trainer: Trainer, rank: int) -> None:
        epoch = trainer.epoch

        def and_save(*arguments: Any) -> float:
            loss = epoch(*arguments)
            saved[rank].append(trainer.save())
            return loss

        trainer.epoch = and_save  # type: ignore[method-assign]

    train(small, 2, *ZERO, *GIVEN, *ADAM, watch=watch)
    assert saved[1] == [b"", b""]
    for epochs, content in enumerate(saved[0], 1):
        more = ("--epochs", str(epochs))
        assert content == train(small, 2, *ZERO, *GIVEN, *ADAM, *more)[0].saved


# -- the command

#: Raises in the second epoch's first step of rank 1.
FAILS = """
import sys
from mpiring.train.loop import Trainer

step = Trainer._step

def failing(self, *arguments):
    if self.comm.rank == 1 and self.replica.epochs == 2:
        raise ValueError("on purpose")
    return step(self, *arguments)

Trainer._step = failing
from mpiring.train.__main__ import main
sys.exit(main())
"""


def test_the_command_under_each_mpi(mpi: Installation, tmp_path: Path) -> None:
    data, out, trace, ended, broken = (
        str(tmp_path / name) for name in ("data.npz", "out", "trace", "ended", "broken")
    )
    write_npz(Path(data), 45)
    given = [*ZERO, *SMALL, *GIVEN, *ADAM, "--data", data]
    files = ["--json", out, "--trace", trace, "--save", ended]
    done = launch(3, ["-m", "mpiring.train", *given, *files], mpi=mpi).check()
    assert done.stderr == ""
    assert "each rank updates its part of the weights: ZeRO, stage 1" in done.stdout
    results = json.loads(Path(out).read_text())
    assert results["strategy"] == "zero" and results["replicas_identical"] is True
    names = {
        event["name"].partition(" ")[0]
        for event in json.loads(Path(trace).read_text())["traceEvents"]
    }
    assert {"Reduce_scatter_init", "Allgatherv_init", "Allreduce_init", "forward"} <= names

    # Every epoch has left a file, whole: of three, one that ends in the third has left two.
    argv = ["-c", FAILS, *given, "--epochs", "3", "--save", broken]
    done = launch(3, argv, mpi=mpi)
    assert done.returncode != 0 and "[rank 1] ValueError: on purpose" in done.stderr
    assert Path(broken).read_bytes() == Path(ended).read_bytes()


def test_the_command_over_cupys_calls(tmp_path: Path) -> None:
    """The CUDA device, over a CuPy that works without a GPU."""
    working = {"PYTHONPATH": f"{ROOT / 'tests' / 'device' / 'working'}:{ROOT}"}
    data = str(write_npz(tmp_path / "data.npz", 45))
    weights = []
    for device in ("cpu", "cuda"):
        saved = str(tmp_path / device)
        given = [*ZERO, *SMALL, *GIVEN, *ADAM, "--data", data, "--device", device]
        done = launch(3, ["-m", "mpiring.train", *given, "--save", saved], env=working).check()
        assert ("computed by CuPy on GPU 0" in done.stdout) is (device == "cuda")
        with np.load(saved) as file:
            weights.append(dict(file))
    assert weights[0].keys() == weights[1].keys() >= {"optimizer.mean", "optimizer.square"}
    for name, expected in weights[0].items():
        np.testing.assert_allclose(weights[1][name], expected, rtol=1e-9, atol=1e-12)
