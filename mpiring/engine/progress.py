"""The one place where anything moves.

``poll`` advances every execution that is under way. It is called from inside
waits, between the layers of a backward pass, at each start of a collective, and
by a progress thread where one is asked for: always the same function.

Executions belong to the engine from start to end, so that a handle or an array
which the caller drops stays alive as long as MPI may touch it. An *actor* is
anything else that moves when polled, for as long as it is attached: a server.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Protocol

from mpiring.engine.execution import Execution
from mpiring.task import Completion
from mpiring.trace import Instrument

#: Fruitless polls in a row after which a waiting rank looks at the clock.
_PATIENCE = 256

#: Looks at one execution alone before a wait polls everything: some microseconds.
_BRIEF = 64


class Actor(Protocol):
    """Something that moves when polled."""

    def advance(self) -> bool:
        """Move as far as possible without waiting; whether anything moved."""
        ...


class ProgressEngine:
    """Everything under way in this process.

    ``yields`` makes each fruitless poll of a wait give the processor away: right
    where ranks outnumber cores, since the rank that is waited for needs one.
    ``idle`` replaces that by a call (virtual ranks use it).
    """

    def __init__(self, *, yields: bool = False, idle: Callable[[], None] | None = None) -> None:
        self.yields = yields
        self.polls = 0
        self.instruments: list[Instrument] = []
        self._idle = idle
        self._lock = threading.RLock()
        self._active: dict[Execution, None] = {}
        self._actors: list[Actor] = []
        self._kept: list[object] = []
        self._thread: threading.Thread | None = None
        self._watchers: list[Callable[[float], None]] = []
        self._advancing = False  # an execution, just now
        self._fruitless = 0  # polls in a row that moved nothing, though something is under way
        self._since = 0.0  # when their number was _PATIENCE

    @property
    def lock(self) -> threading.RLock:
        """Held while anything moves: by the thread that polls, and by the caller's."""
        return self._lock

    @property
    def active(self) -> int:
        """Executions under way."""
        return len(self._active)

    def start(self, execution: Execution, gates: Iterable[Completion] = ()) -> None:
        """Take over an execution, and get it going as far as it gets without waiting."""
        with self._lock:
            execution.start(gates)
            self._fruitless = 0
            for instrument in self.instruments:
                instrument.started(execution.label, id(execution))
            self._active[execution] = None
            self._advance(execution)

    def finish(self, execution: Execution) -> None:
        """Poll until ``execution`` is over. What it met is in ``execution.error``."""
        if not (self.yields or self._idle):
            # The short wait of a short message: nothing else needs to move meanwhile.
            for _ in range(_BRIEF):
                if execution.finished:
                    return
                with self._lock:
                    if not execution.finished:
                        self._advance(execution)
        self.wait(lambda: execution.finished)

    def poll(self) -> bool:
        """Advance everything under way; whether anything moved. Never blocks."""
        with self._lock:
            self.polls += 1
            moved = False
            for execution in tuple(self._active):
                moved |= self._advance(execution)
            for actor in tuple(self._actors):
                moved |= actor.advance()
            if moved or not (self._active or self._actors):
                self._fruitless = 0
            else:
                self._fruitless += 1
                if self._fruitless % _PATIENCE == 0:
                    self._look()
            return moved

    def _look(self) -> None:
        """Tell the watchers for how long nothing has moved."""
        now = time.monotonic()
        if self._fruitless == _PATIENCE:
            self._since = now
        else:
            seconds, fruitless, self._fruitless = now - self._since, self._fruitless, 0
            for watcher in tuple(self._watchers):
                watcher(seconds)
            self._fruitless = fruitless  # unless one raised: then time begins anew

    def attach(self, actor: Actor) -> None:
        """Poll ``actor`` too; what its ``advance`` raises is raised by whoever polls."""
        with self._lock:
            self._actors.append(actor)

    def detach(self, actor: Actor) -> None:
        with self._lock:
            self._actors.remove(actor)

    def wait(self, until: Callable[[], bool]) -> None:
        """Poll until ``until()`` holds."""
        fruitless = 0
        while not until():
            if self.poll():
                fruitless = 0
                continue
            fruitless += 1
            if self._idle is not None:
                self._idle()
            elif self.yields or fruitless > _PATIENCE:
                os.sched_yield()

    def watch(self, watcher: Callable[[float], None]) -> None:
        """Call ``watcher(seconds without movement)`` now and then while nothing moves.

        What it raises is raised by whoever polls.
        """
        self._watchers.append(watcher)

    def unwatch(self, watcher: Callable[[float], None]) -> None:
        self._watchers.remove(watcher)

    def fail(self, execution: Execution, error: BaseException) -> None:
        """End an execution with an error; what it posted to MPI is taken back or kept alive."""
        with self._lock:
            execution.error = error
            execution.finished = True
            if self._active.pop(execution, execution) is None:
                execution.cancel()
                self.keep(execution)

    def keep(self, thing: object) -> None:
        """Keep alive for good what MPI may still read or write."""
        self._kept.append(thing)

    def start_thread(self) -> None:
        """Poll from a thread of its own, from now to ``stop_thread``."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpiring", daemon=True)
            self._thread.start()

    def stop_thread(self) -> None:
        """End that thread, if there is one: none may be inside MPI when MPI is finalised."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while self._thread is not None:
            # Polling is a short piece of Python: without a pause between two, the
            # thread would take the interpreter lock from the caller's computing.
            moved, busy = False, bool(self._active or self._actors)
            if busy:
                with suppress(Exception):  # for whoever waits, in a thread of the caller's
                    moved = self.poll()
            time.sleep(0 if moved else 50e-6 if busy else 1e-3)

    def _advance(self, execution: Execution) -> bool:
        if self._advancing:  # a reduction of the caller's polls: its turn is not over
            return False
        self._advancing = True
        try:
            moved = execution.advance()
        except BaseException as error:
            # Left in the middle of a round, it could only go on with a wrong one.
            self.fail(execution, error)
            if not isinstance(error, Exception):
                raise
            return True
        finally:
            self._advancing = False
        if execution.finished:
            self._active.pop(execution, None)
            for instrument in self.instruments:
                instrument.ended(execution.label, id(execution), execution.nbytes_sent)
        return moved


_engine: ProgressEngine | None = None


def default_engine() -> ProgressEngine:
    """The engine that all communicators of this process share."""
    global _engine
    if _engine is None:
        _engine = ProgressEngine()
    return _engine
