"""The state machine of one worker of a parameter server. Its rules are those of protocol.py."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mpiring.errors import ArgumentError, MismatchError
from mpiring.parallel.protocol import Done, Failed, Pull, Push


class WorkerState:
    """What one worker knows: which keys it has pushed, and which answers it is owed.

    ``shards[i]`` are the keys of server ``i``. Messages come back with the index of the server
    that they go to. Raises MismatchError where the caller breaks the protocol.
    """

    def __init__(self, worker: int, shards: Sequence[Collection[int]]) -> None:
        self.worker = worker
        self.shards = tuple(tuple(shard) for shard in shards)
        self._server = {key: index for index, shard in enumerate(self.shards) for key in shard}
        if len(self._server) < sum(map(len, self.shards)):
            raise ArgumentError("shards share a key; each key lives on one server")
        #: Steps whose pushes have all been answered.
        self.step = 0
        #: Keys whose parameters are still to come. A forward pass needs its keys out of here.
        self.owed: set[int] = set()
        self.left = False
        self._pushed: set[int] = set()
        self._pushes = [0] * len(self.shards)

    @property
    def pushes(self) -> int:
        """Pushes of a key so far, to all servers together."""
        return sum(self._pushes)

    @property
    def ready(self) -> bool:
        """Whether it stands between two steps, with all parameters here."""
        return not self.owed and not self._pushed and not self.left

    def push(self, key: int) -> tuple[int, Push]:
        """The gradient of ``key`` is ready. Its answer waits with the server until received."""
        if key not in self._server:
            raise ArgumentError(f"key is {key}; there are {sorted(self._server)}")
        # Before the first push of a step nothing may be owed; later only what it pushed itself.
        if self.left or key in self._pushed or not self.owed <= self._pushed:
            raise MismatchError(
                f"worker {self.worker} cannot push key {key} at step {self.step}: "
                + ("it has left" if self.left else "it was pushed before, or a pull is under way")
            )
        server = self._server[key]
        self._pushed.add(key)
        self.owed.add(key)
        self._pushes[server] += 1
        return server, Push(self.worker, key)

    def pull(self) -> tuple[tuple[int, Pull], ...]:
        """Ask for everything: the parameters to begin with, or the newest between two steps."""
        self._must_be_ready("pull")
        self.owed = set(self._server)
        return tuple((server, Pull(self.worker)) for server in range(len(self.shards)))

    def receive(self, key: int) -> None:
        """The parameters of ``key`` have come."""
        if key not in self.owed:
            raise MismatchError(f"worker {self.worker} was sent key {key}, which it did not expect")
        self.owed.remove(key)
        if not self.owed and self._pushed == self._server.keys():
            self._pushed.clear()
            self.step += 1

    def done(self, final: bool = False) -> tuple[tuple[int, Done], ...]:
        """Take no further step; with ``final``, wait for what the last worker leaves behind."""
        self._must_be_ready("leave")
        self.left = True
        self.owed = set(self._server) if final else set()
        return tuple((server, Done(self.worker, final)) for server in range(len(self.shards)))

    def fail(self) -> tuple[tuple[int, Failed], ...]:
        """Give up now. What is owed still comes, and must be received, but means nothing."""
        if self.left:
            raise MismatchError(f"worker {self.worker} cannot fail: it has left")
        self.left = True
        return tuple(
            (server, Failed(self.worker, pushes)) for server, pushes in enumerate(self._pushes)
        )

    def _must_be_ready(self, verb: str) -> None:
        if not self.ready:
            raise MismatchError(
                f"worker {self.worker} cannot {verb} at step {self.step}: "
                f"keys pushed {sorted(self._pushed)}, keys owed {sorted(self.owed)}"
                + (", and it has left" if self.left else "")
            )
