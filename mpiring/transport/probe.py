"""Which ways there are for bytes to move on this machine: tried, not believed.

What an MPI library says of itself does not decide whether it can send a device
array: it may have been built for CUDA and use a transport that was not, or the
reverse. So each path is tried by two ranks in a job of its own (``probe_job``),
which may crash, hang or deliver wrong bytes without taking anything else along.

The answer is kept in ``$XDG_CACHE_HOME/mpiring`` or ``~/.cache/mpiring``, under a
fingerprint of what it depends on. A cache that cannot be read or written costs a
probe, and never an error. It holds for two ranks of this host; between hosts
other parts of MPI are at work.

Importing this module starts neither MPI nor CUDA. Imports only the standard
library and the modules beside it.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import hashlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mpiring.transport import child, cudriver, launcher

#: The paths, in the order in which they are tried.
PATHS = ("host", "staged", "direct", "peer")
#: Changes whenever an older answer no longer means the same.
FORMAT = 1
#: Seconds that the job of one path may take.
LIMIT = 60.0

_JOB = "mpiring.transport.probe_job"


class Outcome(str, enum.Enum):
    """What became of one path."""

    RIGHT = "right"  #: at every size the right bytes came
    WRONG = "wrong data"  #: other bytes came
    CRASHED = "crashed"  #: a memory fault ended the job
    SILENT = "no answer"  #: the limit ran out
    FAILED = "failed"  #: an error was reported
    ABSENT = "absent"  #: there is nothing to try: no GPU


@dataclass(frozen=True)
class Result:
    """One path: its outcome, a word on it, and seconds per exchange by bytes of a message."""

    outcome: Outcome
    detail: str = ""
    seconds: Mapping[int, float] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        return self.outcome is Outcome.RIGHT


@dataclass(frozen=True)
class Report:
    """The answer of a probe. ``access`` tells whether the ranks' GPUs address each other."""

    fingerprint: str
    host: str
    made: str  #: date and time, ISO 8601, UTC
    paths: Mapping[str, Result]
    access: bool | None = None

    def works(self, path: str) -> bool:
        """Whether ``path`` (one of ``PATHS``) delivered the right bytes at every size."""
        return path in self.paths and self.paths[path].works

    @property
    def settled(self) -> bool:
        """Whether the answer is worth keeping: it would be the same tomorrow."""
        return self.works("host") and all(
            result.outcome is not Outcome.SILENT for result in self.paths.values()
        )

    def fastest(self) -> str | None:
        """The device path that delivered right bytes and moved the largest message soonest."""
        able = [name for name in PATHS if name != "host" and self.works(name)]
        return min(able, key=lambda name: max(self.paths[name].seconds.items())[1], default=None)


def probe(
    library: str,
    mpiexec: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
    limit: float = LIMIT,
    say: child.Say | None = None,
) -> Report:
    """Try every path, each in a job of two ranks on this host, and return what was found.

    ``library`` is what ``MPI.Get_library_version()`` says, ``mpiexec`` the command that starts
    jobs of that library. Takes seconds, at most ``limit`` for each path; ``say`` hears of it.
    """
    results: dict[str, Result] = {}
    access = None
    without_gpu = _without_gpu(environ)
    for path in PATHS:
        if path != "host" and without_gpu:
            results[path] = Result(Outcome.ABSENT, without_gpu)
            continue
        if path != "host" and not results["host"].works:
            results[path] = Result(Outcome.ABSENT, "not tried: the host path does not work")
            continue
        ending = _run(path, mpiexec, environ, limit, say)
        _sweep(ending)
        results[path] = _judge(ending, limit)
        if ending.find("access") is not None:
            access = ending.find("access")
    made = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Report(fingerprint(library, environ), socket.gethostname(), made, results, access)


def cached_probe(library: str, *, environ: Mapping[str, str] = os.environ) -> Report | None:
    """What an earlier probe found for this MPI, driver, host and settings, or None.

    Ask on one rank and tell the others: files and settings may differ between hosts.
    """
    key = fingerprint(library, environ)
    folder = cache_folder(environ)
    if folder is None:
        return None
    try:
        report = _decode(json.loads((folder / f"probe-{key}.json").read_text("utf-8")))
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return report if report.fingerprint == key else None


def keep(report: Report, *, environ: Mapping[str, str] = os.environ) -> str | None:
    """Store a report for ``cached_probe``; returns why it could not be stored, or None.

    Readers see the old file or the new one, never part of one.
    """
    folder = cache_folder(environ)
    if folder is None:
        return "this user has no home folder"
    target = folder / f"probe-{report.fingerprint}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=folder, prefix=".probe-", delete=False, encoding="utf-8"
        ) as file:
            try:
                json.dump({"format": FORMAT, **asdict(report)}, file, indent=1)
                file.close()
                os.replace(file.name, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return None


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where answers are kept; None for a user without a home."""
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the XDG specification: relative paths are to be ignored
        return Path(base) / "mpiring"
    try:
        return Path.home() / ".cache" / "mpiring"
    except RuntimeError:
        return None


def fingerprint(library: str, environ: Mapping[str, str] = os.environ) -> str:
    """A short digest of everything that the answer depends on."""
    told = [
        FORMAT,
        library.strip(),
        cudriver.version(),
        cudriver.kernel_module(),
        cudriver.installed(),
        socket.gethostname(),
        launcher.settings(environ),
    ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def _without_gpu(environ: Mapping[str, str]) -> str:
    """Why there is no device path to try, or an empty string."""
    if cudriver.version() is None:
        return cudriver.NO_DRIVER
    ending = child.run(
        child.python(cudriver.__name__), environ=child.importable(environ), limit=LIMIT
    )
    if ending.find("gpus"):
        return ""
    return ending.find("failed") or cudriver.NO_GPU


def _run(
    path: str,
    mpiexec: Sequence[str],
    environ: Mapping[str, str],
    limit: float,
    say: child.Say | None,
) -> child.Ending:
    if not mpiexec:
        return child.Ending(127, (), "no mpirun or mpiexec was found")
    command, environ = launcher.job(mpiexec, 2, child.python(_JOB, path), environ)
    with _on_all_cores():
        return child.run(
            command,
            environ=child.importable(environ),
            limit=limit,
            say=say,
            doing=f"trying the {path} path with 2 ranks (at most {limit:g} s)",
        )


def _sweep(ending: child.Ending) -> None:
    """Remove the shared memory that ranks which crashed could not remove themselves."""
    if ending.code == 0:
        return
    for names in (said["shared"] for said in ending.reports if "shared" in said):
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(name)


@contextlib.contextmanager
def _on_all_cores() -> Iterator[None]:
    """Children started inside may use every core that this process is allowed to.

    A launcher may have bound us to one core, on which two ranks would fight.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    bound = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, bound)


def _judge(ending: child.Ending, limit: float) -> Result:
    """What the way in which a job ended says about its path."""
    seconds = {said["size"]: said["seconds"] for said in ending.reports if "size" in said}
    wrong = [said["size"] for said in ending.reports if said.get("right") is False]
    trying = ending.find("trying")
    where = f" at {readable(trying)}" if trying is not None else " before the first message"
    if ending.find("absent"):
        return Result(Outcome.ABSENT, ending.find("absent"))
    if wrong:
        return Result(Outcome.WRONG, "at " + ", ".join(map(readable, wrong)), seconds)
    if ending.find("failed"):
        return Result(Outcome.FAILED, ending.find("failed"), seconds)
    if ending.timed_out:
        return Result(Outcome.SILENT, f"not over after {limit:g} s, stopped{where}", seconds)
    if ending.crashed:
        return Result(Outcome.CRASHED, f"memory fault{where}", seconds)
    if ending.code or not seconds:
        said = ending.words.splitlines()
        return Result(
            Outcome.FAILED, f"exit code {ending.code}{where}: " + " / ".join(said[-3:]), seconds
        )
    return Result(Outcome.RIGHT, "", seconds)


def readable(size: int) -> str:
    """Bytes as people write them: 4 B, 64 KiB, 1 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size} {unit}"
        size //= 1024
    return f"{size} GiB"


def _decode(data: Any) -> Report:
    """The reverse of what ``keep`` writes; raises on anything else."""
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']}")
    paths = {
        name: Result(
            Outcome(result["outcome"]),
            str(result["detail"]),
            {int(size): float(seconds) for size, seconds in result["seconds"].items()},
        )
        for name, result in data["paths"].items()
    }
    access = data["access"]
    return Report(str(data["fingerprint"]), str(data["host"]), str(data["made"]), paths, access)
