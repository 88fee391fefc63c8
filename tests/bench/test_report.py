"""Rows from statistics, the table from rows, and the file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench import allgather, allreduce, report
from bench.case import Benchmark, Case, Row
from bench.measure import Statistic


def times(seconds: float, wrong: int = 0) -> Statistic:
    return Statistic(seconds, seconds / 2, seconds * 0.75, seconds * 1.5, 7, wrong)


def rows(
    benchmark: Benchmark = allreduce.BENCHMARK, *, ranks: int = 4, nbytes: int = 8_000_000,
    **statistics: Statistic,
) -> list[Row]:  # fmt: skip
    named = {name.replace("_", "-"): value for name, value in statistics.items()}
    case = Case(run=lambda: None, wrong=lambda: 0, in_place=True)
    return report.rows(
        benchmark, dict.fromkeys(named, case), named, ranks=ranks, nbytes=nbytes,
        dtype="float32", op="sum", device="cpu", mpi="MPICH 5.0",
    )  # fmt: skip


def test_a_row() -> None:
    ring, mpi, out = rows(ring=times(0.002), mpi=times(0.004), mpi_out=times(0.003))
    assert (ring.collective, ring.contender, ring.ranks, ring.bytes) == (
        "allreduce", "ring", 4, 8_000_000,
    )  # fmt: skip
    assert ring.time_us == 2000.0
    assert ring.algbw == 4.0  # GB/s
    assert ring.busbw == 6.0
    assert ring.correct and ring.mpi == "MPICH 5.0"
    assert ring.speedup == 1.5  # over the faster of MPI's two
    assert mpi.speedup is None and out.speedup is None


def test_no_ratio_without_anything_to_compare_with() -> None:
    assert rows(ring=times(1.0))[0].speedup is None


def test_all_gather_has_no_operation_and_half_the_bus_factor() -> None:
    (row,) = rows(allgather.BENCHMARK, ring=times(0.002))
    assert row.op == "none"
    assert row.busbw == 3.0


def test_wrong_elements_make_a_row_incorrect() -> None:
    (row,) = rows(ring=times(1.0, wrong=1))
    assert not row.correct and row.wrong == 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(8, "8 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (2**26, "64 MiB"),
     (2**26 + 8, "64 MiB"), (3 * 2**40, "3072 GiB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert report.size(nbytes) == text


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0.5, "0.50 us"), (12.345, "12.35 us"), (123.45, "123.5 us"), (1500, "1.50 ms"),
     (250_000, "250.0 ms"), (3_000_000, "3.00 s"), (5e9, "5000.0 s")],
)  # fmt: skip
def test_durations(microseconds: float, text: str) -> None:
    assert report.duration(microseconds) == text


def test_the_table_is_aligned_and_complete() -> None:
    small = rows(nbytes=1024, ring=times(1e-5), mpi=times(2e-5))
    large = rows(nbytes=2**26, ring=times(0.05), mpi=times(0.1, wrong=12345))
    lines = report.table([*small, *large]).splitlines()
    assert len(lines) == 4
    titles, heads, first, second = lines
    assert " ring " in titles and " mpi " in titles and titles.endswith("speedup")
    assert heads.split() == (
        ["size", "repeats"] + ["time", "algbw", "busbw", "right"] * 2 + ["ring"]
    )
    assert first.split() == [
        "1", "KiB", "7", "10.00", "us", "0.102", "0.154", "yes",
        "20.00", "us", "0.051", "0.077", "yes", "2.00x",
    ]  # fmt: skip
    assert "12345 wrong" in second
    assert len(heads) == len(first) == len(second)
    # Columns are flush right: each heading ends where its cells end.
    for word in ("size", "repeats", "time", "algbw", "busbw"):
        end = heads.index(word) + len(word)
        assert first[end - 1] != " " and second[end - 1] != " "
        assert first[end : end + 1] == second[end : end + 1] == " "


def test_the_table_says_n_a_for_one_rank() -> None:
    (row,) = rows(ranks=1, ring=times(1e-5))
    assert row.busbw is None
    assert "n/a" in report.table([row])


def test_json_has_one_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text("old")
    written = [*rows(ring=times(0.002), mpi=times(0.004)), *rows(ranks=1, ring=times(1.0))]
    report.write_json(path, [asdict(row) for row in written])
    found = json.loads(path.read_text())
    assert [row["contender"] for row in found] == ["ring", "mpi", "ring"]
    assert set(found[0]) >= {
        "collective", "contender", "ranks", "bytes", "time_us", "algbw", "busbw", "correct", "mpi",
    }  # fmt: skip
    assert found[0]["busbw"] == 6.0 and found[2]["busbw"] is None
    assert len(path.read_text().splitlines()) == len(found) + 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.plot import draw, formats

    path = tmp_path / "bus.svg"
    assert path.suffix in formats()
    draw([*rows(nbytes=1024, ring=times(1e-5)), *rows(nbytes=2**20, ring=times(1e-3))], path)
    text = path.read_text()
    assert text.startswith("<?xml") and "bus bandwidth" in text
