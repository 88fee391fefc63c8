"""Handles of collectives, with mpi4py's names: Wait, Test, Start, Free, Waitall..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpiring.engine.execution import Execution
from mpiring.engine.progress import ProgressEngine, default_engine
from mpiring.errors import ArgumentError
from mpiring.task import Completion


class Request:
    """A collective under way, or (persistent) ready to be started again.

    Dropping it is safe: the engine finishes what was begun. Any mpiring call
    moves it on; ``Wait`` does until it is over. An error met on the way, such as
    a disagreement between ranks, is raised by ``Wait`` or ``Test``.
    """

    def __init__(
        self,
        engine: ProgressEngine,
        execution: Execution,
        gates: Callable[[], Iterable[Completion]],
        *,
        persistent: bool = False,
        on_end: Callable[[BaseException | None], BaseException | None] | None = None,
        on_free: Callable[[], None] | None = None,
    ) -> None:
        """``on_end`` is told the error met on the way, or None, and returns the one to raise.

        ``on_free`` is called when a persistent one is let go of.
        """
        self._engine = engine
        self._execution: Execution | None = execution
        self._gates = gates
        self._on_end, self._on_free = on_end, on_free
        self.persistent = persistent
        self._begun = not persistent  #: and not yet waited for

    def Start(self) -> Request:
        """Begin a persistent collective (again). Every rank does, sooner or later."""
        execution = self._execution
        if execution is None or not self.persistent:
            raise ArgumentError("Start: not a persistent request, or already freed or failed")
        if not execution.finished or execution.error is not None:
            plight = "has failed" if execution.finished else "is still under way"
            raise ArgumentError(f"Start: {execution.label} {plight}; Wait for it first")
        self._engine.start(execution, self._gates())
        self._begun = True
        return self

    def Test(self, status: Any = None) -> bool:
        """Move things on, and tell whether this one is over. Never blocks."""
        execution = self._execution
        if execution is None:
            return True
        if not execution.finished:
            self._engine.poll()
            if not execution.finished:
                return False
        self._end(execution)
        return True

    def Wait(self, status: Any = None) -> bool:
        """Return once it is over: the result is in place, for the host and any GPU stream."""
        execution = self._execution
        if execution is not None:
            if not execution.finished:
                self._engine.finish(execution)
            self._end(execution)
        return True

    def wait(self, status: Any = None) -> None:
        """As ``Wait``; mpi4py's lower-case form, which returns the message: here None."""
        self.Wait()

    def test(self, status: Any = None) -> tuple[bool, None]:
        """As ``Test``, in mpi4py's lower-case form: (flag, message)."""
        return self.Test(), None

    def Free(self) -> None:
        """Let go of it. A collective under way is finished all the same."""
        if self._execution is not None:
            try:
                self._end(self._execution, forget=True)
            finally:
                if self._on_free is not None:
                    self._on_free()

    def __bool__(self) -> bool:
        return self._execution is not None

    @classmethod
    def Startall(cls, requests: Iterable[Request]) -> None:
        for request in requests:
            request.Start()

    @classmethod
    def Waitall(cls, requests: Iterable[Request], statuses: Any = None) -> bool:
        """Wait for all; of several errors the first in order is raised.

        mpi4py's own requests may be among them.
        """
        errors = []
        for request in requests:
            try:
                if isinstance(request, Request):
                    request.Wait()
                else:  # not by its Wait, in which nothing of ours would move
                    default_engine().wait(request.Test)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    @classmethod
    def Waitany(cls, requests: Sequence[Request], status: Any = None) -> int:
        """Wait for one of those that are under way, end it, and return its index.

        Where none is: MPI.UNDEFINED, as MPI says it.
        """
        active = _active(requests)
        _wait_for_any(active)
        return _first_over(active)

    @classmethod
    def Testany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool]:
        """As ``Waitany`` without waiting: (index, whether one is over, or none under way)."""
        active = _active(requests)
        _poll_for_any(active)
        index = _first_over(active)
        return index, not active or index in active

    @classmethod
    def Waitsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """Wait for one, end all that are over, and return their indices; None where none is under
        way. Of several errors the first in order is raised."""
        active = _active(requests)
        _wait_for_any(active)
        return _all_over(active)

    @classmethod
    def Testsome(cls, requests: Sequence[Request], statuses: Any = None) -> list[int] | None:
        """As ``Waitsome`` without waiting, so the list may be empty."""
        active = _active(requests)
        _poll_for_any(active)
        return _all_over(active)

    @classmethod
    def Testall(cls, requests: Sequence[Request], statuses: Any = None) -> bool:
        """Whether all are over; none of them is ended before all are."""
        for request in requests:
            if not request._over():
                request._engine.poll()
                if not request._over():
                    return False
        return cls.Waitall(requests)

    @classmethod
    def waitall(cls, requests: Sequence[Request], statuses: Any = None) -> list[None]:
        """As ``Waitall``, in mpi4py's lower-case form: the messages."""
        cls.Waitall(requests)
        return [None] * len(requests)

    @classmethod
    def testall(
        cls, requests: Sequence[Request], statuses: Any = None
    ) -> tuple[bool, list[None] | None]:
        """As ``Testall``, in mpi4py's lower-case form: (flag, messages)."""
        over = cls.Testall(requests)
        return over, [None] * len(requests) if over else None

    @classmethod
    def waitany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, None]:
        """As ``Waitany``, in mpi4py's lower-case form: (index, message)."""
        return cls.Waitany(requests), None

    @classmethod
    def testany(cls, requests: Sequence[Request], status: Any = None) -> tuple[int, bool, None]:
        """As ``Testany``, in mpi4py's lower-case form: (index, flag, message)."""
        return (*cls.Testany(requests), None)

    @classmethod
    def waitsome(
        cls, requests: Sequence[Request], statuses: Any = None
    ) -> tuple[list[int] | None, list[None] | None]:
        """As ``Waitsome``, in mpi4py's lower-case form: (indices, messages)."""
        return _with_messages(cls.Waitsome(requests))

    @classmethod
    def testsome(
        cls, requests: Sequence[Request], statuses: Any = None
    ) -> tuple[list[int] | None, list[None] | None]:
        """As ``Testsome``, in mpi4py's lower-case form: (indices, messages)."""
        return _with_messages(cls.Testsome(requests))

    def Cancel(self) -> None:
        """MPI allows no collective to be cancelled, since other ranks wait for it."""
        raise ArgumentError("Cancel: a collective cannot be cancelled; Wait for it, or drop it")

    cancel = Cancel

    def _over(self) -> bool:
        return self._execution is None or self._execution.finished

    def _end(self, execution: Execution, forget: bool = False) -> None:
        if self.persistent and execution.error is None and not forget:
            self._begun = False
            return
        error, execution.error = execution.error, None
        first, self._begun = self._begun, False  # another thread may have waited too
        if error is not None or not self.persistent or forget:
            self._execution = None
            if first and self._on_end is not None:
                error = self._on_end(error)
        if error is not None:
            raise error


def _active(requests: Sequence[Request]) -> dict[int, Request]:
    """Those that are under way, or over and not yet ended, by index."""
    for i, each in enumerate(requests):
        if not isinstance(each, Request):
            raise ArgumentError(f"requests: number {i} is no request of mpiring, but {each!r}")
    return {i: each for i, each in enumerate(requests) if each._begun}


def _wait_for_any(active: dict[int, Request]) -> None:
    for request in active.values():
        request._engine.wait(lambda: any(each._over() for each in active.values()))
        return


def _poll_for_any(active: dict[int, Request]) -> None:
    for request in active.values():
        if request._over():
            return
        request._engine.poll()


def _first_over(active: dict[int, Request]) -> int:
    """End the first that is over, and tell its index; MPI.UNDEFINED if none is."""
    for index, request in active.items():
        if request._over():
            request.Wait()
            return index
    mpi = sys.modules.get("mpi4py.MPI")
    return -1 if mpi is None else mpi.UNDEFINED


def _all_over(active: dict[int, Request]) -> list[int] | None:
    over = [index for index, request in active.items() if request._over()]
    Request.Waitall([active[index] for index in over])
    return over if active else None


def _with_messages(
    indices: list[int] | None,
) -> tuple[list[int] | None, list[None] | None]:
    return indices, None if indices is None else [None] * len(indices)
