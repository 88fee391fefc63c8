"""What the engine asks of the thing that moves bytes between ranks."""

from __future__ import annotations

from typing import Any, Protocol

from mpiring.task import Task


class Transport(Protocol):
    """Point-to-point messages between ``size`` ranks.

    Views are one-dimensional contiguous arrays. Two messages between the same
    pair with the same slot match in the order in which they are started. A
    receive that completes with another number of bytes than its view holds
    raises TransportError.
    """

    rank: int
    size: int
    slots: int  #: allowed are slots from 0, below this

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        """A task that sends ``view`` to ``peer``."""
        ...

    def recv(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        """A task that receives into ``view`` from ``peer``."""
        ...
