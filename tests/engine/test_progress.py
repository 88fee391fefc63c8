"""The engine on its own: what it tells watchers, how it ends things, its thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mpiring.engine.execution import Execution
from mpiring.engine.progress import ProgressEngine
from mpiring.errors import StallError

#: Polls after which an engine has looked at the clock, and told its watchers.
LONG = 1024


class Step:
    """An execution of one step, over when it is told."""

    label = "step"
    nbytes_sent = 0

    def __init__(self) -> None:
        self.finished, self.over, self.cancelled = True, False, False
        self.error: BaseException | None = None

    def start(self, gates: Any) -> None:
        self.finished = self.over = False

    def advance(self) -> bool:
        if isinstance(self.over, Exception):
            raise self.over
        self.finished = bool(self.over)
        return self.finished

    def cancel(self) -> None:
        self.cancelled = True


def begun(engine: ProgressEngine) -> Any:
    step: Any = Step()
    engine.start(step)
    return step


def poll(engine: ProgressEngine, times: int = LONG) -> None:
    for _ in range(times):
        engine.poll()


def test_watchers_hear_of_a_standstill_only() -> None:
    engine = ProgressEngine()
    heard: list[float] = []
    engine.watch(heard.append)
    poll(engine)
    assert not heard  # nothing is under way
    step = begun(engine)
    poll(engine)
    assert heard and heard == sorted(heard)
    step.over = True
    poll(engine)
    heard.clear()
    poll(engine)
    assert not heard
    engine.unwatch(heard.append)


def test_a_start_is_a_movement() -> None:
    engine = ProgressEngine()
    heard: list[float] = []
    engine.watch(heard.append)
    begun(engine)
    for _ in range(10):
        poll(engine, 200)
        begun(engine)
    assert not heard


def test_a_watcher_may_end_the_wait_and_time_begins_anew() -> None:
    engine = ProgressEngine()
    told: list[float] = []

    def watcher(seconds: float) -> None:
        told.append(seconds)
        if len(told) == 2:
            raise StallError("enough")

    engine.watch(watcher)
    step = begun(engine)
    with pytest.raises(StallError):
        engine.wait(lambda: step.finished)
    poll(engine, 300)  # a first look at the clock, no more
    assert len(told) == 2
    poll(engine)
    assert len(told) > 2


def test_what_fails_is_taken_back_and_kept() -> None:
    engine = ProgressEngine()
    step, other = begun(engine), begun(engine)
    step.over = ZeroDivisionError("in the middle")
    engine.poll()
    assert isinstance(step.error, ZeroDivisionError)
    assert step.finished and step.cancelled and not other.cancelled
    assert engine.active == 1 and step in engine._kept
    engine.fail(step, ValueError())  # again: nothing new
    assert engine._kept == [step]
    engine.finish(step)


def test_the_thread_polls_until_it_is_stopped() -> None:
    engine = ProgressEngine()
    engine.start_thread()
    engine.start_thread()
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("mpiring") == 1
    step = begun(engine)
    step.over = True
    while not step.finished:
        pass
    engine.stop_thread()
    engine.stop_thread()
    assert "mpiring" not in [thread.name for thread in threading.enumerate()]


def test_an_error_of_a_watcher_does_not_end_the_thread() -> None:
    engine = ProgressEngine()
    told = threading.Event()

    def watcher(seconds: float) -> None:
        told.set()
        raise StallError("nobody waits")

    engine.watch(watcher)
    engine.start_thread()
    step = begun(engine)
    assert told.wait(30)
    step.over = True
    while not step.finished:
        pass
    engine.stop_thread()


def test_an_execution_takes_back_only_what_is_open() -> None:
    cancelled = []

    class Receive:
        immediate = False

        def __init__(self, name: str, over: bool) -> None:
            self.name, self.over = name, over

        def start(self) -> None:
            pass

        def done(self) -> bool:
            return self.over

        def cancel(self) -> None:
            cancelled.append(self.name)

    class Local(Receive):
        immediate = True

    execution = Execution.__new__(Execution)
    tasks = [Receive("first", True), Receive("second", False), Local("local", True)]
    execution._tasks, execution._next, execution._pending = [tasks], 0, []
    execution.cancel()
    assert not cancelled
    # As ``advance`` leaves it: what was started first is over.
    execution._next, execution._pending = 1, [tasks[1].done]
    execution.cancel()
    assert cancelled == ["second"]
