"""``python -m mpiring.explain allreduce --ranks 4``: a collective, written out and proved.

Needs no MPI: it prints what every rank would do round by round, the bytes that
each sends beside the formula, and the verdict of the proof over all ranks.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from itertools import groupby

from mpiring.errors import ArgumentError, ScheduleError
from mpiring.schedule import catalog
from mpiring.schedule.catalog import Plan
from mpiring.schedule.chunks import split
from mpiring.schedule.ops import Schedule
from mpiring.schedule.render import table
from mpiring.schedule.verify import elements_sent, prove_collective

_WIDE = 8  # ranks beyond which the table no longer fits a screen


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        plan = _plan(options)
    except ArgumentError as error:
        sys.stderr.write(f"mpiring.explain: {error}\n")
        return 2
    schedules = [catalog.schedule(plan, rank) for rank in range(options.ranks)]
    where = "in place" if plan.in_place else "out of place"
    ranks = f"{options.ranks} rank{'s' * (options.ranks > 1)}"
    print(f"{plan.collective} by {plan.algorithm}: {ranks}, {options.count} elements, {where}\n")
    shown = schedules[: options.columns]
    print(table(shown))
    if len(shown) < len(schedules):
        print(f"... and {len(schedules) - len(shown)} more ranks (--columns)")
    print()
    print(_sent(plan, schedules, options.itemsize), flush=True)  # the proof may take a while
    try:
        prove_collective(
            plan.collective, schedules, plan.chunks, in_place=plan.in_place, root=plan.root
        )
    except ScheduleError as error:
        print(f"\nREFUSED: {error}")
        return 1
    rounds = max((len(each.rounds) for each in schedules), default=0)
    print(
        f"\nproved for {ranks}, {rounds} rounds: every message is matched, no deadlock even "
        "without\nbuffering, nothing is read while it is written, every contribution is in the "
        "result once"
    )
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    for name, low in (("ranks", 1), ("count", 0), ("columns", 1), ("itemsize", 1)):
        if getattr(options, name) < low:
            raise ArgumentError(f"--{name}: {getattr(options, name)} given; allowed: from {low}")
    if options.segment is not None and options.segment < 1:
        raise ArgumentError(f"--segment: {options.segment} given; allowed: elements from 1")
    if not 0 <= options.root < options.ranks:
        raise ArgumentError(f"--root: {options.root} given; allowed: 0 to {options.ranks - 1}")
    catalog.check_algorithm(options.algorithm)
    algorithm = catalog.choose(
        options.collective, options.ranks, options.count * options.itemsize, options.algorithm
    )
    chunks = split(0, options.count, options.ranks)
    in_place = not options.out_of_place or options.collective == "bcast"
    return Plan(options.collective, algorithm, chunks, in_place, options.segment, root=options.root)


def _sent(plan: Plan, schedules: Sequence[Schedule], itemsize: int) -> str:
    """What each rank sends, ranks that send alike on one line, beside what the formula says."""
    ring = plan.algorithm == "ring"
    rows = [("sent by", "bytes", "formula" if ring else "")]
    for (sent, formula), group in groupby(schedules, lambda each: _bytes(plan, each, itemsize)):
        ranks = [each.rank for each in group]
        name = f"ranks {ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else f"rank {ranks[0]}"
        rows.append((name, f"{sent:,}", f"{formula:,}" if ring else ""))
    wide = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = [f"{a:<{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}".rstrip() for a, b, c in rows]
    if ring:
        n, total = len(schedules), schedules[0].count * itemsize
        turns, factor = (2, "2(n-1)/n") if plan.collective == "allreduce" else (1, "(n-1)/n")
        lines.append(
            f"{factor} S = {turns * (n - 1) * total / n:,.10g} on average; S = {total:,} bytes"
        )
    return "\n".join(lines)


def _bytes(plan: Plan, schedule: Schedule, itemsize: int) -> tuple[int, int]:
    """What a rank's schedule sends, and what a ring's has to."""
    formula = 0
    if plan.algorithm == "ring":
        formula = elements_sent(plan.collective, schedule.rank, plan.chunks)
    return schedule.sent * itemsize, formula * itemsize


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mpiring.explain",
        description="Write out a collective as the table of what every rank does in every round, "
        "and prove it.",
        epilog="In the table:\n"
        "  >1 data[0:3]                  send these elements of the array to rank 1\n"
        "  <1 scratch[0:3]               receive from rank 1\n"
        "  +  scratch[0:3] -> data[0:3]  reduce into; = copies, * divides for a mean\n"
        "Ops of one round may overlap; data is the array, input the send buffer, scratch ours.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("collective", choices=catalog.COLLECTIVES)
    p.add_argument("--ranks", type=int, default=4, metavar="N", help="4 by default")
    p.add_argument("--count", type=int, default=10, metavar="N", help="elements of the whole (10)")
    p.add_argument("--itemsize", type=int, default=4, metavar="N", help="bytes of an element (4)")
    p.add_argument(
        "--segment", type=int, metavar="N", help="elements that travel at once within a chunk"
    )
    p.add_argument(
        "--algorithm", default="ring", metavar="NAME", help="ring (default), doubling, auto"
    )
    p.add_argument("--out-of-place", action="store_true", help="send and receive buffers differ")
    p.add_argument("--root", type=int, default=0, metavar="R", help="of bcast (0)")
    p.add_argument(
        "--columns", type=int, default=_WIDE, metavar="N", help=f"ranks in the table ({_WIDE})"
    )
    return p


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # its output often ends in a pager or in head
    sys.exit(main())
