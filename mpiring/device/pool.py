"""Memory that is lent and comes back, since it cannot be allocated anew for every collective.

A GPU stops for cudaMalloc and cudaFree, pinning host memory takes longer than most
collectives, and what another process has mapped must not be freed at all. So memory
is kept when nobody uses it any more, and lent again.

*Pieces.* Short ones are powers of two, cut from slabs; a longer one is an allocation
of its own, lent again to whoever wants most of it. Whatever the sizes
that are asked for, what is kept is at most a few times what was in use at once.

*Leases.* An array holds its lease, and the piece comes back when the last array over it
is gone; the engine holds the arrays of whatever is under way. So memory comes back when
nothing can touch it, with one exception: a caller may drop an array on which a stream of
the caller's is still at work. A piece that a caller had is therefore settled (the device
waited for) before it is lent again, as cudaFree would do.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from mpiring.device.base import Array
from mpiring.errors import DeviceError

#: Bytes: what cudaMalloc itself reserves at a time.
SLAB = 2 << 20
_SHORTEST = 512  # bytes; pieces are aligned to this

#: Bytes of a piece that is kept while nobody uses it. (Longer: a cost per call, but bearable.)
KEPT = 256 << 20


@dataclass(frozen=True, eq=False, slots=True)
class Piece:
    """``nbytes`` of ``memory`` from ``start``; ``memory`` is an array of bytes."""

    memory: Array
    start: int
    nbytes: int


class Lease:
    """As long as it lives, its piece is nobody else's."""

    __slots__ = ("_back", "piece", "private")

    def __init__(self, piece: Piece, private: bool, back: Callable[[Piece, bool], None]) -> None:
        self.piece, self.private, self._back = piece, private, back

    def __del__(self) -> None:
        self._back(self.piece, self.private)


class Pool:
    """Lends what ``allocate(nbytes)`` returns, an array of bytes.

    ``settle()`` returns when the device has done all that anybody has launched.
    ``shared(memory)`` tells what must never be freed, since others have mapped it.
    """

    def __init__(
        self,
        allocate: Callable[[int], Array],
        settle: Callable[[], None],
        shared: Callable[[Array], bool] = lambda memory: False,
        kept: int = KEPT,
    ) -> None:
        self._allocate, self._settle, self._shared, self._kept = allocate, settle, shared, kept
        self._lock = threading.Lock()
        # A lease may end at any moment, in any thread, also in the middle of ``take``.
        self._back: deque[tuple[Piece, bool]] = deque()
        self._short: defaultdict[int, list[tuple[Piece, bool]]] = defaultdict(list)
        self._long: list[tuple[Piece, bool]] = []
        self._slab: Array | None = None  # the one that is being cut
        self._cut = 0  # up to here

    def take(self, nbytes: int, *, private: bool) -> Lease:
        """At least ``nbytes`` of memory. DeviceError if there is none.

        ``private``: whoever drops it has seen the end of all work on it.
        """
        with self._lock:
            self._sort()
            find = self._short_piece if nbytes <= SLAB // 2 else self._long_piece
            piece, settled = find(nbytes)
        if not settled:
            self._settle()
        return Lease(piece, private, self._take_back)

    def _take_back(self, piece: Piece, private: bool) -> None:
        if piece.nbytes <= self._kept or self._shared(piece.memory):
            self._back.append((piece, private))

    def _sort(self) -> None:
        for _ in range(len(self._back)):
            piece, settled = self._back.popleft()
            idle = self._short[piece.nbytes] if piece.nbytes < SLAB else self._long
            idle.append((piece, settled))

    def _short_piece(self, nbytes: int) -> tuple[Piece, bool]:
        size = max(_SHORTEST, 1 << (nbytes - 1).bit_length())
        if self._short[size]:
            return self._short[size].pop()
        if self._slab is None or self._cut + size > SLAB:
            self._slab, self._cut = self._new(SLAB), 0
        start, self._cut = self._cut, self._cut + size
        return Piece(self._slab, start, size), True

    def _long_piece(self, nbytes: int) -> tuple[Piece, bool]:
        size = -(-nbytes // SLAB) * SLAB
        fitting = [
            (piece.nbytes, position)
            for position, (piece, _) in enumerate(self._long)
            if size <= piece.nbytes <= size * 5 // 4
        ]
        if fitting:
            return self._long.pop(min(fitting)[1])
        return Piece(self._new(size), 0, size), True

    def _new(self, nbytes: int) -> Array:
        try:
            return self._allocate(nbytes)
        except DeviceError:
            self._long = [entry for entry in self._long if self._shared(entry[0].memory)]
            return self._allocate(nbytes)
