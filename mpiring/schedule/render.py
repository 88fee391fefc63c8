"""A schedule as a table that a person reads: a row for each round, a column for each rank."""

from __future__ import annotations

from collections.abc import Sequence

from mpiring.schedule.ops import Copy, Op, Recv, RecvReduce, Reduce, Scale, Schedule, Send


def table(schedules: Sequence[Schedule]) -> str:
    """The rank x round table of all ranks' schedules.

    ``>1 data[0:3]`` sends to rank 1, ``<1`` receives from it, ``+`` reduces into (``<1 +`` what
    it receives),
    ``=`` copies into, ``*`` scales; an arrow points to where elements go.
    """
    rounds = max((len(s.rounds) for s in schedules), default=0)
    header = ["round", *(f"rank {s.rank}" for s in schedules)]
    lines: list[list[str]] = []
    for number in range(rounds):
        cells = [
            [_tell(op) for op in s.rounds[number]] if number < len(s.rounds) else []
            for s in schedules
        ]
        for i in range(max(len(cell) for cell in cells)):
            label = str(number) if i == 0 else ""
            lines.append([label, *(cell[i] if i < len(cell) else "" for cell in cells)])
    widths = [max(len(row[i]) for row in (header, *lines)) for i in range(len(header))]
    rule = ["-" * width for width in widths]
    return "\n".join(_join(row, widths) for row in (header, rule, *lines))


def _join(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip()


def _tell(op: Op) -> str:
    match op:
        case Send(peer, src):
            return f">{peer} {src}"
        case Recv(peer, dst):
            return f"<{peer} {dst}"
        case RecvReduce(peer, dst, scaled, src):
            own = f"{src} -> " if src else ""
            return f"<{peer} + {own}{dst}{' *' if scaled else ''}"
        case Reduce(src, dst, scaled):
            return f"+  {src} -> {dst}{' *' if scaled else ''}"
        case Copy(src, dst):
            return f"=  {src} -> {dst}"
        case Scale(dst):
            return f"*  {dst}"
