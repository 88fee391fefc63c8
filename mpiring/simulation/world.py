"""Many ranks in one process, with messages that take their time.

Each virtual rank runs an ordinary blocking program in a thread of its own, but
only one runs at any moment: whoever waits hands a baton back, and a seeded
random choice says who goes on and which message arrives. A seed therefore is a
run that can be repeated, and hundreds of seeds are hundreds of interleavings.

The network is as unkind as MPI allows: a send is over only after its receive was
posted and the message has arrived, and the bytes are read at the last moment,
so that a buffer which is touched too early shows as a wrong result.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from mpiring.engine.progress import ProgressEngine
from mpiring.errors import HazardError, StallError, TransportError


class Message:
    """One end of a message; a task of the engine."""

    immediate = False

    def __init__(self, world: World, channel: deque[Message], view: Any) -> None:
        self.view = view
        self.over = True
        self.error: TransportError | None = None
        self._world, self._channel = world, channel
        self._observed = True

    def start(self) -> None:
        # MPI does not allow it, though it would do no harm here.
        if not self._observed:
            raise HazardError("a message was started again before its end was observed")
        self.over = self._observed = False
        self._world.post(self._channel, self)

    def cancel(self) -> None:
        """Take back a receive that nothing will match."""
        if not self.over:
            self._channel.remove(self)
        self.over = self._observed = True

    def done(self) -> bool:
        if self.over and self.error is not None:
            raise self.error
        self._observed = self.over
        return self.over


class VirtualTransport:
    """Messages of one virtual rank; ``context`` tells them from those of its duplicates."""

    def __init__(self, world: World, rank: int, context: tuple[int, ...] = ()) -> None:
        self.rank, self.size = rank, world.size
        self.slots = 1 << 20
        self._world = world
        self._context = context
        self._duplicates = 0

    def send(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Message:
        channel = self._world.channels[self.rank, peer, (*self._context, slot)][0]
        return Message(self._world, channel, view)

    def recv(self, view: Any, peer: int, slot: int, *, persistent: bool = False) -> Message:
        channel = self._world.channels[peer, self.rank, (*self._context, slot)][1]
        return Message(self._world, channel, view)

    def duplicate(self) -> VirtualTransport:
        # Collective, so all ranks count alike.
        self._duplicates += 1
        return VirtualTransport(self._world, self.rank, (*self._context, self._duplicates))

    def free(self) -> None: ...


class _Rank:
    """A virtual rank: its thread, and the baton that lets it run."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.baton = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.live = True


class World:
    """``size`` virtual ranks; everything that happens follows from ``seed``."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.random = random.Random(seed)
        self.channels: dict[
            tuple[int, int, tuple[int, ...]], tuple[deque[Message], deque[Message]]
        ] = defaultdict(lambda: (deque(), deque()))
        self._ranks = [_Rank(number) for number in range(size)]
        self._back = threading.Semaphore(0)
        self._idle: set[int] = set()
        self._errors: list[tuple[int, BaseException]] = []
        self._ending: BaseException | None = None

    def run(self, program: Callable[[VirtualTransport, ProgressEngine], Any]) -> list[Any]:
        """Run ``program(transport, engine)`` on every rank; what each returned, in order.

        The first exception of any rank ends all of them and is raised. Ranks that
        all wait, while no message is on its way, raise StallError.
        """
        results: list[Any] = [None] * self.size
        for rank in self._ranks:
            rank.thread = threading.Thread(
                target=self._live, args=(rank, program, results), daemon=True
            )
            rank.thread.start()
        while any(rank.live for rank in self._ranks):
            live = [rank for rank in self._ranks if rank.live]
            matched = self._matched()
            if not matched and len(self._idle) == len(live):
                self._ending = self._ending or StallError(
                    f"ranks {sorted(self._idle)} wait, and no message is on its way"
                )
            # About as many deliveries as turns, so that both run ahead at times.
            if matched and self.random.random() < 0.5:
                self._deliver(self.random.choice(matched))
            self._turn(self.random.choice(live))
        if self._errors:
            raise self._errors[0][1]
        return results

    def post(self, channel: deque[Message], message: Message) -> None:
        channel.append(message)
        self._idle.clear()

    def idle(self, number: int) -> None:
        """Called by a rank that waits: lets others run; raises when the world ends."""
        self._idle.add(number)
        self._hand_back(self._ranks[number])

    def pause(self, number: int) -> None:
        """Called by a rank that computes: lets others run, and counts as movement."""
        self._idle.clear()
        self._hand_back(self._ranks[number])

    def _hand_back(self, rank: _Rank) -> None:
        self._back.release()
        rank.baton.acquire()
        if self._ending is not None:
            raise self._ending

    def _turn(self, rank: _Rank) -> None:
        rank.baton.release()
        self._back.acquire()

    def _live(self, rank: _Rank, program: Callable[..., Any], results: list[Any]) -> None:
        rank.baton.acquire()
        try:
            engine = ProgressEngine(idle=lambda: self.idle(rank.number))
            results[rank.number] = program(VirtualTransport(self, rank.number), engine)
        except BaseException as error:
            self._errors.append((rank.number, error))
            self._ending = self._ending or StallError(f"rank {rank.number} raised {error!r}")
        finally:
            rank.live = False
            self._idle.clear()
            self._back.release()

    def _matched(self) -> list[tuple[deque[Message], deque[Message]]]:
        return [pair for pair in self.channels.values() if pair[0] and pair[1]]

    def _deliver(self, pair: tuple[deque[Message], deque[Message]]) -> None:
        send, recv = pair[0].popleft(), pair[1].popleft()
        if send.view.nbytes != recv.view.nbytes:
            recv.error = TransportError(
                f"{recv.view.nbytes} bytes were agreed, but: {send.view.nbytes} came"
            )
        else:
            np.copyto(recv.view.view("u1"), send.view.view("u1"))
        send.over = recv.over = True
        self._idle.clear()
