"""The trainer on real ranks: what one process learns, and mistakes that all ranks hear of."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpiring.nn.data import load
from mpiring.train.__main__ import main
from tests.train.conftest import write_npz
from tests.train.virtual import SMALL, alone

GIVEN = [*SMALL, "--epochs", "2", "--batch-size", "14", "--dtype", "float64"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(comm: MPI.Intracomm, tmp_path: Path) -> Path:
    """One folder for all ranks, with the data in it."""
    shared = Path(comm.bcast(str(tmp_path)))
    if comm.rank == 0:
        write_npz(shared / "small.npz", 45)
    comm.Barrier()
    return shared


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run the trainer; exit code, standard output and standard error of this rank."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return run


ADAM = ("--optimizer", "adam", "--lr", "0.01")


@pytest.mark.parametrize(
    "more", [(), ("--accumulate", "4", "--no-overlap"), ADAM, (*ADAM, "--strategy", "zero")]
)
def test_n_ranks_train_what_one_process_trains(
    comm: MPI.Intracomm, folder: Path, run: Run, more: tuple[str, ...]
) -> None:
    data, saved, written = (str(folder / name) for name in ("small.npz", "saved", "out.json"))
    code, out, err = run(*GIVEN, *more, "--data", data, "--save", saved, "--json", written)
    assert (code, err) == (0, "")
    assert ("replicas identical" in out) is (comm.rank == 0)
    assert out == "" or comm.rank == 0
    losses, values = alone(load(data), *GIVEN, *more)
    results = json.loads(Path(written).read_text())
    assert results["ranks"] == comm.size
    assert results["final_loss"] == pytest.approx(losses[-1], rel=1e-12)
    assert results["replicas_identical"] is True and results["steps_skipped"] == []
    with np.load(saved) as file:
        names = [f"linear{i}.{kind}" for i in reversed(range(5)) for kind in ("bias", "weight")]
        mine = np.concatenate([file[name].ravel() for name in names])
    np.testing.assert_allclose(mine, values, rtol=1e-9, atol=1e-12)


def test_going_on_where_only_rank_0_has_the_file(
    comm: MPI.Intracomm, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(epochs: int, *more: str) -> list[str]:
        return [*GIVEN, "--data", str(folder / "small.npz"), "--epochs", str(epochs), *more]

    whole, saved = str(folder / "whole"), str(folder / "saved")
    assert run(*given(2, "--save", whole))[0] == 0
    assert run(*given(1, "--save", saved))[0] == 0
    if comm.rank:
        monkeypatch.setattr("mpiring.train.replica.Replica.load", None)
    code, out, err = run(*given(2, "--resume", saved, "--save", saved))
    assert (code, err) == (0, "")
    assert ("1 epoch done: " in out) is (comm.rank == 0)
    assert Path(saved).read_bytes() == Path(whole).read_bytes()
    code, _, err = run(*given(2, "--resume", saved))
    assert code == 2
    assert ("has been trained for 2; allowed are more" in err) is (comm.rank == 0)


def test_progress_by_a_thread_and_a_trace(comm: MPI.Intracomm, folder: Path, run: Run) -> None:
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI was initialised without MPI_THREAD_MULTIPLE")
    data, traced = str(folder / "small.npz"), str(folder / "trace.json")
    code, _, err = run(*GIVEN, "--data", data, "--progress", "thread", "--trace", traced)
    assert (code, err) == (0, "")
    events = json.loads(Path(traced).read_text())["traceEvents"]
    assert {event["pid"] for event in events} == set(range(comm.size))
    names = {event["name"] for event in events if event["pid"] == comm.rank}
    assert {"forward", "backward linear0.weight", "finish and update"} <= names


def refused(comm: MPI.Intracomm, run: Run, named: str, *arguments: str) -> None:
    """Every rank ends with 2, and rank 0 alone has said why, in one line."""
    code, out, err = run(*arguments)
    assert code == 2 and out == ""
    if comm.rank:
        assert err == ""
    else:
        assert err.startswith("mpiring.train: ") and named in err
        assert err.count("\n") == 1


def test_a_mistake_is_said_once(comm: MPI.Intracomm, run: Run) -> None:
    for arguments, named in [
        (("--lr", "fast"), "--lr: 'fast' given"),
        (("--hidden", ""), "--hidden: '' given"),
        (("--nonsense",), "--nonsense"),
        (("--data", "/no/such/folder"), "/no/such/folder"),
        (("--json", "/no/such/folder/x.json"), "--json: '/no/such/folder/x.json' given"),
        (("--save", "/"), "--save: '/' given, but it is a folder"),
        (("--resume", "/no/such/file"), "--resume: /no/such/file cannot be read"),
        (("--device", "cuda"), "--device: cuda"),
    ]:
        refused(comm, run, named, *arguments)


def test_fewer_samples_in_a_batch_or_a_set_than_ranks(
    comm: MPI.Intracomm, folder: Path, run: Run
) -> None:
    if comm.size == 1:
        return
    allowed = f"allowed are numbers from {comm.size}, one sample for each rank"
    few = ("--batch-size", str(comm.size - 1))
    refused(comm, run, f"batch_size: {comm.size - 1} given; {allowed}", *few)
    if comm.rank == 0:
        write_npz(folder / "few.npz", comm.size - 1)
    refused(comm, run, f"samples: {comm.size - 1} given; {allowed}", "--data", f"{folder}/few.npz")


def test_files_that_are_broken(comm: MPI.Intracomm, folder: Path, run: Run) -> None:
    if comm.rank == 0:
        whole = (folder / "small.npz").read_bytes()
        (folder / "cut.npz").write_bytes(whole[:1000])
        (folder / "idx").mkdir()
        (folder / "idx" / "train-images-idx3-ubyte").write_bytes(b"nonsense")
    comm.Barrier()
    refused(comm, run, "cut.npz cannot be read", "--data", str(folder / "cut.npz"))
    refused(comm, run, "lacks train-labels-idx1-ubyte", "--data", str(folder / "idx"))
    refused(comm, run, "cut.npz cannot be read", "--resume", str(folder / "cut.npz"))


def test_ranks_that_were_told_different_things(
    comm: MPI.Intracomm, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.size == 1:
        return
    last = comm.size - 1
    mine = comm.rank == last
    refused(
        comm, run, f"arguments differ between ranks: seed is 0 on rank 0 and 5 on rank {last}",
        *(("--seed", "5") if mine else ()),
    )  # fmt: skip
    refused(comm, run, f"rank {last}: ", *(("--epochs", "0") if mine else ()))
    # The same path leads to other files, as on machines with disks of their own.
    loaded = load(write_npz(tmp_path / "own.npz", 45 + mine))
    monkeypatch.setattr("mpiring.nn.data.load", lambda name: loaded)
    refused(comm, run, f"data differ between ranks: samples is 45 on rank 0 and 46 on rank {last}")


def test_a_mistake_on_one_rank_names_it(
    comm: MPI.Intracomm, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if comm.size == 1:
        return

    def fails(*arguments: object, **more: object) -> None:
        raise MemoryError("not enough memory")

    if comm.rank == 1:
        monkeypatch.setattr("mpiring.train.replica.Replica.__init__", fails)
    refused(comm, run, "rank 1: not enough memory")
