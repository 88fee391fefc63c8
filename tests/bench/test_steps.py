"""One optimizer step in all ways: what is computed, exchanged, counted and told."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from bench import network as network_module
from bench.measure import Statistic
from bench.network import Network, gradient_sizes
from bench.options import Stop
from bench.steps import (
    MODES,
    Account,
    Times,
    all_reduce_bytes,
    alone,
    bucket_limits,
    check,
    complaint,
    parse,
    row,
    typical,
)
from bench.steps_report import draw, heading, tables
from mpiring.schedule.catalog import Plan, choose, schedule
from mpiring.schedule.chunks import split
from tests.launch import launch

BY_NAME = {mode.name: mode for mode in MODES}
MIB = 2**20

# -- the network ------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_gradients_have_the_size_asked_for_in_chunks_that_are_alike(ranks: int) -> None:
    sizes = gradient_sizes(16 * MIB, 32, ranks)
    assert len(sizes) == 64
    assert all(size % ranks == 0 for size in sizes)
    assert 4 * sum(sizes) == pytest.approx(16 * MIB, rel=0.01)
    assert min(gradient_sizes(1, 5, ranks)) == ranks


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_every_micro_batch_is_computed_once(mode) -> None:
    n, k = 3, 4
    shares = [list(chain(*mode.division(rank, n, k))) for rank in range(n)]
    if mode.name == "accumulation":
        assert all(sorted(share) == list(range(n * k)) for share in shares)
    else:
        assert Counter(chain(*shares)) == Counter(range(n * k))
    assert len(mode.division(0, n, k)) == {"accumulation": n, "sync-every": k, "no-sync": k}.get(
        mode.name, 1
    )


def test_accumulated_gradients_are_right_and_a_missing_batch_is_seen() -> None:
    network = Network([3, 2000, 40], micro_batches=3)
    for numbers, accumulate in (([0, 2], False), ([1], True)):
        batch = network.batch(numbers)
        order = list(network.run(batch, 0.0, accumulate, poll=pytest.fail))
        assert order == network.parameters
        network.values[...] = network.gradients
        assert network.wrong() == (0 if accumulate else network.values.size)


class Clock:
    """In the place of the module ``time``: only sleeping and what the test does take time."""

    now = 100.0
    late = 0.0  #: by which a sleep is too long

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.late


def test_computing_takes_its_time_whatever_sleeping_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, polled = Clock(), []
    monkeypatch.setattr(network_module, "time", clock)
    network = Network([100, 300], micro_batches=1)
    batch = network.batch([0])
    begin = clock.now
    ready = []
    for _ in network.run(batch, 1.2, False, lambda: polled.append(clock.now)):
        ready.append(clock.now - begin)
        clock.now += 0.5  # in a call of the exchange, which keeps it from computing
    assert ready == pytest.approx([0.4 + 0.2, 0.4 + 0.2 + 0.5 + 0.6])
    assert clock.now - begin == pytest.approx(1.2 + 2 * 0.5)
    assert max(np.diff([begin, *polled])) < 0.51
    clock.late, begin = 0.03, clock.now
    for _ in network.run(batch, 1.2, False, lambda: None):
        pass
    assert clock.now - begin < 1.2 + 0.031  # not once for each layer


# -- the count --------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", range(2, 10))
@pytest.mark.parametrize("count", [10, 10_000])
def test_bytes_are_those_of_the_schedules(ranks: int, count: int) -> None:
    count *= ranks
    algorithm = choose("allreduce", ranks, 4 * count)
    plan = Plan("allreduce", algorithm, tuple(split(0, count, ranks)))
    for rank in range(ranks):
        assert 4 * schedule(plan, rank).sent == all_reduce_bytes(4 * count, ranks, rank)


def test_bytes_that_differ_are_an_error() -> None:
    right = Account(started=4.0, sent=100.0, expected=100, state=8)
    check("naive", [right, right])
    for wrong in (99.5, 104.0):
        with pytest.raises(Stop, match=rf"naive: rank 1 sent {wrong:g} bytes.* it is 100"):
            check("naive", [right, right._replace(sent=wrong)])


def test_parts_are_those_of_the_slowest_rank_in_ordinary_repetitions() -> None:
    fast, slow, stray = (5.0, 4.0, 0.5), (7.0, 2.0, 1.0), (90.0, 80.0, 5.0)
    times = np.array([[fast, slow, slow, stray], [slow, fast, fast, fast]])
    assert typical(times) == Times(*slow)


def test_buckets() -> None:
    assert bucket_limits(None, 16 * MIB) == (MIB, 2 * MIB)
    assert bucket_limits(None, 1000 * MIB) == (MIB, 25 * MIB)
    assert bucket_limits(0.5, 16 * MIB) == (MIB // 2, MIB // 2)


# -- what is told -----------------------------------------------------------------------------


def _rows(step: float = 0.1, wrong: int = 0):
    """Of 4 ranks, S = 16 MiB: exposed 30 ms of 100, alone 60, one rank 400."""
    accounts = [Account(5.0, 24.0 * MIB, 24 * MIB, 16 * MIB)] * 4
    found = []
    for mode in MODES:
        seconds = 4 * step if mode.name == "accumulation" else step
        statistics = Statistic(seconds, seconds, seconds, seconds, 9, wrong)
        steps = {mode.name: statistics, alone(mode): statistics}
        parts = {mode.name: Times(seconds, 0.03, 0.01), alone(mode): Times(0.07, 0.06, 0.01)}
        found.append(row(mode, accounts, steps, parts, 4 * step, 16 * MIB, 4))
    return found


SETTING = {
    "ranks": 4,
    "place": "4 ranks on 4 hosts",
    "mpi": "MPICH 5.0.2",
    "layers": 32,
    "bytes": 16 * MIB,
    "share_ms": 60.0,
    "micro_batches": 4,
}


def test_a_row_adds_up_and_names_its_formulas() -> None:
    found = {each.mode: each for each in _rows()}
    buckets = found["buckets"]
    assert buckets.compute_ms + buckets.update_ms + buckets.exposed_ms == pytest.approx(100)
    assert buckets.speedup == pytest.approx(4)
    assert buckets.hidden_percent == pytest.approx(50)  # 100 (60 + 70 - 100) / 60
    formulas = {name: (each.sent_formula, each.busiest_formula) for name, each in found.items()}
    assert formulas["naive"] == formulas["zero"] == (24 * MIB, 24 * MIB)
    assert formulas["sync-every"] == (96 * MIB, 96 * MIB)
    assert formulas["server"] == (24 * MIB, 48 * MIB)
    assert formulas["accumulation"] == (0, 0)
    assert found["zero"].state_formula == 4 * MIB


def test_tables_tell_every_mode_and_every_wrong_element() -> None:
    text = tables(_rows())
    for mode in MODES:
        assert sum(line.startswith(mode.name) for line in text.splitlines()) == 2
    assert "right: yes" in text
    assert "right: NO" in tables(_rows(wrong=1))
    told = heading(SETTING)
    assert "S = 16 MiB" in told and "shares of 60 ms" in told and "at most n = 4" in told


@pytest.mark.parametrize("step", [0.1, 0.0001])
def test_the_picture_is_drawn(step: float, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(_rows(step), SETTING, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mib", "0"], "'0' given, a number of at least 0.001"),
        (["--accumulate", "1.5"], "'1.5' given, a whole number"),
        (["--compute-ms", "-1"], "'-1' given"),
        (["buckets"], "unrecognized arguments"),
    ],
)
def test_bad_options(arguments: list[str], message: str) -> None:
    with pytest.raises(Stop, match=message) as caught:
        parse(arguments)
    assert caught.value.code == 2


def test_what_no_option_tells_alone() -> None:
    assert "at least two" in str(complaint(parse([]), ranks=1, crowd=1))
    assert "--mib 1e+09 needs about" in str(complaint(parse(["--mib", "1e9"]), 2, 2))
    assert "no folder" in str(complaint(parse(["--json", "/no/such/folder/a.json"]), 2, 2))
    assert complaint(parse([]), 2, 1) is None


# -- on real ranks: as it is, with a wrong element on one rank, with a wrong count --------------

PROGRAM = """
import sys
from mpi4py import MPI
from bench import steps

arguments = ["--mib", "0.25", "--layers", "3", "--compute-ms", "1", "--repeats", "2"]
codes = [steps.main([*arguments, "--json", sys.argv[1]])]

update = steps.Assign.update
def spoilt(self, values, gradients, start=0):
    update(self, values, gradients, start)
    if MPI.COMM_WORLD.rank == 0:
        values[-1:] += 1
steps.Assign.update = spoilt
codes.append(steps.main(arguments))
steps.Assign.update = update

steps.all_reduce_bytes = lambda nbytes, ranks, rank: nbytes + 4
codes.append(steps.main(arguments))
assert codes == [0, 1, 1], codes
"""


def test_every_mode_is_right_to_the_element_and_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    done = launch(2, ["-c", PROGRAM, str(path)], timeout=50).check()
    found = {each["mode"]: each for each in json.loads(path.read_text())}
    assert list(found) == list(BY_NAME)
    total = found["naive"]["bytes"]
    for each in found.values():
        assert each["wrong"] == 0
        assert each["repeats"] == 2
        assert each["state"] == each["state_formula"]
        if each["mode"] != "accumulation":
            assert each["sent"] == each["sent_formula"] > 0  # two ranks: also of short gradients
    assert found["sync-every"]["sent"] == 4 * total
    assert found["server"]["busiest"] == total
    assert found["zero"]["state"] == total / 2
    assert found["per-gradient"]["started"] == 6
    assert found["naive"]["started"] == found["buckets"]["started"]
    assert found["zero"]["started"] == 2 * found["buckets"]["started"]
    everyone = ", ".join(BY_NAME)
    assert f"WRONG RESULTS from {everyone}\n" in done.stderr
    assert "naive: rank 0 sent " in done.stderr
