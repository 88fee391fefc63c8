"""``python -m mpiring.explain allreduce --ranks 4 --count 10``: a collective, written out and proved.

Needs no MPI: it prints what every rank would do round by round, the bytes that
each sends beside the formula, and the verdict of the proof over all ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

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
    print(
        f"{plan.collective} by {plan.algorithm}: {options.ranks} ranks, "
        f"{options.count} elements, {where}\n"
    )
    shown = schedules[: options.columns]
    print(table(shown))
    if len(shown) < len(schedules):
        print(f"... and {len(schedules) - len(shown)} ranks more (--columns)")
    print()
    print(_sent(plan, schedules, options.itemsize))
    try:
        prove_collective(
            plan.collective, schedules, plan.chunks, in_place=plan.in_place, root=plan.root
        )
    except ScheduleError as error:
        print(f"\nREFUSED: {error}")
        return 1
    rounds = max((len(each.rounds) for each in schedules), default=0)
    print(
        f"\nproved over all {options.ranks} ranks in {rounds} rounds: every message is matched, no "
        "deadlock without\nbuffering, nothing is read while it is written, every contribution is "
        "in the result exactly once"
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
    """A line per distinct amount: bytes that a rank sends, and the ring's formula."""
    lines = ["rank   sends", "-----  -----"]
    for each in schedules:
        formula = ""
        if plan.algorithm == "ring":
            bound = elements_sent(plan.collective, each.rank, plan.chunks) * itemsize
            formula = f"   formula {bound:,} B" if len(schedules) > 1 else ""
        lines.append(f"{each.rank:>5}  {each.sent * itemsize:,} B{formula}")
    if plan.algorithm == "ring":
        turns = "2(n-1)/n" if plan.collective == "allreduce" else "(n-1)/n"
        lines.append(f"       {turns} S where n divides S; chunks differ by one element else")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mpiring.explain",
        description="Write out a collective as the table of what every rank does in every round, "
        "and prove it.",
        epilog=">1 data[0:3]: send to rank 1; <1: receive from it; + reduce into; = copy; * scale",
    )
    p.add_argument("collective", choices=catalog.COLLECTIVES)
    p.add_argument("--ranks", type=int, default=4)
    p.add_argument("--count", type=int, default=10, help="elements over all ranks (10)")
    p.add_argument("--itemsize", type=int, default=4, help="bytes of an element (4)")
    p.add_argument("--segment", type=int, help="elements that travel at once within a chunk")
    p.add_argument("--algorithm", default="ring", help="ring (default), doubling, auto")
    p.add_argument("--out-of-place", action="store_true")
    p.add_argument("--root", type=int, default=0, help="of bcast (0)")
    p.add_argument("--columns", type=int, default=_WIDE, help=f"ranks in the table ({_WIDE})")
    return p


if __name__ == "__main__":
    sys.exit(main())
