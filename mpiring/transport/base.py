"""What the engine asks of the thing that moves bytes between ranks."""

from __future__ import annotations

from typing import Any, Protocol

from mpiring.task import Task


class Receive(Task, Protocol):
    """A receive. Once taken back it is over, and may be started again."""

    def cancel(self) -> None:
        """Take back the latest start, which nothing will match any more."""
        ...


class Transport(Protocol):
    """Point-to-point messages between ``size`` ranks.

    Views are one-dimensional contiguous arrays. Two messages between the same
    pair with the same slot match in the order in which they are started. A
    receive that completes with another number of bytes than its view holds
    raises TransportError.

    A transport may also have ``some(receives)``: a call that tells the places of those
    persistent receives that have ended since it was called last, where that is cheaper than
    to ask each; None where it is not.
    """

    rank: int
    size: int
    slots: int  #: allowed are slots from 0, below this

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        """A task that sends ``view`` to ``peer``."""
        ...

    def recv(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Receive:
        """A task that receives into ``view`` from ``peer``."""
        ...

    def duplicate(self) -> Transport:
        """The same ranks, with messages that never meet those of this one. Collective."""
        ...

    def free(self) -> None:
        """Give back what ``duplicate`` took. Collective; nothing may be under way."""
        ...
