"""The command under its launchers: how it ends, and what is left of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.launch import ROOT, Installation, Job, launch, require
from tests.train.conftest import write_npz

TRAIN = ["-m", "mpiring.train"]
TINY = ["--hidden", "8", "--batch-size", "16"]

#: Raises in the third step of rank 1.
FAILS = """
import sys
from mpiring.train.loop import Trainer

step = Trainer._step

def failing(self, *arguments):
    if self.comm.rank == 1 and len(self.clock.steps) == 2:
        raise ValueError("on purpose")
    return step(self, *arguments)

Trainer._step = failing
from mpiring.train.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(write_npz(tmp_path / "data.npz", 45))


def test_the_defaults_learn_the_digits(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    out = tmp_path / "out.json"
    done = launch(2, [*TRAIN, "--json", str(out)]).check()
    assert done.stderr == ""
    assert "digits: 1,442 samples, MLP 64-512-512-10 (301,066 parameters, float32)" in done.stdout
    assert done.stdout.count("\nepoch ") == 20
    results = json.loads(out.read_text())
    assert results["test_accuracy"] >= 0.97
    assert results["replicas_identical"] is True


def test_an_exception_on_one_rank_ends_all(mpi: Installation, data: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = launch(3, ["-c", FAILS, *TINY, "--data", data, "--json", str(out)], mpi=mpi)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("[rank ")]
    assert lines[0] == "[rank 1] Traceback (most recent call last):"
    assert lines[-1] == "[rank 1] ValueError: on purpose"
    assert all(line.startswith("[rank 1] ") for line in lines)
    assert "Traceback" not in done.stderr.replace(lines[0], "")
    assert not out.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_and_no_torn_file(
    mpi: Installation, number: signal.Signals, data: str, tmp_path: Path
) -> None:
    # An epoch takes a millisecond or two, so that the file is being written nearly always.
    saved = tmp_path / "saved"
    argv = [*TRAIN, *TINY, "--data", data, "--epochs", "1000000", "--save", str(saved)]
    with Job(2, argv, mpi=mpi) as job:
        job.wait_for("epoch      20/")
        job.send(number, group=number is signal.SIGINT)
        done = job.finish()
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    with np.load(saved) as file:
        assert file["epochs"] >= 19


def test_long_lines_of_eight_ranks_stay_whole(mpi: Installation) -> None:
    program = """
        from mpi4py import MPI
        from mpiring.train import ranks

        class Deaf:  # says what it would, and goes on
            Get_rank = MPI.COMM_WORLD.Get_rank
            def Abort(self, code): pass

        for _ in range(3):
            try:
                raise ValueError("\\n".join(f"{line} " + "x" * 700 for line in range(9)))
            except ValueError:
                ranks.abort(Deaf())
        """
    done = launch(8, ["-c", textwrap.dedent(program)], mpi=mpi).check()
    lines = done.stderr.splitlines()
    assert all(re.match(r"\[rank \d\] ", line) for line in lines)
    for rank in range(8):
        ends = [line for line in lines if line.startswith(f"[rank {rank}] ") and "xxx" in line]
        whole = [f"[rank {rank}] {'' if i else 'ValueError: '}{i} {'x' * 700}" for i in range(9)]
        assert ends == whole * 3


def test_help_is_printed_once() -> None:
    done = launch(3, [*TRAIN, "--help"]).check()
    assert done.stdout.count("usage: ") == 1
    assert done.stderr == ""


def test_a_progress_thread_needs_an_mpi_for_threads(data: str) -> None:
    argv = [*TRAIN, *TINY, "--data", data, "--progress", "thread"]
    done = launch(2, argv, env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
    assert done.returncode == 2
    assert done.stderr.count("progress: 'thread' needs MPI_THREAD_MULTIPLE") == 1
    assert done.stderr.startswith("mpiring.train: ") and done.stderr.count("\n") == 1


@dataclass(frozen=True)
class Mixed(Installation):
    """The launcher of one MPI, and Python with another."""

    other: str = ""

    @property
    def python(self) -> str:
        return self.other


@pytest.mark.parametrize(("launcher", "library"), [("mpich", "openmpi"), ("openmpi", "mpich")])
def test_the_launcher_of_another_mpi(launcher: str, library: str) -> None:
    ours, theirs = require(library), require(launcher)
    environment = {**theirs.environment, **ours.environment}
    done = launch(3, TRAIN, mpi=Mixed("mixed", theirs.prefix, environment, other=ours.python))
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("mpiring.train: ")]
    assert len(told) == 1
    assert "started 3 processes" in told[0]
    assert "use the mpirun of the environment that holds mpi4py" in told[0]
    assert "Traceback" not in done.stderr and "Fatal error" not in done.stderr


def without_mpi(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the trainer where mpi4py finds no MPI library."""
    package = tmp_path / "mpi4py"
    package.mkdir()
    (package / "__init__.py").write_text("class rc: pass")
    (package / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    return subprocess.run(
        [sys.executable, *TRAIN, *arguments],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )


def test_without_an_mpi_library(tmp_path: Path) -> None:
    done = without_mpi(tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("mpiring.train: no MPI library (cannot load MPI library): ")
    assert "pip install 'mpiring[mpich]'" in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


def test_help_without_an_mpi_library(tmp_path: Path) -> None:
    done = without_mpi(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "--hidden N,N,..." in done.stdout


def test_threads_are_limited_before_numpy_is_there() -> None:
    program = (
        "import mpiring.train.__main__, os, sys;"
        "assert 'numpy' not in sys.modules; assert os.environ['OMP_NUM_THREADS'] == '1'"
    )
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment["PYTHONPATH"] = str(ROOT)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
