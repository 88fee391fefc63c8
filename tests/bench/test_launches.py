"""Several launches summed up: ratios within each, medians over all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.launches import main, summary


def launch(speedup: float, *, time_us: float = 10.0, correct: bool = True) -> list[dict]:
    shared = {
        "collective": "allreduce", "ranks": 2, "mpi": "MPICH 5.0", "dtype": "float32",
        "op": "sum", "bytes": 2**24, "in_place": True,
    }  # fmt: skip
    ring = {"contender": "ring", "time_us": time_us, "speedup": speedup, "correct": correct}
    mpi = {"contender": "mpi", "time_us": 20.0, "speedup": None, "correct": True}
    return [{**shared, **ring}, {**shared, **mpi}]


def test_the_median_of_the_ratios_not_the_ratio_of_the_medians() -> None:
    # A slow launch (everything takes longer) has a ratio like the others.
    text = summary([launch(1.5), launch(1.7, time_us=100.0), launch(1.2)])
    ring = next(line for line in text.splitlines() if " ring " in line)
    assert ring.split() == [
        "allreduce", "2", "MPICH", "5.0", "16", "MiB", "ring", "3", "10.00", "us",
        "1.50x", "1.20", "-", "1.70",
    ]  # fmt: skip
    assert "every element was right" in text


def test_other_measurements_are_kept_apart() -> None:
    other = [{**row, "mpi": "Open MPI 5.0"} for row in launch(3.0)]
    text = summary([launch(1.5), other])
    assert text.count(" ring ") == 2 and "1.50x" in text and "3.00x" in text


def test_wrong_elements_are_not_forgotten() -> None:
    assert "1 of these rows have wrong elements" in summary(
        [launch(1.5), launch(2.0, correct=False)]
    )


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(launch(1.5)))
    assert main([str(path)]) == 0
    assert "1.50x" in capsys.readouterr().out
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out
    assert main([str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
