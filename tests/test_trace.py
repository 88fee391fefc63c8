"""Instruments on an engine that works, and the file that a browser draws."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np

from mpiring.communicator import Communicator
from mpiring.engine.progress import ProgressEngine
from mpiring.simulation.world import VirtualTransport, World
from mpiring.trace import Instrument, Ledger, Trace, document


def exchange(transport: VirtualTransport, engine: ProgressEngine) -> tuple[Trace, Ledger]:
    """Two all-reduces that overlap, one persistent, which is started twice; then a span."""
    comm = Communicator(transport, engine=engine, algorithm="ring")
    trace, ledger = Trace(transport.rank, origin=0.0), Ledger()
    engine.instruments += [trace, ledger, Instrument()]
    persistent = comm.Allreduce_init("in place", np.ones(12, "f4"))
    for _ in range(2):
        persistent.Start()
        other = comm.Iallreduce("in place", np.ones(30, "f8"))
        persistent.Wait()
        other.Wait()
    trace.span("computing", 2.0, 2.5)
    return trace, ledger


def test_the_ledger_adds_up() -> None:
    for _, ledger in World(3).run(exchange):
        assert ledger.collectives == 4
        # Of 12 x 4 and 30 x 8 bytes, twice each, a ring sends 2(n-1)/n: n divides both counts.
        assert ledger.nbytes_sent == 2 * (48 + 240) * 4 // 3


def test_the_file_is_what_a_browser_draws() -> None:
    traces = [trace for trace, _ in World(3).run(exchange)]
    events = json.loads(document([trace.events for trace in traces]))["traceEvents"]
    for rank in range(3):
        mine = [event for event in events if event["pid"] == rank]
        assert Counter(event["ph"] for event in mine) == {"M": 1, "b": 4, "e": 4, "X": 1}
        (named,) = (event for event in mine if event["ph"] == "M")
        assert (named["name"], named["args"]) == ("process_name", {"name": f"rank {rank}"})
        (span,) = (event for event in mine if event["ph"] == "X")
        assert (span["name"], span["ts"], span["dur"], span["tid"]) == ("computing", 2e6, 5e5, 0)
        check_pairs([event for event in mine if event["ph"] in "be"])
    assert {event["pid"] for event in events} == {0, 1, 2}


def check_pairs(events: list[dict[str, Any]]) -> None:
    """Every exchange that begins ends, later, under the same name; the same id again only then."""
    under_way: dict[str, dict[str, Any]] = {}
    for event in events:
        # Scoped to the process: ranks may have equal keys, and an "id" would be one for all.
        assert "id" not in event
        key = event["id2"]["local"]
        assert isinstance(key, str) and isinstance(event["cat"], str)
        if event["ph"] == "b":
            assert key not in under_way
            under_way[key] = event
        else:
            begin = under_way.pop(key)
            assert begin["name"] == event["name"] and begin["ts"] <= event["ts"]
            assert event["args"]["bytes sent"] > 0
    assert not under_way
