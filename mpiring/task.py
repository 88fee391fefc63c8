"""The two protocols between the engine and everything that takes time.

A *completion* can be asked whether something is over, and never blocks. A
*task* is work bound to its arguments once: it can be started any number of
times, and is a completion of its latest start. An MPI request, a GPU kernel and
a call of ``numpy.add`` look the same to the engine through these.
"""

from __future__ import annotations

from typing import Protocol


class Completion(Protocol):
    """Something that will be over at some time."""

    def done(self) -> bool:
        """Whether it is over. Never blocks; stays true once true."""
        ...


class Task(Protocol):
    """Work bound to its arguments, to be started once or many times."""

    #: True when the work is over as soon as ``start`` returns; nobody asks ``done`` then.
    immediate: bool

    def start(self) -> None:
        """Begin. Not called again before ``done`` has returned true."""
        ...

    def done(self) -> bool:
        """Whether the work begun by the latest ``start`` is over. Never blocks."""
        ...


class Ready:
    """A completion of something that is already over."""

    def done(self) -> bool:
        return True


READY = Ready()
