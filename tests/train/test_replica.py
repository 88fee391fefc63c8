"""Saved and gone on with: as if training had never stopped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mpiring.errors import ArgumentError
from mpiring.nn.data import Dataset
from mpiring.train import options as command_line
from mpiring.train.replica import Replica
from tests.train.virtual import SMALL, assert_identical, train

ADAM = ("--optimizer", "adam", "--lr", "0.01")
SGD = ("--momentum", "0.9")


def replica(dataset: Dataset, *arguments: str) -> Replica:
    return Replica(dataset, command_line.parse([*SMALL, *arguments]))


@pytest.fixture
def saved(small: Dataset, tmp_path: Path) -> Path:
    """Two epochs of two ranks, by SGD."""
    path = tmp_path / "saved"
    path.write_bytes(train(small, 2, "--epochs", "2", *SGD)[0].saved)
    return path


@pytest.mark.parametrize("optimizer", [SGD, ADAM, ("--momentum", "0")], ids=["sgd", "adam", "bare"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_two_and_two_epochs_are_four(
    small: Dataset, tmp_path: Path, optimizer: tuple[str, ...], dtype: str
) -> None:
    given = ("--batch-size", "14", "--dtype", dtype, *optimizer)
    whole = train(small, 2, "--epochs", "4", *given)
    path = tmp_path / "saved"
    path.write_bytes(train(small, 2, "--epochs", "2", *given)[0].saved)

    def resume(replica: Replica, rank: int) -> None:
        if rank == 0:  # the others have no file, and other weights
            replica.load(str(path))
        else:
            replica.model.parameters.values[...] = 9

    rest = train(small, 2, "--epochs", "4", *given, prepare=resume)
    assert_identical(rest)
    assert rest[0].losses == whole[0].losses[2:]
    assert rest[0].saved == whole[0].saved
    np.testing.assert_array_equal(rest[0].values, whole[0].values)


def test_the_file_can_be_used_without_us(small: Dataset, saved: Path) -> None:
    ours = replica(small, *SGD)
    ours.load(str(saved))
    with np.load(saved) as file:
        x = (small.x_test - file["inputs.mean"]) / file["inputs.deviation"]
        for number in range(5):
            x = x @ file[f"linear{number}.weight"] + file[f"linear{number}.bias"]
            x = np.maximum(x, 0) if number < 4 else x
    logits = ours.model.forward(small.test_batch(slice(None))[0])
    np.testing.assert_allclose(logits, x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--hidden", "5,9,1,8"), r"linear4\.bias|linear4\.weight"),
        (("--hidden", "5"), "linear1"),
        (("--dtype", "float64"), "float32"),
        (("--optimizer", "adam"), r"optimizer\.mean is missing"),
    ],
)
def test_a_file_of_another_network_is_refused_and_nothing_taken(
    small: Dataset, saved: Path, arguments: tuple[str, ...], named: str
) -> None:
    ours = replica(small, *arguments)
    before = ours.save({})
    with pytest.raises(ArgumentError, match=f"--resume: .*saved fits other .*({named})"):
        ours.load(str(saved))
    assert ours.save({}) == before and not ours.optimizer_state


def test_files_that_are_none(small: Dataset, saved: Path, tmp_path: Path) -> None:
    whole = saved.read_bytes()
    np.save(tmp_path / "array.npy", np.zeros(3))
    contents = {"empty": b"", "text": b"hello", "cut": whole[: len(whole) // 2]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in (*contents, "absent", "array.npy", "."):
        with pytest.raises(ArgumentError, match=r"--resume: .* cannot be read"):
            replica(small, *SGD).load(str(tmp_path / name))


def test_damage_inside_is_found(small: Dataset, saved: Path) -> None:
    octets = bytearray(saved.read_bytes())
    octets[300] ^= 0xFF
    saved.write_bytes(octets)
    with pytest.raises(ArgumentError, match=r"--resume: .* cannot be read"):
        replica(small, *SGD).load(str(saved))
