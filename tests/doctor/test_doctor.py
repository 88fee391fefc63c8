"""The command as people run it: alone, in a job, and where something is wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from mpiring.transport import child, launcher
from tests.launch import Completed, Installation, Job, launch, require

DOCTOR = ["-m", "mpiring.doctor"]


def alone(
    *options: str, env: Mapping[str, str], python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Without a launcher."""
    environ = {**child.importable(launcher.clean()), **env}
    return subprocess.run(
        [python, *DOCTOR, *options], env=environ, capture_output=True, text=True, timeout=100
    )


def titles(ended: Completed | subprocess.CompletedProcess[str]) -> list[str]:
    return [finding["title"] for finding in json.loads(ended.stdout)["findings"]]


# --- all is well ----------------------------------------------------------------------------


def test_alone(mpi: Installation, home: dict[str, str]) -> None:
    ended = alone(python=mpi.python, env={**home, **mpi.environment})
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("mpiring doctor on ")
    assert ended.stdout.count("\nVerdict\n") == 1
    assert "mpiring works here" in ended.stdout
    assert "  host  " in ended.stdout
    assert "\x1b" not in ended.stdout
    kept = list(Path(home["XDG_CACHE_HOME"], "mpiring").iterdir())
    assert len(kept) == 1
    again = alone("--no-probe", python=mpi.python, env={**home, **mpi.environment})
    assert "--refresh repeats it" in again.stdout


@pytest.mark.parametrize("ranks", [1, 3])
def test_in_a_job_one_rank_speaks_for_all(
    mpi: Installation, ranks: int, home: dict[str, str]
) -> None:
    ended = launch(ranks, [*DOCTOR, "--json", "--no-probe"], mpi=mpi, env=home).check()
    told = json.loads(ended.stdout)
    assert told["works"] is True
    assert [rank["rank"] for rank in told["facts"]["ranks"]] == list(range(ranks))
    assert [rank["local_rank"] for rank in told["facts"]["ranks"]] == list(range(ranks))
    assert told["facts"]["launch"][1:] == [0, ranks]
    assert told["facts"]["mpi"]["vendor"].lower().replace(" ", "") == mpi.name
    assert told["facts"]["mpi"]["threads"] in ("MULTIPLE", "SERIALIZED", "FUNNELED", "SINGLE")
    assert told["facts"]["probe"] is None


def test_the_probe_inside_a_job_is_found_again_outside(
    mpi: Installation, home: dict[str, str]
) -> None:
    ended = launch(2, [*DOCTOR, "--json"], mpi=mpi, env=home).check()
    inside = json.loads(ended.stdout)
    assert inside["facts"]["fresh"] is True
    assert inside["facts"]["probe"]["paths"]["host"]["outcome"] == "right"
    outside = json.loads(alone("--json", python=mpi.python, env={**home, **mpi.environment}).stdout)
    assert outside["facts"]["fresh"] is False
    assert outside["facts"]["probe"] == inside["facts"]["probe"]


def test_a_cache_that_cannot_be_written_is_a_note(home: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cache").touch()
    mpi = require()
    ended = alone("--json", python=mpi.python, env={**home, **mpi.environment})
    assert ended.returncode == 0
    assert "the probe's answer could not be kept" in titles(ended)


def test_gpus_and_who_uses_them(fake_cuda: Path, home: dict[str, str]) -> None:
    env = {**home, "LD_LIBRARY_PATH": str(fake_cuda), "FAKE_CUDA": "unaware"}
    ended = launch(3, [*DOCTOR, "--no-probe"], env=env).check()
    assert "GPU 0: ranks 0, 2" in ended.stdout
    assert "GPU 1: rank 1" in ended.stdout
    assert "runs CUDA 13.1" in ended.stdout
    assert "pip install cupy-cuda13x" in ended.stdout


# --- wrong launchers ------------------------------------------------------------------------


@pytest.mark.parametrize(("under", "python"), [("mpich", "openmpi"), ("openmpi", "mpich")])
def test_the_launcher_of_another_mpi(under: str, python: str, home: dict[str, str]) -> None:
    ours, theirs = require(python), require(under)
    mixed = Installation(under, theirs.prefix, theirs.environment)
    program = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    argv = ["-c", program, ours.python, *DOCTOR, "--no-probe"]
    ended = launch(2, argv, mpi=mixed, env={**home, **ours.environment})
    assert ended.returncode == 1
    assert ended.stdout.count("\nVerdict\n") == 1, "one rank speaks, though each thinks it is 0"
    assert "mpiring cannot work here yet" in ended.stdout
    assert f"{ours.prefix}/bin/mpirun -n 2 python" in ended.stdout


def test_a_launcher_that_mpi_does_not_hear(home: dict[str, str]) -> None:
    mpi = require()
    for rank in ("0", "1"):
        env = {**home, "FLUX_TASK_RANK": rank, "FLUX_JOB_SIZE": "2"}
        ended = alone("--json", "--no-probe", python=mpi.python, env=env)
        if rank == "0":
            assert "every process is rank 0 of 1" in titles(ended)
            assert ended.returncode == 1
        else:
            assert ended.stdout == ""
            assert ended.returncode == 0


def test_an_mpirun_on_the_path_that_is_another(tmp_path: Path, home: dict[str, str]) -> None:
    mpi = require()
    other, same = tmp_path / "other" / "mpirun", tmp_path / "same" / "mpirun"
    for folder in (other.parent, same.parent):
        folder.mkdir()
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    same.symlink_to(mpi.mpirun)

    def found(first: Path, **more: str) -> bool:
        env = {**home, "PATH": f"{first.parent}:{os.environ['PATH']}", **more}
        ended = alone("--json", "--no-probe", python=mpi.python, env=env)
        return "mpirun on your path belongs to another installation" in titles(ended)

    assert found(other)
    assert not found(same)
    assert not found(other, MPIRING_MPIEXEC="srun --overlap")


# --- something is missing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("init", "title"),
    [
        ("", "mpi4py is missing"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "MPICH 1.2.3 ended while it was starting"),
        ("os._exit(7)", "MPICH 1.2.3 ended while it was starting"),
        ("raise SystemError('no')", "MPICH 1.2.3 ended while it was starting"),
        ("time.sleep(600)", "MPICH 1.2.3 did not start in time"),
    ],
)
def test_mpi_that_does_not_start(
    fake_mpi4py: Callable[[str], dict[str, str]], home: dict[str, str], init: str, title: str
) -> None:
    ended = alone("--json", "--timeout", "4", env={**home, **fake_mpi4py(init)})
    assert title in titles(ended)
    assert ended.returncode == 1


def test_no_mpi_library(home: dict[str, str]) -> None:
    mpi = require()
    ended = alone(python=mpi.python, env={**home, "MPI4PY_LIBMPI": "/no/such/libmpi.so"})
    assert ended.returncode == 1
    assert "no MPI library was found" in ended.stdout
    assert "pip install mpich" in ended.stdout


def test_no_numpy(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path), child.importable({})["PYTHONPATH"]])
    ended = alone("--json", "--no-probe", env={**home, "PYTHONPATH": path})
    assert "NumPy is missing" in titles(ended)
    assert ended.returncode == 1


def test_a_broken_cupy_is_found_and_harms_nothing(tmp_path: Path, home: dict[str, str]) -> None:
    (tmp_path / "cupy.py").write_text("import os\nos.kill(os.getpid(), 11)")
    info = tmp_path / "cupy_cuda13x-14.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cupy-cuda13x\nVersion: 14.0\n")
    path = os.pathsep.join([str(tmp_path), child.importable({})["PYTHONPATH"]])
    ended = alone("--json", "--no-probe", env={**home, "PYTHONPATH": path})
    told = json.loads(ended.stdout)
    assert told["facts"]["ranks"][0]["packages"]["cupy-cuda13x"] == "14.0"
    assert "memory fault" in told["facts"]["cupy"]["error"]
    assert "CuPy does not work" in titles(ended)


def test_help_needs_nothing() -> None:
    code = "import sys; sys.modules['numpy'] = sys.modules['mpi4py'] = None; sys.argv[1:] = ['-h']"
    program = f"{code}\nimport runpy; runpy.run_module('mpiring.doctor', run_name='__main__')"
    environ = child.importable(launcher.clean())
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True
    )
    assert ended.returncode == 0
    assert "--no-probe" in ended.stdout


@pytest.mark.parametrize("value", ["x", "0", "-1", "inf", "nan"])
def test_a_timeout_that_is_no_time(value: str) -> None:
    ended = alone(f"--timeout={value}", env={})
    assert ended.returncode == 2
    assert f"'{value}'" in ended.stderr


# --- interrupted ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process(
    fake_mpi4py: Callable[[str], dict[str, str]],
    home: dict[str, str],
    tmp_path: Path,
    number: signal.Signals,
) -> None:
    told = tmp_path / "pid"
    hang = f"open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    environ = {**child.importable(launcher.clean()), **home, **fake_mpi4py(hang)}
    doctor = subprocess.Popen(
        [sys.executable, *DOCTOR], env=environ, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    while not told.exists() or not told.read_text():
        time.sleep(0.01)
    doctor.send_signal(number)
    assert doctor.wait(30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_leaves_no_process(
    fake_mpi4py: Callable[[str], dict[str, str]], home: dict[str, str], number: signal.Signals
) -> None:
    env = {**home, **fake_mpi4py("time.sleep(600)")}
    with Job(2, DOCTOR, env=env) as job:
        job.wait_for("starting MPI")
        job.send(number, group=number is signal.SIGINT)
        assert job.finish().returncode != 0
