"""The launcher: what it told this process, and how to start a job of our own.

A launcher gives each process its rank through environment variables. An MPI
library that does not understand them starts every process as rank 0 of 1, and a
program that expected eight ranks runs eight times instead. So the variables are
read here, without MPI, and compared with the size that MPI reports.

A job started from inside another job must not find the outer one's variables: it
would try to join it. ``clean`` takes away what launchers and batch systems set
and keeps what people set (``I_MPI_OFFLOAD``, ``OMPI_MCA_...``, ``UCX_...``).

Imports only the standard library.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: Names the command that starts MPI jobs, where the one found by itself is not right.
MPIEXEC = "MPIRING_MPIEXEC"


class Launch(NamedTuple):
    """What a launcher said to this process."""

    launcher: str
    rank: int
    size: int


# The variables that hold rank and size, the more telling first: PMI_RANK is set by several.
_LAUNCHERS = (
    ("Open MPI's mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MVAPICH's launcher", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("Slurm's srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    ("Hydra (MPICH, Intel MPI)", "PMI_RANK", "PMI_SIZE"),
    ("Hydra (MPICH, Intel MPI)", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def launched(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """What the launcher of this process said, or None where there was none (or none we know)."""
    for name, rank, size in _LAUNCHERS:
        try:
            return Launch(name, int(environ[rank]), int(environ[size]))
        except (KeyError, ValueError):
            continue
    return None


def disagreement(launch: Launch | None, size: int) -> str | None:
    """What is wrong when the launcher said ``launch`` and MPI reports ``size`` ranks, or None."""
    if launch is None or launch.size == size:
        return None
    if size == 1:
        return (
            f"{launch.launcher} started {launch.size} processes, but to the MPI library each of "
            "them is rank 0 of 1: the launcher belongs to another MPI"
        )
    return (
        f"{launch.launcher} started {launch.size} processes, "
        f"but the MPI library reports {size} ranks"
    )


# What launchers and batch systems set for the processes of one job.
_SET_BY_LAUNCHERS = re.compile(
    r"""PMI_|PMI2_|PMIX_(?!MCA_)|PALS_|HYDI_|HYDRA_(BSTRAP|LAUNCH_TYPE|IP_VERSION)|MPI_LOCAL
    |OMPI_(?!MCA_|ALLOW_RUN_AS_ROOT)|OMPI_MCA_(PREFIXES|initial_wdir|num_procs|cpu_type|orte_|ess)
    |PRTE_(?!MCA_)|MV2_COMM_|I_MPI_(HYDRA_UUID|HYDRA_TOPOLIB|INFO_|INTERNAL_|MPIRUN$|PIN_INFO
    |PIN_MAPPING|BIND_WIN_ALLOCATE|RETURN_WIN_MEM_NUMA)|SLURM_|PBS_|LSB_|LSF_|COBALT_|FLUX_|JSM_
    |PE_HOSTFILE|GFORTRAN_UNBUFFERED""",
    re.VERBOSE,
)


def clean(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """``environ`` without what a launcher or a batch system set: as if started from a shell."""
    return {name: value for name, value in environ.items() if not _SET_BY_LAUNCHERS.match(name)}


# Read by people, and part of a probe's fingerprint; where ranks are placed is left out.
_SETTINGS = re.compile(
    r"I_MPI_|MPICH_|MPIR_CVAR_|OMPI_MCA_(?!rmaps)|UCX_|FI_(?!PROVIDER_PATH)|CUDA_VISIBLE_DEVICES$"
)


def settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that change what the MPI library does, sorted by name."""
    mine = clean(environ)
    return {name: mine[name] for name in sorted(mine) if _SETTINGS.match(name)}


def mpiexec(
    library: str | None = None, vendor: str = "", environ: Mapping[str, str] = os.environ
) -> list[str]:
    """The command that starts jobs of the MPI whose shared library is ``library``; [] if none.

    In this order: ``$MPIRING_MPIEXEC``, beside the library, beside Python, on the path. Where
    a folder holds several (``mpirun.mpich`` and ``mpirun.openmpi``), that of ``vendor``.
    """
    if environ.get(MPIEXEC):
        return shlex.split(environ[MPIEXEC])
    folders = [parent / "bin" for parent in list(Path(library).parents)[1:5]] if library else []
    folders.append(Path(sys.executable).parent)
    folders += [Path(entry) for entry in environ.get("PATH", "").split(os.pathsep) if entry]
    suffix = vendor.lower().replace(" ", "")
    for folder in folders:
        for name in (f"mpirun.{suffix}", f"mpiexec.{suffix}", "mpirun", "mpiexec"):
            found = shutil.which(name, path=str(folder))
            if found:
                return [found]
    return []


def job(
    command: Sequence[str],
    ranks: int,
    program: Sequence[str],
    environ: Mapping[str, str] = os.environ,
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of a job of its own: ``ranks`` processes of ``program``.

    ``command`` is what ``mpiexec`` returned. As root in a container and with more ranks than
    cores, Open MPI runs only when told so; it is told.
    """
    # A launcher given by hand may be the batch system's and needs its variables.
    given = MPIEXEC in environ and list(command) == shlex.split(environ[MPIEXEC])
    ours = dict(environ) if given else clean(environ)
    # Intel MPI's mpirun finds its own parts on the path only.
    ours["PATH"] = os.pathsep.join(
        filter(None, [os.path.dirname(command[0]), ours.get("PATH", "")])
    )
    ours.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
    ours.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")  # Open MPI 4
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        ours.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        ours.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    return [*command, "-n", str(ranks), *program], ours
