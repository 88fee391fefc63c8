"""Watching without touching: instruments are told what happens, and change nothing.

``Instrument`` does nothing at every event; derive from it and override what is
wanted, then ``engine.instruments.append(...)``. ``Ledger`` adds up, ``Trace``
draws: its file opens in Perfetto or chrome://tracing, one row per rank.
"""

from __future__ import annotations

import json
import time
from typing import Any


class Instrument:
    """What the engine and the trainer tell; every method a no-op."""

    def started(self, label: str, key: int) -> None:
        """A collective began. ``key`` is the same when it ends."""

    def ended(self, label: str, key: int, nbytes_sent: int) -> None:
        """A collective is over here; this rank has sent ``nbytes_sent`` for it."""

    def span(self, label: str, begin: float, end: float) -> None:
        """The caller spent ``begin`` to ``end`` (``time.perf_counter`` seconds) on ``label``."""


class Ledger(Instrument):
    """Sums: bytes sent and collectives ended."""

    def __init__(self) -> None:
        self.nbytes_sent = 0
        self.collectives = 0

    def ended(self, label: str, key: int, nbytes_sent: int) -> None:
        self.nbytes_sent += nbytes_sent
        self.collectives += 1


class Trace(Instrument):
    """Events in Chrome's trace format; times in microseconds since ``origin``."""

    def __init__(self, rank: int, origin: float | None = None) -> None:
        self.rank = rank
        self._origin = time.perf_counter() if origin is None else origin
        self.events: list[dict[str, Any]] = [
            {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
        ]

    def started(self, label: str, key: int) -> None:
        self._event(label, "b", time.perf_counter(), id=key, cat="exchange")

    def ended(self, label: str, key: int, nbytes_sent: int) -> None:
        args = {"bytes sent": nbytes_sent}
        self._event(label, "e", time.perf_counter(), id=key, cat="exchange", args=args)

    def span(self, label: str, begin: float, end: float) -> None:
        self._event(label, "X", begin, dur=(end - begin) * 1e6, tid=0)

    def _event(self, label: str, phase: str, at: float, **more: Any) -> None:
        stamp = (at - self._origin) * 1e6
        self.events.append({"name": label, "ph": phase, "ts": stamp, "pid": self.rank, **more})


def document(traces: list[list[dict[str, Any]]]) -> str:
    """The trace file of all ranks' events."""
    return json.dumps({"traceEvents": [event for trace in traces for event in trace]})
