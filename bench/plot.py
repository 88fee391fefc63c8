"""Bus bandwidth over size, one line per contender, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.case import Row
from bench.report import size

#: Okabe and Ito's palette, told apart by colour-blind readers and in grey by the markers.
STYLES: dict[str, dict[str, Any]] = {
    "ring": {"color": "#0072B2", "marker": "o"},
    "persistent": {"color": "#009E73", "marker": "D"},
    "plain": {"color": "#CC79A7", "marker": "^"},
    "colocated": {"color": "#009E73", "marker": "D"},
    "server": {"color": "#D55E00", "marker": "s"},
    "mpi": {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    "mpi-out": {"color": "#555555", "marker": "v", "linestyle": "--"},
}


def formats() -> list[str]:
    """The suffixes of the files that can be written."""
    return [f".{kind}" for kind in sorted(Figure().canvas.get_supported_filetypes())]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw rows of one run, of at least two ranks, into ``path`` (its suffix tells the format).

    The band around a line spans the quartiles of the repetitions.
    """
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.subplots()
    for contender in dict.fromkeys(row.contender for row in rows):
        line = [row for row in rows if row.contender == contender]
        sizes = [row.bytes for row in line]
        bus = [row.busbw or 0.0 for row in line]
        style = STYLES.get(contender, {})
        axes.plot(sizes, bus, label=contender, linewidth=1.8, markersize=5, **style)
        axes.fill_between(
            sizes,
            [busbw * row.time_us / row.q3_us for row, busbw in zip(line, bus, strict=True)],
            [busbw * row.time_us / row.q1_us for row, busbw in zip(line, bus, strict=True)],
            color=style.get("color"),
            alpha=0.15,
            linewidth=0,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value))))
    axes.xaxis.set_major_locator(LogLocator(base=16))
    axes.xaxis.set_minor_locator(LogLocator(base=4))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("size")
    axes.set_ylabel("bus bandwidth (GB/s)")
    row = rows[0]
    what = ", ".join([row.dtype, *([row.op] if row.op != "none" else []), f"{row.ranks} ranks"])
    axes.set_title(f"{row.collective} ({what}, {row.mpi})", loc="left", fontsize=11)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper left", handlelength=3)
    figure.savefig(path, dpi=200)
