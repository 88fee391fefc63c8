"""The page: facts and findings set out for people.

A page is a list of lines, a line a list of (text, style) parts; the same lines go
to a terminal in colour, where rich is installed, and as plain text everywhere
else. Styles are names of meanings: head, good, problem, warning, note, dim.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import TextIO

from mpiring.doctor.facts import Facts, Rank, cores_of
from mpiring.doctor.verdict import (
    Finding,
    conclusion,
    count,
    mebibytes,
    shm_needed,
    unread,
    works,
)
from mpiring.schedule.catalog import READ_FROM
from mpiring.transport import cudriver
from mpiring.transport.launcher import disagreement
from mpiring.transport.probe import PATHS, Outcome, Result, readable

Part = tuple[str, str]
Line = list[Part]

#: Columns of the labels at the left.
_LABEL = 12
#: Columns of the text beside them, before a remark.
_TEXT = 28
#: Columns of one time.
_CELL = 9
#: More hosts than this are not listed one by one.
_MOST_HOSTS = 16

_COLOURS = {
    "head": "bold",
    "good": "green",
    "problem": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "dim": "dim",
    "": "",
}


def render(facts: Facts, findings: list[Finding], width: int = 88) -> list[Line]:
    """The whole page."""
    sections = [
        ("Software", _software(facts)),
        ("Launch", _launch(facts)),
        ("GPU", _gpu(facts)),
        ("Paths", _paths(facts)),
        ("Verdict", _verdict(facts, findings, width)),
    ]
    page: list[Line] = [_title(facts)]
    for name, lines in sections:
        page += [[], [(name, "head")], *lines]
    return page


def write(lines: Iterable[Line], stream: TextIO, *, colour: bool) -> None:
    """To ``stream``: in colour where that is wanted and rich is installed."""
    console = None
    if colour:
        try:
            from rich.console import Console

            console = Console(file=stream, highlight=False)
        except ImportError:
            pass
    for line in lines:
        if console is None:
            stream.write("".join(text for text, _ in line).rstrip() + "\n")
        else:
            from rich.text import Text

            parts = [(text, _COLOURS[style]) for text, style in line]
            console.print(Text.assemble(*parts), soft_wrap=True)
    stream.flush()


def columns() -> int:
    """How wide the page may be."""
    return max(60, min(100, shutil.get_terminal_size((88, 24)).columns))


def _row(label: str, text: str, remark: str = "", style: str = "") -> Line:
    line: Line = [(f"  {label:<{_LABEL}}", "dim"), (text, style)]
    if remark:
        line.append((f"{'':{max(2, _TEXT - len(text))}}{remark}", "dim"))
    return line


def _title(facts: Facts) -> Line:
    where = facts.here.host if len(facts.hosts) == 1 else count(len(facts.hosts), "host")
    line = f"mpiring doctor on {where}"
    if facts.launch:
        line += f", {facts.launch.size} process{'es' * (facts.launch.size > 1)}"
    return [(line, "head")]


def _software(facts: Facts) -> Iterator[Line]:
    here, mpi = facts.here, facts.mpi
    yield _row("mpiring", facts.mpiring, facts.folder)
    yield _row("Python", here.python, here.executable)
    yield _row("NumPy", here.numpy or "missing", style="" if here.numpy else "problem")
    missing = facts.trouble is not None and facts.trouble.kind == "no mpi4py"
    if mpi:
        yield _row("mpi4py", mpi.mpi4py)
        yield _row("MPI", mpi.name, mpi.path)
        if mpi.threads:
            able = "" if mpi.threads == "MULTIPLE" else "no "
            yield _row("Threads", mpi.threads, f"{able}progress thread possible")
    else:
        yield _row("mpi4py", "missing" if missing else "installed", style="problem" * missing)
        yield _row("MPI", "unknown" if missing else "no library", style="problem" * (not missing))
    if not facts.cupy_packages:
        yield _row("CuPy", facts.cupy.version if facts.cupy else "not installed")
    for name in facts.cupy_packages:
        yield _row("CuPy", here.packages[name], name)


def _launch(facts: Facts) -> Iterator[Line]:
    if facts.launch is None:
        yield _row("Launcher", "none: this process was started by itself")
    else:
        told = disagreement(facts.launch, len(facts.ranks))
        if facts.launch_failure or told:
            yield _row("Launcher", facts.launch.launcher, "does not fit the library", "problem")
        elif facts.mpi is None or facts.trouble:
            yield _row("Launcher", facts.launch.launcher)
        else:
            yield _row("Launcher", facts.launch.launcher, "agrees with the library")
    if facts.mpiexec:
        tried = facts.probe is not None and facts.probe.works("host")
        yield _row("To start", f"{facts.mpirun} -n 2 python ...", "tried, works" * tried)
    for host, ranks in list(facts.hosts.items())[:_MOST_HOSTS]:
        yield _row(host[:_LABEL], _placement(facts, ranks))
    if len(facts.hosts) > _MOST_HOSTS:
        yield _row("", f"and {len(facts.hosts) - _MOST_HOSTS} hosts more")
    if facts.here.shm_size is not None and facts.here.shm_free is not None:
        need = shm_needed(facts, facts.hosts[facts.here.host])
        short = facts.here.shm_free < need
        yield _row(
            "/dev/shm",
            f"{mebibytes(facts.here.shm_free)} free of {mebibytes(facts.here.shm_size)}",
            f"about {mebibytes(need)} needed",
            "warning" if short else "",
        )


def _placement(facts: Facts, ranks: list[Rank]) -> str:
    cores = sorted({core for rank in ranks for core in rank.cores})
    text = f"{count(len(cores), 'core')} ({spans(cores)})"
    if cores_of(ranks) < len(cores):
        text += f", of which the container grants the time of {cores_of(ranks):g}"
    if facts.launch and len(facts.ranks) == facts.launch.size:
        noun = "rank" if len(ranks) == 1 else "ranks"
        text = f"{noun} {spans([rank.rank for rank in ranks])} on {text}"
        if len(ranks) > 1 and all(len(rank.cores) < len(cores) for rank in ranks):
            most = max(len(rank.cores) for rank in ranks)
            text += f", each rank bound to {most}"
    return text


def _gpu(facts: Facts) -> Iterator[Line]:
    here = facts.here
    if here.cuda:
        yield _row("Driver", f"runs CUDA {here.cuda[0]}.{here.cuda[1]}", here.driver)
    if not facts.gpus:
        why = here.gpu_error or cudriver.NO_DRIVER
        yield _row("none here", why)
    for host, ranks in list(facts.hosts.items())[:_MOST_HOSTS]:
        users: dict[str, list[int]] = {}
        seen = {gpu.uuid: gpu for rank in ranks for gpu in rank.gpus}
        for rank in ranks:
            if rank.gpu:
                users.setdefault(rank.gpu.uuid, []).append(rank.rank)
        label = host[:_LABEL]
        for identity, gpu in seen.items():
            mine = users.get(identity, [])
            used = f"rank{'s' * (len(mine) > 1)} {spans(mine)}" if mine else "no rank"
            yield _row(label, f"{gpu.name}, {mebibytes(gpu.memory)}", f"GPU {gpu.index}: {used}")
            label = ""
    if facts.gpus and facts.claims:
        said = [f"{claim.source}: {claim.text}" for claim in facts.claims]
        yield _row("CUDA-aware?", "; ".join(said))
    if facts.gpus and facts.probe and facts.probe.access is not None:
        yield _row("Peer access", "yes" if facts.probe.access else "no")


def _paths(facts: Facts) -> Iterator[Line]:
    if facts.here.unread is not None:
        no = unread(facts)
        how = "as messages" if no else "read where they are"
        which = f"ranks of one host, from {mebibytes(READ_FROM)} on"
        yield _row("host arrays", how, which, "note" if no else "")
    probe = facts.probe
    if probe is None:
        yield _row("not tried", "")
        return
    when = "just now" if facts.fresh else f"on {_date(probe.made)}; --refresh repeats it"
    yield [(f"  Two ranks of {probe.host} send to each other at once. Measured {when}.", "dim")]
    sizes = sorted({size for result in probe.paths.values() for size in result.seconds})
    if sizes:
        head = "".join(f"{readable(size):>{_CELL}}" for size in sizes)
        yield [(f"  {'':<{_LABEL}}{head}", "dim")]
    for name in PATHS:
        result = probe.paths.get(name)
        if result and result.outcome is not Outcome.ABSENT:
            yield _path(name, result, sizes)
    absent = [
        name
        for name in PATHS
        if name in probe.paths and probe.paths[name].outcome is Outcome.ABSENT
    ]
    if absent:
        reasons = sorted({probe.paths[name].detail for name in absent})
        yield [(f"  {', '.join(absent)}: not tried, {'; '.join(reasons)}", "dim")]


def _path(name: str, result: Result, sizes: list[int]) -> Line:
    label: Part = (f"  {name:<{_LABEL}}", "dim")
    failed: Part = (f"  {result.outcome.value}: {result.detail}", "warning")
    if not result.seconds:
        return [label, failed]
    cells = "".join(
        f"{seconds(result.seconds[size]) if size in result.seconds else '':>{_CELL}}"
        for size in sizes
    )
    largest, time = max(result.seconds.items())
    right: Part = (f"  right, {largest / time / 1e9:.3g} GB/s each way", "good")
    return [label, (cells, ""), right if result.works else failed]


def _date(made: str) -> str:
    """An ISO 8601 time as people write it."""
    return made[:16].replace("T", " ") + " UTC"


def _verdict(facts: Facts, findings: list[Finding], width: int) -> Iterator[Line]:
    style = "good" if works(findings) else "problem"
    for text in textwrap.wrap(conclusion(facts, findings), width - 2):
        yield [(f"  {text}", style)]
    for finding in findings:
        yield []
        yield from _finding(finding, width)


def _finding(finding: Finding, width: int) -> Iterator[Line]:
    style = finding.severity.value
    margin = " " * 11
    label = f"  {finding.severity.value:<9}"
    for text in textwrap.wrap(finding.title, width - len(margin)):
        yield [(label, style), (text, "head")]
        label = margin
    for text in textwrap.wrap(finding.why, width - len(margin)):
        yield [(margin + text, "")]
    for command in finding.mend:
        line, mark, remark = command.partition("   #")
        yield [(f"{margin}$ ", style), (line, ""), (mark + remark, "dim")]


def seconds(value: float) -> str:
    """A time as people write it: 1.2 us, 34 ms."""
    for unit, scale in (("us", 1e-6), ("ms", 1e-3)):
        if value < 999.5 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} s"


def spans(numbers: Iterable[int]) -> str:
    """Sorted numbers as runs: 0-3, 5, 7-8."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
