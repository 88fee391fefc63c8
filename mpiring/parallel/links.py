"""Messages of a parameter server on their way: bound once, counted, to oneself without MPI.

A rank that is worker and server at once talks to itself too. Such a message is one copy, or
none where the sender's array is only lent, made when both its ends have been started; to
whoever starts and asks them, its tasks look like those of the transport. Only what goes over
a link is counted.

Device arrays travel as the communicator's do, except that what it lets GPUs fetch from each
other goes through the host here.

``Outbox`` holds what is being sent: from the start of a send to its end the array belongs
to MPI, and stays alive from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpiring.device.base import Array, Device
from mpiring.task import Task
from mpiring.trace import Instrument
from mpiring.transport.base import Receive, Transport


class Links:
    """Tasks for messages to and from the ranks of ``transport``, this one included.

    ``device(array)`` is where an array lives; ``direct`` whether MPI may be handed device
    memory. What it may not be handed goes through memory of the host.
    """

    def __init__(
        self, transport: Transport, device: Callable[[Array], Device], *, direct: bool = False
    ) -> None:
        self.rank = transport.rank
        self.device = device
        self._transport, self._direct = transport, direct
        self._meetings: dict[int, _Meeting] = {}

    def send(self, view: Array, peer: int, slot: int, *, persistent: bool = True) -> Task:
        if peer == self.rank:
            return _End(self._meeting(slot), "source", view)
        staging = self._staging(view)
        if staging is None:
            return self._transport.send(view, peer, slot, persistent=persistent)
        send = self._transport.send(staging, peer, slot, persistent=persistent)
        return _Relay(self.device(view).copy(view, staging), send)

    def receive(self, view: Array, peer: int, slot: int) -> Receive:
        if peer == self.rank:
            return _End(self._meeting(slot), "target", view)
        staging = self._staging(view)
        if staging is None:
            return self._transport.recv(view, peer, slot, persistent=True)
        receive = self._transport.recv(staging, peer, slot, persistent=True)
        return _Relay(receive, self.device(view).copy(staging, view))

    def borrow(self, slot: int) -> Loan:
        """A receive from this rank itself that gets the sender's own array, to read it."""
        return _End(self._meeting(slot), "target", None)

    def _staging(self, view: Array) -> Array | None:
        """Host memory for messages of what MPI must not be handed."""
        device: Any = self.device(view)
        if device.kind == "host" or (self._direct and device.plain(view)):
            return None
        return device.staging(view.size, view.dtype)

    def inlet(self, receives: Sequence[Receive]) -> Inlet:
        """What ``receive`` gave, to be asked all together."""
        return Inlet(receives, self._transport)

    def _meeting(self, slot: int) -> _Meeting:
        return self._meetings.setdefault(slot, _Meeting(self.device))


class Loan(Receive, Protocol):
    """A receive without memory of its own."""

    view: Array  #: what was sent last


class _Meeting:
    """Where the two ends of a message to oneself meet; several messages, one after the other."""

    def __init__(self, device: Callable[[Array], Device]) -> None:
        self.ends: dict[str, _End] = {}
        self._device = device
        self._bound: tuple[_End, _End] | None = None
        self._copy: Task | None = None

    def enter(self, end: _End) -> None:
        self.ends[end.role] = end
        if len(self.ends) < 2:
            return
        ends = self.ends["source"], self.ends["target"]
        source, target = ends
        if target.lent:
            target.view = source.view
        else:
            if ends != self._bound or self._copy is None:
                self._bound = ends
                self._copy = self._device(target.view).copy(source.view, target.view)
            self._copy.start()
        self.advance()

    def advance(self) -> None:
        if len(self.ends) < 2 or (self._copy is not None and not self._copy.done()):
            return
        # Free for the next message, which one side may start before the other has asked.
        for end in self.ends.values():
            end.over = True
        self.ends.clear()


class _End:
    """One end of a message to oneself."""

    immediate = False

    def __init__(self, meeting: _Meeting, role: str, view: Array) -> None:
        self.role, self.view = role, view
        self.lent = view is None
        self.over = True
        self._meeting = meeting

    def start(self) -> None:
        self.over = False
        self._meeting.enter(self)

    def done(self) -> bool:
        if not self.over:
            self._meeting.advance()
        return self.over

    def cancel(self) -> None:
        if not self.over:
            del self._meeting.ends[self.role]
            self.over = True


class _Relay:
    """One task, then another: a copy to the host and a send, a receive and a copy from there."""

    immediate = False

    def __init__(self, first: Any, second: Task) -> None:
        self._first, self._second = first, second
        self._handed_on = True

    def start(self) -> None:
        self._handed_on = False
        self._first.start()

    def done(self) -> bool:
        if not self._handed_on:
            if not self._first.done():
                return False
            self._handed_on = True
            self._second.start()
        return self._second.done()

    def cancel(self) -> None:
        if not self._handed_on:
            self._handed_on = True
            self._first.cancel()


class Inlet:
    """Receives known by their places. Asked often and nearly always in vain, so all at once."""

    def __init__(self, receives: Sequence[Receive], transport: Transport) -> None:
        self._receives = receives
        self._started: set[int] = set()
        # A message to oneself is none of the transport's.
        self._far = [i for i, each in enumerate(receives) if not isinstance(each, _End)]
        self._alone = [i for i, each in enumerate(receives) if isinstance(each, _End)]
        some = getattr(transport, "some", None)
        self._some = some([receives[i] for i in self._far]) if some else None
        if self._some is None:
            self._alone = list(range(len(receives)))

    @property
    def empty(self) -> bool:
        """Whether nothing that was started is still to come."""
        return not self._started

    def start(self, place: int) -> None:
        self._started.add(place)
        self._receives[place].start()

    def expects(self, place: int) -> bool:
        return place in self._started

    def cancel(self, place: int) -> None:
        self._started.remove(place)
        self._receives[place].cancel()

    def ended(self) -> list[int]:
        """The places of receives that have ended since they were started; each told once."""
        if not self._started:
            return []
        over = [i for i in self._alone if i in self._started and self._receives[i].done()]
        if self._some is not None:
            over += [self._far[i] for i in self._some()]
        self._started.difference_update(over)
        return over


class Parcel:
    """A message that is sent once or many times; a completion of its latest sending.

    ``kind`` is what its bytes are counted as; nothing is counted if empty.
    """

    __slots__ = ("kind", "label", "nbytes", "task", "under_way")

    def __init__(self, task: Task, kind: str = "", nbytes: int = 0, label: str = "") -> None:
        self.task, self.kind, self.nbytes, self.label = task, kind, nbytes, label
        self.under_way = False

    def done(self) -> bool:
        return not self.under_way


class Outbox:
    """Parcels under way, and how many bytes of each kind have been sent."""

    def __init__(self, instruments: Sequence[Instrument]) -> None:
        self.sent: Counter[str] = Counter()
        self._instruments = instruments
        self._under_way: list[Parcel] = []

    @property
    def empty(self) -> bool:
        return not self._under_way

    def start(self, parcel: Parcel) -> None:
        parcel.under_way = True
        self._under_way.append(parcel)
        if parcel.kind:
            self.sent[parcel.kind] += parcel.nbytes
            for instrument in self._instruments:
                instrument.started(parcel.label, id(parcel))
        parcel.task.start()

    def advance(self) -> bool:
        """Whether a parcel has gone."""
        still = []
        for parcel in self._under_way:
            if not parcel.task.done():
                still.append(parcel)
                continue
            parcel.under_way = False
            for instrument in self._instruments if parcel.kind else ():
                instrument.ended(parcel.label, id(parcel), parcel.nbytes)
        moved = len(still) < len(self._under_way)
        self._under_way = still
        return moved


class Gated:
    """Calls that wait for completions, in the order in which they were given.

    What the caller's streams still do to an array has to be seen to be over before the
    array is handed to MPI.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Callable[[], None]]] = []

    @property
    def empty(self) -> bool:
        return not self._waiting

    def add(self, gate: Any, call: Callable[[], None]) -> None:
        self._waiting.append((gate, call))

    def advance(self) -> bool:
        moved = False
        while self._waiting and self._waiting[0][0].done():
            self._waiting.pop(0)[1]()
            moved = True
        return moved
