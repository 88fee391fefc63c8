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
        self._exchange(label, "b", key)

    def ended(self, label: str, key: int, nbytes_sent: int) -> None:
        self._exchange(label, "e", key, args={"bytes sent": nbytes_sent})

    def span(self, label: str, begin: float, end: float) -> None:
        self._event(label, "X", begin, dur=(end - begin) * 1e6)

    def _exchange(self, label: str, phase: str, key: int, **more: Any) -> None:
        # "id" alone would join events of different ranks that happen to have the same key.
        identity = {"local": f"{key:#x}"}
        self._event(label, phase, time.perf_counter(), cat="exchange", id2=identity, **more)

    def _event(self, label: str, phase: str, at: float, **more: Any) -> None:
        stamp = (at - self._origin) * 1e6
        event = {"name": label, "ph": phase, "ts": stamp, "pid": self.rank, "tid": 0, **more}
        self.events.append(event)


def document(traces: list[list[dict[str, Any]]]) -> str:
    """The trace file of all ranks' events."""
    return json.dumps({"traceEvents": [event for trace in traces for event in trace]})
