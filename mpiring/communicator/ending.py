"""How a process that has communicators ends, so that no other rank waits for it for ever.

An *exception that nobody catches* would end this process inside MPI_Finalize, which
waits for ranks that wait for this one. So it is shown with its rank, and ends the
whole job: as ``python -m mpi4py`` does, but for plain scripts too. Programs that
see to this themselves set ``MPIRING_ABORT=0``.

At the *end of the program* every communicator that was not freed tells the others
so, and finishes what is under way: its handle may be dropped, but peers count on
this rank's part. It does not wait for ever for peers that never come.

That is when Python exits, or in MPI_Finalize where the program calls it before: MPI
deletes the attributes of MPI_COMM_SELF first, and tells whoever has put some there.

All this is set up by the first communicator over MPI, and concerns this process only:
one that was forked from it does nothing of the kind.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import sys
import time
import traceback
import weakref
from types import TracebackType
from typing import Any, Protocol

from mpiring.errors import LaunchError
from mpiring.transport.launcher import disagreement, launched


class Departing(Protocol):
    def depart(self) -> None:
        """Finish what is under way; the program ends."""
        ...


#: Seconds between a rank's last words and its end: launchers drop what they have not read by then.
HEARD_AFTER = 0.2

_process = 0  # the one that was set up
#: In the order in which they were made: on all ranks the same, so none waits for another's.
_open: weakref.WeakValueDictionary[int, Departing] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def check_launch(world: Any) -> None:
    """LaunchError where one launcher started several processes and each is alone in its world."""
    from mpi4py import MPI

    wrong = disagreement(launched(), world.Get_size()) if world.Get_size() == 1 else None
    if wrong:
        name, version = MPI.get_vendor()
        raise LaunchError(
            f"{wrong}; use the mpirun of the environment that holds mpi4py "
            f"({name} {'.'.join(map(str, version))}); python -m mpiring.doctor tells more"
        )


def attend(communicator: Departing, size: int) -> None:
    """See to the ends of this process, now that it has this communicator of ``size`` ranks."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        _open.clear()
        _watch_the_end()
    _open[next(_numbers)] = communicator
    if size > 1 and os.environ.get("MPIRING_ABORT") != "0" and not _Hook.is_set():
        sys.excepthook = _Hook(sys.excepthook)


def _watch_the_end() -> None:
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(delete_fn=lambda *_: _depart())
    MPI.COMM_SELF.Set_attr(key, True)
    atexit.register(_depart)


def _depart() -> None:
    from mpi4py import MPI

    if _process == os.getpid() and not MPI.Is_finalized():
        for communicator in list(_open.values()):
            communicator.depart()
            # MPI_Finalize may still read what was sent, and comes after Python has torn down
            # everything that can be: so this reference is never given back.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
        _open.clear()


class _Hook:
    """``sys.excepthook``: what was there before, then the end of all ranks."""

    def __init__(self, before: Any) -> None:
        self._before = before

    @staticmethod
    def is_set() -> bool:
        return isinstance(sys.excepthook, _Hook)

    def __call__(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        from mpi4py import MPI

        interactive = hasattr(sys, "ps1") or sys.flags.interactive
        if _process != os.getpid() or interactive or MPI.Is_finalized():
            self._before(kind, error, trace)
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        try:
            rank = MPI.COMM_WORLD.Get_rank()
            if self._before is sys.__excepthook__:
                # Ctrl-C reaches every rank: where each was then is nobody's question.
                shown = traceback.format_exception(kind, error, None if interrupted else trace)
                # In one piece, so that lines of several ranks do not mix.
                lines = "".join(shown).rstrip().split("\n")
                sys.stderr.write("".join(f"[rank {rank}] {line}\n" for line in lines))
            else:
                self._before(kind, error, trace)
            sys.stdout.flush()
            sys.stderr.flush()
            time.sleep(HEARD_AFTER)
        finally:
            MPI.COMM_WORLD.Abort(130 if interrupted else 1)
