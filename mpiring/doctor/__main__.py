"""The command: look, try, judge, print."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from mpiring import __version__
from mpiring.doctor import page, worker
from mpiring.doctor.facts import Cupy, Facts, Mpi, Rank, Trouble, claims
from mpiring.doctor.verdict import conclusion, diagnose, works
from mpiring.transport import child, launcher, probe

_WORKER = "mpiring.doctor.worker"

_DESCRIPTION = """\
What this machine's MPI and GPUs can do, on one page: what is installed, whether
launcher and library fit, which ways there are for arrays to travel and how fast,
and what mends each problem.
"""

_EPILOG = """\
examples:
  python -m mpiring.doctor                  this installation
  mpirun -n 2 python -m mpiring.doctor      and the launcher, and where the ranks are
  python -m mpiring.doctor --json > facts   for programs

exit code: 1 where a problem keeps mpiring from working at all, otherwise 0.
A missing GPU is no problem, and neither is a path for GPU arrays that does not work.
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    # So that an ended doctor ends its children: the finally clauses run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` is no error
    launch = launcher.launched()
    first = launch is None or launch.rank == 0
    ending = _look(os.environ, options.timeout, _say if first else None)
    if not (ending.find("world_rank") == 0 if (ending.find("world_size") or 1) > 1 else first):
        return 0
    facts = _gather(ending, launch, options)
    findings = diagnose(facts)
    if options.json:
        told = {
            "works": works(findings),
            "verdict": conclusion(facts, findings),
            "findings": [asdict(finding) for finding in findings],
            "facts": asdict(facts),
        }
        print(json.dumps(told, indent=1))
    else:
        # Some launchers give their processes a terminal even when their own output is a file.
        colour = launch is None and sys.stdout.isatty()
        page.write(page.render(facts, findings, page.columns()), sys.stdout, colour=colour)
    return 0 if works(findings) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mpiring.doctor",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--no-probe", action="store_true", help="start no jobs; tell what an earlier probe found"
    )
    parser.add_argument(
        "--refresh", action="store_true", help="probe anew, even where the answer is known"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=probe.LIMIT,
        metavar="S",
        help="seconds that each child process may take (default: %(default)g)",
    )
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds above 0 is needed")
    return value


def _say(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def _look(environ: Mapping[str, str], limit: float, say: child.Say | None) -> child.Ending:
    return child.run(
        child.python(_WORKER),
        environ=child.importable(environ),
        limit=limit,
        say=say,
        doing=f"starting MPI (at most {limit:g} s)",
    )


def _gather(
    ending: child.Ending, launch: launcher.Launch | None, options: argparse.Namespace
) -> Facts:
    """Everything about this installation, from how this process's worker ended."""
    trouble = _trouble(ending)
    launch_failure = ""
    if trouble and trouble.kind in ("died", "silent") and launch:
        # Under this launcher it fails; does it start without one? Said at once: a launcher whose
        # rank has died may end this process too.
        _say(
            f"MPI failed under {launch.launcher}, trying without it. Should this be the last line: "
            f"python -m mpiring.doctor, without a launcher, tells more. {trouble.text[-500:]}"
        )
        alone = _look(launcher.clean(), options.timeout, _say)
        if _trouble(alone) is None:
            launch_failure = trouble.text or "nothing"
            ending, trouble = alone, None
    everyone = ending.find("ranks") or [ending.find("rank")]
    # Whatever ended a worker before its first word also concerns this process: see for ourselves.
    ranks = tuple(Rank.of(each) for each in everyone if each) or (worker.look_around(),)
    found = ending.find("mpi")
    mpi = Mpi(**found) if found else None
    mpiexec = launcher.mpiexec(mpi.path, mpi.vendor) if mpi else []
    settings = launcher.settings()
    facts = Facts(
        mpiring=__version__,
        folder=str(Path(__file__).parents[1]),
        ranks=ranks,
        launch=launch,
        mpi=mpi,
        trouble=trouble,
        launch_failure=launch_failure,
        mpiexec=tuple(mpiexec),
        mpiexec_on_path=_on_path(mpiexec),
        root_refused=_root_refused(),
        settings=settings,
        claims=claims(mpi, settings, _ompi_info(mpi, mpiexec, options.timeout)) if mpi else (),
        cupy=_cupy(ranks[0], options.timeout),
    )
    if mpi and trouble is None:
        facts = _probed(facts, mpi, options)
    return facts


def _trouble(ending: child.Ending) -> Trouble | None:
    kind = ending.find("trouble")
    if kind:
        return Trouble(kind, ending.find("text"))
    if ending.find("world_size"):
        return None
    return Trouble("silent" if ending.timed_out else "died", ending.words)


def _probed(facts: Facts, mpi: Mpi, options: argparse.Namespace) -> Facts:
    known = None if options.refresh else probe.cached_probe(mpi.library)
    if known or options.no_probe or not facts.mpiexec:
        return replace(facts, probe=known)
    report = probe.probe(mpi.library, facts.mpiexec, limit=options.timeout, say=_say)
    unkept = probe.keep(report) if report.settled else None
    return replace(facts, probe=report, fresh=True, unkept=unkept or "")


def _cupy(rank: Rank, limit: float) -> Cupy | None:
    if not any(name.startswith("cupy") for name in rank.packages):
        return None
    ending = child.run(
        child.python(_WORKER, "--cupy"),
        environ=child.importable(launcher.clean()),
        limit=limit,
        say=_say,
        doing=f"importing CuPy and running its first kernel (at most {limit:g} s)",
    )
    error = ending.find("error") or ""
    if not error and ending.code != 0:
        how = "no answer in time" if ending.timed_out else f"ended with code {ending.code}"
        error = ": ".join([how, *ending.words.splitlines()[-1:]])
    return Cupy(ending.find("version") or "", error)


def _ompi_info(mpi: Mpi | None, mpiexec: Sequence[str], limit: float) -> str:
    """What Open MPI's own tool says, where the launcher is one that has it beside it."""
    if mpi is None or mpi.vendor != "Open MPI" or not mpiexec:
        return ""
    tool = shutil.which("ompi_info", path=os.path.dirname(mpiexec[0]))
    if tool is None:
        return ""
    ending = child.run([tool, "--parsable", "--all"], environ=launcher.clean(), limit=limit)
    return ending.text if ending.code == 0 else ""


def _on_path(mpiexec: Sequence[str]) -> str:
    """The mpirun that a shell would find; by the name of ``mpiexec`` where it is the same file."""
    found = shutil.which("mpirun")
    if found is None or launcher.MPIEXEC in os.environ:
        return ""
    same = len(mpiexec) == 1 and os.path.realpath(found) == os.path.realpath(mpiexec[0])
    return mpiexec[0] if same else found


def _root_refused() -> bool:
    told = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    return (
        hasattr(os, "geteuid")
        and os.geteuid() == 0
        and not all(os.environ.get(name) for name in told)
    )


if __name__ == "__main__":
    sys.exit(main())
