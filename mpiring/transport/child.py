"""Child processes that may die.

Handing a device pointer to an MPI that does not know it is a segmentation
fault, and a launcher that does not fit the library may abort or hang. Such
things are tried in a child process, so that the parent can tell what happened:

* a child tells its findings as *reports*, one marked JSON object a line, because
  MPI libraries and launchers print what they like around them;
* reports made before a crash count: a child says what it is about to try;
* a child never outlives its limit: the parent ends it, and an alarm set by the
  child itself ends it where the parent is gone or a launcher lost sight of it.

Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Starts a line that carries a report.
MARK = "@mpiring "
#: Tells the child how many seconds it may live.
LIMIT = "MPIRING_CHILD_LIMIT"
#: After how many seconds a wait is worth a word.
PATIENCE = 1.5
#: Seconds between asking a child to end and ending it.
GRACE = 3.0

# The lines that faulthandler prints.
_TRACE = re.compile(r'Fatal Python error|Current thread 0x|Thread 0x|  File "|Extension modules:')

Say = Callable[[str], None]


@dataclass(frozen=True)
class Ending:
    """How a child ended, and what it said.

    ``code`` is the exit status, negative for a signal, or None where the limit ran out.
    """

    code: int | None
    reports: tuple[dict[str, Any], ...]
    text: str

    @property
    def timed_out(self) -> bool:
        return self.code is None

    @property
    def crashed(self) -> bool:
        """Whether a memory fault ended it. Launchers hide the signal in different ways."""
        faults = {int(signal.SIGSEGV), int(signal.SIGBUS)}
        return (
            (self.code is not None and self.code < 0 and -self.code in faults)
            or (self.code is not None and self.code - 128 in faults)
            or any(word in self.text for word in ("Segmentation fault", "Bus error"))
        )

    @property
    def words(self) -> str:
        """What it printed, without the trace that Python adds to a memory fault."""
        kept = [line for line in self.text.splitlines() if not _TRACE.match(line)]
        fault = ["memory fault"] if self.crashed else []
        return "\n".join(kept + fault)

    def find(self, key: str) -> Any:
        """The latest value reported under ``key``, or None."""
        return next((said[key] for said in reversed(self.reports) if key in said), None)


def run(
    command: Sequence[str],
    *,
    environ: Mapping[str, str],
    limit: float,
    say: Say | None = None,
    doing: str = "",
) -> Ending:
    """Run ``command`` for at most ``limit`` seconds and return how it ended.

    When it takes longer than a moment, ``say(doing)`` is called once. A command that cannot be
    started ends with code 127, as in a shell.
    """
    environ = {**environ, LIMIT: str(limit)}
    # A file and not a pipe: a grandchild that survives would keep a pipe open, and us waiting.
    with tempfile.TemporaryFile() as output:
        try:
            child = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                close_fds=False,  # a rank finds its launcher through an inherited descriptor
            )
        except OSError as error:
            return Ending(127, (), str(error))
        try:
            code = _wait(child, limit, say, doing)
        finally:
            _end(child)
        output.seek(0)
        reports, text = _parse(output.read().decode(errors="replace"))
    return Ending(code, reports, text)


def _wait(child: subprocess.Popen[bytes], limit: float, say: Say | None, doing: str) -> int | None:
    deadline = time.monotonic() + limit
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(min(PATIENCE, limit))
    if say is not None and doing:
        say(doing)
    with contextlib.suppress(subprocess.TimeoutExpired):
        return child.wait(max(0.0, deadline - time.monotonic()))
    if say is not None and doing:
        say(f"given up after {limit:g} s")
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()  # a launcher takes its ranks along
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _parse(output: str) -> tuple[tuple[dict[str, Any], ...], str]:
    reports: list[dict[str, Any]] = []
    rest: list[str] = []
    for line in output.splitlines():
        before, mark, data = line.partition(MARK)
        if mark:
            with contextlib.suppress(json.JSONDecodeError):
                reports.append(json.loads(data))
                line = before
        if line.strip():
            rest.append(line.rstrip())
    return tuple(reports), "\n".join(rest)


def python(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` of this package with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def importable(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ``, with this very copy of the package first on the path of a Python child."""
    root = str(Path(__file__).resolve().parents[2])
    rest = environ.get("PYTHONPATH")
    return {**environ, "PYTHONPATH": root + (os.pathsep + rest if rest else "")}


def begin() -> None:
    """Called first by a child: faults are printed and leave no core file, and the limit is kept
    without the parent.
    """
    faulthandler.enable()
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))
    limit = float(os.environ.get(LIMIT, "0"))
    if limit > 0 and hasattr(signal, "alarm"):
        signal.alarm(math.ceil(limit) + 1)  # the default action ends the process, in C code too


def report(**fields: Any) -> None:
    """Tell the parent, at once, so that it is known even if the next line crashes."""
    sys.stdout.write(f"{MARK}{json.dumps(fields)}\n")
    sys.stdout.flush()
