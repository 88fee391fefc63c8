"""What ``steps`` has measured: its rows, as tables and as a picture. Nothing here needs MPI."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.report import aligned, size


@dataclass(frozen=True)
class Row:
    """A mode: a line of the JSON file. Times are in milliseconds, sizes in bytes.

    A step's time is the median over repetitions, each that of its slowest rank; that of its parts
    the mean over the middle half of them.
    """

    mode: str
    idea: str
    step_ms: float
    exposed_ms: float  #: starting, polling, waiting
    update_ms: float  #: 0 where servers update, which is exposed
    compute_ms: float  #: the rest
    alone_ms: float  #: what is exposed of the same step with nothing to compute
    hidden_percent: float | None
    speedup: float  #: over the first row
    started: float  #: collectives, or messages to and from servers; by the rank that starts most
    sent: float  #: the mean over ranks
    sent_formula: float
    sent_text: str
    busiest: float  #: by the rank that sends most
    busiest_formula: float
    busiest_text: str
    state: int  #: of the optimizer's, on the rank that holds most
    state_formula: float
    state_text: str
    wrong: int  #: elements, over all ranks and repetitions
    repeats: int
    min_ms: float
    q1_ms: float
    q3_ms: float


def heading(setting: Mapping[str, Any]) -> str:
    """What was measured, and how to read it."""
    n, k, share = setting["ranks"], setting["micro_batches"], setting["share_ms"]
    return f"""\
steps, float32, {setting["mpi"]}, n = {setting["place"]}
{setting["layers"]} layers, S = {size(setting["bytes"])} of gradients, K = {k} micro-batches

Every mode takes the same optimizer step: n shares of {share:g} ms each are computed, one by each
rank. Computing is emulated (the rank sleeps and polls); exchange and update are real.

step      median over repetitions, each that of its slowest rank; parts are means over the
          middle half of them
speedup   over accumulation, where one rank does the work of all; at most n = {n}
update    of the values, by each rank; servers' updates are exposed, as workers wait for them
exposed   time in which a rank could only communicate: starting, polling, waiting
compute   the rest of the step
alone     exposed communication of the same step when there is nothing to compute
hidden    (t_comm + t_comp - t_both) / min(t_comm, t_comp), where t_comm = alone,
          t_comp = compute + update, t_both = t_comp + exposed
started   collectives, or messages to and from servers
sent      measured; to the byte what a count of the messages says, or this run would have failed
"""


def tables(rows: Sequence[Row]) -> str:
    """One of times, one of what was started, sent and held."""

    def column(title: str, text: Callable[[Row], str]) -> list[str]:
        return [title, *map(text, rows)]

    def beside(name: str) -> list[list[str]]:
        """A number of bytes, and its formula."""

        def text(row: Row) -> str:
            return getattr(row, f"{name}_text")

        longest = max(len(text(row)) for row in rows)
        return [
            column("measured", lambda row: size(round(getattr(row, name)))),
            column("formula", lambda row: size(round(getattr(row, f"{name}_formula")))),
            column("", lambda row: f"= {text(row)}".ljust(longest + 2) if text(row) else ""),
        ]

    def exchanged(text: Callable[[Row], str]) -> Callable[[Row], str]:
        return lambda row: text(row) if row.started else "-"

    longest = max(len(row.mode) for row in rows)
    names = column("mode".ljust(longest), lambda row: row.mode.ljust(longest))
    times = {
        "": [names],
        "time of a step, ms": [
            column("step", lambda row: f"{row.step_ms:.1f}"),
            column("speedup", lambda row: f"{row.speedup:.2f}x"),
            column("compute", lambda row: f"{row.compute_ms:.1f}"),
            column("update", lambda row: f"{row.update_ms:.1f}" if row.update_ms else "-"),
            column("exposed", exchanged(lambda row: f"{row.exposed_ms:.1f}")),
        ],
        "communication": [
            column("alone, ms", exchanged(lambda row: f"{row.alone_ms:.1f}")),
            column("hidden", exchanged(lambda row: percent(row.hidden_percent))),
        ],
    }
    moved = {
        "": [names, column("started", exchanged(lambda row: f"{row.started:g}"))],
        "sent, mean of all ranks": beside("sent"),
        "sent by the busiest rank": beside("busiest"),
        "state of the optimizer": beside("state"),
    }
    right = all(row.wrong == 0 for row in rows)
    return "\n".join(
        [
            *aligned(times),
            "",
            *aligned(moved),
            "",
            f"right: {'yes' if right else 'NO'} (every element, repetition after repetition; "
            f"{rows[0].repeats} of them)",
        ]
    )


def percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.0f} %"


# Of Okabe and Ito's palette, and two greys: told apart by colour-blind readers.
_PARTS = (
    ("compute, emulated", "#C3CBD3", "compute_ms"),
    ("update", "#7B8794", "update_ms"),
    ("exposed communication", "#D55E00", "exposed_ms"),
)
_SENT = "#0072B2"
_HEIGHT = 0.46


def draw(rows: Sequence[Row], setting: Mapping[str, Any], path: Path) -> None:
    """A bar for each mode: what its step is made of, and what its busiest rank sends."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.0, 6.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2.2, 1), sharey=True)
    places = range(len(rows))
    # The first bar may be so much longer than the others that it would leave these no room.
    first, others = rows[0].step_ms, max(row.step_ms for row in rows[1:])
    limit = 1.2 * max(first, others) if first < 1.8 * others else 1.5 * others
    ends = [0.0] * len(rows)
    for label, colour, part in _PARTS:
        lengths = [getattr(row, part) for row in rows]
        left.barh(places, lengths, _HEIGHT, left=ends, color=colour, label=label)
        ends = [end + length for end, length in zip(ends, lengths)]
    for place, row in zip(places, rows):
        text = f"{row.step_ms:.0f} ms" + (f"   {row.speedup:.1f}x" if place else "")
        if ends[place] > limit:
            left.text(0.985 * limit, place, f"{text} \u2192", va="center", ha="right")
        else:
            left.text(ends[place] + 0.012 * limit, place, text, va="center")
        left.text(
            0.004 * limit,
            place - 0.37,
            row.idea,
            va="center",
            fontsize=8,
            color="#555555",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
        )
    left.set_xlim(0, limit)
    left.set_ylim(len(rows) - 0.6, -0.7)
    left.set_yticks(places, [row.mode for row in rows])
    left.set_xlabel("time of a step (ms), and how many times faster than the first")
    left.set_title("What a step is made of", loc="left", fontsize=11)
    figure.legend(loc="outside lower left", frameon=False, ncols=3)

    sent = [row.busiest / 2**20 for row in rows]
    right.barh(places, sent, _HEIGHT, color=_SENT)
    for place, row, mib in zip(places, rows, sent):
        more = row.busiest > 1.01 * row.busiest_formula  # short gradients, see steps.py
        formula = f" {'>' if more else '='} {row.busiest_text}" if row.busiest else ""
        text = f"{mib:.1f}".removesuffix(".0") + formula
        right.text(mib + 0.02 * max(sent), place, text, va="center")
    right.set_xlim(0, 1.75 * max(sent))
    right.set_xlabel("MiB sent by the busiest rank")
    right.set_title("What its network carries", loc="left", fontsize=11)
    right.tick_params(axis="y", length=0)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="x", color="#e6e6e6", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"One optimizer step, n = {setting['place']}, S = {size(setting['bytes'])} of gradients, "
        f"K = {setting['micro_batches']} micro-batches",
        x=0.012,
        ha="left",
        fontsize=12.5,
    )
    figure.savefig(path, dpi=120)
