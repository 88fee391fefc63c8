"""The benchmarks of the parameter server, on real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from bench.stragglers import MODES, SCENARIOS, draw, mean, table
from tests.launch import Installation, launch


def test_every_element_and_every_byte_is_right(mpi: Installation, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    quick = ["--repeats", "2", "--warmup", "1", "--min", "1K", "--max", "1M", "--factor", "1024"]
    done = launch(
        3, ["-m", "bench", "exchange", *quick, "--json", str(path)], mpi=mpi, timeout=50
    ).check()
    found = json.loads(path.read_text())
    assert [row["contender"] for row in found[:3]] == ["ring", "colocated", "server"]
    assert all(row["correct"] for row in found)
    assert "1 MiB, server: the busiest server sent and received 2 MiB a step" in done.stdout
    assert re.search(
        r"1 MiB, colocated: the busiest server sent and received 1\.3 MiB", done.stdout
    )


def test_a_wrong_sum_is_found() -> None:
    program = """
import sys
from bench import __main__ as main
from bench import exchange

def step(self, parameters, gradients):
    parameters[...] = gradients
    parameters[0] += 1

exchange.Assign.step = step
sys.exit(main.main())
"""
    arguments = ["exchange", "--repeats", "2", "--warmup", "1", "--min", "1K", "--max", "1K"]
    done = launch(2, ["-c", program, *arguments], timeout=50)
    assert done.returncode == 1
    assert "WRONG RESULTS from colocated, server:" in done.stderr


def test_stragglers(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    quick = ["--seconds", "0.3", "--compute-ms", "2", "--size", "1K"]
    done = launch(3, ["-m", "bench.stragglers", *quick, "--json", str(path)], timeout=50).check()
    rows = json.loads(path.read_text())
    assert [row["mode"] for row in rows] == [mode for _, mode, _ in MODES] * len(SCENARIOS)
    for row in rows:
        assert row["workers"] == 2
        assert row["updates_per_second"] * 0.3 == pytest.approx(sum(row["staleness"].values()))
        if row["mode"] == "sync":
            assert row["most_steps"] - row["fewest_steps"] <= 1
    assert "stragglers, " in done.stdout


def test_too_few_ranks_for_stragglers() -> None:
    done = launch(2, ["-m", "bench.stragglers"], timeout=50)
    assert done.returncode == 2
    assert done.stderr.count("needed are a server and two workers") == 1


ROWS = [
    {
        "scenario": scenario,
        "workers": 4,
        "factor": 5.0,
        "updates_per_second": rate,
        "most_steps": 40,
        "fewest_steps": 30,
        "staleness": {0: 3, 2: 1},
    }
    for scenario, rates in zip(SCENARIOS, ((50.0, 60.0, 100.0), (80.0, 90.0, 160.0)))
    for rate in rates
]


def test_each_scenario_is_compared_with_its_own_sync() -> None:
    lines = table(ROWS).splitlines()
    assert [re.findall(r"\d\.\d\dx", line) for line in lines[1:]] == [
        ["1.00x"], ["1.20x"], ["2.00x"], ["1.00x"], ["1.12x"], ["2.00x"],
    ]  # fmt: skip
    assert mean({0: 3, 2: 1}) == 0.5


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(ROWS, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
