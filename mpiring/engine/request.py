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
        for i, each in enumerate(requests):
            if not isinstance(each, Request):
                raise ArgumentError(f"requests: number {i} is no request of mpiring, but {each!r}")
        open_ones = [i for i, r in enumerate(requests) if r._begun]
        if not open_ones:
            mpi = sys.modules.get("mpi4py.MPI")
            return -1 if mpi is None else mpi.UNDEFINED
        engine = requests[open_ones[0]]._engine
        engine.wait(lambda: any(requests[i]._over() for i in open_ones))
        index = next(i for i in open_ones if requests[i]._over())
        requests[index].Wait()
        return index

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
