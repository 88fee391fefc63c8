"""The parameter server's protocol: what is said, what is done, and the rules. Plain data.

``ServerState`` (server.py) keeps the books of one server and ``WorkerState`` (worker.py) those of
one worker. Neither touches an array or does any I/O: messages and commands are data, and whoever
drives the machines moves the bytes. So the same code runs under MPI and, joined by a fake link,
under hundreds of random delays in one process.

Terms
-----
A *key* is a piece of a bucket and lives on one server; the keys of a server are its *shard*.
A *unit* is a set of keys that changes as a whole, and has a *version*: how many updates it has
seen. Every mode is the same automaton with two settings:

====== =============== ==================================== ====== ==================
mode   unit            an update is                         lead   bits reproducible
====== =============== ==================================== ====== ==================
sync   each key alone  the sum over all workers, then one   0      always
                       optimizer step
async  the shard       one worker's push                    none   by replaying a log
ssp    the shard       one worker's push                    s      by replaying a log
====== =============== ==================================== ====== ==================

*Lead* bounds how many steps a worker may be ahead of the slowest active one. ``ssp`` is the
stale synchronous parallel model of Ho et al., "More Effective Distributed ML via a Stale
Synchronous Parallel Parameter Server" (NIPS 2013), with a pull at every step.

Rules
-----
1. *Every push and every pull is answered exactly once*, key by key, even when the worker fails
   half-way. A push therefore needs no separate request for what comes next, both sides always
   know which messages are under way, and bytes out of a server equal bytes in.
2. A worker has at most one push of a key in flight: it waits for the answers to a step before it
   pushes for the next. So a server holds at most one gradient per worker and key.
3. A unit changes whole or not at all, and its answers leave between two changes. So a worker
   always holds one version of a shard: in sync every key of step t has version t, otherwise the
   shard is one unit. A push that stays incomplete, since its worker failed, is never applied.
4. In sync, gradients are added in the order of ``workers``; early arrivals are held back.
   Floating-point addition is not associative, so only a fixed order gives the same bits twice.
   The gradients must be scaled for the global batch already.
5. An answer goes out when the worker's own push has been applied and it is not too far ahead of
   the slowest active worker. The slowest is never too far ahead of itself, and only the active
   count, so somebody can always go on: no deadlock, and nobody waits for one who has left.
6. A worker leaves by ``Done``, between two steps, or by ``Failed``, at any time. ``Done`` may ask
   for the final parameters, sent when everybody has left. Then the server is finished.
7. Messages of one worker may overtake each other, as MPI's do under different tags. Rules 1 and
   2 make that harmless, except for ``Failed``; it says how many pushes were sent before it.

The automaton
-------------
``TRANSITIONS`` holds, for each unit and worker, the phase and what changes it; whatever is not in
the table breaks the protocol. COMPUTING: the worker owns a version and is owed nothing.
PUSHING: some keys of a push have come. PUSHED: all have, none is applied. WAITING: applied, to be
answered. LEAVING: done, to be sent the final parameters. LEFT: owed nothing, for ever.

The driver's duties
-------------------
* Carry out the commands that name one key in the order in which they came.
* The Reply to a push comes after the command that used the push, so a buffer for each worker and
  key is enough; the next receive into it can be posted before the Reply is sent.
* In sync, an answer may be sent straight from the parameters: the next Apply on that key needs
  a push from everybody who was answered (but for those who failed, and look at nothing any
  more). In the other modes copy first: another worker's push may be applied while the answer
  is still under way.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from mpiring.errors import ArgumentError

MODES = ("sync", "async", "ssp")


# What workers say to servers. A push travels as its gradient alone; the rest are a few bytes.


@dataclass(frozen=True, slots=True)
class Push:
    """The gradient of ``key`` has come from ``worker``; its answer is the key's next version."""

    worker: int
    key: int


@dataclass(frozen=True, slots=True)
class Pull:
    """``worker`` wants the parameters of the whole shard, without pushing anything."""

    worker: int


@dataclass(frozen=True, slots=True)
class Done:
    """``worker`` takes no further step; ``final`` asks for what the others leave behind."""

    worker: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """``worker`` gave up in the middle, having sent ``pushes`` pushes to this server in all."""

    worker: int
    pushes: int


Message = Push | Pull | Done | Failed


# What a server is to do. Only these touch arrays.


@dataclass(frozen=True, slots=True)
class Accumulate:
    """``sum[key] = push[worker, key]`` when ``first``, else ``sum[key] += push[worker, key]``."""

    key: int
    worker: int
    first: bool


@dataclass(frozen=True, slots=True)
class Apply:
    """Let the optimizer update ``key`` to ``version``: by ``worker``'s push, or by the sum if None.

    ``staleness`` counts the versions between the worker's parameters and those it updates; an
    optimizer may scale its learning rate with it.
    """

    key: int
    worker: int | None
    version: int
    staleness: int


@dataclass(frozen=True, slots=True)
class Reply:
    """Send the parameters of ``key``, as they are now (``version``), to ``worker``."""

    worker: int
    key: int
    version: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Everybody has left and been answered: complete what is in flight, then stop."""


Command = Accumulate | Apply | Reply | Finish


class Phase(enum.Enum):
    """Where one worker stands with one unit."""

    COMPUTING = enum.auto()
    PUSHING = enum.auto()
    PUSHED = enum.auto()
    WAITING = enum.auto()
    LEAVING = enum.auto()
    LEFT = enum.auto()


class Signal(enum.Enum):
    """What moves a worker from phase to phase."""

    PART = "pushed a key"
    WHOLE = "pushed the last key"
    APPLIED = "had its push applied"
    ANSWERED = "was answered"
    PULL = "pulled"
    DONE = "was done"
    FINAL = "was done and asked for the final parameters"
    FAILED = "failed"


TRANSITIONS: dict[Phase, dict[Signal, Phase]] = {
    Phase.COMPUTING: {
        Signal.PART: Phase.PUSHING,
        Signal.WHOLE: Phase.PUSHED,
        Signal.PULL: Phase.WAITING,
        Signal.DONE: Phase.LEFT,
        Signal.FINAL: Phase.LEAVING,
        Signal.FAILED: Phase.LEFT,
    },
    Phase.PUSHING: {
        Signal.PART: Phase.PUSHING,
        Signal.WHOLE: Phase.PUSHED,
        Signal.FAILED: Phase.LEFT,
    },
    Phase.PUSHED: {Signal.APPLIED: Phase.WAITING, Signal.FAILED: Phase.LEFT},
    Phase.WAITING: {Signal.ANSWERED: Phase.COMPUTING, Signal.FAILED: Phase.LEFT},
    Phase.LEAVING: {Signal.ANSWERED: Phase.LEFT},
    # What a worker pushed whole before it failed still counts.
    Phase.LEFT: {Signal.APPLIED: Phase.LEFT},
}


def lead_of(mode: str, staleness: int | None) -> float:
    """How many steps a worker may be ahead of the slowest active one."""
    if mode not in MODES:
        raise ArgumentError(f"mode is {mode!r}; allowed are {', '.join(MODES)}")
    if mode != "ssp":
        if staleness is not None:
            raise ArgumentError(
                f"staleness is {staleness}, but only mode 'ssp' has one, not {mode!r}"
            )
        return 0 if mode == "sync" else math.inf
    if staleness is None or staleness < 0:
        raise ArgumentError(f"staleness is {staleness}; mode 'ssp' needs a number of steps >= 0")
    return staleness


def staleness_bound(mode: str, workers: int, staleness: int | None = None) -> float:
    """The largest staleness, in versions, that an update can have with ``workers`` workers.

    ssp: a worker that starts step t has seen at least t - s pushes of each other worker, and as
    long as it has not pushed itself no other gets past t + s + 1. That leaves 2s + 1 from each.
    """
    lead = lead_of(mode, staleness)
    if mode == "sync" or workers < 2:
        return 0
    return (workers - 1) * (2 * lead + 1)
