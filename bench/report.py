"""From statistics to rows, and from rows to a table and a JSON file. Nothing here needs MPI."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.bandwidth import algorithm_bandwidth
from bench.case import Benchmark, Case, Row
from bench.measure import Statistic


def rows(
    benchmark: Benchmark,
    cases: Mapping[str, Case],
    statistics: Mapping[str, Statistic],
    *,
    ranks: int,
    nbytes: int,
    dtype: str,
    op: str,
    device: str,
    mpi: str,
) -> list[Row]:
    """One row for each contender at one size of ``nbytes``."""
    yardsticks = [statistics[name].median for name in benchmark.yardsticks if name in statistics]
    factor = benchmark.bus_factor(ranks)
    result = []
    for name, times in statistics.items():
        algbw = algorithm_bandwidth(nbytes, times.median) / 1e9
        compared = yardsticks and name not in benchmark.yardsticks
        result.append(
            Row(
                collective=benchmark.name,
                contender=name,
                ranks=ranks,
                bytes=nbytes,
                time_us=_rounded(times.median * 1e6),
                algbw=_rounded(algbw),
                busbw=None if factor is None else _rounded(algbw * factor),
                correct=times.wrong == 0,
                mpi=mpi,
                dtype=dtype,
                op=op if benchmark.reduces else "none",
                device=device,
                in_place=cases[name].in_place,
                repeats=times.repeats,
                min_us=_rounded(times.minimum * 1e6),
                q1_us=_rounded(times.lower_quartile * 1e6),
                q3_us=_rounded(times.upper_quartile * 1e6),
                wrong=times.wrong,
                speedup=_rounded(min(yardsticks) / times.median) if compared else None,
            )
        )
    return result


def _rounded(value: float) -> float:
    """Six digits: more than any clock is good for, and no tail of noise in the file."""
    return float(f"{value:.6g}")


def size(nbytes: int) -> str:
    """``8 B``, ``2 KiB``, ``64 MiB``: powers of 1024, at most one decimal."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.1f}".removesuffix(".0") + f" {unit}"


def duration(microseconds: float) -> str:
    """Three or four digits and ``us``, ``ms`` or ``s``."""
    value, unit = microseconds, "us"
    for larger in ("ms", "s"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.{1 if value >= 100 else 2}f} {unit}"


def table(rows: Sequence[Row]) -> str:
    """Sizes down the side, contenders across, speedups last."""
    by_size: dict[int, dict[str, Row]] = {}
    for row in rows:
        by_size.setdefault(row.bytes, {})[row.contender] = row
    contenders = list(dict.fromkeys(row.contender for row in rows))
    columns = {name: [line[name] for line in by_size.values()] for name in contenders}

    first = columns[contenders[0]]
    groups = {
        "": [
            _column("size", first, lambda row: size(row.bytes)),
            _column("repeats", first, lambda row: str(row.repeats)),
        ]
    }
    for name, cells in columns.items():
        groups[name] = [
            _column("time", cells, lambda row: duration(row.time_us)),
            _column("algbw", cells, lambda row: f"{row.algbw:.3f}"),
            _column("busbw", cells, lambda row: "n/a" if row.busbw is None else f"{row.busbw:.3f}"),
            _column("right", cells, lambda row: "yes" if row.correct else f"{row.wrong} wrong"),
        ]
    compared = [name for name in contenders if columns[name][0].speedup is not None]
    if compared:
        groups["speedup"] = [
            _column(name, columns[name], lambda row: f"{row.speedup:.2f}x") for name in compared
        ]
    return "\n".join(aligned(groups))


def _column(title: str, rows: Sequence[Row], text: Callable[[Row], str]) -> list[str]:
    return [title, *map(text, rows)]


def aligned(groups: Mapping[str, Sequence[Sequence[str]]]) -> list[str]:
    """Right-aligned columns in titled groups, two spaces between columns, three between groups."""
    titles, bodies = [], []
    for title, columns in groups.items():
        widths = [max(map(len, column)) for column in columns]
        missing = len(f" {title} ") - sum(widths) - 2 * (len(widths) - 1)
        widths[0] += max(0, missing)
        body = [
            "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
            for line in zip(*columns, strict=True)
        ]
        titles.append(f" {title} ".center(len(body[0]), "-") if title else " " * len(body[0]))
        bodies.append(body)
    return ["   ".join(line).rstrip() for line in (titles, *zip(*bodies, strict=True))]


def write_json(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """An array of objects, one a line. A file that was there stays whole until the new one is."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    os.replace(partial, path)
