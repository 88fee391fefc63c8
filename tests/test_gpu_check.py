"""The GPU check, as far as a machine without a GPU can try it: its steps, and jobs on host arrays.

Other jobs of it run in ``tests/device/test_whole_programs.py``.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
import zipfile
from pathlib import Path

import pytest

from tests.launch import ROOT, launch


@pytest.fixture(scope="module")
def check() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def a_check(check: types.ModuleType, folder: Path, *arguments: str) -> object:
    return check.Check(check.arguments([str(folder), *arguments]), folder)


def test_a_dry_run_names_every_step_and_runs_none(tmp_path: Path) -> None:
    for name in ("impi_rt-1-py3-none-any", "mpich-1-py3-none-any", "mpi4py-1-py3-none-any"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as wheel:
            wheel.writestr("x.data/data/bin/mpiexec", "#!/bin/false")
    script = [str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path), "--dry-run"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    for step in (
        "the GPU, as CuPy sees it",
        "Intel MPI: two ranks",
        "tests of the device, one process",
        "doctor under MPICH",
        "collectives under Intel MPI, 4 ranks --paths staged,peer",
        "safety under MPICH, 2 ranks",
        "leave under MPICH",
        "trainer on cuda under Intel MPI",
        "timing under MPICH, 4 ranks",
        "nccl under MPICH, 4 ranks",
    ):
        assert f"== {step}" in done.stdout
    assert "PASS" not in done.stdout and "FAIL" not in done.stdout


def test_a_step_that_fails_or_hangs_stops_no_other(
    check: types.ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = a_check(check, tmp_path)
    python = [sys.executable, "-c"]
    assert not run.step("bad", [*python, "raise SystemExit(3)"], 20)
    assert not run.step("slow", [*python, "import time; time.sleep(60)"], 0.2)
    assert run.step("good", [*python, "print('well')"], 20)
    assert run.failures == ["bad: exit code 3", "slow: not over after 0 s"]
    assert run.report() == 1
    told = capfd.readouterr().out
    assert "well" in told and "FAIL: 2 after" in told and "  - bad: exit code 3" in told


def test_what_there_was_no_time_for_is_a_failure(check: types.ModuleType, tmp_path: Path) -> None:
    run = a_check(check, tmp_path, "--budget", "0")
    assert not run.step("anything", [sys.executable, "-c", ""], 20)
    assert run.failures == ["anything: not run, the time was used up"]


def test_what_a_job_found_wrong_is_a_failure_even_if_it_ended_well(
    check: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_check(check, tmp_path, "--host")
    (mpi, *_) = check.mpis("", host=True)
    job = tmp_path / "job.py"
    job.write_text(
        "import sys; out = sys.argv[sys.argv.index('--out') + 1]\n"
        'open(out, \'a\').write(\'{"failed": "x is wrong"}\\n{"done": "y"}\\n\')'
    )
    monkeypatch.setattr(check, "JOB", str(job))
    monkeypatch.setattr(check.Mpi, "command", lambda self, ranks=None: [])
    assert run.job(mpi, 2, "safety", 20)
    assert run.failures == ["safety under Intel MPI, 2 ranks: x is wrong"]
    assert {"mpi": "Intel MPI", "done": "y"} in run.found


def test_an_mpi_is_found_before_everything_else(
    check: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usual")
    (mpi, *_) = check.mpis("/x/libcuda.so.1", host=False)
    mpi.prefix = tmp_path
    environ = mpi.environ({"LD_LIBRARY_PATH": "/nccl:/usual"})
    assert environ["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/nccl:/usual"
    assert mpi.environ({})["LD_LIBRARY_PATH"] == f"{tmp_path}/lib:/usual"
    assert environ["I_MPI_ROOT"] == str(tmp_path) and environ["I_MPI_OFFLOAD"] == "1"
    assert environ["I_MPI_OFFLOAD_CUDA_LIBRARY"] == "/x/libcuda.so.1"
    assert environ["PYTHONPATH"].split(":") == [f"{tmp_path}/site", str(ROOT)]


def test_wheels_are_unpacked_as_pip_would(check: types.ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "mpich-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        program = zipfile.ZipInfo("mpich-1.data/data/bin/mpiexec")
        program.external_attr = 0o755 << 16
        wheel.writestr(program, "#!/bin/sh\necho started\n")
        wheel.writestr("mpi4py/__init__.py", "")
    (tmp_path / "mpich-0-py3-none-any.whl").write_text("")
    assert check.newest(tmp_path, "mpich-") == path
    check.unpack(path, tmp_path / "prefix")
    started = subprocess.run([tmp_path / "prefix/bin/mpiexec"], capture_output=True, text=True)
    assert started.stdout == "started\n"
    assert (tmp_path / "prefix/site/mpi4py/__init__.py").exists()


def test_the_tables_hold_what_was_measured(
    check: types.ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"table": "time", "mpi": "MPICH", "ranks": 2, "busbw_gb": 12.5}
    check.tables(
        [
            {"mpi": "MPICH", "table": "machine", "memory_gb": 4000.0, "bus_both_ways_gb": 100.0},
            {**row, "contender": "through host by hand", "mib": 64, "ms": 50.0, "of_bound": None},
            {**row, "contender": "peer", "mib": 64, "ms": 2.0, "of_bound": 0.2},
            {**row, "contender": "peer", "mib": 256, "ms": 1.0, "of_bound": 0.6},
            {**row, "contender": "staged", "mib": 256, "ms": 13.421772, "of_bound": 0.1},
        ]
    )
    told = capsys.readouterr().out
    assert "copies through the host: 25.0 x" in told
    assert "at least 50 % of the bound: 60 %" in told
    assert "at least 80 % of the bus both ways: 80 %" in told
    assert told.count("12.50") == 4


@pytest.mark.parametrize("job", ["leave", "timing"])
def test_the_jobs_run_on_host_arrays(job: str, tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    script = str(ROOT / "scripts" / "gpu_job.py")
    small = ["--largest", "1", "--calls", "50"]
    launch(2, [script, job, "--out", str(out), "--host", *small]).check()
    found = list(map(json.loads, out.read_text().splitlines()))
    assert found and not [each for each in found if "failed" in each or each.get("wrong")]
