"""Several launches of one benchmark, summed up: ``python -m bench.launches run*.json``.

Times of two launches can't be compared on a machine that others use; the ratio
within each launch can. So speedups are computed in each launch, and here their
median over launches is taken, with the smallest and the largest beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.report import aligned, duration, size

#: What has to be equal for rows of several launches to count as the same measurement.
SAME = ("collective", "ranks", "mpi", "dtype", "op", "bytes", "contender", "in_place")


def summary(launches: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """A table of the medians over ``launches``, each the rows of one JSON file."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for rows in launches:
        for row in rows:
            groups.setdefault(tuple(row[name] for name in SAME), []).append(row)
    lines = [("what", "ranks", "MPI", "size", "contender", "launches", "time", "speedup", "range")]
    for rows in groups.values():
        first = rows[0]
        speedups = sorted(row["speedup"] for row in rows if row["speedup"] is not None)
        lines.append(
            (
                first["collective"],
                str(first["ranks"]),
                first["mpi"],
                size(first["bytes"]),
                first["contender"],
                str(len(rows)),
                duration(median(row["time_us"] for row in rows)),
                f"{median(speedups):.2f}x" if speedups else "",
                f"{speedups[0]:.2f} - {speedups[-1]:.2f}" if speedups else "",
            )
        )
    wrong = sum(not row["correct"] for rows in launches for row in rows)
    verdict = f"{wrong} of these rows have wrong elements" if wrong else "every element was right"
    return "\n".join([*aligned({"": list(zip(*lines))})[1:], "", verdict])


def main(arguments: Sequence[str]) -> int:
    if not arguments or any(argument.startswith("-") for argument in arguments):
        print(f"{__doc__}\nusage: python -m bench.launches FILE.json [FILE.json ...]")
        return 0 if set(arguments) & {"-h", "--help"} else 2
    try:
        launches = [json.loads(Path(name).read_text()) for name in arguments]
        print(summary(launches))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"python -m bench.launches: no file of rows: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
