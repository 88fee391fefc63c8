"""From facts to findings: what is wrong, why it matters, and what mends it.

``diagnose`` is pure. Each rule looks at the facts and yields what it finds; a rule
that concerns something absent yields nothing. A *problem* keeps mpiring from
working at all, and nothing else is called so; a *warning* will slow or stop some
programs; a *note* is something to know.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from mpiring.doctor.facts import Facts, Rank, cores_of
from mpiring.transport.launcher import MPIEXEC, disagreement
from mpiring.transport.probe import Outcome

#: Shared memory that an MPI library takes for each rank of a host, bytes, rounded up: Open MPI 5
#: lays out 16 MiB, MPICH 5 fills 5.
SHM_PER_RANK = 16 << 20


class Severity(str, enum.Enum):
    PROBLEM = "problem"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One thing to know. ``mend``: shell commands, of which one or all help; may be empty."""

    severity: Severity
    title: str
    why: str
    mend: tuple[str, ...] = ()


def diagnose(facts: Facts) -> list[Finding]:
    """Every finding, the worst first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    order = list(Severity)
    return sorted(found, key=lambda finding: order.index(finding.severity))


def works(findings: Iterable[Finding]) -> bool:
    """Whether mpiring can work here at all."""
    return all(finding.severity is not Severity.PROBLEM for finding in findings)


def _problem(title: str, why: str, *mend: str) -> Finding:
    return Finding(Severity.PROBLEM, title, why, mend)


def _warning(title: str, why: str, *mend: str) -> Finding:
    return Finding(Severity.WARNING, title, why, mend)


def _note(title: str, why: str, *mend: str) -> Finding:
    return Finding(Severity.NOTE, title, why, mend)


# --- Python's side ---------------------------------------------------------------------------


def _numpy(facts: Facts) -> Iterator[Finding]:
    if not facts.here.numpy:
        yield _problem(
            "NumPy is missing", "Arrays on the host are NumPy arrays.", "pip install numpy"
        )


def _no_mpi(facts: Facts) -> Iterator[Finding]:
    if facts.trouble is None:
        return
    if facts.trouble.kind == "no mpi4py":
        has_mpi = bool(facts.mpi_packages or facts.mpiexec_on_path)
        yield _problem(
            "mpi4py is missing",
            "It is how Python calls MPI."
            + (" An MPI seems to be here already." if has_mpi else " mpich is an MPI library."),
            "pip install mpi4py" if has_mpi else "pip install mpi4py mpich",
        )
    elif facts.trouble.kind == "no library":
        yield _problem(
            "no MPI library was found",
            "mpi4py is here, but the library that it calls is not: none came with pip, and none "
            f"is where the loader looks.{_beyond_not_found(facts.trouble.text)}",
            "pip install mpich",
            "module load mpi   # or this, where the machine has one of its own",
        )


def _beyond_not_found(text: str) -> str:
    """What a failed import said besides that there is no libmpi of this or that name."""
    lines = [line for line in text.splitlines()[1:] if not _NOT_FOUND.fullmatch(line.strip())]
    return f" It said: {_last(chr(10).join(lines))}." if lines else ""


_NOT_FOUND = re.compile(r"\S*libmpi\S*: cannot open shared object file: No such file.*")


def _no_start(facts: Facts) -> Iterator[Finding]:
    if facts.trouble is None or facts.trouble.kind not in ("died", "silent"):
        return
    name = facts.mpi.name if facts.mpi else "MPI"
    how = "ended while it was starting" if facts.trouble.kind == "died" else "did not start in time"
    offload = facts.settings.get("I_MPI_OFFLOAD", "0")
    if offload != "0" and not facts.gpus:
        yield _problem(
            f"{name} {how}",
            f"I_MPI_OFFLOAD={offload} makes it look for a GPU, and there is none here.",
            "unset I_MPI_OFFLOAD",
        )
        return
    yield _problem(
        f"{name} {how}",
        f"It said: {_last(facts.trouble.text) or 'nothing'}",
        "python -c 'from mpi4py import MPI'   # shows all that it says",
    )


def _two_mpis(facts: Facts) -> Iterator[Finding]:
    if len(facts.mpi_packages) > 1:
        keep, *others = facts.mpi_packages
        yield _warning(
            f"two MPI libraries in one environment: {listed(facts.mpi_packages)}",
            "Each brings an mpirun of the same name, and the one installed last has overwritten "
            "the other.",
            f"pip uninstall -y {' '.join(others)}",
            f"pip install --force-reinstall --no-deps {keep}",
        )


# --- the launch ------------------------------------------------------------------------------


def _wrong_launcher(facts: Facts) -> Iterator[Finding]:
    right = f"{facts.mpirun} -n 2 python ..."
    if facts.launch_failure and facts.launch:
        name = facts.mpi.name if facts.mpi else "MPI"
        yield _problem(
            "the launcher does not fit the MPI library",
            f"{facts.launch.launcher} started this job, and {name} failed under it; without a "
            f"launcher it starts. It said: {_last(facts.launch_failure)}",
            right,
        )
    elif facts.launch and facts.mpi and facts.trouble is None:
        size = len(facts.ranks)
        told = disagreement(facts.launch, size)
        if told:
            title = (
                "every process is rank 0 of 1"
                if size == 1
                else "launcher and library disagree about the number of ranks"
            )
            yield _problem(title, f"{told}.", right)


def _launcher_missing(facts: Facts) -> Iterator[Finding]:
    if facts.mpi and not facts.mpiexec:
        yield _warning(
            "no mpirun was found",
            "There is none beside the MPI library, beside Python or on the path; the probe needs "
            "one too.",
            f"export {MPIEXEC}='srun'   # or whatever starts MPI jobs here",
        )


def _launcher_on_path(facts: Facts) -> Iterator[Finding]:
    found = facts.mpiexec_on_path
    if not facts.mpi or len(facts.mpiexec) != 1 or not found or found == facts.mpiexec[0]:
        return
    folder = facts.mpiexec[0].rpartition("/")[0]
    yield _warning(
        "mpirun on your path belongs to another installation",
        f"The path finds {found}; the library that Python uses is {facts.mpi.name}, whose "
        f"launcher is {facts.mpiexec[0]}.",
        f'export PATH="{folder}:$PATH"',
    )


def _root(facts: Facts) -> Iterator[Finding]:
    open_mpi = facts.mpi is not None and facts.mpi.vendor == "Open MPI"
    if open_mpi and facts.root_refused and facts.launch is None:
        yield _note(
            "Open MPI's mpirun refuses root",
            "It runs as root only when told twice; mpiring's own commands tell it.",
            "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        )


def _ranks_differ(facts: Facts) -> Iterator[Finding]:
    for what, value in _COMPARED:
        values = sorted({value(rank) for rank in facts.ranks})
        if len(values) > 1:
            holders = [
                f"{each or 'none'} on {next(r.host for r in facts.ranks if value(r) == each)}"
                for each in values
            ]
            yield _warning(
                f"ranks run different versions of {what}",
                f"{listed(holders)}. Messages and results may not fit together: "
                "use one environment on all hosts.",
            )


_COMPARED: tuple[tuple[str, Callable[[Rank], str]], ...] = (
    ("Python", lambda rank: rank.python),
    ("NumPy", lambda rank: rank.numpy),
    ("the MPI library", lambda rank: rank.library.partition("\n")[0]),
)


# --- the machine -----------------------------------------------------------------------------


def _cores(facts: Facts) -> Iterator[Finding]:
    for host, ranks in facts.hosts.items():
        cores = cores_of(ranks)
        if len(ranks) > cores:
            yield _warning(
                f"{len(ranks)} ranks share {count(cores, 'core')} on {host}",
                "A rank that waits takes time from one that computes. mpiring yields at once "
                "then, but times measured here say little. Start fewer ranks, or give them more "
                "cores: see the launcher's binding and the container's limit.",
                f"{facts.mpirun} -n {max(1, int(cores))} python ...",
            )


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    for host, ranks in facts.hosts.items():
        free = ranks[0].shm_free
        need = shm_needed(facts, ranks)
        if free is not None and _shm_short(facts, ranks):
            mib = -(-need // (64 << 20)) * 64
            yield _warning(
                f"/dev/shm is too small on {host}",
                f"{mebibytes(free)} are free and about {mebibytes(need)} are needed for "
                f"{count(need // SHM_PER_RANK, 'rank')}: a program may end by a bus error.",
                f"docker run --shm-size={mib}m ...",
                f"mount -o remount,size={mib}m /dev/shm   # or this, on the machine itself",
            )


def _shm_short(facts: Facts, ranks: list[Rank]) -> bool:
    free = ranks[0].shm_free
    return free is not None and free < shm_needed(facts, ranks)


def shm_needed(facts: Facts, ranks: list[Rank]) -> int:
    """Bytes of /dev/shm that the ranks of one host need; outside a job, a rank for each core."""
    in_job = facts.launch is not None and facts.launch.size == len(facts.ranks)
    expected = len(ranks) if in_job else max(2, int(cores_of(ranks)))
    return expected * SHM_PER_RANK


def _threads(facts: Facts) -> Iterator[Finding]:
    if facts.mpi and facts.mpi.threads and facts.mpi.threads != "MULTIPLE":
        yield _note(
            f"this MPI grants threads no more than THREAD_{facts.mpi.threads}",
            "A progress thread needs THREAD_MULTIPLE. mpiring polls instead, from between the "
            "layers: nothing is lost but the choice.",
        )


# --- GPUs ------------------------------------------------------------------------------------


def _cupy(facts: Facts) -> Iterator[Finding]:
    packages = facts.cupy_packages
    fitting = f"cupy-cuda{facts.here.cuda[0]}x" if facts.here.cuda else "cupy-cuda12x"
    if len(packages) > 1:
        yield _warning(
            f"{len(packages)} CuPy packages are installed: {listed(packages)}",
            "They overwrite each other's files, and which one is imported is chance.",
            f"pip uninstall -y {' '.join(packages)}",
            f"pip install {fitting}",
        )
        return
    if facts.gpus and not packages and facts.cupy is None:
        yield _warning(
            "CuPy is missing",
            "There is a GPU, and arrays on it are CuPy arrays.",
            f"pip install {fitting}",
        )
    newer = [name for name in packages if _built_for(name) > (facts.here.cuda or (99,))[0]]
    if newer and facts.here.cuda:
        yield _warning(
            f"{newer[0]} is too new for the driver",
            f"The driver runs CUDA {facts.here.cuda[0]}.{facts.here.cuda[1]} at most.",
            f"pip uninstall -y {newer[0]}",
            f"pip install {fitting}",
        )
    elif facts.cupy is not None and facts.cupy.error:
        yield _warning(
            "CuPy does not work",
            f"{facts.cupy.error}",
            "python -c 'import cupy; cupy.show_config()'   # shows what it finds",
        )


def _built_for(package: str) -> int:
    """The major CUDA version for which a CuPy package is built; 0: not known by its name."""
    found = re.fullmatch(r"cupy-cuda(\d\d)\w+", package)
    return int(found[1]) if found else 0


def _no_gpu(facts: Facts) -> Iterator[Finding]:
    if facts.gpus:
        return
    if facts.here.gpu_error:
        hidden = facts.settings.get("CUDA_VISIBLE_DEVICES")
        yield _warning(
            "there is a CUDA driver and no GPU to use",
            f"{facts.here.gpu_error}."
            + (f" CUDA_VISIBLE_DEVICES is '{hidden}'." if hidden is not None else ""),
            "unset CUDA_VISIBLE_DEVICES"
            if hidden is not None
            else "nvidia-smi   # shows what the driver thinks",
        )
    elif facts.cupy_packages:
        yield _note(
            "CuPy is installed and there is no CUDA driver",
            "Arrays stay on the host. In a container, the GPU must be handed in.",
            "docker run --gpus all ...",
        )


def _shared_gpus(facts: Facts) -> Iterator[Finding]:
    for host, ranks in facts.hosts.items():
        gpus = {gpu.uuid for rank in ranks for gpu in rank.gpus}
        used = {rank.gpu.uuid for rank in ranks if rank.gpu}
        if used and len(ranks) > len(used):
            idle = len(gpus) - len(used)
            yield _note(
                f"{len(ranks)} ranks share {count(len(used), 'GPU')} on {host}",
                "They take turns on it."
                + (f" {count(idle, 'GPU')} more would be free: see --gpu." if idle else ""),
            )


def unread(facts: Facts) -> list[Rank]:
    """Ranks that cannot read the memory of another rank of their host."""
    return [rank for rank in facts.ranks if rank.unread]


def _reading(facts: Facts) -> Iterator[Finding]:
    ranks = unread(facts)
    if ranks:
        yield _note(
            "ranks cannot read each other's memory",
            f"{ranks[0].unread}. Long host arrays travel as messages of MPI, which takes more "
            "copies. The system may keep it for debuggers, a container may forbid it.",
            "sysctl kernel.yama.ptrace_scope=0   # as root",
            "docker run --cap-add=SYS_PTRACE ...",
        )


def _direct(facts: Facts) -> Iterator[Finding]:
    """What the probe says about device pointers, against what the library says of itself."""
    if facts.probe is None or not facts.gpus or "direct" not in facts.probe.paths:
        return
    direct = facts.probe.paths["direct"]
    name = facts.mpi.name if facts.mpi else "MPI"
    believed = [claim.source for claim in facts.claims if claim.aware]
    if direct.works:
        if facts.claims and not believed:
            yield _note(
                f"{name} says that it is not CUDA-aware, and it is",
                "Device arrays arrived with the right bytes at every size; the probe is believed.",
            )
        return
    if direct.outcome is Outcome.ABSENT:
        return
    detour = _detour(facts)
    if believed:
        yield _warning(
            f"{name} claims to be CUDA-aware, and is not here",
            f"{listed(believed)} says yes; the direct path: {direct.outcome.value}, "
            f"{direct.detail}. Part of the library may lack CUDA. {detour}",
            "export MPIRING_GPU_PATH=staged   # to be explicit",
        )
        return
    why = f"The direct path: {direct.outcome.value}, {direct.detail}. {detour}"
    if facts.mpi and facts.mpi.vendor == "Intel MPI":
        mend = ["export I_MPI_OFFLOAD=1 I_MPI_OFFLOAD_MODE=cuda   # to make it so"]
    else:
        mend = []
        why += (
            " The direct path needs a library built for CUDA; of those from pip only Intel MPI "
            "(impi-rt) is."
        )
    yield _note(f"{name} is not CUDA-aware", why, *mend)


def _detour(facts: Facts) -> str:
    fastest = facts.probe.fastest() if facts.probe else None
    if fastest is None:
        return "No path for device arrays delivered the right bytes."
    return f"Device arrays can go the {fastest} way: it delivered the right bytes."


def _device_paths(facts: Facts) -> Iterator[Finding]:
    if facts.probe is None or not facts.gpus:
        return
    staged = facts.probe.paths.get("staged")
    if staged and staged.outcome not in (Outcome.RIGHT, Outcome.ABSENT):
        yield _warning(
            f"the staged path: {staged.outcome.value}",
            f"{staged.detail}. It needs nothing but copies to and from the GPU: look at the "
            "driver first.",
            "nvidia-smi",
        )
    peer = facts.probe.paths.get("peer")
    if peer and peer.outcome not in (Outcome.RIGHT, Outcome.ABSENT):
        yield _note(
            f"the peer path: {peer.outcome.value}",
            f"{peer.detail}. Ranks of one host cannot open each other's device memory; in "
            "containers they need one IPC namespace.",
            "docker run --ipc=host ...",
        )


def _several_hosts(facts: Facts) -> Iterator[Finding]:
    if facts.probe and facts.gpus and len(facts.hosts) > 1:
        yield _note(
            f"the probe knows {facts.probe.host} only",
            f"Its two ranks ran on one host; this job has {len(facts.hosts)}. Between hosts other "
            "parts of MPI are at work, and there the direct path is untried.",
        )


# --- the probe -------------------------------------------------------------------------------


def _host_path(facts: Facts) -> Iterator[Finding]:
    if facts.probe is None or facts.probe.works("host"):
        return
    host = facts.probe.paths["host"]
    why = f"{facts.mpirun} -n 2: {host.outcome.value}, {host.detail}."
    other = f"export {MPIEXEC}='srun'   # or whatever starts MPI jobs here"
    if len(facts.ranks) > 1:
        yield _note(
            "the probe could not run a job of its own", f"{why} This job itself runs.", other
        )
    elif host.outcome is Outcome.FAILED:
        yield _problem("two ranks could not be started", why, other)
    else:
        here = facts.hosts[facts.here.host]
        hint = " See /dev/shm below." if _shm_short(facts, here) else ""
        yield _problem("two ranks could not exchange bytes", why + hint)


def _cache(facts: Facts) -> Iterator[Finding]:
    if facts.unkept:
        yield _note(
            "the probe's answer could not be kept",
            f"{facts.unkept}. The probe will be made anew each time.",
            "export XDG_CACHE_HOME=/tmp/cache   # or any folder that can be written",
        )


RULES: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _numpy,
    _no_mpi,
    _no_start,
    _wrong_launcher,
    _launcher_missing,
    _host_path,
    _two_mpis,
    _launcher_on_path,
    _ranks_differ,
    _reading,
    _shared_memory,
    _cores,
    _cupy,
    _no_gpu,
    _device_paths,
    _direct,
    _shared_gpus,
    _several_hosts,
    _threads,
    _root,
    _cache,
)


# --- words -----------------------------------------------------------------------------------


def conclusion(facts: Facts, findings: Iterable[Finding]) -> str:
    """The verdict in one or two sentences."""
    if not works(findings):
        return "mpiring cannot work here yet."
    assert facts.mpi is not None  # its absence is a problem
    ranks = count(len(facts.ranks), "rank") if facts.launch else "as many ranks as you start"
    text = f"mpiring works here: NumPy arrays on {ranks}, through {facts.mpi.name}."
    if not facts.gpus:
        return f"{text} There is no GPU, so nothing was learned about CuPy arrays."
    if facts.probe is None:
        return f"{text} How CuPy arrays travel was not tried."
    fastest = facts.probe.fastest()
    if fastest is None:
        return f"{text} CuPy arrays will not: no path for them delivered the right bytes."
    return f"{text} CuPy arrays: the {fastest} path was the fastest that delivered the right bytes."


def count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" + ("" if number == 1 else "s")


def listed(items: list[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(items[:-1]), *items[-1:]]))


def mebibytes(size: int) -> str:
    """1.5 GiB, 64 MiB."""
    return f"{size / (1 << 30):.3g} GiB" if size >= 1 << 30 else f"{size / (1 << 20):.3g} MiB"


def _last(text: str) -> str:
    """What was said last, on one line, without a full stop."""
    lines = [re.sub(r"\.{3,}", "", line).strip(" -=") for line in text.splitlines()]
    kept = [line for line in lines if line]
    return " / ".join(kept[-3:])[-300:].rstrip(".")
