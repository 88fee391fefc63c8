"""Training by parameter servers: on virtual ranks, and the command under its launchers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpiring.errors import ArgumentError
from mpiring.nn.data import Dataset
from mpiring.parallel.placement import roles
from mpiring.train import report
from mpiring.train.loop import Trainer, share
from mpiring.train.options import parse
from mpiring.train.replica import Replica
from tests.launch import Installation, launch
from tests.train.conftest import write_npz
from tests.train.virtual import SMALL, alone, assert_identical, train

SERVER = ("--strategy", "server")
GIVEN = ("--epochs", "2", "--batch-size", "14", "--dtype", "float64")
ADAM = ("--optimizer", "adam", "--lr", "0.01", "--weight-decay", "1e-3")
SGD = ("--momentum", "0.9", "--weight-decay", "1e-3")
ASYNC = ("--server-mode", "async")
SSP = ("--server-mode", "ssp", "--staleness", "1")


@pytest.mark.parametrize(
    ("ranks", "servers"),
    [(1, "colocated"), (2, "1"), (3, "colocated"), (5, "colocated:2"), (5, "2")],
)
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("how", [(), ("--no-overlap", "--accumulate", "4")], ids=["", "naive"])
def test_sync_trains_what_one_process_trains(
    small: Dataset, ranks: int, servers: str, optimizer: tuple[str, ...], how: tuple[str, ...]
) -> None:
    losses, values = alone(small, *GIVEN, *optimizer)
    outcomes = train(small, ranks, *SERVER, *GIVEN, *optimizer, "--servers", servers, *how)
    assert_identical(outcomes)
    assert outcomes[0].losses == pytest.approx(losses, rel=1e-12)
    np.testing.assert_allclose(outcomes[0].values, values, rtol=1e-9, atol=1e-12)
    results = outcomes[0].results
    assert results["steps_skipped"] == [] and results["updates_lost"] == 0
    assert set(results["staleness_histogram"]) == {0}
    assert results["server_bytes"] == results["server_bytes_formula"]
    assert results["bytes_sent_per_rank_per_step"] == pytest.approx(results["bytes_formula"])


@pytest.mark.parametrize("mode", [ASYNC, SSP], ids=["async", "ssp"])
@pytest.mark.parametrize("servers", ["colocated", "colocated:1", "1", "2"])
def test_without_waiting_it_learns_as_well(
    small: Dataset, mode: tuple[str, ...], servers: str
) -> None:
    given = ("--epochs", "12", "--batch-size", "14", "--servers", servers, "--hidden", "8")
    workers = len(roles(4, servers).workers)
    for seed in range(3):
        outcomes = train(small, 4, *SERVER, *mode, *given, *SGD, seed=seed)
        assert_identical(outcomes)
        results = outcomes[0].results
        assert results["test_accuracy"] >= 0.9
        assert results["updates_lost"] == 0
        assert results["server_bytes"] == results["server_bytes_formula"]
        assert results["workers"] == list(range(workers))
        # One entry for each push of each shard: all workers take all steps.
        pushes = workers * results["steps"] * len(results["servers"])
        assert sum(results["staleness_histogram"].values()) == pushes


def test_the_loss_at_the_end_is_that_of_all_samples(small: Dataset) -> None:
    outcomes = train(small, 3, *SERVER, *ASYNC, *GIVEN)
    mine = [outcome.losses[-1] for outcome in outcomes]
    assert len(set(mine)) == 3
    assert min(mine) < outcomes[0].results["final_loss"] < max(mine)


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("servers", ["colocated", "2"])
def test_two_and_two_epochs_are_four(
    small: Dataset, tmp_path: Path, servers: str, optimizer: tuple[str, ...]
) -> None:
    """What the servers know of the optimizer comes back to rank 0, and from there to them."""
    given = (*SERVER, "--batch-size", "14", "--servers", servers, *optimizer)
    whole = train(small, 4, "--epochs", "4", *given)
    path = tmp_path / "saved"
    path.write_bytes(train(small, 4, "--epochs", "2", *given)[0].saved)

    def resume(replica: Replica, rank: int) -> None:
        if rank == 0:  # the others have no file
            replica.load(str(path))

    rest = train(small, 4, "--epochs", "4", *given, prepare=resume)
    assert rest[0].saved == whole[0].saved


@pytest.mark.parametrize("mode", [(), ASYNC], ids=["sync", "async"])
def test_a_gradient_that_is_not_finite_is_used_nowhere(
    small: Dataset, mode: tuple[str, ...]
) -> None:
    def spoil(trainer: Trainer, rank: int) -> None:
        if rank == 1:
            backward, steps = trainer.model.backward, trainer.clock.steps

            def spoiled(gradient: Any, accumulate: bool = False) -> Any:
                for parameter in backward(gradient, accumulate):
                    if len(steps) == 2:
                        parameter.gradient[...] = np.inf
                    yield parameter

            trainer.model.backward = spoiled  # type: ignore[method-assign]

    outcomes = train(small, 3, *SERVER, *mode, *GIVEN, watch=spoil)
    assert_identical(outcomes)
    assert np.isfinite(outcomes[0].values).all()
    skipped = outcomes[0].results["steps_skipped"]
    assert skipped
    if mode == ():
        assert skipped == [3]
        np.testing.assert_allclose(
            outcomes[0].values, alone(small, *GIVEN, skip=(3,))[1], rtol=1e-9, atol=1e-12
        )


@pytest.mark.parametrize("servers", ["colocated", "1"])
def test_recorded_and_replayed(small: Dataset, tmp_path: Path, servers: str) -> None:
    given = (*SERVER, *ASYNC, *GIVEN, "--servers", servers)
    log = str(tmp_path / "log")
    first = train(small, 3, *given, "--record", log, seed=1)[0].values
    for seed in range(2, 5):
        again = train(small, 3, *given, "--replay", log, seed=seed)[0].values
        np.testing.assert_array_equal(again, first)
    assert any((train(small, 3, *given, seed=s)[0].values != first).any() for s in range(2, 5))


def test_a_slow_rank_computes_the_same(small: Dataset) -> None:
    fast = train(small, 2, *GIVEN)
    slow = train(small, 2, *GIVEN, "--slow-rank", "1:3")
    np.testing.assert_array_equal(slow[0].values, fast[0].values)


# -- the command line


def test_options() -> None:
    options = parse(list(SERVER))
    assert (options.server_mode, options.staleness, options.servers) == ("sync", None, "colocated")
    assert parse([*SERVER, *SSP]).staleness == 1
    assert parse(["--slow-rank", "3:2.5"]).slow_rank == (3, 2.5)
    assert share(parse([*SERVER, "--servers", "2"]), 5, 1) == (3, 1)
    assert share(parse([*SERVER, "--servers", "2"]), 5, 4)[0] == 3
    assert share(parse(list(SERVER)), 5, 4) == (5, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--server-mode", "async"], "--server-mode: async given; allowed with --strategy server"),
        (["--servers", "2"], "--servers: 2 given; allowed with --strategy server"),
        (["--record", "x"], "--record: x given; allowed with --strategy server"),
        ([*SERVER, "--record", "x"], "--record: x given, but sync has the same result"),
        ([*SERVER, "--replay", "x"], "--replay: x given, but sync has the same result"),
        ([*SERVER, "--server-mode", "lazy"], "--server-mode: invalid choice: 'lazy'"),
        ([*SERVER, "--server-mode", "ssp"], "staleness is None; mode 'ssp' needs a number"),
        ([*SERVER, "--staleness", "1"], "staleness is 1, but only mode 'ssp' has one"),
        ([*SERVER, *SSP[:3], "-1"], "--staleness: '-1' given; allowed are whole numbers from 0"),
        (["--slow-rank", "3"], "'3' given; allowed are a rank, a colon and a factor from 1"),
        (["--slow-rank", "1:0.5"], "'1:0.5' given; allowed are a rank, a colon and a factor"),
        (["--slow-rank", "a:2"], "'a:2' given"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "size", "message"),
    [
        ([*SERVER, "--servers", "1"], 1, "leaves no worker among 1 rank: start more ranks"),
        ([*SERVER, "--servers", "colocated:3"], 2, "there are only 2 ranks"),
        ([*SERVER, "--servers", "some"], 2, "servers is 'some'"),
        (["--slow-rank", "2:5"], 2, "--slow-rank: rank 2 given; allowed are ranks below 2"),
    ],
)
def test_what_only_the_number_of_ranks_tells(arguments: list[str], size: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        share(parse(arguments), size, 0)


# -- what is shown

RESULTS: dict[str, Any] = {
    "ranks": 4,
    "strategy": "server",
    "steps": 69,
    "test_accuracy": 0.97463,
    "final_loss": 0.001495,
    "samples_per_second": 12345.6,
    "updates_per_second": 678.9,
    "step_ms": 20.0,
    "compute_ms": 15.0,
    "exposed_ms": 5.0,
    "comm_ms": 10.0,
    "hidden_percent": 50.0,
    "bytes_sent_per_rank_per_step": 1806396.0,
    "bytes_formula": 1806396.0,
    "servers": [3],
    "workers": [0, 1, 2],
    "server_bytes": 7225584.0,
    "server_bytes_in": 3612792.0,
    "server_bytes_out": 3612792.0,
    "server_bytes_formula": 7225584.0,
    "staleness_histogram": {0: 10, 1: 20, 2: 80, 5: 1},
    "updates_lost": 0,
    "replicas_identical": True,
    "steps_skipped": [],
    "more_ranks_than_cores": False,
}


def test_the_table_shows_the_busiest_server_and_the_staleness() -> None:
    text = report.table(RESULTS)
    assert re.search(
        r"busiest server, in and out +6\.89 MiB  a step: 3\.45 MiB in, 3\.45 MiB", text
    )
    assert re.search(r"formula +6\.89 MiB  2 x n S, n = 3\n", text)
    assert re.search(r"updates per second +678\.9  ", text)
    assert re.search(r"updates lost +0\n", text)
    bars = re.findall(r" (\d) +(\d+\.\d) %(?:  (#+))?\n", text)
    assert [(versions, share, len(bar)) for versions, share, bar in bars] == [
        ("0", "9.0", 4), ("1", "18.0", 8), ("2", "72.1", 30), ("3", "0.0", 0), ("4", "0.0", 0),
        ("5", "0.9", 1),
    ]  # fmt: skip


def test_a_long_tail_of_staleness_is_grouped() -> None:
    text = report.table(RESULTS | {"staleness_histogram": {0: 1, 30: 1, 35: 2}})
    assert re.findall(r" (\d+-\d+) +(\d+\.\d) %", text)[::10] == [
        ("0-2", "25.0"),
        ("30-32", "25.0"),
    ]
    assert "33-35    50.0 %" in text


@pytest.mark.parametrize(
    ("servers", "workers", "formula"),
    [
        ([0, 1, 2, 3], [0, 1, 2, 3], "2 x 2(n-1)/n S, n = 4"),
        ([0], [0, 1, 2, 3], "2 x (n-1) S, n = 4"),
        ([0, 1], [0, 1, 2, 3], "n = 4 workers, 2 of them servers too"),
        ([2, 3], [0, 1], "2 x n S/2, n = 2"),
    ],
)
def test_the_formula_is_named(servers: list[int], workers: list[int], formula: str) -> None:
    assert formula in report.table(RESULTS | {"servers": servers, "workers": workers})


# -- the command


def run(ranks: int, *arguments: str, out: Path, mpi: Installation | None = None) -> dict[str, Any]:
    argv = ["-m", "mpiring.train", *SERVER, *arguments, "--json", str(out)]
    done = launch(ranks, argv, mpi=mpi, timeout=150).check()
    assert done.stderr == ""
    return json.loads(out.read_text())


@pytest.mark.timeout(170)
@pytest.mark.parametrize("mode", [ASYNC, SSP], ids=["async", "ssp"])
def test_eight_ranks_learn_the_digits(tmp_path: Path, mode: tuple[str, ...]) -> None:
    pytest.importorskip("sklearn")
    results = run(8, *mode, "--epochs", "6", out=tmp_path / "out.json")
    assert results["test_accuracy"] >= 0.96
    assert results["replicas_identical"] is True
    assert results["updates_lost"] == 0
    assert results["server_bytes"] == results["server_bytes_formula"]


@pytest.mark.parametrize("servers", ["colocated", "1"])
def test_the_command_under_each_mpi(mpi: Installation, tmp_path: Path, servers: str) -> None:
    data = str(write_npz(tmp_path / "data.npz", 45))
    given = ("--data", data, *SMALL, "--batch-size", "14", "--servers", servers, "--trace")
    out = tmp_path / "out.json"
    for mode in ((), ASYNC):
        trace = tmp_path / "trace.json"
        results = run(3, *given, str(trace), *mode, out=out, mpi=mpi)
        assert results["updates_lost"] == 0 and results["replicas_identical"] is True
        names = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
        assert any(re.fullmatch(r"push \d+ to rank 2", name) for name in names)
        assert any(re.fullmatch(r"answer \d+ to rank 0", name) for name in names)


def test_a_worker_that_raises_ends_the_command(mpi: Installation, tmp_path: Path) -> None:
    data = str(write_npz(tmp_path / "data.npz", 45))
    program = """
import sys
from mpiring.train.loop import Trainer
step = Trainer._step

def failing(self, *arguments):
    if self.comm.rank == 0 and len(self.clock.steps) == 2:
        raise ValueError("on purpose")
    return step(self, *arguments)

Trainer._step = failing
from mpiring.train.__main__ import main
sys.exit(main())
"""
    for servers in ("colocated", "1"):
        argv = ["-c", program, *SERVER, *ASYNC, "--servers", servers, *SMALL, "--data", data]
        done = launch(3, [*argv, "--batch-size", "14"], mpi=mpi)
        assert done.returncode != 0
        assert "[rank 0] ValueError: on purpose" in done.stderr
