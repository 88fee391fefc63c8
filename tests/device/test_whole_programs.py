"""The CUDA device in whole programs, on real ranks, over a CuPy that works without a GPU.

What only a GPU can get wrong is not seen here: the order of streams is the virtual device's
part, the kernels' text has tests of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.launch import ROOT, launch
from tests.train.conftest import write_npz

WORKING = {"PYTHONPATH": f"{ROOT / 'tests' / 'device' / 'working'}:{ROOT}"}


@pytest.mark.parametrize("job", ["collectives", "safety"])
def test_the_gpu_checks_jobs(job: str, tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    script = str(ROOT / "scripts" / "gpu_job.py")
    options = ["--paths", "staged,direct,peer", "--largest", "1", "--calls", "30"]
    launch(2, [script, job, "--out", str(out), *options], env=WORKING).check()
    found = list(map(json.loads, out.read_text().splitlines()))
    assert not [each for each in found if "failed" in each or each.get("wrong")]
    assert len(found) >= 9


@pytest.mark.parametrize("benchmark", ["allreduce", "reduce_scatter", "allgather"])
def test_benchmarks(benchmark: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    sizes = ["--min", "24", "--max", "60K", "--factor", "50", "--repeats", "3", "--dtype", "int32"]
    options = [*sizes, "--no-in-place", "--json", str(rows)]
    command = ["-m", "bench", benchmark, "--device", "cuda"]
    done = launch(2, [*command, *options], env=WORKING).check()
    assert f"{benchmark}, int32, " in done.stdout and "GPU arrays" in done.stdout
    found = json.loads(rows.read_text())
    assert {row["contender"] for row in found} == {"ring", "persistent", "by-host"}
    assert all(row["correct"] and row["device"] == "cuda" for row in found) and len(found) == 12
    # An MPI that was not seen to read a GPU's memory is not handed any.
    refused = launch(2, [*command, "--contenders", "ring,mpi"], env=WORKING)
    assert refused.returncode == 2 and refused.stderr.count("not seen to read GPU memory") == 1


@pytest.mark.parametrize("path", ["staged", "peer"])
def test_the_trainer_comes_to_the_hosts_weights(path: str, tmp_path: Path) -> None:
    data = write_npz(tmp_path / "data.npz", 100)
    weights = {}
    for device in ("cpu", "cuda"):
        saved = tmp_path / f"{device}.npz"
        command = ["-m", "mpiring.train", "--data", str(data), "--dtype", "float64"]
        options = ["--epochs", "2", "--hidden", "9", "--optimizer", "adam", "--batch-size", "10"]
        done = launch(
            2,
            [*command, *options, "--device", device, "--save", str(saved)],
            env={**WORKING, "MPIRING_GPU_PATH": path},
        ).check()
        assert ("computed by CuPy on GPU 0" in done.stdout) is (device == "cuda")
        assert (f"({path})" in done.stderr) is (device == "cuda")
        with np.load(saved) as file:
            weights[device] = dict(file)
    assert weights["cpu"].keys() == weights["cuda"].keys()
    for name, expected in weights["cpu"].items():
        np.testing.assert_allclose(weights["cuda"][name], expected, rtol=1e-9, atol=1e-12)


def test_nothing_is_left_in_shared_memory() -> None:
    assert not list(Path("/dev/shm").glob("working-cupy-*"))
