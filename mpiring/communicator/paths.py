"""How device arrays travel between the ranks of a communicator.

*staged*: through pinned host memory, whatever the MPI is. *direct*: MPI is handed device
pointers; one that knows no GPUs dies of it. *peer*: ranks of one host read each other's
device memory, and MPI carries signals.

What an MPI says of itself counts for nothing here: it may have been built for CUDA and
use a transport that was not. ``auto`` is staged, unless a probe (``python -m
mpiring.doctor`` makes it, ``transport.probe`` keeps its answer) saw another path deliver
the right bytes in less time. It saw two ranks of one host, so it is asked only where all
ranks share one.

All ranks choose from what all have said, so they choose alike. Looking costs a CPU
machine one file name: the probe is asked for only where there can be a GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpiring.errors import ArgumentError, DeviceError
from mpiring.schedule.ops import Buffer
from mpiring.schedule.staging import THROUGH_HOST, Detour

#: The environment's word, where the program has none.
VARIABLE = "MPIRING_GPU_PATH"

_TOLD = {
    "staged": "through pinned host memory",
    "direct": "as device pointers that MPI is given",
    "peer": "by ranks reading each other's memory",
}
PATHS = ("auto", *_TOLD)

_MIB = 1 << 20
#: Bytes that travel at once where nothing else is asked for. A segment costs a launch, an event
#: and a message, tens of microseconds of the host's time, so it is to take a GPU as long: a bus
#: moves megabytes meanwhile, a GPU's own memory many times as much.
SEGMENTS = {"staged": 4 * _MIB, "direct": 4 * _MIB, "peer": 64 * _MIB}

_CONTROL = "/dev/nvidiactl"  # there wherever NVIDIA's driver is loaded


class Standing(NamedTuple):
    """What one rank says before the choice."""

    wish: str
    host: str = ""
    #: What became of each path that a probe tried, nothing where it delivered; rank 0 asks for all.
    probed: Mapping[str, str] | None = None
    fastest: str | None = None  #: of those that delivered


class Choice(NamedTuple):
    """A path, and why."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"GPU arrays travel {_TOLD[self.path]} ({self.path}): {self.why}"


def wish(given: str | None) -> str:
    """The path of device arrays that is asked for, of ``PATHS``. ArgumentError."""
    return asked("gpu_path", given, VARIABLE, PATHS)


def asked(argument: str, given: str | None, variable: str, allowed: Sequence[str]) -> str:
    """What the program, or else the environment, asks for; else "auto". ArgumentError naming the
    one of them."""
    name, value = (argument, given) if given is not None else (variable, os.environ.get(variable))
    value = value or "auto"
    if value not in allowed:
        raise ArgumentError(f"{name}: {value!r} given; allowed are {', '.join(allowed)}")
    return value


def stand(wish: str, rank: int, host: str, library: str) -> Standing:
    """What this rank has to say. ``library`` as MPI describes itself."""
    if rank or wish == "staged" or not _gpu_possible():
        return Standing(wish, host)
    from mpiring.transport.probe import Outcome, cached_probe

    report = cached_probe(library)
    if report is None:
        return Standing(wish, host)
    probed = {
        name: "" if result.works else f"{result.outcome.value} {result.detail}".strip()
        for name, result in report.paths.items()
        if name in PATHS and result.outcome is not Outcome.ABSENT
    }
    return Standing(wish, host, probed, report.fastest())


def _gpu_possible() -> bool:
    return os.path.exists(_CONTROL) or "cupy" in sys.modules


def choose(everyone: Sequence[Standing]) -> Choice:
    """The path of all ranks, from what each has said. DeviceError if what is asked for fails here.

    The wish is the same on all of them.
    """
    first = everyone[0]
    hosts = len({each.host for each in everyone})
    if first.wish == "auto":
        if hosts > 1:
            return Choice("staged", f"ranks are on {hosts} hosts, and a probe tries only one")
        if first.fastest is None:
            return Choice("staged", "python -m mpiring.doctor finds out whether there is a faster")
        return Choice(first.fastest, "the fastest of those that a probe saw deliver the right data")
    if first.wish == "peer" and hosts > 1:
        raise DeviceError(
            f"gpu_path: 'peer' given, but ranks are on {hosts} hosts; allowed are auto, direct "
            "and staged"
        )
    failure = (first.probed or {}).get(first.wish)
    if failure:
        able = [name for name, wrong in (first.probed or {}).items() if not wrong]
        raise DeviceError(
            f"gpu_path: {first.wish!r} given, but it does not work here. A probe found: {failure}; "
            f"allowed are {', '.join(['auto', *able])} (python -m mpiring.doctor --refresh looks "
            "again)"
        )
    return Choice(first.wish, "asked for")


def detour(path: str, device: Any, arrays: Mapping[Buffer, Any]) -> Detour:
    """Which of a collective's messages cannot start or end in the caller's ``arrays``."""
    if path == "staged":
        return THROUGH_HOST
    if path == "direct":
        special = frozenset(buffer for buffer, each in arrays.items() if not device.plain(each))
        return Detour(Buffer.SCRATCH, special, special)
    foreign = frozenset(buffer for buffer, each in arrays.items() if not device.owns(each))
    return Detour(Buffer.SCRATCH, foreign, frozenset())
