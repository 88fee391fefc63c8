"""One pytest session spread over the ranks of an MPI job.

    mpirun -n 3 python -m tests.mpi.runner [pytest's arguments]

Every rank runs the same tests in the same order. After each phase of a test
(set-up, call, tear-down) the ranks exchange what came of it, and all take the
same verdict: a test fails when it fails on any rank, is skipped only when all
skip it, and every rank goes on to the same next phase. Rank 0 alone writes, and
shows each failing rank's traceback under its number.

A rank that never comes to the exchange would keep the others waiting for ever,
so each test runs against a clock:

* a test that takes too long (its ``timeout`` mark says how long, or setup.cfg)
  ends the whole job, each rank first writing what it was doing;
* a rank that failed gives the others ``--mpi-grace`` seconds to come to the end
  of the phase too, then writes its traceback and ends the job: by then they are
  waiting for a message that it will not send.

A process ends the job by leaving without MPI_Finalize, which makes every
launcher stop the others. That needs no working MPI, nor the main thread.

The exchange runs on a communicator of its own and gives its core away while it
waits, because the ranks may share few cores.
"""

from __future__ import annotations

import collections
import contextlib
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from mpi4py import MPI

#: Longer than two ranks' clocks can lie apart: all write before the first one leaves.
DUMP_SECONDS = 0.5


class Clock:
    """Ends this process, and with it the job, unless stopped in time."""

    def __init__(self, who: str) -> None:
        self._who = who
        # Tests run with file descriptor 2 captured; what is said last must still be seen.
        self._stderr = os.dup(2)
        self._timer: threading.Timer | None = None
        self._end = 0.0

    def start(self, seconds: float, message: str, *, stacks: bool = True) -> None:
        """Allow ``seconds`` from now, and no more than an earlier start has left."""
        end = time.monotonic() + seconds
        if self._timer is not None:
            self._timer.cancel()
            end = min(end, self._end)
        self._end = end
        self._timer = threading.Timer(
            max(0.0, end - time.monotonic()), self._leave, [message, stacks]
        )
        self._timer.daemon = True
        self._timer.start()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self, message: str, stacks: bool) -> None:
        text = f"\n{self._who}: {message}\n" + (_stacks() if stacks else "")
        # In one piece, so that the launcher does not mix the lines of several ranks.
        os.write(self._stderr, text.encode())
        time.sleep(DUMP_SECONDS)
        os._exit(1)


def _stacks() -> str:
    """Where this process's threads are, the asking one excepted: innermost frames only."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"{names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame, limit=8))
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )


@dataclass(frozen=True)
class Verdict:
    """What one phase of one test came to on one rank."""

    outcome: str
    headline: str
    text: str
    sections: tuple[tuple[str, str], ...]


class MPIPlugin:
    """Keeps the ranks' pytest sessions in step, and their results together."""

    def __init__(self, comm: MPI.Intracomm, clock: Clock) -> None:
        self._comm = comm
        self._clock = clock

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        arrived = self._comm.Ibarrier()
        while not arrived.Test():
            time.sleep(0.0002)
        return self._comm.allgather(value)

    def pytest_addoption(self, parser: pytest.Parser) -> None:
        # In the place of pytest-timeout, which knows one process only.
        parser.addini("timeout", "seconds allowed for each test", default="60")
        parser.addoption(
            "--mpi-grace",
            type=float,
            default=5.0,
            help="seconds that the other ranks have once one has failed",
        )

    def pytest_configure(self, config: pytest.Config) -> None:
        config.addinivalue_line("markers", "timeout(seconds): seconds allowed for this test")

    def pytest_report_header(self) -> str:
        library = MPI.Get_library_version().splitlines()[0].strip()
        return f"mpi: {self._comm.size} ranks, {library}"

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = [item.nodeid for item in session.items]
        for rank, theirs in enumerate(self.exchange(mine)):
            if theirs != mine:
                differ = sorted(set(mine) ^ set(theirs)) or "only in their order"
                raise pytest.UsageError(
                    f"rank {self._comm.rank} and rank {rank} collected other tests: {differ}"
                )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        mark = item.get_closest_marker("timeout")
        seconds = float(mark.args[0] if mark else item.config.getini("timeout"))
        self._clock.start(seconds, f"{item.nodeid} is not over after {seconds:g} s, and is here:")
        try:
            return (yield)
        finally:
            self._clock.stop()

    # Outermost, so that skip and xfail marks have had their say.
    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.failed:
            grace = item.config.getoption("--mpi-grace")
            self._clock.start(
                grace,
                f"{item.nodeid} failed here, and the other ranks did not come to the end "
                f"of its {report.when} within {grace:g} s:\n{report.longreprtext}",
                stacks=False,
            )
        crash = getattr(report.longrepr, "reprcrash", None)
        headline = crash.message.partition("\n")[0] if crash else ""
        mine = Verdict(report.outcome, headline, report.longreprtext, tuple(report.sections))
        _agree(report, self.exchange(mine))
        return report


def _agree(report: pytest.TestReport, verdicts: Sequence[Verdict]) -> None:
    """Make ``report``, one rank's own, say what all the ranks' verdicts come to."""
    outcomes = [verdict.outcome for verdict in verdicts]
    if "failed" in outcomes:
        text = _failures(verdicts)
    elif len(set(outcomes)) > 1:
        skipped = [rank for rank, outcome in enumerate(outcomes) if outcome == "skipped"]
        text = f"skipped on ranks {skipped} only: either all ranks skip a test or none"
    else:
        return
    report.outcome = "failed"
    report.longrepr = text
    report.sections = []  # they are in the text, rank by rank
    vars(report).pop("wasxfail", None)


def _failures(verdicts: Sequence[Verdict]) -> str:
    # Often all ranks fail alike, but for addresses of objects; that is shown once.
    alike: dict[str, list[int]] = collections.defaultdict(list)
    for rank, verdict in enumerate(verdicts):
        if verdict.outcome == "failed":
            alike[re.sub(r"0x[0-9a-f]+", "0x", verdict.text)].append(rank)
    lines = []
    for ranks in alike.values():
        verdict = verdicts[ranks[0]]
        which = ", ".join(map(str, ranks))
        lines.append(f"rank {which} of {len(verdicts)}: {verdict.headline}")
        lines.append(verdict.text)
        lines.extend(f"--- {title}\n{text}" for title, text in verdict.sections)
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run pytest on ``argv``; the exit code is pytest's on rank 0, and 0 elsewhere."""
    comm = MPI.COMM_WORLD.Dup()
    rank, size = comm.rank, comm.size
    clock = Clock(f"rank {rank} of {size}")
    if rank:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
    temporary = comm.bcast(None if rank else tempfile.mkdtemp(prefix="mpiring-tests-"))
    options = [
        "-p", "no:cacheprovider",
        "-p", "no:timeout",
        "--basetemp", os.path.join(temporary, str(rank)),
    ]  # fmt: skip
    code = int(pytest.main([*options, *argv], plugins=[MPIPlugin(comm, clock)]))
    clock.start(30.0, "MPI_Finalize does not return")
    comm.Barrier()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
    comm.Free()
    MPI.Finalize()
    clock.stop()
    return 0 if rank else code


if __name__ == "__main__":
    code = 1
    with contextlib.suppress(KeyboardInterrupt):
        code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
