"""What slow workers cost: ``mpirun -n 5 python -m bench.stragglers``.

The last rank serves, the others work. *One slow worker* takes several times as long for every
step; or each is *slow at times*, in one step of ten, at random. All work until the same time is
over, in each mode of the parameter server in turn, in one launch. Work is emulated by
sleeping, as a processor waits for its device: so the figures are those of the waiting that the
modes impose, and not of how many cores there are.

Counted is what was *applied*, a worker's step being one update. At the end every element of
the parameters has to be what so many updates make of it, on every worker.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.options import Parser, Stop, at_least, size
from bench.report import aligned, write_json

#: (title, mode, staleness)
MODES = (("sync", "sync", None), ("ssp, 2 ahead", "ssp", 2), ("async", "async", None))

SCENARIOS = ("one slow worker", "slow at times")
_AT_TIMES = 0.1  # of the steps

#: Elements' value is minus the number of updates: exact as long as these are.
_MOST = 2**24


class CountDown:
    """An optimizer that subtracts the gradients: ones count the updates."""

    def __init__(self, count: int, dtype: np.dtype) -> None: ...

    def step(self, parameters: np.ndarray, gradients: np.ndarray) -> None:
        parameters -= gradients


def race(
    comm: Any, scenario: str, mode: str, staleness: int | None, options: Any
) -> dict[str, Any]:
    """One mode, for ``options.seconds``. Collective; the same on every rank."""
    from mpiring import ParameterServer

    parameters = np.zeros(options.size // 4, np.float32)
    ones = np.ones_like(parameters)
    slow = comm.size - 2
    draw = np.random.default_rng(comm.rank).random

    def work() -> None:
        late = comm.rank == slow if scenario == SCENARIOS[0] else draw() < _AT_TIMES
        time.sleep(options.compute_ms / 1e3 * (options.factor if late else 1))

    with ParameterServer(
        comm, [parameters], optimizer=CountDown, mode=mode, staleness=staleness, servers=1
    ) as server:
        comm.Barrier()
        begin = time.perf_counter()
        while server.is_worker and time.perf_counter() - begin < options.seconds:
            work()
            server.push(0, ones)
            server.step()
    summary = server.summary()
    updates = sum(summary.steps.values())
    wrong = int((parameters != -updates).any()) if server.is_worker else 0
    if comm.allreduce(wrong) or summary.updates_lost or updates > _MOST:
        raise AssertionError(f"{mode}: {updates} updates were pushed, and are not what was applied")
    return {
        "scenario": scenario,
        "mode": mode,
        "allowed": staleness,
        "workers": len(server.workers),
        "updates_per_second": updates / options.seconds,
        "fewest_steps": min(summary.steps.values()),
        "most_steps": max(summary.steps.values()),
        "staleness": dict(sorted(summary.staleness.items())),
        "seconds": options.seconds,
        "factor": options.factor,
        "compute_ms": options.compute_ms,
        "bytes": parameters.nbytes,
    }


def mean(counts: Mapping[int, int]) -> float:
    return sum(value * count for value, count in counts.items()) / max(1, sum(counts.values()))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for each mode; the first of a scenario is what the others are compared with."""
    lines = [("", "", "updates/s", "of sync", "most steps", "fewest", "staleness", "largest")]
    first = rows[0]
    for (title, _, _), row in zip(MODES * len(SCENARIOS), rows):
        if row["scenario"] != first["scenario"]:
            first = row
        lines.append(
            (
                row["scenario"] if row is first else "",
                title,
                f"{row['updates_per_second']:.1f}",
                f"{row['updates_per_second'] / first['updates_per_second']:.2f}x",
                str(row["most_steps"]),
                str(row["fewest_steps"]),
                f"{mean(row['staleness']):.2f}",
                str(max(row["staleness"], default=0)),
            )
        )
    return "\n".join(aligned({"": list(zip(*lines))})[1:])


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Updates per second of each mode, and how stale these updates were."""
    from matplotlib.figure import Figure

    colours = ("#0072B2", "#E69F00", "#D55E00")
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1))
    width = 0.8 / len(MODES)
    stale = [row["staleness"] for row in rows[: len(MODES)]]
    most = max(max(counts, default=0) for counts in stale)
    for number, ((title, _, _), colour, counts) in enumerate(zip(MODES, colours, stale)):
        shift = (number - (len(MODES) - 1) / 2) * width
        rates = [row["updates_per_second"] for row in rows[number :: len(MODES)]]
        bars = left.bar(np.arange(len(rates)) + shift, rates, width, color=colour, label=title)
        left.bar_label(bars, [f"{rate:.0f}" for rate in rates], padding=2)
        shares = [100 * counts.get(i, 0) / sum(counts.values()) for i in range(most + 1)]
        right.bar(np.arange(most + 1) + shift, shares, width, color=colour, label=title)
    first = rows[0]
    left.set_xticks(
        range(len(SCENARIOS)),
        [
            f"one of {first['workers']} workers\n{first['factor']:g} times slower",
            f"each {first['factor']:g} times slower\nin one step of ten",
        ],
    )
    left.set_ylabel("updates per second")
    left.set_title("What waiting for slow workers costs", loc="left")
    left.margins(y=0.12)
    right.set_xlabel("staleness: versions between pull and update")
    right.set_ylabel("share of updates (%)")
    right.set_title("What not waiting costs (one slow worker)", loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, axis="y", color="#dddddd", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.title.set_fontsize(11)
    right.legend(frameon=False)
    figure.savefig(path, dpi=160)


def parse(arguments: Sequence[str]) -> Any:
    parser = Parser(
        prog="python -m bench.stragglers",
        description="Updates per second of each mode of the parameter server, one worker being "
        "slow, and each being slow at times. Start three ranks or more: the last one serves.",
    )
    add = parser.add_argument
    add("--factor", type=at_least(1, float), default=5.0, help="slower by (default: 5)")
    add("--compute-ms", type=at_least(0, float), default=10.0, help="of a step (default: 10)")
    add("--seconds", type=at_least(0.1, float), default=4.0, help="for each mode (default: 4)")
    add("--size", type=size, default=2**18, help="of the parameters (default: 256K)")
    add("--json", type=Path, metavar="FILE", help="write the rows there too")
    add("--plot", type=Path, metavar="FILE.png", help="draw them (matplotlib)")
    options = parser.parse_args(arguments)
    if options.size < 4:
        parser.error(f"--size: {options.size} given, at least 4 bytes needed")
    return options


def main(arguments: Sequence[str]) -> int:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    try:
        options = parse(arguments)
        if comm.size < 3:
            raise Stop(f"{comm.size} ranks given, needed are a server and two workers\n", 2)
    except Stop as stop:
        if comm.rank == 0:
            print(stop.text, end="", file=sys.stderr if stop.code else sys.stdout)
        return stop.code
    rows = [
        race(comm, scenario, mode, staleness, options)
        for scenario in SCENARIOS
        for _, mode, staleness in MODES
    ]
    if comm.rank == 0:
        name, version = MPI.get_vendor()
        print(
            f"stragglers, {name} {'.'.join(map(str, version))}: {comm.size - 1} workers and a "
            f"server, {options.seconds:g} s for each mode; a step takes {options.compute_ms:g} ms, "
            f"a slow one {options.factor:g} times as long\n"
        )
        print(table(rows), flush=True)
        if options.json:
            write_json(options.json, rows)
        if options.plot:
            draw(rows, options.plot)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
