"""What launchers set, and what a job of our own must not see of it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from mpiring.transport import launcher
from mpiring.transport.launcher import Launch

HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "9", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "PMIX_RANK": "3",
    "PRTE_LAUNCHED": "1",
    "OMPI_MCA_num_procs": "8",
}


@pytest.mark.parametrize(
    ("environ", "rank", "size", "name"),
    [
        (HYDRA, 1, 4, "Hydra"),
        (OPEN_MPI, 3, 8, "Open MPI"),
        ({"SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3"}, 2, 3, "Slurm"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", **HYDRA}, 0, 2, "Slurm"),
        ({"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}, 0, 2, "Hydra"),
    ],
)
def test_rank_and_size_as_the_launcher_said(
    environ: dict[str, str], rank: int, size: int, name: str
) -> None:
    launch = launcher.launched(environ)
    assert launch is not None
    assert (launch.rank, launch.size) == (rank, size)
    assert name in launch.launcher


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PMI_RANK": "0"},
        {"PMI_RANK": "zero", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # a batch script, not a step
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    assert launcher.launched(environ) is None


def test_disagreement() -> None:
    launch = Launch("a launcher", 0, 2)
    assert launcher.disagreement(None, 1) is None
    assert launcher.disagreement(launch, 2) is None
    assert "rank 0 of 1" in (launcher.disagreement(launch, 1) or "")
    assert "3 ranks" in (launcher.disagreement(launch, 3) or "")


def test_clean_takes_what_launchers_set_and_keeps_what_people_set() -> None:
    people = {
        "PATH": "/bin",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_MCA_pml": "ucx",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "PMIX_MCA_gds": "hash",
        "I_MPI_OFFLOAD": "1",
        "I_MPI_PIN": "0",
        "UCX_TLS": "tcp,self",
        "MPIR_CVAR_ENABLE_GPU": "0",
    }
    intel = {"I_MPI_HYDRA_UUID": "4c", "I_MPI_INFO_NP": "1", "HYDRA_BSTRAP_LAUNCHER": "ssh"}
    batch = {"SLURM_JOB_ID": "7", "PBS_NODEFILE": "/tmp/nodes"}
    assert launcher.clean({**people, **HYDRA, **OPEN_MPI, **intel, **batch}) == people


def test_settings_are_the_same_in_and_out_of_a_job() -> None:
    people = {"UCX_TLS": "tcp", "I_MPI_OFFLOAD": "1", "OMPI_MCA_pml": "ob1"}
    placed = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "HOME": "/root"}
    assert launcher.settings({**people, **placed, **HYDRA, **OPEN_MPI}) == people


def command(folder: Path, name: str) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text("#!/bin/sh\n")
    file.chmod(0o755)
    return str(file)


def test_the_launcher_beside_the_library_comes_first(tmp_path: Path) -> None:
    other = command(tmp_path / "other", "mpirun")
    mine = command(tmp_path / "mpi" / "bin", "mpirun")
    library = str(tmp_path / "mpi" / "lib" / "x86_64" / "libmpi.so.12")
    environ = {"PATH": os.path.dirname(other)}
    assert launcher.mpiexec(library, "MPICH", environ) == [mine]
    given = {**environ, launcher.MPIEXEC: "srun --overlap"}
    assert launcher.mpiexec(library, "MPICH", given) == ["srun", "--overlap"]


def test_the_launcher_of_the_same_vendor_where_a_folder_holds_several(tmp_path: Path) -> None:
    bin = tmp_path / "usr" / "bin"
    for name in ("mpirun", "mpirun.mpich", "mpirun.openmpi"):
        command(bin, name)
    library = str(tmp_path / "usr" / "lib" / "libmpi.so.40")
    assert launcher.mpiexec(library, "Open MPI", {}) == [str(bin / "mpirun.openmpi")]
    assert launcher.mpiexec(library, "MPICH", {}) == [str(bin / "mpirun.mpich")]


def test_no_launcher_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert launcher.mpiexec(str(tmp_path / "lib" / "libmpi.so"), "MPICH", {"PATH": ""}) == []


def test_a_job_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    argv, environ = launcher.job(["/opt/bin/mpirun"], 2, ["prog", "x"], {"PATH": "/bin", **HYDRA})
    assert argv == ["/opt/bin/mpirun", "-n", "2", "prog", "x"]
    assert environ["PATH"] == "/opt/bin:/bin"
    assert environ["OMPI_ALLOW_RUN_AS_ROOT"] == "1"
    assert environ["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert not set(HYDRA) & set(environ)


def test_what_people_chose_is_not_overruled() -> None:
    mine = {"PATH": "/bin", "PRTE_MCA_rmaps_default_mapping_policy": "slot"}
    _, environ = launcher.job(["mpirun"], 2, ["prog"], mine)
    assert environ["PRTE_MCA_rmaps_default_mapping_policy"] == "slot"


def test_a_launcher_given_by_hand_keeps_its_batch_system() -> None:
    mine = {"PATH": "/bin", "SLURM_JOB_ID": "7", launcher.MPIEXEC: "srun --overlap"}
    argv, environ = launcher.job(["srun", "--overlap"], 2, ["prog"], mine)
    assert argv == ["srun", "--overlap", "-n", "2", "prog"]
    assert environ["SLURM_JOB_ID"] == "7"
