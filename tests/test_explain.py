"""A collective on paper: the table, the bytes, the verdict."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import pytest

from mpiring import explain
from mpiring.schedule import catalog
from mpiring.schedule.ops import Schedule, Send
from tests.launch import ROOT


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = explain.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def sent(out: str) -> dict[int, tuple[int, ...]]:
    """Bytes that each rank sends, and the formula's where there is one."""
    result = {}
    for first, last, numbers in re.findall(r"^ranks? (\d+)(?:-(\d+))? ([ \d,]+)$", out, re.M):
        for rank in range(int(first), int(last or first) + 1):
            result[rank] = tuple(int(text.replace(",", "")) for text in numbers.split())
    return result


@pytest.mark.parametrize("collective", catalog.COLLECTIVES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 2, 28])
@pytest.mark.parametrize("more", [(), ("--out-of-place", "--segment", "3")])
def test_every_collective_is_proved(
    capsys: pytest.CaptureFixture[str],
    collective: str,
    ranks: int,
    count: int,
    more: tuple[str, ...],
) -> None:
    given = ("--ranks", str(ranks), "--count", str(count), *more)
    code, out, err = run(capsys, collective, *given)
    assert (code, err) == (0, "")
    assert re.search(f"proved for {ranks} ranks?, ", out)
    header = out.splitlines()[2].split("  ")
    assert [text.strip() for text in header if text] == [
        "round",
        *(f"rank {rank}" for rank in range(ranks)),
    ]
    amounts = sent(out)
    assert sorted(amounts) == list(range(ranks))
    if collective != "bcast":
        turns = 2 if collective == "allreduce" else 1
        assert sum(mine for mine, _ in amounts.values()) == turns * (ranks - 1) * 4 * count
        assert all(mine == formula for mine, formula in amounts.values())
        if count % ranks == 0:
            assert {mine for mine, _ in amounts.values()} == {
                turns * (ranks - 1) * 4 * count // ranks
            }


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "allreduce", "--ranks", "2", "--count", "4", "--itemsize", "8")
    rows = [" ".join(line.split()) for line in out.splitlines()]
    assert rows[0] == "allreduce by ring: 2 ranks, 4 elements, in place"
    assert rows[4:10] == [
        "0 >1 data[2:4] >0 data[0:2]",
        "<1 scratch[0:2] <0 scratch[0:2]",
        "1 + scratch[0:2] -> data[0:2] + scratch[0:2] -> data[2:4]",
        "2 >1 data[0:2] >0 data[2:4]",
        "<1 data[2:4] <0 data[0:2]",
        "",
    ]
    assert "2(n-1)/n S = 32 on average; S = 32 bytes" in rows


def test_more_ranks_than_columns(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "allgather", "--ranks", "12", "--columns", "3")
    assert code == 0
    assert "rank 2" in out.splitlines()[2] and "rank 3" not in out.splitlines()[2]
    assert "... and 9 more ranks (--columns)" in out
    assert sorted(sent(out)) == list(range(12))


@pytest.mark.parametrize(("algorithm", "name"), [("doubling", "doubling"), ("auto", "doubling")])
def test_other_algorithms(capsys: pytest.CaptureFixture[str], algorithm: str, name: str) -> None:
    code, out, _ = run(capsys, "allreduce", "--algorithm", algorithm)
    assert code == 0
    assert out.startswith(f"allreduce by {name}: ")
    assert set(sent(out).values()) == {(2 * 10 * 4,)}  # twice the whole array on 4 ranks


def test_a_schedule_that_is_wrong_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = catalog.schedule

    def forgetful(plan: Any, rank: int) -> Schedule:
        """Rank 1 leaves out its first send."""
        schedule = right(plan, rank)
        first, *rest = schedule.rounds
        if rank == 1:
            first = tuple(op for op in first if not isinstance(op, Send))
        return Schedule.of(rank, schedule.size, schedule.count, [first, *rest])

    monkeypatch.setattr(catalog, "schedule", forgetful)
    code, out, _ = run(capsys, "allreduce")
    assert code == 1
    assert "REFUSED: " in out and "proved" not in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--ranks", "0"), "--ranks: 0 given; allowed: from 1"),
        (("--count", "-1"), "--count: -1 given; allowed: from 0"),
        (("--itemsize", "0"), "--itemsize: 0 given"),
        (("--columns", "0"), "--columns: 0 given"),
        (("--segment", "0"), "--segment: 0 given"),
        (("--root", "4"), "--root: 4 given; allowed: 0 to 3"),
        (("--root", "-1"), "--root: -1 given; allowed: 0 to 3"),
        (("--algorithm", "magic"), "'magic' is none of"),
    ],
)
def test_mistakes(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    code, out, err = run(capsys, "bcast", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("mpiring.explain: ") and named in err and err.count("\n") == 1


def test_it_needs_neither_mpi_nor_numpy_nor_a_reader_to_the_end() -> None:
    program = """
import runpy, sys
sys.argv = ["explain", "allreduce", "--ranks", "16", "--count", "100000"]
sys.modules["numpy"] = sys.modules["mpi4py"] = None
runpy.run_module("mpiring.explain", run_name="__main__")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(9) == b"allreduce"
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    process.wait()
