"""``python -m bench`` on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import BENCHMARKS
from tests.launch import Installation, launch

QUICK = ["--repeats", "2", "--warmup", "1", "--max", "1K"]


@pytest.mark.parametrize("in_place", ["--in-place", "--no-in-place"])
@pytest.mark.parametrize("name", ["allreduce", "reduce_scatter", "allgather"])
def test_every_element_is_right(
    mpi: Installation, name: str, in_place: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    contenders = [each for each in BENCHMARKS[name].contenders if each != "by-host"]  # of a GPU
    chosen = ["--contenders", ",".join(contenders), in_place, "--json", str(path)]
    done = launch(3, ["-m", "bench", name, *QUICK, *chosen], mpi=mpi, timeout=50).check()
    found = json.loads(path.read_text())
    assert all(row["correct"] for row in found)
    assert [row["contender"] for row in found[: len(contenders)]] == contenders
    assert {row["ranks"] for row in found} == {3}
    assert done.stdout.count("GB/s") == 1  # the table is rank 0's


def test_persistent_is_compared_with_plain() -> None:
    done = launch(2, ["-m", "bench", "persistent", "--repeats", "3"], timeout=50).check()
    assert "time of plain over the contender's" in done.stdout
    assert "1 KiB" in done.stdout and done.stdout.rstrip().endswith("x")


CORRUPTING = """
import sys
from dataclasses import replace
from bench import __main__ as main
from bench import allreduce, collectives

class Corrupting(collectives.Binder):
    def plain(self):
        case = super().plain()
        def run():
            case.run()
            if self.problem.world.rank == 1:
                self.work[-1] += 1
        return replace(case, run=run)

collectives.Binder = Corrupting
sys.exit(main.main())
"""


def test_one_wrong_element_on_one_rank_is_found(mpi: Installation) -> None:
    arguments = ["allreduce", *QUICK, "--min", "1K", "--contenders", "plain,mpi"]
    done = launch(2, ["-c", CORRUPTING, *arguments], mpi=mpi, timeout=50)
    assert done.returncode == 1
    assert "2 wrong" in done.stdout  # one in each of two repetitions
    assert "WRONG RESULTS from plain:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["allreduce", "--min", "x"], "'x' is no size"),
        (["allreduce", "--json", "/no/such/folder/a.json"], "no folder /no/such/folder"),
        (["allreduce", "--max", "4096G"], "--max 4096 GiB needs about"),
    ],
)
def test_a_mistake_is_reported_once_and_before_anything_is_measured(
    arguments: list[str], message: str
) -> None:
    done = launch(2, ["-m", "bench", *arguments], timeout=50)
    assert done.returncode != 0
    assert done.stderr.count(message) == 1
    assert done.stdout == ""


def test_help_is_printed_once() -> None:
    done = launch(2, ["-m", "bench", "allreduce", "--help"], timeout=50).check()
    assert done.stdout.count("usage:") == 1
