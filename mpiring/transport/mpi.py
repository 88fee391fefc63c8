"""Messages over MPI point-to-point.

Views travel as bytes: both ends have agreed on the dtype, and MPI knows neither
float16 nor bfloat16. Persistent tasks are MPI persistent requests, others are
Isend and Irecv. Every receive checks how many bytes came. A view above
``limit`` bytes travels as several messages: MPI's classic count is 32 bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from mpi4py import MPI

from mpiring.errors import TransportError
from mpiring.task import Task
from mpiring.transport.base import Receive

#: The highest tag that every MPI library has.
MIN_TAG_UB = 32767

#: Bytes above which a message is split.
MESSAGE_LIMIT = 1 << 30


class MpiTransport:
    """Messages on ``comm``, which belongs to the caller of this class alone.

    The lowest tags of it, ``reserved`` in number, are left to the caller.
    """

    def __init__(
        self, comm: MPI.Intracomm, limit: int = MESSAGE_LIMIT, *, reserved: int = 0
    ) -> None:
        self.comm = comm
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        # MPI keeps this attribute on MPI_COMM_WORLD; not all libraries tell it elsewhere.
        self.slots = int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or MIN_TAG_UB) + 1 - reserved
        self._limit, self._reserved = limit, reserved

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Task:
        kind = _PersistentSend if persistent else _Send
        tag = slot + self._reserved
        return self._whole([kind(self.comm, part, peer, tag) for part in self._parts(view)])

    def recv(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Receive:
        kind = _PersistentRecv if persistent else _Recv
        tag = slot + self._reserved
        return self._whole([kind(self.comm, part, peer, tag) for part in self._parts(view)])

    def some(self, receives: Sequence[Receive]) -> Callable[[], Iterable[int]] | None:
        # What travels in parts is large, and asked for itself.
        if all(isinstance(receive, _PersistentRecv) for receive in receives):
            return _Some(receives).ended
        return None

    def duplicate(self) -> MpiTransport:
        comm = self.comm.Dup()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return MpiTransport(comm, self._limit, reserved=self._reserved)

    def free(self) -> None:
        self.comm.Free()

    def _parts(self, view: Any) -> list[Any]:
        octets = view.view("u1")
        return [octets[at : at + self._limit] for at in range(0, octets.size, self._limit)]

    @staticmethod
    def _whole(parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else _Parts(parts)


class _Send:
    """A send posted anew at each start."""

    __slots__ = ("_comm", "_message", "_peer", "_request", "_tag")
    immediate = False

    def __init__(self, comm: MPI.Intracomm, octets: Any, peer: int, tag: int) -> None:
        self._comm, self._peer, self._tag = comm, peer, tag
        self._message = [octets, octets.size, MPI.BYTE]

    def start(self) -> None:
        self._request = self._comm.Isend(self._message, self._peer, self._tag)

    def done(self) -> bool:
        return self._request.Test()


class _PersistentSend:
    """A send bound once; starting and testing it are calls of MPI with nothing around them."""

    __slots__ = ("_request", "done", "start")
    immediate = False

    def __init__(self, comm: MPI.Intracomm, octets: Any, peer: int, tag: int) -> None:
        self._request = comm.Send_init([octets, octets.size, MPI.BYTE], peer, tag)
        self.start = self._request.Start
        self.done = self._request.Test

    def __del__(self) -> None:
        _free(self._request)


class _Receive:
    """What both kinds of receive share: the check of what came."""

    __slots__ = ("_nbytes", "_octets", "_peer", "_request", "_status", "_tag", "_test")
    immediate = False

    _request: Any
    _test: Callable[[MPI.Status], bool]

    def __init__(self, octets: Any, peer: int, tag: int) -> None:
        self._octets, self._peer, self._tag = octets, peer, tag
        self._nbytes = octets.size
        self._status = MPI.Status()

    def done(self) -> bool:
        status = self._status
        try:
            if not self._test(status):
                return False
        except MPI.Exception as error:
            raise TransportError(self._tell(error.Get_error_string())) from None
        if status.Get_count(_BYTE) != self._nbytes:  # not by ``check``: short messages feel it
            self.check(status)
        return True

    def check(self, status: MPI.Status) -> None:
        """Raise TransportError unless as many bytes came as were agreed."""
        if status.Get_count(_BYTE) != self._octets.size:
            raise TransportError(self._tell(f"{status.Get_count(_BYTE)} came"))

    def cancel(self) -> None:
        """Take back the latest start, which nothing will match any more."""
        with suppress(MPI.Exception):  # it is over: with another error, or just now
            self._request.Cancel()
            self._request.Test()
        self._request.Wait()

    def _tell(self, what: str) -> str:
        return (
            f"message from rank {self._peer} (tag {self._tag}): "
            f"{self._octets.size} bytes were agreed, but: {what}"
        )


class _Recv(_Receive):
    __slots__ = ("_comm",)

    def __init__(self, comm: MPI.Intracomm, octets: Any, peer: int, tag: int) -> None:
        super().__init__(octets, peer, tag)
        self._comm = comm

    def start(self) -> None:
        self._request = self._comm.Irecv(
            [self._octets, self._octets.size, MPI.BYTE], self._peer, self._tag
        )
        self._test = self._request.Test


class _PersistentRecv(_Receive):
    __slots__ = ("start",)

    def __init__(self, comm: MPI.Intracomm, octets: Any, peer: int, tag: int) -> None:
        super().__init__(octets, peer, tag)
        self._request = comm.Recv_init([octets, octets.size, MPI.BYTE], peer, tag)
        self.start = self._request.Start
        self._test = self._request.Test

    def __del__(self) -> None:
        _free(getattr(self, "_request", None))


class _Some:
    """Many persistent receives asked by one call; MPI passes over those that are not started."""

    def __init__(self, receives: Sequence[Any]) -> None:
        self._receives = receives
        self._requests = [receive._request for receive in receives]
        self._statuses = [MPI.Status() for _ in receives]

    def ended(self) -> Iterable[int]:
        try:
            places = MPI.Request.Testsome(self._requests, self._statuses)
        except MPI.Exception as error:
            raise TransportError(f"one of several receives: {error.Get_error_string()}") from None
        for place, status in zip(places or (), self._statuses):
            self._receives[place].check(status)
        return places or ()


class _Parts:
    """One view that travels as several messages."""

    immediate = False

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts
        self._open: list[Any] = []

    def start(self) -> None:
        self._open = list(self._parts)
        for part in self._parts:
            part.start()

    def done(self) -> bool:
        # Asked once over, a request would report an empty status: each is asked until true.
        self._open = [part for part in self._open if not part.done()]
        return not self._open

    def cancel(self) -> None:
        for part in self._open:
            part.cancel()


_BYTE = MPI.BYTE


def _free(request: Any) -> None:
    if request and not MPI.Is_finalized():
        request.Free()


class Node(NamedTuple):
    """What the ranks that share a machine have of it."""

    crowded: bool  #: whether they outnumber the cores that they may use together
    alone: bool  #: whether there are no others


def node_of(comm: MPI.Intracomm) -> Node:
    """The machine that this rank is on. Collective."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = set().union(*node.allgather(os.sched_getaffinity(0)))
    size = node.Get_size()
    node.Free()
    return Node(size > len(cores), size == comm.Get_size())
